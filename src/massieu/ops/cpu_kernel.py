"""PyTorch's fused CPU attention: the problems that it takes, its two passes, and rows of scores for which it is wrong."""

import math
from typing import Any

import torch
from torch import Tensor

from massieu.ops.fused_kernel import Masks, by_reference, rows_contiguous
from massieu.ops.shapes import AttentionProblem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """A `massieu.ops.fused_kernel.FusedKernel` that takes grouped queries and any mask; log Z of half precision is float32."""

    name = "fused"
    bands = False
    half_only = False
    multiple = 1
    proof = False
    masks: Masks = "any"

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Why it cannot take this problem: another device than the CPU, or a soft cap."""
        if problem.query.device.type != "cpu":
            return f"it runs on the CPU, got {problem.query.device}"
        if problem.softcap is not None:
            return "it has no soft cap"
        return None

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        run = _forward_operator if torch.compiler.is_compiling() else _corrected_forward
        query, key, value, mask = rows_contiguous(query, key, value, mask)
        return run(query, key, value, mask, scale, high is not None)

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, mask, scale, _, high = saved
        query, key, value, mask = rows_contiguous(query, key, value, mask)
        return _backward(grad, query, key, value, output, log_z, 0.0, high is not None, attn_mask=mask, scale=scale)


def _corrected_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The kernel's forward pass, with the reference's results for rows of extreme scores.

    The kernel returns output 0 and log Z = 0 for a row with fewer scores than its vectors hold, if all are NaN or −∞. In half
    precision it returns output 0 for a row with one score of +∞ among others.
    """
    output, log_z = _forward(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    # Such rows have a log Z of 0 or ∞, which other rows seldom have. As 0/0 and ∞/∞ are NaN, two quick operations show that
    # there is none.
    if math.isnan((log_z / log_z).sum().item()) and not _are_moderate(query, key, scale):
        is_suspect = (log_z == 0) | (log_z == torch.inf)
        right = by_reference(query, key, value, mask, scale, None, 0 if is_causal else None, False)
        right_output, right_log_z = right
        output[is_suspect] = right_output[is_suspect]
        log_z[is_suspect] = right_log_z[is_suspect]
    return output, log_z


def _are_moderate(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether no score of query and key can be NaN or near the largest number; the kernel handles a mask's NaN itself."""
    largest = [tensor.abs().amax().double().clamp_min(1.0) for tensor in (query, key)]
    bound = largest[0] * largest[1] * abs(scale) * query.shape[-1]
    return bool(bound < torch.finfo(torch.float32).max / 2**16)


_forward_operator = torch.library.custom_op("massieu::fused_attention", _corrected_forward, mutates_args=())
"""`_corrected_forward` as an operator for compiled code, which cannot branch on values that it computes."""


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, 0.0, options[1], attn_mask=mask, scale=options[0])
