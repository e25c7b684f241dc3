"""An experiment, the numbers of its seeds, and its verdict."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Protocol

from massieu.errors import InputError
from massieu.papers.experiments.criterion import FEWEST, INTERVALS, Criterion, Judgement, judge

Numbers = dict[str, float]
Measure = Callable[[int, bool], Numbers]
"""From a seed, and whether sizes are small, to the numbers of that seed."""
Verdict = Literal["confirmed", "refuted", "undecided", "undecided: optimisation", "undecided: control", "described"]
QUICK = "quick"
LARGE = "large"


class JudgingRule(Protocol):
    """How the numbers of the seeds are judged.

    Attributes:
        interval: The heading above the intervals.
        sentence: What an interval is, wherever intervals are shown.
    """

    @property
    def interval(self) -> str: ...

    @property
    def sentence(self) -> str: ...

    def judgements(self, criteria: Sequence[Criterion], runs: Sequence[Numbers]) -> list[Judgement]:
        """The judgement of each criterion, in order."""
        ...

    def verdict(self, judgements: Sequence[Judgement], runs: Sequence[Numbers]) -> Verdict:
        """The verdict of a study with enough seeds."""
        ...

    def lines(self, runs: Sequence[Numbers]) -> list[str]:
        """What else is said beside the verdict."""
        ...


@dataclass(frozen=True)
class BootstrapRule:
    """Each criterion by a bootstrap interval of its own; see `JudgingRule` for the attributes.

    Undecided where training did not come near enough to the exact risk, or where a control that lacks the property meets
    its threshold too. Refuted where a finding misses its threshold, confirmed where all meet it. A study of descriptions alone
    is "described".
    """

    interval: str = "bootstrap interval"
    sentence: str = INTERVALS

    def judgements(self, criteria: Sequence[Criterion], runs: Sequence[Numbers]) -> list[Judgement]:
        """The judgement of each criterion, in order."""
        return [
            judge(criterion, [numbers.get(criterion.quantity, math.nan) for numbers in runs]) for criterion in criteria
        ]

    def verdict(self, judgements: Sequence[Judgement], runs: Sequence[Numbers]) -> Verdict:
        """The verdict that the outcomes support."""
        outcomes: dict[str, list[str]] = {"finding": [], "optimisation": [], "control": [], "description": []}
        for judgement in judgements:
            outcomes[judgement.criterion.role].append(judgement.outcome)
        if not outcomes["finding"]:
            return "described"
        if any(outcome != "met" for outcome in outcomes["optimisation"]):
            return "undecided: optimisation"
        if "missed" in outcomes["finding"]:
            return "refuted"
        if any(outcome != "missed" for outcome in outcomes["control"]):
            return "undecided: control"
        if any(outcome != "met" for outcome in outcomes["finding"]):
            return "undecided"
        return "confirmed"

    def lines(self, runs: Sequence[Numbers]) -> list[str]:
        """Nothing else."""
        return []


@dataclass(frozen=True)
class Experiment:
    """A question about small models, in a setting where the right answer is known.

    Attributes:
        name: Its name on the command line.
        question: The question, one sentence.
        claims: Numbers of claims in docs/theory, such as "E23, X1".
        setting: Which models are trained on which data, in a few sentences.
        criteria: The thresholds; they are written here before a run.
        minutes: Approximate time on one core for the default seeds.
        measure: Trains and measures for one seed.
        tune: Losses for each candidate setting, on a seed that no verdict uses; the settings were chosen by them.
        large: As `measure`, at the size of the literature: for GPUs, or many processes.
        rule: How the seeds are judged.
        registration: Where the plan was fixed before the first result: the commit, and the digest of its text.
        plan: Sentences to say before the first seed.
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
    rule: JudgingRule = BootstrapRule()
    registration: Mapping[str, str] = field(default_factory=dict)
    plan: Callable[[], Sequence[str]] | None = None


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
    rule: JudgingRule | None = None,
    registration: Mapping[str, str] | None = None,
    plan: Callable[[], Sequence[str]] | None = None,
) -> Callable[[Measure], Measure]:
    """Register a function that measures one seed; its docstring is the experiment's setting.

    Raises:
        ValueError: the name is taken.
    """

    def register(measure: Measure) -> Measure:
        if name in _REGISTERED:
            raise ValueError(f"two experiments are called {name!r}")
        setting = " ".join((measure.__doc__ or "").split())
        _REGISTERED[name] = Experiment(
            name=name,
            question=question,
            claims=claims,
            setting=setting,
            criteria=tuple(criteria),
            minutes=minutes,
            measure=measure,
            tune=tune,
            large=large,
            rule=rule or BootstrapRule(),
            registration=registration or {},
            plan=plan,
        )
        return measure

    return register


