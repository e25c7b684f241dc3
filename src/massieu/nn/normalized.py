"""The heads of attention without a softmax: scores that are normalised to mean and standard deviation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import number
from massieu.foundation.numerics import log_softmax
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import added, per_head, with_positions
from massieu.nn.modules import hold
from massieu.nn.strategy import Heads, HeadsResult, Request, same_for_queries


class NormalizedHeads(Heads):
    """Heads that standardise their scores in place of a softmax (Richter and Wattenhofer, 2020; B18).

    Weights are (gain·(z_n − z̄)/σ_z + level)/N for scores z = query·key/√D, with mean z̄ and variance σ_z² over the
    visible keys. With values = keys the output is the gradient of gain·σ_z + level·z̄, in (query/√D): in place of log Z
    stands the standard deviation of the scores. With log-weights w_n, all means are weighted by w_n/Σw. Weights sum to
    `level` and may be negative, so outputs leave the hull of the values. `gain` and `level`, one a head, are trained
    from 1.

    Where the weights need not be formed (no `need_weights`, dropout, causality or mask per query) the keys enter through
    their covariance with the values: time and memory are linear in queries and keys. A call may ask for
    gain·σ_z + level·z̄ by `need_potential`; it is 0 for a query that sees no key, as its output.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, NormalizedHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=NormalizedHeads(eps=1e-12))
        >>> _ = torch.nn.init.ones_(attention.in_proj_weight)  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[1.0], [-1.0]]]))
        >>> weights[0, 0].round(decimals=3).tolist()  # scores 1 and -1 have mean 0 and deviation 1: (z + 1)/2
        [1.0, 0.0]
    """

    extras = ("potential",)
    gain: nn.Parameter
    level: nn.Parameter

    def __init__(self, *, eps: float = 1e-5) -> None:
        """Takes eps, positive, which is added to the variance of the scores."""
        super().__init__()
        self.eps = number("eps", eps, above=0)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        for name in ("gain", "level"):
            hold(self, name, torch.ones(self.num_heads, device="cpu"), True, device, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = torch.promote_types(query.dtype, torch.float32)
        is_same_for_queries = same_for_queries(request)
        log_weight = with_positions(request.log_weight, query, key, request.is_causal)
        # The keys' weights w_n/Σw in all means: they sum to one, or are all 0 for a query that sees no key.
        shares = log_softmax(added(log_weight, key.new_zeros(1, 1, 1, key.shape[2], dtype=dtype))).exp()
        with without_autocast(query.device):
            scaled_query = query.to(dtype) * self.head_dim**-0.5
            if is_same_for_queries and not request.need_weights and not request.dropout:
                output, potential = self._by_covariance(scaled_query, key.to(dtype), value.to(dtype), shares)
                return HeadsResult(output.to(query.dtype), None, potential)
            output, weights, potential = self._by_weights(scaled_query, key.to(dtype), value.to(dtype), shares, request)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype), potential)

    def _by_weights(
        self, query: Tensor, key: Tensor, value: Tensor, shares: Tensor, request: Request
    ) -> tuple[Tensor, Tensor, Float[Tensor, "B H L"]]:
        """Output, weights and potential through the matrix of scores, (B, H, L, N)."""
        scores = query @ key.mT
        mean = (shares * scores).sum(-1, keepdim=True)
        centred = scores - mean
        deviation = ((shares * centred.square()).sum(-1, keepdim=True) + self.eps).sqrt()
        gain = per_head(self.gain)
        level = per_head(self.level)
        weights = shares * (gain * centred / deviation + level)
        potential = gain * deviation + level * mean
        return request.dropped(weights) @ value, weights, self._where_seen(potential, shares).squeeze(-1)

    def _by_covariance(
        self, query: Tensor, key: Tensor, value: Tensor, shares: Tensor
    ) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """Output and potential without the scores, whose variance is queryᵀ·Cov(key, key)·query.

        The centred scores' products with values likewise sum to queryᵀ·Cov(key, value).
        """
        mean_key = shares @ key
        mean_value = shares @ value
        weighted_key = shares.mT * (key - mean_key)
        key_covariance = weighted_key.mT @ (key - mean_key)
        value_covariance = weighted_key.mT @ (value - mean_value)
        deviation = ((query @ key_covariance * query).sum(-1, keepdim=True) + self.eps).sqrt()
        gain = per_head(self.gain)
        level = per_head(self.level)
        output = gain * (query @ value_covariance) / deviation + level * mean_value
        potential = gain * deviation + level * (query @ mean_key.mT)
        return output, self._where_seen(potential, shares).squeeze(-1)

    @staticmethod
    def _where_seen(potential: Tensor, shares: Tensor) -> Tensor:
        """The potential, 0 for a query that sees no key."""
        return torch.where((shares == 0).all(-1, keepdim=True), 0.0, potential)
