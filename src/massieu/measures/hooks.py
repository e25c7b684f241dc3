"""What the author of a measure writes, and what follows from it by default.

Only `_log_partition` is needed, and the two shapes where the first tensor is not of shape (*batch, d). Every other hook has a
default, derived from these with `torch.func`, or says that nothing is known; override one with a closed form only. Hooks
are given floating-point tensors of one dtype, float32 or wider, that lie in the domain; they check nothing.
"""

from abc import abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from massieu.foundation.numerics import GAUSS_LEGENDRE
from massieu.foundation.values import Value, align


def _embedded_rule() -> list[float]:
    """Weights on five of these nodes, 0 on the others, for ∫₀¹ (1 − t) f(t) dt: exact up to degree four."""
    chosen = [0, 2, 3, 5, 7]
    powers = np.vander([GAUSS_LEGENDRE[i][0] for i in chosen], increasing=True).T
    weights = np.zeros(8)
    weights[chosen] = np.linalg.solve(powers, [1 / ((k + 1) * (k + 2)) for k in range(5)])
    return weights.tolist()


_EMBEDDED = _embedded_rule()

Reference = Literal["counting", "lebesgue", "surface", "mixed"]
"""What a density is taken with respect to; "mixed" has atoms and a density."""


class Listed(NamedTuple):
    """A discrete measure's points, log-weights, and how large the numbers are that each point was added up from."""

    points: Tensor  # (*batch, N, d)
    log_weight: Tensor  # (*batch, N)
    size: Tensor  # (*batch, N, d)


class MissingFormError(TypeError):
    """A measure has no sampler, or no density, that is known in closed form.

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

    # What an author writes.

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

    # What a measure may say of itself.

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        """Where A(eta) is finite, shape ``lead``; None where that is all of R^d."""
        return None

    def _domain(self) -> str:
        """The domain in words, with its bounds, for the error's message."""
        return "all of R^d"

    def _interior(self) -> Tensor | None:
        """A point inside the domain, shape ``(*batch, *event)``; None stands for the origin."""
        return None

    def _support(self, direction: Tensor) -> Tensor | None:
        """sup x·direction over the support of h, shape ``lead``; None where it is not known."""
        return None

    def _range(self) -> tuple[Tensor, Tensor] | None:
        """The least and the greatest value of each coordinate over the support of h, ±inf allowed, shape ``(*batch, d)``.

        None where `_support` is not known, by which it is found by default, in d² numbers. Of measures on vectors.
        """
        like = [*self._leaves(), torch.zeros(())][0]
        batch, size = self.batch_shape, self.event_shape[0]
        axes = torch.eye(size, dtype=like.dtype, device=like.device)
        axes = axes.expand(*batch, size, size)
        high, low = self._support(axes), self._support(-axes)
        return None if high is None or low is None else (-low, high)

    @property
    def _reference(self) -> Reference:
        """What `_log_density` is a density of."""
        return "lebesgue"

    def _log_density(self, point: Tensor) -> Tensor:
        """The log-density of h, shape ``lead``; −inf outside the support."""
        raise MissingFormError(f"{type(self).__name__} has no density in closed form")

    def _nearest(self, point: Tensor) -> Tensor | None:
        """The point of h's support that is nearest to `point`, of the same shape; None where it is not known.

        The terms of a sum do not come back exactly when one is taken off again: laws whose support has no interior are
        asked for their density there, if that is within rounding.
        """
        return point if self._reference == "lebesgue" else None

    def _listed(self) -> Listed | None:
        """A discrete measure as a list of its points, where these are no more than `listed.MOST_LISTED`, else None."""
        return None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws from p_eta, shape ``(*shape, *lead, *event)``."""
        raise MissingFormError(f"{type(self).__name__} has no sampler")

    def _natural(self, mu: Tensor) -> Tensor | None:
        """The eta, of least norm, whose mean is `mu`; ±inf on the boundary, NaN outside; None: no closed form."""
        return None

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        """A*(mu), shape ``lead``: its value on the boundary too, +inf outside; None: no closed form."""
        return None

    # What follows from the log-partition.

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
        """log p_eta(point): `_log_density` tilted. A form for it keeps digits where these three terms are large.

        `eta` has the shape of `point`, or one query in the place of the last query dimension.
        """
        return self._dot(point, eta) + self._log_density(point) - self._log_partition(eta)

    def _fenchel(self, eta: Tensor, mu: Tensor) -> Tensor:
        """eta·mu − A(eta), by the entropy, which keeps more digits."""
        return self._dot(eta, mu - self._mean(eta)) - self._entropy(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """KL(p_eta ‖ p_{eta+delta}), accurate for any size of `delta`.

        By default in float64, by the more exact of two forms: the Bregman difference, or, where rounding would show in
        that, its integral ∫₀¹ (1 − t) deltaᵀ F(eta + t·delta) delta dt, whose terms are non-negative.
        """
        dtype, measure, eta, delta = eta.dtype, self.to(torch.float64), eta.double(), delta.double()
        start, end = measure._log_partition(eta), measure._log_partition(eta + delta)
        slope = self._dot(measure._mean(eta), delta)
        difference = end - start - slope
        integral, coarse = torch.zeros_like(difference), torch.zeros_like(difference)
        for (t, weight), embedded in zip(GAUSS_LEGENDRE, _EMBEDDED, strict=True):
            curvature = self._dot(delta, measure._fisher_vp(eta + t * delta, delta))
            integral = integral + weight * (1 - t) * curvature
            coarse = coarse + embedded * curvature
        rounding = 4 * torch.finfo(torch.float64).eps * (1 + start.abs() + end.abs() + slope.abs())
        # Nodes may all miss a sudden change, as between atoms far apart; then the two forms differ by much more than a
        # log-partition that cancels inside loses.
        missed = (integral - difference).abs() > 1e7 * rounding
        close = ((integral - coarse).abs() <= rounding) & ~missed
        # Rounding may leave either a little below 0.
        return torch.where(close, integral, difference).clamp_min(0).to(dtype)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        """κ_1 … κ_order of x·direction, stacked last: the derivatives of A(eta + t·direction) at t = 0."""

        def derivatives(t: Tensor, count: int) -> tuple[Tensor, ...]:
            """The variance and its first `count` derivatives in t. Reverse in reverse mode: forward does not compile."""
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
        """`tensor` (*batch, *rest) with singleton query dimensions, so that it broadcasts against `eta`.

        Its batch may be a prefix of the measure's; `rest` is the number of its dimensions that are not batch.
        """
        return align(tensor, eta.ndim - len(self.event_shape) + rest, rest)

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum of products over the event dimensions."""
        return (left * right).sum(tuple(range(-len(self.event_shape), 0)))

    def _on_support(self, points: Tensor, given: torch.dtype) -> Tensor:
        """The points, or the nearest of the support where that is no further off than the rounding to `given`."""
        nearest = None if given == points.dtype else self._nearest(points)
        if nearest is None:
            return points
        limits, event = torch.finfo(given), len(self.event_shape)
        near = (nearest - points).abs() <= limits.eps * (nearest.abs() + limits.tiny)
        hit = near.flatten(points.ndim - event).all(-1)
        return torch.where(hit.reshape(*hit.shape, *[1] * event), nearest, points)
