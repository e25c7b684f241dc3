"""Soft-capped scores, c·tanh(s/c), against the formula written out, on every route."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import ops
from massieu.ops import tiles


def tensors(batch=2, heads=4, key_heads=2, length=9, keys=11, size=8, dtype=torch.float64, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, 3)]
    return [(torch.randn(*s, generator=generator, dtype=torch.float64) * spread).to(dtype) for s in shapes]


def capped(query, key, value, softcap, log_weight=0.0, scale=None):
    """Output and log Z; 0 and −inf where no key is seen."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) + log_weight
    none = (scores == -math.inf).all(-1, keepdim=True)
    p = torch.where(none, 0.0, torch.softmax(torch.where(none, 0.0, scores), -1))
    return p @ value, torch.where(none.squeeze(-1), -math.inf, torch.logsumexp(scores, -1))


def close(found, wanted, tolerance=1e-10):
    return all(
        torch.allclose(a.double(), b.double(), atol=tolerance, rtol=0) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.medium
@given(
    batch=st.integers(1, 3), key_heads=st.integers(1, 2), group=st.integers(1, 2), length=st.integers(1, 150),
    keys=st.integers(1, 150), softcap=st.sampled_from([0.3, 5.0, 50]), capacity=st.sampled_from([1, 500, 1 << 18]),
    mask=st.sampled_from(["none", "causal", "window", "boolean", "keys", "pairs"]), learns=st.booleans(),
)  # fmt: skip
def test_any_shape(batch, key_heads, group, length, keys, softcap, capacity, mask, learns):
    query, key, value = tensors(batch, key_heads * group, key_heads, length, keys, spread=2.0)
    generator = torch.Generator().manual_seed(length)
    distance = torch.arange(keys) - torch.arange(length)[:, None]
    weight = torch.randn(*((batch, 1, 1, keys) if mask == "keys" else (length, keys)), generator=generator).double()
    weight = weight.masked_fill(weight < -1, -math.inf)
    seen = {"causal": distance <= 0, "window": (distance >= -40) & (distance <= 30), "boolean": weight > 0}.get(mask)
    options = {
        "none": {}, "causal": {"is_causal": True}, "window": {"window": (40, 30)}, "boolean": {"log_weight": seen},
        "keys": {"log_weight": weight}, "pairs": {"log_weight": weight},
    }[mask]  # fmt: skip
    if mask in ("none", "causal", "window", "boolean"):
        weight = torch.zeros(length, keys, dtype=torch.float64)
        weight = weight if seen is None else weight.masked_fill(~seen, -math.inf)
    wanted = capped(query, key, value, softcap, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "PAIRS_PER_THREAD", capacity)
        found = ops.attention(query.requires_grad_(learns), key, value, softcap=softcap, **options)
        alone = ops.log_partition(query, key, softcap=softcap, **options)
    assert found.output.requires_grad == learns
    assert close(found, wanted)
    assert close([alone], wanted[1:])


def test_derivatives_by_finite_differences():
    inputs = tuple(t.requires_grad_() for t in tensors(1, 2, 1, 2, 3, 2))
    weight = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, w, s):
        return tuple(ops.attention(q, k, v, softcap=1.5, log_weight=w, scale=s))

    check_derivatives(function, (*inputs, weight, scale), forward=True)


@pytest.mark.parametrize("learns", [False, True])
def test_with_everything_else(learns):
    query, key, value = tensors(2, 4, 2, 40, 40)
    sink, scale = torch.linspace(-1, 1, 4, dtype=torch.float64), torch.linspace(0.2, 2, 4, dtype=torch.float64)
    distance = torch.arange(40) - torch.arange(40)[:, None]
    weight = torch.zeros(40, 40, dtype=torch.float64).masked_fill((distance > 0) | (distance < -5), -math.inf)
    found = ops.attention(
        query.requires_grad_(learns), key, value, softcap=3, window=5, is_causal=True, sink=sink, scale=scale
    )
    output, log_z = capped(query, key, value, 3, weight, scale.view(4, 1, 1))
    whole = torch.logaddexp(log_z, sink.view(1, 4, 1).expand_as(log_z))
    assert close(found, (output * (log_z - whole).exp().unsqueeze(-1), whole))


@pytest.mark.parametrize("learns", [False, True])
def test_rows_without_a_key(learns):
    query, key, value = tensors()
    keep = torch.ones(9, 11, dtype=torch.bool)
    keep[3] = keep[7] = False
    keep[5, 4] = False
    for weight in (
        keep,
        torch.zeros(9, 11).masked_fill(~keep, -math.inf),
        torch.ones(9, 11).masked_fill(~keep, -math.inf),
    ):
        floats = weight.double().log() if weight.dtype == torch.bool else weight.double()
        found = ops.attention(query.requires_grad_(learns), key, value, softcap=2.0, log_weight=weight)
        assert close(found, capped(query, key, value, 2.0, floats))
        assert (found.output[:, :, 3] == 0).all()
        assert (found.log_partition[:, :, 3] == -math.inf).all()


@every_row("learns", [False, True])
@every_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_scores_and_precisions(dtype, learns):
    query, key, value = tensors(dtype=dtype)
    query = (query * 1e4).requires_grad_(learns)
    output, log_z = ops.attention(query, key, value, softcap=20.0)
    wanted = capped(query.double(), key.double(), value.double(), 20.0)
    assert output.dtype == dtype
    assert log_z.dtype == torch.float32
    # Products of 1e4 are summed in float32 before they are capped.
    rounding = (
        float((query.detach().float().abs() @ key.float().abs().mT.repeat_interleave(2, 1)).max()) / 8**0.5 * 2**-23
    )
    assert close([output], wanted[:1], 8 * (torch.finfo(dtype).eps + rounding))
    assert close([log_z], wanted[1:], rounding)
    if learns:
        (slope,) = torch.autograd.grad(output.float().sum() + log_z.sum(), query)
        assert slope.isfinite().all()


def test_the_cap_far_away_is_none():
    query, key, value = tensors()
    assert close(ops.attention(query, key, value, softcap=1e6), ops.attention(query, key, value), 1e-9)


@every_row("softcap", [0, -2.0, math.nan, math.inf])
def test_wrong_values(softcap):
    query, key, value = tensors()
    for call in (
        lambda: ops.attention(query, key, value, softcap=softcap),
        lambda: ops.log_partition(query, key, softcap=softcap),
    ):
        with pytest.raises(ValueError, match=f"softcap must be positive and finite, got {softcap}"):
            call()


@every_row("softcap", [True, "2", torch.tensor(2.0)])
def test_wrong_types(softcap):
    query, key, value = tensors()
    with pytest.raises(TypeError, match="softcap must be a number"):
        ops.attention(query, key, value, softcap=softcap)


def test_the_fused_kernel_has_none():
    with pytest.raises(ValueError, match=r"'fused'.*soft cap"):
        ops.attention(*tensors(), softcap=2.0, backend="fused")
