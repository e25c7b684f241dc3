"""The gallery, docs/start/gallery.md, from the pictures on the other pages: ``python -m scripts.gallery`` writes it."""

import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "start" / "gallery.md"
EXAMPLES = DOCS / "start" / "examples.md"
COLUMNS = 3
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]*images/([\w.]+))\)")
_HEADING = re.compile(r"^(#+) (.+)$")
_HEAD = (
    "# Gallery\n\nEvery picture of these pages, each with a link to where it is explained. "
    "Scripts of the repository draw them, such as the [examples](examples.md).\n"
)


@dataclass(frozen=True)
class Picture:
    """A picture on a page, and the page's title, or the heading in it, that stands above."""

    file: Path
    text: str
    page: Path
    title: str
    section: str = ""


def pictures_of(page: Path) -> Iterator[Picture]:
    """The pictures that a page shows in full, in their order."""
    title = section = ""
    for line in page.read_text(encoding="utf-8").split("\n"):
        if match := _HEADING.match(line):
            heading = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", match[2])
            title, section = (heading, "") if match[1] == "#" else (title, heading)
        for text, path, _ in _PICTURE.findall(line):
            file = (page.parent / path).resolve()
            if file.parent.name == "images":
                yield Picture(file, text, page, title, section)


def slug(heading: str) -> str:
    """The anchor that GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def pictures() -> list[Picture]:
    """Every picture once: on the page that explains it, else among the examples."""
    others = sorted(set(DOCS.rglob("*.md")) - {PAGE, EXAMPLES})
    by_file: dict[Path, Picture] = {}
    for page in (*others, EXAMPLES, ROOT / "ARCHITECTURE.md", ROOT / "README.md"):
        for picture in pictures_of(page):
            by_file.setdefault(picture.file, picture)
    return list(by_file.values())


def gallery() -> str:
    """The page: a table of pictures, each above the link to its place."""
    cells = [_cell(picture) for picture in pictures()]
    cells += [""] * (-len(cells) % COLUMNS)
    rows = [cells[first : first + COLUMNS] for first in range(0, len(cells), COLUMNS)]
    lines = [f"|{' |' * COLUMNS}", f"|{'---|' * COLUMNS}", *(f"| {' | '.join(row)} |" for row in rows)]
    return f"{_HEAD}\n" + "\n".join(lines) + "\n"


def _cell(picture: Picture) -> str:
    image, page = (os.path.relpath(path, PAGE.parent) for path in (picture.file, picture.page))
    place = f"{page}#{slug(picture.section)}" if picture.section else page
    section = f"<br>{picture.section}" if picture.section else ""
    return f"[![{picture.text}]({image})]({place})<br>[{picture.title}]({place}){section}"


if __name__ == "__main__":
    PAGE.write_text(gallery(), encoding="utf-8")
