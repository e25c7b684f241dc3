"""Attention whose weights are exactly zero for low scores."""

import math

import torch
from torch import Tensor

from massieu.energy.entmax import entmax, entmax_conjugate
from massieu.nn.heads import (
    Alpha,
    Mask,
    Number,
    merge_log_weights,
    per_head,
    position_mask,
    register_number,
)
from massieu.nn.multihead import Attended, MultiHead
from massieu.ops.shapes import without_autocast


class SparseAttention(MultiHead):
    """Multi-head attention by α-entmax (Correia, Niculae and Martins, 2019), the gradient of Ω* where softmax is that of log Z.

    Weights sum to one and are exactly 0 more than 1/(α − 1) below the largest score; α = 1 is softmax, 2 sparsemax. Call and
    state dict are `torch.nn.MultiheadAttention`'s; `need_log_partition=True` returns Ω*. Memory is L×N.
    """

    scale: Tensor | float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        alpha: float | Tensor = 1.5,
        learn_alpha: bool = False,
        scale: Number = None,
    ) -> None:
        """The arguments of `torch.nn.MultiheadAttention`, and:

        Args:
            alpha: At least 1; a number, or a tensor of one or one a head.
            learn_alpha: Train it, one a head, within (1, 2), from `alpha`.
            scale: As for `Attention`.

        Raises:
            ValueError, TypeError: numbers out of their range.
        """
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.order = Alpha(alpha, num_heads, 1.0, math.inf, learn=learn_alpha).to(device, dtype)
        register_number(self, "scale", scale, num_heads)

    @property
    def alpha(self) -> float | Tensor:
        """α: a number, or a tensor of one or one a head."""
        return self.order()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        log_weight: Mask | None,
        is_causal: bool,
        need_weights: bool,
        need_log_partition: bool,
    ) -> Attended:
        dtype = torch.promote_types(query.dtype, torch.float32)
        seen = position_mask(query.shape[2], key.shape[2], is_causal, None, query.device)
        log_weight, alpha = merge_log_weights(log_weight, seen), per_head(self.alpha)
        with without_autocast(query.device):
            beta = self.head_dim**-0.5 if self.scale is None else per_head(self.scale)
            scores = query.to(dtype) @ key.to(dtype).mT * beta
            weights = entmax(scores, alpha, log_weight=log_weight)
            potential = None
            if need_log_partition:
                potential = entmax_conjugate(scores, alpha, log_weight=log_weight)
            output = self._dropped(weights) @ value.to(dtype)
        return Attended(output.to(query.dtype), weights.to(query.dtype), potential)
