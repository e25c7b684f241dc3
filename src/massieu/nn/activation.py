"""Activations with parameters: maps that are gradients of convex functions, as modules."""

import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.energy import activations
from massieu.energy.activations import MeasureActivation
from massieu.foundation.arguments import flag
from massieu.foundation.doors import door
from massieu.foundation.values import Value
from massieu.measures import Measure
from massieu.nn.modules import Device, Resettable, check_input, hold, settings


class HeldValue(Resettable):
    """A module that holds a value: its tensors are buffers or parameters, named as their fields, which move and are saved."""

    def __init__(
        self,
        value: Value,
        trained: Mapping[str, bool] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Tensors are copied.

        Args:
            trained: For each field that is a parameter, whether it is positive and so stored as its logarithm.
        """
        super().__init__()
        leaves, self._structure = pytree.tree_flatten(value)
        self._stored: list[tuple[str, bool]] = []
        for name, leaf in zip(_names(value), leaves, strict=True):
            # A copy: two modules of one value share no memory, and a checkpoint holds each tensor once.
            leaf = leaf.detach().clone(memory_format=torch.contiguous_format)
            is_positive = (trained or {}).get(name)
            is_trained = is_positive is not None
            if is_trained and not leaf.ndim:
                leaf = leaf.to(torch.get_default_dtype())
            stored_name = f"log_{name}" if is_positive else name
            self._stored.append((stored_name, bool(is_positive)))
            hold(self, stored_name, leaf.log() if is_positive else leaf, is_trained, device, dtype)

    def value(self) -> Any:
        """The value at the current numbers."""
        stored = ((getattr(self, name), is_positive) for name, is_positive in self._stored)
        leaves = [tensor.exp() if is_positive else tensor for tensor, is_positive in stored]
        return pytree.tree_unflatten(leaves, self._structure)


@door(trained=flag)
class Activation(HeldValue):
    """An activation of `massieu.energy.activations` as a module, with trained gains, radii, factors and biases.

    Positive numbers are kept as logarithms, ``log_gain`` for a `gain`, so that training cannot leave their domain. What is
    no parameter of the map but a statistic is a buffer: the location and the roots of a `Whitening`, all tensors of a measure.
    Half precision is computed in float32 and returned as it came.

    Example:
        >>> import torch
        >>> from massieu import energy, nn
        >>> norm = nn.Activation(energy.activations.RMSNorm.create(2.0))
        >>> [round(x, 3) for x in norm(torch.tensor([3.0, 4.0, 0.0, 0.0])).tolist()], [*norm.state_dict()]
        ([2.4, 3.2, 0.0, 0.0], ['log_gain'])
    """

    def __init__(
        self,
        activation: activations.Activation | Measure,
        *,
        trained: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The map, at first with the numbers of `activation`; `reset_parameters` restores them.

        Args:
            activation: Its tensors are copied; numbers take PyTorch's default dtype. A measure stands for its mean map.
            trained: False makes all tensors buffers.
            device, dtype: Of its tensors; by default as they are, on PyTorch's default device if they are on the CPU.

        Raises:
            TypeError: something else is given.
        """
        value = MeasureActivation.of("activation", activation)
        super().__init__(value, value.trained if trained else None, device, dtype)

    def activation(self) -> activations.Activation:
        """The map at the current numbers, with `lagrangian`, L, and `conjugate`, L*."""
        return self.value()

    @torch.no_grad()
    def assign(self, activation: activations.Activation | Measure) -> Self:
        """Take the numbers of another activation of this kind: of the `Whitening.of` a cloud of points, for one (S13).

        Raises:
            ValueError: it is of another kind, or its tensors have other shapes.
            TypeError: it is no activation.
        """
        value = MeasureActivation.of("activation", activation)
        leaves, structure = pytree.tree_flatten(value)
        current = self.activation()
        shapes = [tuple(leaf.shape) for leaf in leaves]
        current_shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(current)]
        if structure != self._structure or shapes != current_shapes:
            raise ValueError(
                f"activation must be a {type(current).__name__} of shapes {current_shapes} and equal settings, "
                f"got a {type(value).__name__} of shapes {shapes}"
            )
        for (name, is_positive), leaf in zip(self._stored, leaves, strict=True):
            getattr(self, name).copy_(leaf.log() if is_positive else leaf)
        return self

    def forward(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
        """∇L(x).

        Raises:
            ValueError, TypeError: `x` has another width than the map, is not floating-point, or has another dtype, which is
                not half precision; single numbers go with every dtype.
        """
        return self.activation()(check_input("x", x, self, or_half=True)).to(x.dtype)

    def lagrangian(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
        """L(x); its gradient is `forward`. Raises as the call."""
        return self.activation().lagrangian(check_input("x", x, self, or_half=True))

    def extra_repr(self) -> str:
        activation = self.activation()
        shown = activation.measure if isinstance(activation, MeasureActivation) else activation
        numbers = settings(self, *(name for name, _ in self._stored))
        return ", ".join(part for part in (type(shown).__name__, numbers) if part)


def as_module(activation: Activation | activations.Activation | Measure | None, **place: Any) -> Activation | None:
    """The activation or measure as a module with that device and dtype; a module and None unchanged."""
    if activation is None or isinstance(activation, Activation):
        return activation
    return Activation(activation, **place)


def _names(value: Value) -> list[str]:
    """A name for each tensor: that of its field, after those of the fields around it."""
    paths = pytree.tree_flatten_with_path(value.measure if isinstance(value, MeasureActivation) else value)[0]
    return [re.sub(r"\W+", "_", pytree.keystr(path)).strip("_") for path, _ in paths]
