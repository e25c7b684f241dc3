"""PyTorch's memory-efficient attention for CUDA: float32 too, and masks.

Its log Z comes with rows up to a multiple of 32. Its backward pass takes the output for contiguous ``(B, L, H, D)`` without
looking, so the carrier of log Z's cotangent is laid out so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.ops.cuda import kernel
from massieu.ops.cuda.kernel import CudaKernel
from massieu.ops.fused import Fused
from massieu.ops.fused_kernel import Masks

ROWS = 32
"""The kernel's log Z has a multiple of this number of queries."""
ALIGNED = 16
"""Rows of a mask begin at a multiple of this number of entries."""


class EfficientKernel(CudaKernel):
    """A `massieu.ops.fused_kernel.FusedKernel`; masks are of the query's dtype, key heads are repeated."""

    name = "efficient"
    half_only = False
    masks: Masks = "own dtype"

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        tensors = kernel.aligned(query, *_repeated(query, key, value))
        output, log_z, *_ = kernel.operators._scaled_dot_product_efficient_attention(
            *tensors, _aligned(mask, query, key), True, 0.0, high is not None, scale=scale
        )
        return kernel.with_missing(output, log_z[..., : query.shape[2]])

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, mask, scale, _, high = saved
        tensors = kernel.aligned(query, *_repeated(query, key, value))
        seed, offset = kernel.no_random_state(query)
        grad_query, *others, _ = kernel.operators._scaled_dot_product_efficient_attention_backward(
            *kernel.aligned(grad),
            *tensors,
            _aligned(mask, query, key),
            output.transpose(1, 2).contiguous().transpose(1, 2),
            _whole(kernel.finite(log_z)),
            seed,
            offset,
            0.0,
            [True, True, True, False],
            high is not None,
            scale=scale,
        )
        return grad_query, *(kernel.by_key_head(gradient, key.shape[1]) for gradient in others)


def _repeated(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    repeats = query.shape[1] // tensors[0].shape[1]
    return [tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1) for tensor in tensors]


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every pair, with rows aligned for the kernel, and expanded where it is the same for heads or queries."""
    if mask is None:
        return None
    keys = key.shape[2]
    mask = mask.to(query.dtype).expand(*mask.shape[:-1], keys)
    if any(place % ALIGNED for place in (mask.storage_offset(), *mask.stride()[:-1])) or mask.stride(-1) != 1:
        room = mask.new_empty((*mask.shape[:-1], keys + -keys % ALIGNED))[..., :keys]
        mask = room.copy_(mask)
    return mask.expand(*query.shape[:3], keys)


def _whole(log_z: Tensor) -> Tensor:
    """Log Z padded to the number of rows that the kernel returned; +∞ makes all weights of the added rows 0."""
    if torch.version.hip:
        return log_z.contiguous()
    return F.pad(log_z, (0, -log_z.shape[-1] % ROWS), value=torch.inf).contiguous()


EFFICIENT = Fused(EfficientKernel())
"""Memory-efficient attention on CUDA."""
