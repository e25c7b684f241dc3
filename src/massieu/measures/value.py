"""Frozen dataclasses of tensors that `torch.func` transforms take and return."""

import dataclasses
from collections.abc import Iterable
from typing import Any

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


def register(cls: Any) -> None:
    """Make `cls` a pytree of which the static fields are structure."""
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static", False)]
    dynamic = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in dynamic], tuple(getattr(value, name) for name in static)

    def unflatten(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(dynamic, values, strict=True)), **dict(zip(static, context, strict=True)))

    pytree.register_pytree_node(cls, flatten, unflatten)
