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
    if not measures:
        raise ValueError(f"{owner} needs at least one measure, got none")
    for measure in measures:
        if len(measure.event_shape) != 1:
            raise ValueError(f"{owner} needs measures on vectors, got event shape {tuple(measure.event_shape)}")
    longest_batch(owner, [measure.batch_shape for measure in measures])


class Independent(Measure):
    """Independent draws, one from each measure, that are put together: log-partitions add.

    `_parts` says which coordinates of eta a measure sees, and `_together` how points are made from one of each.
    """

    measures: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return max([measure.batch_shape for measure in self.measures], key=len)

    @abstractmethod
    def _parts(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Each measure with what it sees of each tensor."""

    @abstractmethod
    def _together(self, points: list[Tensor]) -> Tensor:
        """One point from one of each measure."""

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        inside = [part for measure, x in self._parts(eta) if (part := measure._in_domain(x)) is not None]
        return torch.stack(inside).all(0) if inside else None

    def _log_partition(self, eta: Tensor) -> Tensor:
        return total([measure._log_partition(x) for measure, x in self._parts(eta)])

    def _mean(self, eta: Tensor) -> Tensor:
        return self._together([measure._mean(x) for measure, x in self._parts(eta)])

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._together([measure._fisher_vp(x, v) for measure, x, v in self._parts(eta, vector)])

    def _entropy(self, eta: Tensor) -> Tensor:
        return total([measure._entropy(x) for measure, x in self._parts(eta)])

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return total([measure._kl(x, change) for measure, x, change in self._parts(eta, delta)])

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return total([measure._cumulants(x, v, order) for measure, x, v in self._parts(eta, direction)])

    def _support(self, direction: Tensor) -> Tensor | None:
        known = all_known([measure._support(v) for measure, v in self._parts(direction)])
        return None if known is None else total(known)

    def _power(self, exponent: float) -> Measure | None:
        known = all_known([measure._power(exponent) for measure in self.measures])
        return None if known is None else type(self)(tuple(known))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self._together([measure._sample(x, shape, generator) for measure, x in self._parts(eta)])


class Product(Independent):
    """Independent vectors joined end to end. Made by `product`."""

    @property
    def event_shape(self) -> torch.Size:
        return torch.Size([sum(self._sizes)])

    @property
    def _sizes(self) -> list[int]:
        return [measure.event_shape[0] for measure in self.measures]

    def _parts(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Each measure with its own coordinates of each tensor."""
        pieces = [tensor.split(self._sizes, -1) for tensor in tensors]
        return list(zip(self.measures, *pieces, strict=True))

    def _together(self, points: list[Tensor]) -> Tensor:
        return torch.cat(points, -1)

    def _domain(self) -> str:
        return "; ".join(
            f"coordinates {end - size} to {end - 1}: {measure._domain()}"
            for measure, size, end in zip(self.measures, self._sizes, accumulate(self._sizes), strict=True)
        )

    def _interior(self) -> Tensor | None:
        found = [measure._interior() for measure in self.measures]
        known = next((inside for inside in found if inside is not None), None)
        if known is None:
            return None
        points = [
            known.new_zeros(measure.event_shape) if inside is None else inside
            for measure, inside in zip(self.measures, found, strict=True)
        ]
        return torch.cat([spread("product", point, self.batch_shape, 1) for point in points], -1)

    @property
    def _reference(self) -> Reference:
        return one_reference(self.measures)

    def _range(self) -> tuple[Tensor, Tensor] | None:
        known = all_known([measure._range() for measure in self.measures])
        if known is None:
            return None
        low, high = (
            torch.cat([spread("product", bound, self.batch_shape, 1) for bound in bounds], -1)
            for bounds in zip(*known, strict=True)
        )
        return low, high

    def _log_density(self, point: Tensor) -> Tensor:
        return total([measure._log_density(x) for measure, x in self._parts(point)])

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return total([measure._log_prob(e, x) for measure, e, x in self._parts(eta, point)])

    def _nearest(self, point: Tensor) -> Tensor | None:
        known = all_known([measure._nearest(x) for measure, x in self._parts(point)])
        return None if known is None else torch.cat(known, -1)

    def _listed(self) -> Listed | None:
        known = all_known([measure._listed() for measure in self.measures])
        return None if known is None else listed.joined(known, self.batch_shape)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        known = all_known([measure._conjugate(x) for measure, x in self._parts(mu)])
        return None if known is None else total(known)

    def _natural(self, mu: Tensor) -> Tensor | None:
        known = all_known([measure._natural(x) for measure, x in self._parts(mu)])
        return None if known is None else torch.cat(known, -1)


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
        return None if part is None else listed.repeated(part, self.count)

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
        return super()._nearest(point) if part is None else listed.atoms(part)._nearest(point)

    def _natural(self, mu: Tensor) -> Tensor | None:
        return self.measure._natural(mu / self.count)

    def _conjugate(self, mu: Tensor) -> Tensor | None:
        value = self.measure._conjugate(mu / self.count)
        return None if value is None else self.count * value

    def _power(self, exponent: float) -> Measure | None:
        total = exponent * self.count
        return Power(self.measure, int(total)) if total == int(total) else None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.measure._sample(eta, (self.count, *shape), generator).sum(0)


def total(parts: list[Tensor]) -> Tensor:
    """Σ of the parts, which may broadcast."""
    return sum(parts[1:], parts[0])


def all_known(parts: Sequence[Any]) -> list[Any] | None:
    """The parts, unless one is None."""
    return None if any(part is None for part in parts) else list(parts)


def one_reference(measures: Sequence[Measure]) -> Reference:
    """What the measures' densities are taken with respect to, if that is one and the same."""
    references: set[Reference] = {measure._reference for measure in measures}
    return references.pop() if len(references) == 1 else "mixed"


def first_inside(measure: Measure, points: Tensor) -> Tensor:
    """Of points (*batch, K, *event), for each batch item the first in the measure's domain, or else the first."""
    batch, inside = len(measure.batch_shape), measure._in_domain(points)
    if inside is None:
        return points.select(batch, 0)
    index = inside.byte().argmax(-1, keepdim=True)
    return points.take_along_dim(index.reshape(*index.shape, *[1] * len(measure.event_shape)), batch).squeeze(batch)
