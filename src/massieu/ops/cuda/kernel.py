"""What PyTorch's three CUDA kernels of attention have in common: where they run, and what their log Z means."""

from typing import Any

import torch
from torch import Tensor

from massieu.ops.cuda import rows
from massieu.ops.fused_kernel import Masks
from massieu.ops.shapes import AttentionProblem

HALVES = torch.bfloat16, torch.float16


class CudaKernel:
    """The base of a `massieu.ops.fused_kernel.FusedKernel` on CUDA, which is tested by `proof` before it is used."""

    name: str
    device_type = "cuda"
    bands = False
    masks: Masks = "none"
    half_only = True
    multiple = 8
    proof = True

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Why it cannot take this problem: another device, a dtype that it lacks, or a soft cap."""
        query = problem.query
        if query.device.type != self.device_type:
            return f"it runs on {self.device_type.upper()}, got {query.device}"
        if query.dtype == torch.float64 or (self.half_only and query.dtype not in HALVES):
            return f"it has no {query.dtype}"
        if problem.softcap is not None:
            return "it has no soft cap"
        return None

    @classmethod
    def larger_than(cls, most: int, problem: AttentionProblem) -> str | None:
        """The reason why heads of more than `most` numbers are refused; None if the problem's are smaller."""
        size = problem.query.shape[-1]
        if problem.value is not None:
            size = max(size, problem.value.shape[-1])
        if size > most:
            return f"it has heads of at most {most} numbers, got {size}"
        return None


operators = torch.ops.aten
"""PyTorch's operators; tests replace them by simulated ones."""


def with_missing(output: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and log Z with its infinite values replaced: NaN where the output is NaN, else −∞, as the row sees no key."""
    return output, rows.with_missing(output, log_z)


def aligned(*tensors: Tensor) -> tuple[Any, ...]:
    """The tensors, copied if they are not aligned: kernels read sixteen adjacent bytes at a time, some without a check."""
    return tuple(part if is_aligned(part) else part.clone(memory_format=torch.contiguous_format) for part in tensors)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row begins at a multiple of sixteen bytes, and its numbers are next to each other."""
    numbers = 16 // tensor.element_size()
    places = tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor.stride(-1) == 1 and all(place % numbers == 0 for place in places)


def finite(log_z: Tensor) -> Tensor:
    """Log Z with 0 for values that are not finite.

    A row that sees no key has scores of −∞, whose weights are then 0. A row with NaN has NaN in its scores too.
    """
    return log_z.nan_to_num(0.0, 0.0, 0.0)


def no_random_state(like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, which operators take as arguments and do not read without dropout."""
    return tuple(torch.empty(size, dtype=torch.int64, device=like.device) for size in ((2,), ()))  # pyright: ignore


def by_key_head(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of key heads that were repeated for their queries, summed before it is rounded."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32).to(gradient.dtype)
