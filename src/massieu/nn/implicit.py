"""Attention to convergence, held by its query."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import number
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, log_weight_of
from massieu.nn.modules import HeadsOfTokens, LearnableAlpha, Number, register_number
from massieu.solve import Auto, ConjugateGradients, Implicit, Method, fixed_point
from massieu.solve.status import FixedPointResult

_AUTO = Auto()


class ImplicitAttention(HeadsOfTokens):
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
        max_lipschitz: float | None = None,
        kdim: int | None = None,
        bias: bool = True,
        batch_first: bool = True,
        method: Method = _AUTO,
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Projections of queries and keys to heads, and of the heads to the output.

        Args:
            alpha: In [0, 1); a number, or a tensor of one or one a head.
            learn_alpha: Train it, one a head.
            scale: Inverse temperature; a number, a tensor or a Parameter, one or one a head; by default the head's size to
                the −½.
            max_lipschitz: In (0, 1): longer keys are drawn in to a ball in which α·scale·D²/4, and with it the Lipschitz
                constant of a step, is at most this. Each query has one fixed point then, with a derivative, and the
                distance to it falls by this factor a step or faster. By default keys are as they come, and training may
                lead to queries for which iteration is slow or has several ends.
            method, max_steps: As for `massieu.solve.fixed_point`. Where a query's fixed point is not found the last state is
                used; `convergence` tells of each query.
            throw: Raise instead.
        """
        super().__init__(embed_dim, num_heads, bias, batch_first, query=embed_dim, key=kdim or embed_dim)
        self.pull = LearnableAlpha(alpha, num_heads, 0.0, 1.0, learn=learn_alpha)
        register_number(self, "scale", scale, num_heads)
        self.max_lipschitz = None if max_lipschitz is None else number("max_lipschitz", max_lipschitz, above=0, below=1)
        self.method, self.max_steps, self.throw = method, max_steps, throw

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
            ConvergenceError: with `throw`, a query has no fixed point, with its residual and what to try.
        """
        found = self.solve(query, key, key_padding_mask, attn_mask, is_causal)
        self._keep(found.status, found.residual)
        return self._output(found.value, query.dtype)

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
        (queries,), (keys,) = self._heads("query", query, "query"), self._heads("key", key, "key")
        if len(queries) != len(keys):
            raise ValueError(f"query and key must have one batch size, got {tuple(query.shape)} and {tuple(key.shape)}")
        log_weight = log_weight_of(key_padding_mask, attn_mask, queries, keys)
        given = {"log_weight": log_weight, "scale": self.scale}
        options = {name: value for name, value in given.items() if value is not None}

        def pulled(point: Tensor, query: Tensor, key: Tensor, alpha: Tensor, options: dict[str, Any]) -> Tensor:
            retrieved = ops.attention(point, key, key, is_causal=is_causal, **options).output
            return query + alpha * (retrieved - query)

        with without_autocast(query.device):
            dtype = torch.promote_types(queries.dtype, torch.float32)
            alpha = torch.as_tensor(self.alpha, dtype=dtype, device=query.device).reshape(-1, 1, 1)
            if self.max_lipschitz is not None:
                scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
                beta = torch.as_tensor(scale, dtype=dtype, device=query.device).reshape(-1, 1, 1)
                # In a ball of radius r, D is at most 2r.
                excess = keys.to(dtype).square().sum(-1, keepdim=True) * (alpha * beta / self.max_lipschitz)
                keys = keys / excess.clamp(min=1.0).sqrt().to(keys.dtype)
            return fixed_point(
                pulled,
                queries,
                (queries, keys, alpha, options),
                method=self.method,
                max_steps=self.max_steps,
                # α·scale times a covariance is symmetric.
                adjoint=Implicit(ConjugateGradients(), lost="nan" if self.throw else "zero"),
                throw=self.throw,
            )
