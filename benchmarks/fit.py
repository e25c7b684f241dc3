"""Power laws through measured points: exponents with intervals, and what they say of a size that was not measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}
"""97.5 % quantiles of Student's t by degrees of freedom."""


@dataclass(frozen=True)
class Power:
    """amount ∝ size^exponent, by least squares in logarithms; 95 % intervals from the residuals, curvature in them."""

    sizes: tuple[float, ...]
    amounts: tuple[float, ...]
    exponent: float
    interval: tuple[float, float]
    extrapolated: float | None = None
    """Amount at the size asked for, and the interval for a measurement there."""
    extrapolated_interval: tuple[float, float] | None = None


def power(sizes: Sequence[float], amounts: Sequence[float], at: float | None = None) -> Power:
    """Fit amounts at three sizes or more (at most eight).

    Raises:
        ValueError: fewer than three or more than eight sizes, or something that is not positive.
    """
    if not 3 <= len(sizes) <= 8 or len(sizes) != len(amounts):
        raise ValueError(f"a fit needs 3 to 8 sizes and as many amounts, got {len(sizes)} and {len(amounts)}")
    if min(sizes) <= 0 or min(amounts) <= 0:
        raise ValueError(f"a power law needs positive numbers, got sizes {sizes} and amounts {amounts}")
    x, y = np.log(sizes), np.log(amounts)
    spread = ((x - x.mean()) ** 2).sum()
    exponent = ((x - x.mean()) * (y - y.mean())).sum() / spread
    level = y.mean() - exponent * x.mean()
    freedom = len(x) - 2
    variance = ((y - level - exponent * x) ** 2).sum() / freedom
    reach = T_95[freedom] * np.sqrt(variance / spread)
    measured = tuple(map(float, sizes)), tuple(map(float, amounts))
    found = float(exponent), (float(exponent - reach), float(exponent + reach))
    if at is None:
        return Power(*measured, *found)
    value = level + exponent * np.log(at)
    reach = T_95[freedom] * np.sqrt(variance * (1 + 1 / len(x) + (np.log(at) - x.mean()) ** 2 / spread))
    low, middle, high = (float(np.exp(value + side * reach)) for side in (-1, 0, 1))
    return Power(*measured, *found, middle, (low, high))
