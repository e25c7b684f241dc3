"""The claims in a terminal: a table of all, or one claim in full."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from massieu.report.numbers import bound, number
from massieu.verification.claim import Check, Claim, Verdict
from massieu.verification.run import Verification

WIDTH = 120
"""Of a table that goes into a file or a pipe."""


def show(result: Verification, *, in_full: bool) -> None:
    """Print the claims to standard output: in full, or one row each."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if in_full:
        for claim in result:
            console.print(_in_full(claim))
    else:
        console.print(_overview(result))
    if len(result) != 1 or not in_full:
        console.print(result.summary, markup=False)


def say_progress(claim: Claim, done: int, total: int) -> None:
    """One line on standard error for a claim that is done, where there are several."""
    if total > 1:
        print(f"massieu: {claim.id} {claim.verdict} ({done} of {total}, {claim.seconds:.1f} s)", file=sys.stderr)


def _overview(claims: Iterable[Claim]) -> Table:
    table = _table("claim", "statement", "status", "measured", "bound", "verdict", "uncorrected")
    for claim in claims:
        published = claim.published_verdict
        table.add_row(
            Text(claim.id, "bold"),
            Text(claim.statement),
            claim.status,
            *_measured(claim.worst),
            _verdict(claim.verdict),
            published or "",
        )
    return table


def _in_full(claim: Claim) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("what is true" if claim.published else "statement", Text(claim.statement))
    if claim.published is not None:
        facts.add_row(claim.published_heading, Text(claim.published))
    if claim.corrected is not None:
        facts.add_row("corrected", Text(claim.corrected))
    facts.add_row("source", Text(f"{claim.source} ({claim.status})"))
    if claim.parameters:
        facts.add_row("parameters", Text(", ".join(f"{name}={value}" for name, value in claim.parameters.items())))
    facts.add_row("seconds", number(claim.seconds))

    table = _table("check", "numbers", "measured", "bound", "verdict")
    for form in ("corrected", "published"):
        rows = [check for check in claim.checks if check.form == form]
        if rows and form == "published":
            table.add_section()
            table.add_row(Text(f"{claim.published_name}:", "dim"))
        for check in rows:
            verdict = _verdict("holds" if check.holds else "fails", expected=form == "corrected")
            table.add_row(Text(check.name), Text(check.detail), *_measured(check), verdict)
    heading = Text.assemble((claim.id, "bold"), "  ", _verdict(claim.verdict))
    if claim.published_verdict is not None:
        heading.append(f"; {claim.published_name} {claim.published_verdict}")
        heading.append(", as it should" if claim.published_verdict == "fails" else " too, with these settings")
    return Group(heading, Padding(facts, (1, 2, 0, 2)), Padding(table, (0, 1)))


def _table(*columns: str) -> Table:
    """Words wrap in the first columns, numbers and verdicts never."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        wraps = name in ("statement", "check", "numbers")
        table.add_column(name, no_wrap=not wraps, justify="right" if name == "measured" else "left")
    return table


def _measured(check: Check) -> Sequence[str]:
    return number(check.measured), f"{check.comparison} {bound(check.bound)}"


def _verdict(verdict: Verdict, expected: bool = True) -> Text:
    """A form that is meant to fail is not alarming when it does."""
    return Text(verdict, "" if not expected else "green" if verdict == "holds" else "bold red")
