"""What PyTorch's three CUDA kernels of attention have in common: where they run, and what their log Z means."""

from typing import Any

import torch
from torch import Tensor

from massieu.ops.cuda import rows
from massieu.ops.fused_kernel import Masks
from massieu.ops.shapes import AttentionProblem

HALVES = torch.bfloat16, torch.float16


class CudaKernel:
    """The base of a `massieu.ops.fused_kernel.FusedKernel` on CUDA, which proves itself before it is used."""

    name: str
    device_type = "cuda"
    bands = False
    masks: Masks = "none"
    half_only = True
    multiple = 8
    proof = True

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Other devices, dtypes that it has not, and a soft cap."""
        query = problem.query
        if query.device.type != self.device_type:
            return f"it runs on {self.device_type.upper()}, got {query.device}"
        if query.dtype == torch.float64 or (self.half_only and query.dtype not in HALVES):
            return f"it has no {query.dtype}"
        return None if problem.softcap is None else "it has no soft cap"

    @classmethod
    def larger_than(cls, most: int, problem: AttentionProblem) -> str | None:
        """Why heads of more numbers are refused."""
        size = max(problem.query.shape[-1], 0 if problem.value is None else problem.value.shape[-1])
        return None if size <= most else f"it has heads of at most {most} numbers, got {size}"


operators = torch.ops.aten
"""Where the kernels find PyTorch's; tests put simulated ones here."""


def with_missing(output: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log Z of rows whose log Z is infinite: NaN where the output is, else they see no key."""
    return output, rows.with_missing(output, log_z)


def aligned(*tensors: Tensor) -> tuple[Any, ...]:
    """Kernels read sixteen adjacent bytes at a time, some without looking; what lies otherwise is copied."""
    return tuple(part if is_aligned(part) else part.clone(memory_format=torch.contiguous_format) for part in tensors)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row begins at a multiple of sixteen bytes, and its numbers are next to each other."""
    numbers = 16 // tensor.element_size()
    places = tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor.stride(-1) == 1 and all(place % numbers == 0 for place in places)


def finite(log_z: Tensor) -> Tensor:
    """Where nothing is seen all scores are −∞, and any level makes their weights 0; NaN is in the scores themselves."""
    return log_z.nan_to_num(0.0, 0.0, 0.0)


def no_random_state(like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that there is not: nobody reads them."""
    return tuple(torch.empty(size, dtype=torch.int64, device=like.device) for size in ((2,), ()))  # pyright: ignore


def by_key_head(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of key heads that were repeated for their queries, summed before it is rounded."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32).to(gradient.dtype)
