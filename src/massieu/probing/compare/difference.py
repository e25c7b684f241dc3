"""The difference of one statistic between two models, head by head, with its standard error."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from massieu.probing.sums.significance import student_p
from massieu.probing.sums.unit_errors import influences, ratio_error, sum_error, weights_of
from massieu.probing.sums.unit_sums import SiteSums
from massieu.probing.sums.units import WINDOWS, Units

RESOLUTION = 2.0**-22
"""Relative difference that float32 arithmetic in another order can cause, such as with another batch size or device."""


@dataclass(frozen=True, eq=False)
class Difference:
    """The second value minus the first, its standard error, and the degrees of freedom of that error.

    Attributes:
        size: the larger of the two magnitudes; a difference below its rounding means nothing.
    """

    value: Float64[np.ndarray, " heads"]
    standard_error: Float64[np.ndarray, " heads"]
    degrees: Float64[np.ndarray, " heads"]
    size: Float64[np.ndarray, " heads"]

    def p_value(self) -> Float64[np.ndarray, " heads"]:
        """P-value of "no difference", by Student's t; NaN where fewer than two units were counted."""
        # Rounding counts as a further error, so that two runs of one model do not differ.
        return student_p(self.value, np.hypot(self.standard_error, RESOLUTION * self.size), self.degrees)


def paired(first: SiteSums, second: SiteSums, units: Units = WINDOWS) -> Difference:
    """The difference of two ratios over the same units of text, by linearisation.

    With s_u, n_u the sums of unit u, N = Σ n_u and m = Σ s_u / N of each model, unit u changes the difference by
    z_u = (s′_u − m′ n′_u)/N′ − (s_u − m n_u)/N. The error is that of Σ z_u over the units that were counted. What is common to
    both models in a unit drops out. `massieu.probing.sums.unit_errors` has the error and its degrees of freedom.

    Args:
        units: the kind of units that the rows of the text are.

    Source: Cochran, *Sampling Techniques* (3rd edition, 1977), sections 6.4 and 6.18.

    Raises:
        ValueError: the units of the two are not the same.
    """
    if not same_units(first, second):
        raise ValueError("the sums of the two models are over different units")
    first_value, first_influences = influences(first.totals, first.counts)
    second_value, second_influences = influences(second.totals, second.counts)
    weights = (weights_of(first.counts) + weights_of(second.counts)) / 2
    error, degrees = sum_error(second_influences - first_influences, weights, units.windows(int(first.rows.sum())))
    size = np.maximum(abs(first_value), abs(second_value))
    return Difference(second_value - first_value, error, degrees, size)


def same_units(first: SiteSums, second: SiteSums) -> bool:
    """Whether the two were summed over the same blocks of rows, for the same number of heads."""
    return first.totals.shape == second.totals.shape and np.array_equal(first.rows, second.rows)


class HeadEstimates(NamedTuple):
    """One model's values, their standard errors, and the degrees of freedom of these."""

    value: Float64[np.ndarray, " heads"]
    standard_error: Float64[np.ndarray, " heads"]
    degrees: Float64[np.ndarray, " heads"]


def independent(first: HeadEstimates, second: HeadEstimates) -> Difference:
    """The difference of two estimates as if they were independent.

    For two models on the same text, the error is then too large, not too small: text that is hard for one is usually hard for
    the other. The degrees of freedom are the smaller ones, as in `massieu.probing.sums.significance.difference_p`.
    """
    return Difference(
        value=second.value - first.value,
        standard_error=np.hypot(first.standard_error, second.standard_error),
        degrees=np.minimum(first.degrees, second.degrees),
        size=np.maximum(abs(first.value), abs(second.value)),
    )


def alone(sums: SiteSums, units: Units = WINDOWS) -> HeadEstimates:
    """The estimates of one model, from its sums by unit."""
    return HeadEstimates(*ratio_error(sums.totals, sums.counts, units.windows(int(sums.rows.sum()))))
