"""How far rounding may move a result: from the dtype and the problem's own condition, not from what a processor printed."""

from collections.abc import Callable

import torch
from torch import Tensor

_DRAWS = 8
_STAGES = 4
"""Roundings on the way are like a few of the numbers that went in: each stage of a computation adds one set."""


FAST_EXPONENTIAL = 1.2e-4
"""How far a logarithm of summed exponentials may be off, in nats, where PyTorch's CPU attention computes in half precision.

Its vectors then take exp x = 2^i·2^f by a cubic in f (`fexp_u20` in ATen/cpu/vec; rows shorter than a vector take the
library's exponential, so that the processor's vectors decide). The best cubic for 2^f on [0, 1] is off by 1.07e-4
(`tests/test_tools.py` computes it). The exponent's bits are a float32 below 2³¹, whose rounding is 64·2⁻²³ = 7.6e-6.
A sum of positive numbers is off by no more than its worst term, relatively, and so is its logarithm in nats.
"""


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
