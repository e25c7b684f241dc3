"""Values: frozen dataclasses of tensors that are pytrees, which `torch.func` transforms and `torch.compile` take and return.

Deriving from `Value` makes a class one. Its constructor checks nothing, since transforms call it again: checks go into a
`create` classmethod, and a class with a `__post_init__` is refused. A class is abstract or final. What a family of values
shares is an abstract base, which names the family in its body: ``_family = "measures"``.

A field that is neither tensor nor value is a `static_field`: part of the structure, compared with ``==`` by compiled code.
Fields of an abstract base come first. If a base uses a field whose place each final class chooses, the annotation stands in
a class that is no value: ``class Posterior(_Seen, Value)``, where `_Seen` has the annotation.
Results that a function returns are NamedTuples, and no values.

Shapes have batch dimensions on the left, query dimensions in the middle and event dimensions on the right. In a composition
the longest batch wins, and the others are its prefixes.
"""

import dataclasses
import inspect
from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.foundation.arguments import check_one_device
from massieu.foundation.doors import check_methods
from massieu.foundation.guesses import explain_constructor
from massieu.foundation.short_repr import fields_html, fields_repr


def static_field(**keywords: Any) -> Any:
    """A dataclass field that is neither tensor nor value: part of a value's structure, not of its numbers.

    Example:
        >>> from massieu.measures import Sphere
        >>> Sphere.create(2.0, dim=3).dim  # declared as ``dim: int = static_field()``
        3
    """
    return dataclasses.field(metadata={"static": True}, **keywords)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field, dataclasses.field))
