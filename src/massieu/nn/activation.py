"""Activations with parameters: maps that are gradients of convex functions, as modules."""

import dataclasses
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu.energy import activations
from massieu.energy.activations import MeasureActivation
from massieu.measures import Measure


class Activation(nn.Module):
    """x ↦ ∇L(x), by one of `massieu.energy.activations`, whose numbers are trained: gains, radii, factors and biases.

    Positive numbers are kept as logarithms, ``log_gain`` for a `gain`, so that training cannot leave their domain. What is
    no parameter of the map but a statistic is a buffer: the location and the roots of a `Whitening`, all tensors of a measure.
    Half precision is computed in float32 and returned as it came.
    """

    def __init__(self, activation: activations.Activation | Measure, *, trained: bool = True) -> None:
        """The map, at first with the numbers of `activation`.

        Args:
            activation: Its tensors are copied; numbers take PyTorch's default dtype. A measure stands for its mean map.
            trained: False makes all tensors buffers.

        Raises:
            TypeError: something else is given.
        """
        super().__init__()
        value = MeasureActivation.of("activation", activation)
        leaves, self._structure = pytree.tree_flatten(value)
        self._stored: list[tuple[str, bool]] = []
        for name, leaf in zip(_names(value), leaves, strict=True):
            # Of its own memory: two modules of one activation share nothing, and a checkpoint holds each tensor once.
            leaf = leaf.detach().clone(memory_format=torch.contiguous_format)
            positive = value.trained.get(name, False)
            self._stored.append((f"log_{name}" if positive and trained else name, positive and trained))
            if not trained or name not in value.trained:
                self.register_buffer(name, leaf)
                continue
            leaf = leaf if leaf.ndim else leaf.to(torch.get_default_dtype())
            self.register_parameter(self._stored[-1][0], nn.Parameter(leaf.log() if positive else leaf))

    def activation(self) -> activations.Activation:
        """The map at the current numbers, with `lagrangian`, L, and `conjugate`, L*."""
        leaves = [getattr(self, name).exp() if positive else getattr(self, name) for name, positive in self._stored]
        return pytree.tree_unflatten(leaves, self._structure)

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
            ValueError, TypeError: `x` has another width than the map, or is not floating-point.
        """
        return self.activation()(x).to(x.dtype)

    def lagrangian(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
        """L(x); its gradient is `forward`. Raises as the call."""
        return self.activation().lagrangian(x)

    def extra_repr(self) -> str:
        return type(self.activation()).__name__


def as_module(activation: Activation | activations.Activation | Measure | None) -> Activation | None:
    """A module as it is, an activation or a measure as one."""
    return activation if activation is None or isinstance(activation, Activation) else Activation(activation)


def _names(value: activations.Activation) -> list[str]:
    """A name for each tensor: its field's, or that and a number where the field is a measure."""
    names = []
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if isinstance(held, Tensor):
            names.append(field.name)
        elif not field.metadata.get("static", False):
            names += [f"{field.name}{place}" for place in range(len(pytree.tree_leaves(held)))]
    return names
