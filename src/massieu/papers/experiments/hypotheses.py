"""Hypotheses about several tasks at once: Student's t over seeds, Holm's levels, and a smallest effect.

A hypothesis names numbers of a seed whose means have to exceed its smallest effect in every task. The tests of one hypothesis
are an intersection–union test: it is confirmed only if each of them is significant, so that none needs a correction. Holm's
levels correct for the number of hypotheses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from massieu.errors import require_extra
from massieu.foundation.numbers import number
from massieu.papers.experiments.criterion import FEWEST, LEVEL, Criterion, Judgement
from massieu.papers.experiments.study import Numbers, Verdict

SEEDS_SIMULATED = 5
SIMULATED = 2000
"""Runs of a simulation."""
_FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Hypothesis:
    """A statement about the means of some numbers over seeds.

    Attributes:
        name: Such as "H1".
        statement: What is claimed, in a sentence.
        comparisons: By task, groups of quantities. It is confirmed if every quantity's interval lies above the quantity's
            smallest effect. It is refuted if in every task there is a group whose intervals all lie below.
        least: The smallest effect of each quantity.
        counts: By task, the quantity that counts on how many pairs a seed's number rests; None where it rests on no pairs.
            With fewer than three pairs, or three seeds that have one, the hypothesis is "undecided: control".
    """

    name: str
    statement: str
    comparisons: Mapping[str, Sequence[Sequence[str]]]
    least: Mapping[str, float]
    counts: Mapping[str, str] | None = None

    @property
    def quantities(self) -> list[str]:
        """All quantities, in order."""
        return [quantity for groups in self.comparisons.values() for group in groups for quantity in group]


class EffectTests(NamedTuple):
    """One-sided p-values of one quantity in each of several runs.

    Attributes:
        above, below: Of "the mean is at most the smallest effect", and "at least".
        mean, error, degrees: Of the mean over seeds; NaN and 0 below two seeds.
    """

    above: Float64[np.ndarray, " runs"]
    below: Float64[np.ndarray, " runs"]
    mean: Float64[np.ndarray, " runs"]
    error: Float64[np.ndarray, " runs"]
    degrees: Float64[np.ndarray, " runs"]


def effect_tests(values: Float64[np.ndarray, "runs seeds"], least: float, *, may_lack: bool) -> EffectTests:
    """Student's t against the smallest effect; seeds that are not finite leave it open, or are left out if they may lack."""
    finite = np.isfinite(values)
    counts = finite.sum(1)
    usable = np.where(finite, values, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = usable.sum(1) / counts
        squares = np.where(finite, (usable - mean[:, None]) ** 2, 0.0).sum(1)
        error = np.sqrt(squares / (counts - 1) / counts)
        t = (mean - least) / error
    is_open = (counts < 2) | (~finite.all(1) & (not may_lack))
    degrees = np.where(is_open, 0, counts - 1)
    tail = require_extra("scipy.special", "probe").stdtr
    # Equal seeds whose mean is the smallest effect itself speak for neither side.
    t = np.where((error == 0) & (mean == least), 0.0, t)
    above = np.where(is_open, 1.0, tail(np.maximum(degrees, 1), -t))
    below = np.where(is_open, 1.0, tail(np.maximum(degrees, 1), t))
    return EffectTests(above, below, np.where(is_open, np.nan, mean), np.where(is_open, np.nan, error), degrees)


class Decision(NamedTuple):
    """What several runs say of one hypothesis; levels are two-sided."""

    confirmed: Bool[np.ndarray, " runs"]
    refuted: Bool[np.ndarray, " runs"]
    p_value: Float64[np.ndarray, " runs"]
    level: Float64[np.ndarray, " runs"]


def p_values_of(hypothesis: Hypothesis, tests: Mapping[str, EffectTests]) -> Float64[np.ndarray, "2 runs"]:
    """The levels from which on a hypothesis is confirmed, and refuted: twice the one-sided p-values."""
    confirm = np.max([tests[quantity].above for quantity in hypothesis.quantities], 0)
    refute = np.max(
        [
            np.min([np.max([tests[quantity].below for quantity in group], 0) for group in groups], 0)
            for groups in hypothesis.comparisons.values()
        ],
        0,
    )
    return np.minimum(2 * np.stack([confirm, refute]), 1.0)


def decide(hypotheses: Sequence[Hypothesis], values: Mapping[str, Float64[np.ndarray, "runs seeds"]]) -> list[Decision]:
    """Confirm or refute each hypothesis in each run, at a level of 5 % for all of them together (Holm).

    A hypothesis that is not announced, and every one with a larger p-value, has the level that it, or the first such one,
    was held against. Its intervals at this level show why.
    """
    both = []
    for hypothesis in hypotheses:
        tests = {
            quantity: effect_tests(values[quantity], hypothesis.least[quantity], may_lack=hypothesis.counts is not None)
            for quantity in hypothesis.quantities
        }
        both.append(p_values_of(hypothesis, tests))
    p = np.stack(both)  # (hypotheses, 2, runs)
    smaller = p.min(1)
    levels = np.stack([_levels(column) for column in smaller.T], 1)
    announced = smaller <= levels
    is_confirmation = p[:, 0] <= p[:, 1]
    return [
        Decision(announced[at] & is_confirmation[at], announced[at] & ~is_confirmation[at], smaller[at], levels[at])
        for at in range(len(hypotheses))
    ]


def _levels(p_values: Float64[np.ndarray, " hypotheses"]) -> Float64[np.ndarray, " hypotheses"]:
    """Holm's levels; from the first test that fails on, its own."""
    levels = np.empty(len(p_values))
    level = 0.0
    has_failed = False
    for rank, at in enumerate(np.argsort(p_values, kind="stable")):
        if not has_failed:
            level = (1 - LEVEL) / (len(p_values) - rank)
            has_failed = not p_values[at] <= level
        levels[at] = level
    return levels


# --- the rule of an experiment -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudentHolm:
    """How a study of hypotheses is judged: intervals of Student's t at Holm's levels; see `JudgingRule` for the attributes.

    Attributes:
        hypotheses: The hypotheses; each finding of the study belongs to one.
    """

    hypotheses: tuple[Hypothesis, ...]
    interval: str = "interval (Student’s t)"
    sentence: str = (
        "An interval is Student's t over the seeds. For the findings its level is the one at which Holm's procedure holds the "
        "hypothesis, so that all hypotheses together are named falsely in at most 5 % of studies; else it is 95 %."
    )

    def judgements(self, criteria: Sequence[Criterion], runs: Sequence[Numbers]) -> list[Judgement]:
        """The judgement of each criterion."""
        levels = self._levels(runs)
        lacking = {quantity for each in self.hypotheses if each.counts is not None for quantity in each.quantities}
        return [
            _judgement(
                criterion,
                [numbers.get(criterion.quantity, np.nan) for numbers in runs],
                levels.get(criterion.quantity, 1 - LEVEL),
                may_lack=criterion.quantity in lacking or criterion.role == "description",
            )
            for criterion in criteria
        ]

    def verdicts(self, runs: Sequence[Numbers]) -> dict[str, Verdict]:
        """The verdict of each hypothesis."""
        if len(runs) < FEWEST:
            return {hypothesis.name: "undecided" for hypothesis in self.hypotheses}
        decisions = decide(self.hypotheses, self._values(runs))
        return {
            hypothesis.name: _verdict_of(hypothesis, decision, runs)
            for hypothesis, decision in zip(self.hypotheses, decisions, strict=True)
        }

    def verdict(self, judgements: Sequence[Judgement], runs: Sequence[Numbers]) -> Verdict:
        """Confirmed if all hypotheses are, refuted if one is; training and controls come first as in every study."""
        outcomes = {
            role: [each.outcome for each in judgements if each.criterion.role == role]
            for role in ("optimisation", "control")
        }
        verdicts = self.verdicts(runs).values()
        if any(outcome != "met" for outcome in outcomes["optimisation"]):
            return "undecided: optimisation"
        if any(outcome != "missed" for outcome in outcomes["control"]):
            return "undecided: control"
        if "refuted" in verdicts:
            return "refuted"
        if all(verdict == "confirmed" for verdict in verdicts):
            return "confirmed"
        return "undecided: control" if "undecided: control" in verdicts else "undecided"

    def lines(self, runs: Sequence[Numbers]) -> list[str]:
        """The verdict of each hypothesis, as a sentence."""
        if len(runs) < FEWEST:
            return []
        decisions = decide(self.hypotheses, self._values(runs))
        verdicts = self.verdicts(runs)
        return [
            f"{hypothesis.name} {verdicts[hypothesis.name]}: {hypothesis.statement} Its p-value "
            f"{number(float(decision.p_value[0]), None)} is held against {number(float(decision.level[0]), None)}."
            for hypothesis, decision in zip(self.hypotheses, decisions, strict=True)
        ]

    def _values(self, runs: Sequence[Numbers]) -> dict[str, Float64[np.ndarray, "1 seeds"]]:
        quantities = {quantity for hypothesis in self.hypotheses for quantity in hypothesis.quantities}
        return {
            quantity: np.array([[numbers.get(quantity, np.nan) for numbers in runs]], dtype=np.float64)
            for quantity in quantities
        }

    def _levels(self, runs: Sequence[Numbers]) -> dict[str, float]:
        """The level of each finding's interval."""
        decisions = decide(self.hypotheses, self._values(runs))
        return {
            quantity: float(decision.level[0])
            for hypothesis, decision in zip(self.hypotheses, decisions, strict=True)
            for quantity in hypothesis.quantities
        }


def _verdict_of(hypothesis: Hypothesis, decision: Decision, runs: Sequence[Numbers]) -> Verdict:
    """The verdict of one hypothesis of one study."""
    for quantity in (hypothesis.counts or {}).values():
        counts = np.nan_to_num([numbers.get(quantity, np.nan) for numbers in runs])
        if counts.sum() < _FEWEST_PAIRS or (counts > 0).sum() < _FEWEST_PAIRS:
            return "undecided: control"
    if decision.confirmed[0]:
        return "confirmed"
    return "refuted" if decision.refuted[0] else "undecided"


def _judgement(criterion: Criterion, values: Sequence[float], level: float, *, may_lack: bool) -> Judgement:
    """A criterion with Student's interval at a level."""
    tests = effect_tests(np.array([values], dtype=np.float64), 0.0, may_lack=may_lack)
    mean, error, degrees = (float(part[0]) for part in (tests.mean, tests.error, tests.degrees))
    half = np.nan
    if degrees > 0:
        half = float(require_extra("scipy.special", "probe").stdtrit(degrees, 1 - level / 2)) * error
    kept = tuple(value for value in values if np.isfinite(value)) if may_lack else tuple(values)
    return Judgement.of(criterion, kept, mean - half, mean + half, num_seeds=len(values))


# --- simulation of the design ------------------------------------------------------------------------------------------


def simulated(
    hypotheses: Sequence[Hypothesis],
    effects: Mapping[str, float],
    spread: float,
    *,
    generator: np.random.Generator,
    runs: int = SIMULATED,
) -> list[Decision]:
    """Studies whose true effects are known: normal numbers of five seeds, which the quantities of a task share in part.

    Args:
        hypotheses: The hypotheses.
        effects: The true mean of each quantity, in units of its smallest effect.
        spread: The standard deviation of a quantity over seeds, in the same units. Half of the variance is the seed's own in
            a task, and the same for all quantities of a hypothesis there.
        generator: Of the numbers.
        runs: The number of studies.
    """
    values = {}
    for hypothesis in hypotheses:
        for groups in hypothesis.comparisons.values():
            shared = generator.normal(size=(runs, SEEDS_SIMULATED))
            for quantity in (quantity for group in groups for quantity in group):
                own = generator.normal(size=(runs, SEEDS_SIMULATED))
                in_units = effects[quantity] + spread * np.sqrt(0.5) * (shared + own)
                values[quantity] = in_units * hypothesis.least[quantity]
    return decide(hypotheses, values)


def power_lines(hypotheses: Sequence[Hypothesis], spreads: Sequence[float] = (0.25, 0.5, 1.0)) -> list[str]:
    """The probability of confirming each hypothesis where every effect is twice the smallest, as sentences."""
    effects = {quantity: 2.0 for hypothesis in hypotheses for quantity in hypothesis.quantities}
    lines = []
    for spread in spreads:
        decisions = simulated(hypotheses, effects, spread, generator=np.random.default_rng(0))
        shares = ", ".join(
            f"{hypothesis.name} {decision.confirmed.mean():.2f}"
            for hypothesis, decision in zip(hypotheses, decisions, strict=True)
        )
        lines.append(
            f"power at twice the smallest effect, where seeds differ by {spread:g} of it (standard deviation): {shares}"
        )
    return lines
