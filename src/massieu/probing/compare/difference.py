"""The difference of one statistic between two models, head by head, with its standard error."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from massieu.probing.sums.significance import student_p
from massieu.probing.sums.unit_errors import influences, ratio_error, sum_error, weights_of
from massieu.probing.sums.unit_sums import SiteSums
from massieu.probing.sums.units import WINDOWS, Units

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


def paired(first: SiteSums, second: SiteSums, units: Units = WINDOWS) -> Difference:
    """The difference of two ratios over the same units of text, by linearisation.

    With s_u, n_u the sums of unit u, N = Σ n_u and m = Σ s_u / N of each model, unit u moves the difference by
    z_u = (s′_u − m′ n′_u)/N′ − (s_u − m n_u)/N, and the error is that of Σ z_u over the units that were counted. What both
    models find hard in a unit drops out. `massieu.probing.sums.unit_errors` has the error and its degrees of freedom.

    Args:
        units: what the rows of the text are.

    Source: Cochran, *Sampling Techniques* (3rd edition, 1977), sections 6.4 and 6.18.

    Raises:
        ValueError: the units of the two are not the same.
    """
    if not same_units(first, second):
        raise ValueError("the sums of the two models are over different units")
    (value, moved), (other, other_moved) = (influences(each.totals, each.counts) for each in (first, second))
    weights = (weights_of(first.counts) + weights_of(second.counts)) / 2
    error, degrees = sum_error(other_moved - moved, weights, units.windows(int(first.rows.sum())))
    return Difference(other - value, error, degrees, np.maximum(abs(value), abs(other)))


def same_units(first: SiteSums, second: SiteSums) -> bool:
    """Whether the two were summed over the same blocks of rows, for as many heads."""
    return first.totals.shape == second.totals.shape and np.array_equal(first.rows, second.rows)


def independent(
    value: Float64[np.ndarray, " heads"],
    error: Float64[np.ndarray, " heads"],
    freedom: Float64[np.ndarray, " heads"],
    other: Float64[np.ndarray, " heads"],
    other_error: Float64[np.ndarray, " heads"],
    other_freedom: Float64[np.ndarray, " heads"],
) -> Difference:
    """The difference of two estimates as if they were independent.

    Of two models on the same text the error is then too large, not too small, since what is hard for one is as a rule
    hard for the other. The degrees of freedom are the smaller one's, as
    `massieu.probing.sums.significance.difference_p` has them.
    """
    return Difference(
        other - value,
        np.hypot(error, other_error),
        np.minimum(freedom, other_freedom),
        np.maximum(abs(value), abs(other)),
    )


def alone(sums: SiteSums, units: Units = WINDOWS) -> tuple[Float64[np.ndarray, " heads"], ...]:
    """Of one model: value, standard error and its degrees of freedom."""
    return ratio_error(sums.totals, sums.counts, units.windows(int(sums.rows.sum())))
