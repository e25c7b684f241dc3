"""One head whose weights are not softmax's: from tokens to queries, keys and values, and from its output to tokens and laws."""

from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import flag, floating, number
from massieu.foundation.values import static_field
from massieu.measures import Gaussian
from massieu.population.operator import (
    AffineMap,
    Map,
    Operator,
    ParticleMoments,
    apply,
    as_map,
    law_after,
    moments_after,
)


class HeadOptions(TypedDict, total=False):
    """Options of every layer with one head; meanings and defaults as in `Head`."""

    query_weight: Float[Tensor, "k d"] | None
    key_weight: Float[Tensor, "k d"] | None
    value_weight: Float[Tensor, "d d"] | None
    scale: float | None
    step_size: float
    residual: bool
    activation: Map | None


class Head(Operator):
    """A layer with one head: x_i ← activation(step_size·out_i), or activation(x_i + step_size·out_i) with `residual`.

    Attributes:
        query_weight, key_weight: Matrices (k, d) of queries and keys; None: the tokens as they are.
        value_weight: A matrix (d, d) of values; None: the tokens as they are.
        scale: Inverse temperature of the scores; None: k^-½.
        step_size: A number, 1 by default.
        residual: Whether x_i itself is in the sum; by default it is not, and the output replaces the token.
        activation: Applied to the moved tokens: a `massieu.energy.activations.Activation`, or an operator.
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
        """Queries, keys and values of shape (1, batch, n, ·): each cloud of the batch is a head.

        If query_weight and key_weight are one tensor, queries and keys are one tensor too, as `sinkhorn` needs it.
        """
        if 0 in particles.shape[-2:]:
            shape = tuple(particles.shape)
            raise ValueError(f"{type(self).__name__} needs at least one particle and one dimension, got shape {shape}")
        self._check_weights(particles.shape[-1])
        tokens = particles.reshape(1, -1, *particles.shape[-2:])
        weights = (self.query_weight, self.key_weight, self.value_weight)
        query, key, value = (tokens if weight is None else tokens @ weight.to(tokens).T for weight in weights)
        if self.key_weight is self.query_weight:
            key = query
        return query, key, value

    def _after(self, particles: Tensor, output: Tensor) -> Tensor:
        """The tokens after the layer, for the head's output."""
        update = self.step_size * output.reshape(*particles.shape[:-1], output.shape[-1])
        moved = particles.to(update) + update if self.residual else update
        return apply(self.activation, moved, None)

    def _matrices(self, law: object) -> tuple[ParticleMoments, Tensor, Tensor]:
        """The moments of a law, and scale·KᵀQ and V as matrices (d, d), for the law after the layer."""
        before = self._moments(law)
        width = before.mean.shape[-1]
        self._check_weights(width)
        identity = torch.eye(width, dtype=before.mean.dtype, device=before.mean.device)
        weights = (self.query_weight, self.key_weight, self.value_weight)
        query, key, value = (identity if weight is None else weight.to(identity) for weight in weights)
        scale = len(key) ** -0.5 if self.scale is None else self.scale
        return before, scale * key.T @ query, value

    def _law_after(self, before: ParticleMoments, output: AffineMap, noise: Tensor | None = None) -> Gaussian:
        """The law after the layer, if the head's output is an affine map of the token plus independent noise.

        Args:
            before: The moments of the tokens.
            output: The affine map.
            noise: The covariance of the noise; None: no noise.
        """
        matrix = self.step_size * output.matrix
        offset = self.step_size * output.offset
        if self.residual:
            matrix = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        mean, covariance = moments_after(AffineMap(matrix, offset), before)
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
    """The checked options of a head, as the fields of its class.

    Raises:
        TypeError: a weight is no floating-point tensor, a scale or a step size no number, the activation of another type,
            or an option does not exist.
        ValueError: a scale or a step size is not finite.
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
