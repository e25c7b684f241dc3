"""What the callbacks of both trainers need: the norm of all gradients, and whose model it is."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from massieu.errors import InputError


class Watching(Protocol):
    """What a callback needs of a monitor; `massieu.Monitor` is one."""

    every: int
    model: nn.Module

    def __call__(self, step: int, **beside: Any) -> dict[str, float] | None: ...


def gradient_norm(parameters: Iterable[Tensor]) -> float | None:
    """Euclidean norm of all gradients together, in float32 at the least; None where there is none.

    Gradients that are sharded over processes count as a whole: every process of theirs has to ask.
    """
    groups: dict[Any, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is not None:
            known = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
            known = torch.view_as_real(known) if known.is_complex() else known
            precision = torch.promote_types(known.dtype, torch.float32)
            norm = torch.linalg.vector_norm(known, dtype=precision).to(precision)
            groups.setdefault((getattr(gradient, "device_mesh", None), norm.device), []).append(norm)
    totals = [torch.linalg.vector_norm(torch.stack(norms)) for norms in groups.values()]
    whole = [total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals]
    return math.hypot(*map(float, whole)) if whole else None


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
