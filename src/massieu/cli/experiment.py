"""What `massieu experiment` prints."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from massieu.experiments.run import RESULTS, load
from massieu.experiments.study import Study, experiments

_WIDTH = 120
_OUTCOMES = {"met": "met", "missed": "not met", "open": "open", "described": "–"}


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def show_all() -> None:
    """Each experiment's question, cost, and what was found last."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("experiment", "what it asks", "claims", "minutes", "found last"):
        table.add_column(name, overflow="fold")
    for name, asked in experiments().items():
        stored = RESULTS / f"{name}.json"
        last = load(stored) if stored.exists() else None
        found = "–" if last is None else f"{last.verdict} ({last.made.get('date', 'no date')})"
        table.add_row(Text(name, "bold"), asked.question, asked.claims, f"{asked.minutes:g}", found)
    _console().print(table)


def show(study: Study) -> None:
    """Verdict, and a line for each threshold."""
    console = _console()
    console.print(Text(study.experiment.question, "bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("what", "role", "mean", "95 % interval", "threshold", "outcome"):
        table.add_column(name, overflow="fold")
    for found in study.judgements:
        criterion, outcome = found.criterion, _OUTCOMES[found.outcome]
        table.add_row(criterion.title, criterion.role, *found.told, criterion.threshold, outcome)
    console.print(table)
    reason = " (a quick run decides nothing)" if study.quick else ""
    console.print(f"verdict: {study.verdict}{reason}, from {len(study.runs)} seeds", markup=False)


def say_seed(seed: int, done: int, total: int, seconds: float) -> None:
    """One line on standard error for a seed that is done."""
    print(f"massieu: seed {seed} ({done} of {total}, {seconds:.0f} s)", file=sys.stderr)
