"""The tables of statistics in docs/probe.md, made from what is said of each: ``python scripts/statistics_table.py``."""

import re
from pathlib import Path

from massieu.probing.statistics.registry import STATISTICS
from massieu.storage.record import Statistic

_MARKS = re.compile(
    r"(<!-- statistics of a (\w+), by scripts/statistics_table.py -->\n).*?(?=<!-- end of statistics -->)", re.DOTALL
)
_HEAD = "| statistic | question | formula | unit | claim | headline | what it does not say |\n|---|---|---|---|---|---|---|\n"


def _row(each: Statistic) -> str:
    formula, unit = each.formula.replace("|", "\\|"), each.unit or "–"
    cells = (
        f"`{each.name}`",
        each.question,
        f"`{formula}`",
        unit,
        each.claim,
        "yes" if each.headline else "no",
        each.caveat,
    )
    return f"| {' | '.join(cells)} |\n"


def table(scope: str) -> str:
    """The statistics of a head or of a layer, one in a row, in the order in which they are registered."""
    return _HEAD + "".join(_row(each) for each in STATISTICS.values() if each.scope == scope)


def with_tables(page: str) -> str:
    """The page, with the tables as they are now between its marks."""
    return _MARKS.sub(lambda found: found[1] + table(found[2]), page)


if __name__ == "__main__":
    path = next((Path(__file__).parents[1] / "docs").rglob("probe.md"))
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
