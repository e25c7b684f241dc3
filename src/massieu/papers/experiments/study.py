"""An experiment, what its seeds gave, and what that allows to say."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from massieu.errors import InputError
from massieu.papers.experiments.criterion import FEWEST, Criterion, Judgement, judge

Numbers = dict[str, float]
Measure = Callable[[int, bool], Numbers]
"""From a seed, and whether sizes are small, to numbers."""
Verdict = Literal["confirmed", "refuted", "undecided", "undecided: optimisation", "undecided: control", "described"]
QUICK, LARGE = "quick", "large"


@dataclass(frozen=True)
class Experiment:
    """A question with a known truth.

    Attributes:
        name: On the command line.
        question: What is asked.
        claims: Of docs/theory, such as "E23, X1".
        setting: What is trained on what, in a few sentences.
        criteria: Thresholds; they stand here before a run.
        minutes: Of one core for the default seeds, about.
        measure: The study of one seed.
        tune: The same for its settings, on seeds that no verdict uses: the losses that they were chosen by.
        large: The study of one seed at the size of the literature: for GPUs, or many processes.
    """

    name: str
    question: str
    claims: str
    setting: str
    criteria: tuple[Criterion, ...]
    minutes: float
    measure: Measure
    tune: Measure | None = None
    large: Measure | None = None


_REGISTERED: dict[str, Experiment] = {}


def experiment(
    name: str,
    *,
    question: str,
    claims: str,
    criteria: Sequence[Criterion],
    minutes: float,
    tune: Measure | None = None,
    large: Measure | None = None,
) -> Callable[[Measure], Measure]:
    """Register the study of one seed; its docstring is the setting.

    Raises:
        ValueError: the name is taken.
    """

    def register(measure: Measure) -> Measure:
        if name in _REGISTERED:
            raise ValueError(f"two experiments are called {name!r}")
        setting = " ".join((measure.__doc__ or "").split())
        given = tuple(criteria)
        _REGISTERED[name] = Experiment(name, question, claims, setting, given, minutes, measure, tune, large)
        return measure

    return register


@cache
def experiments() -> Mapping[str, Experiment]:
    """All of them, by name."""
    package = importlib.import_module("massieu.papers.experiments")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"massieu.papers.experiments.{module.name}")
    return dict(sorted(_REGISTERED.items()))


def find(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        InputError: there is none.
    """
    known = experiments()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
        raise InputError(f"there is no experiment {name!r}{hint}")
    return known[name]


@dataclass
class Study:
    """What the seeds of an experiment gave.

    Attributes:
        runs: By seed, its numbers.
        seconds: By seed, how long it had a core; waiting for one does not count.
        quick: Sizes were small: no verdict.
        large: Sizes were large.
    """

    experiment: Experiment
    quick: bool = False
    runs: dict[int, Numbers] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    large: bool = False

    @property
    def judgements(self) -> list[Judgement]:
        """Of each criterion, in order."""
        seeds = sorted(self.runs)
        return [
            judge(c, [self.runs[seed].get(c.quantity, math.nan) for seed in seeds]) for c in self.experiment.criteria
        ]

    @property
    def verdict(self) -> Verdict:
        """What the numbers allow to say.

        Undecided where training did not come near enough to the exact risk, or where a control that lacks the property meets
        its threshold too. Refuted where a finding misses its threshold, confirmed where all meet it. Quick runs decide nothing.
        A study of descriptions alone is "described".
        """
        outcomes: dict[str, list[str]] = {"finding": [], "optimisation": [], "control": [], "description": []}
        for judgement in self.judgements:
            outcomes[judgement.criterion.role].append(judgement.outcome)
        if self.quick or len(self.runs) < FEWEST:
            return "undecided"
        if not outcomes["finding"]:
            return "described"
        if any(outcome != "met" for outcome in outcomes["optimisation"]):
            return "undecided: optimisation"
        if "missed" in outcomes["finding"]:
            return "refuted"
        if any(outcome != "missed" for outcome in outcomes["control"]):
            return "undecided: control"
        return "confirmed" if all(outcome == "met" for outcome in outcomes["finding"]) else "undecided"

    @property
    def stem(self) -> str:
        """Of its files' names; runs of other sizes leave each other alone."""
        return ".".join([self.experiment.name, *([LARGE] if self.large else []), *([QUICK] if self.quick else [])])

    def to_dict(self) -> dict[str, Any]:
        """Every number, as ``--out`` stores it."""
        asked = self.experiment
        return {
            "experiment": asked.name,
            "question": asked.question,
            "claims": asked.claims,
            "setting": asked.setting,
            "verdict": self.verdict,
            "quick": self.quick,
            "large": self.large,
            "criteria": [
                {
                    "quantity": j.criterion.quantity,
                    "title": j.criterion.title,
                    "role": j.criterion.role,
                    "threshold": j.criterion.threshold,
                    "mean": j.mean,
                    "low": j.low,
                    "high": j.high,
                    "outcome": j.outcome,
                }
                for j in self.judgements
            ],
            "seeds": {
                str(seed): {"seconds": self.seconds.get(seed, math.nan), "numbers": self.runs[seed]}
                for seed in sorted(self.runs)
            },
            "made": self.made,
        }
