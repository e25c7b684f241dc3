"""The tables of docs/decisions/rooms.md, from the rules of the tests: ``python -m scripts.rooms_table``."""

import ast
import re
from collections.abc import Collection
from pathlib import Path

from tests.support.rooms import ALLOWED, OF_THE_PROBE, PROBE, SOURCE, WINGS, wing_of

PAGE = Path(__file__).parents[1] / "docs" / "decisions" / "rooms.md"
_MARKS = re.compile(
    r"(<!-- rooms of the (\w+), by scripts/rooms_table.py -->\n).*?(?=<!-- end of rooms -->)", re.DOTALL
)
_INNER = ("__init__", "__main__", "papers")
"""Lists of names, which import what they show."""


def _about(*parts: str) -> str:
    """The first line of the docstring of a room, which is a folder or a file."""
    place = SOURCE.joinpath(*parts)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def package_table() -> str:
    """A row for each room of the package, from `cli` down: its wing, what it holds, which rooms it may import."""
    order = ["cli", *(room for rooms in WINGS.values() for room in rooms)]
    rows = ["| room | wing | what it holds | may import |\n", "|---|---|---|---|\n"]
    for room in order:
        if room in _INNER:
            continue
        rooms = {_short(other) for other in ALLOWED[room]} - {*_INNER, room}
        if room == "probing":
            rooms = {*OF_THE_PROBE, "report"} - {*_INNER}
        rows.append(f"| `{room}` | {wing_of(room) or '–'} | {_about(*room.split('.'))} | {_listed(rooms, order)} |\n")
    return "".join(rows)


def probe_table() -> str:
    """A row for each room of the probe, the highest first: what it holds, and which rooms of the probe it may import."""
    rows = ["| room of `probing/` | what it holds | may import |\n", "|---|---|---|\n"]
    for room, below in PROBE.items():
        rows.append(f"| `{room}` | {_about('probing', room)} | {', '.join(below) or 'none of these'} |\n")
    return "".join(rows)


def _short(room: str) -> str:
    return "probing" if room.startswith("probing.") else room


def _listed(rooms: Collection[str], order: list[str]) -> str:
    return ", ".join(room for room in order if room in rooms) or "nothing"


def with_tables(page: str) -> str:
    """The page, with the tables as they are now between their marks."""
    tables = {"package": package_table, "probe": probe_table}
    return _MARKS.sub(lambda match: match[1] + tables[match[2]](), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
