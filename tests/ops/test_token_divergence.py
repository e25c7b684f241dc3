"""The divergence of two models' words, against sums over the vocabulary in float64."""

import math
import sys

import mpmath
import pytest
import torch
import torch.nn.functional as F
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.ops.explicit import draw
from tests.support.rows import every_row
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from massieu import ops
from massieu.ops import score_tiles
from massieu.ops.token_divergence import _phi

token_divergence = sys.modules["massieu.ops.token_divergence"]  # ops has the function of this name

WORDS = 50


def _models(dtype=torch.float64, words=WORDS, lead=(3, 4), apart=1.0):
    hidden, weight = draw(*lead, 8, seed=1), draw(words, 8, seed=2)
    other = torch.cat([hidden + apart * draw(*lead, 8, seed=3), apart * draw(*lead, 3, seed=4)], -1)
    wide = torch.cat([weight + apart * draw(words, 8, seed=5), draw(words, 3, seed=6)], -1)
    return [tensor.to(dtype) for tensor in (hidden, weight, other, wide)]


def _exact(
    hidden, weight, other, wide, *, bias=None, other_bias=None, temperature=1.0, softcap=None, other_softcap=None
):
    logs = []
    for row, column, extra, cap in ((hidden, weight, bias, softcap), (other, wide, other_bias, other_softcap)):
        logits = row.double() @ column.double().mT
        none = torch.zeros(len(column), dtype=torch.bool) if extra is None else extra == -torch.inf
        logits = logits if extra is None else logits + extra.double().masked_fill(none, 0.0)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logs.append(F.log_softmax((logits / temperature).masked_fill(none, -torch.inf), -1))
    log_p, log_q = logs
    return _divergence(log_p, log_q), _divergence(log_q, log_p)


def _divergence(log_p, log_q):
    none = log_p == -torch.inf
    ratio = log_p.masked_fill(none, 0.0) - log_q.masked_fill(none, 0.0)
    return (log_p.exp() * ratio).masked_fill(none, 0.0).sum(-1)


OPTIONS = {
    "plain": {},
    "biases": {"bias": draw(WORDS, seed=7), "other_bias": draw(WORDS, seed=8)},
    "temperature": {"temperature": 0.4},
    "soft caps": {"softcap": 3.0, "other_softcap": 5.0},
    "all": {"bias": draw(WORDS, seed=7), "temperature": 2.5, "other_softcap": 2.0},
}


