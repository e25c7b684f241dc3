"""The recipes of CONTRIBUTING.md, followed word by word in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HEAD = re.compile(r'(?:# |<!-- )(\S+), (?:at the end|above "(.*)")(?: -->)?\n')
"""The first line of a block."""


@dataclass(frozen=True)
class Block:
    """Lines that a recipe adds to a file, above the first line that begins with `anchor`, or at the end."""

    file: str
    anchor: str | None
    text: str

    def is_new(self) -> bool:
        """Whether the file begins with these lines."""
        return self.anchor is None and not (ROOT / self.file).exists()

    def place(self, lines: list[str]) -> int:
        """Number of the line before which the block goes."""
        if self.anchor is None:
            return len(lines)
        return next(number for number, line in enumerate(lines) if line.startswith(self.anchor))

    def apply(self, root: Path) -> None:
        """Write the lines into the file of a copy."""
        path = root / self.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        lines.insert(self.place(lines), self.text)
        path.write_text("".join(lines), encoding="utf-8")


def blocks() -> list[Block]:
    """The blocks of "How to add …" in their order."""
    found = []
    for text in re.findall(r"^```(?:python|markdown)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        head = HEAD.match(text)
        assert head is not None, f"the first line names no file: {text[:60]}"
        found.append(Block(head[1], head[2], text[head.end() :]))
    return found


def test_every_block_says_where_it_goes():
    placed = blocks()
    assert len(placed) >= 11
    for block in placed:
        path = ROOT / block.file
        if not block.is_new():
            block.place(path.read_text(encoding="utf-8").splitlines(keepends=True))
        assert path.parent.is_dir(), block.file


def test_where_a_recipe_sends_the_reader_there_is_a_file():
    recipes = PAGE.partition("## How to add …")[2]
    recipes = re.sub(r"^```.*?^```", "", recipes, flags=re.DOTALL | re.MULTILINE)
    named = {name for name in re.findall(r"`([\w./]+\.(?:py|yml|md))`", recipes) if "/" in name or name.endswith("md")}
    assert len(named) > 15
    new = {block.file for block in blocks() if block.is_new()}
    places = ("", "src/massieu", "src/massieu/probing")
    missing = {name for name in named - new if not any((ROOT / place / name).is_file() for place in places)}
    assert not missing


def test_every_page_is_in_the_navigation_and_among_all_pages():
    """Pages of decisions and of the theory have indices of their own."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = yaml.safe_load(config[config.index("\nnav:") : config.index("\nnot_in_nav:")])
    text = yaml.safe_dump(navigation)
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert not {name for name in names if not re.search(rf"(?<![\w/]){re.escape(name)}$", text, re.MULTILINE)}
    with_own_index = {name for name in names if name.startswith(("decisions/", "theory/"))}
    assert not {name for name in names - with_own_index - {"index.md"} if f"]({name})" not in index}


TESTS = (
    "tests/measures/test_conformance.py",
    "tests/papers/claims/test_claims.py",
    "tests/probing/capture/test_follow.py::test_hand_written_attention_is_read_as_it_is",
)
CHOSEN = "binomial or left_out or every_measure or S99 or hand_written"
STATISTIC = """
import massieu
import numpy as np
import torch
from torch import nn
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
batches = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))] * 4
columns = []
for names in (["entropy", "largest_score_gap"], ["entropy"]):
    heads = massieu.probe(model.eval(), batches, statistics=names, draws=0).heads
    columns.append(heads.filter(heads["statistic"].str.starts_with("entropy"))["value"].to_numpy())
    print(sorted(heads["statistic"].unique()))
np.testing.assert_allclose(*columns, rtol=1e-5)
"""
"""The new statistic is measured, and another one's rows are what they are without it."""


@pytest.mark.slow
def test_what_the_recipes_add_works_and_passes_the_tests_that_they_name(tmp_path):
    for folder in ("src", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for block in blocks():
        block.apply(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    measured = run("-c", STATISTIC)
    assert measured.returncode == 0, measured.stderr
    assert "largest_score_gap" in measured.stdout
    tested = run("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", *TESTS, "-k", CHOSEN)
    assert tested.returncode == 0, tested.stdout
    assert int(re.findall(r"(\d+) passed", tested.stdout)[0]) > 15
    example = run("-m", "doctest", "src/massieu/measures/binomial.py")
    assert example.returncode == 0, example.stdout
