"""What the documentation shows runs: every Python block, and every script in examples/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [f"docs/{name}.md" for name in ("measures", "ops", "losses", "streaming", "duality", "verify")]
README_BLOCK = "from massieu import duality, measures"


def run(*arguments: str, **keywords) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, **keywords)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    run(str(script))


def test_the_readmes_measures_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if README_BLOCK in block]
    script = tmp_path / "readme.py"
    script.write_text(block)
    run(str(script))


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"own_measure.py", "contrastive.py"}


def test_attention_over_ones_own_measure_trains():
    found = dict(re.findall(r"error of recall, (.*?): +([\d.]+)", run("examples/own_measure.py")))
    # Images whose colours are exchanged, half of the queries, cannot be recalled from atoms at the images alone.
    assert float(found["mirrored atoms"]) < 0.2 < 0.3 < float(found["softmax attention"]) < 1


def test_gradient_caching_changes_no_gradient_and_the_encoder_learns():
    found = run("examples/contrastive.py")
    assert float(re.search(r"uncached ones by: (\S+)", found).group(1)) < 1e-6
    before, after = (
        float(re.search(rf"accuracy {when} training: +(\S+)", found).group(1)) for when in ("before", "after")
    )
    assert before < 0.75
    assert after > 0.8
