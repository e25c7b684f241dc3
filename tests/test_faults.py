"""Commands that are killed, and whose files cannot be written, at a few places: `scripts/faults.py` tries many more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the script looks up what open files are in /proc")
def test_no_kill_and_no_fault_costs_a_result_or_a_users_file():
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--faults", "4", "--seed", "short"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "7 trials, seed short: 0 went wrong" in ran.stdout
