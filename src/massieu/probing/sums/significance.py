"""From numbers with errors to what may be said about many heads: p-values and false discovery rates.

All p-values are two-sided, and NaN in gives NaN out.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float64, Real

from massieu.errors import require_extra

_NORMAL = 1e12
"""Degrees of freedom, with which Student's law is the normal one."""


def difference_p(
    value: Float[np.ndarray, "*shape"],
    standard_error: Float[np.ndarray, "*shape"],
    degrees: Float[np.ndarray, "*shape"],
    other_value: Float[np.ndarray, "*shape"],
    other_standard_error: Float[np.ndarray, "*shape"],
    other_degrees: Float[np.ndarray, "*shape"],
) -> Float64[np.ndarray, "*shape"]:
    """P-value of "two independent estimates have the same mean", by Student's t.

    t = (a − b)/√(se_a² + se_b²) with the smaller one's degrees of freedom, so that the level holds whatever the two
    variances are; Welch's degrees reject too often where one estimate rests on two units. Where both errors are 0 the
    p-value is its limit: 1 for equal values, 0 for others; where one has no degree of freedom it is NaN. Two estimates
    from the same rows are as a rule positively correlated; the p-value is then too large, not too small.

    Source: Mickey and Brown, "Bounds on the distribution functions of the Behrens–Fisher statistic" (Ann. Math. Stat. 37,
        639, 1966).

    Raises:
        ValueError: a standard error is negative.
    """
    values, errors, freedom, other_values, other_errors, other_freedom = _broadcast(
        value, standard_error, degrees, other_value, other_standard_error, other_degrees
    )
    if ((errors < 0) | (other_errors < 0)).any():
        raise ValueError("standard errors must be 0 or more")
    return student_p(values - other_values, np.hypot(errors, other_errors), np.minimum(freedom, other_freedom))


def summed_degrees(
    variances: Sequence[Float[np.ndarray, "*shape"]], degrees: Sequence[Float[np.ndarray, "*shape"]]
) -> Float64[np.ndarray, "*shape"]:
    """Degrees of freedom of a sum of independent variances: (Σ v)² / Σ v²/ν; 0 where a part has none.

    Without any variance, as where a statistic is the same in all units, the degrees are those of all parts together.

    Source: Satterthwaite, "An approximate distribution of estimates of variance components" (Biometrics Bulletin 2, 110,
        1946).
    """
    # (parts, *shape) both.
    parts = np.stack(np.broadcast_arrays(*variances)).astype(np.float64)
    degrees_of_parts = np.stack(np.broadcast_arrays(*degrees)).astype(np.float64)
    total = parts.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        satterthwaite = total**2 / (parts**2 / degrees_of_parts).sum(0)
    degrees_of_total = np.where(total > 0, satterthwaite, degrees_of_parts.sum(0))
    return np.where((degrees_of_parts > 0).all(0), degrees_of_total, 0.0)


def two_sided_p(
    value: Float[np.ndarray, "*shape"],
    standard_error: Float[np.ndarray, "*shape"],
    null_value: Float[np.ndarray, "*shape"],
    null_standard_deviation: Float[np.ndarray, "*shape"],
    null_count: Real[np.ndarray, "*shape"],
    degrees: Float[np.ndarray, "*shape"],
) -> Float64[np.ndarray, "*shape"]:
    """P-value of "this head's number is one more draw from its null's numbers", by a prediction-interval t-test.

    t = (own − null mean)/√(se² + sd²(1 + 1/n)) with the degrees of `summed_degrees`: the question is whether the head's own
    number could be another of the n null numbers (mismatched heads, say), not whether it differs from their mean. It
    assumes that null numbers are independent and about normal. It is on the careful side where the null's standard
    deviation already holds the null numbers' own measuring errors. With few nulls little can be said: at n = 2 a head
    must lie 15 standard deviations away to reach p = 0.05.

    Where both se and sd are 0 the p-value is its limit: 1 for equal values, 0 for others. The relative error of the
    computed tail is below 1e-10 for up to 10⁵ null numbers.

    Source: the prediction interval of a normal sample (Hahn and Meeker, *Statistical Intervals*, 1991, section 4.7).

    Args:
        value: The head's own number.
        standard_error: Its standard error.
        null_value: Mean of the null numbers.
        null_standard_deviation: Their sample standard deviation (divisor n − 1).
        null_count: How many null numbers there are; the result is NaN below 2.
        degrees: Degrees of freedom of the standard error; infinite for a number without error.

    Raises:
        ValueError: a standard error or deviation is negative.
    """
    values, errors, means, deviations, counts, degrees_of_error = _broadcast(
        value, standard_error, null_value, null_standard_deviation, null_count, degrees
    )
    if ((errors < 0) | (deviations < 0)).any():
        raise ValueError("standard errors and deviations must be 0 or more")
    n = np.where(counts >= 2, counts, 1.0)  # one null number has no degree of freedom: the result is then NaN
    variance = errors**2
    null_variance = deviations**2 * (1 + 1 / n)  # of one more null number
    degrees_of_both = summed_degrees([variance, null_variance], [degrees_of_error, n - 1])
    return student_p(values - means, np.sqrt(variance + null_variance), degrees_of_both)


