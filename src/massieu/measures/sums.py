"""Independent parts: products and powers. Log-partitions add."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from massieu.foundation.arguments import number, real
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.values import longest_batch, spread, static_field
from massieu.measures import listed
from massieu.measures.base import Measure
from massieu.measures.combine import Wrapped
from massieu.measures.hooks import Listed, MissingFormError, Reference


def product(*measures: Measure) -> Measure:
    """The product of measures: the law of independent vectors joined end to end, A(eta) = Σ_i A_i(eta_i) (S2).

    Raises:
        ValueError: no measure, one whose points are not vectors, or batch shapes that do not fit.

    Example:
        >>> from massieu.measures import Constant, Poisson, product
        >>> product(Poisson.create(2.0), Constant.create(5.0)).mean([0.0, 0.0]).tolist()
        [2.0, 5.0]
    """
    check_parts("product", measures)
    return Product(measures)


@door(measure=MEASURE, exponent=real)
def power(measure: Measure, exponent: float) -> Measure:
    """The measure with log-partition exponent·A: for a whole exponent, the law of a sum of that many draws.

    A fractional power exists where it has a closed form, for measures that are infinitely divisible: Gaussian, Poisson,
    Exponential, Gamma, Constant and compositions of these.

    Raises:
        ValueError: an exponent that is not positive and finite, or a fractional one without a closed form.

    Example:
        >>> from massieu.measures import Bernoulli, power
        >>> round(power(Bernoulli.create(0.5), 4).log_prob([0.0], [2.0]).exp().item(), 6)  # binomial: 6/16
        0.375
    """
    closed = measure._power(float(number("exponent", exponent, above=0)))
    if closed is not None:
        return closed
    if exponent != int(exponent):
        raise ValueError(
            f"power needs a whole exponent for {type(measure).__name__}, whose fractional powers are no measures known "
            f"here, got {exponent}"
        )
    return measure if exponent == 1 else Power(measure, int(exponent))


def check_parts(owner: str, measures: tuple[Measure, ...]) -> None:
    """Raise a ValueError unless there are measures, all on vectors, whose batch shapes are prefixes of the longest."""
    if not measures:
        raise ValueError(f"{owner} needs at least one measure, got none")
    for measure in measures:
        if len(measure.event_shape) != 1:
            raise ValueError(f"{owner} needs measures on vectors, got event shape {tuple(measure.event_shape)}")
    longest_batch(owner, [measure.batch_shape for measure in measures])


class Independent(Measure):
    """The law of a point made of independent draws, one from each measure: log-partitions add.

    `_parts` gives the coordinates of eta that each measure sees; `_combine` makes a point from one of each measure.
    """

    measures: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return max([measure.batch_shape for measure in self.measures], key=len)

    @abstractmethod
    def _parts(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Each measure, followed by the coordinates of each tensor that it sees."""

    @abstractmethod
    def _combine(self, points: list[Tensor]) -> Tensor:
        """A point from one of each measure."""

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        masks = [mask for measure, x in self._parts(eta) if (mask := measure._in_domain(x)) is not None]
        return torch.stack(masks).all(0) if masks else None

    def _log_partition(self, eta: Tensor) -> Tensor:
        return total([measure._log_partition(x) for measure, x in self._parts(eta)])

    def _mean(self, eta: Tensor) -> Tensor:
        return self._combine([measure._mean(x) for measure, x in self._parts(eta)])

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._combine([measure._fisher_vp(x, v) for measure, x, v in self._parts(eta, vector)])

    def _entropy(self, eta: Tensor) -> Tensor:
        return total([measure._entropy(x) for measure, x in self._parts(eta)])

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return total([measure._kl(x, move) for measure, x, move in self._parts(eta, delta)])

    def _kl_to(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        return total([measure._kl_to(*parts) for measure, *parts in self._parts(eta, other, delta)])

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return total([measure._cumulants(x, v, order) for measure, x, v in self._parts(eta, direction)])

    def _support(self, direction: Tensor) -> Tensor | None:
        bounds = all_or_none([measure._support(v) for measure, v in self._parts(direction)])
        return None if bounds is None else total(bounds)

    def _power(self, exponent: float) -> Measure | None:
        powers = all_or_none([measure._power(exponent) for measure in self.measures])
        return None if powers is None else type(self)(tuple(powers))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self._combine([measure._sample(x, shape, generator) for measure, x in self._parts(eta)])


class Product(Independent):
    """Independent vectors joined end to end. Made by `product`."""

    @property
    def event_shape(self) -> torch.Size:
        return torch.Size([sum(self._sizes)])

    @property
    def _sizes(self) -> list[int]:
        return [measure.event_shape[0] for measure in self.measures]

    def _parts(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Each measure, followed by its coordinates of each tensor."""
        pieces = [tensor.split(self._sizes, -1) for tensor in tensors]
        return list(zip(self.measures, *pieces, strict=True))

    def _combine(self, points: list[Tensor]) -> Tensor:
        return torch.cat(points, -1)

    def _domain(self) -> str:
        return "; ".join(
            f"coordinates {end - size} to {end - 1}: {measure._domain()}"
            for measure, size, end in zip(self.measures, self._sizes, accumulate(self._sizes), strict=True)
        )

    def _interior(self) -> Tensor | None:
        points = [measure._interior() for measure in self.measures]
        like = next((point for point in points if point is not None), None)
        if like is None:
            return None
        # None stands for the origin.
        points = [
            like.new_zeros(measure.event_shape) if point is None else point
            for measure, point in zip(self.measures, points, strict=True)
        ]
        return torch.cat([spread("product", point, self.batch_shape, 1) for point in points], -1)

    @property
    def _reference(self) -> Reference:
        return one_reference(self.measures)

    def _range(self) -> tuple[Tensor, Tensor] | None:
        ranges = all_or_none([measure._range() for measure in self.measures])
        if ranges is None:
            return None
        low = torch.cat([spread("product", low, self.batch_shape, 1) for low, _ in ranges], -1)
        high = torch.cat([spread("product", high, self.batch_shape, 1) for _, high in ranges], -1)
        return low, high

    def _log_density(self, point: Tensor) -> Tensor:
        return total([measure._log_density(x) for measure, x in self._parts(point)])

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return total([measure._log_prob(e, x) for measure, e, x in self._parts(eta, point)])

    def _unit_sizes(self) -> list[int]:
        return [size for measure in self.measures for size in measure._unit_sizes()]

    def _log_partition_of_units(self, eta: Tensor) -> Tensor:
        return torch.cat([measure._log_partition_of_units(x) for measure, x in self._parts(eta)], -1)

    def _log_prob_of_units(self, eta: Tensor, point: Tensor) -> Tensor:
        return torch.cat([measure._log_prob_of_units(e, x) for measure, e, x in self._parts(eta, point)], -1)

    def _nearest(self, point: Tensor) -> Tensor | None:
        nearest = all_or_none([measure._nearest(x) for measure, x in self._parts(point)])
        return None if nearest is None else torch.cat(nearest, -1)

    def _listed(self) -> Listed | None:
        lists = all_or_none([measure._listed() for measure in self.measures])
        return None if lists is None else listed.joined(lists, self.batch_shape)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        conjugates = all_or_none([measure._conjugate(x) for measure, x in self._parts(mu)])
        return None if conjugates is None else total(conjugates)

    def _natural(self, mu: Tensor) -> Tensor | None:
        eta = all_or_none([measure._natural(x) for measure, x in self._parts(mu)])
        return None if eta is None else torch.cat(eta, -1)


class Power(Wrapped):
    """The law of a sum of `count` independent draws. Made by `power`."""

    count: int = static_field()

    def _times(self, value: Tensor) -> Tensor:
        return self.count * value

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self.count * self.measure._log_partition(eta)

    def _support(self, direction: Tensor) -> Tensor | None:
        support = self.measure._support(direction)
        return None if support is None else self.count * support

    def _range(self) -> tuple[Tensor, Tensor] | None:
        bounds = self.measure._range()
        return None if bounds is None else (self.count * bounds[0], self.count * bounds[1])

    def _listed(self) -> Listed | None:
        part = self.measure._listed()
        return None if part is None else listed.sums_of_draws(part, self.count)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        part = self._listed()
        if part is None:
            raise MissingFormError(
                f"power: the density of a sum of {self.count} draws from {type(self.measure).__name__} has no closed "
                f"form here (only for discrete laws of up to {listed.MOST_LISTED} sums)"
            )
        return listed.log_prob(part, eta, point)

    def _nearest(self, point: Tensor) -> Tensor | None:
        part = self._listed()
        return super()._nearest(point) if part is None else listed.as_atoms(part)._nearest(point)

    def _natural(self, mu: Tensor) -> Tensor | None:
        return self.measure._natural(mu / self.count)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        value = self.measure._conjugate(mu / self.count)
        return None if value is None else self.count * value

    def _power(self, exponent: float) -> Measure | None:
        count = exponent * self.count
        return Power(self.measure, int(count)) if count == int(count) else None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.measure._sample(eta, (self.count, *shape), generator).sum(0)


def total(parts: list[Tensor]) -> Tensor:
    """Σ of the parts, which may broadcast."""
    return sum(parts[1:], parts[0])


def all_or_none(parts: Sequence[Any]) -> list[Any] | None:
    """The parts; None if one of them is None."""
    return None if any(part is None for part in parts) else list(parts)


def one_reference(measures: Sequence[Measure]) -> Reference:
    """The reference of the measures' densities if all have the same one; otherwise "mixed"."""
    references: set[Reference] = {measure._reference for measure in measures}
    return references.pop() if len(references) == 1 else "mixed"


def first_inside(measure: Measure, points: Tensor) -> Tensor:
    """From points (*batch, K, *event), for each batch item the first in the measure's domain, or the first if none is."""
    axis = len(measure.batch_shape)
    inside = measure._in_domain(points)
    if inside is None:
        return points.select(axis, 0)
    # argmax is the first of several largest entries, and 0 if none is inside.
    index = inside.byte().argmax(-1, keepdim=True)
    index = index.reshape(*index.shape, *[1] * len(measure.event_shape))
    return points.take_along_dim(index, axis).squeeze(axis)
