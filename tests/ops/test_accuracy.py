"""How far results and gradients are from those in float64 of the very same inputs, at lengths that no block divides.

The bounds are the documented ones: outputs within 2e-5 in float32 and 1e-2 in half precision, log Z within 1e-3 always,
gradients within a few roundings of the largest. "Far" problems have scores up to ±10⁴ that are whole numbers and exact in
every dtype, so that outputs keep those bounds.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support.ops import explicit
from tests.support.ops.explicit import draw, finite
from tests.support.ops.small_tiles import use_small_tiles
from tests.support.rows import every_row, one_in, some_slow

from massieu import ops
from massieu.ops import Partial, fisher, reference, score_tiles

HALF = [torch.bfloat16, torch.float16]
OUTPUT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LEVEL = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
GRADIENT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""In units of the largest entry."""
FAR = 1e-3
"""A log Z of 10⁴ is rounded to 5e-4 in float32, and so are the weights that are formed with it."""


def far_or(kind, dtype, bound):
    """The bound for a dtype, or for scores of 10⁴."""
    return bound if kind != "far" else max(bound, 1e-9 if dtype == torch.float64 else FAR)


def whole(*shape, seed=0):
    """Rows of ±1, ±5 or ±25: dot products of sixteen are whole numbers up to 10⁴."""
    size = torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)[(draw(*shape[:-1], 1, seed=seed).abs() * 2).long() % 3]
    return size * draw(*shape, seed=seed + 20).sign()


def inputs(kind, dtype, length=67, keys=131, heads=2, key_heads=1, size=16, value_size=9):
    make = whole if kind == "far" else draw
    query, key = make(2, heads, length, size, seed=1), make(2, key_heads, keys, size, seed=2)
    if kind == "far":
        query[0, 0, 0], key[0, 0, 0], key[0, 0, 1] = 25.0, 25.0, -25.0
    value = draw(2, key_heads, keys, value_size, seed=3).clamp(-2, 2)
    options = {"scale": 1.0} if kind == "far" else {}
    pairs = (2, heads, length, keys)
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "booleans":
        options["log_weight"] = (draw(*pairs, seed=4) > 0) & (torch.arange(length) != 5)[:, None]
    elif kind == "padding":
        options["log_weight"] = torch.arange(keys) < torch.tensor([100, 37]).view(2, 1, 1, 1)
    elif kind == "weights of keys":
        options["log_weight"] = draw(keys, seed=4).masked_fill(torch.arange(keys) % 5 == 2, -math.inf)
    elif kind == "weights of pairs":
        options["log_weight"] = draw(*pairs, seed=4).where(draw(*pairs, seed=5) > 0, -math.inf)
        options["is_causal"] = True
    elif kind == "window and sink":
        options |= {"window": (40, 3), "sink": draw(heads, seed=6)}
    return [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)], options


def close(found, wanted, bound):
    found, wanted = found.detach(), wanted.detach()
    assert found.isnan().sum() == 0
    same_infinity = (found == wanted) & found.isinf()
    error = torch.where(same_infinity, 0.0, (found.double() - wanted).abs())
    assert float(error.max()) <= bound


def close_gradients(found, wanted, bound):
    for one, other in zip(found, wanted, strict=True):
        close(one, other, bound * max(1e-12, float(other.abs().max())))


