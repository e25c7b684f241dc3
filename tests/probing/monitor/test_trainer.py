"""A monitor inside transformers' Trainer: the steps that are due, Trainer's own loss and norm, resumed runs, reports."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.support.probing.monitor_seen import Seen
from tests.support.rows import every_row
from torch import Tensor

from massieu import InputError
from massieu.probing.monitor.trainer import MonitorTrainerCallback
from massieu.report.record_lines import read_run

pytestmark = pytest.mark.medium


def model() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in drawn]


BATCH = {"input_ids": torch.arange(16).view(2, 8)}


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., transformers.Trainer]:
    def made(trained: torch.nn.Module, *callbacks: Any, **settings: Any) -> transformers.Trainer:
        chosen = {"max_steps": 6, "logging_steps": 4, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, seed=0,
            **(chosen | settings),
        )  # fmt: skip
        return transformers.Trainer(trained, arguments, train_dataset=rows(), callbacks=list(callbacks))  # pyright: ignore

    return made


class Witness(transformers.TrainerCallback):
    """What Trainer logs by itself, and the gradients before it clips them."""

    def __init__(self) -> None:
        self.logged: dict[int, dict] = {}
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged[state.global_step] = dict(logs)


def test_records_are_of_the_steps_that_are_due_with_trainers_own_numbers(trainer: Callable, tmp_path: Path):
    """And training does not notice that they are made."""
    witness = Witness()
    trainer(plain := model(), witness, max_grad_norm=0.01).train()
    trained = model()
    path = tmp_path / "run.jsonl"
    monitor = Seen(trained, BATCH, every=2, to=[path])
    ran = trainer(trained, monitor.trainer_callback(), logging_steps=1, max_grad_norm=0.01)
    ran.train()
    run = read_run(path)
    assert list(run.records) == [2, 4, 6]
    for step, record in run.records.items():
        expected = witness.logged[step]
        assert record["massieu/loss"] == expected["loss"]
        assert record["massieu/gradient_norm"] == expected["grad_norm"] > 0.1  # before it was clipped to 0.01
        assert record["massieu/learning_rate"] == expected["learning_rate"]
    kept = {entry["step"]: entry for entry in ran.state.log_history if "massieu/loss" in entry}
    assert {
        step: {key: value for key, value in entry.items() if key != "step"} for step, entry in kept.items()
    } == run.records
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), trained.parameters(), strict=True))


def test_trainer_logs_at_steps_that_are_due_whatever_its_own_are(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=3)
    ran = trainer(trained, monitor.trainer_callback(), logging_steps=500)
    ran.train()
    logged = {entry["step"]: entry["loss"] for entry in ran.state.log_history if "loss" in entry}
    assert list(logged) == [3, 6]
    assert [record["massieu/loss"] for record in monitor.seen.values()] == list(logged.values())


def test_accumulated_gradients_are_one_step(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=1)
    trainer(trained, monitor.trainer_callback(), gradient_accumulation_steps=2, max_steps=3).train()
    assert list(monitor.seen) == [1, 2, 3]


def test_without_logging_there_is_a_record_with_the_norm_after_clipping(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=2)
    ran = trainer(trained, monitor.trainer_callback(), logging_strategy="no", max_grad_norm=0.01, max_steps=4)
    ran.train()
    assert list(monitor.seen) == [2, 4]
    for record in monitor.seen.values():
        assert "massieu/loss" not in record
        assert record["massieu/gradient_norm"] == pytest.approx(0.01, rel=1e-3)
    assert [entry["step"] for entry in ran.state.log_history if "massieu/gradient_norm" in entry] == [2, 4]


@pytest.mark.parametrize(("fp16", "most", "known"), [(True, 0.0, False), (True, 1.0, True), (False, 0.0, True)])
def test_gradients_that_still_have_the_loss_scale_give_no_norm(fp16: bool, most: float, known: bool):
    callback = Seen(trained := model(), BATCH, every=2).trainer_callback()
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    given = SimpleNamespace(fp16=fp16, max_grad_norm=most), SimpleNamespace(global_step=1), None
    callback.on_pre_optimizer_step(*given, model=trained, optimizer=torch.optim.SGD(trained.parameters(), 0.1))
    assert ("gradient_norm" in callback._known) is known and callback._known["learning_rate"] == 0.1


def test_a_callback_that_keeps_trainer_from_logging_loses_no_record(trainer: Callable):
    class Quiet(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_log = False
            return control

    monitor = Seen(trained := model(), BATCH, every=2)
    trainer(trained, monitor.trainer_callback(), Quiet(), max_steps=4).train()
    assert list(monitor.seen) == [2, 4]
    assert all("massieu/learning_rate" in record for record in monitor.seen.values())


def test_a_resumed_training_continues_and_a_record_is_strict_json_in_trainers_own_state(
    trainer: Callable, tmp_path: Path
):
    path = tmp_path / "run.jsonl"
    whole = Seen(trained := model(), BATCH, every=2)
    trainer(trained, whole.trainer_callback(), max_steps=8, save_strategy="steps", save_steps=4).train()
    state = json.loads(
        (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text(), parse_constant=pytest.fail
    )
    stored = {entry["step"]: entry for entry in state["log_history"] if "massieu/entropy_mean" in entry}
    assert list(stored) == [2, 4, 6, 8] and all(math.isfinite(entry["massieu/loss"]) for entry in stored.values())
    again = Seen(trained := model(), BATCH, every=2, to=[path])
    resumed = trainer(trained, again.trainer_callback(), max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert list(again.seen) == [6, 8]
    assert {step: record["massieu/entropy_mean"] for step, record in again.seen.items()} == {
        step: whole.seen[step]["massieu/entropy_mean"] for step in (6, 8)
    }


def test_with_its_trainer_records_are_reported_as_its_own(trainer: Callable, tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Seen(trained := model(), BATCH, every=2)
    ran = trainer(trained, report_to="tensorboard", logging_steps=1)
    ran.add_callback(monitor.trainer_callback(ran))
    ran.train()
    [folder] = {path.parent for path in tmp_path.rglob("events.out.*")}
    board = events.EventAccumulator(str(folder)).Reload()
    found = {event.step: event.value for event in board.Scalars("train/massieu/loss")}
    assert found == pytest.approx({step: record["massieu/loss"] for step, record in monitor.seen.items()}, rel=1e-6)
    # Trainer's own log of the same steps is whole.
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_another_model_is_refused_when_training_begins(trainer: Callable):
    monitor = Seen(model(), BATCH, every=2)
    with pytest.raises(
        InputError, match="the monitor watches another GPT2LMHeadModel object than the model that Trainer trains"
    ):
        trainer(model(), monitor.trainer_callback()).train()


@every_row(("given", "got"), [(5, "got 5"), (torch.nn.Linear(1, 1), "got Linear")])
def test_what_is_no_trainer_is_refused(given: object, got: str):
    with pytest.raises(InputError, match=f"trainer must be a transformers.Trainer, {got}"):
        MonitorTrainerCallback(Seen(model(), BATCH), given)  # pyright: ignore
