"""The heads of attention without a softmax: scores that are normalised to mean and standard deviation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import number
from massieu.foundation.numerics import log_softmax
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import added, per_head, with_positions
from massieu.nn.modules import hold
from massieu.nn.strategy import Heads, HeadsResult, Request


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
        """Takes what is added to the variance, positive."""
        super().__init__()
        self.eps = number("eps", eps, above=0)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        for name in ("gain", "level"):
            hold(self, name, torch.ones(self.num_heads, device="cpu"), True, device, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = torch.promote_types(query.dtype, torch.float32)
        given = request.log_weight
        per_key = not request.is_causal and (given is None or given.shape[1] == given.shape[2] == 1)
        log_weight = with_positions(given, query, key, request.is_causal)
        # Weights of the keys that sum to one, or are all 0.
        shares = log_softmax(added(log_weight, key.new_zeros(1, 1, 1, key.shape[2], dtype=dtype))).exp()
        with without_autocast(query.device):
            parts = query.to(dtype) * self.head_dim**-0.5, key.to(dtype), value.to(dtype), shares
            if per_key and not request.need_weights and not request.dropout:
                output, potential = self._by_covariance(*parts)
                return HeadsResult(output.to(query.dtype), None, potential)
            output, weights, potential = self._by_weights(*parts, request)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype), potential)

    def _by_weights(
        self, query: Tensor, key: Tensor, value: Tensor, shares: Tensor, request: Request
    ) -> tuple[Tensor, Tensor, Float[Tensor, "B H L"]]:
        scores = query @ key.mT
        mean = (shares * scores).sum(-1, keepdim=True)
        centred = scores - mean
        deviation = ((shares * centred.square()).sum(-1, keepdim=True) + self.eps).sqrt()
        gain, level = per_head(self.gain), per_head(self.level)
        weights = shares * (gain * centred / deviation + level)
        potential = gain * deviation + level * mean
        return request.dropped(weights) @ value, weights, self._where_seen(potential, shares).squeeze(-1)

    def _by_covariance(
        self, query: Tensor, key: Tensor, value: Tensor, shares: Tensor
    ) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """The same from the covariances of keys with themselves and with values."""
        mean_key, mean_value = shares @ key, shares @ value
        weighted = shares.mT * (key - mean_key)
        deviation = ((query @ (weighted.mT @ (key - mean_key)) * query).sum(-1, keepdim=True) + self.eps).sqrt()
        gain, level = per_head(self.gain), per_head(self.level)
        output = gain * (query @ (weighted.mT @ (value - mean_value))) / deviation + level * mean_value
        potential = gain * deviation + level * (query @ mean_key.mT)
        return output, self._where_seen(potential, shares).squeeze(-1)

    @staticmethod
    def _where_seen(potential: Tensor, shares: Tensor) -> Tensor:
        return torch.where((shares == 0).all(-1, keepdim=True), 0.0, potential)
