"""An attention layer as an operator on populations: every particle moves by what it attends to."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import (
    as_tensor,
    check_finite,
    check_shape,
    flag,
    floating,
    instance,
)
from massieu.foundation.values import Value, spread, static_field
from massieu.measures import Atoms, Gaussian, Measure, MissingFormError
from massieu.ops import sharded
from massieu.ops.attention import AttentionResult
from massieu.ops.sharded.collectives import Peers
from massieu.population.operator import (
    AffineMap,
    Map,
    Operator,
    ParticleMoments,
    affine_of,
    apply,
    as_map,
    law_after,
    moments,
    moments_after,
    one_number,
)


class Moving(Value):
    """The particles themselves are what is attended to."""


class AttentionLayer(Operator):
    """A multi-head attention layer as an operator on tokens, with residual connection and activation.

    x_i ← activation(x_i + step_size·(Σ_h W_O softmax_j(scale·(W_Q z_i + b_Q)·W_K y_j) W_V y_j + bias)), with
    z = normalisation(x). The population y that is attended to is either *moving*, the particles themselves (y_j = z_j), or
    *frozen*: atoms, or any measure h, for which a head writes W_O W_V ∇A_h(scale·W_Kᵀ(W_Q z + b_Q)) exactly (S3, S20).
    There is no bias of keys, which cancels in the softmax, and none of values, which adds up to a constant (S3.4, trap 14).
    Memory is linear in the particles, of which a call needs at least one.

    If normalisation and activation are affine, a Gaussian law N(m, C) of a moving population stays Gaussian (`gaussian`):
    attention is the affine map x ↦ Σ_h W_O W_V (m + scale·C W_Kᵀ(W_Q x + b_Q)). With one head, score matrix B, write matrix
    V and step size γ the law becomes m + γV(m + CBᵀm), (I + γVCBᵀ)C(I + γVCBᵀ)ᵀ (S20). A frozen population must be Gaussian
    for that. Processes that share the moving population hold the same frozen one. Gradients flow to all tensors. Use
    `create`, `from_score` or `random`.

    Attributes:
        query_weight, key_weight: W_Q and W_K, shape (H, K, d).
        value_weight: W_V, shape (H, E, d).
        output_weight: W_O, shape (H, d, E).
        query_bias: b_Q, shape (H, K): log-weights of the keys that depend on them (S3.4).
        bias: Shape (d).
        scale: Inverse temperature of each head, shape (H).
        step_size: Shape ().
        normalisation: Before attention (pre-norm): a `massieu.energy.activations.Activation`, or an operator.
        activation: After the step (post-norm): the same.
        population: `Moving()`, or the frozen one, behind the normalisation.
        residual: Whether x_i itself is in the sum.

    Example:
        >>> import torch
        >>> from massieu.population import AttentionLayer
        >>> layer = AttentionLayer.from_score(torch.zeros(2, 2), torch.eye(2))  # no scores: everyone adds the mean
        >>> layer(torch.tensor([[0.0, 2.0], [4.0, 0.0]])).tolist()
        [[2.0, 3.0], [6.0, 1.0]]
    """

    query_weight: Float[Tensor, "H K d"]
    key_weight: Float[Tensor, "H K d"]
    value_weight: Float[Tensor, "H E d"]
    output_weight: Float[Tensor, "H d E"]
    query_bias: Float[Tensor, "H K"]
    bias: Float[Tensor, "d"]
    scale: Float[Tensor, "H"]
    step_size: Float[Tensor, ""]
    normalisation: Map
    activation: Map
    population: Measure | Moving
    residual: bool = static_field()

    @classmethod
    def create(
        cls,
        query_weight: Float[Tensor, "H K d"],
        key_weight: Float[Tensor, "H K d"],
        value_weight: Float[Tensor, "H E d"],
        output_weight: Float[Tensor, "H d E"],
        *,
        query_bias: Float[Tensor, "H K"] | None = None,
        bias: Float[Tensor, "d"] | None = None,
        scale: Float[Tensor, "..."] | float | None = None,
        step_size: Float[Tensor, ""] | float = 1.0,
        normalisation: Map | None = None,
        activation: Map | None = None,
        population: Measure | Float[Tensor, "N d"] | None = None,
        residual: bool = True,
    ) -> Self:
        """A layer of these weights.

        Args:
            query_weight, key_weight, value_weight, output_weight: Matrices of each head.
            query_bias, bias: Zero by default. For a model with biases b_V of the values and b_O of the output, `bias` is
                Σ_h W_O b_V + b_O.
            scale: One number, or one for each head; K^-½ by default.
            step_size: A number.
            normalisation, activation: The identity by default.
            population: None: moving. Frozen: points of equal weight, or a measure on R^d whose batch is empty or begins
                the particles' batch.
            residual: False leaves x_i out of the sum.

        Raises:
            ValueError: shapes do not fit, or a weight is not finite.
            TypeError: weights are not floating-point, or a map or a population is of another type.
        """
        weights = {"query": query_weight, "key": key_weight, "value": value_weight, "output": output_weight}
        query, key, value, output = (floating(f"{name}_weight", weight) for name, weight in weights.items())
        if not (
            query.ndim == value.ndim == 3
            and key.shape == query.shape
            and (len(value), value.shape[-1]) == (len(query), query.shape[-1])
            and output.shape == value.mT.shape
            and query.numel() > 0
        ):
            raise ValueError(
                "query_weight and key_weight must have shape (H, K, d), value_weight (H, E, d) and output_weight "
                "(H, d, E), got " + ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in weights.items())
            )
        num_heads, size, width = query.shape
        dtype = query.dtype
        for weight in (key, value, output):
            dtype = torch.promote_types(dtype, weight.dtype)
        query, key, value, output = (weight.to(dtype) for weight in (query, key, value, output))
        check_finite(query_weight=query, key_weight=key, value_weight=value, output_weight=output)
        scale = as_tensor("scale", size**-0.5 if scale is None else scale, query)
        if tuple(scale.shape) not in ((), (num_heads,)):
            raise ValueError(f"scale must be one number or one for each of {num_heads} heads, got {tuple(scale.shape)}")
        check_finite(scale=scale)
        return cls(
            query,
            key,
            value,
            output,
            _bias("query_bias", query_bias, (num_heads, size), query),
            _bias("bias", bias, (width,), query),
            scale.expand(num_heads),
            one_number("step_size", step_size, query),
            as_map("normalisation", normalisation),
            as_map("activation", activation),
            _attended_to(population, width),
            flag("residual", residual),
        )

    @classmethod
    def from_score(
        cls,
        score: Float[Tensor, "*H d d"],
        write: Float[Tensor, "*H d d"],
        *,
        scale: Float[Tensor, "..."] | float = 1.0,
        **options: Any,
    ) -> Self:
        """A layer from B and V of S20: the score is scale·xᵀBy, and the head writes V·y.

        The scale is 1 by default, so that B itself is the score matrix. Options and errors are those of `create`.
        """
        shape = floating("score", score).shape
        if len(shape) not in (2, 3) or shape[-1] != shape[-2] or floating("write", write).shape != shape:
            raise ValueError(
                f"score and write must both have shape (d, d) or (H, d, d), got {tuple(shape)} and {tuple(write.shape)}"
            )
        score, write = (matrix if matrix.ndim == 3 else matrix.unsqueeze(0) for matrix in (score, write))
        identity = torch.eye(shape[-1], dtype=score.dtype, device=score.device).expand_as(score)
        # (Bᵀx)·y = xᵀBy: the queries carry the score matrix, keys and values are the tokens themselves.
        return cls.create(score.mT, identity, identity, write, scale=scale, **options)

    @classmethod
    def random(
        cls,
        width: int,
        heads: int = 1,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Self:
        """Weights with independent normal entries of variance 1/width, heads of size width/heads, on the generator's device.
        Options as for `create`.

        Raises:
            ValueError: `heads` does not divide `width`.
        """
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"width must be a positive multiple of heads, got {width} and {heads}")
        size = width // heads
        shapes = [(heads, size, width)] * 3 + [(heads, width, size)]
        device = None if generator is None else generator.device
        weights = [torch.randn(shape, generator=generator, dtype=dtype, device=device) / width**0.5 for shape in shapes]
        return cls.create(*weights, **options)

    @property
    def _like(self) -> Tensor:
        return self.query_weight

    def gaussian(self, law: Gaussian) -> Gaussian:
        before = self._moments(law)
        normalised = affine_of(self.normalisation, before)
        if isinstance(self.population, Moving):
            attended = moments_after(normalised, before)
        elif isinstance(self.population, Gaussian):
            attended = ParticleMoments(*(moment.to(before.mean.dtype) for moment in moments(self.population)))
        else:
            raise MissingFormError(
                f"attention to a frozen {type(self.population).__name__} is not affine: a Gaussian law does not stay "
                "Gaussian under it; with a frozen Gaussian, or a moving population, it does"
            )
        layer = self.to(before.mean.dtype)
        matrix, offset = layer._attention_to(attended)
        # Attention behind the normalisation x ↦ Nx + n: A(Nx + n) + a = (AN)x + (An + a).
        offset = layer.step_size * ((matrix @ normalised.offset.unsqueeze(-1)).squeeze(-1) + offset)
        matrix = layer.step_size * (matrix @ normalised.matrix)
        if self.residual:
            matrix = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        return law_after(self.activation, moments_after(AffineMap(matrix, offset), before))

    def _attention_to(self, law: ParticleMoments) -> AffineMap:
        """z ↦ Σ_h W_O W_V (m + scale·C W_Kᵀ(W_Q z + b_Q)) + bias."""
        # scale·W_V C W_Kᵀ, (*batch, H, E, K): how a head's mean value follows its query.
        response = self.scale[:, None, None] * (self.value_weight @ law.covariance.unsqueeze(-3) @ self.key_weight.mT)
        matrix = (self.output_weight @ response @ self.query_weight).sum(-3)
        # A head's mean value at z = 0, (*batch, H, E, 1).
        at_zero = self.value_weight @ law.mean[..., None, :, None] + response @ self.query_bias.unsqueeze(-1)
        return AffineMap(matrix, (self.output_weight @ at_zero).sum(-3).squeeze(-1) + self.bias)

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        if group is None and particles.shape[-2] == 0:
            raise ValueError(f"AttentionLayer needs at least one particle, got shape {tuple(particles.shape)}")
        attend = ops.attention
        if group is not None:
            attend = partial(sharded.attention, queries="sharded", group=group.handle)
        update = self._attended(apply(self.normalisation, particles, group), attend)
        update = self.step_size.to(particles.dtype) * update
        moved = particles + update if self.residual else update
        return apply(self.activation, moved, group)

    def _attended(self, z: Tensor, attend: Callable[..., AttentionResult]) -> Tensor:
        """What all heads write, with the bias."""
        dtype = z.dtype
        # The scale goes into the query's map, which is small.
        scale = self.scale.to(dtype)[:, None]
        query = _heads(z, scale.unsqueeze(-1) * self.query_weight.to(dtype), scale * self.query_bias.to(dtype))
        mean_value = self._mean_value(query, z, attend)
        # Heads side by side, (B, n, H·E), and W_O of all heads as one matrix (d, H·E).
        written = mean_value.transpose(1, 2).flatten(2)
        matrix = self.output_weight.to(dtype).permute(1, 0, 2).flatten(1)
        return F.linear(written, matrix, self.bias.to(dtype)).reshape(z.shape)

    def _mean_value(self, query: Tensor, z: Tensor, attend: Callable[..., AttentionResult]) -> Float[Tensor, "B H n E"]:
        """The mean value of each query under the population that it attends to."""
        dtype = z.dtype
        batch = z.shape[:-2]
        key_map = self.key_weight.to(dtype)
        value_map = self.value_weight.to(dtype)
        if isinstance(self.population, Moving):
            return attend(query, _heads(z, key_map), _heads(z, value_map), scale=1.0).output
        if isinstance(self.population, Atoms):
            points = spread("the population attended to", self.population.points.to(dtype), batch, 2)
            log_weight = spread("the population attended to", self.population.log_weight.to(dtype), batch, 1)
            keys = _heads(points, key_map)
            values = _heads(points, value_map)
            log_weight = log_weight.reshape(len(query), 1, 1, log_weight.shape[-1])
            return ops.attention(query, keys, values, log_weight=log_weight, scale=1.0).output
        # Any other measure on R^d is tilted by eta = W_Kᵀq, (*batch, H, n, d), for which its mean is exact.
        eta = (query @ key_map).reshape(*batch, len(key_map), *z.shape[-2:])
        mean = self.population.mean(eta).to(dtype)
        return (mean @ value_map.mT).reshape(*query.shape[:-1], value_map.shape[-2])


def _heads(points: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Float[Tensor, "B H n K"]:
    """Points (*batch, n, d) mapped by a matrix (H, K, d) for each head; batches are flattened."""
    flat = points.reshape(points.shape[:-2].numel(), *points.shape[-2:])
    image = F.linear(flat, matrix.flatten(0, 1), None if bias is None else bias.flatten())
    return image.unflatten(-1, matrix.shape[:2]).transpose(1, 2)


def _bias(name: str, bias: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if bias is None:
        return like.new_zeros(shape)
    check_shape(name, floating(name, bias), shape)
    check_finite(**{name: bias})
    return bias.to(like)


def _attended_to(population: Measure | Tensor | None, width: int) -> Measure | Moving:
    """What a layer attends to: the particles themselves for None, points as atoms, or a measure as it is."""
    if population is None:
        return Moving()
    if isinstance(population, Tensor):
        population = Atoms.create(population)
    instance("population", population, Measure, "a measure, a tensor of points or None")
    if population.event_shape != (width,):
        raise ValueError(f"population must live in {width} dimensions, got {tuple(population.event_shape)}")
    return population
