"""A monitor inside Lightning's Trainer, under either of Lightning's two package names."""

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from massieu.errors import require_extra
from massieu.probing.monitor.training import Watching, check_trained, gradient_norm

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _Hooks:
    """Calls a monitor once in so many optimiser steps, and logs what it finds to the trainer's loggers.

    Records are in ``trainer.callback_metrics`` too, for early stopping. The loss is that of the latest batch; the gradient
    norm is taken before clipping. Where one batch makes several steps, the record bears the one that was due.

    Raises:
        InputError: when training begins: the monitor is of another model.
    """

    def __init__(self, monitor: Watching) -> None:
        self._monitor, self._last = monitor, 0
        self._known: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on with the monitor's own model, or not at all; a resumed run continues."""
        check_trained(self._monitor, pl_module, "Lightning")
        self._last, self._known = trainer.global_step, {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients, not yet clipped, and learning rate of a step that will be due."""
        if (trainer.global_step + 1) % self._monitor.every == 0:
            norm = gradient_norm(parameter for group in optimizer.param_groups for parameter in group["params"])
            self._known = {"learning_rate": optimizer.param_groups[0]["lr"]} | (
                {} if norm is None else {"gradient_norm": norm}
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure where the batch brought a step that is due."""
        every = self._monitor.every
        last, self._last = self._last, trainer.global_step
        if self._last // every == last // every:  # also where gradients were only accumulated
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided it, so that accumulated gradients are a mean.
        shown = {} if loss is None else {"loss": loss * trainer.accumulate_grad_batches}
        known, self._known = self._known | shown, {}
        # The training step's own precision, as Lightning sets it.
        with trainer.precision_plugin.forward_context():
            record = self._monitor(self._last // every * every, **known)
        if record is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(dict(record), step=self._last)
        pl_module.log_dict(dict(record), logger=False, on_step=True, on_epoch=False)


@cache
def _class_of(package: str) -> type:
    base = require_extra(package, "lightning").Callback
    return type("MonitorLightningCallback", (_Hooks, base), {"__doc__": _Hooks.__doc__, "__module__": __name__})


def lightning_callback(monitor: Watching) -> Any:
    """A callback for a trainer of the package that the program uses: lightning's, or that of pytorch_lightning.

    Raises:
        MissingExtraError: neither is installed.
    """
    used = [name for name in PACKAGES if name in sys.modules]
    installed = [name for name in PACKAGES if not used and find_spec(name.partition(".")[0])]
    return _class_of((*used, *installed, PACKAGES[0])[0])(monitor)
