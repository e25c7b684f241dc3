"""The heads of attention that is iterated to its fixed point, pulled to the query."""

from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import number
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask
from massieu.nn.modules import LearnableAlpha, Number
from massieu.nn.strategy import Request, Retrieval, SolvedHeads
from massieu.solve import ConjugateGradients, Method
from massieu.solve.methods import AS_IT_PAYS
from massieu.solve.status import FixedPointResult


class ImplicitHeads(SolvedHeads):
    """Implicit attention: each head returns the fixed point of z = (1 − α)·query + α·Σ p_n key_n (B12).

    p = softmax(scale·z·key_n). It is a critical point of (1 − α)‖z − query‖²/2 + α·E(z), E the Hopfield energy of the
    keys: a query pulled towards stored patterns. With α = 1 the query would have no effect on it and no gradient. Unique
    where α·scale·D²/4 < 1, D the largest distance of two keys. Gradients are those of the implicit function theorem: memory
    does not grow with the number of steps. A query that sees no key keeps (1 − α)·query. The keys are the values: the
    module has no projection of values, and a call takes the key, or none, as value. There are no weights to return.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, ImplicitHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=ImplicitHeads(alpha=0.5))
        >>> query, key = (torch.full((1, 1, 1, 1), number) for number in (1.0, 3.0))
        >>> float(attention.heads.solve(query, key).value)  # one pattern: half-way to it
        2.0
    """

    projections = ("query", "key")
    unsupported = MappingProxyType(
        {**SolvedHeads.unsupported, **dict.fromkeys(("vdim", "add_bias_kv", "add_zero_attn"), "keys are the values")}
    )
    pull: LearnableAlpha
    scale: Tensor | float | None

    def __init__(
        self,
        *,
        alpha: float | Tensor = 0.5,
        learn_alpha: bool = False,
        scale: Number = None,
        max_lipschitz: float | None = None,
        method: Method = AS_IT_PAYS,
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Takes the pull, and how fixed points are found.

        Args:
            alpha: In [0, 1); a number, or a tensor of one or one a head.
            learn_alpha: Train it, one a head.
            scale: As for `SoftmaxHeads`.
            max_lipschitz: In (0, 1): longer keys are drawn in to a ball in which α·scale·D²/4, and with it the Lipschitz
                constant of a step, is at most this. Each query has one fixed point then, with a derivative, and the
                distance to it falls by this factor a step or faster. By default keys are as they come, and training may
                lead to queries for which iteration is slow or has several ends.
            method, max_steps: As for `massieu.solve.fixed_point`. Where a query's fixed point is not found the last state is
                used; `convergence` tells of each query.
            throw: Raise a ConvergenceError instead, with the residual and what to try.
        """
        super().__init__(method, max_steps, throw, scale=scale)
        self._alpha_start = alpha
        self._learn_alpha = learn_alpha
        self.max_lipschitz = None if max_lipschitz is None else number("max_lipschitz", max_lipschitz, above=0, below=1)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.pull = LearnableAlpha(
            self._alpha_start, self.num_heads, low=0.0, high=1.0, learn=self._learn_alpha, device=device, dtype=dtype
        )

    @property
    def alpha(self) -> float | Tensor:
        """α: a number, or a tensor of one or one a head."""
        return self.pull()

    def solve(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H N D"],
        *,
        log_weight: Mask | None = None,
        is_causal: bool = False,
    ) -> FixedPointResult:
        """The fixed points, (B, H, L, D), with status, steps and residual of each, from what `Attention.project` returns.

        `log_weight` is as for `massieu.ops.attention`: in booleans True keeps.

        Raises:
            ConvergenceError: with `throw`, a query has no fixed point, with its residual and what to try.
        """
        options = self._options(log_weight)

        def pulled(point: Tensor, query: Tensor, key: Tensor, alpha: Tensor, options: dict[str, Any]) -> Tensor:
            retrieved = ops.attention(point, key, key, is_causal=is_causal, **options).output
            return query + alpha * (retrieved - query)

        with without_autocast(query.device):
            alpha = self._pull(query)
            parameters = (query, self._drawn_in(key, alpha), alpha, options)
            # The step's derivative, α·scale times a covariance, is symmetric: conjugate gradients do.
            return self._find_fixed_point(pulled, query, parameters, 1, ConjugateGradients())

    def _options(self, log_weight: Mask | None) -> dict[str, Any]:
        """Arguments of attention without those that are None, since a fixed point's parameters are tensors and numbers."""
        options = {"log_weight": log_weight, "scale": self.scale}
        return {name: value for name, value in options.items() if value is not None}

    def _pull(self, query: Tensor) -> Float[Tensor, "#H 1 1"]:
        """α in float32 at the least."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        return torch.as_tensor(self.alpha, dtype=dtype, device=query.device).reshape(-1, 1, 1)

    def _drawn_in(self, key: Float[Tensor, "B H N D"], alpha: Tensor) -> Float[Tensor, "B H N D"]:
        """The keys, drawn in to the ball in which a step's Lipschitz constant is at most `max_lipschitz`."""
        if self.max_lipschitz is None:
            return key
        scale = key.shape[-1] ** -0.5 if self.scale is None else self.scale
        beta = torch.as_tensor(scale, dtype=alpha.dtype, device=key.device).reshape(-1, 1, 1)
        # In a ball of radius r, D is at most 2r, and the constant α·β·D²/4 at most α·β·r².
        excess = key.to(alpha.dtype).square().sum(-1, keepdim=True) * (alpha * beta / self.max_lipschitz)
        return key / excess.clamp(min=1.0).sqrt().to(key.dtype)

    def _retrieval(self, point: Tensor, *heads: Tensor, request: Request) -> Retrieval:
        query, key = heads
        alpha = self._pull(query)
        key = self._drawn_in(key, alpha).to(alpha.dtype)
        return Retrieval(
            arguments=(point.to(key.dtype), key, key),
            options=self._options(request.log_weight) | {"is_causal": request.is_causal},
            step=lambda retrieved: query + alpha * (retrieved - query),
            moves_query=True,
        )
