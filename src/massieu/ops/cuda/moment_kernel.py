"""The moments of attention's weights in one pass over the keys, in Triton: no score is ever written to memory.

As in FlashAttention, a program has a block of queries, goes through the tiles of keys that they see, and keeps each sum
relative to the largest score so far. Scores are in units of log 2, because the hardware computes powers of two. In half
precision they are sums in float32 of exact products. In float32 each product is three products in TF32, whose relative error
is 2⁻²². Weights are rounded to the values' dtype before they are multiplied by the values.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
from collections.abc import Collection
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops.shapes import AttentionProblem

LEAST_SIZE = 16
"""The narrowest matrices that Triton multiplies."""
NAMES = (
    "log_partition",
    "entropy",
    "mean_score",
    "max_weight",
    "max_score",
    "score_variance",
    "collision",
    "prior_log_partition",
    "prior_mean_score",
    "prior_score_variance",
)
"""The moments in the order in which the kernel writes them; `max_position`, an integer, has a tensor of its own."""
SHAPE = ("score_variance", "collision")
"""Moments that need sums of squares: of weighted scores, and of weights."""
PRIOR = NAMES[-3:]
"""Moments of the scores under equal weights, which need a mean and a spread of their own."""


@triton.jit
def _tile(
    sums, queries, key_at, value_at, keep_at, place, rows, keys, low, high, scale, softcap,
    key_stride, value_stride, keep_stride, size, value_size,
    MASKED: tl.constexpr, KEPT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CAPPED: tl.constexpr,
    SHAPE: tl.constexpr, PRIOR: tl.constexpr, POSITION: tl.constexpr, VALUED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """The sums with one more tile of keys.

    With u = score - top in units of log 2 and w = 2^u, each query has: `top`, the largest score; `total`, the sum of w;
    `first` of w u; `second` of w u^2; `square` of w^2; `mean`, `spread` (the sum of squared deviations) and `count` of the
    scores under equal weights; `position` of the largest score; `product`, the sum of w value.
    """
    top, total, first, second, square, mean, spread, count, position, product = sums
    columns = place + tl.arange(0, KEYS)
    inner = tl.arange(0, SIZE)
    there = columns < keys
    key = tl.load(
        key_at + columns[None, :] * key_stride + inner[:, None], (inner[:, None] < size) & there[None, :], 0.0
    )
    scores = tl.dot(queries, key, input_precision=PRECISION)
    if CAPPED:
        scores *= scale
        # The hyperbolic tangent, 1 - 2/(1 + exp(2x)). Near 0 that difference would lose digits, so there it is its series.
        square_of = scores * scores
        small = scores * (1.0 + square_of * (-1 / 3 + square_of * (2 / 15 - square_of * (17 / 315))))
        large = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2 * 1.4426950408889634)))
        scores = softcap * tl.where(square_of < 0.01, small, large)
        scale = 1.0
    if MASKED or KEPT:
        seen = there[None, :] & (rows[:, None] >= 0)
        if LOW:
            seen = seen & (columns[None, :] >= rows[:, None] + low)
        if HIGH:
            seen = seen & (columns[None, :] <= rows[:, None] + high)
        if KEPT:
            seen = seen & (tl.load(keep_at + columns[None, :] * keep_stride, there[None, :], 0) != 0)
        shown = tl.where(seen, scores, float("-inf"))
    else:
        shown = scores
    # The scale is positive, so only the largest score is scaled here. Below, `scores * scale - shift` is one operation.
    highest = tl.max(shown, 1) * scale
    level = tl.maximum(top, highest)
    if POSITION:
        place_of_highest = place + tl.argmax(shown, 1)
        position = tl.where(highest > top, place_of_highest, position)
    # Earlier sums are relative to `top`, new ones to `level`: each u becomes u + step, with step <= 0, and each w is multiplied
    # by 2^step. A query that has seen no key has a level of -inf and sums of zero; -inf - (-inf) must not reach them.
    none = level == float("-inf")
    step = tl.where(top == float("-inf"), 0.0, top - level)
    change = tl.where(top == float("-inf"), 0.0, tl.exp2(step))
    shift = tl.where(none, 0.0, level)
    below = scores * scale - shift[:, None]
    weights = tl.exp2(below)
    if MASKED or KEPT:
        weights = tl.where(seen, weights, 0.0)
        below = tl.where(seen, below, 0.0)
    # The sums of w (u + step)^2 and w (u + step), from the old sums: `second` before `first`, `first` before `total`.
    if SHAPE:
        second = change * (second + 2.0 * step * first + step * step * total)
        square = change * change * square + tl.sum(weights * weights, 1)
    first = change * (first + step * total)
    total = change * total + tl.sum(weights, 1)
    parts = weights * below
    first += tl.sum(parts, 1)
    if SHAPE:
        second += tl.sum(parts * below, 1)
    if PRIOR:
        if MASKED or KEPT:
            number = tl.sum(tl.where(seen, 1.0, 0.0), 1)
        else:
            number = tl.zeros_like(count) + KEYS
        # Mean and squared deviations of this tile, then merged with the earlier ones (Chan et al.): differences of sums of
        # squares would lose the digits of scores that are far from 0.
        own = shift + tl.sum(below, 1) / tl.maximum(number, 1.0)
        far = below - (own - shift)[:, None]
        if MASKED or KEPT:
            far = tl.where(seen, far, 0.0)
        both = tl.maximum(count + number, 1.0)
        apart = own - mean
        spread += tl.sum(far * far, 1) + apart * apart * (count * (number / both))
        mean += apart * (number / both)
        count += number
    if VALUED:
        outer = tl.arange(0, VALUE_SIZE)
        value = tl.load(
            value_at + columns[:, None] * value_stride + outer[None, :],
            there[:, None] & (outer[None, :] < value_size),
            0.0,
        )
        product = tl.dot(weights.to(value.dtype), value, product * change[:, None], input_precision=PRECISION)
    return level, total, first, second, square, mean, spread, count, position, product


@triton.jit(do_not_specialize=["length", "keys", "low", "high", "key_heads", "group"])
def _summarise(
    query, key, value, keep, output, found, places,
    query_item, query_head, query_group, query_row,
    key_item, key_head, key_row, value_item, value_head, value_row,
    keep_item, keep_head, keep_group, keep_row, keep_key,
    key_heads, group, length, keys, size, value_size, low, high, scale, softcap, unit,
    KEPT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CAPPED: tl.constexpr,
    SHAPE: tl.constexpr, PRIOR: tl.constexpr, POSITION: tl.constexpr, VALUED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """The moments of a block of queries of one head."""
    # Under causality the last queries see the most keys, so their programs start first.
    blocks = tl.cdiv(length, ROWS)
    block = blocks - 1 - tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    item = head // (key_heads * group)
    of_item = head % (key_heads * group)
    key_at = of_item // group
    member = of_item % group
    rows = block * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, SIZE)
    valid = rows < length
    queries = tl.load(
        query + item * query_item + key_at * query_head + member * query_group
        + rows[:, None] * query_row + inner[None, :],
        valid[:, None] & (inner[None, :] < size),
        0.0,
    )  # fmt: skip
    key_from = key + item * key_item + key_at * key_head
    value_from = value + item * value_item + key_at * value_head
    keep_from = keep + item * keep_item + key_at * keep_head + member * keep_group
    keep_from = keep_from + tl.where(valid, rows, 0)[:, None] * keep_row
    zero = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    sums = (
        zero + float("-inf"), zero, zero, zero, zero, zero, zero, zero, tl.full([ROWS], -1, tl.int32), product,
    )  # fmt: skip
    # Keys from `begin` to `end` are seen by some query of the block. Those before `common` are seen by every one, so that
    # their tiles need no mask.
    begin = 0
    end = keys
    common = keys // KEYS * KEYS
    if HIGH:
        end = tl.minimum(keys, block * ROWS + ROWS + high)
        common = tl.minimum(common, tl.maximum(0, block * ROWS + high + 1) // KEYS * KEYS)
    if LOW:
        begin = tl.maximum(0, block * ROWS + low) // KEYS * KEYS
    if LOW or KEPT:
        common = begin
    else:
        for place in range(begin, common, KEYS):
            sums = _tile(
                sums, queries, key_from, value_from, keep_from, place, rows, keys, low, high, scale, softcap,
                key_row, value_row, keep_key, size, value_size,
                False, KEPT, LOW, HIGH, CAPPED, SHAPE, PRIOR, POSITION, VALUED, PRECISION, KEYS, SIZE, VALUE_SIZE,
            )  # fmt: skip
    for place in range(common, end, KEYS):
        sums = _tile(
            sums, queries, key_from, value_from, keep_from, place, rows, keys, low, high, scale, softcap,
            key_row, value_row, keep_key, size, value_size,
            True, KEPT, LOW, HIGH, CAPPED, SHAPE, PRIOR, POSITION, VALUED, PRECISION, KEYS, SIZE, VALUE_SIZE,
        )  # fmt: skip
    top, total, first, second, square, mean, spread, count, position, product = sums
    # A maximum here skips NaN, a sum does not. From here on everything is in nats: `unit` is log 2.
    top = tl.where(total == total, top * unit, float("nan"))
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    mean_below = first / whole * unit
    at = found + head * length + rows
    apart = (tl.num_programs(0) // blocks).to(tl.int64) * length
    tl.store(at, tl.where(none, float("-inf"), top + tl.log(whole)), valid)
    tl.store(at + apart, tl.log(whole) - mean_below, valid)
    tl.store(at + 2 * apart, tl.where(none, 0.0, top + mean_below), valid)
    tl.store(at + 3 * apart, tl.where(none, 0.0, 1.0 / whole), valid)
    tl.store(at + 4 * apart, tl.where(none, float("-inf"), top), valid)
    if SHAPE:
        variance = second / whole * (unit * unit) - mean_below * mean_below
        tl.store(at + 5 * apart, tl.where(variance < 0.0, 0.0, variance), valid)
        tl.store(at + 6 * apart, square / whole / whole, valid)
    if PRIOR:
        blind = count == 0.0
        number = tl.where(blind, 1.0, count)
        tl.store(at + 7 * apart, tl.where(blind, float("-inf"), tl.log(number)), valid)
        tl.store(at + 8 * apart, mean * unit, valid)
        tl.store(at + 9 * apart, spread / number * (unit * unit), valid)
    if POSITION:
        known = (tl.abs(top) < float("inf")) & (none == 0)
        tl.store(places + head * length + rows, tl.where(known, position, -1).to(tl.int64), valid)
    if VALUED:
        outer = tl.arange(0, VALUE_SIZE)
        averaged = product / whole[:, None]
        tl.store(
            output + (head * length + rows[:, None]) * value_size + outer[None, :],
            averaged.to(output.dtype.element_ty),
            valid[:, None] & (outer[None, :] < value_size),
        )


def moments(problem: AttentionProblem, names: Collection[str]) -> dict[str, Tensor]:
    """The moments of these names ``(B, Hk, G, L)``, and for a problem with values the ``output (B, Hk, G, L, E)``.

    Args:
        problem: Its scale is a positive number, its log-weights are booleans or None, and the numbers of a row are adjacent.
        names: Of `NAMES`, or `max_position`.
    """
    query = problem.query
    key = problem.key
    value = problem.value
    mask = problem.log_weight
    batch, key_heads, group, length, size = query.shape
    all_moments = query.new_empty(len(NAMES), batch, key_heads, group, length, dtype=torch.float32)
    positions = query.new_empty((batch, key_heads, group, length), dtype=torch.int64)
    output = None if value is None else query.new_empty(batch, key_heads, group, length, value.shape[-1])
    value_size = LEAST_SIZE if value is None else value.shape[-1]
    padded_size = max(LEAST_SIZE, triton.next_power_of_2(size))
    padded_value_size = max(LEAST_SIZE, triton.next_power_of_2(value_size))
    tiling = _tiling(query.element_size(), max(padded_size, padded_value_size))
    low, high = problem.band or (None, None)
    # A soft cap divides the scores before the tangent, and the unit of log 2 comes after it.
    scale = problem.scale * LOG2_E if problem.softcap is None else problem.scale / problem.softcap
    # The kernel needs an address for every tensor; it does not read the ones that stand for an absent tensor.
    value_argument = key if value is None else value
    output_argument = query if output is None else output
    if mask is None:
        mask_argument = query
        mask_strides = [0] * 5
    else:
        mask_argument = mask.view(torch.uint8)
        mask_strides = [0 if extent == 1 else stride for extent, stride in zip(mask.shape, mask.stride(), strict=True)]
    _summarise[(triton.cdiv(length, tiling.queries) * batch * key_heads * group,)](
        query, key, value_argument, mask_argument, output_argument, all_moments, positions,
        *query.stride()[:-1], *key.stride()[:-1], *value_argument.stride()[:-1], *mask_strides,
        key_heads, group, length, key.shape[2], size, value_size, low or 0, high or 0, scale,
        (problem.softcap or 1.0) * LOG2_E, 1 / LOG2_E,
        KEPT=mask is not None, LOW=low is not None, HIGH=high is not None, CAPPED=problem.softcap is not None,
        SHAPE=any(name in names for name in SHAPE), PRIOR=any(name in names for name in PRIOR),
        POSITION="max_position" in names, VALUED=value is not None,
        PRECISION="ieee" if query.element_size() == 2 else "tf32x3",
        ROWS=tiling.queries, KEYS=tiling.keys, SIZE=padded_size, VALUE_SIZE=padded_value_size,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    by_name = dict(zip(NAMES, all_moments, strict=True)) | {"max_position": positions}
    results = {name: by_name[name] for name in names}
    if output is not None:
        results["output"] = output
    return results


class _Tiling(NamedTuple):
    """The size of a program's tiles."""

    queries: int
    keys: int
    stages: int
    """Tiles of keys that are loaded ahead."""
    warps: int = 4
    """Warps of 32 threads that share a program."""


def _tiling(bytes_per_number: int, size: int) -> _Tiling:
    """The largest tiles that fit a multiprocessor's memory, by the dtype and the padded head size."""
    if bytes_per_number == 4:
        return _Tiling(64, 64, stages=2) if size <= 64 else _Tiling(32, 32, stages=2)
    if size <= 64:
        return _Tiling(64, 128, stages=2)
    return _Tiling(64, 64, stages=3) if size <= 128 else _Tiling(64, 32, stages=2)
