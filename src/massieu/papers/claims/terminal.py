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
    """Print the claims to standard output.

    Args:
        in_full: Print each claim in full; otherwise a line for each.
        every_row: In full, every check; otherwise the worst check of each kind.
    """
    width = WIDTH
    if sys.stdout.isatty():
        width = None  # the terminal's own
    console = Console(width=width, highlight=False)
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
    """A table with a row for each claim."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("claim", "topic", "verdict", "published form"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for claim in claims:
        outcome = _OUTCOMES[claim.published_verdict]
        table.add_row(Text(claim.id, "bold"), Text(claim.title), _coloured(claim.verdict), outcome)
    return table


def _in_full(claim: Claim, every_row: bool) -> RenderableType:
    """Heading, facts and checks of a claim."""
    heading = Text.assemble((claim.id, "bold"), f"  {claim.title}  ", _coloured(claim.verdict))
    if claim.reason is not None:
        return Group(heading, Padding(_facts(claim), (1, 2, 1, 2)))
    if claim.outcome:
        heading.append(f"; {claim.outcome}")
    if every_row:
        table = _table_of_all_checks(claim)
    else:
        table = _table_of_worst_checks(claim)
    parts = [heading, Padding(_facts(claim), (1, 2, 0, 2)), Padding(table, (0, 1))]
    if not every_row and len(table.rows) < len(claim.checks):
        hint = f"   {len(claim.checks)} checks; 'massieu verify {claim.id} --all' shows all of them\n"
        parts.append(Text(hint, "dim"))
    return Group(*parts)


def _facts(claim: Claim) -> Table:
    """What the claim states, where it comes from, and how it was checked: a name and a text in each row."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    if claim.published is None:
        facts.add_row("statement", Text(claim.statement))
    else:
        facts.add_row("what is true", Text(claim.statement))
        facts.add_row(claim.published_heading, Text(claim.published))
    if claim.corrected is not None:
        label = "precisely"
        if claim.published_verdict in ("fails", "holds"):
            label = "corrected"
        facts.add_row(label, Text(claim.corrected))
    facts.add_row("source", Text(f"{claim.source} ({claim.status})"))
    if claim.parameters:
        parameters = ", ".join(f"{name}={value}" for name, value in claim.parameters.items())
        facts.add_row("parameters", Text(parameters))
    facts.add_row("code", Text(_place(claim), overflow="fold"))
    facts.add_row("seconds", number(claim.seconds))
    if claim.reason is not None:
        facts.add_row("not checked", Text(claim.reason))
    return facts


def _place(claim: Claim) -> str:
    """FILE:LINE of the claim's function, as editors open it; relative if the file lies below the current folder."""
    path, line = find(claim.id).code
    current_folder = Path.cwd()
    if path.is_relative_to(current_folder):
        path = path.relative_to(current_folder)
    return f"{path}:{line}"


def _table_of_all_checks(claim: Claim) -> Table:
    table = _empty_table("check", "numbers", "measured", "bound", "verdict")
    for form in ("corrected", "published"):
        checks = [check for check in claim.checks if check.form == form]
        _add_published_heading(table, claim, checks)
        for check in checks:
            table.add_row(Text(check.name), Text(check.detail), *_number_cells(check), _verdict_cell(check))
    return table


def _table_of_worst_checks(claim: Claim) -> Table:
    """A table with one row for the checks of each kind: how many there are, and the worst of them."""
    table = _empty_table("check (the worst of its kind)", "of", "measured", "bound", "verdict")
    for form in ("corrected", "published"):
        checks = [check for check in claim.checks if check.form == form]
        _add_published_heading(table, claim, checks)
        kinds: dict[tuple[str, str], list[Check]] = {}
        for check in checks:
            kinds.setdefault((check.kind, check.comparison), []).append(check)
        for same_kind in kinds.values():
            worst = _worst(same_kind)
            table.add_row(Text(worst.name), str(len(same_kind)), *_number_cells(worst), _verdict_cell(worst))
    return table


def _worst(checks: Sequence[Check]) -> Check:
    """The check that comes nearest to its bound, or lies farthest beyond it."""
    if checks[0].form == "published":
        # These are meant to fail: the one that comes nearest to holding is the one to look at.
        return min(checks, key=lambda check: check.strain)
    return max(checks, key=lambda check: check.strain)


def _add_published_heading(table: Table, claim: Claim, checks: Sequence[Check]) -> None:
    """Set the checks of the published form apart from those above."""
    if checks and checks[0].form == "published":
        table.add_section()
        table.add_row(Text(f"{claim.published_name}:", "dim"))


def _empty_table(*columns: str) -> Table:
    """A table whose words wrap; numbers and verdicts never do."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        wraps = name.startswith("check") or name == "numbers"
        justify = "left"
        if name in ("measured", "of"):
            justify = "right"
        table.add_column(name, no_wrap=not wraps, justify=justify)
    return table


def _number_cells(check: Check) -> Sequence[str]:
    return number(check.measured), f"{check.comparison} {bound(check.bound)}"


def _verdict_cell(check: Check) -> Text:
    """The verdict, without colour for the published form: that it fails is not alarming."""
    if check.form == "published":
        return Text(check.verdict)
    return _coloured(check.verdict)


def _coloured(verdict: Verdict) -> Text:
    if verdict == "holds":
        return Text(verdict, "green")
    return Text(verdict, "bold red")
