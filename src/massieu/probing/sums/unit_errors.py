"""The standard error of a ratio of sums over units of text, and how many degrees of freedom that error has.

Each unit moves the ratio by z_u = (s_u − m n_u) / N, where s_u and n_u are its sums, N = Σ n_u and m is the ratio. The
error is that of Σ z_u. An interval takes Student's t with the degrees of freedom, never the normal law.
"""

import numpy as np
from jaxtyping import Float64

HARMONICS, POWER = 0.35, 2 / 3
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
    error, degrees = _independent(moved, weights) if windows is None else _correlated(moved, weights, windows)
    enough = (weights > 0).sum(0) > 1
    return np.where(enough, error, np.nan), np.where(enough, degrees, 0.0)


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
    used = harmonics(windows, units)
    angles = np.pi * np.arange(1, used + 1)[:, None] * (np.arange(units) + 0.5) / units
    found = np.sqrt(2) * np.tensordot(np.cos(angles), moved, 1)
    # Units that were not counted add nothing: the mean takes one degree from those that were.
    counted = np.maximum((weights > 0).sum(0), 2)
    correction = (counted / (counted - 1)) / (units / (units - 1))
    return np.sqrt(correction * (found**2).mean(0)), np.minimum(float(used), counted - 1.0)


def _independent(moved: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With unequal units: se² = Σ z_u² / (1 − 2w_u + Σw²), unbiased where all units' ratios have one variance.

    A few long documents carry the mean, and make it follow them; their residuals are then too small, and there are fewer
    degrees of freedom than documents. With equal units this is the usual error with U − 1.

    Source: Bell and McCaffrey, "Bias reduction in standard errors for linear regression with multi-stage samples"
    (Survey Methodology 28, 169, 2002): the estimator CR2 and Satterthwaite's degrees of freedom, for a weighted mean.
    """
    total = (weights**2).sum(0)
    left = 1 - 2 * weights + total
    left = np.where(left > 0, left, np.nan)
    scales = weights**2 / left
    sums = [(scales * weights**power).sum(0) for power in range(3)]
    squares = (scales**2 * (left**2 - (total - 2 * weights) ** 2)).sum(0)
    squares += total**2 * sums[0] ** 2 - 4 * total * sums[0] * sums[1] + 2 * sums[0] * sums[2] + 2 * sums[1] ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((moved**2 / left).sum(0)), np.nan_to_num(total**2 / squares)
