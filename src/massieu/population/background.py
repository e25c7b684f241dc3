"""Tokens and a Gaussian background as one carrier: what attention to both weighs, averages and draws (E5)."""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.measures import Gaussian
from massieu.ops.resampling import Method, ResamplingResult


class HybridCarrier(NamedTuple):
    """Σ_j δ(x_j) + w·N(m, Σ) under the tilt of each query, as attention to one more key, the last.

    One more coordinate holds the background's log-mass in each query, and 1 in its key: every score is a product, and
    memory stays linear in queries and keys.
    """

    query: Float[Tensor, "1 B n k+1"]
    key: Float[Tensor, "1 B n+1 k+1"]
    value: Float[Tensor, "1 B n+1 d"]
    """0 for the background, whose value is each query's own."""
    tilt: Float[Tensor, "1 B n d"]
    """scale·KᵀQx_i, in the space of the tokens."""

    @classmethod
    def of(
        cls,
        heads: tuple[Tensor, Tensor, Tensor],
        key_weight: Tensor | None,
        scale: float | None,
        background: Gaussian,
        log_weight: float,
    ) -> Self:
        """The carrier of a head's queries, keys and values; a ValueError for a background of another size than tokens."""
        query, key, value = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in heads)
        query = query * (key.shape[-1] ** -0.5 if scale is None else scale)
        tilt = query if key_weight is None else query @ key_weight.to(query)
        size = background.event_shape[0]
        if size != tilt.shape[-1]:
            raise ValueError(f"background is on {size} dimensions, the tokens have {tilt.shape[-1]}")
        level = log_weight + background.log_partition(tilt)
        last = F.pad(key.new_ones(*key.shape[:2], 1, 1), (key.shape[-1], 0))
        keys = torch.cat([F.pad(key, (0, 1)), last], -2)
        return cls(torch.cat([query, level.to(query).unsqueeze(-1)], -1), keys, F.pad(value, (0, 0, 0, 1)), tilt)

    def share(self) -> Float[Tensor, "1 B n"]:
        """The probability of the background."""
        return (self.query[..., -1] - ops.log_partition(self.query, self.key, scale=1.0)).exp()

    def mean(self, background: Gaussian, value_weight: Tensor | None) -> Float[Tensor, "1 B n d"]:
        """The mean value under the tilted carrier."""
        output, log_partition = ops.attention(self.query, self.key, self.value, scale=1.0)
        share = (self.query[..., -1] - log_partition).exp().unsqueeze(-1)
        return output + share * _valued(background.mean(self.tilt), value_weight)

    def draw(
        self,
        background: Gaussian,
        value_weight: Tensor | None,
        *,
        generator: torch.Generator,
        draws: int,
        method: Method,
    ) -> ResamplingResult:
        """Draws from it: of index n those that are new tokens."""
        options = {"generator": generator, "draws": draws, "method": method}
        drawn = ops.resample_attention(self.query, self.key, self.value, scale=1.0, **options)
        # A tilt moves a Gaussian: so a new token has a gradient, where a choice among tokens has none.
        moved = background.mean(self.tilt) - background.location
        noise = background.sample(torch.zeros_like(moved), draws, generator=generator).movedim(0, -2)
        new = _valued(noise + moved.unsqueeze(-2), value_weight)
        born = (drawn.indices == self.key.shape[-2] - 1).unsqueeze(-1)
        return drawn._replace(sample=torch.where(born, new.to(drawn.sample), drawn.sample))


def _valued(tokens: Tensor, value_weight: Tensor | None) -> Tensor:
    return tokens if value_weight is None else tokens @ value_weight.to(tokens).mT
