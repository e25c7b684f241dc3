"""What layers of one head share whose weights are not softmax's: tokens to heads, results to tokens, laws to laws."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Identity
from massieu.measures import Gaussian
from massieu.population.operator import AffineMap, Map, ParticleMoments, apply, apply_to_law, need_law, need_map, pushed
from massieu.population.reading import check_cloud


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """x_i ← contraction(step_size·out_i), or contraction(x_i + step_size·out_i): one head's queries, keys and values.

    Attributes:
        query, key: Maps (k, d) to queries and keys; None: the tokens as they are.
        value: A map (d, d) to values; None: the tokens as they are.
        scale: Inverse temperature of the scores.
        step_size: A number.
        residual: Whether x_i itself is in the sum; without it tokens are replaced.
        contraction: Of the moved tokens: a `massieu.energy.activations.Activation`, or an operator.
    """

    query: Float[Tensor, "k d"] | None = None
    key: Float[Tensor, "k d"] | None = None
    value: Float[Tensor, "d d"] | None = None
    scale: float = 1.0
    step_size: float = 1.0
    residual: bool = False
    contraction: Map = field(default_factory=Identity)

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or not math.isfinite(self.step_size):
            raise ValueError(f"scale and step_size must be finite, got {self.scale} and {self.step_size}")
        need_map("contraction", self.contraction)

    def heads(self, particles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of shape (1, batch, n, ·), at least float32; each cloud of a batch is a head.

        Where `key` is `query`, one tensor is both.
        """
        check_cloud(particles)
        self._need_width(particles.shape[-1])
        tokens = particles.to(torch.promote_types(particles.dtype, torch.float32))
        tokens = tokens.reshape(1, -1, *tokens.shape[-2:])
        query, key, value = (
            tokens if weight is None else tokens @ weight.to(tokens).T for weight in (self.query, self.key, self.value)
        )
        return query, query if self.key is self.query else key, value

    def moved(self, particles: Tensor, output: Tensor) -> Tensor:
        """Where the outputs take the tokens."""
        move = self.step_size * output.reshape(*particles.shape[:-1], output.shape[-1])
        return apply(self.contraction, particles.to(move) + move if self.residual else move)

    def weighed(self, law: object) -> tuple[ParticleMoments, Tensor, Tensor]:
        """A law's moments, and scale·KᵀQ and V as matrices, for the law after the layer."""
        before = need_law(self, law, None, torch.float32)
        width = before.mean.shape[-1]
        self._need_width(width)
        identity = torch.eye(width, dtype=before.mean.dtype, device=before.mean.device)
        query, key, value = (
            identity if weight is None else weight.to(identity) for weight in (self.query, self.key, self.value)
        )
        return before, self.scale * key.T @ query, value

    def law_after(self, before: ParticleMoments, output: AffineMap, spread: Tensor | None = None) -> Gaussian:
        """The law of tokens whose output is an affine map of them, with independent noise of that covariance."""
        matrix, offset = self.step_size * output.matrix, self.step_size * output.offset
        if self.residual:
            matrix = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        mean, covariance = pushed(AffineMap(matrix, offset), before)
        if spread is not None:
            covariance = covariance + self.step_size**2 * spread
        return Gaussian.create(*apply_to_law(self.contraction, ParticleMoments(mean, covariance)))

    def _need_width(self, width: int) -> None:
        for name in ("query", "key", "value"):
            weight = getattr(self, name)
            if weight is not None and (weight.ndim != 2 or weight.shape[1] != width):
                raise ValueError(
                    f"{name} must have shape (·, {width}) for tokens of d = {width}, got {tuple(weight.shape)}"
                )
