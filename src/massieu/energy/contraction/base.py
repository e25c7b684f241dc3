"""What every contraction offers, and what its author writes."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, dataclass_transform, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures.value import register, static_field, values_are_readable
from massieu.solve.arguments import floating, is_floating, told

_ROUNDINGS = 16
"""How many roundings of its dtype a point may lie outside the range of a map and still count as inside."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class Contraction(ABC):
    """A map ∇R. Authors write `_log_partition` (R), `_mean` and `_conjugate`; hooks get float32 or wider."""

    quadratic: ClassVar[bool] = False
    """Whether R is quadratic, so that descent allows a damping up to 2."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        register(dataclasses.dataclass(frozen=True, eq=False)(cls))

    @final
    def log_partition(self, x: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """R(x), convex and twice differentiable.

        Raises:
            ValueError: `x` has not the shape (*batch, *query, d).
            TypeError: it is not floating-point.
        """
        contraction, x, _ = self._admit(x)
        return contraction._log_partition(x)

    @final
    def mean(self, x: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """∇R(x): the map.

        Raises:
            ValueError, TypeError: as `log_partition`.
        """
        contraction, x, _ = self._admit(x)
        return contraction._mean(x)

    @final
    def conjugate(self, y: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """R*(y) = sup x·y − R(x): finite on the closed range of the map, within roundings of y's dtype; +inf elsewhere.

        Raises:
            ValueError, TypeError: as `log_partition`.
        """
        contraction, y, rounding = self._admit(y)
        return contraction._conjugate(y, rounding)

    @property
    @abstractmethod
    def lipschitz(self) -> Float[Tensor, "*batch"]:
        """A Lipschitz constant of the map: sup ‖∇²R‖ or, where that depends on the dimension, its largest value."""

    @abstractmethod
    def _log_partition(self, x: Tensor) -> Tensor:
        """R(x)."""

    @abstractmethod
    def _mean(self, x: Tensor) -> Tensor:
        """∇R(x)."""

    @abstractmethod
    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        """R*(y), where `rounding` is that of a number of size one."""

    def _admit(self, x: Tensor) -> tuple[Self, Tensor, float]:
        """The map and x in one dtype of at least float32, and how far roundings may have moved a point of size one."""
        x = floating(f"x of {type(self).__name__}", x)
        if x.ndim == 0:
            raise ValueError(f"{type(self).__name__} needs x of shape (*batch, *query, d), got a scalar")
        for leaf in pytree.tree_leaves(self):
            if leaf.device.type != x.device.type and (leaf.numel() > 1 or leaf.is_meta):
                raise ValueError(
                    f"{type(self).__name__} is on {leaf.device.type}, x on {x.device.type}: move one with .to"
                )
        self._check(tuple(x.shape))
        dtype = torch.promote_types(torch.float32, x.dtype)
        for leaf in pytree.tree_leaves(self):
            if leaf.numel() > 1:
                dtype = torch.promote_types(dtype, leaf.dtype)

        def fitted(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.numel() > 1 else leaf.to(x.device, dtype)

        rounding = _ROUNDINGS * torch.finfo(x.dtype).eps
        return pytree.tree_map(fitted, self), x.to(dtype), rounding

    def _check(self, shape: tuple[int, ...]) -> None:
        """Raise where `shape` is not that of an x. Maps without tensors take every shape."""
        return


def positive(name: str, value: Tensor | float) -> Tensor:
    """`value` as a tensor; a number is held in float64, and takes the dtype of what it acts on.

    Raises:
        ValueError: it is not positive and finite.
        TypeError: it is no number and no floating-point tensor.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or not is_floating(value):
        raise TypeError(f"{name} must be a number or a floating-point tensor, got {told(value)}")
    if values_are_readable(value) and not bool((value.isfinite() & (value > 0)).all()):
        raise ValueError(f"{name} must be positive and finite, got {value.detach().flatten()[:6].tolist()}")
    return value


def align(tensor: Tensor, ndim: int, rest: int = 0) -> Tensor:
    """`tensor` (*batch, *rest) with singleton dimensions after its batch, `ndim` dimensions in all."""
    own = tensor.ndim - rest
    return tensor.reshape((*tensor.shape[:own], *[1] * (ndim - tensor.ndim), *tensor.shape[own:]))


def need_batch(contraction: Contraction, batch: torch.Size, shape: tuple[int, ...]) -> None:
    if len(batch) >= len(shape) or shape[: len(batch)] != tuple(batch):
        name = type(contraction).__name__
        raise ValueError(f"{name} needs x of shape {tuple(batch)} + queries + (d,), got {shape}")


def need_width(contraction: Contraction, width: int, shape: tuple[int, ...]) -> None:
    if shape[-1] != width:
        raise ValueError(f"{type(contraction).__name__} needs x of shape (…, {width}), got {shape}")
