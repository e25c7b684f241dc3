"""PyTorch's FlashAttention for CUDA: half precision, every band natively, grouped queries, no masks.

Its tensors are ``(B, L, H, D)``, and its bands end at the last query and the last key: query i sees keys up to
i + (N − L) + right. In the backward pass it makes the given output contiguous and takes its product with the cotangent
in float32, so a carrier of log Z's cotangent may have any layout.
"""

from typing import Any

import torch
from torch import Tensor

from massieu.ops.cuda import kernel
from massieu.ops.cuda.kernel import CudaKernel
from massieu.ops.fused import Fused
from massieu.ops.shapes import AttentionProblem

MOST_SIZE = 256


class FlashKernel(CudaKernel):
    """A `massieu.ops.fused_kernel.FusedKernel`."""

    name = "flash"
    bands = True

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Why it refuses log-weights, float32, float64, soft caps, heads of more than 256 numbers, windows beyond all keys."""
        reason = super().refuses(problem) or self.larger_than(MOST_SIZE, problem)
        if reason is not None:
            return reason
        if problem.log_weight is not None:
            return "it has no masks"
        low, high = problem.band or (None, None)
        length = problem.query.shape[3]
        keys = problem.key.shape[2]
        last = keys if high is None else min(keys, length + high)
        if last < 1 or (low is not None and low > last - length):
            return "its windows may not begin behind the last key"
        return None

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        assert mask is None
        key, value, left, right = _seen_keys(query, key, value, low, high)
        tensors = (_tokens_first(tensor) for tensor in (query, key, value))
        output, log_z, *_ = kernel.operators._flash_attention_forward(
            *tensors, None, None, query.shape[2], key.shape[2], 0.0, False, False, scale=scale, **_window(left, right)
        )
        return kernel.with_missing(output.transpose(1, 2), log_z)

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, _, scale, low, high = saved
        keys = key.shape[2]
        key, value, left, right = _seen_keys(query, key, value, low, high)
        tensors = (_tokens_first(tensor) for tensor in (grad, query, key, value, output))
        gradients = kernel.operators._flash_attention_backward(
            *tensors,
            kernel.finite(log_z),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            False,
            *kernel.no_random_state(query),
            scale=scale,
            **_window(left, right),
        )
        gradients = [gradient.transpose(1, 2) for gradient in gradients]
        # The keys that no query sees were left out: their gradients are 0.
        unseen = keys - key.shape[2]
        if unseen:
            gradients[1:] = [torch.nn.functional.pad(gradient, (0, 0, 0, unseen)) for gradient in gradients[1:]]
        return tuple(gradients)


def _tokens_first(tensor: Tensor) -> Tensor:
    """From ``(B, H, L, D)`` to ``(B, L, H, D)``, the kernel's layout."""
    (tensor,) = kernel.aligned(tensor)
    return tensor.transpose(1, 2)


def _seen_keys(
    query: Tensor, key: Tensor, value: Tensor, low: int | None, high: int | None
) -> tuple[Tensor, Tensor, int, int]:
    """Keys and values up to the last that a query sees, and the left and right sides of the kernel's window.

    The kernel counts from the end: its query i stands at key i + ahead, with `ahead` keys more than queries. −1 is no end.
    """
    length = query.shape[2]
    keys = key.shape[2]
    last = keys if high is None else min(keys, length + high)
    ahead = last - length
    left = -1 if low is None else ahead - low
    right = -1 if high is None else high - ahead
    return key[:, :, :last], value[:, :, :last], left, right


def _window(left: int, right: int) -> dict[str, int]:
    """The sides of a window as the operators' arguments."""
    return {"window_size_left": left, "window_size_right": right}


FLASH = Fused(FlashKernel())
"""FlashAttention on CUDA."""
