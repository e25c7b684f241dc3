"""A monitor inside Lightning's Trainer: one call an optimiser step, gradients before clipping, loggers, resumed runs."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.probing.monitor_seen import Seen
from torch import nn
from torch.nn import functional as F

import massieu
from massieu import InputError
from massieu.errors import MissingExtraError
from massieu.probing.monitor import lightning as under_test

pytestmark = pytest.mark.medium
LIGHTNING, PYTORCH_LIGHTNING = under_test.PACKAGES


@pytest.fixture(params=[LIGHTNING, pytest.param(PYTORCH_LIGHTNING, marks=pytest.mark.slow)])
def pl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Lightning under either name, as the one that the program has imported."""
    package = pytest.importorskip(request.param)
    for other in under_test.PACKAGES:
        if other != request.param:
            monkeypatch.delitem(sys.modules, other, raising=False)
    return package


def module_of(pl: ModuleType, automatic: bool = True) -> Any:
    """A language model of four letters with one attention layer, as Lightning trains it."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            torch.manual_seed(0)
            self.body = Body()
            self.norms: dict[int, float] = {}
            self.own_norms: dict[int, float] = {}
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if automatic:
                return self.loss(*batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(*batch))
                optimizer.step()
            return None

        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(self.body(tokens).flatten(0, 1), tokens.flatten())
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.body(*batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [each.grad.double() for each in self.parameters() if each.grad is not None]
            norm = math.sqrt(sum(float((each**2).sum()) for each in gradients))
            self.norms[self.trainer.global_step + 1] = norm
            if not automatic:  # each optimiser has one parameter
                [own] = optimizer.param_groups[0]["params"]
                self.own_norms[self.trainer.global_step + 1] = float(own.grad.double().norm())

        def configure_optimizers(self) -> Any:
            if automatic:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            read = self.body.read
            return [torch.optim.SGD([each], lr=rate) for each, rate in ((read.weight, 1e-2), (read.bias, 2e-2))]

    return Module()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.read = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.read(hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0])


BATCH = torch.arange(12).view(2, 6) % 4


def loader(count: int = 48) -> torch.utils.data.DataLoader:
    tokens = torch.randint(0, 4, (count, 6), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)


@pytest.fixture
def fit(pl: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    def fitted(module: Any, *callbacks: Any, path: str | None = None, **settings: Any) -> Any:
        chosen = {"max_steps": 6, "logger": False, "log_every_n_steps": 1, "enable_checkpointing": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = pl.Trainer(default_root_dir=str(tmp_path), callbacks=list(callbacks), **(quiet | chosen | settings))
        trainer.fit(module, loader(), loader(8), ckpt_path=path)
        return trainer

    return fitted


@pytest.mark.slow
def test_once_in_so_many_optimiser_steps_before_clipping(pl: ModuleType, fit: Callable):
    module = module_of(pl)
    monitor = Seen(module.body, BATCH, every=2)
    trainer = fit(
        module, monitor.lightning_callback(), gradient_clip_val=1e-3, num_sanity_val_steps=2, val_check_interval=1
    )
    assert list(monitor.seen) == [0, 2, 4, 6]
    for step in (2, 4, 6):
        record = monitor.seen[step]
        assert record["massieu/gradient_norm"] == pytest.approx(module.norms[step], rel=1e-5)
        assert record["massieu/gradient_norm"] > 0.01
        assert record["massieu/learning_rate"] == 1e-2
        assert math.isfinite(record["massieu/loss"])
    assert float(trainer.callback_metrics["massieu/loss"]) == pytest.approx(monitor.seen[6]["massieu/loss"])


@pytest.mark.parametrize("automatic", [True, False])
def test_norms_by_layer_are_those_before_clipping(pl: ModuleType, fit: Callable, automatic: bool):
    """All of them together have the norm of all gradients, also of those of several optimisers."""
    module = module_of(pl, automatic)
    monitor = Seen(module.body, BATCH, every=2, norms=True)
    fit(module, monitor.lightning_callback(), **({"gradient_clip_val": 1e-3} if automatic else {}))
    for step in (2, 4, 6):
        norms = [v for k, v in monitor.seen[step].items() if k.count("/") > 1 and k.endswith("/gradient_norm")]
        norm = module.norms[step] if automatic else math.hypot(module.own_norms[step - 1], module.own_norms[step])
        assert math.hypot(*norms) == pytest.approx(norm, rel=1e-5)
        assert len(norms) == (2 if automatic else 1)  # the manual ones train the readout alone


def test_the_first_record_is_of_the_model_before_its_first_step(pl: ModuleType, fit: Callable):
    module = module_of(pl)
    monitor = Seen(module.body, BATCH, every=3)
    fit(module, monitor.lightning_callback())
    assert list(monitor.seen) == [0, 3, 6]
    assert monitor.seen[0] == massieu.Monitor(module_of(pl).body, BATCH)(0) != monitor.seen[3]


def test_accumulated_gradients_are_one_step_and_the_loss_is_whole(pl: ModuleType, fit: Callable):
    module = module_of(pl)
    monitor = Seen(module.body, BATCH, every=1)
    fit(module, monitor.lightning_callback(), accumulate_grad_batches=3, max_steps=4)
    assert list(monitor.seen) == [0, 1, 2, 3, 4]
    assert [monitor.seen[step]["massieu/loss"] for step in (1, 2, 3, 4)] == pytest.approx(module.losses[2::3], rel=1e-6)


def test_several_optimisers_of_one_batch_lose_no_step(pl: ModuleType, fit: Callable):
    module = module_of(pl, automatic=False)
    monitor = Seen(module.body, BATCH, every=3)
    fit(module, monitor.lightning_callback(), max_steps=12)  # two steps a batch
    assert list(monitor.seen) == [0, 3, 6, 9, 12]
    assert all("massieu/loss" not in record for record in monitor.seen.values())
    for step in (3, 6, 9, 12):
        first = (step - 1) // 2 * 2 + 1  # of the batch, whose steps are two
        norm = math.hypot(module.own_norms[first], module.own_norms[first + 1])
        assert monitor.seen[step]["massieu/gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert monitor.seen[step]["massieu/learning_rate_1"] == 2e-2


def test_training_is_bitwise_the_same(pl: ModuleType, fit: Callable):
    plain, watched = module_of(pl), module_of(pl)
    fit(plain)
    fit(watched, Seen(watched.body, BATCH, every=1).lightning_callback())
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), watched.parameters(), strict=True))


def test_a_resumed_run_continues(pl: ModuleType, fit: Callable, tmp_path: Path):
    first, second = module_of(pl), module_of(pl)
    begun = Seen(first.body, BATCH, every=2)
    trainer = fit(first, begun.lightning_callback(), max_steps=5)
    trainer.save_checkpoint(str(tmp_path / "at5.ckpt"))
    resumed = Seen(second.body, BATCH, every=2)
    fit(second, resumed.lightning_callback(), max_steps=8, path=str(tmp_path / "at5.ckpt"))
    assert (list(begun.seen), list(resumed.seen)) == ([0, 2, 4], [6, 8])


def test_every_logger_gets_the_summaries(pl: ModuleType, fit: Callable, tmp_path: Path):
    module = module_of(pl)
    monitor = Seen(module.body, BATCH, every=3)
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = pl.loggers.TensorBoardLogger(str(tmp_path / "board"))
    # Lightning's own period, 50 steps, would leave all but the first out.
    fit(
        module,
        monitor.lightning_callback(),
        logger=[board, pl.loggers.CSVLogger(str(tmp_path / "table"))],
        log_every_n_steps=50,
    )
    found = events.EventAccumulator(board.log_dir).Reload().Scalars("massieu/loss")
    assert {event.step: event.value for event in found} == pytest.approx(
        {step: monitor.seen[step]["massieu/loss"] for step in (3, 6)}
    )
    [table] = (tmp_path / "table").rglob("metrics.csv")
    header, *lines = table.read_text().splitlines()
    assert len(lines) == 3
    assert 10 < header.count("massieu/") <= 20 < len(monitor.seen[0])


def test_the_training_steps_precision_is_the_monitors(pl: ModuleType, fit: Callable):
    module = module_of(pl)

    class Seeing(Seen):
        def __call__(self, step: int, **beside: Any) -> Any:
            assert torch.is_autocast_enabled("cpu")
            return super().__call__(step, **beside)

    monitor = Seeing(module.body, BATCH, every=2)
    fit(module, monitor.lightning_callback(), precision="bf16-mixed", max_steps=2)
    assert list(monitor.seen) == [0, 2]


def test_another_model_is_refused_when_training_begins(pl: ModuleType, fit: Callable):
    with pytest.raises(
        InputError, match="the monitor watches another Body object than the model that Lightning trains"
    ):
        fit(module_of(pl), Seen(Body(), BATCH, every=2).lightning_callback())


def test_without_lightning_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # pyright: ignore - as if it were not installed
        monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    under_test._class_of.cache_clear()
    with pytest.raises(
        MissingExtraError, match=r'is not installed; install it with: pip install "massieu\[lightning\]"'
    ):
        Seen(Body(), BATCH).lightning_callback()
