"""cuDNN's attention as PyTorch calls it: half precision, masks, grouped queries; a closed graph.

PyTorch prefers it on Hopper and Blackwell from cuDNN 9.15.1 on, before which it was wrong for lengths that are no multiple of
128; elsewhere it prefers FlashAttention, and so does this package.
"""

from typing import Any

import torch
from torch import Tensor

from massieu.ops.cuda import kernel
from massieu.ops.cuda.kernel import CudaKernel
from massieu.ops.fused import Fused
from massieu.ops.fused_kernel import Masks
from massieu.ops.shapes import AttentionProblem

MOST_SIZE = 128
MOST_HEADS = 65535
OLDEST = 91501
CAPABILITIES = (9, 0), (10, 0), (10, 3)


class CudnnKernel(CudaKernel):
    """A `massieu.ops.fused_kernel.FusedKernel`; masks are of the query's dtype."""

    name = "cudnn"
    masks: Masks = "own dtype"

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Float log-weights, float32 and float64, soft caps, heads of more than 128 numbers, single queries or keys."""
        reason = super().refuses(problem) or self.larger_than(MOST_SIZE, problem) or self.missing(problem.query.device)
        weight = problem.log_weight
        if reason is not None:
            return reason
        if weight is not None and weight.is_floating_point():
            return "its masks are of half precision, which would round a log_weight"
        if min(problem.query.shape[3], problem.key.shape[2]) < 2:
            return "it needs at least two queries and two keys"
        if problem.query.shape[:3].numel() > MOST_HEADS:
            return f"it has at most {MOST_HEADS} heads in all items, got {problem.query.shape[:3].numel()}"
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return "its gradients are not deterministic"
        return None

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why it is not to be used on this device."""
        version = torch.backends.cudnn.version() or 0
        if version < OLDEST:
            return f"it is right from cuDNN {OLDEST} on, got {version}"
        capability = torch.cuda.get_device_capability(device)
        if capability in CAPABILITIES:
            return None
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return f"it is faster on compute capability {capabilities} alone, got {'.'.join(map(str, capability))}"

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        output, log_z, *_ = kernel.operators._scaled_dot_product_cudnn_attention(
            *kernel.aligned(query, key, value),
            _spread(mask, query, key),
            True,
            0.0,
            high is not None,
            False,
            scale=scale,
        )
        return kernel.with_missing(output, log_z.reshape(output.shape[:3]))

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, mask, scale, _, high = saved
        query, key, value = kernel.aligned(query, key, value)
        # PyTorch keeps a graph for each layout of query, key and value, and takes the layout of the output and its
        # cotangent for the one that they had when it was made. So they always have the query's, as the output has at first.
        grad = _laid_out_like(query, grad)
        output = _laid_out_like(query, output)
        return kernel.operators._scaled_dot_product_cudnn_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            kernel.finite(log_z).unsqueeze(-1).contiguous(),
            *kernel.no_random_state(query),
            _spread(mask, query, key),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            high is not None,
            scale=scale,
        )


def _laid_out_like(query: Tensor, part: Tensor) -> Tensor:
    """The part with the strides of a tensor like the query, copied if it has others or is not aligned."""
    strides = torch.empty_like(query, device="meta").stride()
    if part.stride() == strides and kernel.is_aligned(part):
        return part
    return torch.empty_like(query).copy_(part)


def _spread(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask for each item, (B, 1 or H, L, N), contiguous."""
    if mask is None:
        return None
    return mask.to(query.dtype).expand(query.shape[0], -1, query.shape[2], key.shape[2]).contiguous()


CUDNN = Fused(CudnnKernel())
"""cuDNN's attention on CUDA."""
