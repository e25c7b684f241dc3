"""What writes a monitor's records to a target: JSON lines, Weights & Biases, trackio, TensorBoard, a function."""

import inspect
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.probing.monitor.lines_file import LinesFile

Writer = Callable[[Mapping[str, float], int], object]


class WandbRun:
    """A Weights & Biases run, whose own steps are left alone: the record's is a metric, ``massieu/step``, and its axis.

    A run counts calls of ``log`` where the program gives no step, and drops what is of an earlier step than the latest. A
    record therefore joins the row that the program's next call completes. It completes that row itself where the program
    has logged nothing since the record before.

    Args:
        target: The run, or the module `wandb` after its ``init``.
        prefix: What the names of a record begin with.

    Raises:
        InputError: the module has no run yet.
    """

    def __init__(self, target: Any, prefix: str) -> None:
        self._run = target.run if isinstance(target, ModuleType) else target
        if self._run is None:
            raise InputError("to is the module wandb without a run: call wandb.init first")
        self._axis = f"{prefix or 'massieu'}/step"
        if prefix:  # without one, the pattern would take in the program's own metrics
            self._run.define_metric(f"{prefix}/*", step_metric=self._axis)
        self._row: int | None = None

    def __call__(self, record: Mapping[str, float], step: int) -> None:
        """Add a record to the row that is open."""
        if self._run.step == self._row:
            self._run.log({}, commit=True)
        self._run.log({**record, self._axis: step}, commit=False)
        self._row = self._run.step


def writer_for(target: object, settings: Mapping[str, Any] | None = None) -> Writer:
    """What writes records to a target.

    Args:
        target: A path (JSON lines), a Weights & Biases run, an object with ``log(dict, step=)`` (the trackio module) or with
            ``add_scalar`` (TensorBoard), or a function of the record and the step.
        settings: What the header of JSON lines says of the monitor.

    Raises:
        InputError: the target is none of these, or cannot be written to.
    """
    if isinstance(target, str | os.PathLike):
        return LinesFile(target, settings or {})
    add_scalar = getattr(target, "add_scalar", None)
    if callable(add_scalar):
        return _scalar_writer(add_scalar, getattr(target, "flush", None))
    if callable(getattr(target, "define_metric", None)):
        return WandbRun(target, (settings or {}).get("prefix", ""))
    log = getattr(target, "log", None)
    if callable(log) and _accepts(log, {}, step=0):
        return lambda record, step: log(dict(record), step=step)
    if callable(target) and _accepts(target, {}, 0):
        return target
    got = "a function of other arguments" if callable(target) else described(target)
    raise InputError(
        f"to must be a path, an object with log(dict, step=) or add_scalar, or a function of record and step, got {got}"
    )


def _scalar_writer(add_scalar: Callable[..., object], flush: Callable[[], object] | None) -> Writer:
    def write(record: Mapping[str, float], step: int) -> None:
        for key, value in record.items():
            add_scalar(key, value, step)
        if flush is not None:
            flush()

    return write


def _accepts(function: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True
