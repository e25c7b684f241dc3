"""Sums of independent draws from several measures. Log-partitions add."""

import math
from typing import Any, NamedTuple

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
from massieu.measures.sums import Independent, all_or_none, check_parts, first_inside, total


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

    def _combine(self, points: list[Tensor]) -> Tensor:
        return total(points)

    def _domain(self) -> str:
        return " and ".join(dict.fromkeys(measure._domain() for measure in self.measures))

    def _interior(self) -> Tensor | None:
        """An interior point of one term that lies in the domains of all."""
        candidates = [point for measure in self.measures if (point := measure._interior()) is not None]
        if not candidates:
            return None
        points = torch.stack([spread("convolve", point, self.batch_shape, 1) for point in candidates], -2)
        return first_inside(self, points)

    def _fisher(self, eta: Tensor) -> Tensor:
        return total([measure._fisher(eta) for measure in self.measures])

    @property
    def _reference(self) -> Reference:
        """Lebesgue if any term has a density; otherwise that of the terms that are not discrete, which atoms only shift."""
        references: set[Reference] = {measure._reference for measure in self.measures}
        references.discard("counting")
        if not references:
            return "counting"
        if "lebesgue" in references:
            return "lebesgue"
        return references.pop()

    def _terms(self) -> list[Measure]:
        """The terms of the sum, with those of sums among them."""
        terms: list[Measure] = []
        for measure in self.measures:
            terms.extend(measure._terms() if isinstance(measure, Convolution) else [measure])
        return terms

    def _shifted_law(self) -> "_ShiftedLaw | Mixture":
        """The sum as one law shifted by points of lists; or, if a term is a mixture that is no list, a mixture of sums.

        All Gaussians together are one Gaussian, which is the law that is shifted. Without a Gaussian it is the term that is
        no list, or else the longest list.

        Raises:
            MissingFormError: two terms or more have no list, or the lists have too many combinations of points.
        """
        terms = self._terms()
        lists = [None if isinstance(term, Gaussian) else term._listed() for term in terms]
        gaussians = [term for term in terms if isinstance(term, Gaussian)]
        unlisted = [
            index for index, term in enumerate(terms) if lists[index] is None and not isinstance(term, Gaussian)
        ]
        for index in unlisted:
            term = terms[index]
            if isinstance(term, Mixture) and isinstance(term.components, tuple):
                # Sums distribute over mixtures.
                others = (*terms[:index], *terms[index + 1 :])
                sums = tuple(Convolution((*others, component)) for component in term.components)
                return Mixture(term.log_weight, sums)
        if len(unlisted) + bool(gaussians) > 1:
            names = " and ".join(type(term).__name__ for term in [*(terms[index] for index in unlisted), *gaussians])
            raise MissingFormError(f"convolve: the density of a sum of {names} has no closed form")
        if gaussians:
            law = gaussians[0] if len(gaussians) == 1 else _sum_of_gaussians(gaussians, self.batch_shape)
            law_index = None
        else:
            # Named laws come before atoms, since they know the nearest of their points without a search.
            ranks = [(not isinstance(term, Atoms), _num_points(part)) for term, part in zip(terms, lists, strict=True)]
            law_index = unlisted[0] if unlisted else max(range(len(terms)), key=lambda index: ranks[index])
            law = terms[law_index]
        shifts = {index: part for index, part in enumerate(lists) if part is not None and index != law_index}
        # Atoms that the user listed count whatever their number: only lists made here are limited.
        num_combinations = math.prod(
            [_num_points(part) for index, part in shifts.items() if not isinstance(terms[index], Atoms)]
        )
        if num_combinations > MOST_LISTED:
            names = " and ".join(type(term).__name__ for term in terms)
            raise MissingFormError(
                f"convolve: the density of a sum of {names} has no closed form here ({num_combinations} combinations, "
                f"at most {MOST_LISTED} are listed)"
            )
        return _ShiftedLaw(list(shifts.values()), law)

    def _log_density(self, point: Tensor) -> Tensor:
        return total([self._log_prob(torch.zeros_like(point), point), self._log_partition(torch.zeros_like(point))])

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        law = self._shifted_law()
        if isinstance(law, Mixture):
            return law._log_prob(eta, point)
        return _log_prob_of_sum(law.shifts, law.law, eta, point, point.abs())

    def _nearest(self, point: Tensor) -> Tensor | None:
        if self._reference == "lebesgue":
            return point
        try:
            law = self._shifted_law()
        except MissingFormError:
            return None
        if isinstance(law, Mixture):
            return law._nearest(point)
        return _nearest_sum(law.shifts, law.law, point)

    def _listed(self) -> Listed | None:
        lists = all_or_none([measure._listed() for measure in self.measures])
        return None if lists is None else listed.sums(lists, self.batch_shape)


class _ShiftedLaw(NamedTuple):
    """The law of a sum of independent points, one of each list, and a draw from one more law."""

    shifts: list[Listed]
    law: Measure


def _num_points(part: Listed | None) -> int:
    """The length of a list; 1 for a law that is not listed."""
    return 1 if part is None else part.size.shape[-2]


def _log_prob_of_sum(shifts: list[Listed], law: Measure, eta: Tensor, point: Tensor, size: Tensor) -> Tensor:
    """The log-density of a `_ShiftedLaw` tilted by `eta`.

    `size` has the sizes of the numbers that `point` was computed from, for its rounding.
    """
    if shifts:
        # log Σ_s p(s) p_rest(point − s), list by list: the points of a list become one more query dimension.
        part, *others = shifts
        atoms = listed.as_atoms(part)
        remainder = point.unsqueeze(-2) - atoms._align(part.points, point, 2)
        size = size.unsqueeze(-2) + atoms._align(part.size, point, 2)
        log_prob = _log_prob_of_sum(others, law, eta.unsqueeze(-2), remainder, size)
        return logsumexp(log_prob + atoms._log_probability(eta))
    nearest = law._nearest(point)
    if nearest is None:
        raise MissingFormError(
            f"convolve: {type(law).__name__} has no `_nearest`, its point nearest to another, which the density of a "
            "sum needs, since x + s − s is not exactly x in floating point"
        )
    is_hit = is_close(point, nearest, size, nearest).all(-1, keepdim=True)
    return law._log_prob(eta, torch.where(is_hit, nearest, point))


def _nearest_sum(shifts: list[Listed], law: Measure, point: Tensor) -> Tensor | None:
    """The sum nearest to `point` of points, one of each list and one of the law; None if the law does not know its nearest."""
    if not shifts:
        return law._nearest(point)
    part, *others = shifts
    shift = align(part.points, point.ndim + 1, 2)
    remainder = _nearest_sum(others, law, point.unsqueeze(-2) - shift)
    if remainder is None:
        return None
    sums = shift + remainder
    index = (sums - point.unsqueeze(-2)).abs().amax(-1).argmin(-1)[..., None, None]
    return sums.take_along_dim(index, -2).squeeze(-2)


def _sum_of_gaussians(gaussians: list[Gaussian], batch: torch.Size) -> Gaussian:
    location = total([align(part.location, len(batch) + 1, 1) for part in gaussians])
    covariance = total([align(part._matrix(), len(batch) + 2, 2) for part in gaussians])
    return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))
