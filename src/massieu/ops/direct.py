"""Calls of attention whose tensors the CPU kernel takes as they are: nothing is laid out, and no backend is chosen.

A call of few tokens takes microseconds, most of them to check, to lay out and to choose. Here one look at the arguments shows
that every check passes and that the kernel would be given the caller's own tensors. Any other call goes the long way, on
which each argument is checked by itself, so that only there an error is raised.
"""

from typing import Any

import torch
from torch import Tensor

from massieu.foundation.arguments import FLOATS
from massieu.foundation.listening import listeners
from massieu.foundation.transforms import in_functorch
from massieu.ops.fused import CPU

LARGEST_SCALE = 1e38
"""It is finite in every dtype in which scores are computed."""


def suits(
    query: Any,
    key: Any,
    value: Any,
    scale: Any,
    is_causal: Any,
    query_offset: Any,
    backend: Any,
    others: tuple[Any, ...],
) -> bool:
    """Whether the long way would end at the CPU kernel, with the caller's own tensors, and raise nothing.

    Args:
        others: the other arguments, which must not be given.
    """
    for tensor in (query, key, value):
        # Subclasses go the long way, such as the tensors of a trace, which have no values.
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_nested or tensor.layout is not torch.strided:
            return False
    for other in others:
        if other is not None:
            return False
    shape = query.shape
    key_shape = key.shape
    if len(shape) != 4 or len(key_shape) != 4 or value.shape != key_shape or 0 in shape or 0 in key_shape:
        return False
    if shape[0] != key_shape[0] or shape[1] != key_shape[1] or shape[3] != key_shape[3]:
        return False
    dtype = query.dtype
    if dtype not in FLOATS or key.dtype is not dtype or value.dtype is not dtype:
        return False
    if is_causal is not False and is_causal is not True:
        return False
    if scale is not None and not (type(scale) is float and 0.0 < scale < LARGEST_SCALE):
        return False
    if type(query_offset) is not int or query_offset != 0 or type(backend) is not str or backend != "auto":
        return False
    return not (in_functorch() or torch.is_autocast_enabled("cpu") or listeners())


def results(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool, value_is_key: bool
) -> tuple[Tensor, ...]:
    """Output and log Z, in the caller's shape, of arguments that `suits` lets pass.

    Args:
        value_is_key: the value is the key, and only log Z is used.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    # Causality hides nothing of one key; without it the gradient of log Z is cheaper.
    high = 0 if is_causal and key.shape[2] > 1 else None
    return CPU.kernel_results(query, key, value, None, scale, None, high, value_is_key)
