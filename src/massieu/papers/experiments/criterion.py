"""Thresholds that are fixed before a run, and how the numbers of several seeds compare with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Literal

import numpy as np

from massieu.errors import require_extra
from massieu.foundation.numbers import bound, number

Role = Literal["finding", "optimisation", "control", "description"]
Outcome = Literal["met", "missed", "open", "described"]
LEVEL = 0.95
FEWEST = 5
"""Seeds of a verdict."""
INTERVALS = (
    "An interval is a bootstrap over the seeds and describes these runs: of five seeds it holds the mean in nine of ten "
    "cases if their numbers are normal, in eight of ten if they are lognormal, and in half or fewer if one run in ten diverges."
)
"""What an interval is, in the sentence that stands wherever intervals are shown; `benchmarks/controls.py` counted the cases."""
_DRAWS = 20_000


@dataclass(frozen=True)
class Criterion:
    """A threshold for the mean of one number over seeds.

    Attributes:
        quantity: The number's name in what a seed gives.
        title: What it is, in words.
        least, most: What it must lie between; infinite where there is no such end.
        role: "finding": what the question asks. "optimisation": whether training came near enough to the exact risk for the
            rest to mean anything. "control": a run that lacks the property, whose number must **not** meet the threshold.
            "description": a number without a threshold.
    """

    quantity: str
    title: str
    least: float = -math.inf
    most: float = math.inf
    role: Role = "finding"

    @property
    def threshold(self) -> str:
        """In symbols."""
        if self.role == "description":
            return "–"
        if math.isinf(self.least):
            return f"≤ {bound(self.most)}"
        return f"≥ {bound(self.least)}" if math.isinf(self.most) else f"{bound(self.least)} … {bound(self.most)}"


@dataclass(frozen=True)
class Judgement:
    """What several seeds say of a criterion.

    Attributes:
        values: The number of each seed.
        low, high: Ends of the bootstrap interval of their mean.
        outcome: "met" where the whole interval lies within the threshold, so that nothing is confirmed by being vague; "missed"
            where it lies outside; else, and below `FEWEST` seeds, "open". "described" where there is no threshold.
    """

    criterion: Criterion
    values: tuple[float, ...]
    low: float
    high: float
    outcome: Outcome

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def told(self) -> tuple[str, str]:
        """Mean and interval in words, with the digits that the interval supports; a dash where there is no interval."""
        error = (self.high - self.low) / 4 or None
        mean, low, high = (number(value, error) for value in (self.mean, self.low, self.high))
        return mean, f"{low} to {high}" if math.isfinite(self.low) and math.isfinite(self.high) else "–"


def judge(criterion: Criterion, values: Sequence[float]) -> Judgement:
    """Hold the numbers of several seeds against a threshold; one that is not finite leaves it open."""
    low, high = interval(values)
    outcome: Outcome = "described" if criterion.role == "description" else "open"
    if outcome == "open" and len(values) >= FEWEST and math.isfinite(low) and math.isfinite(high):
        if criterion.least <= low and high <= criterion.most:
            outcome = "met"
        elif high < criterion.least or low > criterion.most:
            outcome = "missed"
    return Judgement(criterion, tuple(values), low, high, outcome)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A bootstrap interval of the mean, nominally of 95 %; `INTERVALS` says in how many cases it holds the mean of five.

    Percentiles of the mean of resampled values are too near to each other by √(n/(n − 1)), and by the ratio of Student's t to
    the normal quantile; both are put into the percentiles that are taken (Hesterberg 2015, "expanded percentiles"). With
    at most six values every resample is counted, with more 20,000 are drawn. NaN below two values.
    """
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    special = require_extra("scipy.special", "probe")
    quantile = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * math.sqrt(count / (count - 1))
    share = NormalDist().cdf(-quantile)
    given = np.asarray(values, dtype=np.float64)
    if count <= 6:
        chosen = np.array(list(product(range(count), repeat=count)))
    else:
        chosen = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    low, high = np.quantile(given[chosen].mean(1), [share, 1 - share])
    return float(low), float(high)
