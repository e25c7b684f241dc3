"""PyTorch's fused CPU attention: what it takes, its two passes, and the scores of which it says nothing right."""

import math
from typing import Any

import torch
from torch import Tensor

from massieu.ops.fused_kernel import Masks, by_reference, rows_contiguous
from massieu.ops.shapes import AttentionProblem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """A `massieu.ops.fused_kernel.FusedKernel` of grouped queries, float32 log Z for half precision, and any mask."""

    name, bands, half_only, multiple, proof = "fused", False, False, 1, False
    masks: Masks = "any"

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Other devices than the CPU, and a soft cap."""
        if problem.query.device.type != "cpu":
            return f"it runs on the CPU, got {problem.query.device}"
        return None if problem.softcap is None else "it has no soft cap"

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        run = _forward_operator if torch.compiler.is_compiling() else _of_all_scores
        query, key, value, mask = rows_contiguous(query, key, value, mask)
        return run(query, key, value, mask, scale, high is not None)

    @staticmethod
    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, mask, scale, _, high = given
        query, key, value, mask = rows_contiguous(query, key, value, mask)
        return _backward(grad, query, key, value, output, log_z, 0.0, high is not None, attn_mask=mask, scale=scale)


def _of_all_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The kernel's forward pass, with the reference's results for rows of extreme scores.

    Of fewer scores than its vectors hold, all of them NaN or −∞, it makes a row without a key, of which it says output 0
    and log Z = 0. In half precision, one score of +∞ among more makes its output 0.
    """
    output, log_z = _forward(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    # 0/0 and ∞/∞ are NaN: two quick operations tell that there is no such log Z, which other rows seldom have.
    if math.isnan((log_z / log_z).sum().item()) and not _are_moderate(query, key, scale):
        lost = (log_z == 0) | (log_z == torch.inf)
        right = by_reference(query, key, value, mask, scale, None, 0 if is_causal else None, False)
        output[lost], log_z[lost] = (result[lost] for result in right)
    return output, log_z


def _are_moderate(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether no product of a query and a key can be NaN or near the largest number; NaN of a mask the kernel keeps."""
    largest = [tensor.abs().amax().double().clamp_min(1.0) for tensor in (query, key)]
    bound = largest[0] * largest[1] * abs(scale) * query.shape[-1]
    return bool(bound < torch.finfo(torch.float32).max / 2**16)


_forward_operator = torch.library.custom_op("massieu::fused_attention", _of_all_scores, mutates_args=())
"""The same for compiled code, which may not ask for the values that it computes."""


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, 0.0, options[1], attn_mask=mask, scale=options[0])
