"""The rooms of the probe in ARCHITECTURE.md, from the table of allowed imports: ``python -m scripts.rooms_table``."""

import ast
import re
from pathlib import Path

from tests.support.rooms import PROBE, SOURCE

_PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"
_MARKS = re.compile(
    r"(<!-- rooms of the probe, by scripts/rooms_table.py -->\n).*?(?=<!-- end of rooms -->)", re.DOTALL
)


def _about(room: str) -> str:
    """The first line of what the room, or the file, says of itself."""
    place = SOURCE / "probing" / room
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return said.partition("\n")[0]


def table() -> str:
    """A row for each room, the highest first: what it holds, and which rooms it may import."""
    rows = ["| room of `probing/` | what it holds | imports |\n", "|---|---|---|\n"]
    for room, below in PROBE.items():
        rows.append(f"| `{room}` | {_about(room)} | {', '.join(below) or 'none of these'} |\n")
    return "".join(rows)


def with_table(page: str) -> str:
    """The page, with the table as it is now between its marks."""
    return _MARKS.sub(lambda found: found[1] + table(), page)


if __name__ == "__main__":
    _PAGE.write_text(with_table(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
