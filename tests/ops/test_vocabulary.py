"""Cross-entropy over a vocabulary against `F.cross_entropy` in float64, and against formulas written out here."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu.ops import score_tiles
from massieu.ops.vocabulary import linear_cross_entropy


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that divide no shape of these tests."""
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 12)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 4)


def inputs(tokens=5, size=4, words=7, dtype=torch.float64, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, size), (words, size), (words,)
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64).mul_(spread).to(dtype) for s in shapes]
    target = torch.randint(words, (tokens,), generator=generator)
    return *(tensor.requires_grad_() for tensor in tensors), target


def logits_loss(
    hidden, weight, target, bias=None, z_loss=0.0, reduction="mean", ignore_index=-100, label_smoothing=0.0
):
    logits = hidden @ weight.mT
    logits = logits if bias is None else logits + bias
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = F.cross_entropy(logits.movedim(-1, 1) if logits.ndim > 2 else logits, target, **options)
    kept = target != ignore_index
    square = torch.logsumexp(logits, -1).square()
    levels = {"none": square * kept, "sum": square[kept].sum(), "mean": square[kept].mean()}
    return loss + z_loss * levels[reduction]


def assert_equal(ours, theirs, arguments, atol=1e-12):
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=atol, equal_nan=True)
    cotangent = torch.linspace(-1, 2, ours.numel(), dtype=ours.dtype).reshape(ours.shape) + 0.1
    found = torch.autograd.grad(ours, arguments, cotangent)
    wanted = torch.autograd.grad(theirs, arguments, cotangent)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=atol, equal_nan=True)


@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 11),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from(["none", "sum", "mean"]),
    st.booleans(),
    st.sampled_from([1e-3, 1.0, 1e3]),
    st.sampled_from([(12, 4), (1, 1), (5, 100), (1 << 20, 2048)]),
    st.integers(0, 9),
)
def test_equals_cross_entropy_of_the_logits(
    tokens, size, words, smoothing, z_loss, reduction, with_bias, spread, tile, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        patch.setattr(score_tiles, "TILE_ROWS", tile[1])
        hidden, weight, bias, target = inputs(tokens, size, words, seed=seed, spread=spread)
        target = target.masked_fill(torch.arange(tokens) % 3 == seed % 4, -100)
        options = {"z_loss": z_loss, "reduction": reduction, "label_smoothing": smoothing}
        options |= {"bias": bias} if with_bias else {}
        arguments = (hidden, weight, bias) if with_bias else (hidden, weight)
        ours = linear_cross_entropy(hidden, weight, target, **options)
        # Scores reach 1e6·size, of which log Z, squared by the z-loss, keeps 16 digits.
        scale = max(1.0, spread**2) ** (2 if z_loss else 1) * max(1.0, spread)
        assert_equal(ours, logits_loss(hidden, weight, target, **options), arguments, atol=1e-11 * scale)


def test_the_mean_without_a_token_that_counts_is_nan_as_in_torch():
    hidden, weight, _, target = inputs()
    nothing = torch.full_like(target, -100)
    assert linear_cross_entropy(hidden, weight, nothing).isnan()
    assert F.cross_entropy(hidden @ weight.mT, nothing).isnan()
    assert linear_cross_entropy(hidden, weight, nothing, reduction="sum") == 0
    assert linear_cross_entropy(hidden[:0], weight, target[:0]).isnan()
    assert linear_cross_entropy(hidden[:0], weight, target[:0], reduction="none").shape == (0,)


@every_row("lead", [(), (1,), (2, 3), (2, 0, 3)])
def test_any_leading_shape(lead):
    hidden = torch.randn(*lead, 4, dtype=torch.float64)
    target = torch.randint(7, lead)
    weight = inputs()[1]
    loss, log_z = linear_cross_entropy(hidden, weight, target, reduction="none", return_log_partition=True)
    logits = hidden @ weight.mT
    assert loss.shape == log_z.shape == lead
    assert torch.allclose(log_z, torch.logsumexp(logits, -1))
    assert torch.allclose(loss, log_z - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1))


@pytest.mark.usefixtures("small_tiles")
def test_log_partition_of_every_token_has_its_gradient():
    hidden, weight, bias, target = inputs()
    target[1] = -100
    loss, log_z = linear_cross_entropy(hidden, weight, target, bias=bias, return_log_partition=True)
    wanted = torch.logsumexp(hidden @ weight.mT + bias, -1)
    assert torch.allclose(log_z, wanted)
    both = logits_loss(hidden, weight, target, bias=bias) + wanted.sin().sum()
    assert_equal(loss + log_z.sin().sum(), both, (hidden, weight, bias))


