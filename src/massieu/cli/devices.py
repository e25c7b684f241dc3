"""The output of `massieu devices`: the backend that is chosen, and errors, times and memory of each."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from massieu.ops.survey import Choice, Measured, Survey

WIDTH = 80
"""Width of a table that goes into a file or a pipe."""
ERRORS = {
    "output": "output",
    "log_partition": "log Z",
    "grad_query": "dquery",
    "grad_key": "dkey",
    "grad_value": "dvalue",
}


def show_survey(survey: "Survey") -> None:
    """Print three tables to standard output, and the reasons why backends were refused."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    size = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in survey.sizes.items())
    console.print(f"{survey.device}: {survey.name}, torch {survey.torch}\n", markup=False)
    console.print(_choices(survey.choices))
    for reason in _refusals(survey.choices):
        console.print(reason, markup=False)
    errors_title = "\nErrors of causal attention relative to float64, and share of log Z's gradient"
    console.print(_table(errors_title, _errors(survey.rows)))
    times_title = f"\nTimes of causal attention, and their ratio to PyTorch's fastest: {size}"
    console.print(_table(times_title, _times(survey.rows)))
    for name, reason in (survey.unavailable or {}).items():
        console.print(f"{name} does not run here: {reason}", markup=False)
    for row in survey.rows:
        if row.own and row.excess:
            remark = "" if row.taken else "; auto does not choose it"
            parts = ", ".join(row.excess)
            console.print(f"{row.name}, {row.dtype}: error above its bound in {parts}{remark}", markup=False)
    if survey.complete and survey.ok:
        console.print("Every backend that auto chooses is within its error bounds.", markup=False)


def _table(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first row is its header, and whose first two columns are words."""
    head, *body = rows
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < 2 else "right")
    for row in body:
        table.add_row(*map(Text, row))
    return table


def _choices(choices: "Sequence[Choice]") -> Table:
    dtypes = list(dict.fromkeys(choice.dtype for choice in choices))
    kinds = list(dict.fromkeys(choice.kind for choice in choices))
    backends = {}
    for choice in choices:
        names = [choice.training] if choice.inference == choice.training else [choice.training, choice.inference]
        backends[choice.kind, choice.dtype] = ", ".join(names)
    rows = [[kind, *(backends.get((kind, dtype), "–") for dtype in dtypes)] for kind in kinds]
    return _table(
        "Backend that auto chooses in training (and without gradients, if another)", [["problem", *dtypes], *rows]
    )


def _refusals(choices: "Iterable[Choice]") -> list[str]:
    """A line for each backend and reason; those for another device are left out."""
    lines: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        for name, reason in choice.refused.items():
            if not reason.startswith("it runs on"):
                lines.setdefault((name, reason), []).append(f"{choice.kind} {choice.dtype}")
    return [f"auto does not choose {name}: {reason} ({_few(problems)})" for (name, reason), problems in lines.items()]


def _few(problems: Sequence[str]) -> str:
    return ", ".join(problems) if len(problems) < 4 else f"{problems[0]} and {len(problems) - 1} others"


def _errors(rows: "Iterable[Measured]") -> list[list[str]]:
    def cells(row: "Measured") -> list[str]:
        shown = (
            f"{row.errors[part]:.1e}" + "!" * (part in row.excess) if part in row.errors else "–" for part in ERRORS
        )
        return [row.dtype, row.name, *shown, "–" if row.share is None else f"{row.share:.4f}"]

    return [["dtype", "backend", *ERRORS.values(), "share"], *map(cells, rows)]


def _times(rows: "Iterable[Measured]") -> list[list[str]]:
    def time(seconds: float | None, ratio: float | None) -> tuple[str, str]:
        return ("–", "–") if seconds is None or ratio is None else (f"{seconds * 1e3:.3g} ms", f"{ratio:.2f}×")

    def cells(row: "Measured") -> list[str]:
        memory = "not measured" if row.mebibytes is None else f"{row.mebibytes:.0f} MiB"
        forward = time(row.forward_seconds, row.forward_ratio)
        both = time(row.both_seconds, row.both_ratio)
        return [row.dtype, row.name, *forward, *both, memory]

    return [["dtype", "backend", "forward", "", "and backward", "", "memory"], *map(cells, rows)]
