"""Layouts, tiles and choices: what a result must not depend on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu import ops
from massieu.ops import moment_blocks, moments


def tensors(batch, heads, key_heads, length, keys, size=4, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, size)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) * spread for shape in shapes]


def explicit(query, key, value, visible):
    """Moments of rows of explicit weights, for queries that see some key."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    tilted = scores.masked_fill(~visible, -math.inf)
    p = torch.softmax(tilted, -1)
    count = visible.double().sum(-1)
    h = visible / count.unsqueeze(-1)
    mean, prior_mean = (p * scores).sum(-1), (h * scores).sum(-1)
    return {
        "output": p @ value,
        "log_partition": torch.logsumexp(tilted, -1),
        "entropy": torch.special.entr(p).sum(-1),
        "mean_score": mean,
        "score_variance": (p * (scores - mean[..., None]).square()).sum(-1),
        "max_weight": p.amax(-1),
        "collision": p.square().sum(-1),
        "prior_log_partition": count.log().expand_as(mean),
        "prior_mean_score": prior_mean,
        "prior_score_variance": (h * (scores - prior_mean[..., None]).square()).sum(-1),
        "max_score": tilted.amax(-1),
    }


@pytest.mark.medium
@given(
    batch=st.integers(1, 4), key_heads=st.integers(1, 3), group=st.integers(1, 3),
    length=st.sampled_from([1, 2, 65, 129]), keys=st.sampled_from([1, 2, 63, 140]), is_causal=st.booleans(),
    capacity=st.sampled_from([1, 500, 40_000, 1 << 20]), mask=st.sampled_from(["none", "left", "right", "window", "any"]),
)  # fmt: skip
def test_tiles_do_not_show(batch, key_heads, group, length, keys, is_causal, capacity, mask):
    query, key, value = tensors(batch, key_heads * group, key_heads, length, keys)
    rows, columns = torch.arange(length)[:, None], torch.arange(keys)
    pads = torch.arange(batch).view(batch, 1, 1, 1)
    keep = {
        "none": None,
        "left": columns >= torch.minimum(pads, torch.tensor(keys - 1)),
        "right": columns < (keys - pads).clamp_min(1),
        "window": ((columns - rows).abs() < 40).expand(batch, 1, length, keys),
        "any": torch.rand(batch, 1, length, keys, generator=torch.Generator().manual_seed(0)) > 0.5,
    }[mask]
    visible = torch.ones(batch, 1, length, keys, dtype=torch.bool) if keep is None else keep
    if is_causal:
        visible = visible & (columns <= rows)
    before = moment_blocks.MOST_PAIRS
    moment_blocks.MOST_PAIRS = capacity
    try:
        found = ops.attention_moments(query, key, value, log_weight=keep, is_causal=is_causal, backend="blocks")
    finally:
        moment_blocks.MOST_PAIRS = before
    some = visible.any(-1).expand(batch, key_heads * group, length)
    assert (found.log_partition[~some] == -math.inf).all()
    assert (found.entropy[~some] == 0).all()
    for name, wanted in explicit(query, key, value, visible).items():
        assert torch.allclose(getattr(found, name)[some], wanted[some], atol=1e-10), name


@every_row("spread", [1.0, 4.0, 30.0])
def test_float32_accuracy_over_a_hundred_nats(spread):
    """Scores that spread over more nats than float32's exponent: the accuracy the documentation states."""
    query, key, value = tensors(1, 2, 2, 200, 300, size=16, spread=1.0)
    query = query * spread
    wanted = explicit(query, key, value, torch.ones(1, 1, 200, 300, dtype=torch.bool))
    found = ops.attention_moments(query.float(), key.float(), value.float(), backend="blocks")
    for name, moment in wanted.items():
        size = (moment + math.log(300) ** 2) if "variance" in name else 1 + spread
        assert ((getattr(found, name).double() - moment).abs() <= 2e-6 * size).all(), name


def test_tiny_variances_of_scores_far_from_zero():
    """A constant in the keys moves every score by thousands of times their spread; no variance is a difference."""
    query, key, value = tensors(1, 1, 1, 50, 80, size=4)
    query = query.abs().float()
    key = (1000 + key * 2**-3).float()
    wanted = explicit(query.double(), key.double(), value, torch.ones(1, 1, 50, 80, dtype=torch.bool))
    found = ops.attention_moments(query, key, backend="blocks")
    rounding = 1000 * 4 * float(query.abs().max()) * 2**-23
    for name in ("score_variance", "prior_score_variance"):
        error = (getattr(found, name).double() - wanted[name]).abs()
        assert (error <= 2 * wanted[name].sqrt() * rounding + rounding**2).all()


