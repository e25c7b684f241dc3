"""A monitor inside transformers' Trainer: the steps that are due, Trainer's own loss, norm and logs, resumed runs, trackers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tests.support.probing.monitor_seen import Seen
from tests.support.probing.monitor_work import explicit_norm
from tests.support.rows import every_row
from torch import Tensor

from massieu import InputError, Monitor
from massieu.storage.record_lines import read_run

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
    def fresh(
        trained: torch.nn.Module, *callbacks: Any, made: type = transformers.Trainer, **settings: Any
    ) -> transformers.Trainer:
        chosen = {"max_steps": 6, "logging_steps": 4, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, seed=0,
            **(chosen | settings),
        )  # fmt: skip
        return made(trained, arguments, train_dataset=rows(), callbacks=list(callbacks))

    return fresh


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
    assert list(run.records) == [0, 2, 4, 6]
    for step, expected in ((step, witness.logged[step]) for step in (2, 4, 6)):
        record = run.records[step]
        assert record["massieu/loss"] == expected["loss"]
        assert record["massieu/gradient_norm"] == expected["grad_norm"] > 0.1  # before it was clipped to 0.01
        assert record["massieu/learning_rate"] == expected["learning_rate"]
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), trained.parameters(), strict=True))


def test_norms_by_layer_are_those_before_trainer_clips(trainer: Callable):
    norms: list[dict[str, float]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clip_seen(parameters: Any, *arguments: Any, **keywords: Any) -> Tensor:
        norms.append({})
        for layer, start in (("layer0", "transformer.h.0."), ("layer1", "transformer.h.1.")):
            gradients = [p.grad for name, p in trained.named_parameters() if name.startswith(start)]
            norms[-1][layer] = explicit_norm(*gradients)
        return clip(parameters, *arguments, **keywords)

    monitor = Seen(trained := model(), BATCH, every=2, norms=True)
    with mock.patch("torch.nn.utils.clip_grad_norm_", clip_seen):
        trainer(trained, monitor.trainer_callback(), logging_steps=1, max_grad_norm=0.01, max_steps=4).train()
    for step in (2, 4):
        for layer, expected in norms[step - 1].items():
            assert monitor.seen[step][f"massieu/{layer}/gradient_norm"] == pytest.approx(expected, rel=1e-5)
    assert len(norms) == 4


def test_norms_by_layer_after_clipping_are_left_out_where_trainer_does_not_log_the_norm(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=2, norms=True)
    trainer(trained, monitor.trainer_callback(), logging_strategy="no", max_grad_norm=0.01, max_steps=4).train()
    for step in (2, 4):
        assert "massieu/layer0/weight_norm" in monitor.seen[step]
        assert not [key for key in monitor.seen[step] if key.endswith("gradient_norm")]


def test_the_first_record_is_of_the_model_before_its_first_step(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=3)
    trainer(trained, monitor.trainer_callback()).train()
    untrained = Monitor(model(), BATCH)(0)
    assert list(monitor.seen) == [0, 3, 6]
    assert monitor.seen[0] == untrained != monitor.seen[3]


class Collecting(transformers.Trainer):
    """Averages in each log what was collected since the one before, as trainers of other packages do."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.collected: list[float] = []

    def training_step(self, *arguments: Any, **settings: Any) -> Tensor:
        loss = super().training_step(*arguments, **settings)
        self.collected.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **settings: Any) -> None:
        logs["collected"], self.collected = math.fsum(self.collected), []
        super().log(logs, *arguments, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_what_trainer_logs_and_prints_is_as_without_a_monitor(
    trainer: Callable, capsys: pytest.CaptureFixture[str], strategy: str
):
    """At other steps than those that are due, with the mean loss of the same steps, to the last bit."""

    def ran(watched: bool) -> tuple[list[dict], list[dict], str]:
        trained = model()
        every = trainer(trained, made=Collecting, logging_strategy=strategy, max_steps=18)
        if watched:
            every.add_callback(Monitor(trained, BATCH, every=3).trainer_callback(every))
        every.train()
        timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        history = [{k: v for k, v in entry.items() if k not in timed} for entry in every.state.log_history]
        own = [any(key.startswith("massieu/") for key in entry) for entry in history]
        printed = "".join(line for line in capsys.readouterr().out.splitlines() if "train_runtime" not in line)
        kept = [[entry for entry, mine in zip(history, own, strict=True) if mine is of] for of in (False, True)]
        return kept[0], kept[1], printed

    alone, none, said = ran(False)
    beside, records, said_beside = ran(True)
    assert len(alone) == {"steps": 5, "epoch": 3, "no": 1}[strategy]
    assert beside == alone
    assert said_beside == said
    assert not none and [entry["step"] for entry in records] == [0, 3, 6, 9, 12, 15, 18]


def test_summaries_of_at_most_20_numbers_are_in_trainers_state_and_whole_records_are_the_monitors(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=2)
    ran = trainer(trained, monitor.trainer_callback(), logging_steps=1)
    ran.train()
    kept = {entry["step"]: entry for entry in ran.state.log_history if "massieu/entropy_min" in entry}
    assert list(kept) == list(monitor.seen) == [0, 2, 4, 6]
    for step, entry in kept.items():
        numbers = {key: value for key, value in entry.items() if isinstance(value, float)}
        assert len(numbers) <= 20 < len(monitor.seen[step])
        where = entry["massieu/largest_logit_max_where"]
        layer, head = (int(numbers[f"massieu/largest_logit_{part}"]) for part in ("layer", "head"))
        assert where == f"layer{layer}/head{head}"
        record = monitor.seen[step]
        assert {key: numbers[key] for key in numbers if key in record}.items() <= record.items()


def test_accumulated_gradients_are_one_step(trainer: Callable):
    monitor = Seen(trained := model(), BATCH, every=1)
    trainer(trained, monitor.trainer_callback(), gradient_accumulation_steps=2, max_steps=3).train()
    assert list(monitor.seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [0.0, 0.01])
def test_a_step_that_trainer_does_not_log_has_no_loss_and_no_norm_after_clipping(trainer: Callable, most: float):
    witness = Witness()
    trainer(model(), witness, max_grad_norm=most, max_steps=4).train()
    monitor = Seen(trained := model(), BATCH, every=2)
    trainer(trained, monitor.trainer_callback(), logging_strategy="no", max_grad_norm=most, max_steps=4).train()
    assert list(monitor.seen) == [0, 2, 4]
    for step in (2, 4):
        record = monitor.seen[step]
        assert "massieu/loss" not in record and record["massieu/learning_rate"] > 0
        if most:
            assert "massieu/gradient_norm" not in record
        else:
            assert record["massieu/gradient_norm"] == pytest.approx(witness.logged[step]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("fp16", "most", "known"), [(True, 0.0, False), (False, 1.0, False), (False, 0.0, True)])
def test_gradients_that_are_clipped_or_still_have_the_loss_scale_give_no_norm(fp16: bool, most: float, known: bool):
    callback = Seen(trained := model(), BATCH, every=2).trainer_callback()
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    given = SimpleNamespace(fp16=fp16, max_grad_norm=most), SimpleNamespace(global_step=1), None
    callback.on_pre_optimizer_step(*given, model=trained, optimizer=torch.optim.SGD(trained.parameters(), 0.1))
    assert ("gradient_norm" in callback._extra) is known and callback._extra["learning_rate"] == 0.1


def test_a_callback_that_keeps_trainer_from_logging_loses_no_record(trainer: Callable):
    class Quiet(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_log = False
            return control

    monitor = Seen(trained := model(), BATCH, every=2)
    trainer(trained, monitor.trainer_callback(), Quiet(), max_steps=4, logging_steps=1).train()
    assert list(monitor.seen) == [0, 2, 4]
    assert all("massieu/learning_rate" in monitor.seen[step] for step in (2, 4))


@pytest.mark.slow
def test_a_resumed_training_continues_and_a_record_is_strict_json_in_trainers_own_state(
    trainer: Callable, tmp_path: Path
):
    path = tmp_path / "run.jsonl"
    whole = Seen(trained := model(), BATCH, every=2)
    trainer(
        trained, whole.trainer_callback(), max_steps=8, save_strategy="steps", save_steps=4, logging_steps=2
    ).train()
    state = json.loads(
        (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text(), parse_constant=pytest.fail
    )
    stored = {entry["step"]: entry for entry in state["log_history"] if "massieu/entropy_mean" in entry}
    assert list(stored) == [0, 2, 4, 6, 8]
    assert all(math.isfinite(stored[step]["massieu/loss"]) for step in (2, 4, 6, 8))
    again = Seen(trained := model(), BATCH, every=2, to=[path])
    resumed = trainer(trained, again.trainer_callback(), max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert list(again.seen) == [6, 8]
    assert {step: record["massieu/entropy_mean"] for step, record in again.seen.items()} == {
        step: whole.seen[step]["massieu/entropy_mean"] for step in (6, 8)
    }


@pytest.mark.slow
def test_with_its_trainer_its_trackers_get_the_summaries(trainer: Callable, tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Seen(trained := model(), BATCH, every=2)
    ran = trainer(trained, report_to="tensorboard", logging_steps=1)
    ran.add_callback(monitor.trainer_callback(ran))
    ran.train()
    [folder] = {path.parent for path in tmp_path.rglob("events.out.*")}
    board = events.EventAccumulator(str(folder)).Reload()
    for name in ("loss", "entropy_min"):
        found = {event.step: event.value for event in board.Scalars(f"train/massieu/{name}")}
        expected = {step: r[f"massieu/{name}"] for step, r in monitor.seen.items() if f"massieu/{name}" in r}
        assert found == pytest.approx(expected, rel=1e-6)
    assert 10 < len([tag for tag in board.Tags()["scalars"] if "massieu/" in tag]) <= 20
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
    from massieu.probing.monitor.trainer import MonitorTrainerCallback  # loads transformers' Trainer

    with pytest.raises(InputError, match=f"trainer must be a transformers.Trainer, {got}"):
        MonitorTrainerCallback(Seen(model(), BATCH), given)  # pyright: ignore
