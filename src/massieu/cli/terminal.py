"""The output of commands: a result's summary, a model's description, the list of statistics, progress."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.cli.streams import say, show
from massieu.foundation.printable import visible

if TYPE_CHECKING:
    from massieu.probing.result.result import ProbeResult
    from massieu.probing.session.progress import ProbeProgress, TokenRate
    from massieu.storage.record import Statistic


def summarise(result: "ProbeResult", folder: Path) -> None:
    """Print what was read, the findings, the answers to the papers' questions, and the path of the page."""
    if result.trouble:
        say(result.trouble)
    model = result.run.model
    text = result.run.text
    unknown_tokens = ""
    if text.unknown_share is not None:
        unknown_tokens = f", {100 * text.unknown_share:.3g} % of them unknown to the tokenizer"
    show(f"{model.name}: {text.tokens:,} tokens in {text.windows:,} windows of {text.source}{unknown_tokens}")
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
        if finding.statistic is None:  # Its statistic was not measured.
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
    table = result.run.per_token
    if table is not None:
        show(f"\nper-token values: {table.rows:,} rows, {table.bytes / 1e6:,.1f} MB in {folder / 'tokens'}")
    show()
    for warning in result.run.warnings:
        say(f"warning: {warning}")
    show(f"page: {folder / 'report.html'}")


def summary_of(result: "ProbeResult", folder: Path) -> dict[str, Any]:
    """What `summarise` prints, as an object for JSON; every number of the probe is in the tables of the folder."""
    from massieu.report.encode import encodable

    text = result.run.text
    return {
        "model": result.run.model.name,
        "tokens": text.tokens,
        "windows": text.windows,
        "source": text.source,
        "complete": result.complete,
        "trouble": result.trouble,
        "findings": [encodable(asdict(finding)) for finding in result.findings if finding.statistic is not None],
        "questions": [
            {"question": card.question, "answers": [str(answer) for answer in card.answers]}
            for card in result.questions
        ],
        "warnings": list(result.run.warnings),
        "folder": str(folder),
    }


def list_statistics(statistics: "Iterable[Statistic]") -> None:
    """Print a line for each statistic: its name, group and question, which goes below in a narrow terminal."""
    from massieu.probing.statistics.registry import OPT_IN

    statistics = list(statistics)
    rows = [(statistic.name, statistic.group, statistic.question) for statistic in statistics]
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
    opt_in = sorted({statistic.group for statistic in statistics if statistic.group in OPT_IN})
    if opt_in:
        show(f"groups that are measured only where they are named: {', '.join(opt_in)}")


def show_statistic(statistic: "Statistic") -> None:
    """Print the whole description of a statistic."""
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


def show_description(description: dict[str, Any]) -> None:
    """Print the tables of a model's attention sites and residual steps."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=any(columns),
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*("–" if cell is None else escape(visible(str(cell))) for cell in row))
        console.print(table)

    print_table("Model", ("", ""), [(name.replace("_", " "), value) for name, value in description["model"].items()])
    console.print(visible(f"attention read by: {description['route']}\n"), markup=False)
    site_columns = ("layer", "name", "kind", "heads", "key_heads", "head_size", "route", "grade")
    sites = [[site[name] for name in site_columns] for site in description["sites"]]
    print_table("Attention sites", [name.replace("_", " ") for name in site_columns], sites)
    step_columns = ("layer", "name", "kind")
    print_table(
        "Residual steps", step_columns, [[step[name] for name in step_columns] for step in description["sublayers"]]
    )
    for reason in description["unavailable"]:
        console.print(visible(f"not available: {reason}"), markup=False)
    for warning in description.get("warnings", ()):
        say(f"warning: {warning}")


@contextmanager
def progress_shown() -> "Iterator[Callable[[ProbeProgress], None]]":
    """Show a progress bar with tokens per second, or one line for each stage if standard error is no terminal."""
    from massieu.foundation.watching import watched
    from massieu.probing.session.progress import TokenRate, shown_progress

    if watched() is None:
        yield _Stages(TokenRate())
        return
    with shown_progress() as tell:
        yield tell


class _Stages:
    """Prints one line when a stage begins."""

    def __init__(self, rate: "TokenRate") -> None:
        self._stage = ""
        self._rate = rate

    def __call__(self, state: "ProbeProgress") -> None:
        rate = self._rate.after(state.tokens)
        if state.stage != self._stage:
            self._stage = state.stage
            count = f" ({state.tokens:,} tokens{rate})" if state.tokens else ""
            say(f"{state.stage}{count}")
