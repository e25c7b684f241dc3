"""An experiment, what its seeds gave, and what that allows to say."""

import importlib
import json
import math
import pkgutil
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

import massieu
from massieu.errors import InputError
from massieu.experiments.criterion import FEWEST, Criterion, Judgement, judge
from massieu.foundation.threads import one_thread
from massieu.report.encode import plain
from massieu.report.writing import write_whole

Numbers = dict[str, float]
Measure = Callable[[int, bool], Numbers]
"""From a seed, and whether sizes are small, to numbers."""
Verdict = Literal["confirmed", "refuted", "undecided", "undecided: optimisation", "undecided: control"]
SEEDS = (5, 6, 7, 8, 9)
"""Of a verdict; settings were chosen on seeds 0 to 4."""
QUICK = "quick"
RESULTS = Path(__file__).parent / "results"
"""What was found last, at default size."""


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
    """

    name: str
    question: str
    claims: str
    setting: str
    criteria: tuple[Criterion, ...]
    minutes: float
    measure: Measure


_REGISTERED: dict[str, Experiment] = {}


def experiment(
    name: str, *, question: str, claims: str, criteria: Sequence[Criterion], minutes: float
) -> Callable[[Measure], Measure]:
    """Register the study of one seed; its docstring is the setting.

    Raises:
        ValueError: the name is taken.
    """

    def register(measure: Measure) -> Measure:
        if name in _REGISTERED:
            raise ValueError(f"two experiments are called {name!r}")
        setting = " ".join((measure.__doc__ or "").split())
        _REGISTERED[name] = Experiment(name, question, claims, setting, tuple(criteria), minutes, measure)
        return measure

    return register


@cache
def experiments() -> Mapping[str, Experiment]:
    """All of them, by name."""
    package = importlib.import_module("massieu.experiments")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"massieu.experiments.{module.name}")
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
        seconds: By seed, how long it took.
        quick: Sizes were small: no verdict.
    """

    experiment: Experiment
    quick: bool = False
    runs: dict[int, Numbers] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)

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
        """
        outcomes: dict[str, list[str]] = {"finding": [], "optimisation": [], "control": []}
        for judgement in self.judgements:
            outcomes[judgement.criterion.role].append(judgement.outcome)
        if self.quick or len(self.runs) < FEWEST:
            return "undecided"
        if any(outcome != "met" for outcome in outcomes["optimisation"]):
            return "undecided: optimisation"
        if "missed" in outcomes["finding"]:
            return "refuted"
        if any(outcome != "missed" for outcome in outcomes["control"]):
            return "undecided: control"
        return "confirmed" if all(outcome == "met" for outcome in outcomes["finding"]) else "undecided"

    @property
    def stem(self) -> str:
        """Of its files' names; a quick run leaves those of another alone."""
        return f"{self.experiment.name}.{QUICK}" if self.quick else self.experiment.name

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

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write NAME.json and NAME.html; each replaces an earlier one at once.

        Raises:
            InputError: they cannot be written there.
            MissingExtraError: jinja2 is not installed.
        """
        from massieu.experiments.page import page_of

        text = json.dumps(plain(self.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
        paths = folder / f"{self.stem}.json", folder / f"{self.stem}.html"
        write_whole(paths[0], text + "\n", "the experiment's numbers")
        write_whole(paths[1], page_of(self), "the experiment's page")
        return paths


def load(path: Path) -> Study:
    """A study from its JSON.

    Raises:
        InputError: there is none, or it is none.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        seeds = {int(seed): entry for seed, entry in stored["seeds"].items()}
        numbers = {
            seed: {name: math.nan if value is None else float(value) for name, value in entry["numbers"].items()}
            for seed, entry in seeds.items()
        }
        seconds = {seed: float(entry["seconds"] or 0.0) for seed, entry in seeds.items()}
        return Study(find(stored["experiment"]), bool(stored["quick"]), numbers, seconds, dict(stored["made"]))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no experiment: {type(error).__name__}: {error}") from error


def run(
    name: str,
    *,
    seeds: Sequence[int] = SEEDS,
    quick: bool = False,
    out: Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int, int, float], None] | None = None,
) -> tuple[Study, bool]:
    """Run an experiment seed by seed; after each one everything is stored.

    Args:
        seeds: What is drawn belongs to them; the verdict needs `FEWEST`.
        quick: Small sizes and the first seed alone, to see it work.
        out: A folder for NAME.json and NAME.html; None keeps nothing.
        resume: Go on from the seeds that are stored there.
        progress: Called after each seed with it, how many are done, how many there are, and its seconds.

    Returns:
        The study, and whether it came to its end: Ctrl-C keeps the seeds that were done.

    Raises:
        InputError: there is no such experiment; what is stored is not of it; the folder cannot be written to.

    Example:
        >>> from massieu.experiments.study import run
        >>> study, complete = run("temperature", quick=True)
        >>> study.verdict, complete  # quick runs decide nothing
        ('undecided', True)
    """
    asked = find(name)
    study = Study(asked, quick)
    stored = None if out is None else out / f"{study.stem}.json"
    if resume and stored is not None and stored.exists():
        study = load(stored)
        if (study.experiment, study.quick) != (asked, quick):
            raise InputError(f"{stored} is of another experiment; begin without resume")
    wanted = list(seeds)[:1] if quick else list(seeds)
    study.made = _made()
    if out is not None:
        study.save(out)  # what is in the way of writing is found before anything is lost
    for place, seed in enumerate(wanted):
        if seed not in study.runs:
            started = time.perf_counter()
            try:
                with one_thread():
                    numbers = asked.measure(seed, quick)
            except KeyboardInterrupt:
                return study, False
            study.runs[seed], study.seconds[seed] = numbers, time.perf_counter() - started
            if out is not None:
                study.save(out)
        if progress is not None:
            progress(seed, place + 1, len(wanted), study.seconds[seed])
    return study, True


def _made() -> dict[str, str]:
    return {
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
