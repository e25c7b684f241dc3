"""The real trackers: TensorBoard's files read back, Weights & Biases offline, trackio's database."""

import math
from pathlib import Path

import pytest

from massieu.probing.monitor.outlets import Outlets

pytestmark = pytest.mark.medium
RECORDS = {
    0: {"massieu/loss": 2.5, "massieu/layer0/entropy_mean": 1.25},
    100: {"massieu/loss": math.nan, "massieu/layer0/entropy_mean": 1.5},
    200: {"massieu/loss": math.inf, "massieu/layer0/entropy_mean": 0.75},
}


def write(target: object) -> None:
    outlets = Outlets(target, {"prefix": "massieu"})
    for step, record in RECORDS.items():
        outlets(record, step)


def test_tensorboard_has_every_number_at_its_step_before_its_writer_is_closed(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = pytest.importorskip("torch.utils.tensorboard")
    write(board.SummaryWriter(str(tmp_path)))
    found = events.EventAccumulator(str(tmp_path)).Reload()
    for key in RECORDS[0]:
        values = {event.step: event.value for event in found.Scalars(key)}
        assert values == pytest.approx({step: record[key] for step, record in RECORDS.items()}, nan_ok=True)


def test_a_run_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline", settings=wandb.Settings(x_disable_stats=True))
    write(run)
    # A row is held until the next one, so that other numbers can join it; the end sends the last.
    assert [run.summary[key] for key in ("massieu/step", "massieu/layer0/entropy_mean")] == [100, 1.5]
    run.finish()
    [log] = tmp_path.rglob("run-*.wandb")
    assert log.stat().st_size > 0


def test_trackios_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    trackio.init(project="test", name="run", embed=False)
    write(trackio)
    trackio.finish()
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    logs = {entry["step"]: entry for entry in storage.get_logs("test", "run")}
    assert {step: entry["massieu/layer0/entropy_mean"] for step, entry in logs.items()} == {
        0: 1.25,
        100: 1.5,
        200: 0.75,
    }
