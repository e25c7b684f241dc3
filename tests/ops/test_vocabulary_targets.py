"""Class weights, soft caps and probability targets of the vocabulary's loss, against `F.cross_entropy` in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tests.ops.test_vocabulary import assert_equal, inputs
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in

from massieu import ops
from massieu.ops import score_tiles
from massieu.ops.vocabulary import linear_cross_entropy


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def factors(words):
    weight = torch.linspace(0.5, 2.0, words, dtype=torch.float64)
    weight[words // 2] = 0.0
    return weight


def shares(tokens, words, seed=0):
    """Probabilities, of which some are 0."""
    drawn = torch.rand(tokens, words, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = drawn * (drawn > 0.3)
    return drawn / drawn.sum(-1, keepdim=True).clamp(min=1e-3)


@given(
    tokens=st.integers(1, 9),
    words=st.integers(1, 11),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    softcap=st.sampled_from([None, 0.8, 30]),
    soft=st.booleans(),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    tile=st.sampled_from([(12, 4), (1, 1), (1 << 20, 2048)]),
    seed=st.integers(0, 9),
)
@example(1, 2, 0.1, True, None, False, "mean", (12, 4), 1)  # all the weight is 0, and what is smoothed is not
def test_equals_cross_entropy_of_the_logits(tokens, words, smoothing, weighted, softcap, soft, reduction, tile, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        patch.setattr(score_tiles, "TILE_ROWS", tile[1])
        hidden, weight, bias, target = inputs(tokens, 4, words, seed=seed)
        target = shares(tokens, words, seed) if soft else target.masked_fill(torch.arange(tokens) % 3 == seed % 4, -100)
        factor = factors(words) if weighted else None
        options = {"label_smoothing": smoothing, "reduction": reduction}
        ours = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=factor, softcap=softcap, **options)
        logits = capped(hidden @ weight.mT + bias, softcap)
        wanted = F.cross_entropy(logits, target, weight=factor, **options)
        assert_equal(ours, wanted, (hidden, weight, bias), atol=1e-11)


@every_row("soft", [False, True])
def test_every_other_tensor_has_its_gradient(soft):
    hidden, weight, bias, target = inputs()
    factor = factors(7).requires_grad_()
    target = shares(5, 7).requires_grad_() if soft else target
    wanted_of = (hidden, weight, bias, factor, *([target] if soft else []))
    ours = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=factor, label_smoothing=0.2)
    log_p = torch.log_softmax(hidden @ weight.mT + bias, -1)
    spread = (0.8 * (target if soft else F.one_hot(target, 7)) + 0.2 / 7) * factor
    wanted = -(spread * log_p).sum() / (len(target) if soft else factor[target].sum())
    assert_equal(ours, wanted, wanted_of)


def test_the_z_loss_of_a_token_has_its_words_factor():
    hidden, weight, bias, target = inputs()
    factor, options = factors(7), {"z_loss": 0.3, "return_log_partition": True}
    loss, level = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=factor, softcap=2.0, **options)
    logits = capped(hidden @ weight.mT + bias, 2.0)
    own = F.cross_entropy(logits, target, reduction="none") + 0.3 * logits.logsumexp(-1).square()
    torch.testing.assert_close(level, logits.logsumexp(-1))
    assert_equal(loss, (factor[target] * own).sum() / factor[target].sum(), (hidden, weight, bias))
    soft = linear_cross_entropy(hidden, weight, shares(5, 7), bias=bias, class_weight=factor, z_loss=0.3)
    logits = hidden @ weight.mT + bias
    wanted = F.cross_entropy(logits, shares(5, 7), weight=factor) + 0.3 * logits.logsumexp(-1).square().mean()
    assert_equal(soft, wanted, (hidden, weight, bias))


@every_row("reduction", ["sum", "mean"])
def test_a_word_of_factor_two_counts_as_two_tokens(reduction):
    """The z-loss too, which Liger's kernel leaves unweighted: with it the two calls would not agree."""
    hidden, weight, bias, target = (tensor.detach() for tensor in inputs())
    factor, options = torch.ones(7, dtype=torch.float64), {"bias": bias, "z_loss": 0.3, "reduction": reduction}
    factor[target[1]] = 2.0
    twice = torch.arange(5).repeat_interleave(factor[target].long())
    once = linear_cross_entropy(hidden, weight, target, class_weight=factor, **options)
    torch.testing.assert_close(once, linear_cross_entropy(hidden[twice], weight, target[twice], **options))
    logits = hidden @ weight.mT + bias
    tokens = F.cross_entropy(logits, target, reduction="none") + 0.3 * logits.logsumexp(-1).square()
    wanted = tokens[twice].sum() if reduction == "sum" else tokens[twice].mean()
    torch.testing.assert_close(once, wanted)
    # Liger's: the weighted loss, and the plain mean of (log Z)² beside it, to be had from two calls.
    plain = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=factor, return_log_partition=True)
    liger = plain.loss + 0.3 * plain.log_partition.square().mean()
    assert reduction == "sum" or abs(liger - once) > 1e-3


