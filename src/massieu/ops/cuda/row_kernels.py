"""What is done to every row of an attention's output beside PyTorch's kernels, each in one pass over memory, in Triton.

It is what plain operations do in `massieu.ops.fused_kernel` and `massieu.ops.cuda.kernel`, where a dozen of them begin one
after the other and write everything in float32.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Of a program."""
MANY_ROWS = 512
"""The same where a row is one number."""


@triton.jit
def _places(row, heads, length, item_stride, head_stride, row_stride):
    """Where rows begin that are counted through items, heads and queries."""
    # Places need 64 bits, and rows are counted with 32: a division by 64 bits takes many instructions.
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
    total = others.to(tl.float64) + (first.to(tl.float64) - level.to(tl.float64))
    sizes = tl.abs(wide)
    one = tl.sum(tl.where(channel == 0, sizes, 0.0), 1)
    rest = tl.sum(tl.where(channel == 0, 0.0, sizes), 1)
    least = tl.maximum(share * tl.abs(total), tiny).to(tl.float32).to(given.dtype).to(tl.float32)
    lost = (tl.minimum(one, rest) < least) & (total != 0.0)
    replaced = (lost & (one < least))[:, None] & (channel == 0)
    wide = tl.where(replaced, least[:, None], wide)
    replaced = (lost & (rest < least))[:, None] & (channel > 0)
    wide = tl.where(replaced, tl.where(channel == 1, least[:, None], 0.0), wide)
    one = tl.where(lost, tl.maximum(one, least), one)
    rest = tl.where(lost, tl.maximum(rest, least), rest)
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    level = tl.load(log_z + _places(row, heads, length, level_item, level_head, level_row), there, 0.0)
    first = tl.load(output + _places(row, heads, length, output_item, output_head, output_row), there, 0.0)
    first = first.to(tl.float32)
    none = tl.where(first != first, float("nan"), float("-inf"))
    tl.store(shown + row, tl.where(tl.abs(level) == float("inf"), none, level), there)


def merged(grad_output: Tensor, grad_log_z: Tensor, output: Tensor, tiny: float, share: float) -> tuple[Tensor, Tensor]:
    """A cotangent of the output ``(B, H, L, D)`` and an output that carry both cotangents."""
    changed, carrier = torch.empty_like(grad_output), torch.empty_like(output)
    _, heads, length, size = output.shape
    count = grad_log_z.numel()
    strides = [step for tensor in (grad_output, output, changed, carrier) for step in tensor.stride()[:3]]
    _merge[(triton.cdiv(count, ROWS),)](
        grad_output, grad_log_z, output, changed, carrier, count, heads, length, size, tiny, share,
        *strides[:3], *grad_log_z.stride(), *strides[3:], ROWS=ROWS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return changed, carrier


def scaled(numbers: Tensor, factor: Tensor) -> Tensor:
    """Numbers ``(B, H, L, D)`` times one of float32, in their own dtype."""
    found = torch.empty_like(numbers)
    _, heads, length, size = numbers.shape
    count = numbers.shape[:-1].numel()
    _scale[(triton.cdiv(count, ROWS),)](
        numbers, factor, found, count, heads, length, size, *numbers.stride()[:3], *found.stride()[:3],
        ROWS=ROWS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return found


def with_missing(output: Tensor, log_z: Tensor) -> Tensor:
    """Log Z ``(B, H, L)``, −∞ or NaN where it is infinite."""
    shown = torch.empty(log_z.shape, dtype=log_z.dtype, device=log_z.device)
    _, heads, length = log_z.shape
    _show_missing[(triton.cdiv(log_z.numel(), MANY_ROWS),)](
        output, log_z, shown, log_z.numel(), heads, length, *output.stride()[:3], *log_z.stride(), ROWS=MANY_ROWS
    )
    return shown