def gradients(results, leaves):
    loss = 0.0
    for place, result in enumerate(results):
        loss = loss + (finite(result) * draw(*result.shape, seed=place + 30).to(result.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


KINDS = ["plain", "causal", "booleans", "padding", "weights of keys", "weights of pairs", "window and sink", "far"]


@pytest.mark.medium
@one_in(4, {"dtype": OUTPUT, "kind": KINDS, "backend": ["reference", "fused"]})
def test_attention(kind, backend, dtype, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 25_003)
    leaves, options = inputs(kind, dtype)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = ops.attention(*leaves, backend=backend, **options)
    wanted = explicit.attention(*double, **options)
    assert found.output.dtype == dtype
    assert found.log_partition.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(found.output, wanted[0], OUTPUT[dtype])
    level, slope = far_or(kind, dtype, LEVEL[dtype]), far_or(kind, dtype, GRADIENT[dtype])
    close(found.log_partition, wanted[1], level)
    close_gradients(gradients(found, leaves), gradients(wanted, double), slope)
    alone = ops.log_partition(*leaves[:2], backend=backend, **options)
    close(alone, wanted[1], level)
    wanted = explicit.attention(*double, **options)[1]
    close_gradients(gradients([alone], leaves[:2]), gradients([wanted], double[:2]), slope)


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["reference", "fused"])
@some_slow("dtype", [torch.bfloat16, torch.float32], 1)
def test_attention_over_many_blocks(backend, dtype, monkeypatch):
    """More queries and keys than any tile of the kernel or block of the reference, and a remainder of each."""
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 300_007)
    leaves, options = inputs("causal", dtype, length=780, keys=1061, heads=1, key_heads=1, size=40)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, wanted = ops.attention(*leaves, backend=backend, **options), explicit.attention(*double, **options)
    for one, other, bound in zip(found, wanted, (OUTPUT[dtype], LEVEL[dtype]), strict=True):
        close(one, other, bound)
    close_gradients(gradients(found, leaves), gradients(wanted, double), GRADIENT[dtype])


@pytest.mark.medium
@one_in(3, {"kind": KINDS, "dtype": OUTPUT})
def test_moments_and_covariances(kind, dtype, monkeypatch):
    use_small_tiles(monkeypatch, 2_251)
    monkeypatch.setattr(fisher, "PAIRS_PER_THREAD", 2_251)
    leaves, options = inputs(kind, dtype)
    query, key, value = (leaf.detach() for leaf in leaves)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    with torch.no_grad():
        found = ops.attention_moments(query, key, value, **options)
        for name, wanted in explicit.moments(query, key, value, **options).items():
            # Scores are rounded in units of the largest, variances in units of its square.
            largest = float(wanted.where(wanted.isfinite(), 0.0).abs().max())
            unit = 1.0 if name in ("output", "max_weight", "collision") else max(1.0, largest)
            close(getattr(found, name), wanted, OUTPUT[dtype] if name == "output" else bound * unit)
        vector = draw(*query.shape, seed=8).to(dtype)
        product = ops.fisher_vp(query, key, vector, **options)
        wanted = explicit.fisher_vp(query, key, vector, **options)
    assert product.dtype == dtype
    close(product, wanted, far_or(kind, dtype, OUTPUT[dtype]) * max(1.0, float(wanted.abs().max())))


@one_in(2, {"kind": ["plain", "far"], "dtype": [torch.float32, *HALF]})
def test_merged_blocks(kind, dtype):
    """A dozen parts merged in float32 are as accurate as one call."""
    (query, key, value), options = inputs(kind, dtype)
    cuts = range(0, 131, 11)
    parts = [Partial.of(ops.attention(query, key[:, :, c : c + 11], value[:, :, c : c + 11], **options)) for c in cuts]
    found = parts[0].merge(*parts[1:])
    double = [leaf.detach().double().requires_grad_() for leaf in (query, key, value)]
    wanted = explicit.attention(*double, **options)
    assert found.mean.dtype == torch.float32
    close(found.mean, wanted[0], far_or(kind, dtype, OUTPUT[dtype]))
    close(found.log_partition, wanted[1], far_or(kind, dtype, LEVEL[dtype]))
    ours = gradients([found.mean, found.log_partition], (query, key, value))
    close_gradients(ours, gradients(wanted, double), far_or(kind, dtype, GRADIENT[dtype]))


# --- losses ----------------------------------------------------------------------------------------------------------


@one_in(2, {"dtype": OUTPUT, "kind": ["plain", "biased", "smoothed", "far"]})
def test_linear_cross_entropy(kind, dtype, monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 4_099)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 37)
    make = whole if kind == "far" else draw
    leaves = [make(67, 16, seed=1) / (1 if kind == "far" else 4), make(1009, 16, seed=2), draw(1009, seed=3)]
    if kind == "far":
        leaves[0][0], leaves[1][0], leaves[1][1] = 25.0, 25.0, -25.0
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves[: 3 if kind == "biased" else 2]]
    target = torch.randint(1009, (67,), generator=torch.Generator().manual_seed(4))
    target[::7] = -100
    options = {"label_smoothing": 0.1} if kind == "smoothed" else {}
    bias = dict(zip(("bias",), leaves[2:], strict=False))
    found = ops.linear_cross_entropy(
        *leaves[:2], target, **bias, return_log_partition=True, reduction="none", **options
    )
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = double[0] @ double[1].mT + (double[2] if bias else 0.0)
    wanted = F.cross_entropy(logits, target, reduction="none", **options), torch.logsumexp(logits, -1)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(one, other, far_or(kind, dtype, 1e-12 if dtype == torch.float64 else 2e-5))
    close_gradients(gradients(found, leaves), gradients(wanted, double), far_or(kind, dtype, GRADIENT[dtype]))