@pytest.mark.medium
@pytest.mark.usefixtures("small_tiles")
def test_derivatives_of_every_kind():
    *arguments, target = inputs()
    target[2] = -100
    options = {"label_smoothing": 0.1, "z_loss": 0.2, "return_log_partition": True}

    def function(hidden, weight, bias):
        return tuple(linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", **options))

    check_derivatives(function, arguments, forward=True, absent_cotangents=True)


def test_hessian_is_the_covariance_of_the_words():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs(tokens=1))
    found = torch.func.hessian(lambda h: linear_cross_entropy(h, weight, target))(hidden)[0, :, 0]
    p = torch.softmax(hidden[0] @ weight.mT, -1)
    centred = weight - p @ weight
    assert torch.allclose(found, (p.unsqueeze(-1) * centred).mT @ centred)


def test_third_derivative_along_a_line_in_forward_mode():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs(tokens=1))

    def along(function):
        return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]

    def loss(t):
        return linear_cross_entropy(hidden + t * hidden.flip(-1), weight, target)

    p, slope = torch.softmax(hidden[0] @ weight.mT, -1), weight @ hidden[0].flip(-1)
    wanted = (p * (slope - p @ slope) ** 3).sum()
    assert torch.allclose(along(along(along(loss)))(hidden.new_zeros(())), wanted)


@every_row("which", [0, 1, 2])
def test_only_one_tensor_wants_a_gradient(which):
    *arguments, target = inputs()
    arguments = [tensor.detach().requires_grad_(place == which) for place, tensor in enumerate(arguments)]
    hidden, weight, bias = arguments
    ours = linear_cross_entropy(hidden, weight, target, bias=bias)
    assert_equal(ours, logits_loss(hidden, weight, target, bias=bias), (arguments[which],))


def test_words_hidden_by_the_bias():
    hidden, weight, bias, _ = inputs()
    hidden_words = torch.arange(7) % 2 == 1
    bias = bias.detach().masked_fill(hidden_words, -math.inf)
    target = torch.tensor([0, 2, 4, 6, 0])
    loss = linear_cross_entropy(hidden, weight, target, bias=bias)
    assert torch.allclose(loss, logits_loss(hidden, weight[::2], target // 2, bias=bias[::2]))
    assert (torch.autograd.grad(loss, weight)[0][hidden_words] == 0).all()


def test_every_word_hidden_is_minus_infinity_with_gradient_zero():
    hidden, weight, _, target = inputs()
    bias = torch.full((7,), -math.inf, dtype=torch.float64)
    _, log_z = linear_cross_entropy(hidden, weight, target, bias=bias, return_log_partition=True)
    assert (log_z == -math.inf).all()
    gradients = torch.autograd.grad(log_z.sum(), (hidden, weight))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores_are_finite(size):
    hidden = torch.full((3, 1), size, requires_grad=True)
    weight = torch.tensor([[-1.0], [0.0], [1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]), reduction="none")
    assert torch.equal(loss, torch.tensor([2.0, 1.0, 0.0]) * 1e4 if size > 0 else torch.tensor([0.0, 1.0, 2.0]) * 1e4)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss.sum(), (hidden, weight)))


def test_a_certain_word_costs_what_is_left_to_the_others():
    """log Z − score keeps the digits that are lost when log Z and the score are rounded one by one."""
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.985]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    score = 1000 * (float(weight[1].double()) - 1)
    assert math.isclose(float(loss), math.log1p(math.exp(score)), abs_tol=6e-8)


