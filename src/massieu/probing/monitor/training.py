"""What a monitor reads of training: the optimisers, the norm of all gradients, and whose model it is."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.probing.monitor.record import MonitorRecord


class TakesGradients(Protocol):
    """What a callback shows gradients to, before the optimiser's step; `LayerNorms` is one."""

    def take(self, trained: Iterable[Tensor], key: int = 0) -> None: ...

    def clear(self) -> None: ...


class Watching(Protocol):
    """What a callback needs of a monitor; `massieu.Monitor` is one."""

    model: nn.Module

    @property
    def every(self) -> int: ...

    @property
    def norms_are_known(self) -> bool: ...

    @property
    def layer_norms(self) -> TakesGradients | None: ...

    def __call__(self, step: int, **beside: Any) -> MonitorRecord | None: ...


def gradient_norm(parameters: Iterable[Tensor]) -> float | None:
    """Euclidean norm of all gradients together, in float32 at the least; None where there is none.

    Gradients that are sharded over processes count as a whole: every process of theirs has to ask.
    """
    return euclidean_norm(parameter.grad for parameter in parameters if parameter.grad is not None)


def euclidean_norm(tensors: Iterable[Tensor]) -> float | None:
    """Of all entries together, in float32 at the least; None where there is none. Whole numbers are left out.

    Tensors that are sharded over processes count as a whole: every process of theirs has to ask.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            known = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
            known = torch.view_as_real(known) if known.is_complex() else known
            precision = torch.promote_types(known.dtype, torch.float32)
            norm = torch.linalg.vector_norm(known, dtype=precision).to(precision)
            groups.setdefault((getattr(tensor, "device_mesh", None), norm.device), []).append(norm)
    totals = [torch.linalg.vector_norm(torch.stack(norms)) for norms in groups.values()]
    whole = [total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals]
    return math.hypot(*map(float, whole)) if whole else None


def optimizers_of(given: object) -> list[Optimizer]:
    """The optimisers that take the steps, each once: one or a sequence of them, wrappers such as accelerate's looked through.

    Raises:
        InputError: something else is given.
    """
    if given is None:
        return []
    found: list[Optimizer] = []
    for each in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(each, Optimizer):
            raise InputError(f"optimizer must be a torch.optim.Optimizer or a list of these, got {described(each)}")
        found.append(_innermost(each))
    return list(dict.fromkeys(found))


def groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of several optimisers, one after another."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """All parameters that the optimisers train, each once."""
    return list(dict.fromkeys(parameter for group in groups(optimizers) for parameter in group["params"]))


def learning_rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """``learning_rate`` of the first group, then ``learning_rate_1`` and so on."""
    rates = [float(group["lr"]) for group in groups(optimizers)]
    return {f"learning_rate_{index}" if index else "learning_rate": rate for index, rate in enumerate(rates)}


def _innermost(optimizer: Optimizer) -> Optimizer:
    """What a wrapper hands its step to; the wrapper itself may have no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


CLIPPED_RECORDS = 3
CLIPPED_WITHIN = 1e-4
"""Norms of so many records that equal the greatest to this share of it are taken for clipped.

`torch.nn.utils.clip_grad_norm_` with bound c leaves c·‖g‖/(‖g‖ + 1e-6), which is c to 1e-5 from ‖g‖ = .1 on, and rounding
adds some 1e-6. No norm exceeds c, so that clipped ones are the greatest. A norm that is not clipped and varies by a tenth is
so near the greatest by chance once in a thousand records, and two of three are once in a million.
"""


class ClippingDoubt:
    """Whether gradient norms look as if they were taken after clipping: the greatest of them comes again and again."""

    def __init__(self) -> None:
        self._greatest, self._near, self._told = 0.0, 0, False

    def __call__(self, norm: float) -> bool:
        """Whether the norms so far, with this one, look clipped for the first time."""
        if self._told or not 0 < norm < math.inf:
            return False
        if norm > self._greatest * (1 + CLIPPED_WITHIN):
            self._near = 0
        self._greatest = max(self._greatest, norm)
        self._near += norm >= self._greatest * (1 - CLIPPED_WITHIN)
        self._told = self._near == CLIPPED_RECORDS
        return self._told


def check_trained(monitor: Watching, model: nn.Module, by: str) -> None:
    """That the monitor's model is the one that is trained, or a part of it.

    Raises:
        InputError: it is another.
    """
    if not any(module is monitor.model for module in model.modules()):
        raise InputError(
            f"the monitor watches another {type(monitor.model).__name__} object than the model that {by} trains; "
            "make the monitor with the model object that is trained"
        )