@every_row("softcap", [None, 2.0])
def test_a_hidden_word_without_a_share_adds_nothing(softcap):
    """F.cross_entropy has NaN there: 0·−∞."""
    hidden, weight, bias, _ = inputs()
    gone = torch.arange(7) % 3 == 1
    bias = bias.detach().masked_fill(gone, -math.inf)
    target = shares(5, 7).masked_fill(gone, 0.0)
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, softcap=softcap, reduction="none")
    logits = capped(hidden @ weight[~gone].mT + bias[~gone], softcap)
    assert_equal(loss, F.cross_entropy(logits, target[:, ~gone], reduction="none"), (hidden, weight))
    target[0, 1] = 0.1
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, softcap=softcap, reduction="none")
    assert loss[0] == math.inf and loss[1:].isfinite().all()
    plain = linear_cross_entropy(hidden, weight, target.requires_grad_(), bias=bias, softcap=softcap, reduction="none")
    torch.testing.assert_close(plain, loss)


def test_a_certain_teacher_costs_what_is_left_to_the_others():
    """Terms of one sign: the loss keeps digits that log Z and the score would lose, each rounded."""
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.985]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([[1.0, 0.0]]))
    score = 1000 * (float(weight[1].double()) - 1)
    assert math.isclose(float(loss), math.log1p(math.exp(score)), abs_tol=6e-8)


@every_row("lead", [(), (1,), (2, 3), (2, 0)])
def test_any_leading_shape(lead):
    hidden, weight = torch.randn(*lead, 4, dtype=torch.float64), inputs()[1]
    target = torch.rand(*lead, 7, dtype=torch.float64).softmax(-1)
    loss, log_z = linear_cross_entropy(hidden, weight, target, reduction="none", return_log_partition=True)
    log_p = torch.log_softmax(hidden @ weight.mT, -1)
    assert log_z.shape == lead
    torch.testing.assert_close(loss, -(target * log_p).sum(-1))


@pytest.mark.medium
@pytest.mark.parametrize("soft", [False, True])
def test_derivatives_of_every_kind(soft):
    *arguments, target = inputs()
    target = shares(5, 7) if soft else target.masked_fill(torch.arange(5) == 2, -100)

    def function(hidden, weight, bias):
        options = {"bias": bias, "class_weight": factors(7), "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.2}
        return linear_cross_entropy(hidden, weight, target, reduction="none", **options)

    check_derivatives(function, arguments, forward=True)


@every_row(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_precision(dtype, bound):
    hidden, weight, bias, _ = inputs(40, 16, 90, dtype=dtype)
    target = shares(40, 90).to(dtype)
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, softcap=5.0)
    double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = F.cross_entropy(capped(double[0] @ double[1].mT + double[2], 5.0), target.double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-6, atol=0.0)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other in zip(found, torch.autograd.grad(wanted, double), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=2e-6 * float(other.abs().max()) + 6e-8)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    *arguments, _ = inputs()

    def function(hidden, weight, bias, target, factor):
        options = {"bias": bias, "class_weight": factor, "softcap": 3.0, "label_smoothing": 0.1}
        return linear_cross_entropy(hidden, weight, target, **options)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    given = (*arguments, shares(5, 7), factors(7))
    assert_equal(compiled(*given), function(*given), arguments)


def test_vmap_over_teachers():
    hidden, weight, _, _ = (tensor.detach() for tensor in inputs())
    targets = torch.stack([shares(5, 7, seed) for seed in range(3)])
    found = torch.func.vmap(lambda t: linear_cross_entropy(hidden, weight, t))(targets)
    torch.testing.assert_close(found, torch.stack([F.cross_entropy(hidden @ weight.mT, t) for t in targets]))


def test_nothing_of_tokens_times_words_is_kept_but_the_target():
    hidden, weight, bias, _ = inputs(200, 2, 300)
    target, sizes = shares(200, 300), []

    def pack(tensor):
        sizes.append(0 if tensor.data_ptr() == target.data_ptr() else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=factors(300), softcap=3.0)
        torch.autograd.grad(loss, (hidden, weight, bias))
    assert 600 <= max(sizes) < 1000


@one_in(2, {"reduction": ["sum", "mean"], "kind": ["words", "words, ignored", "factors", "shares"]})
def test_documents_of_a_packed_row(kind, reduction):
    """Each as a call of its own; one has no tokens, one none that counts."""
    lengths, (hidden, weight, bias, _) = (2, 0, 3, 1), inputs(12)
    target = shares(12, 7) if kind == "shares" else torch.randint(7, (12,), generator=torch.Generator().manual_seed(1))
    if kind == "words, ignored":
        target[[1, 5, 8]] = -100
    options = {"bias": bias, "reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1}
    options |= {"class_weight": factors(7)} if kind == "factors" else {}
    rows = hidden.unflatten(0, (2, 6)), target.unflatten(0, (2, 6))
    found = linear_cross_entropy(rows[0], weight, rows[1], documents=ops.Documents.of_lengths(lengths), **options)
    parts = [
        pair for row in zip(*rows, strict=True) for pair in zip(*(part.split(lengths) for part in row), strict=True)
    ]
    wanted = torch.stack([linear_cross_entropy(h, weight, y, **options) for h, y in parts]).reshape(2, 4)
    assert wanted.isnan().any() == (reduction == "mean")
    torch.testing.assert_close(found, wanted, equal_nan=True)
    counted = wanted.isfinite()
    assert_equal(found[counted], wanted[counted], (hidden, weight, bias))
