"""A monitor inside Lightning's Trainer, under either of Lightning's two package names."""

import math
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from massieu.errors import require_extra
from massieu.probing.monitor.callbacks import CallableMonitor, check_trained
from massieu.probing.monitor.norms import gradient_norm
from massieu.probing.monitor.optimizers import learning_rates, parameters_of
from massieu.probing.monitor.record import MonitorRecord

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _Hooks:
    """Calls a monitor before the first and after every so many optimiser steps, and logs summaries to the trainer's loggers.

    Whole records go to the monitor's own targets; from the first measured step on they are in ``trainer.callback_metrics``
    too, for early stopping. The loss is that of the latest batch; the gradient norm is taken before clipping, and is that of
    all optimisers which step in the batch. Where one batch makes several steps, the record bears the one that was due.

    Raises:
        InputError: when training begins: the monitor is of another model.
    """

    def __init__(self, monitor: CallableMonitor) -> None:
        self._monitor = monitor
        self._last_step = 0
        self._norms: dict[int, float] = {}  # by the optimiser's id
        self._rates: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on with the monitor's own model, or not at all; a resumed run continues, a new one is measured."""
        check_trained(self._monitor, pl_module, "Lightning")
        self._last_step = trainer.global_step
        self._norms.clear()
        if self._last_step == 0:
            self._measure(trainer, 0, {})

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients, not yet clipped, and learning rates of a batch that will bring a step that is due."""
        # The other optimisers may step in this batch too; of each the norm is taken as it steps.
        latest_step = trainer.global_step + len(trainer.optimizers)
        if self._latest_due(latest_step) != self._latest_due(self._last_step):
            if self._monitor.norms_are_known:
                self._take_norms(optimizer)
            self._rates = learning_rates(trainer.optimizers)

    def _take_norms(self, optimizer: Any) -> None:
        norm = gradient_norm(parameters_of([optimizer]))
        if norm is not None:
            self._norms[id(optimizer)] = norm
        if self._monitor.layer_norms is not None:
            self._monitor.layer_norms.take(parameters_of([optimizer]), id(optimizer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure where the batch brought a step that is due."""
        last_due = self._latest_due(self._last_step)
        self._last_step = trainer.global_step
        norms = list(self._norms.values())
        self._norms.clear()
        due = self._latest_due(self._last_step)
        if due == last_due:  # also where gradients were only accumulated
            return
        extra: dict[str, Any] = dict(self._rates)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            # Lightning has divided it, so that accumulated gradients are a mean.
            extra["loss"] = loss * trainer.accumulate_grad_batches
        if norms:
            extra["gradient_norm"] = math.hypot(*norms)
        record = self._measure(trainer, due, extra)
        if record is not None:
            pl_module.log_dict(dict(record), logger=False, on_step=True, on_epoch=False)

    def _latest_due(self, step: int) -> int:
        """The latest step up to this one that is due."""
        return step // self._monitor.every * self._monitor.every

    def _measure(self, trainer: Any, step: int, extra: dict[str, Any]) -> MonitorRecord | None:
        # The training step's own precision, as Lightning sets it.
        with trainer.precision_plugin.forward_context():
            record = self._monitor(step, **extra)
        if record is not None:
            for logger in trainer.loggers:
                logger.log_metrics(record.summary(), step=self._last_step)
        return record


@cache
def _class_of(package: str) -> type:
    base = require_extra(package, "lightning").Callback
    return type("MonitorLightningCallback", (_Hooks, base), {"__doc__": _Hooks.__doc__, "__module__": __name__})


def lightning_callback(monitor: CallableMonitor) -> Any:
    """A callback for a trainer of the package that the program uses: lightning's, or that of pytorch_lightning.

    Raises:
        MissingExtraError: neither is installed.
    """
    return _class_of(_package())(monitor)


def _package() -> str:
    """The package that the program has imported, or else one that is installed, or else the first."""
    for name in PACKAGES:
        if name in sys.modules:
            return name
    for name in PACKAGES:
        if find_spec(name.partition(".")[0]):
            return name
    return PACKAGES[0]
