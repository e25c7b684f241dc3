"""The difference of one statistic between two models, head by head, with its standard error."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from massieu.probing.significance import student_p
from massieu.probing.unit_sums import SiteSums

RESOLUTION = 2.0**-22
"""Relative difference that float32 arithmetic in another order can make: the size of a batch, another device."""


@dataclass(frozen=True, eq=False)
class Difference:
    """The second minus the first, its standard error, and the degrees of freedom of that error.

    Attributes:
        size: the larger of the two values' sizes, below whose rounding no difference means anything.
    """

    value: Float64[np.ndarray, " heads"]
    standard_error: Float64[np.ndarray, " heads"]
    degrees: Float64[np.ndarray, " heads"]
    size: Float64[np.ndarray, " heads"]

    def p_value(self) -> Float64[np.ndarray, " heads"]:
        """P-value of "no difference", by Student's t; NaN where fewer than two units were counted."""
        return student_p(self.value, np.hypot(self.standard_error, RESOLUTION * self.size), self.degrees)


def paired(first: SiteSums, second: SiteSums) -> Difference:
    """The difference of two ratios over the same units of text, by linearisation.

    With s_u, n_u the sums of unit u, N = Σ n_u and m = Σ s_u / N of each model, unit u moves the difference by
    z_u = (s′_u − m′ n′_u)/N′ − (s_u − m n_u)/N, and se² = U/(U − 1) · Σ z_u² over the U units that were counted. What both
    models find hard in a unit drops out. There are U − 1 degrees of freedom.

    Source: Cochran, *Sampling Techniques* (3rd edition, 1977), sections 6.4 and 6.18.

    Raises:
        ValueError: the units of the two are not the same.
    """
    if not same_units(first, second):
        raise ValueError("the sums of the two models are over different units")
    (value, moved), (other, other_moved) = _ratio(first), _ratio(second)
    units = ((first.counts > 0) | (second.counts > 0)).sum(0).astype(float)
    degrees = np.maximum(units - 1, 0.0)
    correction = np.divide(units, degrees, out=np.full(units.shape, np.nan), where=degrees > 0)
    error = np.sqrt(correction * ((other_moved - moved) ** 2).sum(0))
    return Difference(other - value, error, degrees, np.maximum(abs(value), abs(other)))


def same_units(first: SiteSums, second: SiteSums) -> bool:
    """Whether the two were summed over the same blocks of rows, for as many heads."""
    return first.totals.shape == second.totals.shape and np.array_equal(first.rows, second.rows)


def independent(
    value: Float64[np.ndarray, " heads"],
    error: Float64[np.ndarray, " heads"],
    units: Float64[np.ndarray, " heads"],
    other: Float64[np.ndarray, " heads"],
    other_error: Float64[np.ndarray, " heads"],
    other_units: Float64[np.ndarray, " heads"],
) -> Difference:
    """The difference of two estimates as if they were independent.

    Of two models on the same text the error is then too large, not too small, since what is hard for one is as a rule
    hard for the other.

    Source of the degrees of freedom: Welch, "The generalization of Student's problem" (Biometrika 34, 28, 1947).
    """
    variances = np.stack([error, other_error]) ** 2
    freedom = np.stack([units, other_units]) - 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = variances.sum(0) ** 2 / (variances**2 / freedom).sum(0)
    # Without any error, as where a statistic is the same in all units, all units count.
    degrees = np.where(variances.sum(0) > 0, degrees, freedom.sum(0))
    degrees = np.where((freedom > 0).all(0), degrees, 0.0)
    return Difference(other - value, np.sqrt(variances.sum(0)), degrees, np.maximum(abs(value), abs(other)))


def alone(sums: SiteSums) -> tuple[Float64[np.ndarray, " heads"], ...]:
    """Of one model: value, standard error and number of units."""
    value, moved = _ratio(sums)
    units = (sums.counts > 0).sum(0).astype(float)
    correction = np.divide(units, units - 1, out=np.full(units.shape, np.nan), where=units > 1)
    return value, np.sqrt(correction * (moved**2).sum(0)), units


def _ratio(sums: SiteSums) -> tuple[Float64[np.ndarray, " heads"], Float64[np.ndarray, "units heads"]]:
    """The ratio, and by how much each unit moves it."""
    count = sums.counts.sum(0)
    divisor = np.where(count > 0, count, np.nan)
    value = sums.totals.sum(0) / divisor
    return value, (sums.totals - value * sums.counts) / divisor
