"""Attention without a softmax: scores that are normalised to mean and standard deviation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.measures import stable
from massieu.nn.heads import Mask, added, merge_log_weights, per_head, position_mask
from massieu.nn.multihead import Attended, MultiHead
from massieu.ops.shapes import without_autocast


class NormalizedAttention(MultiHead):
    """Weights (gain·(z_n − z̄)/σ_z + level)/N of scores z = query·key/√D (Richter and Wattenhofer, 2020; B18).

    z̄ and σ_z² are mean and variance over the keys that are seen. With values = keys the output is the gradient of
    gain·σ_z + level·z̄, in (query/√D): in place of log Z stands the standard deviation of the scores. With log-weights
    w_n, all means are weighted by w_n/Σw. Weights sum to `level` and may be negative, so outputs leave the hull of the
    values.

    Where the weights need not be formed (no `need_weights`, dropout, causality or mask per query) the keys enter through
    their covariance with the values: time and memory are linear in queries and keys. Call and state dict are
    `torch.nn.MultiheadAttention`'s, with `gain` and `level`, one a head, beside. `need_log_partition=True` returns
    gain·σ_z + level·z̄; 0 for a query that sees no key, as its output.
    """

    gain: nn.Parameter
    level: nn.Parameter

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
        eps: float = 1e-5,
    ) -> None:
        """The arguments of `torch.nn.MultiheadAttention`, and `eps` > 0, which is added to the variance.

        Raises:
            ValueError, TypeError: numbers out of their range.
        """
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))
        self.level = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))

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
        per_key = not is_causal and (log_weight is None or log_weight.shape[1] == log_weight.shape[2] == 1)
        seen = position_mask(query.shape[2], key.shape[2], is_causal, None, query.device)
        shares = _shares(merge_log_weights(log_weight, seen), key.new_zeros(1, 1, 1, key.shape[2], dtype=dtype))
        with without_autocast(query.device):
            parts = query.to(dtype) * self.head_dim**-0.5, key.to(dtype), value.to(dtype), shares
            if per_key and not need_weights and not self._drops:
                output, potential = self._by_covariance(*parts)
                return Attended(output.to(query.dtype), None, potential)
            output, weights, potential = self._by_weights(*parts)
        return Attended(output.to(query.dtype), weights.to(query.dtype), potential)

    def _by_weights(
        self, query: Tensor, key: Tensor, value: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor, Float[Tensor, "B H L"]]:
        scores = query @ key.mT
        mean = (shares * scores).sum(-1, keepdim=True)
        centred = scores - mean
        deviation = ((shares * centred.square()).sum(-1, keepdim=True) + self.eps).sqrt()
        gain, level = per_head(self.gain), per_head(self.level)
        weights = shares * (gain * centred / deviation + level)
        potential = gain * deviation + level * mean
        return self._dropped(weights) @ value, weights, self._where_seen(potential, shares).squeeze(-1)

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
        return torch.where((shares > 0).any(-1, keepdim=True), potential, 0.0)


def _shares(log_weight: Mask | None, like: Tensor) -> Float[Tensor, "#B #H #L N"]:
    """Weights of the keys that sum to one, or are all 0."""
    return stable.log_softmax(added(log_weight, like)).exp()
