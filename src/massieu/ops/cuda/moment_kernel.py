"""The moments of attention's weights in one pass over the keys, in Triton: no score is ever written to memory.

As FlashAttention takes them: a program has some queries, goes through the tiles of keys that they see, and keeps each sum
relative to the largest score until then. Scores are in units of log 2, because the hardware has powers of two. They are sums
in float32 of exact products, or, of float32 numbers, of three products in TF32, which leave out 2⁻²² of each. Weights are
rounded to the values' dtype before they meet these.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops.shapes import AttentionProblem

LEAST_SIZE = 16
"""Triton multiplies no narrower matrices."""
MOST_SIZE = 256
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
"""In the order in which the kernel writes them; `max_position` is by itself."""
SHAPE, PRIOR = ("score_variance", "collision"), NAMES[-3:]
"""What needs more sums than the others: of weights, and of the scores themselves."""


@triton.jit
def _tile(
    sums, queries, key_at, value_at, keep_at, place, rows, keys, low, high, scale, softcap,
    key_stride, value_stride, keep_stride, size, value_size,
    MASKED: tl.constexpr, KEPT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CAPPED: tl.constexpr,
    SHAPE: tl.constexpr, PRIOR: tl.constexpr, POSITION: tl.constexpr, VALUED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """The sums with one more tile of keys."""
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
        # The hyperbolic tangent; of small numbers by its series, where the difference would lose digits.
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
    # The scale is positive, and is multiplied as the level is subtracted: one operation in place of two.
    highest = tl.max(shown, 1) * scale
    level = tl.maximum(top, highest)
    if POSITION:
        place_of_highest = place + tl.argmax(shown, 1)
        position = tl.where(highest > top, place_of_highest, position)
    # Nothing seen yet: the sums are zero and stay so.
    none = level == float("-inf")
    step = tl.where(top == float("-inf"), 0.0, top - level)
    change = tl.where(top == float("-inf"), 0.0, tl.exp2(step))
    shift = tl.where(none, 0.0, level)
    below = scores * scale - shift[:, None]
    weights = tl.exp2(below)
    if MASKED or KEPT:
        weights = tl.where(seen, weights, 0.0)
        below = tl.where(seen, below, 0.0)
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
    """The sums of some queries of one head."""
    # The last queries of a causal attention see most keys, and are begun first.
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
    # Keys that some query here sees, and before them those that every one does.
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
    # The largest of numbers of which one is NaN is not NaN here; their sum is. And all in nats.
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
    """The moments of these names ``(B, Hk, G, L)``, and where there are values the ``output (B, Hk, G, L, E)``.

    Args:
        problem: its scale is a positive number, its log-weights are booleans if there are any, and rows are of adjacent
            numbers.
    """
    query, key, value, keep = problem.query, problem.key, problem.value, problem.log_weight
    batch, key_heads, group, length, size = query.shape
    found = query.new_empty(len(NAMES), batch, key_heads, group, length, dtype=torch.float32)
    places = query.new_empty((batch, key_heads, group, length), dtype=torch.int64)
    output = None if value is None else query.new_empty(batch, key_heads, group, length, value.shape[-1])
    value_size = LEAST_SIZE if value is None else value.shape[-1]
    padded, value_padded = (max(LEAST_SIZE, triton.next_power_of_2(each)) for each in (size, value_size))
    rows, columns, warps, stages = _tiling(query.element_size(), max(padded, value_padded))
    low, high = problem.band or (None, None)
    scale = problem.scale * LOG2_E if problem.softcap is None else problem.scale / problem.softcap
    # What is not there is not read.
    valued, kept = key if value is None else value, query if keep is None else keep.view(torch.uint8)
    steps = (
        (0,) * 5
        if keep is None
        else [0 if many == 1 else step for many, step in zip(keep.shape, keep.stride(), strict=True)]
    )
    _summarise[(triton.cdiv(length, rows) * batch * key_heads * group,)](
        query, key, valued, kept, query if output is None else output, found, places,
        *query.stride()[:-1], *key.stride()[:-1], *valued.stride()[:-1], *steps,
        key_heads, group, length, key.shape[2], size, value_size, low or 0, high or 0, scale,
        (problem.softcap or 1.0) * LOG2_E, 1 / LOG2_E,
        KEPT=keep is not None, LOW=low is not None, HIGH=high is not None, CAPPED=problem.softcap is not None,
        SHAPE=any(name in names for name in SHAPE), PRIOR=any(name in names for name in PRIOR),
        POSITION="max_position" in names, VALUED=value is not None,
        PRECISION="ieee" if query.element_size() == 2 else "tf32x3",
        ROWS=rows, KEYS=columns, SIZE=padded, VALUE_SIZE=value_padded, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    results = dict(zip(NAMES, found, strict=True)) | {"max_position": places}
    return {name: results[name] for name in names} | ({} if output is None else {"output": output})


def _tiling(bytes_each: int, size: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, and tiles that are on the way."""
    if bytes_each == 4:
        return (64, 64, 4, 2) if size <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 3) if size <= 128 else (64, 32, 4, 2)
