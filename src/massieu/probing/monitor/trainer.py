"""A monitor inside transformers' Trainer."""

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.probing.monitor.training import Watching, check_trained, gradient_norm


class MonitorTrainerCallback(TrainerCallback):
    """Calls a monitor once in so many optimiser steps of a Trainer.

    At a step that is due the callback asks Trainer to log, and measures while it does, so that loss, learning rate and the
    gradient norm before clipping are Trainer's own. With ``logging_strategy="no"`` there is no loss, and the gradient norm
    is that after clipping; in float16 without clipping there is none. Records are in ``trainer.state.log_history`` too,
    and with ``trainer`` in all it reports to.

    Args:
        monitor: Of the model that is trained.
        trainer: The Trainer through which records are reported as well.

    Raises:
        InputError: ``trainer`` is no Trainer; when training begins: the monitor is of another model.
    """

    def __init__(self, monitor: Watching, trainer: Trainer | None = None) -> None:
        if trainer is not None and not isinstance(trainer, Trainer):
            raise InputError(f"trainer must be a transformers.Trainer, got {described(trainer)}")
        self._monitor, self._trainer = monitor, trainer
        self._due: int | None = None
        self._known: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Training goes on with the monitor's own model, or not at all."""
        self._due, self._known = None, {}
        check_trained(self._monitor, model, "Trainer")

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Gradients and learning rate of a step that will be due; Trainer has clipped the gradients.

        In float16 without clipping they still have the factor of the loss's scale, which is not known here: no norm is taken.
        """
        if (state.global_step + 1) % self._monitor.every == 0:
            norm = None if args.fp16 and not args.max_grad_norm else gradient_norm(model.parameters())
            self._known = {"learning_rate": optimizer.param_groups[0]["lr"]} | (
                {} if norm is None else {"gradient_norm": norm}
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A step that is due is measured when Trainer logs it, or now if it never logs."""
        if state.global_step % self._monitor.every:
            return None
        self._due = state.global_step
        if args.logging_strategy == IntervalStrategy.NO:
            self._measure(state)
            return None
        control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Measure, with what Trainer has logged."""
        if self._due != state.global_step or "loss" not in (logs or {}):
            return
        names = {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}
        self._known |= {name: logs[key] for key, name in names.items() if key in logs}
        self._measure(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Another callback may have kept Trainer from logging: what was due is measured before weights move."""
        self._measure(state)

    on_epoch_end = on_train_end = on_step_begin

    def _measure(self, state: Any) -> None:
        if self._due is None:
            return
        # Reporting calls back: what was due is done by then.
        step, known, self._due, self._known = self._due, self._known, None, {}
        record = self._monitor(step, **known)
        if record is None:
            return
        if self._trainer is not None:
            self._trainer.log(dict(record))
        else:
            state.log_history.append({**record, "step": step})
