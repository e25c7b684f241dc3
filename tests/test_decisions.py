"""The pages of decisions: each has a date; they and the architecture name only what the repository still has."""

import re
from datetime import date
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem not in ("index", "rooms"))
DECISION = re.compile(r"^## .+\n\n\*(\d{4}-\d{2}-\d{2})\.\* \S", re.MULTILINE)
FOREIGN = {"PASSIVE"}
"""Words of other programs that stand nowhere in our code."""


def test_every_decision_has_the_date_on_which_it_was_made():
    assert len(PAGES) >= 14
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        dates = [date.fromisoformat(day) for day in DECISION.findall(page)]
        assert len(dates) == len(re.findall(r"^## ", page, re.MULTILINE)) > 0, path.name
        assert all(day.year >= 2026 for day in dates), path.name


def test_every_page_of_decisions_is_in_the_index():
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert {path.name for path in PAGES} | {"rooms.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))


@cache
def _words_of_the_repository() -> frozenset[str]:
    """Every identifier in code, and every name of a file or folder."""
    words: set[str] = set()
    for folder in ("src", "tests", "scripts", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            words |= set(re.findall(r"[^\W\d]\w*", path.read_text(encoding="utf-8")))
            words |= {path.stem, *path.relative_to(ROOT).parts}
    words |= set(re.findall(r"[^\W\d]\w*", (ROOT / "Makefile").read_text(encoding="utf-8")))
    return frozenset(words)


def _missing(page: str) -> list[str]:
    """What a page names in code that the repository has no longer."""
    missing = []
    for code in re.findall(r"`+([^`]+)`+", page):
        for name in re.findall(r"[\w./]*\w+\.py\b|[^\W\d]\w*", code):
            if name.endswith(".py"):
                found = any(path.is_file() for path in (ROOT / name, ROOT / "src" / "massieu" / name))
                found = found or any(ROOT.glob(f"src/massieu/**/{name}")) or any(ROOT.glob(f"scripts/{name}"))
            else:
                found = name in _words_of_the_repository() | FOREIGN
            if not found and len(name) > 3:
                missing.append(name)
    return missing


@pytest.mark.medium
@pytest.mark.parametrize("path", [*PAGES, ROOT / "ARCHITECTURE.md"], ids=lambda path: path.stem)
def test_a_page_names_what_is_there(path):
    assert not _missing(path.read_text(encoding="utf-8"))


@pytest.mark.medium
def test_a_name_that_is_gone_is_seen():
    gone = ["_".join(("gone", "function")), "/".join(("gone", "file.py"))]
    assert _missing(f"`ops.attention` of `ops/attention.py`, `{gone[0]}`, `{gone[1]}`") == gone
