"""Attention to convergence, held by its query."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu import ops
from massieu.nn.arguments import check_input
from massieu.nn.convergence import Converging
from massieu.nn.heads import (
    Alpha,
    Mask,
    Number,
    log_weight_of,
    merge_heads,
    register_number,
    split_heads,
)
from massieu.ops.shapes import without_autocast
from massieu.solve import FixedPointResult, Method, fixed_point
from massieu.solve.arguments import floating


class ImplicitAttention(Converging, nn.Module):
    """The fixed point of z = (1 − α)·query + α·Σ p_n key_n, p = softmax(scale·z·key_n), for each head (B12).

    It is a critical point of (1 − α)‖z − query‖²/2 + α·E(z), E the Hopfield energy of the keys: a query pulled to
    stored patterns, which α = 1 would let go of, and with it all gradient. Unique where α·scale·D²/4 < 1, D the
    largest distance of two keys. Gradients are those of the implicit function theorem: memory does not grow with the number
    of steps. A query that sees no key keeps (1 − α)·query.
    """

    scale: Tensor | float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        alpha: float | Tensor = 0.5,
        learn_alpha: bool = False,
        scale: Number = None,
        contraction: float | None = None,
        kdim: int | None = None,
        bias: bool = True,
        batch_first: bool = True,
        method: Method | Any = "auto",
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Projections of queries and keys to heads, and of the heads to the output.

        Args:
            alpha: In [0, 1); a number, or a tensor of one or one a head.
            learn_alpha: Train it, one a head.
            scale: Inverse temperature; a number, a tensor or a Parameter, one or one a head; by default the head's size to
                the −½.
            contraction: In (0, 1): longer keys are drawn in to a ball in which α·scale·D²/4 is at most this. Each query has
                one fixed point then, with a derivative, and the distance to it falls by this factor a step or faster. By
                default keys are as they come, and training may lead to queries for which iteration is slow or has several
                ends.
            method, max_steps: As for `massieu.solve.fixed_point`. Where a query's fixed point is not found the last state is
                used, `convergence` has status and residual of each query, and a warning says so once.
            throw: Raise instead.

        Raises:
            ValueError, TypeError: numbers out of their range.
        """
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and {num_heads}")
        self.pull = Alpha(alpha, num_heads, 0.0, 1.0, learn=learn_alpha)
        register_number(self, "scale", scale, num_heads)
        if contraction is not None and not (isinstance(contraction, float) and 0 < contraction < 1):
            raise ValueError(f"contraction must be a number between 0 and 1 or None, got {contraction!r}")
        self.query_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.num_heads, self.batch_first = num_heads, batch_first
        self.contraction, self.method, self.max_steps, self.throw = contraction, method, max_steps, throw

    @property
    def alpha(self) -> float | Tensor:
        """α: a number, or a tensor of one or one a head."""
        return self.pull()

    def forward(
        self,
        query: Float[Tensor, "B L embed_dim"],
        key: Float[Tensor, "B N kdim"] | None = None,
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B L embed_dim"]:
        """The projected fixed points, in the query's dtype.

        Args:
            query, key: Batch first, or (L, B, ·) with `batch_first=False`. Without keys, the queries.
            key_padding_mask, attn_mask, is_causal: As for `Attention`.

        Raises:
            ValueError, TypeError: shapes that do not fit.
            ConvergenceError: with `throw`, a query has no fixed point, with its residual and what to try.
        """
        found = self.solve(query, key, key_padding_mask, attn_mask, is_causal)
        self._keep(found.status, found.residual)
        output = self.out_proj(merge_heads(found.value).to(query.dtype))
        return output if self.batch_first else output.transpose(0, 1)

    def solve(
        self,
        query: Float[Tensor, "B L embed_dim"],
        key: Float[Tensor, "B N kdim"] | None = None,
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> FixedPointResult:
        """The fixed points themselves, (B, H, L, D), with status, steps and residual of each. Arguments as for a call."""
        key = query if key is None else key
        for name, tensor in (("query", query), ("key", key)):
            if floating(name, tensor).ndim != 3:
                raise ValueError(
                    f"{name} must have three dimensions, batch, length and size, got {tuple(tensor.shape)}"
                )
            check_input(name, tensor, self.query_proj if name == "query" else self.key_proj)
        batch = 0 if self.batch_first else 1
        if query.shape[batch] != key.shape[batch]:
            raise ValueError(f"query and key must have one batch size, got {tuple(query.shape)} and {tuple(key.shape)}")
        if not self.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        queries, keys = (
            split_heads(self.query_proj(query), self.num_heads),
            split_heads(self.key_proj(key), self.num_heads),
        )
        log_weight = log_weight_of(key_padding_mask, attn_mask, (*queries.shape[:3], keys.shape[2]))
        given = {"log_weight": log_weight, "scale": self.scale}
        options = {name: value for name, value in given.items() if value is not None}

        def pulled(point: Tensor, query: Tensor, key: Tensor, alpha: Tensor, options: dict[str, Any]) -> Tensor:
            retrieved = ops.attention(point, key, key, is_causal=is_causal, **options).output
            return query + alpha * (retrieved - query)

        with without_autocast(query.device):
            dtype = torch.promote_types(queries.dtype, torch.float32)
            alpha = torch.as_tensor(self.alpha, dtype=dtype, device=query.device).reshape(-1, 1, 1)
            if self.contraction is not None:
                scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
                beta = torch.as_tensor(scale, dtype=dtype, device=query.device).reshape(-1, 1, 1)
                # In a ball of radius r, D is at most 2r.
                excess = keys.to(dtype).square().sum(-1, keepdim=True) * (alpha * beta / self.contraction)
                keys = keys / excess.clamp(min=1.0).sqrt().to(keys.dtype)
            return fixed_point(
                pulled,
                queries,
                (queries, keys, alpha, options),
                method=self.method,
                max_steps=self.max_steps,
                # α·scale times a covariance is symmetric.
                linear_solver="cg",
                throw=self.throw,
                lost_derivative="nan" if self.throw else "zero",
            )
