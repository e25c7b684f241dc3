"""What layers of one head share whose weights are not softmax's: tokens to heads, results to tokens, laws to laws."""

from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import flag, floating, number
from massieu.foundation.values import static_field
from massieu.measures import Gaussian
from massieu.population.operator import AffineMap, Map, Operator, ParticleMoments, apply, as_map, law_after, pushed


class HeadOptions(TypedDict, total=False):
    """What every layer of one head may be given; meanings and defaults as in `Head`."""

    query_weight: Float[Tensor, "k d"] | None
    key_weight: Float[Tensor, "k d"] | None
    value_weight: Float[Tensor, "d d"] | None
    scale: float | None
    step_size: float
    residual: bool
    activation: Map | None


class Head(Operator):
    """x_i ← activation(step_size·out_i), or activation(x_i + step_size·out_i): one head's queries, keys and values.

    Attributes:
        query_weight, key_weight: Maps (k, d) to queries and keys; None: the tokens as they are.
        value_weight: A map (d, d) to values; None: the tokens as they are.
        scale: Inverse temperature of the scores; None: k^-½.
        step_size: A number, 1 by default.
        residual: Whether x_i itself is in the sum; without it, as by default, tokens are replaced.
        activation: Of the moved tokens: a `massieu.energy.activations.Activation`, or an operator.
    """

    needs_all = True

    query_weight: Float[Tensor, "k d"] | None
    key_weight: Float[Tensor, "k d"] | None
    value_weight: Float[Tensor, "d d"] | None
    scale: float | None = static_field()
    step_size: float = static_field()
    residual: bool = static_field()
    activation: Map

    def _heads(self, particles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of shape (1, batch, n, ·); each cloud of a batch is a head.

        Where the two weights are one tensor, so are queries and keys.
        """
        if 0 in particles.shape[-2:]:
            shape = tuple(particles.shape)
            raise ValueError(f"{type(self).__name__} needs at least one particle and one dimension, got shape {shape}")
        self._check_weights(particles.shape[-1])
        tokens = particles.reshape(1, -1, *particles.shape[-2:])
        weights = (self.query_weight, self.key_weight, self.value_weight)
        query, key, value = (tokens if weight is None else tokens @ weight.to(tokens).T for weight in weights)
        return query, query if self.key_weight is self.query_weight else key, value

    def _after(self, particles: Tensor, output: Tensor) -> Tensor:
        """Where the outputs take the tokens."""
        move = self.step_size * output.reshape(*particles.shape[:-1], output.shape[-1])
        return apply(self.activation, particles.to(move) + move if self.residual else move, None)

    def _weighed(self, law: object) -> tuple[ParticleMoments, Tensor, Tensor]:
        """A law's moments, and scale·KᵀQ and V as matrices, for the law after the layer."""
        before = self._moments(law)
        width = before.mean.shape[-1]
        self._check_weights(width)
        identity = torch.eye(width, dtype=before.mean.dtype, device=before.mean.device)
        weights = (self.query_weight, self.key_weight, self.value_weight)
        query, key, value = (identity if weight is None else weight.to(identity) for weight in weights)
        return before, (len(key) ** -0.5 if self.scale is None else self.scale) * key.T @ query, value

    def _law_after(self, before: ParticleMoments, output: AffineMap, noise: Tensor | None = None) -> Gaussian:
        """The law of tokens whose output is an affine map of them, with independent noise of that covariance."""
        matrix, offset = self.step_size * output.matrix, self.step_size * output.offset
        if self.residual:
            matrix = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        mean, covariance = pushed(AffineMap(matrix, offset), before)
        if noise is not None:
            covariance = covariance + self.step_size**2 * noise
        return law_after(self.activation, ParticleMoments(mean, covariance))

    def _check_weights(self, width: int) -> None:
        for name in ("query_weight", "key_weight", "value_weight"):
            weight = getattr(self, name)
            if weight is not None and (weight.ndim != 2 or weight.shape[1] != width):
                raise ValueError(
                    f"{name} must have shape (·, {width}) for tokens of d = {width}, got {tuple(weight.shape)}"
                )


def checked(options: HeadOptions) -> dict[str, Any]:
    """The fields of a head.

    Raises:
        TypeError: a weight that is no floating-point tensor, a number that is none, another activation, or an option
            that does not exist.
        ValueError: a number that is not finite.
    """
    if unknown := set(options) - set(HeadOptions.__annotations__):
        raise TypeError(
            f"a layer of one head has no option {min(unknown)}; it has {', '.join(HeadOptions.__annotations__)}"
        )
    weights = {name: options.get(name) for name in ("query_weight", "key_weight", "value_weight")}
    for name, weight in weights.items():
        if weight is not None:
            floating(name, weight)
    scale = options.get("scale")
    return weights | {
        "scale": None if scale is None else number("scale", scale),
        "step_size": number("step_size", options.get("step_size", 1.0)),
        "residual": flag("residual", options.get("residual", False)),
        "activation": as_map("activation", options.get("activation")),
    }
