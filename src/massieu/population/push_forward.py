"""From a law of queries to a law of keys: the push-forward through the mean map of a measure."""

import math
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.duality import natural
from massieu.duality.maps import DualResult
from massieu.energy.activations import MeasureActivation
from massieu.foundation import matrices
from massieu.foundation.arguments import instance, real_tensor, whole_number
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true
from massieu.foundation.values import promoted_dtype
from massieu.measures import Measure
from massieu.ops.sharded.collectives import Peers
from massieu.population.operator import AffineMap, Operator, ParticleMoments, affine_of
from massieu.solve import Status

_DRAWS = 10_000


class PushedMoments(NamedTuple):
    """Moments of the keys, from draws of the queries, with standard errors."""

    mean: Float[Tensor, "d"]
    mean_error: Float[Tensor, "d"]
    covariance: Float[Tensor, "d d"]
    covariance_error: Float[Tensor, "d d"]
    """Of each entry."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class PushForward(Operator):
    """The map q ↦ ∇A(q) as an operator: it carries queries, and laws of queries, to the side of the keys (Shim §3.2).

    Called with queries it returns ∇A of each: attention's output if the measure is one of keys. What becomes of a law is
    answered in three ways. `gaussian(law)` is exact for a `Gaussian` measure, whose map μ + Σq is affine. `log_prob(law,
    keys)` is the density of the keys for any measure: with q = (∇A)⁻¹(k), log p(q) − log det ∇²A(q). `pushed_moments(law)`
    draws. Use `create`, which checks.

    Attributes:
        measure: Of one batch, on vectors of d numbers.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian, Spin
        >>> from massieu.population import PushForward
        >>> queries = Gaussian.create(torch.zeros(1), torch.eye(1))
        >>> to_keys = PushForward.create(Spin.create(torch.zeros(1)))  # q ↦ tanh q
        >>> round(to_keys.log_prob(queries, torch.tensor([[0.0]])).exp().item(), 4)  # 1/√(2π), since tanh'(0) = 1
        0.3989
    """

    measure: Measure

    @classmethod
    def create(cls, measure: Measure) -> Self:
        """The push-forward through the mean map of this measure.

        Raises:
            TypeError: no `massieu.measures.Measure`.
            ValueError: a batch of measures, or one whose points are no vectors.
        """
        instance("measure", measure, Measure, "a massieu.measures.Measure")
        if measure.batch_shape or len(measure.event_shape) != 1:
            raise ValueError(
                f"measure must be one measure on vectors, got batch {tuple(measure.batch_shape)} and points of shape "
                f"{tuple(measure.event_shape)}"
            )
        return cls(measure)

    def affine(self, law: ParticleMoments) -> AffineMap:
        return affine_of(MeasureActivation(self.measure), law)

    def log_prob(self, law: Measure, keys: Float[Tensor, "*items d"]) -> Float[Tensor, "*items"]:
        """The log-density of the keys k = ∇A(q), with respect to Lebesgue measure, if queries have this law; nats.

        −inf where no query leads: outside the convex hull of the support, and on its boundary. NaN where Newton's method
        finds no query, or a key is not finite.

        Args:
            law: Of the queries: a measure with a density, such as a `Gaussian`, taken as the probability p_0.
            keys: Points in key space.

        Raises:
            ValueError: another d; or the measure's support lies in a subspace, so that keys have no density.
            MissingFormError: the law has no density.
        """
        self._check_law(law)
        keys = real_tensor("keys", keys, self._some_tensor())
        size = self.measure.event_shape[0]
        if keys.ndim == 0 or keys.shape[-1] != size:
            raise ValueError(f"keys must have shape (*items, {size}), got {tuple(keys.shape)}")
        self._check_minimal(keys)
        dual = natural(self.measure, keys, throw=False)
        assert isinstance(dual, DualResult)
        converged = dual.status == Status.CONVERGED
        has_query = converged & dual.value.isfinite().all(-1)
        # A query of zeros in the place of those that are missing: NaN would reach the gradients of all.
        query = torch.where(has_query.unsqueeze(-1), dual.value, 0.0)
        log_volume = matrices.log_determinant(self.measure.fisher(query))
        density = law.log_prob(query.new_zeros(size), query) - log_volume
        without_query = torch.where(converged | (dual.status == Status.DIVERGED), -torch.inf, torch.nan)
        return torch.where(has_query, density, without_query.to(density.dtype))

    @torch.no_grad()
    def pushed_moments(
        self, law: Measure, *, draws: int = _DRAWS, generator: torch.Generator | None = None
    ) -> PushedMoments:
        """Mean and covariance of the keys if queries have this law, from independent draws, with standard errors.

        Raises:
            ValueError: fewer than two draws, or a law of another d.
            DomainError: a drawn query for which A is infinite.
            MissingFormError: the law has no sampler.
        """
        whole_number("draws", draws, least=2)
        self._check_law(law)
        origin = real_tensor("origin", [0.0] * self._width, law._some_leaf())
        keys = self.measure.mean(law.sample(origin, draws, generator=generator))
        mean = keys.mean(0)
        centred = keys - mean
        products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
        return PushedMoments(
            mean=mean,
            mean_error=keys.std(0) / math.sqrt(draws),
            covariance=products.sum(0) / (draws - 1),
            covariance_error=products.std(0) / math.sqrt(draws),
        )

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        return self.measure.mean(particles)

    @property
    def _width(self) -> int:
        return self.measure.event_shape[0]

    def _some_tensor(self) -> Tensor | None:
        return next(iter(self._leaves()), None)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return promoted_dtype(tensor, *self._leaves())

    def _check_law(self, law: object) -> None:
        instance("law", law, Measure, "a massieu.measures.Measure, such as a Gaussian")
        assert isinstance(law, Measure)
        if law.batch_shape or law.event_shape != self.measure.event_shape:
            raise ValueError(
                f"law must be one law on vectors of {self._width} numbers, as the measure, got batch "
                f"{tuple(law.batch_shape)} and points of shape {tuple(law.event_shape)}"
            )

    def _check_minimal(self, keys: Tensor) -> None:
        """Raise a ValueError if the support lies in a subspace: the mean map is not one-to-one then, see S6."""
        origin = keys.new_zeros(self._width, dtype=torch.promote_types(keys.dtype, torch.float32))
        if not all_true(~matrices.is_singular(self.measure.fisher(origin))):
            raise ValueError(
                f"{type(self.measure).__name__}: its support lies in a subspace, where keys have no density; project "
                "queries and keys to it first"
            )
