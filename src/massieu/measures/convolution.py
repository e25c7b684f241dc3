"""Sums of independent draws from several measures. Log-partitions add."""

import math
from typing import Any

import torch
from torch import Tensor

from massieu.foundation.numerics import logsumexp
from massieu.foundation.values import align, spread
from massieu.measures import listed
from massieu.measures.atoms import Atoms
from massieu.measures.base import Measure
from massieu.measures.gaussian import Gaussian
from massieu.measures.hooks import Listed, MissingFormError, Reference
from massieu.measures.listed import MOST_LISTED, is_close
from massieu.measures.mixture import Mixture
from massieu.measures.sums import Independent, all_known, check_parts, first_inside, total


def convolve(*measures: Measure) -> Measure:
    """The law of a sum of independent draws, one from each measure: A(eta) = Σ_i A_i(eta).

    Keys smoothed by a Gaussian, which is a kernel density estimate, are ``convolve(Atoms.create(keys), noise)`` (S14).

    Raises:
        ValueError: no measure, event shapes that differ, one whose points are not vectors, batch shapes that do not fit.

    Example:
        >>> from massieu.measures import Gaussian, Poisson, convolve
        >>> convolve(Poisson.create(2.0), Gaussian.create([1.0], 0.5)).mean([0.0]).tolist()
        [3.0]
    """
    check_parts("convolve", measures)
    sizes = sorted({measure.event_shape[0] for measure in measures})
    if len(sizes) > 1:
        raise ValueError(f"convolve needs measures on one space, got vectors of sizes {sizes}")
    return Convolution(measures)


