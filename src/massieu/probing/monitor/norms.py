"""Euclidean norms of gradients and of weights, whole also where processes share them."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def gradient_norm(parameters: Iterable[Tensor]) -> float | None:
    """Norm of all gradients together, in float32 at the least; None if no parameter has one.

    Gradients that are sharded over processes count as a whole: all of these processes have to call.
    """
    return euclidean_norm(parameter.grad for parameter in parameters if parameter.grad is not None)


def euclidean_norm(tensors: Iterable[Tensor]) -> float | None:
    """Norm of all entries together, in float32 at the least; None without a tensor of real or complex numbers.

    Tensors that are sharded over processes count as a whole: all of these processes have to call.
    """
    # Only norms of one mesh of processes and one device can be stacked.
    norms_by_place: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        norm = _norm(tensor.detach())
        place = (getattr(tensor, "device_mesh", None), norm.device)
        norms_by_place.setdefault(place, []).append(norm)
    if not norms_by_place:
        return None
    totals = [torch.linalg.vector_norm(torch.stack(norms)) for norms in norms_by_place.values()]
    whole = [total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals]
    return math.hypot(*map(float, whole))


def _norm(tensor: Tensor) -> Tensor:
    entries = tensor.coalesce().values() if tensor.is_sparse else tensor
    if entries.is_complex():
        entries = torch.view_as_real(entries)
    # Squares of float16 overflow.
    precision = torch.promote_types(entries.dtype, torch.float32)
    return torch.linalg.vector_norm(entries, dtype=precision).to(precision)
