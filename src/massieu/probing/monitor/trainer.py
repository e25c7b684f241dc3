"""A monitor inside transformers' Trainer."""

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.probing.monitor.callbacks import CallableMonitor, check_trained
from massieu.probing.monitor.norms import gradient_norm
from massieu.probing.monitor.optimizers import optimizers_of


class MonitorTrainerCallback(TrainerCallback):
    """Calls a monitor before the first and after every so many optimiser steps of a Trainer.

    What Trainer logs and prints is the same as without the callback. A step that is due is measured while Trainer logs it, and
    the record then has Trainer's own loss, learning rate and gradient norm before clipping. Where Trainer does not log the
    step, there is no loss, and a gradient norm only where Trainer does not clip, and not in float16.

    Summaries of the records are in ``trainer.state.log_history``, and with ``trainer`` in all it reports to; whole records
    go to the monitor's own targets.

    Args:
        monitor: Of the model that is trained.
        trainer: The Trainer whose trackers (``report_to``) get the summaries.

    Raises:
        InputError: ``trainer`` is no Trainer; when training begins: the monitor is of another model.
    """

    def __init__(self, monitor: CallableMonitor, trainer: Trainer | None = None) -> None:
        if trainer is not None and not isinstance(trainer, Trainer):
            raise InputError(f"trainer must be a transformers.Trainer, got {described(trainer)}")
        self._monitor = monitor
        self._trainer = trainer
        self._due: int | None = None  # a step that is due and not yet measured
        self._extra: dict[str, float] = {}  # Trainer's own numbers of that step

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Training goes on with the monitor's own model, or not at all; a new one is measured before its first step."""
        self._due = None
        self._extra = {}
        check_trained(self._monitor, model, "Trainer")
        if state.global_step == 0:
            self._due = 0
            self._measure(state)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Learning rate of a step that will be due, and its gradient norm where Trainer has not clipped.

        In float16 gradients still have the factor of the loss's scale, which is not known here: no norm is taken.
        """
        if (state.global_step + 1) % self._monitor.every != 0:
            return
        self._extra = {"learning_rate": optimizer.param_groups[0]["lr"]}
        if not self._monitor.norms_are_known or args.fp16:
            return
        if self._monitor.layer_norms is not None:
            [innermost] = optimizers_of(optimizer)
            self._monitor.layer_norms.take(model.parameters(), id(innermost))
        norm = None if args.max_grad_norm else gradient_norm(model.parameters())
        if norm is not None:
            self._extra["gradient_norm"] = norm

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step that is due is measured when Trainer logs it, or now if it does not."""
        if state.global_step % self._monitor.every:
            return
        self._due = state.global_step
        if not control.should_log:
            self._measure(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Measure, with what Trainer has logged."""
        if self._due != state.global_step or "loss" not in (logs or {}):
            return
        names = {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}
        for key, name in names.items():
            if key in logs:
                self._extra[name] = logs[key]
        self._measure(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Another callback may have kept Trainer from logging: what was due is measured before weights move."""
        self._measure(state)

    on_epoch_end = on_train_end = on_step_begin

    def _measure(self, state: Any) -> None:
        if self._due is None:
            return
        step = self._due
        extra = self._extra
        # Reporting calls back: by then nothing is due any more.
        self._due = None
        self._extra = {}
        if self._monitor.layer_norms is not None and "gradient_norm" not in extra:
            self._monitor.layer_norms.clear()  # they were taken after clipping, by a factor that is not known
        record = self._monitor(step, **extra)
        if record is None:
            return
        summary = record.summary()
        heads = {f"{name}_where": head for name, head in record.where.items()}
        state.log_history.append({**summary, **heads, "step": step})
        if self._trainer is not None:
            self._report(self._trainer, summary)

    @staticmethod
    def _report(trainer: Trainer, summary: dict[str, float]) -> None:
        """Hand a summary to the trackers alone: `Trainer.log` would print it, and average what subclasses have collected."""
        trackers = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, trackers):
                callback.on_log(trainer.args, trainer.state, trainer.control, model=trainer.model, logs=dict(summary))