@pytest.mark.parametrize("name", list(OPTIONS), ids=str)
@pytest.mark.parametrize("tile", [1 << 20, 16], ids=["one tile", "many"])
def test_values_and_gradients(name, tile, monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", tile * 8)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 8)
    monkeypatch.setattr(token_divergence, "BLOCK_PAIRS", tile * 8)
    monkeypatch.setattr(token_divergence, "PART_PAIRS", tile * 4)
    options = {
        key: one.clone().requires_grad_() if isinstance(one, torch.Tensor) else one
        for key, one in OPTIONS[name].items()
    }
    tensors = [tensor.requires_grad_() for tensor in _models()]
    learned = tensors + [one for one in options.values() if isinstance(one, torch.Tensor)]
    grads = draw(3, 4, seed=9), draw(3, 4, seed=10)
    found, exact = ops.token_divergence(*tensors, **options), _exact(*tensors, **options)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found, learned, grads), torch.autograd.grad(exact, learned, grads), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    # Either alone.
    for place in (0, 1):
        alone = torch.autograd.grad(ops.token_divergence(*tensors, **options)[place].sum(), learned, allow_unused=True)
        wanted = torch.autograd.grad(_exact(*tensors, **options)[place].sum(), learned)
        for one, other in zip(alone, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@every_row("apart", [1e-2, 1e-3, 1e-4], ids=str)
def test_models_that_hardly_differ_keep_their_digits(apart):
    """The logits' own rounding is all that is lost: the shift c of a log-probability is known to an ulp of its logit."""
    tensors = [tensor.float() for tensor in _models(apart=apart, words=400)]
    found = ops.token_divergence(*tensors)
    exact = _exact(*tensors)
    for one, other in zip(found, exact, strict=True):
        assert (one >= 0).all()
        size = 40 * torch.finfo(torch.float32).eps  # of logits up to 20
        assert ((one.double() - other).abs() <= 2 * size * other.sqrt() + size**2 + 1e-5 * other).all()
    textbook = _exact(*tensors)[0].float()
    assert textbook.shape == found.divergence.shape


@every_row("apart", [1e-1, 1e-3, 1e-5], ids=str)
@every_row("spread", [0.5, 3.0, 12.0], ids=str)
@every_row("words", [2, 5])
def test_near_equal_models_to_the_rounding_of_their_logits(words, spread, apart):
    """In float64, against 60 digits. What is lost is what the docstring says: δ·Σ|∂KL/∂logit|, and the square of δ."""
    hidden, weight = spread * draw(1, 4, seed=words), draw(words, 4, seed=2)
    other = weight + apart * draw(words, 4, seed=3)
    with mpmath.workdps(60):
        log_p, log_q = (_log_law(hidden[0], columns) for columns in (weight, other))
        exact = _slopes(log_p, log_q), _slopes(log_q, log_p)
    size = 1 + float((hidden.abs() @ torch.maximum(weight.abs(), other.abs()).mT).max())
    rounding = 8 * torch.finfo(torch.float64).eps * size
    found = ops.token_divergence(hidden, weight, hidden, other)
    for number, (wanted, slope) in zip(found, exact, strict=True):
        assert abs(mpmath.mpf(number.item()) - wanted) <= rounding * slope + rounding**2


def _log_law(row, columns):
    """Logarithms of the softmax of row·column, in mpmath's precision."""
    logits = [mpmath.fdot(zip(row.tolist(), column.tolist(), strict=True)) for column in columns]
    level = mpmath.log(mpmath.fsum(mpmath.exp(logit) for logit in logits))
    return [logit - level for logit in logits]


def _slopes(log_p, log_q):
    """KL(p ‖ q), and the sum of the sizes of its derivatives in either model's logits."""
    pairs = list(zip(log_p, log_q, strict=True))
    divergence = mpmath.fsum(mpmath.exp(a) * (a - b) for a, b in pairs)
    own = mpmath.fsum(mpmath.exp(a) * abs(a - b - divergence) for a, b in pairs)
    return divergence, own + mpmath.fsum(abs(mpmath.exp(b) - mpmath.exp(a)) for a, b in pairs)


def test_equal_models_are_no_distance_apart():
    hidden, weight, *_ = (tensor.float() for tensor in _models())
    found = ops.token_divergence(hidden, weight, hidden.clone(), weight.clone())
    assert (found.divergence == 0).all() and (found.reverse_divergence == 0).all()


@every_row("size", [30.0, 1e3, 1e6], ids=str)
def test_models_far_apart(size):
    hidden, weight, other, wide = (tensor.float() for tensor in _models())
    found = ops.token_divergence(size * hidden, weight, other, wide)
    exact = _exact(size * hidden, weight, other, wide)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_hidden_words():
    tensors = _models()
    bias, other = torch.zeros(WORDS, dtype=torch.float64), torch.zeros(WORDS, dtype=torch.float64)
    bias[:3] = other[:3] = -torch.inf
    found, exact = ops.token_divergence(*tensors, bias=bias, other_bias=other), None
    exact = _exact(tensors[0], tensors[1][3:], tensors[2], tensors[3][3:])
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one, two)
    other[5] = -torch.inf  # by q alone
    found = ops.token_divergence(*tensors, bias=bias, other_bias=other)
    assert (found.divergence == torch.inf).all()
    torch.testing.assert_close(found.reverse_divergence, _exact(*tensors, bias=bias, other_bias=other)[1])
    learned = [tensor.requires_grad_() for tensor in tensors]
    gradients = torch.autograd.grad(
        ops.token_divergence(*learned, bias=bias, other_bias=other).reverse_divergence.sum(), learned
    )
    wanted = torch.autograd.grad(_exact(*learned, bias=bias, other_bias=other)[1].sum(), learned)
    for one, two in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, two)
    nothing = torch.full((WORDS,), -torch.inf, dtype=torch.float64)
    assert all(part.isnan().all() for part in ops.token_divergence(*tensors, bias=nothing))


