"""The one set of checks of arguments, and of the phrases that their errors use.

A function with a noun for its name (`floating`, `number`, `flag`) returns the checked value; one that is named ``check_…``
only raises. A TypeError says that something is of a wrong kind, a ValueError that it is out of range; each is one sentence
that names what was given and what is needed. Values are read by the rule of `foundation.transforms`: also inside `vmap`.

Tensors that a value is built from pass `real_tensor`, which takes numbers and lists too and converts integers. Tensors on
hot paths pass `floating`, which takes them as they are.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from massieu.foundation.transforms import all_true, unwrapped, values_are_readable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The floating-point dtypes that computations accept; float8 is not among them."""
WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The dtypes of whole numbers."""

Kind = TypeVar("Kind")
_LONGEST_REPR = 60
"""Characters of a value's `repr` that fit an error's message; a longer one is replaced by the type's name."""
_ARRAYS = (np.ndarray, np.generic)  # a tuple: compiled code cannot make a union of the two
_INTEGER_LIMIT = 1 << 63
"""Above int64, the widest integer that PyTorch holds."""


def described(value: object) -> str:
    """A value in an error's message: numbers and short texts as they are, tensors and arrays by dtype, others by type."""
    if isinstance(value, Tensor):
        if _is_dense(value):
            return f"a tensor of {value.dtype}"
        if value.is_nested:
            return "a nested tensor"
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if isinstance(value, np.ndarray):
        return f"ndarray of {value.dtype} and shape {value.shape}"
    entries = value if isinstance(value, tuple) else (value,)
    if all(isinstance(entry, int | float | str | None) for entry in entries):
        text = repr(value)
        if len(text) <= _LONGEST_REPR:
            return text
    return type(value).__name__


# Tensors.


def floating(name: str, value: object, *, or_boolean: bool = False) -> Tensor:
    """The value, if it is a dense tensor of float16, bfloat16, float32 or float64, or boolean, if `or_boolean`.

    Raises:
        TypeError: it is anything else.
    """
    allowed = (*FLOATS, torch.bool) if or_boolean else FLOATS
    if isinstance(value, Tensor) and _is_dense(value) and value.dtype in allowed:
        return value
    kind = "boolean or floating-point" if or_boolean else "floating-point"
    # float8 is floating-point too, so that the message has to say which widths are meant.
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in FLOATS:
        kind = f"16-, 32- or 64-bit {kind}"
    raise TypeError(f"{name} must be a {kind} tensor, got {described(value)}")


def boolean(name: str, value: object) -> Tensor:
    """The value, if it is a dense boolean tensor; else a TypeError."""
    if isinstance(value, Tensor) and _is_dense(value) and value.dtype == torch.bool:
        return value
    raise TypeError(f"{name} must be a boolean tensor, got {described(value)}")


def integers(name: str, value: object) -> Tensor:
    """The value, if it is a dense tensor of whole numbers; else a TypeError."""
    if isinstance(value, Tensor) and _is_dense(value) and value.dtype in WHOLES:
        return value
    raise TypeError(f"{name} must be a tensor of whole numbers, got {described(value)}")


