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
    """A value kept by a module: its tensors, by their fields' names, are buffers or parameters, and move and are saved."""

    def __init__(
        self,
        value: Value,
        trained: Mapping[str, bool] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Tensors are copied.

        Args:
            trained: The fields that are parameters, and which of these are kept as logarithms, since they are positive.
        """
        super().__init__()
        leaves, self._structure = pytree.tree_flatten(value)
        self._stored: list[tuple[str, bool]] = []
        for name, leaf in zip(_names(value), leaves, strict=True):
            # Of its own memory: two modules of one value share nothing, and a checkpoint holds each tensor once.
            leaf = leaf.detach().clone(memory_format=torch.contiguous_format)
            positive = (trained or {}).get(name)
            if positive is not None and not leaf.ndim:
                leaf = leaf.to(torch.get_default_dtype())
            self._stored.append((f"log_{name}" if positive else name, bool(positive)))
            hold(self, self._stored[-1][0], leaf.log() if positive else leaf, positive is not None, device, dtype)

    def value(self) -> Any:
        """The value at the current numbers."""
        leaves = [getattr(self, name).exp() if positive else getattr(self, name) for name, positive in self._stored]
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
        own = pytree.tree_leaves(self.activation())
        if structure != self._structure or any(a.shape != b.shape for a, b in zip(leaves, own, strict=True)):
            kind, shapes = type(self.activation()).__name__, [tuple(leaf.shape) for leaf in own]
            given = f"{type(value).__name__} of shapes {[tuple(leaf.shape) for leaf in leaves]}"
            raise ValueError(f"activation must be a {kind} of shapes {shapes} and equal settings, got a {given}")
        for (name, positive), leaf in zip(self._stored, leaves, strict=True):
            getattr(self, name).copy_(leaf.log() if positive else leaf)
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
        kind = activation.measure if isinstance(activation, MeasureActivation) else activation
        return ", ".join(filter(None, (type(kind).__name__, settings(self, *(name for name, _ in self._stored)))))


def as_module(activation: Activation | activations.Activation | Measure | None, **place: Any) -> Activation | None:
    """A module as it is, an activation or a measure as one at that place."""
    return activation if activation is None or isinstance(activation, Activation) else Activation(activation, **place)


def _names(value: Value) -> list[str]:
    """A name for each tensor: that of its field, after those of the fields around it."""
    paths = pytree.tree_flatten_with_path(value.measure if isinstance(value, MeasureActivation) else value)[0]
    return [re.sub(r"\W+", "_", pytree.keystr(path)).strip("_") for path, _ in paths]
