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

    name, bands = "flash", True

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Log-weights, float32 and float64, soft caps, heads of more than 256 numbers, windows ahead of all keys."""
        reason = super().refuses(problem) or self.larger_than(MOST_SIZE, problem)
        if reason is not None or problem.log_weight is not None:
            return reason or "it has no masks"
        (low, high), length, keys = problem.band or (None, None), problem.query.shape[3], problem.key.shape[2]
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
        key, value, left, right = _seen(query, key, value, low, high)
        given = (_turned(tensor) for tensor in (query, key, value))
        output, log_z, *_ = kernel.operators._flash_attention_forward(
            *given, None, None, query.shape[2], key.shape[2], 0.0, False, False, scale=scale, **_window(left, right)
        )
        return kernel.with_missing(output.transpose(1, 2), log_z)

    @staticmethod
    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, _, scale, low, high = given
        keys = key.shape[2]
        key, value, left, right = _seen(query, key, value, low, high)
        tensors = (_turned(tensor) for tensor in (grad, query, key, value, output))
        found = kernel.operators._flash_attention_backward(
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
        gradients = [gradient.transpose(1, 2) for gradient in found]
        unseen = keys - key.shape[2]
        if unseen:
            gradients[1:] = [torch.nn.functional.pad(gradient, (0, 0, 0, unseen)) for gradient in gradients[1:]]
        return tuple(gradients)


def _turned(tensor: Tensor) -> Tensor:
    """``(B, L, H, D)`` as the kernel reads it."""
    (tensor,) = kernel.aligned(tensor)
    return tensor.transpose(1, 2)


def _seen(
    query: Tensor, key: Tensor, value: Tensor, low: int | None, high: int | None
) -> tuple[Tensor, Tensor, int, int]:
    """The keys up to the last that is seen, and the window's sides from the last query's place; −1: no end."""
    length, keys = query.shape[2], key.shape[2]
    last = keys if high is None else min(keys, length + high)
    key, value = key[:, :, :last], value[:, :, :last]
    ahead = last - length
    return key, value, -1 if low is None else ahead - low, -1 if high is None else high - ahead


def _window(left: int, right: int) -> dict[str, int]:
    return {"window_size_left": left, "window_size_right": right}


FLASH = Fused(FlashKernel())
"""FlashAttention on CUDA."""
