"""Merging results of disjoint key blocks, against attention over all keys written out in float64."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import ops
from massieu.ops.partial import Partial

BATCH, HEADS, LENGTH, SIZE, VALUE = 2, 3, 4, 5, 6


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(keys, dtype=torch.float64):
    shapes = [(BATCH, HEADS, LENGTH, SIZE), (BATCH, HEADS, keys, SIZE), (BATCH, HEADS, keys, VALUE)]
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def explicit(query, key, value, keep=None):
    """log Z and Σ p value from the matrix of scores."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return scores.logsumexp(-1), scores.softmax(-1) @ value


def cut(query, key, value, sizes, keep=None):
    """One Partial for each block of keys."""
    pieces = zip(key.split(sizes, 2), value.split(sizes, 2), strict=True)
    masks = [None] * len(sizes) if keep is None else keep.split(sizes, -1)
    return [Partial.of(ops.attention(query, k, v, log_weight=mask)) for (k, v), mask in zip(pieces, masks, strict=True)]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), order=st.randoms(use_true_random=False))
def test_blocks_in_any_order_are_the_whole(sizes, order):
    query, key, value = problem(sum(sizes))
    parts = cut(query, key, value, sizes)
    order.shuffle(parts)
    merged = parts[0].merge(*parts[1:])
    log_z, mean = explicit(query, key, value)
    torch.testing.assert_close(merged.log_partition, log_z, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(merged.mean, mean, atol=1e-13, rtol=1e-13)


def test_associative_and_commutative_to_rounding():
    query, key, value = problem(9)
    parts = cut(query, key * 20, value, [2, 4, 3])
    found = [functools.reduce(Partial.merge, order) for order in itertools.permutations(parts)]
    found += [parts[0].merge(parts[1].merge(parts[2])), parts[0].merge(*parts[1:])]
    for other in found[1:]:
        torch.testing.assert_close(other.log_partition, found[0].log_partition, atol=1e-12, rtol=1e-13)
        torch.testing.assert_close(other.mean, found[0].mean, atol=1e-12, rtol=1e-13)


@every_row("garbage", [0.0, 1e300, math.inf, math.nan])
def test_a_part_without_a_visible_key_is_the_identity(garbage):
    query, key, value = problem(7)
    whole = Partial.of(ops.attention(query, key, value))
    nothing = Partial(torch.full_like(whole.log_partition, -math.inf), torch.full_like(whole.mean, garbage))
    for merged in (whole.merge(nothing), nothing.merge(whole), nothing.merge(nothing, whole)):
        torch.testing.assert_close(merged.log_partition, whole.log_partition, atol=1e-14, rtol=0)
        torch.testing.assert_close(merged.mean, whole.mean, atol=1e-14, rtol=0)
    none = nothing.merge(nothing)
    assert (none.log_partition == -math.inf).all() and (none.mean == 0).all()
    empty = Partial.empty(whole.log_partition.shape, VALUE, dtype=torch.float64)
    assert torch.equal(empty.merge(empty).log_partition, none.log_partition)


def test_rows_that_see_keys_in_one_block_only_or_in_none():
    query, key, value = (tensor.requires_grad_() for tensor in problem(6))
    keep = torch.ones(LENGTH, 6, dtype=torch.bool)
    keep[0, :4] = False  # the first row sees the second block only
    keep[1, 4:] = False
    keep[2] = False
    first, second = cut(query, key, value, [4, 2], keep)
    merged = first.merge(second)
    some = [0, 1, 3]
    log_z, mean = explicit(query[:, :, some], key, value, keep[some])
    torch.testing.assert_close(merged.log_partition[:, :, some], log_z, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(merged.mean[:, :, some], mean, atol=1e-13, rtol=1e-13)
    assert (merged.log_partition[:, :, 2] == -math.inf).all() and (merged.mean[:, :, 2] == 0).all()
    (merged.mean.square().sum() + merged.log_partition[:, :, some].sum()).backward()
    wanted = torch.autograd.grad(mean.square().sum() + log_z.sum(), (query, key, value))
    for tensor, gradient in zip((query, key, value), wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, atol=1e-12, rtol=1e-12)


def test_a_sink_in_a_partial_result():
    query, key, value = problem(3)
    slot = Partial(query.new_zeros(BATCH, HEADS, LENGTH), query.new_zeros(BATCH, HEADS, LENGTH, VALUE))
    for size in (1.0, -1e4, 1e4):
        part = Partial.of(ops.attention(query.abs(), key.abs() * size, value))
        merged = part.merge(slot)
        scores = torch.cat([query.abs() @ key.abs().mT * size / SIZE**0.5, slot.log_partition.unsqueeze(-1)], -1)
        weights = scores.softmax(-1)
        torch.testing.assert_close(merged.mean, weights[..., :-1] @ value, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(merged.log_partition, scores.logsumexp(-1), atol=1e-12, rtol=1e-13)


@every_row("dim", [0, 1, -1])
def test_merging_along_a_dimension(dim):
    level, mean = draw(3, 4, 2, seed=1), draw(3, 4, 2, VALUE, seed=2)
    level[0, 0] = -math.inf
    merged = Partial(level, mean).reduce(dim)
    torch.testing.assert_close(merged.log_partition, level.logsumexp(dim), atol=1e-14, rtol=1e-14)
    weights = level.softmax(dim)
    weights = weights.nan_to_num(0.0)
    torch.testing.assert_close(merged.mean, (weights.unsqueeze(-1) * mean).sum(dim % 3), atol=1e-14, rtol=1e-14)


def test_merging_no_parts():
    merged = Partial(torch.zeros(0, 3), torch.zeros(0, 3, VALUE)).reduce(0)
    assert (merged.log_partition == -math.inf).all() and merged.mean.shape == (3, VALUE) and not merged.mean.any()


def parts_of(level, mean):
    return Partial(level, mean).reduce(0)


def test_derivatives():
    level = draw(3, 4, seed=1).requires_grad_()
    mean = draw(3, 4, 2, seed=2).requires_grad_()
    check_derivatives(parts_of, (level, mean), forward=True, absent_cotangents=True)
    hidden = level.detach().clone()
    hidden[:, 0] = -math.inf
    hidden[1, 1] = -math.inf

    def with_hidden(level, mean):
        merged = parts_of(level.masked_fill(hidden == -math.inf, -math.inf), mean)
        return merged.log_partition[1:], merged.mean

    check_derivatives(with_hidden, (level, mean))


def test_extreme_log_partitions_have_finite_gradients():
    level = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, 0.0]], requires_grad=True)
    mean = torch.ones(2, 3, 1, requires_grad=True)
    merged = parts_of(level, mean)
    (merged.log_partition.sum() + merged.mean.sum()).backward()
    expected = torch.tensor([[1.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    torch.testing.assert_close(level.grad, expected)
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad.squeeze(-1), expected)


def test_a_constant_in_all_values_costs_no_digits_of_the_gradient():
    level, mean = draw(3, 50, seed=1), draw(3, 50, 2, seed=2)
    moved = (mean.float() + 4096).requires_grad_()
    rounded = moved.detach().double() - 4096
    exact = torch.func.grad(lambda level: parts_of(level, rounded).mean.sum())(level)
    single = level.float().requires_grad_()
    parts_of(single, moved).mean.sum().backward()
    # The merged mean itself is rounded by up to 2^-12; softmax's usual backward has that error in the gradient.
    assert single.grad is not None
    torch.testing.assert_close(single.grad.double(), exact, atol=1e-6, rtol=0)


def total(level, mean):
    merged = parts_of(level, mean)
    return merged.log_partition.sum() + merged.mean.square().sum()


@pytest.mark.medium
def test_under_transforms():
    level, mean = draw(5, 3, 4, seed=1), draw(5, 3, 4, 2, seed=2)
    looped = torch.stack([torch.func.grad(total)(*pair) for pair in zip(level, mean, strict=True)])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(level, mean), looped)


@pytest.mark.slow
def test_compiled():
    gradient, (level, mean) = torch.func.grad(total), (draw(3, 4, seed=1), draw(3, 4, 2, seed=2))
    compiled = torch.compile(gradient, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(level, mean), gradient(level, mean))


def test_half_precision_is_widened_once():
    query, key, value = problem(8, torch.bfloat16)
    part = Partial.of(ops.attention(query, key, value))
    assert part.mean.dtype == part.log_partition.dtype == torch.float32


def test_bad_parts():
    good = Partial(torch.zeros(2, 3), torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match="a part must be a Partial, got tuple"):
        good.merge((good.log_partition, good.mean))
    with pytest.raises(ValueError, match=r"means of one shape, got \(2, 3, 4\) and \(2, 3, 5\)"):
        good.merge(Partial(torch.zeros(2, 3), torch.zeros(2, 3, 5)))
    with pytest.raises(ValueError, match=r"shape of log_partition \(2, 3\) and one more dimension, got \(2, 4\)"):
        Partial(torch.zeros(2, 3), torch.zeros(2, 4)).merge()
    with pytest.raises(TypeError, match=r"float32 or float64, got torch.float16"):
        Partial(torch.zeros(2, 3).half(), torch.zeros(2, 3, 4).half()).merge()
    with pytest.raises(TypeError, match=r"one dtype, got torch.float32 and torch.float64"):
        good.merge(Partial(torch.zeros(2, 3).double(), torch.zeros(2, 3, 4).double()))
    with pytest.raises(TypeError, match=r"mean must be a floating-point tensor, got 1\.0"):
        Partial(torch.zeros(2, 3), 1.0).merge()
    with pytest.raises(ValueError, match=r"dim must be a dimension of the log-partition \(2, 3\), got 2"):
        good.reduce(2)
    with pytest.raises(TypeError, match="dim must be a whole number, got True"):
        good.reduce(True)