def test_nan_stays_with_its_token():
    hidden, *rest = _models()
    hidden[1, 2] = torch.nan
    for part in ops.token_divergence(hidden, *rest):
        assert part.isnan().nonzero().tolist() == [[1, 2]]


@every_row("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_promoted(dtype):
    tensors = [tensor.requires_grad_() for tensor in _models(dtype)]
    found, exact = ops.token_divergence(*tensors), _exact(*tensors)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(found.divergence.sum(), tensors)
    for one, other in zip(gradients, torch.autograd.grad(exact[0].sum(), tensors), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_second_derivatives_and_transforms():
    hidden, weight, other, wide = _models(words=5, lead=(2,))
    tensors = [tensor.requires_grad_() for tensor in (hidden, weight, other, wide)]
    function = lambda *given: tuple(ops.token_divergence(*given, softcap=4.0))  # noqa: E731
    check_derivatives(function, tensors)
    stacked = torch.func.vmap(function)(*(torch.stack([tensor, tensor + 1]) for tensor in tensors))
    torch.testing.assert_close(stacked[0][1], function(*(tensor + 1 for tensor in tensors))[0])
    tangent = torch.func.jvp(function, tuple(tensors), tuple(tensors))[1]
    step = 1e-6
    moved = function(*((1 + step) * tensor for tensor in tensors))
    torch.testing.assert_close(tangent[0], (moved[0] - function(*tensors)[0]) / step, rtol=1e-4, atol=1e-4)


@every_row("learned", [(True, False), (False, True), (True, True)], ids=str)
def test_a_model_that_is_not_learned_costs_no_gradient(learned, monkeypatch):
    products = []
    add_product_ = token_divergence._add_product_
    monkeypatch.setattr(token_divergence, "_add_product_", lambda *given: products.append(1) or add_product_(*given))
    tensors = [tensor.requires_grad_(learned[place // 2]) for place, tensor in enumerate(_models())]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(torch.stack(ops.token_divergence(*tensors)).sum(), wanted)
    for one, other in zip(gradients, torch.autograd.grad(torch.stack(_exact(*tensors)).sum(), wanted), strict=True):
        torch.testing.assert_close(one, other)
    assert len(products) == 2 * sum(learned)


def _products(function, *shape):
    """Matrix products of this shape, by the operations that are counted."""
    in_place = {torch.ops.aten.addmm_: lambda total, one, other, **_: 2 * math.prod(one) * other[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function()
    return counter.get_total_flops() / (2 * math.prod(shape))


@every_row("kept", [10, 4, 0], ids=str)
def test_two_products_forwards_and_six_backwards_for_the_tokens_that_count(kept):
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((10, 16), (30, 16)) * 2]
    target = torch.zeros(10, dtype=torch.long).index_fill(0, torch.arange(kept, 10), -100)
    share = kept / 10
    with torch.no_grad():
        assert _products(lambda: ops.token_divergence(*tensors, target=target), 10, 30, 16) == 2 * share

    def forward_and_backward():
        torch.stack(ops.token_divergence(*tensors, target=target)).sum().backward()

    assert _products(forward_and_backward, 10, 30, 16) == 8 * share


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_ignored_tokens(ignore_index):
    """Zeros and no gradient, and what they hold reaches nothing: not even NaN."""
    options = {"bias": draw(WORDS, seed=7), "other_softcap": 5.0, "temperature": 0.7}
    tensors = _models()
    ignored = torch.zeros(3, 4, dtype=torch.bool)
    ignored[0, :3] = ignored[2, 1] = True
    target = torch.full((3, 4), 5).masked_fill(ignored, ignore_index)
    kept = [tensor[~ignored] if tensor.ndim == 3 else tensor for tensor in tensors]
    for part in (tensors[0], tensors[2]):
        part[ignored] = torch.nan
    tensors, kept = ([tensor.requires_grad_() for tensor in model] for model in (tensors, kept))
    grads = draw(3, 4, seed=9), draw(3, 4, seed=10)

    found = ops.token_divergence(*tensors, **options, target=target, ignore_index=ignore_index)
    exact = _exact(*kept, **options)
    for one, other in zip(found, exact, strict=True):
        assert (one[ignored] == 0).all()
        torch.testing.assert_close(one[~ignored], other, rtol=1e-10, atol=1e-12)
    slopes = torch.autograd.grad(found, tensors, grads)
    wanted = torch.autograd.grad(exact, kept, [grad[~ignored] for grad in grads])
    for place, (one, other) in enumerate(zip(slopes, wanted, strict=True)):
        if place in (0, 2):
            assert (one[ignored] == 0).all()
            one = one[~ignored]
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)

    def masked(*given):
        return tuple(ops.token_divergence(*given, **options, target=target, ignore_index=ignore_index))

    mapped = torch.func.vmap(masked)(*(tensor[None] for tensor in tensors))
    torch.testing.assert_close([part[0] for part in mapped], list(found))
    inside = torch.func.grad(lambda *given: (torch.stack(masked(*given)) * torch.stack(grads)).sum(), (0, 1))
    torch.testing.assert_close(inside(*tensors), slopes[:2])


def test_all_tokens_ignored_and_none():
    hidden, weight, other, wide = (tensor.requires_grad_() for tensor in _models())
    found = ops.token_divergence(hidden, weight, other, wide, target=torch.full((3, 4), -100))
    assert all((part == 0).all() for part in found)
    for gradient in torch.autograd.grad(torch.stack(found).sum(), (hidden, weight, other, wide)):
        assert (gradient == 0).all()
    none = torch.zeros(3, 0, dtype=torch.long)
    assert ops.token_divergence(hidden[:, :0], weight, other[:, :0], wide, target=none).divergence.shape == (3, 0)
    one = ops.token_divergence(hidden[0, 0], weight, other[0, 0], wide, target=torch.tensor(-100))
    assert one.divergence.shape == () and one.divergence == 0


def test_a_word_that_one_model_hides_is_nothing_to_an_ignored_token():
    hidden, weight, other, wide = (tensor.requires_grad_() for tensor in _models())
    bias = torch.zeros(WORDS, dtype=torch.float64).index_fill(0, torch.tensor([3]), -torch.inf)
    target = torch.zeros(3, 4, dtype=torch.long).index_fill(0, torch.tensor([1]), -100)
    found = ops.token_divergence(hidden, weight, other, wide, other_bias=bias, target=target)
    assert (found.divergence[1] == 0).all() and (found.divergence[[0, 2]] == torch.inf).all()
    (gradient,) = torch.autograd.grad(found.reverse_divergence.sum(), hidden)
    assert (gradient[1] == 0).all() and gradient.isfinite().all()


def test_tangents_of_dual_numbers():
    tensors = _models(words=5, lead=(2,))
    options = {"softcap": 3.0, "target": torch.tensor([4, -100])}
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor, tensor.cos()) for tensor in tensors]
        tangents = [forward_ad.unpack_dual(part).tangent for part in ops.token_divergence(*duals, **options)]
    wanted = torch.func.jvp(
        lambda *given: _exact(*given, softcap=3.0), tuple(tensors), tuple(tensor.cos() for tensor in tensors)
    )[1]
    for one, other in zip(tangents, wanted, strict=True):
        assert one[1] == 0
        torch.testing.assert_close(one[0], other[0])


def test_more_words_than_a_block_holds(monkeypatch):
    monkeypatch.setattr(token_divergence, "BLOCK_PAIRS", WORDS // 2)
    tensors = _models()
    torch.testing.assert_close(list(ops.token_divergence(*tensors)), list(_exact(*tensors)))


def test_it_is_the_bregman_divergence_of_log_z():
    """KL(p ‖ q) = A(s_q) − A(s_p) − ∇A(s_p)·(s_q − s_p)."""
    hidden, weight, other, wide = _models()
    s_p, s_q = hidden @ weight.mT, other @ wide.mT
    bregman = s_q.logsumexp(-1) - s_p.logsumexp(-1) - (s_p.softmax(-1) * (s_q - s_p)).sum(-1)
    torch.testing.assert_close(ops.token_divergence(hidden, weight, other, wide).divergence, bregman)


def test_no_tokens():
    hidden, weight, other, wide = _models(lead=(0,))
    assert ops.token_divergence(hidden, weight, other, wide).divergence.shape == (0,)


def test_no_memory_in_tokens_times_words(monkeypatch):

    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 1 << 12)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 64)
    # Logits of both models at a time.
    monkeypatch.setattr(token_divergence, "BLOCK_PAIRS", 1 << 11)
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((110, 4), (300, 4), (110, 4), (300, 4))]
    with LargestTensor() as mode:
        found = ops.token_divergence(*tensors)
        (found.divergence.sum() + found.reverse_divergence.sum()).backward()
    assert mode.numbers <= 1 << 12 < 110 * 300


@pytest.mark.slow
def test_compiled():
    tensors = [tensor.float() for tensor in _models(words=5, lead=(2,))]
    target = torch.tensor([0, -100])
    for options in ({}, {"target": target}):
        compiled = torch.compile(
            lambda *given: tuple(ops.token_divergence(*given, **options)),  # noqa: B023
            backend="aot_eager",
            fullgraph=True,
        )
        for one, other in zip(compiled(*tensors), ops.token_divergence(*tensors, **options), strict=True):
            torch.testing.assert_close(one, other)


def test_the_curvature_of_exp():
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    exact = torch.tensor([math.fsum(value**n / math.factorial(n) for n in range(2, 25)) for value in x.tolist()])
    torch.testing.assert_close(_phi(x), exact.double(), rtol=1e-6, atol=0)


def test_wrong_calls():
    hidden, weight, other, wide = _models()
    words = torch.zeros(3, 4, dtype=torch.long)
    for given, options, error, message in (
        ((hidden, weight[:, :5], other, wide), {}, ValueError, "hidden must have shape"),
        ((hidden, weight, other, wide[:9]), {}, ValueError, "the same words, got 50 and 9"),
        ((hidden[:2], weight, other, wide), {}, ValueError, r"one leading shape, got \(2, 4\) and \(3, 4\)"),
        ((hidden, weight.float(), other, wide), {}, TypeError, "one dtype"),
        ((hidden, weight, other, wide[0]), {}, ValueError, "other_weight must have shape"),
        ((hidden, weight, "x", wide), {}, TypeError, "other_hidden must be"),
        ((hidden, weight, other.to("meta"), wide.to("meta")), {}, ValueError, "device|meta"),
        (
            (hidden, weight, other, wide),
            {"temperature": 0},
            ValueError,
            "temperature must be positive and finite, got 0",
        ),
        ((hidden, weight, other, wide), {"temperature": True}, TypeError, "temperature"),
        ((hidden, weight, other, wide), {"softcap": -1.0}, ValueError, "softcap"),
        ((hidden, weight, other, wide), {"other_softcap": "3"}, TypeError, "softcap"),
        (
            (hidden, weight, other, wide),
            {"bias": torch.zeros(3, dtype=torch.float64)},
            ValueError,
            "bias must have shape",
        ),
        ((hidden, weight, other, wide), {"other_bias": [0.0]}, TypeError, "other_bias must be"),
        ((hidden, weight, other, wide), {"target": words[:2]}, ValueError, "target must have shape"),
        ((hidden, weight, other, wide), {"target": words.double()}, TypeError, "target must be"),
        (
            (hidden, weight, other, wide),
            {"target": words + WORDS},
            ValueError,
            "target must be in 0 … 49 or be ignore_index, -100, got 50",
        ),
        ((hidden, weight, other, wide), {"target": words - 100, "ignore_index": -1}, ValueError, "got -100"),
        ((hidden, weight, other, wide), {"target": words, "ignore_index": True}, TypeError, "ignore_index"),
        (
            (hidden, weight, other, wide),
            {"ignore_index": -1},
            ValueError,
            "ignore_index is for targets, got -1 and no target",
        ),
    ):
        with pytest.raises(error, match=message):
            ops.token_divergence(*given, **options)


def _mixture(share, p, q):
    """π·KL(p ‖ m) + (1 − π)·KL(q ‖ m) and ½Σ|p − q| of explicit probabilities in float64; 0·log 0 is 0."""
    m = share * p + (1 - share) * q
    return share * torch.special.xlogy(p, p / m).sum(-1) + (1 - share) * torch.special.xlogy(q, q / m).sum(-1), (
        p - q
    ).abs().sum(-1) / 2


@pytest.mark.parametrize("share", [0.5, 0.1, 0.95])
def test_the_divergence_through_the_mixture_and_the_total_variation(share):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    hidden, weight, other, wide = draw(2, 3, 4), 3 * draw(17, 4), draw(2, 3, 5), 2 * draw(17, 5)
    bias, other_bias = torch.zeros(17).double(), torch.zeros(17).double()
    bias[3] = other_bias[5] = bias[7] = other_bias[7] = -torch.inf
    target = torch.tensor([[1, 2, -100], [4, 5, 6]])
    leaves = [each.requires_grad_() for each in (hidden, weight, other, wide)]
    options = {"bias": bias, "other_bias": other_bias, "temperature": 0.7}
    found = ops.token_divergence(*leaves, **options, target=target, jensen_shannon=share, total_variation=True)
    p = ((hidden @ weight.mT + bias) / 0.7).softmax(-1)
    q = ((other @ wide.mT + other_bias) / 0.7).softmax(-1)
    p_safe, q_safe = p.masked_fill(bias.isneginf(), 0.0), q.masked_fill(other_bias.isneginf(), 0.0)
    kept = [word for word in range(17) if word != 7]  # what both hide is 0/0
    expected = [each.masked_fill(target == -100, 0.0) for each in _mixture(share, p_safe[..., kept], q_safe[..., kept])]
    torch.testing.assert_close(found.jensen_shannon, expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.total_variation, expected[1], rtol=1e-12, atol=1e-14)
    # Derivatives by differences: those of xlogy at 0 are not finite.
    numbers = lambda *given: ops.token_divergence(*given, **options, jensen_shannon=share, total_variation=True)[2:]  # noqa: E731
    torch.autograd.gradcheck(
        numbers,
        [leaf[..., :2, :].detach().requires_grad_() if leaf is hidden or leaf is other else leaf for leaf in leaves],
    )


def test_a_small_divergence_through_the_mixture_keeps_its_digits():
    """With logits that differ by c it is π·(1 − π)·Var_p(c)/2 and terms of c³."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    c = 1e-4 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    # One hidden dimension with the weight as logits.
    one, weight = torch.ones(1, 1), logits.mT
    other = (logits.double() + c.double()).float().mT
    exact_c = (other - weight).double().squeeze(1)
    p = logits.double().softmax(-1).squeeze(0)
    variance = (p * (exact_c - (p * exact_c).sum()) ** 2).sum()
    found = ops.token_divergence(one, weight, one, other, jensen_shannon=0.3)
    # Logits of size 1 rounded by 2⁻²⁴, beside differences of 1e-4.
    assert found.jensen_shannon.item() == pytest.approx(0.3 * 0.7 * variance.item() / 2, rel=5e-3)
    assert found.total_variation is None


def test_the_divergence_through_the_mixture_is_bounded():
    certain = torch.tensor([[0.0], [-3e4], [-3e4]])
    found = ops.token_divergence(
        torch.ones(1, 1), certain, torch.ones(1, 1), certain.flip(0), jensen_shannon=0.25, total_variation=True
    )
    assert found.jensen_shannon.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-6)
    assert found.total_variation.item() == pytest.approx(1.0)
    for share in (0, 1, 1.5):
        with pytest.raises(ValueError, match="jensen_shannon must be"):
            ops.token_divergence(torch.ones(1, 1), certain, torch.ones(1, 1), certain, jensen_shannon=share)
