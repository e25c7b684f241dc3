"""The work on rows of attention's output that PyTorch's kernels leave over, each in one pass over memory, in Triton.

`massieu.ops.fused_kernel` and `massieu.ops.cuda.rows` do the same by plain operations: a dozen kernels, one after the other,
which write their results in float32.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of a program."""
MANY_ROWS = 512
"""Rows of a program if a row is one number."""


@triton.jit
def _places(row, heads, length, item_stride, head_stride, row_stride):
    """Offsets of rows that are numbered through items, heads and queries."""
    # Row numbers have 32 bits, because a 64-bit division takes many instructions; offsets need 64.
    item = (row // (heads * length)).to(tl.int64)
    head = (row // length % heads).to(tl.int64)
    return item * item_stride + head * head_stride + (row % length).to(tl.int64) * row_stride


@triton.jit
def _merge(
    grad, slope, output, changed, carrier, count, heads, length, size, tiny, share,
    grad_item, grad_head, grad_row, slope_item, slope_head, slope_row, output_item, output_head, output_row,
    changed_item, changed_head, changed_row, carrier_item, carrier_head, carrier_row,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`massieu.ops.fused_kernel._merged` for some rows: total = D - g, carried by a cotangent and a carrier.

    Channel 0 and the others are summed apart: the others carry the total, channel 0 what rounding leaves of it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    channel = tl.arange(0, SIZE)[None, :]
    inside = there[:, None] & (channel < size)
    given = tl.load(grad + _places(row, heads, length, grad_item, grad_head, grad_row)[:, None] + channel, inside, 0.0)
    averaged = tl.load(
        output + _places(row, heads, length, output_item, output_head, output_row)[:, None] + channel, inside, 0.0
    )
    level = tl.load(slope + _places(row, heads, length, slope_item, slope_head, slope_row), there, 0.0)
    wide = given.to(tl.float32)
    products = wide * averaged.to(tl.float32)
    first = tl.sum(tl.where(channel == 0, products, 0.0), 1)
    others = tl.sum(tl.where(channel == 0, 0.0, products), 1)
    # In double precision before rounding: in single precision a sum of very different sizes could lose g.
    total = others.to(tl.float64) + (first.to(tl.float64) - level.to(tl.float64))
    sizes = tl.abs(wide)
    one = tl.sum(tl.where(channel == 0, sizes, 0.0), 1)
    rest = tl.sum(tl.where(channel == 0, 0.0, sizes), 1)
    # A cotangent that is too small to carry the total is replaced by one that is just large enough.
    least = tl.maximum(share * tl.abs(total), tiny).to(tl.float32).to(given.dtype).to(tl.float32)
    lost = (tl.minimum(one, rest) < least) & (total != 0.0)
    replaced = (lost & (one < least))[:, None] & (channel == 0)
    wide = tl.where(replaced, least[:, None], wide)
    replaced = (lost & (rest < least))[:, None] & (channel > 0)
    wide = tl.where(replaced, tl.where(channel == 1, least[:, None], 0.0), wide)
    one = tl.where(lost, tl.maximum(one, least), one)
    rest = tl.where(lost, tl.maximum(rest, least), rest)
    # Channels from 1 on carry step * sign, so that their product with the cotangent is step * rest, close to the total. The
    # step is rounded to the dtype in which it is stored before the remainder is taken.
    step = (total / tl.maximum(rest, tiny).to(tl.float64)).to(tl.float32).to(given.dtype).to(tl.float32)
    left = total - step.to(tl.float64) * rest.to(tl.float64)
    remainder = (left / tl.maximum(one, tiny).to(tl.float64)).to(tl.float32)
    sign = tl.where(wide > 0.0, 1.0, tl.where(wide < 0.0, -1.0, wide))
    made = sign * tl.where(channel == 0, remainder[:, None], step[:, None])
    at = _places(row, heads, length, changed_item, changed_head, changed_row)
    tl.store(changed + at[:, None] + channel, wide.to(given.dtype), inside)
    at = _places(row, heads, length, carrier_item, carrier_head, carrier_row)
    tl.store(carrier + at[:, None] + channel, made.to(given.dtype), inside)


@triton.jit
def _scale(
    numbers, factor, found, count, heads, length, size, item, head, row_step, found_item, found_head, found_row,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rows times one factor in float32, rounded to their own dtype."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, SIZE)[None, :]
    inside = (row < count)[:, None] & (channel < size)
    given = tl.load(numbers + _places(row, heads, length, item, head, row_step)[:, None] + channel, inside, 0.0)
    made = (given.to(tl.float32) * tl.load(factor)).to(given.dtype)
    tl.store(found + _places(row, heads, length, found_item, found_head, found_row)[:, None] + channel, made, inside)


@triton.jit
def _show_missing(
    output, log_z, shown, count, heads, length,
    output_item, output_head, output_row, level_item, level_head, level_row, ROWS: tl.constexpr,
):  # fmt: skip
    """Log Z of rows; an infinite one becomes NaN if the row's output is NaN, else -inf: the row sees no key."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    level = tl.load(log_z + _places(row, heads, length, level_item, level_head, level_row), there, 0.0)
    # The output is read for the few rows alone that need it: of each row it would be a memory transaction.
    infinite = tl.abs(level) == float("inf")
    at = _places(row, heads, length, output_item, output_head, output_row)
    first = tl.load(output + at, there & infinite, 0.0).to(tl.float32)
    none = tl.where(first != first, float("nan"), float("-inf"))
    tl.store(shown + row, tl.where(infinite, none, level), there)


def merged(grad_output: Tensor, grad_log_z: Tensor, output: Tensor, tiny: float, share: float) -> tuple[Tensor, Tensor]:
    """A cotangent ``(B, H, L, D)`` and a carrier in the output's place that carry the cotangents of output and log Z.

    Args:
        grad_output: Cotangent of the output, whose rows are of adjacent numbers.
        grad_log_z: Cotangent of log Z, ``(B, H, L)``.
        output: The output ``(B, H, L, D)``.
        tiny, share: The least norm of a part of the cotangent, as of `massieu.ops.cuda.rows.least_parts`.
    """
    changed = torch.empty_like(grad_output)
    carrier = torch.empty_like(output)
    _, heads, length, size = output.shape
    count = grad_log_z.numel()
    _merge[(triton.cdiv(count, ROWS),)](
        grad_output, grad_log_z, output, changed, carrier, count, heads, length, size, tiny, share,
        *grad_output.stride()[:3], *grad_log_z.stride(), *output.stride()[:3],
        *changed.stride()[:3], *carrier.stride()[:3], ROWS=ROWS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return changed, carrier


def scaled(numbers: Tensor, factor: Tensor) -> Tensor:
    """Numbers ``(B, H, L, D)`` times one float32 number, in their own dtype."""
    products = torch.empty_like(numbers)
    _, heads, length, size = numbers.shape
    count = numbers.shape[:-1].numel()
    _scale[(triton.cdiv(count, ROWS),)](
        numbers, factor, products, count, heads, length, size, *numbers.stride()[:3], *products.stride()[:3],
        ROWS=ROWS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return products


def with_missing(output: Tensor, log_z: Tensor) -> Tensor:
    """Log Z ``(B, H, L)`` with its infinite values replaced: NaN if the output ``(B, H, L, D)`` is NaN, else −∞."""
    shown = torch.empty(log_z.shape, dtype=log_z.dtype, device=log_z.device)
    _, heads, length = log_z.shape
    _show_missing[(triton.cdiv(log_z.numel(), MANY_ROWS),)](
        output, log_z, shown, log_z.numel(), heads, length, *output.stride()[:3], *log_z.stride(), ROWS=MANY_ROWS
    )
    return shown
