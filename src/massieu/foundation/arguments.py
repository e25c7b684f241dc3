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

from massieu.foundation.transforms import every, unwrapped, values_are_readable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that are computed in."""
WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The dtypes of whole numbers."""

Kind = TypeVar("Kind")
_LONGEST = 60
_ARRAYS = (np.ndarray, np.generic)  # a tuple: compiled code cannot make a union of the two


def described(value: object) -> str:
    """What was given, for an error's message: a number or short text as it is, a tensor's or array's dtype, else the type."""
    if isinstance(value, Tensor):
        if not _is_dense(value):
            return "a nested tensor" if value.is_nested else f"a {str(value.layout).removeprefix('torch.')} tensor"
        return f"a tensor of {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"ndarray of {value.dtype} and shape {value.shape}"
    parts = value if isinstance(value, tuple) else (value,)
    plain = all(isinstance(part, int | float | str | None) for part in parts)
    return text if plain and len(text := repr(value)) <= _LONGEST else type(value).__name__


# Tensors.


def floating(name: str, value: object, *, or_boolean: bool = False) -> Tensor:
    """The value, if it is a dense tensor of float16, bfloat16, float32 or float64, or else of truth values if they may be.

    Raises:
        TypeError: it is anything else.
    """
    known = (*FLOATS, torch.bool) if or_boolean else FLOATS
    if isinstance(value, Tensor) and _is_dense(value) and value.dtype in known:
        return value
    kind = "boolean or floating-point" if or_boolean else "floating-point"
    # float8 is floating-point too.
    kind = (
        f"16-, 32- or 64-bit {kind}"
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in FLOATS
        else kind
    )
    raise TypeError(f"{name} must be a {kind} tensor, got {described(value)}")


def boolean(name: str, value: object) -> Tensor:
    """The value, if it is a dense tensor of truth values; else a TypeError."""
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

    Numbers get the dtype and the device of `like`, arrays the device, and integers or booleans torch's default dtype
    where there is no `like`.

    Raises:
        TypeError: `value` is complex, sparse or nested, or holds no numbers.
    """
    tensor = value
    if not isinstance(tensor, Tensor):
        try:
            known = like is not None and like.is_floating_point() and not isinstance(value, _ARRAYS)
            dtype, device = like.dtype if like is not None and known else None, None if like is None else like.device
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
    """As `real_tensor`, in float64: numbers would be rounded in torch's default dtype before they are widened."""
    return real_tensor(name, value, torch.empty((), dtype=torch.float64)).double()


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number or a floating-point tensor as a tensor of that dtype, by default that of `like`, on its device.

    Raises:
        TypeError: it is neither.
        ValueError: it has no values, and `like` has.
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
    """A positive number or floating-point tensor as a tensor; a number is held in float64, for what it meets to convert.

    Where `torch.device("meta")` makes tensors without values, a number keeps its own.

    Raises:
        TypeError: it is neither.
        ValueError: it is not positive and finite.
    """
    if not isinstance(value, Tensor) and not _is_number(value):
        raise TypeError(f"{name} must be a number or a floating-point tensor, got {described(value)}")
    if isinstance(value, Tensor):
        given = floating(name, value)
    else:
        on_meta = not torch.compiler.is_compiling() and torch.get_default_device().type == "meta"
        given = torch.tensor(float(value), dtype=torch.float64, device="cpu" if on_meta else None)  # pyright: ignore[reportArgumentType]
    check_range(name, given, above=0)
    return given


def expanded(name: str, value: Tensor, shape: Sequence[int], whose: str = "the batch") -> Tensor:
    """The tensor, expanded to a shape that it broadcasts to; a ValueError if it does not, as of more dimensions."""
    own, wanted = tuple(value.shape), tuple(shape)
    paired = zip(reversed(own), reversed(wanted), strict=False)
    if len(own) > len(wanted) or any(size not in (1, room) for size, room in paired):
        raise ValueError(f"{name} of shape {own} does not broadcast to {whose} {wanted}")
    return value.expand(wanted)


def check_dense(name: str, value: Tensor) -> None:
    """Raise a TypeError at sparse and nested tensors. Compiled code may not ask, and is not asked."""
    if not _is_dense(value):
        raise TypeError(f"{name} must be a dense tensor, got {described(value)}")


def check_shape(name: str, value: Tensor, wanted: Sequence[int | str]) -> None:
    """Raise a ValueError unless the tensor has this shape, in which a word stands for any size."""
    shape = tuple(value.shape)
    fits = len(shape) == len(wanted) and all(
        isinstance(one, str) or one == size for one, size in zip(wanted, shape, strict=True)
    )
    if not fits:
        needed = ", ".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
        raise ValueError(f"{name} must have shape ({needed}), got {shape}")


def check_one_device(**given: object) -> None:
    """Raise a ValueError unless all tensors are on one device. What is no tensor, or a number with a value, is on all."""
    placed = {
        name: value.device
        for name, value in given.items()
        if isinstance(value, Tensor) and (value.ndim or value.is_meta)
    }
    # `cpu` and `cpu:0` are one.
    if len({(device.type, device.index or 0) for device in placed.values()}) > 1:
        where = " and ".join(f"{name} on {device}" for name, device in placed.items())
        raise ValueError(f"tensors must be on one device, got {where}: move one with .to")


