"""What type checkers know of massieu's results: `typing_samples.py` passes in mypy too, and runs; `make types` has pyright."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLES = "tests/typing_samples.py"
COMMANDS = {
    # PyTorch's own `backward` has no annotations.
    "mypy": ["-m", "mypy", "--strict", "--follow-imports=silent", "--untyped-calls-exclude=torch", SAMPLES],
    "massieu": [SAMPLES],
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", COMMANDS)
def test_samples_pass(tool: str):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    paths = {"MYPYPATH": str(ROOT / "src"), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *COMMANDS[tool]], cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
