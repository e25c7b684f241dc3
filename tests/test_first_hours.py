"""The first hour: what four readers type, from the page that tells it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.first_hours import MINUTES, PAGE, ROOT, SET_UP, Section, sections, table, timed, typed
from tests.support.printed import differing

from massieu.papers.claims.registry import find

SECTIONS = sections(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_four_readers_after_the_set_up():
    assert SECTIONS[0].title == SET_UP and len(SECTIONS) == 5
    for section in SECTIONS:
        for name, content in section.files.items():
            compile(content, name, "exec")
            assert f"python {name}\n" in section.typed
    assert len(MINUTES.findall(PAGE.read_text(encoding="utf-8"))) == 1


def test_the_lines_that_the_page_opens_are_those_of_the_claim():
    (reader,) = (section for section in SECTIONS if "claim" in section.title)
    claim, first, path = re.search(r"verify (\w+)\n.*sed -n (\d+),\d+p (\S+)", reader.typed, re.DOTALL).groups()
    assert find(claim).code == (ROOT / path, int(first))


def test_a_block_of_python_must_be_a_named_file_and_a_command_that_fails_is_an_error(tmp_path):
    page = "# Page\n\n## One\n\n`a.py`, then `b.py`:\n\n```python\nx = 1\n```\n\n```sh\ntrue\n```\n\n"
    (found,) = sections(page + "## Two\n\nWords.\n")
    assert found == Section("One", {"b.py": "x = 1\n"}, "true\n")
    with pytest.raises(ValueError, match=r"One: the text before a block of Python must name its file"):
        sections("## One\n\n```python\nx = 1\n```\n")
    assert typed(found, tmp_path) > 0 and (tmp_path / "b.py").read_text() == "x = 1\n"
    with pytest.raises(RuntimeError, match=r"One: exit status 3\nhere"):
        typed(found._replace(typed="echo here\nexit 3\necho there\n"), tmp_path)


def test_the_set_up_comes_first_and_the_minutes_go_into_a_table(tmp_path):
    page = "## Set-up\n\n```sh\ntrue\n```\n\n## A reader\n\n```sh\ntrue\n```\n\n## Another\n\n```sh\nfalse\n```\n"
    assert list(timed(page, tmp_path, ["READER"], lambda _: None)) == ["Set-up", "A reader"]
    assert "| A reader | 0.06 |\n| Another | 2.5 |" in table({"A reader": 0.06, "Another": 2.5})
    with pytest.raises(ValueError, match="begins with 'A reader'"):
        timed(page.partition("## A reader")[1] + page.partition("## A reader")[2], tmp_path, [""], lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda section: section.title)
def test_what_a_reader_types_works(section, tmp_path):
    """The set-up is a command of CI; here the readers' commands are those of this environment."""
    (tmp_path / "src").symlink_to(ROOT / "src")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert typed(section, tmp_path, environment) > 0


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(tmp_path):
    block = re.search(
        r"`make demo` sets up.*?```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    output = _what_the_demo_printed(tmp_path)
    printed = [line.split() for line in output.splitlines()]
    assert len(block[1].splitlines()) == 3
    for line in block[1].splitlines():
        shown = line.removesuffix("…").split()
        assert any(not differing(" ".join(words[: len(shown)]), " ".join(shown)) for words in printed), output


def _what_the_demo_printed(folder: Path) -> str:
    """CI has run it before, and says where its output is."""
    if known := os.environ.get("MASSIEU_DEMO_PRINTED"):
        return Path(known).read_text(encoding="utf-8")
    command = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    typed = command[1].replace("$(OUT)", "massieu-results/demo").split()
    ran = subprocess.run([sys.executable, "-m", *typed], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout
