"""Whether Triton's kernels for rows (`massieu.ops.cuda.row_kernels`) are used: tried once for each device.

If Triton is not installed, cannot compile, or gives other numbers than plain operations, plain operations are used, and a
warning says so once.
"""

import threading
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from massieu.foundation.transforms import in_functorch, values_are_readable

MOST_ROWS = 2**31 - 1024
"""Rows are counted with 32 bits."""

_verdicts: dict[torch.device, bool] = {}
_lock = threading.Lock()


def usable(output: Tensor) -> bool:
    """Whether the kernels can take the rows of this output: readable, on CUDA, outside compiled code and transforms."""
    device = output.device
    if device.type != "cuda" or torch.compiler.is_compiling() or in_functorch() or not values_are_readable(output):
        return False
    if output.shape[:-1].numel() > MOST_ROWS:
        return False
    verdict = _verdicts.get(device)
    if verdict is None:
        # A kernel cannot be compiled and compared while a graph is captured.
        return not torch.cuda.is_current_stream_capturing() and _try(device)
    return verdict


def least_parts(dtype: torch.dtype) -> tuple[float, float]:
    """The least norm of either part of a cotangent that carries another, absolute and in units of the total.

    In float16, whose range is short, the caller scales both cotangents to a size of about 1. These are not module constants:
    with dynamic shapes the compiler would make inputs of such numbers.
    """
    if dtype == torch.float16:
        return 2.0**-14, 2.0**-15
    return 1e-30, 1e-36


def scaled(numbers: Tensor, factor: Tensor) -> Tensor:
    """Numbers ``(B, H, L, D)`` times a float32 number, which their own dtype may not be able to hold."""
    if usable(numbers) and numbers.stride(-1) == 1:
        from massieu.ops.cuda import row_kernels

        return row_kernels.scaled(numbers, factor)
    return (numbers.float() * factor).to(numbers.dtype)


def with_missing(output: Tensor, log_z: Tensor) -> Tensor:
    """Log Z ``(B, H, L)`` with its infinite values replaced: NaN if the output ``(B, H, L, D)`` is NaN, else −∞."""
    if usable(output):
        from massieu.ops.cuda import row_kernels

        return row_kernels.with_missing(output, log_z)
    return _plain_missing(output, log_z)


def _plain_missing(output: Tensor, log_z: Tensor) -> Tensor:
    level = torch.where(output[..., 0].isnan(), torch.nan, -torch.inf)
    return torch.where(log_z.isinf(), level, log_z)


def _try(device: torch.device) -> bool:
    """Compare the kernels with plain operations, once for each device; whether they are right."""
    with _lock:
        if device not in _verdicts:
            reason = None if find_spec("triton") is None else _difference(device)
            _verdicts[device] = find_spec("triton") is not None and reason is None
            if reason is not None:
                warnings.warn(
                    f"Triton's kernels are not used on {device}, but plain operations: {reason}", stacklevel=4
                )
    return _verdicts[device]


def _difference(device: torch.device) -> str | None:
    """The reason why the kernels are not used, from small tensors in half precision; None if they are right."""
    from massieu.ops.cuda import row_kernels

    numbers = torch.Generator().manual_seed(0)
    grad, output = (torch.randn(2, 3, 50, 24, generator=numbers).to(device, torch.bfloat16) for _ in range(2))
    level = torch.randn(2, 3, 50, generator=numbers).to(device)
    grad[:, :, :7] = 0.0
    infinite = level.masked_fill(level > 1, torch.inf)
    with_nan = output.masked_fill(level[..., None] > 1.5, torch.nan)
    try:
        changed, carrier = row_kernels.merged(grad, level, output, *least_parts(output.dtype))
        shown = row_kernels.with_missing(with_nan, infinite)
        scaled = row_kernels.scaled(output, torch.full((), 0.5, device=device))
    except Exception as error:
        # Whatever a compiler says is the verdict.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    total = (grad.double() * output.double()).sum(-1) - level.double()
    error = ((changed.double() * carrier.double()).sum(-1) - total).abs() / (1 + total.abs())
    # Cotangents that can carry log Z's are not changed, and the carried total is right to the square of the rounding.
    unchanged = torch.equal(changed[:, :, 7:], grad[:, :, 7:]) and bool(changed.abs().amax() == grad.abs().amax())
    right = unchanged and bool((error <= 4 * torch.finfo(grad.dtype).eps ** 2).all())
    same = torch.equal(shown.nan_to_num(), _plain_missing(with_nan, infinite).nan_to_num())
    same = same and torch.equal(scaled, output / 2)
    if right and same:
        return None
    return "their numbers are wrong"
