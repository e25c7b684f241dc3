"""What layers of one head share: how tokens become queries, keys and values, and where the result goes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.population.reading import check_cloud


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """x_i ← contraction(out_i), or contraction(x_i + step·out_i): one head's queries, keys and values of the tokens.

    Attributes:
        query, key: Maps (k, d) to queries and keys; None: the tokens as they are.
        value: A map (d, d) to values; None: the tokens as they are.
        scale: Inverse temperature of the scores.
        step: Of the residual connection; None: there is none, tokens are replaced.
        contraction: Applied to the moved tokens.
    """

    query: Float[Tensor, "k d"] | None = None
    key: Float[Tensor, "k d"] | None = None
    value: Float[Tensor, "d d"] | None = None
    scale: float = 1.0
    step: float | None = None
    contraction: Callable[[Tensor], Tensor] | None = field(default=None)

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or (self.step is not None and not math.isfinite(self.step)):
            raise ValueError(f"scale and step must be finite, got {self.scale} and {self.step}")
        if self.contraction is not None and not callable(self.contraction):
            raise TypeError(f"contraction must be callable, got {type(self.contraction).__name__}")

    def heads(self, particles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of shape (1, batch, n, ·), at least float32; each cloud of a batch is a head.

        Where `key` is `query`, one tensor is both.
        """
        check_cloud(particles)
        tokens = particles.to(torch.promote_types(particles.dtype, torch.float32))
        tokens = tokens.reshape(1, -1, *tokens.shape[-2:])
        found = []
        for name in ("query", "key", "value"):
            weight = getattr(self, name)
            if weight is not None and (weight.ndim != 2 or weight.shape[1] != tokens.shape[-1]):
                raise ValueError(
                    f"{name} must have shape (·, {tokens.shape[-1]}) for particles {tuple(particles.shape)}, "
                    f"got {tuple(weight.shape)}"
                )
            found.append(tokens if weight is None else tokens @ weight.to(tokens).T)
        query, key, value = found
        return query, query if self.key is self.query else key, value

    def moved(self, particles: Tensor, output: Tensor) -> Tensor:
        """Where the outputs take the tokens, in their dtype."""
        output = output.reshape(*particles.shape[:-1], output.shape[-1])
        after = output if self.step is None else particles.to(output) + self.step * output
        return (after if self.contraction is None else self.contraction(after)).to(particles.dtype)
