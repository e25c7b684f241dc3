"""Standard errors of the papers' groups: two halves of one text differ as much as their errors say, in heads and in layers."""

from typing import Any

import numpy as np
import polars
import pytest
import scipy.stats
import torch

import massieu
from massieu.probing.sums.significance import benjamini_hochberg
from massieu.report.questions import QUESTIONS


def differences(table: polars.DataFrame, name: str) -> np.ndarray:
    """Of the halves, in standard errors: those of a half are √2 times the whole's, so their difference's are twice."""
    keys = ["site", "head"]
    whole, *halves = (
        table.filter(table["statistic"] == f"{name}{part}") for part in ("", "/first_half", "/second_half")
    )
    joined = whole.join(halves[0], on=keys, suffix="_1", nulls_equal=True).join(
        halves[1], on=keys, suffix="_2", nulls_equal=True
    )
    apart = joined["value_1"].to_numpy() - joined["value_2"].to_numpy()
    error = joined["standard_error"].cast(polars.Float64).to_numpy()
    finite = np.isfinite(apart) & (error > 0)
    return apart[finite] / (2 * error[finite])


@pytest.mark.slow
def test_two_halves_of_a_text_are_told_apart_in_few_places():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    model = BertModel(BertConfig(**sizes, vocab_size=200, max_position_embeddings=40)).eval()
    drawn = np.random.default_rng(0)
    frequencies = 1 / np.arange(1, 200)
    ids = drawn.choice(199, size=(400, 40), p=frequencies / frequencies.sum()) + 1
    batches = [{"input_ids": torch.from_numpy(part)} for part in np.split(ids, 20)]
    result = massieu.probe(model, batches, statistics=list(QUESTIONS), draws=0)
    assert not result.run.unavailable, result.run.unavailable
    named, tested, squares = 0, 0, []
    for table in (result.heads, result.layers):
        for name in table["statistic"].unique(maintain_order=True):
            if "/" not in name and len(found := differences(table, name)):
                p_values = 2 * scipy.stats.norm.sf(np.abs(found))
                named, tested = named + int((benjamini_hochberg(p_values) < 0.05).sum()), tested + len(found)
                squares.append(float((found**2).mean()))
    assert tested > 300 and named <= 0.05 * tested
    # The errors are neither far too small nor far too large: of 40 windows an error has a tenth of itself as its own.
    assert 0.5 < np.median(squares) < 2
