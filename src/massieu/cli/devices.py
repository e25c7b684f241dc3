"""What `massieu devices` prints: which backend is taken, and how right, fast and large each is."""

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
"""Of a table that goes into a file or a pipe."""
ERRORS = {
    "output": "output",
    "log_partition": "log Z",
    "grad_query": "dquery",
    "grad_key": "dkey",
    "grad_value": "dvalue",
}


def show(found: "Survey") -> None:
    """Print three tables and why backends were refused to standard output."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    size = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in found.sizes.items())
    console.print(f"{found.device}: {found.name}, torch {found.torch}\n", markup=False)
    console.print(_choices(found.choices))
    for reason in _refusals(found.choices):
        console.print(reason, markup=False)
    own = [row for row in found.rows if row.own]
    console.print(
        _table("\nErrors of causal attention relative to float64, and share of log Z's gradient", _errors(found.rows))
    )
    console.print(
        _table(f"\nTimes of causal attention, and their ratio to PyTorch's fastest: {size}", _times(found.rows))
    )
    for name, reason in (found.unavailable or {}).items():
        console.print(f"{name} does not run here: {reason}", markup=False)
    for row in own:
        if row.excess:
            used = "" if row.taken else "; auto does not choose it"
            parts = ", ".join(row.excess)
            console.print(f"{row.name}, {row.dtype}: error above its bound in {parts}{used}", markup=False)
    if found.complete and found.ok:
        console.print("Every backend that auto chooses is within its error bounds.", markup=False)


def _table(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """The first row is the head, and its first two columns are words."""
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
    dtypes = list(dict.fromkeys(each.dtype for each in choices))
    taken = {
        (each.kind, each.dtype): each.training + (f", {each.inference}" if each.inference != each.training else "")
        for each in choices
    }
    kinds = list(dict.fromkeys(each.kind for each in choices))
    rows = [[kind, *(taken.get((kind, dtype), "–") for dtype in dtypes)] for kind in kinds]
    return _table(
        "Backend that auto chooses in training (and without gradients, if another)", [["problem", *dtypes], *rows]
    )


def _refusals(choices: "Iterable[Choice]") -> list[str]:
    """A line for each backend and reason; those for another device are left out."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in choices:
        for name, reason in each.refused.items():
            if not reason.startswith("it runs on"):
                lines.setdefault((name, reason), []).append(f"{each.kind} {each.dtype}")
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
        forward, both = time(row.forward_seconds, row.forward_ratio), time(row.both_seconds, row.both_ratio)
        return [row.dtype, row.name, *forward, *both, memory]

    return [["dtype", "backend", "forward", "", "and backward", "", "memory"], *map(cells, rows)]