@pytest.mark.medium
@one_in(3, {"dtype": OUTPUT, "kind": ["plain", "weighted", "masked", "far"], "symmetric": [False, True]})
def test_info_nce(kind, symmetric, dtype, monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 1_009)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 37)
    make = whole if kind == "far" else draw
    leaves = [make(131, 16, seed=1), make(131, 16, seed=2), make(23, 16, seed=3)]
    if kind == "far":
        leaves[0][0], leaves[1][0], leaves[1][1] = 25.0, 25.0, -25.0
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    weight = {
        "weighted": draw(154, seed=4),
        "masked": (draw(131, 154, seed=4) > 0) & (torch.arange(131) != 5)[:, None],
    }.get(kind)
    temperature = 1.0 if kind == "far" else 0.5
    found = ops.info_nce(
        *leaves[:2], negatives=leaves[2], log_weight=weight, symmetric=symmetric, temperature=temperature,
        return_log_partition=True,
    )  # fmt: skip
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scores = double[0] @ torch.cat(double[1:]).mT / temperature
    own = scores.diagonal()
    tilt = torch.zeros_like(scores)
    if kind == "weighted":
        tilt = tilt + weight
    if kind == "masked":
        tilt = tilt.masked_fill(~weight, -math.inf)
    _, level = explicit.normalised(scores + tilt, tilt > -math.inf)
    losses, levels = [level - own], [explicit.hide(level, tilt > -math.inf)]
    if symmetric:
        back = (tilt if kind == "masked" else torch.zeros_like(tilt))[:, :131].mT
        _, level = explicit.normalised(scores[:, :131].mT + back, back > -math.inf)
        losses.append(level - own)
        levels.append(explicit.hide(level, back > -math.inf))
    seen = [one.where(other > -math.inf, 0.0).mean() for one, other in zip(losses, levels, strict=True)]
    wanted = torch.stack(seen).mean(), torch.stack(levels) if symmetric else levels[0]
    for one, other in zip(found, wanted, strict=True):
        close(one, other, far_or(kind, dtype, 1e-12 if dtype == torch.float64 else 2e-5))
    close_gradients(gradients(found, leaves), gradients(wanted, double), far_or(kind, dtype, GRADIENT[dtype]))


@every_row("dtype", OUTPUT)
def test_metric_losses(dtype, monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 1_009)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 37)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    query, key = (draw(131, 16, seed=n).to(dtype).requires_grad_() for n in (1, 2))
    double = [leaf.detach().double().requires_grad_() for leaf in (query, key)]
    scores = double[0] @ double[1].mT
    wanted = (torch.logsumexp(scores, 1) - scores.diagonal()).mean()
    found = ops.n_pairs(query, key)
    close(found, wanted, bound)
    close_gradients(gradients([found], (query, key)), gradients([wanted], double), GRADIENT[dtype])

    labels = torch.arange(131) // 3
    point = (draw(131, 5, seed=3) + 100).to(dtype).requires_grad_()
    exact = point.detach().double().requires_grad_()
    distance = -(exact.unsqueeze(1) - exact).square().sum(-1)
    others = ~torch.eye(131, dtype=torch.bool)
    p, level = explicit.normalised(distance, others)
    share = torch.where(others & (labels[:, None] == labels), p, 0.0).sum(-1)
    wanted = -share[share > 0].log().mean(), level
    found = ops.nca(point, labels, return_log_partition=True)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, bound * (1 + float(distance.detach().abs().max())))
    close_gradients(gradients(found, [point]), gradients(wanted, [exact]), 10 * GRADIENT[dtype])
