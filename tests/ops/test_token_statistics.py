"""What `token_statistics` says of each token, against the logits written out in float64."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow

from massieu import ops
from massieu.ops import score_tiles

statistics_module = sys.modules["massieu.ops.token_statistics"]  # ops has the function of this name

FIELDS = ("log_probability", "entropy", "log_partition", "rank", "largest_probability")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that divide no shape of these tests."""
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 12)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 4)


def inputs(tokens=6, size=4, words=7, dtype=torch.float64, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, size), (words, size), (words,)
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64).mul_(spread).to(dtype) for s in shapes]
    return *(tensor.requires_grad_() for tensor in tensors), torch.randint(words, (tokens,), generator=generator)


def logits_of(hidden, weight, bias=None, temperature=1.0, softcap=None):
    logits = hidden @ weight.mT
    logits = logits if bias is None else logits + bias
    hidden_words = logits == -math.inf
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.where(hidden_words, -math.inf, logits) / temperature


def explicit(logits, target):
    """The five numbers of each token, from its logits; 0·−∞ is 0."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    own = logits.gather(-1, target.unsqueeze(-1))
    entropy = -torch.where(p > 0, p * log_p.where(p > 0, 0.0), 0.0).sum(-1)
    numbers = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), entropy, torch.logsumexp(logits, -1)
    return *numbers, (logits > own).sum(-1), p.detach().amax(-1)


def assert_equal(found, wanted, arguments, atol=1e-12, rtol=1e-9):
    """Values, and the gradients of a sum of the first three with a weight for each token."""
    for name, one, other in zip(FIELDS, found, wanted, strict=True):
        assert one.shape == other.shape, name
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol, equal_nan=True, msg=name)
    weights = torch.linspace(-1, 2, 3 * found[0].numel(), dtype=found[0].dtype).reshape(3, *found[0].shape)
    slopes = [
        torch.autograd.grad(sum((w * part).sum() for w, part in zip(weights, parts[:3], strict=True)), arguments)
        for parts in (found, wanted)
    ]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=10 * atol, rtol=rtol)


@given(
    tokens=st.integers(0, 9),
    size=st.integers(1, 5),
    words=st.integers(1, 11),
    with_bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, 4]),
    softcap=st.sampled_from([None, 0.5, 30]),
    spread=st.sampled_from([1e-3, 1.0, 5.0]),
    tile=st.sampled_from([(12, 4), (1, 1), (5, 100), (1 << 20, 2048)]),
    seed=st.integers(0, 9),
)
def test_equals_the_logits_written_out(tokens, size, words, with_bias, temperature, softcap, spread, tile, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        patch.setattr(score_tiles, "TILE_ROWS", tile[1])
        hidden, weight, bias, target = inputs(tokens, size, words, seed=seed, spread=spread)
        bias = bias if with_bias else None
        found = ops.token_statistics(hidden, weight, target, bias=bias, temperature=temperature, softcap=softcap)
        wanted = list(explicit(logits_of(hidden, weight, bias, temperature, softcap), target))
        wanted[3] = explicit(logits_of(hidden, weight, bias), target)[3]  # where a cap rounds logits to itself too
        assert_equal(found, wanted, (hidden, weight, *([bias] if with_bias else [])), atol=1e-11 * max(1, spread**2))


@every_row("lead", [(), (1,), (2, 3), (2, 0, 3)])
def test_any_leading_shape(lead):
    hidden, target, weight = torch.randn(*lead, 4, dtype=torch.float64), torch.randint(7, lead), inputs()[1]
    found = ops.token_statistics(hidden, weight, target)
    for one, other in zip(found, explicit(hidden @ weight.mT, target), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.medium
@pytest.mark.usefixtures("small_tiles")
@some_slow("softcap", [1.5, None], 1)
def test_derivatives_of_every_kind(softcap):
    *arguments, target = inputs()
    target[2] = -100

    def function(hidden, weight, bias):
        return ops.token_statistics(hidden, weight, target, bias=bias, temperature=0.7, softcap=softcap)[:3]

    check_derivatives(function, arguments, forward=True)


def test_a_temperature_has_its_gradient():
    hidden, weight, bias, target = inputs()
    temperature = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    found = ops.token_statistics(hidden, weight, target, bias=bias, temperature=temperature)
    wanted = explicit(logits_of(hidden, weight, bias, temperature), target)
    assert_equal(found, wanted, (hidden, weight, bias, temperature))


@pytest.mark.medium
def test_a_hidden_word_has_no_part_in_the_temperatures_derivatives():
    """−∞/T is −∞ at every T: as if the word were not there, to second order."""
    hidden, weight, bias, _ = inputs()
    gone = torch.arange(7) % 3 == 2
    target = torch.tensor([0, 1, 3, 4, 6, 0])
    place = torch.cumsum(~gone, 0) - 1
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    arguments = (hidden, weight, bias, temperature)

    def derivatives(numbers):
        loss = sum((part * torch.linspace(-1, 2, 6, dtype=torch.float64)).sin().sum() for part in numbers[:3])
        first = torch.autograd.grad(loss, arguments, create_graph=True)
        return *first, *torch.autograd.grad(sum(part.sin().sum() for part in first), arguments)

    banned = bias.masked_fill(gone, -math.inf)
    found = ops.token_statistics(hidden, weight, target, bias=banned, temperature=temperature)
    seen = logits_of(hidden, weight[~gone], bias[~gone], temperature)
    for one, other in zip(derivatives(found), derivatives(explicit(seen, place[target])), strict=True):
        torch.testing.assert_close(one, other)

    def function(hidden, weight, bias, temperature):
        options = {"bias": bias.masked_fill(gone, -math.inf), "temperature": temperature}
        return ops.token_statistics(hidden, weight, target, **options)[:3]

    check_derivatives(function, arguments, forward=True)


def sure(gaps, dtype=torch.float32):
    """One token for each gap: its first word leads a hundred others by it."""
    gaps = torch.tensor(gaps, dtype=dtype)
    return gaps.unsqueeze(1).requires_grad_(), torch.eye(101, 1, dtype=dtype).requires_grad_()


@every_row("words_a_tile", [200, 7])
def test_nearly_all_on_one_word(words_a_tile):
    """Digits stay: rest r = 100·e^(−gap) gives log p = −log(1 + r) and entropy log(1 + r) + r·gap/(1 + r)."""
    gaps = [2.0, 10.0, 18.0, 30.0, 60.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", words_a_tile * len(gaps))
        hidden, weight = sure(gaps)
        found = ops.token_statistics(hidden, weight, torch.zeros(len(gaps), dtype=torch.int64))
        (slope,) = torch.autograd.grad(found.entropy.sum(), hidden, retain_graph=True)
        (steep,) = torch.autograd.grad(found.log_probability.sum(), hidden)
    gap = torch.tensor(gaps, dtype=torch.float64)
    rest = 100 * (-gap).exp()
    # exp of a number keeps what that number's own rounding leaves.
    near = {"rtol": 2 * max(gaps) * torch.finfo(torch.float32).eps, "atol": 0.0}
    torch.testing.assert_close(found.log_probability.double(), -rest.log1p(), **near)
    torch.testing.assert_close(found.entropy.double(), rest.log1p() + rest * gap / (1 + rest), **near)
    # The derivative in the gap of the entropy: −gap·(the variance of which word, r/(1 + r)²).
    torch.testing.assert_close(slope.squeeze(1).double(), -gap * rest / (1 + rest) ** 2, **near)
    # That of the log-probability: one less the probability.
    torch.testing.assert_close(steep.squeeze(1).double(), rest / (1 + rest), **near)
    assert (found.rank == 0).all() and (found.log_probability < 0).all()


def test_a_log_probability_is_never_above_0():
    for seed in range(5):
        hidden, weight, bias, target = inputs(200, 16, 30, dtype=torch.float32, seed=seed, spread=4.0)
        found = ops.token_statistics(hidden, weight, target, bias=bias, softcap=3.0)
        assert (found.log_probability <= 0).all() and (found.entropy >= 0).all()
        assert ((found.largest_probability > 0) & (found.largest_probability <= 1)).all()


@every_row("softcap", [None, 2.0])
def test_hidden_words(softcap):
    """0·−∞ is 0; a hidden target has log-probability −inf; what all words hide has log Z = −inf. No gradient is NaN."""
    hidden, weight, bias, _ = inputs()
    gone = torch.arange(7) % 2 == 1
    bias = bias.detach().masked_fill(gone, -math.inf)
    target = torch.tensor([0, 2, 4, 6, 0, 1])
    found = ops.token_statistics(hidden, weight, target, bias=bias, softcap=softcap)
    assert found.log_probability[5] == -math.inf and found.rank[5] == 4
    gradients = torch.autograd.grad(sum(part.sum() for part in found[:3]), (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)
    found = ops.token_statistics(hidden[:5], weight, target[:5], bias=bias, softcap=softcap)
    assert_equal(
        found,
        explicit(logits_of(hidden[:5], weight[::2], bias[::2], softcap=softcap), target[:5] // 2),
        (hidden, weight),
    )
    nothing = torch.full((7,), -math.inf, dtype=torch.float64, requires_grad=True)
    found = ops.token_statistics(hidden, weight, target, bias=nothing, softcap=softcap)
    assert (found.log_partition == -math.inf).all() and (found.log_probability == -math.inf).all()
    assert all((part == 0).all() for part in (found.entropy, found.rank, found.largest_probability))
    gradients = torch.autograd.grad((found.log_partition + found.entropy).sum(), (hidden, weight, nothing))
    assert all((gradient == 0).all() for gradient in gradients)


def test_second_derivatives_beside_hidden_words():
    hidden, weight, bias, target = inputs()
    bias = bias.detach().masked_fill(torch.arange(7) == 3, -math.inf)
    target = target.masked_fill(target == 3, 4)

    def curvature(function):
        (slope,) = torch.autograd.grad(function().square().sum(), hidden, create_graph=True)
        return torch.autograd.grad(slope.sin().sum(), weight)[0]

    found = curvature(lambda: sum(ops.token_statistics(hidden, weight, target, bias=bias)[:3]))
    kept = [0, 1, 2, 4, 5, 6]
    place = torch.tensor([0, 1, 2, -1, 3, 4, 5])[target]
    wanted = curvature(lambda: sum(explicit(hidden @ weight[kept].mT + bias[kept], place)[:3]))
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("small_tiles")
def test_ranks_count_no_ties_and_not_the_target():
    hidden, weight, _, _ = inputs(6, 33, 9, dtype=torch.float32)
    weight = weight.detach().clone()
    weight[[1, 5, 8]] = weight[3].clone()  # ties with word 3, however a product is rounded
    logits = (hidden.double().unsqueeze(1) * weight.double()).sum(-1)  # equal for equal words
    for word in range(9):
        target = torch.full((6,), word)
        found = ops.token_statistics(hidden, weight, target)
        assert torch.equal(found.rank, (logits > logits[:, word : word + 1]).sum(1))
    assert (ops.token_statistics(torch.zeros(3, 2), torch.randn(5, 2), torch.tensor([0, 2, 4])).rank == 0).all()


def test_ranks_under_a_soft_cap_are_those_before_it():
    """Where the cap is reached, all logits round to it; their order is still that of the scores."""
    hidden, weight = torch.tensor([[100.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    target = torch.tensor([0])
    assert ops.token_statistics(hidden, weight, target, softcap=1.0).rank == 2


def test_ignored_tokens():
    """Zeros, no rank, no gradient, and what they hold reaches nothing: not even NaN."""
    hidden, weight, bias, target = inputs()
    spoilt = hidden.detach().clone()
    spoilt[[1, 4]] = math.nan
    spoilt.requires_grad_()
    target[[1, 4]] = -1
    kept = [0, 2, 3, 5]

    wanted = [part.detach() for part in explicit(logits_of(hidden[kept], weight, bias), target[kept])]
    found = ops.token_statistics(spoilt, weight, target, bias=bias, ignore_index=-1)
    slopes = torch.autograd.grad(sum(part.sum() for part in found[:3]), (spoilt, weight, bias))
    assert (slopes[0][[1, 4]] == 0).all() and all(slope.isfinite().all() for slope in slopes)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[kept].detach(), other)
    mapped = torch.func.vmap(lambda h: ops.token_statistics(h, weight, target, bias=bias, ignore_index=-1))
    for one, other in zip(mapped(spoilt[None]), found, strict=True):
        torch.testing.assert_close(one[0], other)
    nothing = ops.token_statistics(hidden, weight, torch.full_like(target, -100))
    assert all((part == (-1 if part.dtype == torch.int64 else 0)).all() for part in nothing)


def test_nan_stays_with_its_token():
    hidden, weight, bias, target = (tensor.detach() for tensor in inputs())
    wanted = ops.token_statistics(hidden, weight, target, bias=bias)
    hidden = hidden.clone()
    hidden[2, 1] = math.nan
    found = ops.token_statistics(hidden, weight, target, bias=bias, softcap=None)
    for name, one, other in zip(FIELDS, found, wanted, strict=True):
        assert one[2] == -1 if name == "rank" else one[2].isnan()
        rest = torch.arange(6) != 2
        torch.testing.assert_close(one[rest], other[rest])
    assert ops.token_statistics(hidden, weight, target, softcap=2.0).entropy[2].isnan()


@pytest.mark.parametrize("size", [1e4, -1e4, 1e18])
def test_huge_scores(size):
    hidden = torch.full((3, 1), size, requires_grad=True)
    weight = torch.tensor([[-1.0], [0.0], [1.0]], requires_grad=True)
    found = ops.token_statistics(hidden, weight, torch.tensor([0, 1, 2]))
    wanted = [-2.0, -1.0, 0.0] if size > 0 else [0.0, -1.0, -2.0]
    torch.testing.assert_close(found.log_probability, torch.tensor(wanted) * abs(size))
    assert (found.entropy == 0).all() and (found.largest_probability == 1).all()
    gradients = torch.autograd.grad(sum(part.sum() for part in found[:3]), (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.usefixtures("small_tiles")
@every_row(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_precision(dtype, bound):
    """Results are float32; the gradients of half-precision inputs are rounded once (half a unit: 2⁻⁸, 2⁻¹¹)."""
    hidden, weight, bias, target = inputs(40, 16, 90, dtype=dtype)
    found = ops.token_statistics(hidden, weight, target, bias=bias, temperature=0.8, softcap=6.0)
    assert all(part.dtype == torch.float32 for name, part in zip(FIELDS, found, strict=True) if name != "rank")
    double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = explicit(logits_of(*double, 0.8, 6.0), target)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-6, atol=2e-6)
    slopes = [
        torch.autograd.grad(parts[0].sum() + parts[1].sum(), tensors)
        for parts, tensors in ((found, (hidden, weight, bias)), (wanted, double))
    ]
    for one, other in zip(*slopes, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=3e-6 * float(other.abs().max()) + 6e-8)


def test_autocast_leaves_the_log_scale_alone():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ops.token_statistics(hidden.bfloat16(), weight, target)
    wanted = explicit(hidden.bfloat16().double() @ weight.double().mT, target)
    torch.testing.assert_close(found.entropy.double(), wanted[1], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_strides_do_not_matter():
    hidden, weight, bias, target = inputs(6, 4, 8)
    views = torch.stack([hidden, hidden], 2)[:, :, 1], weight.mT.contiguous().mT, bias.unsqueeze(1).expand(8, 2)[:, 0]
    found = ops.token_statistics(views[0], views[1], torch.stack([target, target], 1)[:, 0], bias=views[2])
    assert_equal(found, explicit(logits_of(hidden, weight, bias), target), (hidden, weight, bias))


@pytest.mark.usefixtures("small_tiles")
def test_transforms():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    hiddens = torch.stack([hidden, -hidden, 2 * hidden])

    def entropy(h):
        return ops.token_statistics(h, weight, target).entropy.sum()

    def wanted(h):
        return explicit(h @ weight.mT, target)[1].sum()

    found = torch.func.vmap(torch.func.grad(entropy))(hiddens)
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(wanted))(hiddens))
    torch.testing.assert_close(torch.func.hessian(entropy)(hidden), torch.func.hessian(wanted)(hidden))
    both = (torch.func.jvp(one, (hidden,), (hidden.flip(0),)) for one in (entropy, wanted))
    torch.testing.assert_close(*both)


def test_a_target_out_of_range_where_its_value_cannot_be_looked_at():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    wrong = target.clone()
    wrong[3] = 7
    found = torch.func.vmap(lambda y: ops.token_statistics(hidden, weight, y))(wrong[None])
    right = ops.token_statistics(hidden, weight, target)
    assert found.log_probability[0, 3].isnan() and found.rank[0, 3] == -1
    torch.testing.assert_close(found.entropy[0], right.entropy)


def test_on_a_device_without_values():
    hidden, weight, bias, target = (tensor.detach().to("meta") for tensor in inputs())
    found = ops.token_statistics(hidden, weight, target, bias=bias)
    assert all(part.shape == (6,) and part.device.type == "meta" for part in found)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()

    def function(hidden, weight, bias, target):
        return ops.token_statistics(hidden, weight, target, bias=bias, temperature=0.7, softcap=2.0)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 9):
        *arguments, target = inputs(tokens)
        target[1] = -100
        found, wanted = (one(*arguments, target) for one in (compiled, function))
        assert_equal(found, wanted, arguments)


@pytest.mark.slow
def test_compiling_a_transform_keeps_the_gradient():
    torch._dynamo.reset()
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    gradient = torch.func.grad(lambda h: ops.token_statistics(h, weight, target).entropy.sum())
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager", fullgraph=True)(hidden), gradient(hidden))


def test_nothing_of_tokens_times_words_is_kept():
    hidden, weight, bias, target = inputs(200, 2, 300)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = ops.token_statistics(hidden, weight, target, bias=bias)
        torch.autograd.grad(sum(part.sum() for part in found[:3]), (hidden, weight, bias), create_graph=True)
    assert 600 <= max(sizes) < 1000


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_several_words_and_the_most_probable_one(softcap, monkeypatch):
    """Against log-softmax of all logits in float64."""
    monkeypatch.setattr(statistics_module, "GATHERED", 40)  # blocks of two tokens
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    hidden, weight, bias = draw(2, 4, 5), draw(11, 5), draw(11)
    bias[3] = -torch.inf
    target = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
    words = torch.randint(0, 11, (2, 4, 4), generator=generator)
    words[1, 1, 2] = 3
    leaves = [each.requires_grad_() for each in (hidden, weight)]
    found = ops.token_statistics(
        hidden, weight, target, bias=bias, temperature=0.7, softcap=softcap, words=words, largest_word=True
    )
    logits = hidden @ weight.mT + bias.masked_fill(bias.isneginf(), 0.0)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / 0.7).masked_fill(bias.isneginf(), -torch.inf).log_softmax(-1)
    expected = log_p.gather(-1, words).masked_fill((target == -100).unsqueeze(-1), 0.0)
    torch.testing.assert_close(found.word_log_probability, expected, rtol=1e-12, atol=1e-12)
    assert found.word_log_probability[1, 1, 2] == -torch.inf
    assert torch.equal(found.largest_word, log_p.argmax(-1).masked_fill(target == -100, -1))
    seen = expected.isfinite()
    slopes = [
        torch.autograd.grad(each.masked_fill(~seen, 0.0).square().sum(), leaves)
        for each in (found.word_log_probability, expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)
    alone = ops.token_statistics(hidden, weight, target, bias=bias, temperature=0.7, softcap=softcap)
    assert all(torch.equal(one, other) for one, other in zip(found[:5], alone, strict=True))


def test_words_that_do_not_fit():
    hidden, weight, target = torch.randn(3, 2), torch.randn(5, 2), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"words must have shape \(3, 'K'\) with K at least 1"):
        ops.token_statistics(hidden, weight, target, words=target)
    with pytest.raises(ValueError, match=r"words must be in 0 … 4, got 5"):
        ops.token_statistics(hidden, weight, target, words=torch.tensor([[5]] * 3))
    nothing = torch.full((5,), -torch.inf)
    found = ops.token_statistics(hidden, weight, target, bias=nothing, largest_word=True)
    assert found.largest_word.tolist() == [-1, -1, -1]
    assert found.word_log_probability is None
