"""Where a monitor's records go: JSON lines, Weights & Biases, trackio, TensorBoard, a function."""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from io import FileIO
from types import ModuleType
from typing import Any

import torch.distributed as dist

import massieu
from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.foundation.printable import visible
from massieu.storage.record_lines import differing, header_line, read_header, record_line
from massieu.storage.writing import check_name, explaining

Writer = Callable[[Mapping[str, float], int], object]


class LinesFile:
    """JSON lines, appended: each record is one write to the system, so that a kill can cut no line but the last.

    The system may end a write between two pages of memory where its process is killed. `read_run` leaves such a line out
    and says so; the next record begins a line of its own.

    A file that has lines already is gone on with. Its header is of the run that began it; where this run's settings are
    others, a warning names them.

    Args:
        path: The file; its folder is made.
        settings: What the header says of the monitor.

    Raises:
        InputError: no such file can be written.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path, self._settings = check_name(path), dict(settings)
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; records need the name of a file")
        with explaining(f"cannot write records to {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._opened() as file:
                begun = os.fstat(file.fileno()).st_size > 0
        if begun:
            self._compare(read_header(self.path))

    def __call__(self, record: Mapping[str, float], step: int) -> None:
        """Append a record.

        Raises:
            OSError: it could not be written, or not as a whole.
        """
        line = record_line(step, record, [alarm.key for alarm in getattr(record, "alarms", ())])
        with self._opened() as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                line = header_line(massieu.__version__, self._settings) + line
            elif not self._ends_a_line(file):
                line = "\n" + line
            data = line.encode()
            if (written := file.write(data)) != len(data):
                raise OSError(f"{written} of {len(data)} bytes of a record were written")

    def _opened(self) -> Any:
        # Unbuffered: one call of `write` is one of the system's.
        return closing(FileIO(self.path, "a+"))

    @staticmethod
    def _ends_a_line(file: FileIO) -> bool:
        """Whether what is there is whole: the latest write of a run before may have been cut."""
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

    def _compare(self, before: Mapping[str, Any]) -> None:
        if other := differing(before, self._settings, ("prefix",)):
            message = f"massieu.Monitor: {self.path} has records of another run: {other}"
            warnings.warn(visible(message), stacklevel=5)


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
    if callable(scalar := getattr(target, "add_scalar", None)):
        return _scalars(scalar, getattr(target, "flush", None))
    if callable(getattr(target, "define_metric", None)):
        return WandbRun(target, (settings or {}).get("prefix", ""))
    if callable(log := getattr(target, "log", None)) and _takes(log, {}, step=0):
        return lambda record, step: log(dict(record), step=step)
    if callable(target) and _takes(target, {}, 0):
        return target
    got = "a function of other arguments" if callable(target) else described(target)
    raise InputError(
        f"to must be a path, an object with log(dict, step=) or add_scalar, or a function of record and step, got {got}"
    )


def _scalars(add_scalar: Callable[..., object], flush: Callable[[], object] | None) -> Writer:
    def write(record: Mapping[str, float], step: int) -> None:
        for key, value in record.items():
            add_scalar(key, value, step)
        if flush is not None:
            flush()

    return write


def _takes(function: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


class Outlets:
    """All the targets of a monitor. One that fails is warned of once and tried again; training goes on.

    Of several processes only the first writes.

    Args:
        to: One target of `writer_for`, or a list or tuple of them.
        settings: What the header of JSON lines says of the monitor.

    Raises:
        InputError: a target cannot be written to.
    """

    def __init__(self, to: object, settings: Mapping[str, Any]) -> None:
        targets: Sequence[object] = to if isinstance(to, list | tuple) else () if to is None else (to,)
        self._writers = [(_name(target), writer_for(target, settings)) for target in targets] if is_first() else []
        self._failed: set[int] = set()

    def __call__(self, record: Mapping[str, float], step: int) -> None:
        """Write a record to every target."""
        for place, (name, writer) in enumerate(self._writers if is_first() else ()):
            try:
                writer(record, step)
            except Exception as error:
                if place not in self._failed:
                    self._failed.add(place)
                    reason = f"{type(error).__name__}: {error}"
                    said = f"the record of step {step} could not be written to {name} ({reason}); training goes on"
                    warnings.warn(visible(f"massieu.Monitor: {said}"), stacklevel=4)


def _name(target: object) -> str:
    if isinstance(target, str | os.PathLike):
        return str(os.fspath(target))
    return getattr(target, "__name__", None) or type(target).__name__


def is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)
