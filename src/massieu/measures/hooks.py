"""The hooks of a measure: those that its author writes, and the defaults of all others.

Only `_log_partition` is needed, and the two shapes if the first tensor is not of shape (*batch, d). Every other hook has a
default, which is derived from these with `torch.func` or returns None; override one with a closed form only. Hooks receive
floating-point tensors of one dtype, float32 or wider, that lie in the domain; they check nothing.
"""

from abc import abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from massieu.foundation.numerics import GAUSS_LEGENDRE
from massieu.foundation.values import Value, align


def _embedded_rule() -> list[float]:
    """Weights on five of the nodes of `GAUSS_LEGENDRE`, 0 on the others, for ∫₀¹ (1 − t) f(t) dt: exact up to degree four."""
    # The moments ∫₀¹ (1 − t) tᵏ dt = 1/((k + 1)(k + 2)) determine the weights.
    chosen = [0, 2, 3, 5, 7]
    powers = np.vander([GAUSS_LEGENDRE[i][0] for i in chosen], increasing=True).T
    weights = np.zeros(8)
    weights[chosen] = np.linalg.solve(powers, [1 / ((k + 1) * (k + 2)) for k in range(5)])
    return weights.tolist()


_EMBEDDED_WEIGHTS = _embedded_rule()

Reference = Literal["counting", "lebesgue", "surface", "mixed"]
"""The measure that a density is taken with respect to; "mixed" has atoms and a density."""


class Listed(NamedTuple):
    """A discrete measure as a list of its points, with the sizes that determine each point's rounding."""

    points: Tensor
    """Shape (*batch, N, d)."""
    log_weight: Tensor
    """Shape (*batch, N)."""
    size: Tensor
    """Sum of the absolute values of the numbers that each coordinate was added up from, shape (*batch, N, d)."""


class MissingFormError(TypeError):
    """A measure has no sampler, or no density, in closed form.

    Example:
        >>> from massieu.measures import MissingFormError, Uniform, convolve
        >>> try:
        ...     convolve(Uniform.create(0.0, 1.0), Uniform.create(0.0, 2.0)).log_prob([0.0], [1.0])
        ... except MissingFormError as error:
        ...     print(error)
        convolve: the density of a sum of Uniform and Uniform has no closed form
    """


