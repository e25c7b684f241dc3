"""All the places to which a monitor writes its records."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from massieu.probing.monitor.processes import is_first_process
from massieu.probing.monitor.warning import warn
from massieu.probing.monitor.writers import Writer, writer_for


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
        self._outlets: list[_Outlet] = []
        if is_first_process():
            self._outlets = [_Outlet(_name(target), writer_for(target, settings)) for target in _listed(to)]

    def __call__(self, record: Mapping[str, float], step: int) -> None:
        """Write a record to every target."""
        if not is_first_process():
            return
        for outlet in self._outlets:
            try:
                outlet.writer(record, step)
            except Exception as error:
                if not outlet.has_failed:
                    outlet.has_failed = True
                    reason = f"{type(error).__name__}: {error}"
                    warn(
                        f"the record of step {step} could not be written to {outlet.name} ({reason}); training goes on"
                    )


@dataclass
class _Outlet:
    """A target and what writes to it."""

    name: str
    writer: Writer
    has_failed: bool = False


def _listed(to: object) -> Sequence[object]:
    if to is None:
        return ()
    return to if isinstance(to, list | tuple) else (to,)


def _name(target: object) -> str:
    if isinstance(target, str | os.PathLike):
        return str(os.fspath(target))
    return getattr(target, "__name__", None) or type(target).__name__
