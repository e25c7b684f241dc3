"""Two Gloo processes, each with its share of the batch or of the heads, give the record of one."""

import math

import pytest
import torch
from tests.support.probing import monitor_work as work
from tests.support.processes import run

pytestmark = pytest.mark.medium


def check_equal(record: dict[str, float], expected: dict[str, float]) -> None:
    assert list(record) == list(expected)
    for name, value in expected.items():
        # Sums of float32 statistics in another order, and matrix products of other shapes: some 1e-6 of their size
        assert record[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert math.isfinite(value)


def test_data_parallel():
    expected = work.one_process()
    for record in run(work.data_parallel, 2, 60):
        norm = record.pop("massieu/gradient_norm")
        assert norm > 0
        check_equal(record, expected)


def test_fully_sharded():
    """The record, and the training step after it, which computes with the weights after the step and not before it."""
    expected = work.one_process()
    for (record, trained), alone in zip(
        run(work.fully_sharded, 2, 60), run(work.fully_sharded_alone, 2, 60), strict=True
    ):
        check_equal(record, expected)
        assert torch.equal(trained, alone)


def test_tensor_parallel():
    expected = work.one_process_of_llama()
    for record in run(work.tensor_parallel, 2, 60):
        check_equal(record, expected)


def test_processes_at_different_steps_are_told():
    for said in run(work.at_different_steps, 2, 60):
        assert said == "all processes must call the monitor at the same steps, got steps [0, 1]"


def test_a_process_that_does_not_call_its_model_keeps_none_of_the_others_waiting():
    expected = work.watched_by_one()
    for seen, unseen in run(work.watched_by_some, 2, 60):
        check_equal(seen, expected)
        assert unseen is None
