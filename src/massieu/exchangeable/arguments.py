"""Checks of arguments, each with one sentence that names what was given and what is needed."""

import math
from numbers import Real

from torch import Tensor

from massieu.measures.value import values_are_readable


def told(value: object) -> str:
    """What was given, in words."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_tensors(**tensors: Tensor) -> None:
    """Raise a TypeError unless each is a tensor of real numbers."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            raise TypeError(f"{name} must be a tensor of real numbers, got {told(value)}")


def check_finite(**tensors: Tensor) -> None:
    """Raise a ValueError at NaN and infinities, where values can be read."""
    for name, value in tensors.items():
        if values_are_readable(value) and not bool(value.isfinite().all()):
            raise ValueError(f"{name} must be finite, got {value[~value.isfinite()][0].item()}")


def check_log_probabilities(**tensors: Tensor) -> None:
    """Raise a ValueError at NaN and +inf, where values can be read."""
    for name, value in tensors.items():
        if values_are_readable(value) and not bool((value < math.inf).all()):
            raise ValueError(f"{name} must be finite or −inf, got NaN or +inf")


def check_number(name: str, value: float, least: float | None = 0.0) -> None:
    """Raise unless it is one finite number, at least `least`, or (None) positive."""
    if isinstance(value, bool) or not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise TypeError(f"{name} must be a number, got {told(value)}")
    if isinstance(value, Tensor) and not values_are_readable(value):
        return
    if not (0 < value < math.inf if least is None else least <= value < math.inf):
        wanted = (
            "positive and finite"
            if least is None
            else f"finite and at least {least:g}".removesuffix(" and at least -inf")
        )
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_whole(name: str, value: int, least: int | None = None) -> None:
    """Raise unless it is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {told(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value}")
