"""Hostile calls of every public name end clearly: the short form of `scripts/fuzz_calls.py`."""

import pytest
from scripts.fuzz_calls import CLEAR, run, seed_of_commit


@pytest.mark.slow
def test_hostile_calls_end_clearly():
    rows = run(1000, seed_of_commit())
    assert not [row for row in rows if row["outcome"] in ("hang", "crash")]
    unclear = [row for row in rows if row["outcome"] not in CLEAR]
    assert len(unclear) <= 0.02 * len(rows), unclear
