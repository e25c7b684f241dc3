"""What samplers check of what they are given."""

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def floating(name: str, value: object) -> Tensor:
    """The value, if it is a dense tensor of real floating-point numbers that have values.

    Raises:
        TypeError: it is anything else.
        ValueError: it is on the meta device.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.dtype not in _FLOATS:
        given = type(value).__name__
        if isinstance(value, Tensor):
            dense = value.layout == torch.strided and not value.is_nested
            given = f"a tensor of {value.dtype}" if dense else "a sparse or nested tensor"
        raise TypeError(f"{name} must be a floating-point tensor, got {given}")
    if value.is_meta:
        raise ValueError(f"{name} is on meta, where tensors have no values")
    return value
