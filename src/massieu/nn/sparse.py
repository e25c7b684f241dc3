"""The heads of attention by α-entmax, whose weights are exactly zero for low scores."""

import math

import torch
from torch import Tensor

from massieu.energy.entmax import entmax, entmax_conjugate
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import attention_scores, per_head, with_positions
from massieu.nn.modules import LearnableAlpha, Number
from massieu.nn.strategy import Heads, HeadsResult, Request


class EntmaxHeads(Heads):
    """Heads with α-entmax weights, which can be exactly 0 (Correia, Niculae and Martins, 2019; B19).

    They are the gradient of Ω*, as softmax is that of log Z. Weights sum to one and are exactly 0 more than 1/(α − 1)
    below the largest score; α = 1 is softmax, 2 sparsemax. A call may ask for Ω* by `need_potential`. Memory is L×N.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, EntmaxHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=EntmaxHeads(alpha=2.0))
        >>> _ = torch.nn.init.ones_(attention.in_proj_weight)  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[1.0], [0.5], [-2.0]]]))
        >>> weights[0, 0].round(decimals=3).tolist()
        [0.75, 0.25, 0.0]
    """

    extras = ("potential",)
    order: LearnableAlpha
    scale: Tensor | float | None

    def __init__(self, *, alpha: float | Tensor = 1.5, learn_alpha: bool = False, scale: Number = None) -> None:
        """Takes α and the scale.

        Args:
            alpha: At least 1; a number, or a tensor of one or one a head.
            learn_alpha: Train it, one a head, within (1, 2), from `alpha`.
            scale: As for `SoftmaxHeads`.
        """
        super().__init__(scale=scale)
        self._alpha_start = alpha
        self._learn_alpha = learn_alpha

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.order = LearnableAlpha(
            self._alpha_start,
            self.num_heads,
            low=1.0,
            high=math.inf,
            learn=self._learn_alpha,
            device=device,
            dtype=dtype,
        )

    @property
    def alpha(self) -> float | Tensor:
        """α: a number, or a tensor of one or one a head."""
        return self.order()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        log_weight = with_positions(request.log_weight, query, key, request.is_causal)
        alpha = per_head(self.alpha)
        with without_autocast(query.device):
            scores = attention_scores(query, key, self.scale)
            weights = entmax(scores, alpha, log_weight=log_weight)
            potential = entmax_conjugate(scores, alpha, log_weight=log_weight) if request.extra else None
            output = request.dropped(weights) @ value.to(weights.dtype)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype), potential)
