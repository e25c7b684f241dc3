"""How far rounding may move a result: from the dtype and the problem's own condition, not from what a processor printed."""

from collections.abc import Callable

import torch
from torch import Tensor

_DRAWS = 8
_STAGES = 4
"""Roundings on the way are like a few of the numbers that went in: each stage of a computation adds one set."""


def rounding_error(function: Callable[..., Tensor], *tensors: Tensor, dtype: torch.dtype) -> Tensor:
    """A bound on what `dtype` does to `function(*tensors)`, entry by entry, from float64 alone.

    Every number given is moved by a rounding of `dtype` up or down, at random: the largest move of the result, its
    typical size over all entries added, since an entry may be lucky, is the condition number times one rounding.
    """
    generator = torch.Generator().manual_seed(0)
    exact = [tensor.detach().double() for tensor in tensors]
    with torch.no_grad():
        result = function(*exact)
        largest = torch.zeros_like(result)
        for _ in range(_DRAWS):
            moved = [
                tensor * (1 + torch.finfo(dtype).eps * (2.0 * torch.randint(2, tensor.shape, generator=generator) - 1))
                for tensor in exact
            ]
            largest = torch.maximum(largest, (function(*moved) - result).abs())
    return _STAGES * (largest + largest.square().mean().sqrt())