class Convolution(Independent):
    """The law of a sum of independent draws. Made by `convolve`."""

    @property
    def event_shape(self) -> torch.Size:
        return self.measures[0].event_shape

    def _parts(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        return [(measure, *tensors) for measure in self.measures]

    def _together(self, points: list[Tensor]) -> Tensor:
        return total(points)

    def _domain(self) -> str:
        return " and ".join(dict.fromkeys(measure._domain() for measure in self.measures))

    def _interior(self) -> Tensor | None:
        """A term's interior point that lies in the domains of all."""
        known = [inside for measure in self.measures if (inside := measure._interior()) is not None]
        if not known:
            return None
        return first_inside(self, torch.stack([spread("convolve", point, self.batch_shape, 1) for point in known], -2))

    def _fisher(self, eta: Tensor) -> Tensor:
        return total([measure._fisher(eta) for measure in self.measures])

    @property
    def _reference(self) -> Reference:
        """A part with a density gives the sum one; atoms move what the rest is."""
        rest: set[Reference] = {measure._reference for measure in self.measures}
        rest.discard("counting")
        if not rest:
            return "counting"
        return "lebesgue" if "lebesgue" in rest else rest.pop()

    def _flat(self) -> list[Measure]:
        """The terms, those of sums of sums included."""
        parts: list[Measure] = []
        for measure in self.measures:
            parts.extend(measure._flat() if isinstance(measure, Convolution) else [measure])
        return parts

    def _sorted(self) -> "tuple[list[Listed], Measure] | Mixture":
        """Lists of points, and the one law that they shift; or the same as a mixture of sums.

        Gaussians add to one Gaussian, and of the discrete laws all but the longest are listed. A mixture that is no list
        is a sum for each component.
        """
        parts = self._flat()
        lists = [None if isinstance(part, Gaussian) else part._listed() for part in parts]
        gaussians = [part for part in parts if isinstance(part, Gaussian)]
        unlisted = [
            index for index, part in enumerate(parts) if lists[index] is None and not isinstance(part, Gaussian)
        ]
        for index in unlisted:
            part = parts[index]
            if isinstance(part, Mixture) and isinstance(part.components, tuple):
                rest = (*parts[:index], *parts[index + 1 :])
                return Mixture(part.log_weight, tuple(Convolution((*rest, each)) for each in part.components))
        if len(unlisted) + bool(gaussians) > 1:
            names = " and ".join(type(part).__name__ for part in [*(parts[index] for index in unlisted), *gaussians])
            raise MissingFormError(f"convolve: the density of a sum of {names} has no closed form")
        if gaussians:
            last, place = (gaussians[0] if len(gaussians) == 1 else _added(gaussians, self.batch_shape)), -1
        else:
            # Named laws know the nearest of their points without a search.
            ranks = [(not isinstance(part, Atoms), _count(found)) for part, found in zip(parts, lists, strict=True)]
            place = unlisted[0] if unlisted else max(range(len(parts)), key=lambda index: ranks[index])
            last = parts[place]
        others = [index for index, found in enumerate(lists) if found is not None and index != place]
        named = math.prod([_count(lists[index]) for index in others if not isinstance(parts[index], Atoms)])
        if named > MOST_LISTED:
            names = " and ".join(type(part).__name__ for part in parts)
            raise MissingFormError(
                f"convolve: the density of a sum of {names} has no closed form here ({named} combinations, at most "
                f"{MOST_LISTED} are listed)"
            )
        chosen = [lists[index] for index in others]
        return chosen, last  # pyright: ignore[reportReturnType]

    def _log_density(self, point: Tensor) -> Tensor:
        return total([self._log_prob(torch.zeros_like(point), point), self._log_partition(torch.zeros_like(point))])

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        sorted_ = self._sorted()
        if isinstance(sorted_, Mixture):
            return sorted_._log_prob(eta, point)
        return _shifted(*sorted_, eta, point, point.abs())

    def _nearest(self, point: Tensor) -> Tensor | None:
        if self._reference == "lebesgue":
            return point
        try:
            sorted_ = self._sorted()
        except MissingFormError:
            return None
        return sorted_._nearest(point) if isinstance(sorted_, Mixture) else _nearest(*sorted_, point)

    def _listed(self) -> Listed | None:
        known = all_known([measure._listed() for measure in self.measures])
        return None if known is None else listed.added(known, self.batch_shape)


def _count(part: Listed | None) -> int:
    """How many points it has, 1 for what is no list."""
    return 1 if part is None else part.size.shape[-2]


def _shifted(parts: list[Listed], rest: Measure, eta: Tensor, point: Tensor, size: Tensor) -> Tensor:
    """The log-density of the sum of independent points, one of each list, and a draw from `rest`, all tilted by `eta`.

    `size` is how large the numbers were that `point` has been computed from.
    """
    if parts:
        part, *others = parts
        atoms = listed.atoms(part)
        moved = point.unsqueeze(-2) - atoms._align(part.points, point, 2)
        size = size.unsqueeze(-2) + atoms._align(part.size, point, 2)
        return logsumexp(_shifted(others, rest, eta.unsqueeze(-2), moved, size) + atoms._log_probability(eta))
    nearest = rest._nearest(point)
    if nearest is None:
        raise MissingFormError(
            f"convolve: {type(rest).__name__} has no `_nearest`, its point nearest to another, which the density of a "
            "sum needs, since x + s − s is not exactly x in floating point"
        )
    hit = is_close(point, nearest, size, nearest).all(-1, keepdim=True)
    return rest._log_prob(eta, torch.where(hit, nearest, point))


def _nearest(parts: list[Listed], rest: Measure, point: Tensor) -> Tensor | None:
    """The nearest sum of points, one of each list and one of `rest`."""
    if not parts:
        return rest._nearest(point)
    part, *others = parts
    start = align(part.points, point.ndim + 1, 2)
    found = _nearest(others, rest, point.unsqueeze(-2) - start)
    if found is None:
        return None
    sums = start + found
    index = (sums - point.unsqueeze(-2)).abs().amax(-1).argmin(-1)[..., None, None]
    return sums.take_along_dim(index, -2).squeeze(-2)


def _added(gaussians: list[Gaussian], batch: torch.Size) -> Gaussian:
    location = total([align(part.location, len(batch) + 1, 1) for part in gaussians])
    covariance = total([align(part._matrix(), len(batch) + 2, 2) for part in gaussians])
    return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))
