"""What the callbacks of training frameworks need of a monitor."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.monitor.record import MonitorRecord


class TakesGradients(Protocol):
    """To what a callback shows gradients before the optimiser's step; `LayerNorms` is one."""

    def take(self, trained: Iterable[Tensor], key: int = 0) -> None: ...

    def clear(self) -> None: ...


class CallableMonitor(Protocol):
    """A monitor as a callback uses it; `massieu.Monitor` is one."""

    model: nn.Module

    @property
    def every(self) -> int: ...

    @property
    def norms_are_known(self) -> bool: ...

    @property
    def layer_norms(self) -> TakesGradients | None: ...

    def __call__(self, step: int, **extra: Any) -> MonitorRecord | None: ...


def check_trained(monitor: CallableMonitor, model: nn.Module, by: str) -> None:
    """Check that the monitor's model is the one that is trained, or a part of it.

    Raises:
        InputError: it is another.
    """
    if not any(module is monitor.model for module in model.modules()):
        raise InputError(
            f"the monitor watches another {type(monitor.model).__name__} object than the model that {by} trains; "
            "make the monitor with the model object that is trained"
        )
