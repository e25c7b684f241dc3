"""What the commands print: a result's summary, a model's description, the list of statistics, progress."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.cli.streams import say, show
from massieu.foundation.printable import visible

if TYPE_CHECKING:
    from massieu.probing.result.result import ProbeResult
    from massieu.probing.run import ProbeProgress
    from massieu.storage.record import Statistic


def summarise(result: "ProbeResult", folder: Path) -> None:
    if result.trouble:
        say(result.trouble)
    model, text = result.run.model, result.run.text
    unknown = text.unknown_share
    strange = "" if unknown is None else f", {100 * unknown:.3g} % of them unknown to the tokenizer"
    show(f"{model.name}: {text.tokens:,} tokens in {text.windows:,} windows of {text.source}{strange}")
    for note in (
        text.dropped,
        text.window,
        text.bos,
        model.dtype_sentence,
        model.missing_weights,
        model.unexpected_weights,
    ):
        if note not in (None, "none"):
            show(f"note: {note}")
    if any(site.route != "interface" or site.grade != "full" for site in result.run.sites):
        show(f"note: attention was read by {result.run.capture.route}")
    for finding in result.findings:
        if finding.statistic is None:  # what it needs was not asked for
            continue
        show()
        show(bold=finding.title)
        show(f"  {finding.sentence}")
    for card in result.questions:
        show()
        show(bold=card.question)
        for answer in card.answers:
            show(f"  {answer}")
    from massieu.report.replacements import replacement_table

    replaced = replacement_table(result.run.replacements, shown=12)
    if replaced is not None:
        show()
        show(f" (change, {replaced.unit}; {replaced.windows})", bold="With another attention")
        for row in replaced.rows:
            show(f"  {row}")
    if (rows := result.run.per_token) is not None:
        show(f"\nper-token values: {rows.rows:,} rows, {rows.bytes / 1e6:,.1f} MB in {folder / 'tokens'}")
    show()
    for warning in result.run.warnings:
        say(f"warning: {warning}")
    show(f"page: {folder / 'report.html'}")


def list_statistics(statistics: "Iterable[Statistic]") -> None:
    """A line for each: its name, group and meaning; in a narrow terminal the meaning goes below."""
    rows = [(each.name, each.group, each.question) for each in statistics]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    longest = sum(widths) + max(len(question) for *_, question in rows) + 4
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else longest
    for name, group, question in rows:
        start = f"  {group.ljust(widths[1])}"
        if longest <= room:
            show(f"{start}  {question}", bold=name.ljust(widths[0]))
        else:
            show(start, bold=name.ljust(widths[0]))
            show(textwrap.fill(question, room - 4, initial_indent="    ", subsequent_indent="    "))
    show(f"\n{len(rows)} statistics; 'massieu statistics NAME' explains one, or all of a group")


def show_statistic(statistic: "Statistic") -> None:
    """All that is known of one."""
    facts = [statistic.group, f"per {statistic.scope}", statistic.unit]
    if statistic.gauge_dependent:
        facts.append("depends on the key origin")
    show(f"  {statistic.title} ({', '.join(filter(None, facts))})", bold=statistic.name)
    for line in filter(None, (statistic.formula, statistic.question, statistic.caveat)):
        show(f"  {line}")
    claim = f"claim {statistic.claim}" if statistic.claim else ""
    control = f"control: {statistic.control or 'none'}"
    show(f"  {'; '.join(filter(None, (claim, statistic.paper, control)))}")
    show(f"  cost: {statistic.cost}\n")


def show_description(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        drawn = Table(
            title=title, title_justify="left", title_style="bold", show_header=any(columns),
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for name in columns:
            drawn.add_column(name, overflow="fold")
        for row in rows:
            drawn.add_row(*("–" if cell is None else escape(visible(str(cell))) for cell in row))
        console.print(drawn)

    table("Model", ("", ""), [(name.replace("_", " "), value) for name, value in found["model"].items()])
    console.print(visible(f"attention read by: {found['route']}\n"), markup=False)
    columns = ("layer", "name", "kind", "heads", "key_heads", "head_size", "route", "grade")
    rows = [[site[name] for name in columns] for site in found["sites"]]
    table("Attention sites", [name.replace("_", " ") for name in columns], rows)
    table("Residual steps", ("layer", "name", "kind"), [(s["layer"], s["name"], s["kind"]) for s in found["sublayers"]])
    for reason in found["unavailable"]:
        console.print(visible(f"not available: {reason}"), markup=False)
    for warning in found.get("warnings", ()):
        say(f"warning: {warning}")


@contextmanager
def progress_shown() -> "Iterator[Callable[[ProbeProgress], None]]":
    """A progress bar with tokens per second; where standard error is no terminal, one line for each stage."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    rate = _Rate()
    if not console.is_terminal:
        yield _Stages(rate)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, count="")

        def show(state: "ProbeProgress") -> None:
            count = f"{state.tokens:,} tokens{rate.after(state.tokens)}" if state.tokens else ""
            stage = escape(visible(state.stage))
            bar.update(task, description=stage, total=state.total_tokens, completed=state.tokens, count=count)

        yield show


class _Stages:
    def __init__(self, rate: "_Rate") -> None:
        self._stage, self._rate = "", rate

    def __call__(self, state: "ProbeProgress") -> None:
        counted = self._rate.after(state.tokens)
        if state.stage != self._stage:
            self._stage = state.stage
            say(f"{state.stage}{f' ({state.tokens:,} tokens{counted})' if state.tokens else ''}")


class _Rate:
    """Tokens per second since the first batch, whose time goes into looking at the model."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after(self, tokens: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (tokens, now) if tokens else None
            return ""
        new, seconds = tokens - self._first[0], now - self._first[1]
        return f", {new / seconds:,.0f} per second" if new and seconds else ""