@cache
def experiments() -> Mapping[str, Experiment]:
    """Every experiment, by name."""
    package = importlib.import_module("massieu.papers.experiments")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"massieu.papers.experiments.{module.name}")
    return dict(sorted(_REGISTERED.items()))


def find(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        InputError: there is none.
    """
    by_name = experiments()
    if name not in by_name:
        similar_names = get_close_matches(name, by_name, 1)
        hint = f"; did you mean {similar_names[0]}?" if similar_names else f"; there are {', '.join(by_name)}"
        raise InputError(f"there is no experiment {name!r}{hint}")
    return by_name[name]


@dataclass
class Study:
    """The results of an experiment, seed by seed.

    Attributes:
        experiment: The experiment.
        quick: Whether sizes are small; then there is no verdict.
        runs: The numbers of each seed.
        seconds: The processor time of each seed; waiting for a core does not count.
        made: Versions, the kind of machine, and the date.
        large: Whether sizes are those of the literature.
    """

    experiment: Experiment
    quick: bool = False
    runs: dict[int, Numbers] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    large: bool = False

    @property
    def judgements(self) -> list[Judgement]:
        """The judgement of each criterion, in order."""
        return self.experiment.rule.judgements(self.experiment.criteria, self._runs)

    @property
    def verdict(self) -> Verdict:
        """The verdict that the numbers support; quick runs decide nothing, and neither do few seeds."""
        if self.quick or len(self.runs) < FEWEST:
            return "undecided"
        return self.experiment.rule.verdict(self.judgements, self._runs)

    @property
    def lines(self) -> list[str]:
        """What the rule says beside the verdict; nothing of quick runs."""
        return [] if self.quick else self.experiment.rule.lines(self._runs)

    @property
    def _runs(self) -> list[Numbers]:
        return [self.runs[seed] for seed in sorted(self.runs)]

    @property
    def stem(self) -> str:
        """The names of its files, without ending; runs of different sizes have different names."""
        parts = [self.experiment.name]
        if self.large:
            parts.append(LARGE)
        if self.quick:
            parts.append(QUICK)
        return ".".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as ``--out`` stores it."""
        return {
            "experiment": self.experiment.name,
            "question": self.experiment.question,
            "claims": self.experiment.claims,
            "setting": self.experiment.setting,
            "verdict": self.verdict,
            "quick": self.quick,
            "large": self.large,
            "criteria": [_judgement_entry(judgement) for judgement in self.judgements],
            "seeds": {
                str(seed): {"seconds": self.seconds.get(seed, math.nan), "numbers": self.runs[seed]}
                for seed in sorted(self.runs)
            },
            "made": self.made,
        }


def _judgement_entry(judgement: Judgement) -> dict[str, Any]:
    """A criterion and its judgement, as they are stored."""
    return {
        "quantity": judgement.criterion.quantity,
        "title": judgement.criterion.title,
        "role": judgement.criterion.role,
        "threshold": judgement.criterion.threshold,
        "mean": judgement.mean,
        "low": judgement.low,
        "high": judgement.high,
        "outcome": judgement.outcome,
    }
