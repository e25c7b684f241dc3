"""The one check of what fixed points, energies and modules are given: dense tensors of real numbers, and real numbers."""

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def told(value: object) -> str:
    """What an argument is, for an error's message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not is_dense(value):
        return f"a {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')} tensor"
    return f"a tensor of {value.dtype}"


def is_floating(value: object) -> bool:
    """Whether the value is a dense tensor of float16, bfloat16, float32 or float64."""
    return isinstance(value, Tensor) and is_dense(value) and value.dtype in FLOATS


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is neither sparse nor nested; compiled code may not ask, and is told that it is."""
    return torch.compiler.is_compiling() or (tensor.layout == torch.strided and not tensor.is_nested)


def floating(name: str, value: object) -> Tensor:
    """The value, if it is a dense tensor of float16, bfloat16, float32 or float64.

    Raises:
        TypeError: it is anything else.
    """
    if isinstance(value, Tensor) and is_floating(value):
        return value
    raise TypeError(f"{name} must be a floating-point tensor, got {told(value)}")


def need_device(owner: str, name: str, value: Tensor, *own: Tensor) -> None:
    """Raises ValueError if the value is on another kind of device than what belongs to `owner`."""
    for tensor in own:
        # A number is moved to where it is needed, unless it has no value.
        if tensor.device.type != value.device.type and (tensor.ndim > 0 or tensor.is_meta):
            raise ValueError(f"{owner} is on {tensor.device.type}, {name} on {value.device.type}: move one with .to")


def real(name: str, value: object) -> float:
    """The value, if it is a number.

    Raises:
        TypeError: it is none; a tensor is none either.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {told(value)}")
    return value


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number or a floating-point tensor as a tensor of that dtype, by default that of `like`, on its device.

    Raises:
        TypeError: it is neither.
        ValueError: it has no values, and `like` has.
    """
    dtype = like.dtype if dtype is None else dtype
    if not isinstance(value, Tensor):
        return torch.tensor(float(real(name, value)), dtype=dtype, device=like.device)
    if floating(name, value).is_meta and not like.is_meta:
        raise ValueError(f"{name} is on meta, where tensors have no values: move it with .to")
    return value.to(like.device, dtype)