@pytest.mark.usefixtures("small_tiles")
@every_row(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_precision(dtype, bound):
    """Results are float32; the gradients of half-precision inputs are rounded once (half a unit: 2⁻⁸, 2⁻¹¹)."""
    hidden, weight, bias, target = inputs(40, 16, 90, dtype=dtype)
    loss, log_z = linear_cross_entropy(hidden, weight, target, bias=bias, return_log_partition=True)
    assert loss.dtype == log_z.dtype == torch.float32
    double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = logits_loss(double[0], double[1], target, bias=double[2])
    assert torch.allclose(loss.double(), wanted, rtol=2e-6)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other in zip(found, torch.autograd.grad(wanted, double), strict=True):
        assert one.dtype == dtype
        # float16's smallest normal number, 6e-5, bounds what its gradients can resolve.
        assert torch.allclose(one.double(), other, rtol=bound, atol=2e-6 * float(other.abs().max()) + 6e-8)


def test_autocast_leaves_the_log_scale_alone():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs(dtype=torch.float32))
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden.bfloat16(), weight, target)
        (gradient,) = torch.autograd.grad(loss, weight)
    wanted = logits_loss(hidden.bfloat16().double(), weight.double(), target)
    assert loss.dtype == gradient.dtype == torch.float32
    assert torch.allclose(loss.double(), wanted, rtol=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, weight)[0].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_strides_do_not_matter():
    hidden, weight, bias, target = inputs(6, 4, 8)
    views = (
        torch.stack([hidden, hidden], 2)[:, :, 1],
        weight.mT.contiguous().mT,
        bias.unsqueeze(1).expand(8, 2)[:, 0],
    )
    words = torch.stack([target, target], 1)[:, 0]
    ours = linear_cross_entropy(views[0], views[1], words, bias=views[2], label_smoothing=0.1)
    assert_equal(ours, logits_loss(hidden, weight, target, bias=bias, label_smoothing=0.1), (hidden, weight, bias))
    expanded = hidden[:1].expand(6, 4)
    assert_equal(
        linear_cross_entropy(expanded, weight, target), logits_loss(expanded, weight, target), (hidden, weight)
    )


@pytest.mark.usefixtures("small_tiles")
def test_vmap_and_gradients_of_each_item():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    hiddens, weights = torch.stack([hidden, -hidden, 2 * hidden]), torch.stack([weight, weight + 1, -weight], 1)
    target[0] = -100

    def mapped(function):
        return torch.func.vmap(function, in_dims=(0, 1, None))(hiddens, weights, target)

    losses = mapped(linear_cross_entropy)
    gradients = mapped(torch.func.grad(linear_cross_entropy, argnums=(0, 1)))
    for item in range(3):
        one, other = hiddens[item].clone().requires_grad_(), weights[:, item].clone().requires_grad_()
        wanted = logits_loss(one, other, target)
        assert torch.allclose(losses[item], wanted)
        for found, right in zip(gradients, torch.autograd.grad(wanted, (one, other)), strict=True):
            assert torch.allclose(found[item], right)


@pytest.mark.slow
def test_compiled_training_step():
    torch._dynamo.reset()
    *arguments, target = inputs(words=40)
    target[1] = -100

    def function(hidden, weight, bias):
        options = {"bias": bias, "label_smoothing": 0.1, "z_loss": 0.1, "return_log_partition": True}
        return linear_cross_entropy(hidden, weight, target, **options)

    loss, log_z = torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    eager = function(*arguments)
    assert_equal(loss + log_z.sum(), eager.loss + eager.log_partition.sum(), arguments)


@pytest.mark.slow
def test_compiling_a_transform_keeps_the_gradient():
    torch._dynamo.reset()
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    gradient = torch.func.grad(lambda h: linear_cross_entropy(h, weight, target))
    wanted = (torch.softmax(hidden @ weight.mT, -1) - F.one_hot(target, 7)) @ weight / len(hidden)
    assert torch.allclose(torch.compile(gradient, backend="aot_eager", fullgraph=True)(hidden), wanted)


def test_a_target_out_of_range_is_nan_where_its_value_cannot_be_looked_at():
    hidden, weight, _, target = (tensor.detach() for tensor in inputs())
    losses = torch.func.vmap(lambda y: linear_cross_entropy(hidden, weight, y, reduction="none"))(
        torch.stack([target, target + 7])
    )
    assert losses[0].isfinite().all() and losses[1].isnan().all()


def test_on_a_device_without_values():
    hidden, weight, bias, target = (tensor.detach().to("meta") for tensor in inputs())
    loss, log_z = linear_cross_entropy(hidden, weight, target, bias=bias, return_log_partition=True)
    assert loss.shape == () and log_z.shape == (5,) and log_z.device.type == "meta"


def test_nothing_of_tokens_times_words_is_kept():
    hidden, weight, bias, target = inputs(200, 2, 300)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, label_smoothing=0.1, z_loss=0.1)
        torch.autograd.grad(loss, (hidden, weight, bias), create_graph=True)
    assert 600 <= max(sizes) < 1000
