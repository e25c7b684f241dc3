"""Products of one-dimensional measures: A, KL divergence, density are sums over coordinates, ∇A and F act on each."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from massieu.foundation.arguments import check_range, check_shape, real_tensor, whole_number
from massieu.measures.base import Measure

_LISTED = 6


class Coordinates(Measure):
    """Independent coordinates, each with a measure on the line of its own.

    The author of a subclass writes functions of one coordinate, applied to tensors (*batch, *query, d) elementwise:
    `_log_partition_each`, `_cumulant`, `_log_prob_each`, and `_natural_each` where the mean has an inverse in closed form;
    and the bounds of the support and of the domain, `_bounds` or `_range`, and `_limits`. h is a
    probability; one that is none overrides `_log_density_each` and `_entropy`.
    """

    _bounds: ClassVar[tuple[float, float]] = (-torch.inf, torch.inf)

    # What an author writes, of one coordinate.

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
        """The same of h."""
        return self._log_prob_each(torch.zeros_like(point), point)

    def _range(self) -> tuple[Tensor, Tensor]:
        low, high = self._bounds
        return torch.full_like(self._first, low), torch.full_like(self._first, high)

    def _limits(self) -> tuple[Tensor, Tensor] | None:
        """The open interval of each coordinate's domain, ±inf allowed, shape (*batch, d); None: the whole line."""
        return None

    def _nearest(self, point: Tensor) -> Tensor:
        """The nearest point of the support, coordinate by coordinate; overridden where that is no interval."""
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
        """A* of each coordinate, for means inside the range: where eta may round to the end of its domain."""
        return None

    # What follows from it.

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._log_partition_each(eta).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._cumulant(eta, 1)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        variance = self._cumulant(eta, 2)
        # A variance too large to hold is nothing to a coordinate that the vector has none of.
        return torch.where(variance.isinf() & (vector == 0), 0.0, variance * vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self._cumulant(eta, 2))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        power, cumulants = torch.ones_like(direction), []
        for n in range(1, order + 1):
            power = power * direction
            cumulants.append((power * self._cumulant(eta, n)).sum(-1))
        return torch.stack(cumulants, -1)

    def _entropy(self, eta: Tensor) -> Tensor:
        return -self._kl(eta, -eta)

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        limits = self._limits()
        if limits is None:
            return None
        lower, upper = (self._align(limit, eta) for limit in limits)
        return ((lower < eta) & (eta < upper)).all(-1)

    def _support(self, direction: Tensor) -> Tensor:
        low, high = (self._align(bound, direction) for bound in self._range())
        # An unbounded coordinate does not count where the direction has none of it.
        bound = torch.where(direction == 0, 0.0, torch.where(direction > 0, high, low))
        return (bound * direction).sum(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        inside = self._holds(point)
        density = self._log_density_each(torch.where(inside, point, self._anchor(point)))
        return torch.where(inside, density, -torch.inf).sum(-1)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        inside = self._holds(point)
        density = self._log_prob_each(eta, torch.where(inside, point, self._anchor(point)))
        return torch.where(inside, density, -torch.inf).sum(-1)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        """A sum over coordinates, of −log h({b}) for one that is at a bound b (∞ where b has no mass)."""
        low, high = (self._align(bound, mu).expand_as(mu) for bound in self._range())
        inside, edge = (low < mu) & (mu < high), (mu == low) | (mu == high)
        eta = self._natural_each(torch.where(inside, mu, self._anchor(mu)))
        if eta is None:
            return None
        start = self._interior()
        start = torch.zeros_like(mu) if start is None else self._align(start, mu).expand_as(mu)
        eta = torch.where(inside, eta, start)
        safe = torch.where(inside, mu, self._mean(eta))
        each = self._conjugate_each(safe)
        value = self._fenchel(eta, safe) if each is None else torch.where(inside, each, 0.0).sum(-1)
        ends = torch.full_like(mu, torch.inf)
        if self._reference == "counting":
            held = edge & mu.isfinite()
            ends = torch.where(held, -self._log_density_each(torch.where(held, mu, self._anchor(mu))), torch.inf)
        return value + torch.where(inside, 0.0, ends).sum(-1).detach()

    def _natural(self, mu: Tensor) -> Tensor | None:
        low, high = (self._align(bound, mu) for bound in self._range())
        inside = (low < mu) & (mu < high)
        eta = self._natural_each(torch.where(inside, mu, self._anchor(mu)))
        if eta is None:
            return None
        edge = torch.where(mu == low, -torch.inf, torch.where(mu == high, torch.inf, torch.nan))
        return torch.where(inside, eta, edge.masked_fill(mu.isinf(), torch.nan))

    def _anchor(self, like: Tensor) -> Tensor:
        """A point within the range, to stand where a value does not matter but its gradient must be finite."""
        low, high = self._range()
        start = self._interior()
        mean = self._mean(like.new_zeros(self._first.shape) if start is None else start)
        middle = 0.5 * low + 0.5 * high
        return self._align(torch.where(middle.isfinite(), middle, mean), like)


def checked_parameters(dim: int | None = None, *, positive: bool = False, **parameters: Any) -> tuple[Tensor, ...]:
    """The named parameters as floating-point tensors of one shape (*batch, d); a number stands for every coordinate.

    `dim` is d, which has to be given where all parameters are numbers and there is more than one coordinate.

    Raises:
        ValueError: shapes that do not fit, no coordinate, a value that is not finite, or not positive if asked.
        TypeError: complex, or no numbers.
    """
    like = next((value for value in parameters.values() if isinstance(value, Tensor)), None)
    tensors = {name: real_tensor(name, value, like) for name, value in parameters.items()}
    shape = max([tensor.shape for tensor in tensors.values()], key=len)
    size = shape[-1] if shape else 1
    dim = size if dim is None else whole_number("dim", dim, least=1)
    shape = shape or torch.Size([dim])
    for name, value in tensors.items():
        tensors[name] = value = value.expand(shape) if value.ndim == 0 else value
        if value.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (*batch, d) with d ≥ 1, got {tuple(value.shape)}")
        check_shape(name, value, (*shape[:-1], dim))
        check_range(name, value, above=0 if positive else None)
    return tuple(tensors.values())


def magnitude(value: Tensor) -> Tensor:
    """|value| with derivative 1 at 0, where torch's own 0 would lose the second derivative of log cosh."""
    return torch.where(value < 0, -value, value)


def in_words(values: Tensor) -> str:
    """A parameter's values for a message: one number, a short list, or what they lie between."""
    numbers = values.detach().flatten().tolist()
    if len(set(numbers)) == 1:
        return f"{numbers[0]:.6g}"
    if len(numbers) <= _LISTED:
        return f"[{', '.join(f'{number:.6g}' for number in numbers)}]"
    return f"between {min(numbers):.6g} and {max(numbers):.6g}"
