"""Who is told how far a probe is: a function, a person who watches, or nobody."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import massieu
from massieu.probing.session import progress
from massieu.probing.session.progress import ProbeProgress, telling


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int | None]]:
    """What a person would see."""
    seen: list[tuple[str, int, int | None]] = []

    @contextmanager
    def line() -> Any:
        yield lambda stage, done, total, count: seen.append((stage, done, total))

    monkeypatch.setattr(progress, "progress_line", line)
    return seen


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


BATCHES = [torch.ones(1, 4, 8), torch.zeros(1, 4, 8)]


@pytest.mark.medium
def test_a_person_sees_stages_by_default_and_a_function_hears_them(lines):
    massieu.probe(_model(), BATCHES, statistics="quick")
    assert [stage for stage, *_ in lines] == ["loading the model", "reading", "reading", "writing"]
    heard: list[ProbeProgress] = []
    massieu.probe(_model(), BATCHES, statistics="quick", run=massieu.Run(progress=heard.append))
    assert [state.stage for state in heard] == [stage for stage, *_ in lines]
    assert heard[-1].windows == 2
    assert len(lines) == 4
    massieu.probe(_model(), BATCHES, statistics="quick", run=massieu.Run(progress=False))
    assert len(lines) == 4


@pytest.mark.medium
def test_a_comparison_names_the_model_that_it_reads(lines):
    massieu.compare(_model(), _model(), data=BATCHES, names=["one", "other"], statistics="quick")
    assert {stage.partition(":")[0] for stage, *_ in lines} == {"one", "other"}
    lines.clear()
    massieu.compare(_model(), _model(), data=BATCHES, names=["one", "other"], statistics="quick", progress=False)
    assert not lines


def test_of_several_processes_one_shows_it(lines):
    with telling(True, silent=True) as tell:
        tell(ProbeProgress("reading"))
    assert not lines
    heard: list[ProbeProgress] = []
    with telling(heard.append, silent=True) as tell:
        tell(ProbeProgress("reading"))
    assert len(heard) == 1


@pytest.mark.parametrize("call", [massieu.Run, massieu.compare])
@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_progress_is_a_truth_value_or_a_function(call, wrong):
    with pytest.raises(massieu.InputError, match="progress must be True, False or a function of a ProbeProgress, got"):
        call(progress=wrong)
