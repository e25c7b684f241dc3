"""The page on extending the package: every block of code runs, and what it says of a wrong step is so."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "extending.md"
SHOWN = re.findall(
    r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)```)?", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
)
BLOCKS = [block for block, _ in SHOWN]


@pytest.mark.slow
def test_every_block_runs_and_prints_what_stands_below_it(capsys):
    assert len(SHOWN) == 7
    page: dict[str, object] = {"__name__": "extending"}
    with torch.random.fork_rng():
        for block, printed in SHOWN:
            exec(compile(block, str(PAGE), "exec"), page)
            assert capsys.readouterr().out == printed


@pytest.mark.medium
def test_a_step_that_is_too_long_fails_the_check_that_the_page_names():
    block = next(block for block in BLOCKS if "class Bowl" in block)
    assert ") / 3" in block
    with pytest.raises(AssertionError, match=r"^descent: a step"):
        exec(block.replace(") / 3", ") * 0.75"), {"__name__": "extending", "torch": torch})
