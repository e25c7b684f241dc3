"""Tokens and a Gaussian background as one carrier, to which attention gives weights, means and draws (E5)."""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.measures import Gaussian
from massieu.ops.resampling import Method, ResamplingResult


class HybridCarrier(NamedTuple):
    """Σ_j δ(x_j) + w·N(m, Σ) under the tilt of each query: the background is one more key, the last.

    Its score depends on the query alone: it is the background's log-mass under that tilt. One more coordinate holds that
    number in each query, 1 in the background's key and 0 in the other keys. So every score stays a product of query and
    key, and memory stays linear in both.
    """

    query: Float[Tensor, "1 B n k+1"]
    key: Float[Tensor, "1 B n+1 k+1"]
    value: Float[Tensor, "1 B n+1 d"]
    """0 for the background, whose mean value differs from query to query."""
    tilt: Float[Tensor, "1 B n d"]
    """scale·KᵀQx_i, in the space of the tokens."""

    @classmethod
    def of(
        cls,
        query_key_value: tuple[Tensor, Tensor, Tensor],
        key_weight: Tensor | None,
        scale: float | None,
        background: Gaussian,
        log_weight: float,
    ) -> Self:
        """The carrier of a head's queries, keys and values.

        Raises:
            ValueError: the background has another dimension than the tokens.
        """
        query, key, value = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in query_key_value)
        inverse_temperature = key.shape[-1] ** -0.5 if scale is None else scale
        query = query * inverse_temperature
        tilt = query if key_weight is None else query @ key_weight.to(query)
        size = background.event_shape[0]
        if size != tilt.shape[-1]:
            raise ValueError(f"background is on {size} dimensions, the tokens have {tilt.shape[-1]}")
        log_mass = log_weight + background.log_partition(tilt)
        queries = torch.cat([query, log_mass.to(query).unsqueeze(-1)], -1)
        background_key = F.pad(key.new_ones(*key.shape[:2], 1, 1), (key.shape[-1], 0))
        keys = torch.cat([F.pad(key, (0, 1)), background_key], -2)
        values = F.pad(value, (0, 0, 0, 1))
        return cls(queries, keys, values, tilt)

    def share(self) -> Float[Tensor, "1 B n"]:
        """The probability of the background."""
        return (self.query[..., -1] - ops.log_partition(self.query, self.key, scale=1.0)).exp()

    def mean(self, background: Gaussian, value_weight: Tensor | None) -> Float[Tensor, "1 B n d"]:
        """The mean value under the tilted carrier."""
        output, log_partition = ops.attention(self.query, self.key, self.value, scale=1.0)
        share = (self.query[..., -1] - log_partition).exp().unsqueeze(-1)
        return output + share * _values_of(background.mean(self.tilt), value_weight)

    def draw(
        self,
        background: Gaussian,
        value_weight: Tensor | None,
        *,
        generator: torch.Generator,
        draws: int,
        method: Method,
    ) -> ResamplingResult:
        """Draws from the tilted carrier; a draw of index n is a new token of the background."""
        drawn = ops.resample_attention(
            self.query, self.key, self.value, scale=1.0, generator=generator, draws=draws, method=method
        )
        # A tilt moves a Gaussian by Ση and leaves its covariance. Draws of the untilted one, moved by that much, have a
        # gradient in the tilt; a choice among tokens has none.
        shift = background.mean(self.tilt) - background.location
        untilted = background.sample(torch.zeros_like(shift), draws, generator=generator).movedim(0, -2)
        new_tokens = _values_of(untilted + shift.unsqueeze(-2), value_weight)
        is_new = (drawn.indices == self.key.shape[-2] - 1).unsqueeze(-1)
        return drawn._replace(sample=torch.where(is_new, new_tokens.to(drawn.sample), drawn.sample))


def _values_of(tokens: Tensor, value_weight: Tensor | None) -> Tensor:
    return tokens if value_weight is None else tokens @ value_weight.to(tokens).mT
