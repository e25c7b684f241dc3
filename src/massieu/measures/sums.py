"""Independent parts: products, sums of independent draws, and powers. Log-partitions add."""

from itertools import accumulate
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from massieu.measures import stable
from massieu.measures.atoms import Atoms
from massieu.measures.base import Measure, MissingFormError, longest_batch, static_field
from massieu.measures.gaussian import Gaussian
from massieu.measures.hooks import Reference


def product(*measures: Measure) -> Measure:
    """The law of independent vectors, one from each measure, joined end to end: A(eta) = Σ_i A_i(eta_i) (S2).

    Raises:
        ValueError: no measure, one whose points are not vectors, or batch shapes that do not fit.
    """
    _check_parts("product", measures)
    return Product(measures)


def convolve(*measures: Measure) -> Measure:
    """The law of a sum of independent draws, one from each measure: A(eta) = Σ_i A_i(eta).

    Keys smoothed by a Gaussian, which is a kernel density estimate, are ``convolve(Atoms.create(keys), noise)`` (S14).

    Raises:
        ValueError: no measure, event shapes that differ, one whose points are not vectors, batch shapes that do not fit.
    """
    _check_parts("convolve", measures)
    sizes = sorted({measure.event_shape[0] for measure in measures})
    if len(sizes) > 1:
        raise ValueError(f"convolve needs measures on one space, got vectors of sizes {sizes}")
    return Convolution(measures)


def power(measure: Measure, exponent: float) -> Measure:
    """The measure of log-partition exponent·A: for a whole exponent, the law of a sum of that many draws.

    A fractional power exists where it has a closed form, for measures that are infinitely divisible: Gaussian, Poisson,
    Exponential, Gamma, Constant and compositions of these.

    Raises:
        ValueError: an exponent that is not positive and finite, or a fractional one without a closed form.
    """
    if not (exponent > 0 and isfinite(exponent)):
        raise ValueError(f"power needs a positive, finite exponent, got {exponent}")
    closed = measure._power(float(exponent))
    if closed is not None:
        return closed
    if exponent != int(exponent):
        raise ValueError(
            f"power needs a whole exponent for {type(measure).__name__}, whose fractional powers are no measures known "
            f"here, got {exponent}"
        )
    return measure if exponent == 1 else Power(measure, int(exponent))


def _check_parts(owner: str, measures: tuple[Measure, ...]) -> None:
    if not measures:
        raise ValueError(f"{owner} needs at least one measure, got none")
    for measure in measures:
        if len(measure.event_shape) != 1:
            raise ValueError(f"{owner} needs measures on vectors, got event shape {tuple(measure.event_shape)}")
    longest_batch(owner, [measure.batch_shape for measure in measures])


class Product(Measure):
    """Independent vectors joined end to end. Made by `product`."""

    measures: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return max([measure.batch_shape for measure in self.measures], key=len)

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

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        found = [measure._in_domain(x) for measure, x in self._parts(eta)]
        inside = [part for part in found if part is not None]
        return torch.stack(inside).all(0) if inside else None

    def _domain(self) -> str:
        return "; ".join(
            f"coordinates {end - size} to {end - 1}: {measure._domain()}"
            for measure, size, end in zip(self.measures, self._sizes, accumulate(self._sizes), strict=True)
        )

    def _interior(self) -> Tensor | None:
        known = [inside for measure in self.measures if (inside := measure._interior()) is not None]
        if not known:
            return None
        points = []
        for measure in self.measures:
            inside = measure._interior()
            if inside is None:
                inside = known[0].new_zeros((*measure.batch_shape, *measure.event_shape))
            points.append(_in_batch(inside, self.batch_shape, 1).expand(*self.batch_shape, -1))
        return torch.cat(points, -1)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return _sum([measure._log_partition(x) for measure, x in self._parts(eta)])

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.cat([measure._mean(x) for measure, x in self._parts(eta)], -1)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return torch.cat([measure._fisher_vp(x, v) for measure, x, v in self._parts(eta, vector)], -1)

    def _entropy(self, eta: Tensor) -> Tensor:
        return _sum([measure._entropy(x) for measure, x in self._parts(eta)])

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return _sum([measure._kl(x, change) for measure, x, change in self._parts(eta, delta)])

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return _sum([measure._cumulants(x, v, order) for measure, x, v in self._parts(eta, direction)])

    def _support(self, direction: Tensor) -> Tensor | None:
        return _sum_of_known([measure._support(v) for measure, v in self._parts(direction)])

    @property
    def _reference(self) -> Reference:
        references: set[Reference] = {measure._reference for measure in self.measures}
        return references.pop() if len(references) == 1 else "mixed"

    def _log_density(self, point: Tensor) -> Tensor:
        return _sum([measure._log_density(x) for measure, x in self._parts(point)])

    def _natural(self, mu: Tensor) -> Tensor | None:
        found = [measure._natural(x) for measure, x in self._parts(mu)]
        known = [part for part in found if part is not None]
        return torch.cat(known, -1) if len(known) == len(found) else None

    def _power(self, exponent: float) -> Measure | None:
        found = [measure._power(exponent) for measure in self.measures]
        known = tuple(part for part in found if part is not None)
        return Product(known) if len(known) == len(found) else None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.cat([measure._sample(x, shape, generator) for measure, x in self._parts(eta)], -1)


