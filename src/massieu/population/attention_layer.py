"""An attention layer as an operator on populations: every particle moves by what it attends to."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu import ops
from massieu.energy.contraction import Identity
from massieu.measures import Atoms, Gaussian, Measure, MissingFormError
from massieu.measures.value import static_field
from massieu.ops import sharded
from massieu.ops.sharded.collectives import Group
from massieu.ops.sharded.keys import Processes
from massieu.population.arguments import need_finite, need_tensors
from massieu.population.operator import (
    AffineMap,
    Map,
    ParticleMoments,
    Value,
    admit,
    admit_share,
    affine_of,
    apply,
    apply_sharded,
    apply_to_law,
    moments,
    need_law,
    need_map,
    need_sharded,
    pushed,
)
from massieu.population.weights import Moving, aligned, check_weights, filled, split_heads, what_is_attended_to

Attend = Callable[..., ops.AttentionResult]


class AttentionLayer(Value):
    """x_i ← contraction(x_i + step_size·(Σ_h W_O softmax_j(scale·(W_Q z_i + b_Q)·W_K y_j) W_V y_j + bias)).

    Here z is normalisation(x). The population y is *moving*, the particles themselves (y_j = z_j), or *frozen*: atoms, or any
    measure h, whose part of the sum is W_O W_V ∇A_h(scale·W_Kᵀ(W_Q z + b_Q)) exactly (S3, S20). A bias of the keys cancels in
    the softmax and that of the values adds up to a constant (S3.4, trap 14), so there are none. In memory linear in the
    particles.

    A law N(m, C) of a moving population goes to another one where both maps are affine (`gaussian`): attention is then
    the affine map x ↦ Σ_h W_O W_V (m + scale·C W_Kᵀ(W_Q x + b_Q)). Use `create`, `from_score` or `random`. A value and a
    pytree: gradients flow to all its tensors.

    Attributes:
        query, key: W_Q and W_K, shape (H, K, d).
        value: W_V, shape (H, E, d).
        output: W_O, shape (H, d, E).
        query_bias: b_Q, shape (H, K): log-weights of the keys that depend on them (S3.4).
        bias: Shape (d).
        scale: Inverse temperature of each head, shape (H).
        step_size: Shape ().
        normalisation: Before attention (pre-norm): a `massieu.energy.contraction.Contraction`, or an operator.
        contraction: After the step (post-norm): the same.
        population: `Moving()`, or the frozen one, behind the normalisation.
        residual: Whether x_i itself is in the sum.
    """

    query: Float[Tensor, "H K d"]
    key: Float[Tensor, "H K d"]
    value: Float[Tensor, "H E d"]
    output: Float[Tensor, "H d E"]
    query_bias: Float[Tensor, "H K"]
    bias: Float[Tensor, "d"]
    scale: Float[Tensor, "H"]
    step_size: Float[Tensor, ""]
    normalisation: Map
    contraction: Map
    population: Measure | Moving
    residual: bool = static_field()

    @classmethod
    def create(
        cls,
        query: Float[Tensor, "H K d"],
        key: Float[Tensor, "H K d"],
        value: Float[Tensor, "H E d"],
        output: Float[Tensor, "H d E"],
        *,
        query_bias: Float[Tensor, "H K"] | None = None,
        bias: Float[Tensor, "d"] | None = None,
        scale: Float[Tensor, "..."] | float | None = None,
        step_size: Float[Tensor, ""] | float = 1.0,
        normalisation: Map | None = None,
        contraction: Map | None = None,
        population: Measure | Float[Tensor, "N d"] | None = None,
        residual: bool = True,
    ) -> Self:
        """A layer of these weights.

        Args:
            query, key, value, output: Matrices of each head.
            query_bias, bias: Zero by default; of biases b_V of the values and b_O, `bias` is Σ_h W_O b_V + b_O.
            scale: One number, or one a head; K^-½ by default.
            step_size: A number.
            normalisation, contraction: The identity by default.
            population: Moving by default; frozen: points of equal weight, or a measure on R^d, of no batch or of a batch that
                the particles' batch begins with.
            residual: False leaves x_i out of the sum.

        Raises:
            ValueError: shapes that do not fit; a weight that is not finite.
            TypeError: weights that are not floating-point; a map or a population of another type.
        """
        check_weights(query, key, value, output)
        heads, size, width = query.shape
        dtype = query.dtype
        for each in (key, value, output):
            dtype = torch.promote_types(dtype, each.dtype)
        query, key, value, output = (each.to(dtype) for each in (query, key, value, output))
        query_bias = filled("query_bias", query_bias, (heads, size), query)
        bias = filled("bias", bias, (width,), query)
        scale = torch.as_tensor(size**-0.5 if scale is None else scale, dtype=dtype, device=query.device)
        if tuple(scale.shape) not in ((), (heads,)):
            raise ValueError(f"scale must be one number or one for each of {heads} heads, got {tuple(scale.shape)}")
        step_size = torch.as_tensor(step_size, dtype=dtype, device=query.device)
        if step_size.ndim:
            raise ValueError(f"step_size must be one number, got shape {tuple(step_size.shape)}")
        need_finite(scale=scale, step_size=step_size)
        normalisation = Identity() if normalisation is None else normalisation
        contraction = Identity() if contraction is None else contraction
        need_map("normalisation", normalisation)
        need_map("contraction", contraction)
        return cls(
            query, key, value, output, query_bias, bias, scale.expand(heads), step_size, normalisation, contraction,
            what_is_attended_to(population, width), residual,
        )  # fmt: skip

    @classmethod
    def from_score(
        cls,
        score: Float[Tensor, "*H d d"],
        write: Float[Tensor, "*H d d"],
        *,
        scale: Float[Tensor, "..."] | float = 1.0,
        **options: Any,
    ) -> Self:
        """From B and V of S20: the score is scale·xᵀBy, and what is written is V·y. Options are those of `create`.

        Raises:
            ValueError, TypeError: as `create`.
        """
        need_tensors(score=score, write=write)
        if score.ndim not in (2, 3) or score.shape[-1] != score.shape[-2] or write.shape != score.shape:
            raise ValueError(
                f"score and write must both have shape (d, d) or (H, d, d), got {tuple(score.shape)} and "
                f"{tuple(write.shape)}"
            )
        score, write = (each if each.ndim == 3 else each.unsqueeze(0) for each in (score, write))
        same = torch.eye(score.shape[-1], dtype=score.dtype, device=score.device).expand_as(score)
        return cls.create(score.mT, same, same, write, scale=scale, **options)

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
        """Weights with independent normal entries of variance 1/width, heads of size width/heads. Options as for `create`.

        Raises:
            ValueError: `heads` does not divide `width`.
        """
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"width must be a positive multiple of heads, got {width} and {heads}")
        size = width // heads
        query, key, value = (
            torch.randn(heads, size, width, generator=generator, dtype=dtype) / width**0.5 for _ in range(3)
        )
        output = torch.randn(heads, width, size, generator=generator, dtype=dtype) / width**0.5
        return cls.create(query, key, value, output, **options)

    @property
    def width(self) -> int:
        """d."""
        return self.query.shape[-1]

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after the layer, each batch a population of its own; at least float32.

        Raises:
            ValueError, TypeError: another shape, or not floating-point.
        """
        x = self._admit(particles)
        if x.shape[-2] == 0:
            raise ValueError(f"AttentionLayer needs at least one particle, got shape {tuple(x.shape)}")
        return apply(self.contraction, self._step(x, apply(self.normalisation, x), ops.attention))

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for this process's particles, of any number, of a population spread over a group of processes.

        Equal to one process with all particles, to rounding; the objective is the sum of the processes' losses
        (`massieu.ops.sharded`, queries="sharded"): particles get their gradient of it, weights this process's part.
        A frozen population is the same on all processes.

        Raises:
            ValueError, TypeError: as the call; a map that needs the whole population; there is no process group.
            RuntimeError: another process refused its arguments, or it died.
        """
        need_sharded(self.normalisation, self.contraction)
        x = admit_share(self, particles, self.width, self.query.dtype, Group.of(group), residual=self.residual)
        attend = partial(sharded.attention, queries="sharded", group=group)
        moved = self._step(x, apply_sharded(self.normalisation, x, group), attend)
        return apply_sharded(self.contraction, moved, group)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law of infinitely many particles of law N(m, C), after the layer: Gaussian again (S20).

        With one head, score matrix B, write matrix V and step size γ: m + γV(m + CBᵀm) and (I + γVCBᵀ)C(I + γVCBᵀ)ᵀ.

        Raises:
            MissingFormError: the law is Gaussian no more: a map that is not affine, or a frozen population that is not
                Gaussian.
            ValueError, TypeError: a law in another number of dimensions, or another measure.
        """
        before = need_law(self, law, self.width, self.query.dtype)
        normalised = affine_of(self.normalisation, before)
        if isinstance(self.population, Moving):
            attended = pushed(normalised, before)
        elif isinstance(self.population, Gaussian):
            attended = ParticleMoments(*(part.to(before.mean.dtype) for part in moments(self.population)))
        else:
            raise MissingFormError(
                f"attention to a frozen {type(self.population).__name__} is not affine: a Gaussian law does not stay "
                "Gaussian under it; with a frozen Gaussian, or a moving population, it does"
            )
        weights: AttentionLayer = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(before.mean.dtype), self)
        matrix, offset = weights._attention_to(attended)
        offset = weights.step_size * ((matrix @ normalised.offset.unsqueeze(-1)).squeeze(-1) + offset)
        matrix = weights.step_size * (matrix @ normalised.matrix)
        if self.residual:
            matrix = matrix + torch.eye(self.width, dtype=matrix.dtype, device=matrix.device)
        return Gaussian.create(*apply_to_law(self.contraction, pushed(AffineMap(matrix, offset), before)))

    def _attention_to(self, law: ParticleMoments) -> AffineMap:
        """z ↦ Σ_h W_O W_V (m + scale·C W_Kᵀ(W_Q z + b_Q)) + bias."""
        scale = self.scale[:, None, None]
        answer = scale * (self.value @ law.covariance.unsqueeze(-3) @ self.key.mT)
        matrix = (self.output @ answer @ self.query).sum(-3)
        written = self.value @ law.mean[..., None, :, None] + answer @ self.query_bias.unsqueeze(-1)
        return AffineMap(matrix, (self.output @ written).sum(-3).squeeze(-1) + self.bias)

    def _admit(self, particles: Tensor) -> Tensor:
        return admit(self, particles, self.width, self.query.dtype)

    def _step(self, x: Tensor, z: Tensor, attend: Attend) -> Tensor:
        move = self.step_size.to(x.dtype) * self._attended(z, attend)
        return x + move if self.residual else move

    def _attended(self, z: Tensor, attend: Attend) -> Tensor:
        """What all heads write, with the bias."""
        dtype, batch = z.dtype, z.shape[:-2]
        # The scale goes into the query's map, which is small.
        scale = self.scale.to(dtype)[:, None]
        query = split_heads(z, scale.unsqueeze(-1) * self.query.to(dtype), scale * self.query_bias.to(dtype))
        key_map, value_map = self.key.to(dtype), self.value.to(dtype)
        if isinstance(self.population, Moving):
            found = attend(query, split_heads(z, key_map), split_heads(z, value_map), scale=1.0).output
        elif isinstance(self.population, Atoms):
            points = aligned(self.population.points.to(dtype), batch, 2)
            log_weight = aligned(self.population.log_weight.to(dtype), batch, 1)
            log_weight = log_weight.reshape(len(query), 1, 1, -1)
            keys, values = split_heads(points, key_map), split_heads(points, value_map)
            found = ops.attention(query, keys, values, log_weight=log_weight, scale=1.0).output
        else:
            eta = (query @ key_map).reshape(*batch, len(key_map), *z.shape[-2:])
            found = (self.population.mean(eta).to(dtype) @ value_map.mT).reshape(*query.shape[:-1], -1)
        written = found.transpose(1, 2).flatten(2)
        matrix = self.output.to(dtype).permute(1, 0, 2).flatten(1)
        return F.linear(written, matrix, self.bias.to(dtype)).reshape(z.shape)
