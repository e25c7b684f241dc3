"""Frozen dataclasses of tensors that `torch.func` transforms take and return."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]
from torch.utils import _pytree as pytree


def static_field(**keywords: Any) -> Any:
    """A dataclass field of a measure that is neither tensor nor measure: part of its structure, not of its values."""
    return dataclasses.field(metadata={"static": True}, **keywords)


def values_are_readable(*tensors: Tensor) -> bool:
    """Whether an `if` may look at the values: not while compiling, inside a `torch.func` transform, or on `meta`."""
    if torch.compiler.is_compiling():
        return False
    return not any(is_functorch_wrapped_tensor(tensor) or tensor.is_meta for tensor in tensors)


def real_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """`value` as a floating-point tensor: a number, nested lists of numbers or a NumPy array are copied into one.

    Numbers get the dtype and the device of `like`, arrays the device, and integers or booleans torch's default dtype
    where there is no `like`.

    Raises:
        TypeError: `value` is complex, or holds no numbers.
    """
    tensor = value
    if not isinstance(tensor, Tensor):
        try:
            known = like is not None and like.is_floating_point() and not isinstance(value, np.ndarray | np.generic)
            dtype, device = like.dtype if like is not None and known else None, None if like is None else like.device
            tensor = torch.tensor(value, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{name} must be a floating-point tensor, or numbers to make one of, got {type(value).__name__}"
            ) from None
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got a tensor of {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def register(cls: Any) -> None:
    """Make `cls` a pytree of which the static fields are structure."""
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static", False)]
    dynamic = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in dynamic], tuple(getattr(value, name) for name in static)

    def unflatten(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(dynamic, values, strict=True)), **dict(zip(static, context, strict=True)))

    pytree.register_pytree_node(cls, flatten, unflatten)
