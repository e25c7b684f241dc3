"""Tiles of moments that are small enough for a few queries and keys to need several."""

import pytest

from massieu.ops import moment_blocks
from massieu.ops.compiled import moments


def use_small_tiles(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """Tiles of about so many scores, and of a sixteenth as many keys where there are many queries."""
    monkeypatch.setattr(moment_blocks, "WEIGHTED_PAIRS_PER_THREAD", pairs)
    monkeypatch.setattr(moment_blocks, "FEWEST_PAIRS", pairs)
    monkeypatch.setattr(moments, "FEWEST_PAIRS", pairs)
    monkeypatch.setattr(moments, "MOST_PAIRS", pairs)
    monkeypatch.setattr(moment_blocks, "ROWS", 1)
    for module in (moment_blocks, moments):
        monkeypatch.setattr(module, "KEYS", max(1, pairs // 16))
