"""Thresholds that are fixed before a run, and whether the numbers of several seeds meet them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Literal, Self

import numpy as np

from massieu.errors import require_extra
from massieu.foundation.numbers import bound, number

Role = Literal["finding", "optimisation", "control", "description"]
Outcome = Literal["met", "missed", "open", "described"]
LEVEL = 0.95
FEWEST = 5
"""The least number of seeds for a verdict."""
INTERVALS = (
    "An interval is a bootstrap over the seeds and describes these runs: of five seeds it holds the mean in nine of ten "
    "cases if their numbers are normal, in eight of ten if they are lognormal, and in half or fewer if one run in ten diverges."
)
"""The sentence that stands wherever intervals are shown; `benchmarks/controls.py` counted the cases."""
_MOST_ENUMERATED = 6
"""Up to this number of values every resample is counted: 6⁶ of them."""
_DRAWS = 20_000
"""Resamples that are drawn of more values."""


@dataclass(frozen=True)
class Criterion:
    """A threshold for the mean of one number over seeds.

    Attributes:
        quantity: The number's name among those of a seed.
        title: Its description in words.
        least, most: The ends of the allowed range; infinite where there is no such end.
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
        """The allowed range in symbols."""
        if self.role == "description":
            return "–"
        if math.isinf(self.least):
            return f"≤ {bound(self.most)}"
        if math.isinf(self.most):
            return f"≥ {bound(self.least)}"
        return f"{bound(self.least)} … {bound(self.most)}"


@dataclass(frozen=True)
class Judgement:
    """Whether the numbers of several seeds meet a criterion.

    Attributes:
        criterion: The criterion.
        values: The number of each seed.
        low, high: Ends of the interval of their mean.
        outcome: "met" where the whole interval lies within the threshold, so that nothing is confirmed by being vague; "missed"
            where it lies outside; else, and below `FEWEST` seeds, "open". "described" where there is no threshold.
    """

    criterion: Criterion
    values: tuple[float, ...]
    low: float
    high: float
    outcome: Outcome

    @classmethod
    def of(cls, criterion: Criterion, values: Sequence[float], low: float, high: float, *, num_seeds: int) -> Self:
        """Compare an interval with a threshold.

        Args:
            criterion: The criterion.
            values: The number of each seed that has one.
            low, high: Ends of the interval.
            num_seeds: How many seeds were run.
        """
        return cls(criterion, tuple(values), low, high, _outcome(criterion, num_seeds, low, high))

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN without seeds."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def mean_and_interval(self) -> tuple[str, str]:
        """Mean and interval in words, with the digits that the interval supports; a dash where there is no interval."""
        # The interval is about four standard errors wide; 0 says nothing about digits.
        standard_error = (self.high - self.low) / 4 or None
        mean = number(self.mean, standard_error)
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return mean, "–"
        return mean, f"{number(self.low, standard_error)} to {number(self.high, standard_error)}"


def judge(criterion: Criterion, values: Sequence[float]) -> Judgement:
    """Compare the numbers of several seeds with a threshold; one that is not finite leaves the outcome open."""
    low, high = interval(values)
    return Judgement.of(criterion, values, low, high, num_seeds=len(values))


def _outcome(criterion: Criterion, num_seeds: int, low: float, high: float) -> Outcome:
    if criterion.role == "description":
        return "described"
    if num_seeds < FEWEST or not (math.isfinite(low) and math.isfinite(high)):
        return "open"
    if criterion.least <= low and high <= criterion.most:
        return "met"
    if high < criterion.least or low > criterion.most:
        return "missed"
    return "open"


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
    # Student's quantile, widened since resampled means have the variance (n − 1)/n of what they estimate.
    quantile = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * math.sqrt(count / (count - 1))
    lower_percentile = NormalDist().cdf(-quantile)
    if count <= _MOST_ENUMERATED:
        resamples = np.array(list(product(range(count), repeat=count)))
    else:
        resamples = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    means = np.asarray(values, dtype=np.float64)[resamples].mean(1)
    low, high = np.quantile(means, [lower_percentile, 1 - lower_percentile])
    return float(low), float(high)