def test_hidden_keys_of_any_size_contribute_nothing():
    query, key, value = tensors(1, 2, 2, 6, 5)
    keep = torch.tensor([True, True, False, True, False]).view(1, 1, 1, 5)
    wanted = ops.attention_moments(query, key[:, :, [0, 1, 3]], value[:, :, [0, 1, 3]])
    key[:, :, [2, 4]], value[:, :, [2, 4]] = 1e4, 1e8
    rows = keep & torch.ones(6, 1, dtype=torch.bool)
    for mask in (keep, rows, torch.zeros(1, 1, 1, 5).masked_fill(~keep, -math.inf)):
        for backend in ("reference", "blocks"):
            found = ops.attention_moments(query, key, value, log_weight=mask, backend=backend)
            for ours, theirs in zip(found[:-1], wanted[:-1], strict=True):
                assert torch.allclose(ours, theirs, atol=1e-10)
            assert torch.equal(found.max_position, torch.tensor([0, 1, 3])[wanted.max_position])


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_five_dimensional_queries(backend):
    query, key, value = tensors(2, 6, 2, 5, 7)
    generator = torch.Generator().manual_seed(0)
    weight, scale = torch.randn(2, 6, 5, 7, generator=generator).double(), torch.rand(6, generator=generator).double()
    flat = ops.attention(query, key, value, log_weight=weight, scale=scale, backend=backend)
    grouped = ops.attention(
        query.unflatten(1, (2, 3)), key, value, log_weight=weight.unflatten(1, (2, 3)), scale=scale, backend=backend
    )
    scores = query @ key.repeat_interleave(3, 1).mT * scale.view(6, 1, 1) + weight
    assert torch.allclose(flat.log_partition, torch.logsumexp(scores, -1))
    assert torch.allclose(flat.output, torch.softmax(scores, -1) @ value.repeat_interleave(3, 1))
    assert grouped.output.shape == (2, 2, 3, 5, 4)
    for a, b in zip(flat, grouped, strict=True):
        assert torch.equal(a, b.flatten(1, 2))
    moments = ops.attention_moments(
        query.unflatten(1, (2, 3)), key, log_weight=weight.unflatten(1, (2, 3)), scale=scale
    )
    assert torch.allclose(moments.log_partition.flatten(1, 2), flat.log_partition)


def test_strides_do_not_matter():
    query, key, value = tensors(2, 4, 2, 9, 11)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    columns = [t.mT.contiguous().mT for t in (query, key, value)]
    keep = (torch.arange(9) > 2).view(1, 1, 9, 1).expand(1, 1, 9, 11)
    for log_weight in (None, keep):
        wanted = ops.attention(query, key, value, log_weight=log_weight, backend="reference")
        for given_ in (strided, columns):
            found = ops.attention(*given_, log_weight=log_weight, backend="fused")
            for a, b in zip(found, wanted, strict=True):
                assert torch.allclose(a, b)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_gradients_of_log_partition_do_not_depend_on_strides(backend):
    query, key, _ = tensors(2, 2, 2, 9, 11)
    weights = torch.linspace(-1, 1, 9, dtype=torch.float64)
    p = torch.softmax(query @ key.mT * 4**-0.5, -1) * weights.unsqueeze(-1)
    wanted = p @ key / 2, p.mT @ query / 2
    columns = [t.mT.contiguous().mT.requires_grad_() for t in (query, key)]
    found = torch.autograd.grad((ops.log_partition(*columns, backend=backend) * weights).sum(), columns)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs)


def test_the_choice_of_backend(monkeypatch):
    query, key, value = tensors(1, 2, 2, 4, 5)
    assert ops.moments_backend(query, key, value) == "blocks"
    assert ops.moments_backend(query.requires_grad_(), key) == "reference"
    with torch.no_grad():
        assert ops.moments_backend(query, key) == "blocks"
        monkeypatch.setattr(moments._CompilationGain, "pairs", moments.REPAYING_PAIRS)
        monkeypatch.setattr(moments.moment_blocks, "compiler_exists", lambda device: True)
        assert ops.moments_backend(query, key) == "compiled"
        assert ops.moments_backend(query, key, log_weight=torch.zeros(5)) == "blocks"
        monkeypatch.setattr(moments.moment_blocks, "compiler_exists", lambda device: False)
        assert ops.moments_backend(query, key) == "blocks"
        with pytest.raises(ValueError, match=r"no C\+\+ compiler"):
            ops.attention_moments(query, key, backend="compiled")