class Value(ABC):  # noqa: B024 - what is abstract is up to the families
    """A frozen dataclass and pytree of tensors and values. See the module's docstring."""

    _family: ClassVar[str] = "values"
    """The plural of the family's name, for the error that says to compose values instead of deriving from a final class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for parent in cls.__mro__[1:]:
            if issubclass(parent, Value) and parent is not Value and not inspect.isabstract(parent):
                raise TypeError(f"{parent.__name__} is final; compose {cls._family} instead of deriving {cls.__name__}")
        if hasattr(cls, "__post_init__"):
            raise TypeError(
                f"{cls.__name__} must check in a classmethod create: transforms would run __post_init__ again"
            )
        _register(dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls))
        if cls.__module__.startswith("massieu."):  # users' own classes may give argument names another meaning
            if hasattr(cls, "create"):
                explain_constructor(cls)
            check_methods(cls)  # not the constructor, which transforms call with placeholders of any type

    __repr__ = fields_repr
    _repr_html_ = fields_html

    def to(self, *targets: torch.dtype | torch.device | str) -> Self:
        """The value on another device, or with its floating-point tensors in another dtype, or both.

        Raises:
            TypeError: a dtype is not floating-point, or a target is neither a dtype nor a device.
        """
        dtype = None
        device = None
        for target in targets:
            if isinstance(target, torch.dtype):
                if not target.is_floating_point:
                    raise TypeError(f"{type(self).__name__} can be moved to a floating-point dtype, got {target}")
                dtype = target
            elif isinstance(target, torch.device | str):
                device = torch.device(target)
            else:
                raise TypeError(f"to takes a dtype, a device or both, got {type(target).__name__}")

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

        return pytree.tree_map(converted, self)

    def _tensors(self) -> list[Tensor]:
        """All tensors of the value and of the values that it holds."""
        return [leaf for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor)]

    def _leaves(self) -> list[Tensor]:
        """The floating-point tensors of the value and of the values that it holds."""
        return [leaf for leaf in self._tensors() if leaf.is_floating_point()]

    def _promoted(self, *tensors: Tensor, numbers_follow: bool = False) -> tuple[Any, ...]:
        """The value and the tensors in one floating dtype, at least float32.

        Args:
            tensors: Floating-point tensors.
            numbers_follow: Tensors of one number that the value holds take the dtype and the device of all others, and do
                not count when these are chosen.
        """
        leaves = self._leaves()
        counted = [leaf for leaf in leaves if leaf.numel() > 1] if numbers_follow else leaves
        dtype = promoted_dtype(*tensors, *counted)
        device = tensors[0].device if tensors and numbers_follow else None

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            if numbers_follow and leaf.numel() == 1:
                return leaf.to(device, dtype)
            return leaf.to(dtype)

        # Most calls need no conversion: rebuilding the value costs more than asking.
        is_converted = all(leaf.dtype == dtype and (device is None or leaf.device == device) for leaf in leaves)
        value = self if is_converted else pytree.tree_map(converted, self)
        return value, *(tensor.to(dtype) for tensor in tensors)

    def _check_device(self, **tensors: Tensor) -> None:
        """Raise a ValueError unless the tensors and the value are on one device; numbers are on all."""
        leaves = self._tensors()
        if len({tensor.device for tensor in (*leaves, *tensors.values())}) < 2:
            return
        for leaf in leaves:
            check_one_device(**tensors, **{type(self).__name__: leaf})


def _register(cls: Any) -> None:
    """Make `cls` a pytree whose static fields are its structure, and whose other fields are its children."""
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static", False)]
    dynamic = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children = [getattr(value, name) for name in dynamic]
        structure = tuple(getattr(value, name) for name in static)
        return children, structure

    def unflatten(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(dynamic, values, strict=True)), **dict(zip(static, context, strict=True)))

    def flatten_with_keys(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, context = flatten(value)
        return list(zip(map(pytree.GetAttrKey, dynamic), leaves, strict=True)), context

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that holds all of the tensors, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def align(tensor: Tensor, ndim: int, rest: int = 0) -> Tensor:
    """`tensor` (*batch, *rest) with dimensions of size 1 after its batch, so that it has `ndim` dimensions.

    Args:
        tensor: The tensor.
        ndim: Dimensions of the result.
        rest: How many of the tensor's last dimensions are not batch.

    Raises:
        ValueError: the tensor has more than `ndim` dimensions.
    """
    if tensor.ndim > ndim:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} has more dimensions than the tensor it must broadcast with ({ndim})"
        )
    batch_ndim = tensor.ndim - rest
    ones = [1] * (ndim - tensor.ndim)
    return tensor.reshape((*tensor.shape[:batch_ndim], *ones, *tensor.shape[batch_ndim:]))


def spread(owner: str, tensor: Tensor, batch: Sequence[int], rest: int = 0) -> Tensor:
    """`tensor` (*prefix, *rest), where `prefix` is a prefix of `batch`, expanded to (*batch, *rest).

    Raises:
        ValueError: the tensor's batch is no prefix of `batch`; the message begins with `owner`.
    """
    batch_ndim = tensor.ndim - rest
    check_prefix(owner, tensor.shape[:batch_ndim], batch)
    return align(tensor, len(batch) + rest, rest).expand(*batch, *tensor.shape[batch_ndim:])


def check_prefix(owner: str, shape: Sequence[int], batch: Sequence[int]) -> None:
    """Raise a ValueError unless the batch shape `shape` is a prefix of the batch shape `batch`."""
    if tuple(batch[: len(shape)]) != tuple(shape):
        raise ValueError(f"{owner}: batch shape {tuple(shape)} is not a prefix of {tuple(batch)}")


def longest_batch(owner: str, shapes: Iterable[Sequence[int]]) -> torch.Size:
    """The longest of the batch shapes of a composition's parts, of which all others must be prefixes.

    Raises:
        ValueError: one of them is no prefix of it.
    """
    shapes = list(shapes)
    longest = max(shapes, key=len)
    for shape in shapes:
        check_prefix(owner, shape, longest)
    return torch.Size(longest)


def need_batch(
    owner: str, name: str, shape: Sequence[int], batch: Sequence[int], event: Sequence[int | str] = ("d",)
) -> None:
    """Raise a ValueError unless a shape is ``(*batch, *query, *event)``; a word in `event` stands for any size."""
    shape = tuple(shape)
    event_ndim = len(event)
    last_sizes = shape[len(shape) - event_ndim :]
    if (
        len(shape) < len(batch) + event_ndim
        or shape[: len(batch)] != tuple(batch)
        or any(isinstance(entry, int) and entry != size for entry, size in zip(event, last_sizes, strict=True))
    ):
        event_in_words = ", ".join(map(str, event)) + ("," if event_ndim == 1 else "")
        raise ValueError(
            f"{owner} needs {name} of shape {tuple(batch)} + queries + ({event_in_words}) (batch + queries + event), "
            f"got {shape}"
        )