class Hooks(Value):
    """The hooks of a measure. ``lead`` below is the shape ``(*batch, *query)``, that of eta without its event."""

    # Written by the author.

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of measures this value holds: by default that of the first tensor, (*batch, d)."""
        return self._first.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one point, at least one dimension: by default the last one of the first tensor."""
        return self._first.shape[-1:]

    @property
    def _first(self) -> Tensor:
        """The first field that is a tensor."""
        for name in self.__dataclass_fields__:
            if isinstance(value := getattr(self, name), Tensor):
                return value
        raise TypeError(f"{type(self).__name__} has no tensor to tell its shapes: override batch_shape and event_shape")

    @abstractmethod
    def _log_partition(self, eta: Tensor) -> Tensor:
        """A(eta), shape ``lead``, twice differentiable on the whole domain."""

    # Facts about the measure, optional.

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        """Whether A(eta) is finite, shape ``lead``; None if it is on all of R^d."""
        return None

    def _domain(self) -> str:
        """The domain in words, with its bounds, for the error's message."""
        return "all of R^d"

    def _interior(self) -> Tensor | None:
        """A point inside the domain, shape ``(*batch, *event)``; None stands for the origin."""
        return None

    def _support(self, direction: Tensor) -> Tensor | None:
        """sup x·direction over the support of h, shape ``lead``; None if it is unknown."""
        return None

    def _range(self) -> tuple[Tensor, Tensor] | None:
        """The least and the greatest value of each coordinate over the support of h, ±inf allowed, shape ``(*batch, d)``.

        For measures on vectors. The default asks `_support` for both directions of each axis, which takes d² numbers; it is
        None if that is.
        """
        like = [*self._leaves(), torch.zeros(())][0]
        size = self.event_shape[0]
        axes = torch.eye(size, dtype=like.dtype, device=like.device)
        axes = axes.expand(*self.batch_shape, size, size)
        high = self._support(axes)
        minus_low = self._support(-axes)
        if high is None or minus_low is None:
            return None
        return -minus_low, high

    @property
    def _reference(self) -> Reference:
        """The measure that `_log_density` is taken with respect to."""
        return "lebesgue"

    def _log_density(self, point: Tensor) -> Tensor:
        """The log-density of h, shape ``lead``; −inf outside the support."""
        raise MissingFormError(f"{type(self).__name__} has no density in closed form")

    def _nearest(self, point: Tensor) -> Tensor | None:
        """The point of h's support that is nearest to `point`, of the same shape; None if it is unknown.

        In floating point x + s − s is not exactly x. So if a point is computed by a difference, the density of a law whose
        support has no interior is taken at the nearest point of the support, provided that it is within rounding.
        """
        return point if self._reference == "lebesgue" else None

    def _listed(self) -> Listed | None:
        """A discrete measure as a list of its points; None if it has more than `listed.MOST_LISTED`, or is not discrete."""
        return None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws from p_eta, shape ``(*shape, *lead, *event)``."""
        raise MissingFormError(f"{type(self).__name__} has no sampler")

    def _natural(self, mu: Tensor) -> Tensor | None:
        """The eta of least norm whose mean is `mu`; ±inf on the boundary, NaN outside. None: no closed form."""
        return None

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        """A*(mu), shape ``lead``, on the boundary too; +inf outside. None: no closed form."""
        return None

    # Units: groups of coordinates that are independent of each other under every p_eta.

    def _unit_sizes(self) -> list[int]:
        """How many coordinates each unit has, in their order. By default all are one unit."""
        return [self.event_shape.numel()]

    def _log_partition_of_units(self, eta: Tensor) -> Tensor:
        """A of each unit, shape ``(*lead, units)``; their sum is A."""
        return self._log_partition(eta).unsqueeze(-1)

    def _log_prob_of_units(self, eta: Tensor, point: Tensor) -> Tensor:
        """log p_eta of each unit's coordinates, shape ``(*lead, units)``; its sum is `_log_prob`."""
        return self._log_prob(eta, point).unsqueeze(-1)

    # Derived from the log-partition.

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.func.grad(lambda point: self._log_partition(point).sum())(eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        # The Hessian is symmetric, so the transposed product is the product.
        return torch.func.vjp(self._mean, eta)[1](vector)[0]

    def _fisher(self, eta: Tensor) -> Tensor:
        event = self.event_shape
        basis = torch.eye(event.numel(), dtype=eta.dtype, device=eta.device).reshape(-1, *event)
        columns = torch.func.vmap(lambda vector: self._fisher_vp(eta, vector.expand_as(eta)))(basis)
        return columns.movedim(0, -1).reshape(*eta.shape, *event)

    def _entropy(self, eta: Tensor) -> Tensor:
        return self._log_partition(eta) - self._dot(eta, self._mean(eta))

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """log p_eta(point) = point·eta + log h(point) − A(eta). Override it if these terms may be large and cancel.

        `eta` has the shape of `point`, or size 1 in the last query dimension.
        """
        return self._dot(point, eta) + self._log_density(point) - self._log_partition(eta)

    def _fenchel(self, eta: Tensor, mu: Tensor) -> Tensor:
        """eta·mu − A(eta) as eta·(mu − ∇A(eta)) minus the entropy, which keeps more digits if ∇A(eta) is mu."""
        return self._dot(eta, mu - self._mean(eta)) - self._entropy(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """KL(p_eta ‖ p_{eta+delta}), accurate for any size of `delta`.

        By default in float64, by the more exact of two forms: the Bregman difference, or, where rounding would show in
        that, its integral ∫₀¹ (1 − t) deltaᵀ F(eta + t·delta) delta dt, whose terms are non-negative.
        """
        dtype = eta.dtype
        measure = self.to(torch.float64)
        eta = eta.double()
        delta = delta.double()
        start = measure._log_partition(eta)
        end = measure._log_partition(eta + delta)
        slope = self._dot(measure._mean(eta), delta)
        difference = end - start - slope
        # The integral by eight nodes, and by five of them: how far the two differ estimates the error.
        integral = torch.zeros_like(difference)
        coarse_integral = torch.zeros_like(difference)
        for (t, weight), embedded_weight in zip(GAUSS_LEGENDRE, _EMBEDDED_WEIGHTS, strict=True):
            curvature = self._dot(delta, measure._fisher_vp(eta + t * delta, delta))
            integral = integral + weight * (1 - t) * curvature
            coarse_integral = coarse_integral + embedded_weight * curvature
        rounding = 4 * torch.finfo(torch.float64).eps * (1 + start.abs() + end.abs() + slope.abs())
        # All nodes may miss a sudden change of the curvature, as between atoms far apart. Then the two forms differ by much
        # more than the digits that a log-partition loses by cancellation inside.
        misses_change = (integral - difference).abs() > 1e7 * rounding
        is_exact = ((integral - coarse_integral).abs() <= rounding) & ~misses_change
        # Rounding may leave either form a little below 0.
        return torch.where(is_exact, integral, difference).clamp_min(0).to(dtype)

    def _kl_to(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        """KL(p_eta ‖ p_other), delta = other − eta, which is more exact than a difference of what becomes of the two.

        Override it where the derivative in eta, the Fisher information times −delta, may be tiny beside that in `other`: if all
        goes through delta, the latter's rounding is added to the former.
        """
        return self._kl(eta, delta)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        """κ_1 … κ_order of x·direction, stacked last: the derivatives of A(eta + t·direction) at t = 0."""

        def derivatives(t: Tensor, count: int) -> tuple[Tensor, ...]:
            """The variance and its first `count` derivatives in t. By nested reverse mode, as forward mode does not compile."""
            if count == 0:
                point = eta + t.reshape(*t.shape, *[1] * len(self.event_shape)) * direction
                return (self._dot(direction, self._fisher_vp(point, direction)),)

            def total(s: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                lower = derivatives(s, count - 1)
                return lower[-1].sum(), lower

            derivative, lower = torch.func.grad(total, has_aux=True)(t)
            return (*lower, derivative)

        first = self._dot(direction, self._mean(eta))
        later = derivatives(torch.zeros_like(first), order - 2) if order > 1 else ()
        return torch.stack([first, *later], -1)

    # Helpers for authors.

    def _align(self, tensor: Tensor, eta: Tensor, rest: int = 1) -> Tensor:
        """`tensor` (*batch, *rest) with query dimensions of size 1, so that it broadcasts against `eta`.

        Its batch may be a prefix of the measure's; `rest` is the number of its last dimensions that are not batch.
        """
        return align(tensor, eta.ndim - len(self.event_shape) + rest, rest)

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum of products over the event dimensions."""
        return (left * right).sum(tuple(range(-len(self.event_shape), 0)))

    def _on_support(self, points: Tensor, original: torch.dtype) -> Tensor:
        """The points, each replaced by the nearest one of the support if rounding to the `original` dtype explains the gap."""
        nearest = None if original == points.dtype else self._nearest(points)
        if nearest is None:
            return points
        limits = torch.finfo(original)
        event_ndim = len(self.event_shape)
        is_near = (nearest - points).abs() <= limits.eps * (nearest.abs() + limits.tiny)
        is_hit = is_near.flatten(points.ndim - event_ndim).all(-1)
        return torch.where(is_hit.reshape(*is_hit.shape, *[1] * event_ndim), nearest, points)
