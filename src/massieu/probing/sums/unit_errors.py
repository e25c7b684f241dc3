"""The standard error of a ratio of sums over units of text, and how many degrees of freedom that error has.

Each unit moves the ratio by z_u = (s_u − m n_u) / N, where s_u and n_u are its sums, N = Σ n_u and m is the ratio. The
error is that of Σ z_u. An interval takes Student's t with the degrees of freedom, never the normal law.
"""

import numpy as np
from jaxtyping import Float64

HARMONICS = 0.35
POWER = 2 / 3
"""So many cosines are used: 0.35 · windows^(2/3), rounded down."""


def ratio_error(
    totals: Float64[np.ndarray, "units *shape"], counts: Float64[np.ndarray, "units *shape"], windows: int | None
) -> tuple[Float64[np.ndarray, "*shape"], Float64[np.ndarray, "*shape"], Float64[np.ndarray, "*shape"]]:
    """Value, standard error and degrees of freedom of Σ totals / Σ counts.

    Args:
        windows: how many windows of one text the units are made of, neighbours of which may be alike; None: the units
            are independent, as documents are.
    """
    value, moved = influences(totals, counts)
    error, degrees = sum_error(moved, weights_of(counts), windows)
    return value, error, degrees


def influences(
    totals: Float64[np.ndarray, "units *shape"], counts: Float64[np.ndarray, "units *shape"]
) -> tuple[Float64[np.ndarray, "*shape"], Float64[np.ndarray, "units *shape"]]:
    """The ratio, NaN where nothing was counted, and by how much each unit moves it."""
    count = counts.sum(0)
    divisor = np.where(count > 0, count, np.nan)
    value = totals.sum(0) / divisor
    with np.errstate(invalid="ignore"):  # an infinite total makes its own entry NaN, and no other
        return value, (totals - value * counts) / divisor


def weights_of(counts: Float64[np.ndarray, "units *shape"]) -> Float64[np.ndarray, "units *shape"]:
    """Each unit's share of what was counted."""
    return counts / np.maximum(counts.sum(0), 1e-300)


def sum_error(
    moved: Float64[np.ndarray, "units *shape"], weights: Float64[np.ndarray, "units *shape"], windows: int | None
) -> tuple[Float64[np.ndarray, "*shape"], Float64[np.ndarray, "*shape"]]:
    """Standard error of Σ moved, and its degrees of freedom; NaN and 0 where fewer than two units were counted."""
    if windows is None:
        error, degrees = _independent(moved, weights)
    else:
        error, degrees = _correlated(moved, weights, windows)
    has_two_units = (weights > 0).sum(0) > 1
    return np.where(has_two_units, error, np.nan), np.where(has_two_units, degrees, 0.0)


def harmonics(windows: int, units: int) -> int:
    """How many cosines an error over so many windows rests on: at least one, at most one less than there are units."""
    return min(max(int(HARMONICS * windows**POWER), 1), units - 1)


def _correlated(moved: np.ndarray, weights: np.ndarray, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """From the units' lowest harmonics: se² = mean over j of 2 (Σ_u z_u cos(π j (u + ½)/U))², with as many degrees.

    Neighbouring windows of a text are alike, so that the mean of n windows has a larger error than n independent ones. The
    slow cosines see what the mean sees. With all U − 1 of them the result is the usual error; with few it is true at
    strong correlations, and the few degrees of freedom say how little is known of it.

    Source: Lazarus, Lewis, Stock and Watson, "HAR inference: recommendations for practice" (J. Bus. Econ. Stat. 36, 541,
    2018), equal-weighted cosines. They take ν = 0.4 n^(2/3); fewer cover better at strong correlations.
    """
    units = len(moved)
    if units < 2:
        return np.full(moved.shape[1:], np.nan), np.zeros(moved.shape[1:])
    num_cosines = harmonics(windows, units)
    angles = np.pi * np.arange(1, num_cosines + 1)[:, None] * (np.arange(units) + 0.5) / units  # (cosines, units)
    coefficients = np.sqrt(2) * np.tensordot(np.cos(angles), moved, 1)  # (cosines, *shape)
    # Units that were not counted add nothing: the mean takes one degree from those that were.
    counted = np.maximum((weights > 0).sum(0), 2)
    correction = (counted / (counted - 1)) / (units / (units - 1))
    return np.sqrt(correction * (coefficients**2).mean(0)), np.minimum(float(num_cosines), counted - 1.0)


def _independent(moved: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With unequal units: se² = Σ z_u² / (1 − 2w_u + Σw²), unbiased where all units' ratios have one variance.

    A few long documents carry the mean, and make it follow them; their residuals are then too small, and there are fewer
    degrees of freedom than documents. With equal units this is the usual error with U − 1.

    Source: Bell and McCaffrey, "Bias reduction in standard errors for linear regression with multi-stage samples"
    (Survey Methodology 28, 169, 2002): the estimator CR2 and Satterthwaite's degrees of freedom, for a weighted mean.
    """
    total = (weights**2).sum(0)  # W = Σ w²
    # Of a unit's residual, the variance that fitting the mean leaves in it: r_u = 1 − 2 w_u + W.
    left = 1 - 2 * weights + total
    left = np.where(left > 0, left, np.nan)  # a single unit leaves nothing
    scales = weights**2 / left  # a_u: se² = Σ a_u · residual_u²
    # Satterthwaite's ν = (Σ a_u r_u)² / Σ_uv a_u a_v c_uv², where residuals have the covariances c_uu = r_u and, of two
    # units, c_uv = W − w_u − w_v. The double sum is opened into the sums s_k = Σ a_u w_u^k. Its numerator is W².
    s0, s1, s2 = ((scales * weights**power).sum(0) for power in range(3))
    squares = (scales**2 * (left**2 - (total - 2 * weights) ** 2)).sum(0)
    squares += total**2 * s0**2 - 4 * total * s0 * s1 + 2 * s0 * s2 + 2 * s1**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((moved**2 / left).sum(0)), np.nan_to_num(total**2 / squares)
