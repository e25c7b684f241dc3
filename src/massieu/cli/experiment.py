"""The output of `massieu experiment`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from massieu.cli.streams import say
from massieu.foundation.numbers import counted
from massieu.foundation.printable import visible
from massieu.papers.experiments.prompts import PromptReading
from massieu.papers.experiments.run import RESULTS, load
from massieu.papers.experiments.study import Experiment, Study, experiments

_WIDTH = 120
_OUTCOMES = {"met": "met", "missed": "not met", "open": "open", "described": "–"}


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def show_all() -> None:
    """Print each experiment's question, cost and last verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("experiment", no_wrap=True)
    table.add_column("question (claims)", overflow="fold")
    table.add_column("minutes", justify="right")
    table.add_column("last verdict", max_width=12)
    for name, entry in experiments().items():
        last = _stored(name)
        verdict = "–" if last is None else f"{last.verdict} ({last.made.get('date', 'no date')})"
        table.add_row(Text(name, "bold"), f"{entry.question} ({entry.claims})", f"{entry.minutes:g}", verdict)
    _console().print(table)


def entries() -> list[dict[str, Any]]:
    """Each experiment's question, cost and last verdict, as a list for JSON."""
    return [_entry(name, experiment) for name, experiment in experiments().items()]


def _entry(name: str, experiment: Experiment) -> dict[str, Any]:
    last = _stored(name)
    return {
        "experiment": name,
        "question": experiment.question,
        "claims": experiment.claims,
        "minutes": experiment.minutes,
        "verdict": None if last is None else last.verdict,
        "date": None if last is None else last.made.get("date"),
    }


def _stored(name: str) -> Study | None:
    """The latest result at default size; None if there is none."""
    path = RESULTS / f"{name}.json"
    return load(path) if path.exists() else None


def show(study: Study) -> None:
    """Print a line for each threshold, and the verdict."""
    console = _console()
    console.print(Text(study.experiment.question, "bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    rule = study.experiment.rule
    for name in ("measurement", "role", "mean", rule.interval, "threshold", "outcome"):
        table.add_column(name, overflow="fold")
    for judgement in study.judgements:
        criterion = judgement.criterion
        outcome = _OUTCOMES[judgement.outcome]
        table.add_row(criterion.title, criterion.role, *judgement.mean_and_interval, criterion.threshold, outcome)
    console.print(table)
    for line in (rule.sentence, *study.lines):
        console.print(line, markup=False)
    reason = " (a quick run gives no verdict)" if study.quick else ""
    console.print(f"verdict: {study.verdict}{reason}, from {counted(len(study.runs), 'seed')}", markup=False)


def say_plan(lines: Sequence[str]) -> None:
    """Print to standard error what is known of an experiment before its first seed."""
    for line in lines:
        say(line)


def say_seed(seed: int, done: int, total: int, seconds: float) -> None:
    """Print one line to standard error for a seed that is done."""
    say(f"seed {seed} ({done} of {total}, {seconds:.0f} s)")


def show_tuning(losses: Mapping[str, float]) -> None:
    """Print a line for each setting."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("setting", "loss"):
        table.add_column(name, overflow="fold")
    for name, loss in losses.items():
        table.add_row(name, f"{loss:.4f}")
    _console().print(table)


def say_prompt(done: int, total: int) -> None:
    """Print one line to standard error after each tenth prompt and after the last."""
    if done % 10 == 0 or done == total:
        say(f"prompts {done} of {total}")


def show_readings(readings: Sequence[PromptReading], model: str) -> None:
    """Print how far a language model is from the exact law, by task and number of examples."""
    console = _console()
    console.print(
        Text(visible(f"{model}: its next-word law against the exact law, over the words that may follow"), "bold")
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("task", "examples", "KL(exact ‖ model)", "KL(exact ‖ uniform)", "|Δ entropy|", "share of other words"):
        table.add_column(name, overflow="fold")
    for row in readings:
        bits = (f"{value:.3f}" for value in (row.divergence, row.of_uniform, row.entropy_error))
        table.add_row(row.task, str(row.seen), *bits, f"{1 - row.mass:.0%}")
    console.print(table)
    console.print(
        "bits, means over prompts; a KL below the uniform law's means that the model uses the examples", markup=False
    )
