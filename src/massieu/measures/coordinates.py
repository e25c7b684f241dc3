"""Products of one-dimensional measures: A, KL and log-density are sums over coordinates; ∇A and F act on each."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from massieu.foundation.arguments import check_range, check_shape, real_tensor, whole_number
from massieu.measures.base import Measure

_MOST_LISTED = 6
"""Values of a parameter that a message lists one by one."""


class Coordinates(Measure):
    """Independent coordinates, each with its own measure on the line.

    The author of a subclass writes functions of one coordinate, applied to tensors (*batch, *query, d) elementwise:
    `_log_partition_each`, `_cumulant`, `_log_prob_each`, and `_natural_each` if the mean has an inverse in closed form.
    The bounds of the support are `_bounds` (numbers) or `_range` (tensors), those of the domain `_limits`. By default h is a
    probability; a measure that is not one overrides `_log_density_each` and `_entropy`.
    """

    _bounds: ClassVar[tuple[float, float]] = (-torch.inf, torch.inf)

    # Written by the author, for one coordinate.

    @abstractmethod
    def _log_partition_each(self, eta: Tensor) -> Tensor:
        """A of each coordinate, twice differentiable on the whole domain."""

    @abstractmethod
    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        """The cumulant of that order (from 1 to 6) of each coordinate under p_eta."""

    @abstractmethod
    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        """The log-density of each coordinate's p_eta at points of the support; finite wherever inside the range."""

    def _log_density_each(self, point: Tensor) -> Tensor:
        """The log-density of each coordinate's h at points of the support."""
        return self._log_prob_each(torch.zeros_like(point), point)

    def _range(self) -> tuple[Tensor, Tensor]:
        low, high = self._bounds
        return torch.full_like(self._first, low), torch.full_like(self._first, high)

    def _limits(self) -> tuple[Tensor, Tensor] | None:
        """The open interval of each coordinate's domain, ±inf allowed, shape (*batch, d); None: the whole line."""
        return None

    def _nearest(self, point: Tensor) -> Tensor:
        """The nearest point of the support, coordinate by coordinate; overridden if the support is no interval."""
        low, high = (self._align(bound, point) for bound in self._range())
        return point.clamp(low, high)

    def _holds(self, point: Tensor) -> Tensor:
        """Which coordinates of `point` lie in the support."""
        low, high = (self._align(bound, point) for bound in self._range())
        return (low <= point) & (point <= high) & point.isfinite()

    def _natural_each(self, mu: Tensor) -> Tensor | None:
        """The inverse of the mean, for means inside the range."""
        return None

    def _conjugate_each(self, mu: Tensor) -> Tensor | None:
        """A* of each coordinate, for means inside the range; needed if eta may round to a limit of its domain."""
        return None

    # Derived.

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._log_partition_each(eta).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._cumulant(eta, 1)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        variance = self._cumulant(eta, 2)
        # An overflowing variance times 0 is 0 and not NaN.
        return torch.where(variance.isinf() & (vector == 0), 0.0, variance * vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self._cumulant(eta, 2))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        # Of a sum of independent variables: κ_n(Σ v_i x_i) = Σ v_iⁿ κ_n(x_i).
        power = torch.ones_like(direction)
        cumulants = []
        for n in range(1, order + 1):
            power = power * direction
            cumulants.append((power * self._cumulant(eta, n)).sum(-1))
        return torch.stack(cumulants, -1)

    def _entropy(self, eta: Tensor) -> Tensor:
        # −KL(p_eta ‖ h), as h is a probability.
        return -self._kl(eta, -eta)

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        limits = self._limits()
        if limits is None:
            return None
        lower, upper = (self._align(limit, eta) for limit in limits)
        return ((lower < eta) & (eta < upper)).all(-1)

    def _support(self, direction: Tensor) -> Tensor:
        low, high = (self._align(bound, direction) for bound in self._range())
        # An unbounded coordinate adds 0, not NaN, if the direction is 0 there.
        bound = torch.where(direction == 0, 0.0, torch.where(direction > 0, high, low))
        return (bound * direction).sum(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        inside = self._holds(point)
        density = self._log_density_each(torch.where(inside, point, self._anchor(point)))
        return torch.where(inside, density, -torch.inf).sum(-1)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return self._log_prob_of_units(eta, point).sum(-1)

    def _unit_sizes(self) -> list[int]:
        return [1] * self.event_shape[0]

    def _log_partition_of_units(self, eta: Tensor) -> Tensor:
        return self._log_partition_each(eta)

    def _log_prob_of_units(self, eta: Tensor, point: Tensor) -> Tensor:
        inside = self._holds(point)
        density = self._log_prob_each(eta, torch.where(inside, point, self._anchor(point)))
        return torch.where(inside, density, -torch.inf)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        """A sum over coordinates; one at a bound b of its range adds −log h({b}), which is ∞ if b has no mass."""
        low, high = (self._align(bound, mu).expand_as(mu) for bound in self._range())
        is_inside = (low < mu) & (mu < high)
        is_at_bound = (mu == low) | (mu == high)
        eta = self._natural_each(torch.where(is_inside, mu, self._anchor(mu)))
        if eta is None:
            return None
        # A coordinate that is not inside gets an eta of the domain and the mean there, at which eta·mu − A is finite. It
        # adds 0 for a measure with masses at its bounds: that is a probability, with A = 0 at the origin.
        interior = self._interior()
        interior = torch.zeros_like(mu) if interior is None else self._align(interior, mu).expand_as(mu)
        eta = torch.where(is_inside, eta, interior)
        safe_mu = torch.where(is_inside, mu, self._mean(eta))
        conjugates = self._conjugate_each(safe_mu)
        if conjugates is None:
            value = self._fenchel(eta, safe_mu)
        else:
            value = torch.where(is_inside, conjugates, 0.0).sum(-1)
        at_bounds = torch.full_like(mu, torch.inf)
        if self._reference == "counting":
            has_mass = is_at_bound & mu.isfinite()
            log_mass = self._log_density_each(torch.where(has_mass, mu, self._anchor(mu)))
            at_bounds = torch.where(has_mass, -log_mass, torch.inf)
        return value + torch.where(is_inside, 0.0, at_bounds).sum(-1).detach()

    def _natural(self, mu: Tensor) -> Tensor | None:
        low, high = (self._align(bound, mu) for bound in self._range())
        is_inside = (low < mu) & (mu < high)
        eta = self._natural_each(torch.where(is_inside, mu, self._anchor(mu)))
        if eta is None:
            return None
        not_inside = torch.where(mu == low, -torch.inf, torch.where(mu == high, torch.inf, torch.nan))
        return torch.where(is_inside, eta, not_inside.masked_fill(mu.isinf(), torch.nan))

    def _anchor(self, like: Tensor) -> Tensor:
        """A point inside the range: a stand-in where a value is not used, but its gradient must be finite."""
        low, high = self._range()
        interior = self._interior()
        mean = self._mean(like.new_zeros(self._first.shape) if interior is None else interior)
        # Halved before the sum, which might overflow.
        middle = 0.5 * low + 0.5 * high
        return self._align(torch.where(middle.isfinite(), middle, mean), like)


def checked_parameters(dim: int | None = None, *, positive: bool = False, **parameters: Any) -> tuple[Tensor, ...]:
    """The named parameters as floating-point tensors of one shape (*batch, d); a number stands for every coordinate.

    Args:
        dim: d, which is needed if all parameters are numbers and there is more than one coordinate.
        positive: Whether values must be positive.
        parameters: Tensors, numbers, nested lists or arrays.

    Raises:
        ValueError: shapes that do not fit, no coordinate, or a value that is not finite or, if `positive`, not positive.
        TypeError: complex, or no numbers.
    """
    like = next((value for value in parameters.values() if isinstance(value, Tensor)), None)
    tensors = {name: real_tensor(name, value, like) for name, value in parameters.items()}
    shape = max([tensor.shape for tensor in tensors.values()], key=len)
    size = shape[-1] if shape else 1
    dim = size if dim is None else whole_number("dim", dim, least=1)
    shape = shape or torch.Size([dim])
    tensors = {name: value.expand(shape) if value.ndim == 0 else value for name, value in tensors.items()}
    for name, value in tensors.items():
        if value.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (*batch, d) with d ≥ 1, got {tuple(value.shape)}")
        check_shape(name, value, (*shape[:-1], dim))
        check_range(name, value, above=0 if positive else None)
    return tuple(tensors.values())


def magnitude(value: Tensor) -> Tensor:
    """|value| with derivative 1 at 0. torch's derivative of abs is 0 there, by which log cosh would lose its second one."""
    return torch.where(value < 0, -value, value)


def in_words(values: Tensor) -> str:
    """A parameter's values for a message: one number, a short list, or the least and the largest."""
    numbers = values.detach().flatten().tolist()
    if len(set(numbers)) == 1:
        return f"{numbers[0]:.6g}"
    if len(numbers) <= _MOST_LISTED:
        return f"[{', '.join(f'{number:.6g}' for number in numbers)}]"
    return f"between {min(numbers):.6g} and {max(numbers):.6g}"
