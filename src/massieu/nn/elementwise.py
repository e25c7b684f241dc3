"""The heads of attention whose weight of a key is a function of its own score: the logistic function, the positive part."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import added, attention_scores, per_head, with_positions
from massieu.nn.modules import Number, hold
from massieu.nn.strategy import Heads, HeadsResult, Request


class _ElementwiseHeads(Heads):
    """Scores scale·query·key + log-weight + bias; the bias, one a head, is trained from 0."""

    bias: nn.Parameter
    scale: Tensor | float | None

    def __init__(self, *, scale: Number = None) -> None:
        """Takes the scale, as for `SoftmaxHeads`."""
        super().__init__(scale=scale)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        hold(self, "bias", torch.zeros(self.num_heads, device="cpu"), True, device, dtype)

    def _scores(self, query: Tensor, key: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        """Scores, −inf where a key is hidden, and the number of keys that each query sees, (B, H, L, 1)."""
        log_weight = with_positions(request.log_weight, query, key, request.is_causal)
        scores = added(log_weight, attention_scores(query, key, self.scale)) + per_head(self.bias)
        return scores, (scores > -torch.inf).sum(-1, keepdim=True)


class SigmoidHeads(_ElementwiseHeads):
    """Heads with sigmoid weights σ(score − log n), n the number of visible keys (Ramapuram et al., 2024; B22, E12).

    They do not sum to one: at scores of 0 to n/(n + 1). With values = keys the output is the gradient of Σ softplus(score −
    log n) in (scale·query), for which a call may ask by `need_potential`. Log-weights are added to scores, as `attn_mask`
    says. The bias, one a head, is trained from 0. Memory is L×N.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, SigmoidHeads
        >>> attention = Attention(4, 2, batch_first=True, heads=SigmoidHeads())
        >>> _, weights = attention(torch.zeros(1, 3, 4))
        >>> weights[0, 0].tolist()  # σ(−log 3)
        [0.25, 0.25, 0.25]
    """

    extras = ("potential",)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        with without_autocast(query.device):
            scores, num_visible = self._scores(query, key, request)
            # At least 1: the logarithm of 0 would turn the hidden scores, −∞, into NaN.
            scores = scores - num_visible.clamp_min(1).to(scores.dtype).log()
            weights = torch.sigmoid(scores)
            potential = F.softplus(scores).sum(-1) if request.extra else None
            output = request.dropped(weights) @ value.to(weights.dtype)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype), potential)


class ReLUHeads(_ElementwiseHeads):
    """Heads with ReLU weights max(score, 0)/Σ max(score, 0): exactly 0 for negative scores, no exponential (B22, E12).

    A query all of whose scores are below 0 gets 0, and so does one that sees no key. Unlike softmax's, entmax's and the
    logistic weights they are no gradient with values = keys. Log-weights are added to scores, as `attn_mask` says. The bias,
    one a head, is trained from 0. Memory is L×N.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, ReLUHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=ReLUHeads())
        >>> _ = torch.nn.init.ones_(attention.in_proj_weight)  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[1.0], [3.0], [-2.0]]]))
        >>> weights[0, 0].tolist()
        [0.25, 0.75, 0.0]
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        with without_autocast(query.device):
            scores, _ = self._scores(query, key, request)
            positive = torch.relu(scores)
            total = positive.sum(-1, keepdim=True)
            # Where all scores are at most 0 the weights are 0, without 0/0.
            weights = positive / torch.where(total > 0, total, 1.0)
            output = request.dropped(weights) @ value.to(weights.dtype)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype))
