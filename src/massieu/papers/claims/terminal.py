"""What `massieu verify` prints: one line for each claim, or a claim in full."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from massieu.foundation.numbers import bound, number
from massieu.papers.claims.claim import Check, Claim, Verdict
from massieu.papers.claims.registry import find
from massieu.papers.claims.run import Verification

WIDTH = 100
"""Of a table that goes into a file or a pipe."""

_OUTCOMES = {
    "none": "",
    "fails": "wrong as printed",
    "holds": "holds here too",
    "ambiguous": "ambiguous",
    "assumption": "an assumption",
    "could not be checked": "",
}


def show(result: Verification, *, in_full: bool, every_row: bool = False) -> None:
    """Print the claims to standard output: one line each, or in full, then with every row or the worst of each kind."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if in_full:
        for claim in result:
            console.print(_in_full(claim, every_row))
    else:
        console.print(_overview(result))
    if len(result) != 1 or not in_full:
        console.print(f"\n{result.summary}", markup=False, soft_wrap=True)


def say_progress(claim: Claim, done: int, total: int) -> None:
    """One line on standard error for a claim that is done, where there are several."""
    if total > 1:
        print(f"massieu: {claim.id} {claim.verdict} ({done} of {total}, {claim.seconds:.1f} s)", file=sys.stderr)


def _overview(claims: Iterable[Claim]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("claim", "topic", "verdict", "published form"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for claim in claims:
        outcome = _OUTCOMES[claim.published_verdict]
        table.add_row(Text(claim.id, "bold"), Text(claim.title), _verdict(claim.verdict), outcome)
    return table


def _in_full(claim: Claim, every_row: bool) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("what is true" if claim.published else "statement", Text(claim.statement))
    if claim.published is not None:
        facts.add_row(claim.published_heading, Text(claim.published))
    if claim.corrected is not None:
        facts.add_row(
            "corrected" if claim.published_verdict in ("fails", "holds") else "precisely", Text(claim.corrected)
        )
    facts.add_row("source", Text(f"{claim.source} ({claim.status})"))
    if claim.parameters:
        facts.add_row("parameters", Text(", ".join(f"{name}={value}" for name, value in claim.parameters.items())))
    facts.add_row("code", Text(_place(claim), overflow="fold"))
    facts.add_row("seconds", number(claim.seconds))
    heading = Text.assemble((claim.id, "bold"), f"  {claim.title}  ", _verdict(claim.verdict))
    if claim.reason is not None:
        facts.add_row("not checked", Text(claim.reason))
        return Group(heading, Padding(facts, (1, 2, 1, 2)))

    table = _table("check", "numbers", "measured", "bound", "verdict") if every_row else _worst_rows()
    for form in ("corrected", "published"):
        rows = [check for check in claim.checks if check.form == form]
        if rows and form == "published":
            table.add_section()
            table.add_row(Text(f"{claim.published_name}:", "dim"))
        if every_row:
            _add_every(table, rows)
        else:
            _add_worst(table, rows)
    if claim.outcome:
        heading.append(f"; {claim.outcome}")
    parts = [heading, Padding(facts, (1, 2, 0, 2)), Padding(table, (0, 1))]
    if not every_row and len(table.rows) < len(claim.checks):
        parts.append(
            Text(f"   {len(claim.checks)} checks; 'massieu verify {claim.id} --all' shows all of them\n", "dim")
        )
    return Group(*parts)


def _place(claim: Claim) -> str:
    """FILE:LINE of the claim's function, as editors open it: from here, where the file lies below this folder."""
    path, line = find(claim.id).code
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def _add_every(table: Table, checks: Iterable[Check]) -> None:
    for check in checks:
        verdict = _verdict("holds" if check.holds else "fails", expected=check.form == "corrected")
        table.add_row(Text(check.name), Text(check.detail), *_measured(check), verdict)


def _add_worst(table: Table, checks: Iterable[Check]) -> None:
    """One row for the checks that compare the same thing: how many, and the one nearest to its bound, or beyond it."""
    kinds: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        kinds.setdefault((check.kind, check.comparison), []).append(check)
    for alike in kinds.values():
        worst = max(alike, key=lambda check: check.strain)
        if worst.form == "published":
            # These are meant to fail: the one that comes nearest to holding is the one to look at.
            worst = min(alike, key=lambda check: check.strain)
        verdict = _verdict("holds" if worst.holds else "fails", expected=worst.form == "corrected")
        table.add_row(Text(worst.name), str(len(alike)), *_measured(worst), verdict)


def _worst_rows() -> Table:
    return _table("check (the worst of its kind)", "of", "measured", "bound", "verdict")


def _table(*columns: str) -> Table:
    """Words wrap in the first columns, numbers and verdicts never."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        wraps = name.startswith("check") or name == "numbers"
        table.add_column(name, no_wrap=not wraps, justify="right" if name in ("measured", "of") else "left")
    return table


def _measured(check: Check) -> Sequence[str]:
    return number(check.measured), f"{check.comparison} {bound(check.bound)}"


def _verdict(verdict: Verdict, expected: bool = True) -> Text:
    """A form that is meant to fail is not alarming when it does."""
    return Text(verdict, "" if not expected else "green" if verdict == "holds" else "bold red")
