"""What a run enters: no code of a feature that it was not asked for."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.probing import zoo

import massieu

SOURCE = f"{Path(massieu.__file__).parent}/"
NOT_ASKED_FOR = {
    "probing/checks/weights.py": "weights that a checkpoint lacks",
    "probing/data/text_tables.py": "tables and data sets",
    "probing/data/token_names.py": "names of frames and patches",
    "probing/model/target_labels.py": "labels of a decoder",
    "probing/reading/per_token.py": "per-token rows",
    "probing/reading/pooled.py": "models that pool their tokens",
    "probing/replaced/replacement.py": "another attention in the model's place",
    "probing/result/stored.py": "a result read back from its files",
    "probing/session/course.py": "running sums and processes that share a text",
    "probing/sums/running.py": "running sums",
}
OF_ENTROPY = {"__init__", "attention", "catalogue", "extremes", "group", "query_means", "query_reading", "registry"}
"""The files of `probing/statistics` that the attention's statistics are made of."""


def entered(call: Callable[[], Any]) -> set[str]:
    """The files of the package in which the call runs a function."""
    files: set[str] = set()

    def see(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(SOURCE):
            files.add(file.removeprefix(SOURCE))

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.medium
def test_entropy_alone_enters_no_feature_that_nobody_asked_for():
    model = zoo.fresh("bert")
    batches = [{"input_ids": torch.arange(1, 9)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}]

    def run() -> None:
        massieu.probe(model, batches, statistics=["entropy"])

    run()  # so that modules are imported
    files = entered(run)
    assert "probing/statistics/attention.py" in files
    assert {file: NOT_ASKED_FOR[file] for file in files & NOT_ASKED_FOR.keys()} == {}
    statistics = {Path(file).stem for file in files if file.startswith("probing/statistics/")}
    assert statistics <= OF_ENTROPY
    assert not any(file.startswith(("probing/stream/", "probing/compare/", "report/")) for file in files)
