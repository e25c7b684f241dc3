"""Two Gloo processes, each with its share of the batch or of the heads, give the record of one."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.probing import monitor_work as work
from tests.support.processes import run, run_first

from massieu.storage.record_lines import read_run

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "run.jsonl"


@pytest.fixture(scope="module")
def processes(lines: Path) -> list[Any]:
    """What both processes show of each piece of work, by its name: they are started once for all tests."""
    return run(functools.partial(work.everything, lines), 2, 60)


def check_equal(record: dict[str, float], expected: dict[str, float]) -> None:
    assert list(record) == list(expected)
    for name, value in expected.items():
        # Sums of float32 statistics in another order, and matrix products of other shapes: some 1e-6 of their size
        assert record[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert math.isfinite(value)


@pytest.mark.slow
def test_data_parallel(processes: list[Any]):
    expected = work.one_process()
    for process in processes:
        record = dict(process["data_parallel"])
        norm = record.pop("massieu/gradient_norm")
        assert norm > 0
        check_equal(record, expected)


def test_fully_sharded(processes: list[Any]):
    """The record, and the training step after it, which computes with the weights after the step and not before it."""
    expected = work.one_process()
    for process in processes:
        record, trained, norms = process["fully_sharded"]
        check_equal(record, expected)
        check_equal(norms, work.layer_norms_of_one())
        assert torch.equal(trained, process["fully_sharded_alone"])


def test_tensor_parallel(processes: list[Any]):
    expected = work.one_process_of_llama()
    for process in processes:
        check_equal(process["tensor_parallel"], expected)


def test_every_process_has_the_record_of_the_whole_batch(processes: list[Any]):
    """Loss, rank and spread too; rows are sampled, and their tokens drawn, by their numbers in the whole batch."""
    expected = work.many_rows_of_one()
    assert expected["massieu/layer0/extreme_activations"] == (work.MANY_IDS == 7).double().mean() > 0
    for process in processes:
        record = process["uneven_shares"]
        assert list(record) == list(expected)
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-6), name
    first, second = (process["uneven_shares"] for process in processes)
    assert first == second


def test_processes_at_different_steps_are_told(processes: list[Any]):
    for process in processes:
        said = "all processes must call the monitor at the same steps, got steps [0, 1]"
        assert process["at_different_steps"] == said


@pytest.mark.slow
def test_a_monitor_in_one_process_alone_is_told_before_it_waits_long_and_when_the_time_is_over():
    shown: Any = run_first(work.in_one_process_alone, 2, 60)
    raised, warned = shown
    needed = "every process must make a Monitor and call it at the same steps"
    assert raised.startswith(f"not all processes have called the monitor at step 0; {needed} (")
    assert warned == [f"massieu.Monitor: waiting for the other processes; {needed}"]


def test_a_process_that_does_not_call_its_model_keeps_none_of_the_others_waiting(processes: list[Any]):
    expected = work.watched_by_one()
    for process in processes:
        seen, unseen = process["watched_by_some"]
        check_equal(seen, expected)
        assert unseen is None


def test_logits_are_clipped_by_the_largest_of_all_processes(processes: list[Any]):
    expected, weights = work.clipped_by_one()
    for process in processes:
        largest, clipped = process["clipped"]
        for name, logits in expected.items():
            assert torch.allclose(largest[name], logits, rtol=1e-5)
        assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(clipped, weights, strict=True))


def test_sharded_training_steps_are_watched_and_clipped(processes: list[Any]):
    record, largest, factors = work.watched_and_clipped(work.plain().train(), work.IDS)
    for process in processes:
        shown, logits, scaled = process["watched_fully_sharded"]
        check_equal(shown, record)
        for found, expected in ((logits, largest), (scaled, factors)):
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], expected[name], rtol=1e-5) for name in expected)


def test_shares_that_no_tensor_tells_of_have_no_norms(processes: list[Any]):
    """FullyShardedDataParallel: a process's share of the gradients has another norm; training goes on as in one process."""
    expected = work.trained_by_one()
    told = "massieu.Monitor: FullyShardedDataParallel gives each process a share of weights and gradients"
    for process in processes:
        records, said, refused = process["flat_shards"]
        for step, (record, (whole, norm)) in enumerate(zip(records, expected, strict=True)):
            given = record.pop("massieu/gradient_norm", None)
            assert given == (pytest.approx(norm, rel=1e-5) if step else None)
            record.pop("massieu/learning_rate")
            check_equal(record, {key: value for key, value in whole.items() if key != "massieu/gradient_norm"})
        assert len([sentence for sentence in said if sentence.startswith(told)]) == 1
        assert "FullyShardedDataParallel holds the model's weights in one row" in refused


@pytest.mark.slow
def test_compiled_training_of_two_processes_is_watched_and_clipped():
    """Watched training is bit for bit as without; logits and clipped weights are those of one process that is not compiled."""
    _, watched, clipped, weights = work.compiled_steps("", work.IDS)
    for process in run(work.compiled_training, 2, 300):
        for form in work.COMPILED:
            (alone,), (trained, found, found_second, found_weights) = process[form]
            assert all(map(torch.equal, trained, alone)), form
            # The second step's weights differ by the rounding of two shares' gradients.
            for expected, logits in ((watched, found), (clipped, found_second)):
                assert expected.keys() == logits.keys(), form
                assert all(torch.allclose(logits[name], expected[name], rtol=1e-4) for name in expected), form
            for weight, other in zip(weights, found_weights, strict=True):
                torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-5)


def test_sharded_gradients_count_as_a_whole(processes: list[Any]):
    expected = work.explicit_norm(*work.gradients())
    for process in processes:
        assert process["sharded_gradients"] == pytest.approx(expected, rel=1e-6)


def test_of_two_processes_one_writes(processes: list[Any], lines: Path):
    assert len(processes) == 2
    assert len(lines.read_text().splitlines()) == 21
    assert read_run(lines).curve("rank") == dict.fromkeys(range(20), 0.0)