def check_broadcastable(**given: object) -> None:
    """Raise a ValueError unless the tensors' shapes can be broadcast to one, on one device; numbers fit everywhere."""
    shapes = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    longest = max([0, *map(len, shapes.values())])
    for place in range(longest):
        # No set: sizes that are known only when an exported program runs have no hash.
        sizes = [shape[-1 - place] for shape in shapes.values() if len(shape) > place and shape[-1 - place] != 1]
        if any(size != sizes[0] for size in sizes):
            told = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"shapes must fit each other, got {told}")
    check_one_device(**given)


def check_values(**given: object) -> None:
    """Raise a ValueError at tensors of the meta device, where values are needed."""
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device")


def check_finite(**given: Tensor) -> None:
    """Raise a ValueError at NaN and infinities, where values can be read."""
    for name, value in given.items():
        check_range(name, value)


def check_range(
    name: str,
    value: Tensor | float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise a ValueError unless a number, or each of a tensor as far as values can be read, is finite and within bounds."""
    bounds = _bounds(least, above, most, below)
    wanted = f"finite{', ' if ' and ' in bounds else ' and '}{bounds}" if bounds else "finite"
    if above == 0 and most is None and below is None:
        wanted = "positive and finite"
    if not isinstance(value, Tensor):
        if not (abs(value) < math.inf and _within(value, least, above, most, below)):
            raise ValueError(f"{name} must be {wanted}, got {value}")
        return
    if not values_are_readable(value):
        return
    numbers = unwrapped(value)
    right = numbers.isfinite() & _within(numbers, least, above, most, below)
    if not every(right):
        raise ValueError(f"{name} must be {wanted}, got {numbers[~right][0].item():g}")


def check_log_probabilities(**given: Tensor) -> None:
    """Raise a ValueError at NaN and +inf, where values can be read."""
    for name, value in given.items():
        if not every(value < math.inf):
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
    """The value, if it is a finite number within bounds; else a TypeError, as for a tensor, or a ValueError."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    check_range(name, value, least=least, above=above, most=most, below=below)  # pyright: ignore[reportArgumentType]
    return value if isinstance(value, int | float) else float(value)  # pyright: ignore[reportArgumentType]


def whole_number(name: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """The value, if it is a whole number within bounds, as large as PyTorch counts; else a TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        raise TypeError(f"{name} must be a whole number, got {described(value)}")
    whole = value if isinstance(value, int) else int(value)
    if not _within(whole, least, None, most, None):
        raise ValueError(f"{name} must be a whole number, {_bounds(least, None, most, None)}, got {whole}")
    if whole >= 1 << 63:
        raise ValueError(f"{name} must be below 2⁶³, got {whole}")
    return whole


def flag(name: str, value: object) -> bool:
    """The value, if it is True or False; else a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}")
    return value


def choice(name: str, value: object, *known: str | None) -> Any:
    """The value, if it is one of a few words; else a ValueError."""
    if not (value is None or isinstance(value, str)) or value not in known:
        *first, last = (repr(word) for word in known)
        listed = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{name} must be {listed}, got {described(value)}")
    return value


def instance(name: str, value: object, kind: type[Kind], words: str) -> Kind:
    """The value, if it is of that kind, which `words` name for the message; else a TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, got {described(value)}")
    return value


def real(name: str, value: object) -> object:
    """The value, if it is a number of any size that a tensor can hold; else a TypeError or ValueError."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"{name} must be below 2⁶³, got {value}")
    return value


def number_or_tensor(name: str, value: object) -> object:
    """The value, if it is a number or a floating-point tensor; else a TypeError or ValueError."""
    return floating(name, value) if isinstance(value, Tensor) else real(name, value)


def of_class(name: str, value: Kind, kind: str) -> Kind:
    """The value, if its class or a base of it has that name, as for classes of rooms above; else a TypeError."""
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
    """The value, if it is a dtype that is computed in; else a TypeError."""
    if not isinstance(value, torch.dtype) or value not in FLOATS:
        raise TypeError(f"{name} must be torch.float16, bfloat16, float32 or float64, got {described(value)}")
    return value


def generator(name: str, value: object) -> torch.Generator:
    """The value, if it is a `torch.Generator`; else a TypeError."""
    return instance(name, value, torch.Generator, "a torch.Generator")


def check_fits(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise a ValueError unless a number is finite in a dtype. By comparisons alone: the compiler knows them."""
    if not abs(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {value}")
    if abs(value) > torch.finfo(dtype).max:
        raise ValueError(f"{name} must be finite in {dtype}, got {value}")


def _is_dense(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or (tensor.layout == torch.strided and not tensor.is_nested)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float | Real)


def _within(value: Any, least: float | None, above: float | None, most: float | None, below: float | None) -> Any:
    """Whether a number, or where a tensor, is within its bounds."""
    right = value == value
    if least is not None:
        right = right & (value >= least)
    if above is not None:
        right = right & (value > above)
    if most is not None:
        right = right & (value <= most)
    if below is not None:
        right = right & (value < below)
    return right


def _bounds(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    """The bounds in words: "at least 0 and below 1"; nothing where there are none."""
    told = [
        f"{words} {bound:g}"
        for words, bound in (("at least", least), ("above", above), ("at most", most), ("below", below))
        if bound is not None
    ]
    return " and ".join(told)
