"""Checks of arguments, each with one sentence that names what was given and what is needed."""

import math
from numbers import Real

from torch import Tensor

from massieu.measures.value import values_are_readable


def told(value: object) -> str:
    """What was given, in words."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_tensors(**tensors: Tensor) -> None:
    """Raise a TypeError unless each is a tensor of real numbers, and a ValueError unless all are on one device."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            raise TypeError(f"{name} must be a tensor of real numbers, got {told(value)}")
    check_device(**tensors)


def check_device(**given: object) -> None:
    """Raise a ValueError unless all tensors are on one device; what is no tensor, or a number, is on all."""
    placed = {name: value.device for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
    placed |= {name: value.device for name, value in given.items() if isinstance(value, Tensor) and value.is_meta}
    if len(set(placed.values())) > 1:
        where = " and ".join(f"{name} on {device}" for name, device in placed.items())
        raise ValueError(f"all tensors must be on one device, got {where}")


def check_fit(**given: object) -> None:
    """Raise a ValueError unless the tensors' shapes can be broadcast to one, on one device; numbers fit everywhere."""
    shapes = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    longest = max((len(shape) for shape in shapes.values()), default=0)
    for place in range(longest):
        sizes = {shape[-1 - place] for shape in shapes.values() if len(shape) > place}
        if len(sizes - {1}) > 1:
            told_shapes = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"shapes must fit each other, got {told_shapes}")
    check_device(**given)


def check_values(**tensors: object) -> None:
    """Raise a ValueError at tensors of the meta device, where values are needed."""
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device")


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
    one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if isinstance(value, bool) or not (isinstance(value, Real) or one):
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