def real_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """`value` as a floating-point tensor: a number, nested lists of numbers or a NumPy array are copied into one.

    Numbers and lists get the dtype and the device of `like`; arrays keep their dtype and get the device. Without `like`,
    integers and booleans get torch's default dtype.

    Raises:
        TypeError: `value` is complex, sparse or nested, or holds no numbers.
    """
    tensor = value
    if not isinstance(tensor, Tensor):
        dtype = None
        # An array has a dtype of its own; numbers and lists have none.
        if like is not None and like.is_floating_point() and not isinstance(value, _ARRAYS):
            dtype = like.dtype
        device = None if like is None else like.device
        try:
            tensor = torch.tensor(value, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{name} must be a floating-point tensor, or numbers to make one of, got {described(value)}"
            ) from None
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got a tensor of {tensor.dtype}")
    check_dense(name, tensor)
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        floating(name, tensor)  # raises: nothing is computed in 8 bits
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def doubles(name: str, value: Any) -> Tensor:
    """As `real_tensor`, in float64."""
    # A float64 `like`: without it numbers would be rounded to torch's default dtype before they are widened.
    return real_tensor(name, value, torch.empty((), dtype=torch.float64)).double()


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number or a floating-point tensor as a tensor of `dtype`, by default that of `like`, on the device of `like`.

    Raises:
        TypeError: the value is neither.
        ValueError: the value is on the meta device, and `like` is not.
    """
    dtype = like.dtype if dtype is None else dtype
    if isinstance(value, Tensor):
        if floating(name, value).is_meta and not like.is_meta:
            raise ValueError(f"{name} is on meta, where tensors have no values: move it with .to")
        return value.to(like.device, dtype)
    if not _is_number(value):
        raise TypeError(f"{name} must be a number or a floating-point tensor, got {described(value)}")
    return torch.tensor(float(value), dtype=dtype, device=like.device)  # pyright: ignore[reportArgumentType]


def positive(name: str, value: object) -> Tensor:
    """A positive number or floating-point tensor as a tensor; a number is held in float64, so that no digit is lost.

    A number has its value even where `torch.device("meta")` is the default device.

    Raises:
        TypeError: it is neither.
        ValueError: it is not positive and finite.
    """
    if isinstance(value, Tensor):
        tensor = floating(name, value)
    elif _is_number(value):
        on_meta = not torch.compiler.is_compiling() and torch.get_default_device().type == "meta"
        device = "cpu" if on_meta else None
        tensor = torch.tensor(float(value), dtype=torch.float64, device=device)  # pyright: ignore[reportArgumentType]
    else:
        raise TypeError(f"{name} must be a number or a floating-point tensor, got {described(value)}")
    check_range(name, tensor, above=0)
    return tensor


def expanded(name: str, value: Tensor, shape: Sequence[int], whose: str = "the batch") -> Tensor:
    """The tensor, expanded to `shape`; a ValueError if it does not broadcast to it, or has more dimensions."""
    value_shape = tuple(value.shape)
    target_shape = tuple(shape)
    # From the last dimension on, as broadcasting pairs them.
    pairs = zip(reversed(value_shape), reversed(target_shape), strict=False)
    if len(value_shape) > len(target_shape) or any(size not in (1, target) for size, target in pairs):
        raise ValueError(f"{name} of shape {value_shape} does not broadcast to {whose} {target_shape}")
    return value.expand(target_shape)


def check_dense(name: str, value: Tensor) -> None:
    """Raise a TypeError for sparse and nested tensors. While compiling every tensor passes: layouts cannot be read there."""
    if not _is_dense(value):
        raise TypeError(f"{name} must be a dense tensor, got {described(value)}")


def check_shape(name: str, value: Tensor, expected: Sequence[int | str]) -> None:
    """Raise a ValueError unless the tensor has the expected shape, in which a word stands for any size."""
    shape = tuple(value.shape)
    fits = len(shape) == len(expected) and all(
        isinstance(entry, str) or entry == size for entry, size in zip(expected, shape, strict=True)
    )
    if not fits:
        in_words = ", ".join(map(str, expected)) + ("," if len(expected) == 1 else "")
        raise ValueError(f"{name} must have shape ({in_words}), got {shape}")


def check_one_device(**values: object) -> None:
    """Raise a ValueError unless all tensors are on one device.

    Not compared are values that are no tensors, and tensors of one number without dimensions: PyTorch combines those with
    tensors on any device. On meta such a number is compared too, as it has no value.
    """
    devices = {
        name: value.device
        for name, value in values.items()
        if isinstance(value, Tensor) and (value.ndim or value.is_meta)
    }
    # `cpu` and `cpu:0` are the same device.
    if len({(device.type, device.index or 0) for device in devices.values()}) > 1:
        places = " and ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors must be on one device, got {places}: move one with .to")


def check_broadcastable(**values: object) -> None:
    """Raise a ValueError unless the tensors' shapes can be broadcast to one, on one device; numbers fit everywhere."""
    shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    most_dimensions = max([0, *map(len, shapes.values())])
    for place in range(1, most_dimensions + 1):
        # The sizes of the dimension that is `place` from the end, without the ones that broadcast. A list and no set:
        # sizes that are known only when an exported program runs have no hash.
        sizes = [shape[-place] for shape in shapes.values() if len(shape) >= place and shape[-place] != 1]
        if any(size != sizes[0] for size in sizes):
            named_shapes = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"shapes must fit each other, got {named_shapes}")
    check_one_device(**values)


def check_values(**values: object) -> None:
    """Raise a ValueError at tensors of the meta device, where values are needed."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device")


def check_finite(**tensors: Tensor) -> None:
    """Raise a ValueError at NaN and infinities, where values can be read."""
    for name, tensor in tensors.items():
        check_range(name, tensor)


def check_range(
    name: str,
    value: Tensor | float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise a ValueError unless a number, or every entry of a tensor, is finite and within bounds.

    A tensor whose values cannot be read passes.
    """
    bounds = _bounds(least, above, most, below)
    if above == 0 and most is None and below is None:
        requirement = "positive and finite"
    elif not bounds:
        requirement = "finite"
    elif " and " in bounds:
        requirement = f"finite, {bounds}"
    else:
        requirement = f"finite and {bounds}"
    if not isinstance(value, Tensor):
        if not (abs(value) < math.inf and _within(value, least, above, most, below)):
            raise ValueError(f"{name} must be {requirement}, got {value}")
        return
    if not values_are_readable(value):
        return
    numbers = unwrapped(value)
    valid = numbers.isfinite() & _within(numbers, least, above, most, below)
    if not all_true(valid):
        raise ValueError(f"{name} must be {requirement}, got {numbers[~valid][0].item():g}")


