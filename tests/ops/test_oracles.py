"""Attention, log Z and moments against textbook formulas in float64 written out here, gradients included."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.ops.explicit import log_partition_room
from tests.support.rows import every_row, one_in

from massieu import ops


def textbook(query, key, value=None, log_weight=None, scale=None, is_causal=False, softcap=None):
    """Everything from explicitly formed weights, float64; rows that see no key are handled by where."""
    query, key = query.double(), key.double()
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length, keys = scores.shape[-2:]
    weight = torch.zeros_like(scores)
    if log_weight is not None:
        if log_weight.dtype == torch.bool:
            log_weight = torch.zeros(log_weight.shape).masked_fill(~log_weight, -math.inf)
        weight = log_weight.double().expand_as(scores)
    if is_causal:
        weight = weight.masked_fill(~torch.ones(length, keys, dtype=torch.bool).tril(), -math.inf)
    visible = weight > -math.inf
    some = visible.any(-1)
    unnormalised = torch.where(visible, scores + weight, -math.inf)
    log_z = torch.logsumexp(torch.where(some[..., None], unnormalised, 0.0), -1).masked_fill(~some, -math.inf)
    p = torch.where(visible, (unnormalised - torch.where(some, log_z, 0.0)[..., None]).exp(), 0.0)
    prior_z = torch.logsumexp(torch.where(some[..., None], weight, 0.0), -1).masked_fill(~some, -math.inf)
    h = torch.where(visible, (weight - torch.where(some, prior_z, 0.0)[..., None]).exp(), 0.0)
    mean, prior_mean = (p * scores).sum(-1), (h * scores).sum(-1)
    found = {
        "log_partition": log_z,
        "entropy": torch.special.entr(p).sum(-1),
        "mean_score": mean,
        "score_variance": (p * (scores - mean[..., None]) ** 2).sum(-1),
        "max_weight": p.amax(-1),
        "collision": (p * p).sum(-1),
        "prior_log_partition": prior_z,
        "prior_mean_score": prior_mean,
        "prior_score_variance": (h * (scores - prior_mean[..., None]) ** 2).sum(-1),
        "max_score": torch.where(visible, scores, -math.inf).amax(-1),
    }
    if value is not None:
        found["output"] = p @ value.double().repeat_interleave(groups, 1)
    return found


def tensors(
    batch=2, heads=4, key_heads=2, length=37, keys=53, size=8, value_size=8, dtype=torch.float32, seed=0, spread=1.0
):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)]
    return [(torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype) for shape in shapes]


def masks(batch, length, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch, 1, length, keys, generator=generator) > 0.3
    kept[0, 0, min(3, length - 1)] = False  # one query sees nothing
    return kept, torch.randn(batch, 1, length, keys, generator=generator).masked_fill(~kept, -math.inf)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "boolean": {"mask": 0},
    "float": {"mask": 1},
    "boolean and causal": {"mask": 0, "is_causal": True},
}


@every_row("backend", ["reference", "fused"])
@every_row("case", CASES)
def test_attention(case, backend):
    options = dict(CASES[case])
    query, key, value = tensors()
    if "mask" in options:
        options["log_weight"] = masks(2, 37, 53)[options.pop("mask")]
    found = ops.attention(query, key, value, backend=backend, **options)
    expected = textbook(query, key, value, **options)
    assert found.log_partition.dtype == torch.float32
    assert torch.allclose(found.output.double(), expected["output"], atol=2e-5)
    assert torch.allclose(found.log_partition.double(), expected["log_partition"], atol=2e-5)
    alone = ops.log_partition(query, key, backend=backend, **options)
    assert torch.allclose(alone.double(), expected["log_partition"], atol=2e-5)


@one_in(3, {"dtype": [torch.float32, torch.float64], "backend": ["reference", "fused"], "case": CASES})
def test_gradients_for_both_results(case, backend, dtype):
    options = dict(CASES[case])
    arguments = tensors(dtype=dtype)
    if "mask" in options:
        options["log_weight"] = masks(2, 37, 53)[options.pop("mask")]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 4, 37, 8, generator=generator), torch.randn(2, 4, 37, generator=generator)

    def loss(output, log_z):
        log_z = torch.where(log_z > -math.inf, log_z, 0.0)
        return (output * weights[0]).sum() + (log_z * weights[1]).sum()

    ours = [t.clone().requires_grad_() for t in arguments]
    loss(*ops.attention(*ours, backend=backend, **options)).backward()
    double = [t.double().requires_grad_() for t in arguments]
    wanted = textbook(*double, **options)
    loss(wanted["output"], wanted["log_partition"]).backward()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for a, b in zip(ours, double, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.double(), b.grad, atol=tolerance * float(b.grad.abs().max().clamp_min(1)))


@every_row("dtype", [torch.float32, torch.float64])
@every_row("case", CASES)
def test_gradient_of_log_partition_alone(case, dtype):
    options = dict(CASES[case])
    query, key, _ = tensors(dtype=dtype)
    if "mask" in options:
        options["log_weight"] = masks(2, 37, 53)[options.pop("mask")]
    ours = [t.clone().requires_grad_() for t in (query, key)]
    log_z = ops.log_partition(*ours, **options)
    torch.where(log_z > -math.inf, log_z, 0.0).square().sum().backward()
    double = [t.double().requires_grad_() for t in (query, key)]
    wanted = textbook(*double, **options)["log_partition"]
    torch.where(wanted > -math.inf, wanted, 0.0).square().sum().backward()
    for a, b in zip(ours, double, strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad.isfinite().all()
        assert torch.allclose(a.grad.double(), b.grad, atol=5e-5 * float(b.grad.abs().max()))


def test_gradients_of_log_weight_and_of_a_tensor_scale():
    query, key, value = tensors(dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for shape in ((2, 1, 1, 53), (2, 4, 37, 53), (1, 4, 1, 53)):
        weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
        scale = torch.tensor(0.4, dtype=torch.float64)
        ours = [weight.clone().requires_grad_(), scale.clone().requires_grad_()]
        output, log_z = ops.attention(query, key, value, log_weight=ours[0], scale=ours[1])
        (output.square().sum() + log_z.sum()).backward()
        theirs = [weight.clone().requires_grad_(), scale.clone().requires_grad_()]
        wanted = textbook(query, key, value, log_weight=theirs[0], scale=theirs[1])
        (wanted["output"].square().sum() + wanted["log_partition"].sum()).backward()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_first_and_second_derivatives_by_finite_differences(backend):
    query, key, value = (t.requires_grad_() for t in tensors(1, 2, 1, 3, 4, 2, 2, torch.float64))

    def function(q, k, v):
        return tuple(ops.attention(q, k, v, backend=backend))

    check_derivatives(function, (query, key, value))
    check_derivatives(lambda q, k: ops.log_partition(q, k, backend=backend), (query, key))


def test_forward_mode_and_vmap():
    query, key, value = tensors(dtype=torch.float64)
    direction = torch.ones_like(query)
    found = torch.func.jvp(lambda q: tuple(ops.attention(q, key, value)), (query,), (direction,))[1]
    wanted = torch.func.jvp(
        lambda q: tuple(textbook(q, key, value)[n] for n in ("output", "log_partition")), (query,), (direction,)
    )[1]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)
    stacked = torch.stack([query, 2 * query])
    mapped = torch.func.vmap(lambda q: ops.log_partition(q, key))(stacked)
    assert torch.allclose(mapped[1], textbook(2 * query, key)["log_partition"], atol=1e-9)


@one_in(3, {"backend": ["reference", "blocks"], "softcap": [None, 1.5], "case": CASES})
def test_moments(case, softcap, backend):
    options = dict(CASES[case])
    query, key, value = tensors(spread=1.7)
    if "mask" in options:
        options["log_weight"] = masks(2, 37, 53)[options.pop("mask")]
    found = ops.attention_moments(query, key, value, softcap=softcap, backend=backend, **options)
    expected = textbook(query, key, value, softcap=softcap, **options)
    some = expected["log_partition"] > -math.inf
    for name, wanted in expected.items():
        ours = getattr(found, name).double()
        assert not ours.isnan().any(), name
        where = some if ours.dim() == 3 else some[..., None].expand_as(ours)
        assert torch.allclose(ours[where], wanted[where], atol=1e-4, rtol=1e-4), name
    assert (found.output[~some] == 0).all()
    assert (found.entropy[~some] == 0).all()
    assert (found.log_partition[~some] == -math.inf).all()


def test_selective_log_partition_is_a_divergence():
    """KL(h‖p) = log Z − log Σw − Σ h s, by the definition of the divergence, with log-weights."""
    query, key, _ = tensors(spread=2.0)
    weight = torch.randn(2, 1, 1, 53)
    m = ops.attention_moments(query, key, log_weight=weight)
    scores = (query.double() @ key.double().repeat_interleave(2, 1).mT) * 8**-0.5
    h, p = torch.softmax(weight.double(), -1), torch.softmax(scores + weight.double(), -1)
    wanted = (h * (h / p).log()).sum(-1)
    assert torch.allclose((m.log_partition - m.prior_log_partition - m.prior_mean_score).double(), wanted, atol=2e-5)


@given(
    length=st.sampled_from([0, 1, 2, 31, 65]), keys=st.sampled_from([0, 1, 3, 64, 130]), size=st.sampled_from([1, 7, 16]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0]), causal=st.booleans(), masked=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_shape(length, keys, size, spread, causal, masked, seed):
    query, key, value = tensors(1, 2, 1, length, keys, size, size + 2, seed=seed, spread=spread)
    options = {"is_causal": causal}
    if masked:
        options["log_weight"] = torch.rand(1, 1, length, keys, generator=torch.Generator().manual_seed(seed)) > 0.5
    output, log_z = ops.attention(query, key, value, **options)
    moments = ops.attention_moments(query, key, value, **options)
    assert output.shape == (1, 2, length, size + 2)
    assert log_z.shape == moments.entropy.shape == (1, 2, length)
    if keys == 0:
        assert (log_z == -math.inf).all()
        assert (output == 0).all()
        return
    expected = textbook(query, key, value, **options)
    known = expected["log_partition"][expected["log_partition"] > -math.inf].abs()
    size_of_scores = 1 + known.max() if known.numel() else 1
    for found in (log_z, moments.log_partition):
        assert torch.allclose(found.double(), expected["log_partition"], atol=2e-6 * float(size_of_scores) + 2e-5)
    assert torch.allclose(
        output.double(), expected["output"], atol=(2e-6 * float(size_of_scores) + 2e-5) * max(spread, 1)
    )


@every_row("dtype", [torch.bfloat16, torch.float16])
@every_row("backend", ["reference", "fused"])
def test_half_precision_keeps_log_z_in_float32(dtype, backend):
    query, key, value = tensors(dtype=dtype)
    output, log_z = ops.attention(query, key, value, backend=backend)
    expected = textbook(query, key, value)
    assert output.dtype == dtype
    assert log_z.dtype == torch.float32
    # Weights that are rounded, and the result: a half unit each of the largest value.
    room = torch.finfo(dtype).eps * float(value.abs().max())
    assert torch.allclose(output.double(), expected["output"], rtol=0, atol=room)
    room = log_partition_room(dtype, expected["log_partition"])
    assert torch.allclose(log_z.double(), expected["log_partition"], rtol=0, atol=room)


def test_huge_scores_stay_finite():
    query, key, value = tensors(spread=60.0)
    for t in (query, key, value):
        t.requires_grad_()
    output, log_z = ops.attention(query, key, value, scale=1.0)
    (output.sum() + log_z.sum()).backward()
    assert float(log_z.detach().abs().max()) > 1e4
    for t in (output, log_z, query.grad, key.grad, value.grad):
        assert t is not None and t.isfinite().all()


BAD = [
    (lambda q, k, v: ops.attention(q[0], k, v), ValueError, "shape"),
    (lambda q, k, v: ops.attention(q, k[..., :4], v), ValueError, "8"),
    (lambda q, k, v: ops.attention(q, k, v[:, :, :5]), ValueError, "53"),
    (lambda q, k, v: ops.attention(q, k[:1], v[:1]), ValueError, "2"),
    (lambda q, k, v: ops.attention(q[:, :3], k, v), ValueError, "3"),
    (lambda q, k, v: ops.attention(q.long(), k, v), TypeError, "int64"),
    (lambda q, k, v: ops.attention(q.double(), k, v), TypeError, "float64"),
    (lambda q, k, v: ops.attention(q, k, None), TypeError, "value"),
    (lambda q, k, v: ops.attention(q, k, v, backend="fast"), ValueError, "fast"),
    (lambda q, k, v: ops.attention(q, k, v, log_weight=torch.zeros(2, 4, 36, 53)), ValueError, "36"),
    (lambda q, k, v: ops.attention(q, k, v, log_weight=torch.zeros(52)), ValueError, "52"),
    (lambda q, k, v: ops.attention(q, k, v, log_weight=torch.zeros(53, dtype=torch.long)), TypeError, "int64"),
    (lambda q, k, v: ops.attention(q, k, v, scale=torch.ones(3)), ValueError, "3"),
    (lambda q, k, v: ops.attention(q, k, v, scale="1"), TypeError, "got '"),
    (lambda q, k, v: ops.log_partition(q.numpy(), k), TypeError, "ndarray"),
    (lambda q, k, v: ops.log_partition(q, k, backend="tiles"), ValueError, "blocks"),
    (lambda q, k, v: ops.attention_moments(q, k, softcap=-1.0), ValueError, "-1"),
    (lambda q, k, v: ops.attention_moments(q, k, softcap="2"), TypeError, "got '"),
    (lambda q, k, v: ops.attention_moments(q, k, backend="fused"), ValueError, "fused"),
    (lambda q, k, v: ops.attention_moments(q.requires_grad_(), k, backend="blocks"), ValueError, "blocks"),
]


@every_row(("call", "kind", "words"), BAD)
def test_bad_calls_get_one_sentence(call, kind, words):
    with pytest.raises(kind, match=words) as caught:
        call(*tensors())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_attention_compiles_without_graph_breaks_and_trains():
    query, key, value = (t.requires_grad_() for t in tensors())

    def loss(q, k, v):
        output, log_z = ops.attention(q, k, v)
        return output.square().sum() + log_z.sum()

    eager = torch.autograd.grad(loss(query, key, value), (query, key, value))
    compiled_loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(compiled_loss(query, key, value), (query, key, value))
    for a, b in zip(compiled, eager, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