def student_p(
    value: Float[np.ndarray, "*shape"],
    standard_error: Float[np.ndarray, "*shape"],
    degrees: Float[np.ndarray, "*shape"],
) -> Float64[np.ndarray, "*shape"]:
    """P-value of "the mean of this estimate is 0", by Student's t with so many degrees of freedom.

    Where the error is 0 the p-value is its limit: 1 for the value 0, 0 for others; NaN without a degree of freedom.

    Raises:
        ValueError: a standard error is negative.
    """
    values, errors, freedom = _broadcast(value, standard_error, degrees)
    if (errors < 0).any():
        raise ValueError("standard errors must be 0 or more")
    has_freedom = freedom > 0
    usable_freedom = np.where(has_freedom, np.minimum(freedom, _NORMAL), 1.0)
    p_values = _student_t_two_sided(_standardised(values, errors), usable_freedom)
    return np.where(has_freedom, p_values, np.nan)


def benjamini_hochberg(p_values: Float[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Adjusted p-values ("q-values"): calling all heads with q ≤ α keeps the expected share of false calls ≤ α.

    Of all shapes taken together; NaN is passed through and not counted as a test. The guarantee holds for independent
    tests and for tests that are positively dependent.

    Source: Benjamini and Hochberg, "Controlling the false discovery rate" (J. R. Stat. Soc. B 57, 289, 1995).

    Raises:
        ValueError: a p-value is outside [0, 1].
    """
    values = np.array(p_values, dtype=np.float64)
    tested = ~np.isnan(values)
    p = values[tested]
    if ((p < 0) | (p > 1)).any():
        raise ValueError("p-values must lie in [0, 1]")
    result = np.full(values.shape, np.nan)
    if len(p):
        # Not by scipy.stats, whose import takes longer than a small probe.
        largest_first = np.argsort(-p, kind="stable")
        scaled = p[largest_first] * len(p) / np.arange(len(p), 0, -1)
        adjusted = np.empty_like(p)
        adjusted[largest_first] = np.minimum.accumulate(np.minimum(scaled, 1.0))
        result[tested] = adjusted
    return result


def holm(p_values: Sequence[float], level: float) -> list[float]:
    """The level that each test of a small family may use, so that any false one is named with at most this probability.

    The smallest p-value is held against level/n, the next one against level/(n − 1), and so on, until one fails: that one
    and all after it get 0. Whatever the tests' dependence.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (Scand. J. Statist. 6, 65, 1979).
    """
    levels = [0.0] * len(p_values)
    smallest_first = np.argsort(p_values, kind="stable").tolist()  # NaN last
    for rank, place in enumerate(smallest_first):
        allowed = level / (len(p_values) - rank)
        if not p_values[place] <= allowed:
            break
        levels[place] = allowed
    return levels


def other_heads(
    matrix: Float[np.ndarray, "heads heads"],
) -> tuple[Float64[np.ndarray, " heads"], Float64[np.ndarray, " heads"], int]:
    """For each column of a square array: mean and standard deviation of its off-diagonal entries, and their number.

    With entry (g, h) a number of head g's write as head h sees it, this is the null of the mismatched heads. NaN where
    an entry is NaN or where there are fewer than two others.
    """
    heads = len(matrix)
    if heads < 3:
        return np.full(heads, np.nan), np.full(heads, np.nan), heads - 1
    others = np.stack([np.delete(matrix[:, head], head) for head in range(heads)])  # (heads, heads − 1)
    return others.mean(1), others.std(1, ddof=1), heads - 1


def _broadcast(*arrays: Real[np.ndarray, "*shape"]) -> list[np.ndarray]:
    """Copies in float64, all of one shape."""
    in_float64 = [np.asarray(array, dtype=np.float64) for array in arrays]
    return [np.array(array) for array in np.broadcast_arrays(*in_float64)]


def _standardised(difference: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """difference / scale, with its limits 0 and ±∞ at scale 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((difference == 0) & (scale == 0), 0.0, difference / scale)


def _student_t_two_sided(t: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """P(|T| ≥ |t|) = I_x(ν/2, 1/2), x = ν/(ν + t²), near t = 0 from 1 − x, which loses no digits there."""
    special = require_extra("scipy.special", "probe")
    with np.errstate(divide="ignore", over="ignore"):
        squared = t**2
        x = 1 / (1 + squared / degrees)
        one_minus_x = 1 / (1 + degrees / squared)
    near_zero = 1 - special.betainc(0.5, degrees / 2, one_minus_x)
    return np.where(squared < 1, near_zero, special.betainc(degrees / 2, 0.5, x))