def check_log_probabilities(**tensors: Tensor) -> None:
    """Raise a ValueError at NaN and +inf, where values can be read."""
    for name, tensor in tensors.items():
        if not all_true(tensor < math.inf):
            raise ValueError(f"{name} must be finite or -inf, got NaN or +inf")


# Numbers and options.


def number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """The value, if it is a finite number within bounds; else a ValueError, and a TypeError if it is no number."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    check_range(name, value, least=least, above=above, most=most, below=below)  # pyright: ignore[reportArgumentType]
    return value if isinstance(value, int | float) else float(value)  # pyright: ignore[reportArgumentType]


def whole_number(name: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """The value, if it is a whole number within bounds and below 2⁶³; else a TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        raise TypeError(f"{name} must be a whole number, got {described(value)}")
    whole = value if isinstance(value, int) else int(value)
    if not _within(whole, least, None, most, None):
        raise ValueError(f"{name} must be a whole number, {_bounds(least, None, most, None)}, got {whole}")
    if whole >= _INTEGER_LIMIT:
        raise ValueError(f"{name} must be below 2⁶³, got {whole}")
    return whole


def flag(name: str, value: object) -> bool:
    """The value, if it is True or False; else a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}")
    return value


def choice(name: str, value: object, *options: str | None) -> Any:
    """The value, if it is one of the options; else a ValueError."""
    if not (value is None or isinstance(value, str)) or value not in options:
        *first, last = (repr(option) for option in options)
        in_words = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{name} must be {in_words}, got {described(value)}")
    return value


def instance(name: str, value: object, kind: type[Kind], words: str) -> Kind:
    """The value, if it is an instance of `kind`; else a TypeError, whose message calls that kind `words`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, got {described(value)}")
    return value


def real(name: str, value: object) -> object:
    """The value, if it is a number that a tensor can hold, infinities and NaN included; else a TypeError or ValueError."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        raise ValueError(f"{name} must be below 2⁶³, got {value}")
    return value


def number_or_tensor(name: str, value: object) -> object:
    """The value, if it is a number or a floating-point tensor; else a TypeError or ValueError."""
    return floating(name, value) if isinstance(value, Tensor) else real(name, value)


def of_class(name: str, value: Kind, kind: str) -> Kind:
    """The value, if its class or a base of it is called `kind`; else a TypeError.

    By name, since this room may not import the classes of the rooms above it.
    """
    if all(base.__name__ != kind for base in type(value).__mro__):
        article = "an" if kind[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind}, got {described(value)}")
    return value


def device(name: str, value: object) -> torch.device:
    """The value as a device, if it is one, its name or its number; else a TypeError or ValueError."""
    if isinstance(value, torch.device):
        return value
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a torch.device or the name of one, such as 'cpu', got {described(value)}")
    try:
        return torch.device(value)
    except (RuntimeError, ValueError, OverflowError):
        raise ValueError(f"{name} must name a device, such as 'cpu' or 'cuda:0', got {described(value)}") from None


def floating_dtype(name: str, value: object) -> torch.dtype:
    """The value, if it is one of `FLOATS`; else a TypeError."""
    if not isinstance(value, torch.dtype) or value not in FLOATS:
        raise TypeError(f"{name} must be torch.float16, bfloat16, float32 or float64, got {described(value)}")
    return value


def generator(name: str, value: object) -> torch.Generator:
    """The value, if it is a `torch.Generator`; else a TypeError."""
    return instance(name, value, torch.Generator, "a torch.Generator")


def check_fits(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise a ValueError unless a number is finite in a dtype."""
    # By comparisons alone, which can be compiled.
    if not abs(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {value}")
    if abs(value) > torch.finfo(dtype).max:
        raise ValueError(f"{name} must be finite in {dtype}, got {value}")


def _is_dense(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or (tensor.layout == torch.strided and not tensor.is_nested)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float | Real)


def _within(value: Any, least: float | None, above: float | None, most: float | None, below: float | None) -> Any:
    """Whether a number is within its bounds; of a tensor, a mask of the entries that are. NaN never is."""
    valid = value == value  # False at NaN
    if least is not None:
        valid = valid & (value >= least)
    if above is not None:
        valid = valid & (value > above)
    if most is not None:
        valid = valid & (value <= most)
    if below is not None:
        valid = valid & (value < below)
    return valid


def _bounds(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    """The bounds in words, such as "at least 0 and below 1"; an empty text without bounds."""
    named_bounds = (("at least", least), ("above", above), ("at most", most), ("below", below))
    return " and ".join([f"{words} {bound:g}" for words, bound in named_bounds if bound is not None])
