"""What functions of populations are given: one clear error before work is done."""

import math

import torch
from torch import Tensor

from massieu.measures import Gaussian
from massieu.measures.value import values_are_readable


def need_tensors(**given: object) -> None:
    """Raise unless each is a floating-point tensor.

    Raises:
        TypeError: one is not; the message has its name.
    """
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")


def need_one_device(**given: Tensor) -> None:
    """Raise unless all tensors are on one device.

    Raises:
        ValueError: they are not; the message has their names and devices.
    """
    if len({value.device for value in given.values()}) > 1:
        where = " and ".join(f"{name} on {value.device}" for name, value in given.items())
        raise ValueError(f"all tensors must be on one device, got {where}")


def need_values(**given: Tensor) -> None:
    """Raise at tensors of the meta device, where values are needed.

    Raises:
        ValueError: one has no values; the message has its name.
    """
    for name, value in given.items():
        if value.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device")


def need_numbers(**given: object) -> None:
    """Raise unless each is a finite number.

    Raises:
        TypeError: one is no number; the message has its name.
        ValueError: one is NaN or infinite.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def need_finite(**given: Tensor | float) -> None:
    """Raise unless each is a finite number, or a tensor of them as far as values can be read.

    Raises:
        TypeError: one is neither a number nor a tensor; the message has its name.
        ValueError: one has a NaN or an infinity.
    """
    for name, value in given.items():
        if isinstance(value, Tensor):
            if values_are_readable(value) and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} must be finite, got a tensor with a NaN or an infinity")
        else:
            need_numbers(**{name: value})


def need_gaussians(**given: object) -> None:
    """Raise unless each is a Gaussian law.

    Raises:
        TypeError: one is not; the message has its name.
    """
    for name, law in given.items():
        if not isinstance(law, Gaussian):
            raise TypeError(f"{name} must be a massieu.measures.Gaussian, got {type(law).__name__}")


def need_integers(**given: object) -> None:
    """Raise unless each is an integer.

    Raises:
        TypeError: one is not; the message has its name.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
