"""The loops of `examples/training_loops.py`: trained bit for bit as without the monitor, with the numbers that are theirs."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from examples.training_loops import EVERY, LOOPS, STEPS
from tests.support import processes
from tests.support.probing.training_loops import Run, in_process, trained

pytestmark = [
    pytest.mark.medium,
    # Words of the packages on themselves
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:.*LeafSpec"),
]
"""Loops whose queries and keys are bfloat16: keys are rounded again as their mean is subtracted, each entry by 2⁻⁹ of it."""
PACKAGES = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning", "lora": "peft"}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate has one precision in a process, which is forgotten for the next test."""
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.random.fork_rng(devices=[]):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def check_the_same(plain: Run, watched: Run) -> None:
    assert not plain.records
    assert len(plain.losses) == STEPS and plain.losses == watched.losses
    assert all(torch.equal(one, other) for one, other in zip(plain.weights, watched.weights, strict=True))


def check_records(run: Run, losses: list[float], rounding: float) -> None:
    due = [step for step in run.records if step]  # callbacks measure step 0 too, before there is a gradient
    assert due == list(range(EVERY, STEPS + 1, EVERY))
    for step in due:
        record = run.records[step]
        assert record["massieu/loss"] == pytest.approx(losses[step - 1], rel=1e-6)
        assert record["massieu/gradient_norm"] == pytest.approx(run.norms[step - 1], rel=1e-5)
        assert all(map(math.isfinite, record.values()))
    last = run.records[STEPS]
    for heads, expected in zip(last.largest_logits.values(), run.largest_logits, strict=True):
        assert heads.tolist() == pytest.approx(expected.tolist(), rel=rounding)
    largest = max(float(heads.max()) for heads in run.largest_logits)
    assert last["massieu/largest_logit_max"] == pytest.approx(largest, rel=rounding)


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "ddp"])
def test_in_one_process(name: str):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    watched = trained(name, watched=True)
    check_the_same(trained(name, watched=False), watched)
    check_records(watched, watched.losses, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "ddp"])
def test_with_everything_on_request(name: str):
    """Norms of the layers make up the norm of all gradients, before clipping."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    watched = trained(name, watched=True, norms=True, extreme_activations=True, on_nan="raise", per_head=True)
    check_the_same(trained(name, watched=False), watched)
    for step in range(EVERY, STEPS + 1, EVERY):
        record = watched.records[step]
        norms = [record[f"massieu/{layer}/gradient_norm"] for layer in ("layer0", "layer1")]
        outside = record.get("massieu/outside_layers/gradient_norm", 0.0)  # of an adapter none
        assert math.hypot(*norms, outside) == pytest.approx(watched.norms[step - 1], rel=1e-5)
        assert record["massieu/layer1/extreme_activations"] == 0.0


@pytest.mark.slow
def test_in_two_processes():
    """The record, which the first process writes, has the mean of their losses and the norm of the gradients they share."""
    ran = processes.run(in_process, 2, 60)
    for plain, watched in ran:
        check_the_same(plain, watched)
    (_, first), (_, second) = ran
    assert first.losses != second.losses
    assert all(torch.equal(one, other) for one, other in zip(first.weights, second.weights, strict=True))
    means = [(one + other) / 2 for one, other in zip(first.losses, second.losses, strict=True)]
    check_records(first, means, 1e-5)
    assert not second.records
