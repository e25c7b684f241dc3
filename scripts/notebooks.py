"""Tutorials as notebooks: ``python -m scripts.notebooks FOLDER`` writes one for each page of docs/tutorials.

Prose becomes cells of Markdown, and a block of Python a cell of code. The commands of a `console` block are run by the shell.
A notebook has no output until it is run, which needs no network. The site offers each beside its page.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.tutorials import BLOCK, COMMAND

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
DISPLAYED = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A formula on lines of its own."""
INLINE = re.compile(r"\$`([^`]+)`\$")
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)[^)]*\)")
"""A link to another page, which a notebook on a disk cannot follow."""


def notebook(page: str) -> dict[str, Any]:
    """A page's Markdown as a notebook of format 4.5."""
    cells = [
        {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, source) in enumerate(_cells(page))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebook_json(page: str) -> str:
    """The notebook as its file holds it."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def tutorials() -> list[Path]:
    """The pages that are notebooks too."""
    return [path for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"]


def _cells(page: str) -> Iterator[tuple[str, str]]:
    """Kind and source of each cell."""
    end = 0
    for block in BLOCK.finditer(page):
        yield from _prose(page[end : block.start()])
        kind, source = block.groups()
        if kind == "console":
            source = "\n".join(f"!{command}" for command in COMMAND.findall(source))
        yield "code", source.strip("\n")
        end = block.end()
    yield from _prose(page[end:])


def _prose(text: str) -> Iterator[tuple[str, str]]:
    """A cell of Markdown, if there is any, with formulas as notebooks write them."""
    text = DISPLAYED.sub(lambda formula: f"$$\n{formula[1]}$$", text.strip())
    text = INLINE.sub(lambda formula: f"${formula[1]}$", text)
    text = LINK.sub(lambda link: link[1], text)
    if text:
        yield "markdown", text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tutorials as notebooks.")
    parser.add_argument("folder", type=Path, help="where to; it is made if need be")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in tutorials():
        target = folder / f"{path.stem}.ipynb"
        target.write_text(notebook_json(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(target)