class Convolution(Measure):
    """The law of a sum of independent draws. Made by `convolve`."""

    measures: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return max([measure.batch_shape for measure in self.measures], key=len)

    @property
    def event_shape(self) -> torch.Size:
        return self.measures[0].event_shape

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        inside = [part for measure in self.measures if (part := measure._in_domain(eta)) is not None]
        return torch.stack(inside).all(0) if inside else None

    def _domain(self) -> str:
        return " and ".join(dict.fromkeys(measure._domain() for measure in self.measures))

    def _interior(self) -> Tensor | None:
        known = [inside for measure in self.measures if (inside := measure._interior()) is not None]
        return known[0] if known else None

    def _log_partition(self, eta: Tensor) -> Tensor:
        return _sum([measure._log_partition(eta) for measure in self.measures])

    def _mean(self, eta: Tensor) -> Tensor:
        return _sum([measure._mean(eta) for measure in self.measures])

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return _sum([measure._fisher_vp(eta, vector) for measure in self.measures])

    def _fisher(self, eta: Tensor) -> Tensor:
        return _sum([measure._fisher(eta) for measure in self.measures])

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return _sum([measure._kl(eta, delta) for measure in self.measures])

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return _sum([measure._cumulants(eta, direction, order) for measure in self.measures])

    def _support(self, direction: Tensor) -> Tensor | None:
        return _sum_of_known([measure._support(direction) for measure in self.measures])

    def _sorted(self) -> tuple[list[Atoms], list[Measure]]:
        atoms = [measure for measure in self.measures if isinstance(measure, Atoms)]
        return atoms, [measure for measure in self.measures if not isinstance(measure, Atoms)]

    @property
    def _reference(self) -> Reference:
        rest = self._sorted()[1]
        return rest[0]._reference if rest else "counting"

    def _log_density(self, point: Tensor) -> Tensor:
        """Gaussians add to one Gaussian; atoms shift what the rest is."""
        atoms, rest = self._sorted()
        if not rest:
            return _shifted(atoms[1:], atoms[0], point)
        gaussians = [measure for measure in rest if isinstance(measure, Gaussian)]
        if len(gaussians) < len(rest) and len(rest) > 1:
            names = " and ".join(type(measure).__name__ for measure in rest)
            raise MissingFormError(f"convolve: the density of a sum of {names} has no closed form")
        return _shifted(atoms, rest[0] if len(rest) == 1 else _added(gaussians, self.batch_shape), point)

    def _power(self, exponent: float) -> Measure | None:
        found = [measure._power(exponent) for measure in self.measures]
        known = tuple(part for part in found if part is not None)
        return Convolution(known) if len(known) == len(found) else None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return _sum([measure._sample(eta, shape, generator) for measure in self.measures])


class Power(Measure):
    """The law of a sum of `count` independent draws. Made by `power`."""

    measure: Measure
    count: int = static_field()

    @property
    def batch_shape(self) -> torch.Size:
        return self.measure.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        return self.measure.event_shape

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        return self.measure._in_domain(eta)

    def _domain(self) -> str:
        return self.measure._domain()

    def _interior(self) -> Tensor | None:
        return self.measure._interior()

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self.count * self.measure._log_partition(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.count * self.measure._mean(eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self.count * self.measure._fisher_vp(eta, vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        return self.count * self.measure._fisher(eta)

    def _entropy(self, eta: Tensor) -> Tensor:
        return self.count * self.measure._entropy(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return self.count * self.measure._kl(eta, delta)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return self.count * self.measure._cumulants(eta, direction, order)

    def _support(self, direction: Tensor) -> Tensor | None:
        support = self.measure._support(direction)
        return None if support is None else self.count * support

    @property
    def _reference(self) -> Reference:
        return self.measure._reference

    def _natural(self, mu: Tensor) -> Tensor | None:
        return self.measure._natural(mu / self.count)

    def _power(self, exponent: float) -> Measure | None:
        total = exponent * self.count
        return Power(self.measure, int(total)) if total == int(total) else None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.measure._sample(eta, (self.count, *shape), generator).sum(0)


def _sum(parts: list[Tensor]) -> Tensor:
    """Σ of the parts, which may broadcast."""
    return sum(parts[1:], parts[0])


def _sum_of_known(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return _sum(known) if len(known) == len(parts) else None


def _in_batch(tensor: Tensor, batch: torch.Size, rest: int) -> Tensor:
    """`tensor` (*prefix of batch, *rest) with singleton dimensions for the remaining batch."""
    own = tensor.ndim - rest
    return tensor.reshape((*tensor.shape[:own], *[1] * (len(batch) - own), *tensor.shape[own:]))


def _shifted(atoms: list[Atoms], rest: Measure, point: Tensor) -> Tensor:
    """The log-density of the sum of independent atoms and a draw from `rest`."""
    if not atoms:
        return rest._log_density(point)
    first, *others = atoms
    moved = point.unsqueeze(-2) - first._align(first.points, point, 2)
    return stable.logsumexp(_shifted(others, rest, moved) + first._align(first.log_weight, point))


def _added(gaussians: list[Gaussian], batch: torch.Size) -> Gaussian:
    location = _sum([_in_batch(part.location, batch, 1) for part in gaussians])
    covariance = _sum([_in_batch(part._matrix(), batch, 2) for part in gaussians])
    return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))
