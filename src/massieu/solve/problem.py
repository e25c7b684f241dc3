"""A function of a state and parameters, seen as one of flat vectors and of tensors."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingModuleSource]
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from massieu.foundation.arguments import check_dense, described, floating, instance, whole_number
from massieu.foundation.transforms import layers

_Function = Callable[..., Tensor]

_TENSOR = object()
"""Stands among the parameters' leaves where a tensor was, since the tensors are passed separately."""


@dataclass(frozen=True)
class FixedPointProblem:
    """``f(z, *parameters)`` as ``self(flat, *leaves)``: `flat` is (*items, n), and `leaves` are the tensors in the parameters.

    Attributes:
        function: As the user gave it.
        shape: Of z.
        item_dims: How many of the last dimensions of z are one item.
        structure: Of the parameters, as a pytree.
        other_leaves: The parameters' leaves, with `_TENSOR` in the place of each tensor.
        name: What errors call the function.
    """

    function: _Function
    shape: tuple[int, ...]
    item_dims: int
    structure: pytree.TreeSpec
    other_leaves: tuple[Any, ...]
    name: str

    def flat(self, tensor: Tensor) -> Tensor:
        """A state (*items, *item) as (*items, n)."""
        if self.item_dims == 0:
            return tensor.unsqueeze(-1)
        return tensor.flatten(-self.item_dims)

    def shaped(self, flat: Tensor) -> Tensor:
        """A flat state (*items, n) as the function takes it, (*items, *item)."""
        if self.item_dims == 0:
            return flat.squeeze(-1)
        return flat.unflatten(-1, self.shape[-self.item_dims :])

    def image(self, flat: Tensor, *leaves: Tensor) -> Any:
        """f of a flat state, as the function returns it, whatever that is."""
        tensors = iter(leaves)
        all_leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.other_leaves]
        return self.function(self.shaped(flat), *pytree.tree_unflatten(all_leaves, self.structure))

    def __call__(self, flat: Tensor, *leaves: Tensor) -> Tensor:
        """f of a flat state, flat.

        Raises:
            TypeError: f returned no tensor.
            ValueError: f returned another shape, dtype or device than its first argument's.
        """
        image = self.image(flat, *leaves)
        if not isinstance(image, Tensor):
            raise TypeError(f"{self.name} must return a tensor of its first argument's shape, got {described(image)}")
        check_dense(f"{self.name}'s value", image)
        if tuple(image.shape) != self.shape or image.dtype != flat.dtype:
            raise ValueError(
                f"{self.name} must return its first argument's shape and dtype, {self.shape} and {flat.dtype}, got "
                f"{tuple(image.shape)} and {image.dtype}"
            )
        if not torch.compiler.is_compiling() and image.is_meta != flat.is_meta:
            raise ValueError(
                f"{self.name} must return a tensor on {flat.device}, as its first argument, got {image.device}"
            )
        return self.flat(image)


@dataclass(frozen=True)
class BoundFunction:
    """The problem's function at given parameters, as a function of the flat state alone.

    A loop of a compiled graph must be told all tensors that it uses, so that the leaves stand here by themselves. No image is
    checked: the first one was, and such a loop cannot compare sizes that are known only when it runs.
    """

    problem: FixedPointProblem
    leaves: tuple[Tensor, ...]

    def __call__(self, flat: Tensor) -> Tensor:
        return self.problem.flat(self.problem.image(flat, *self.leaves))


def pose(
    function: _Function, start: Tensor, parameters: Any, item_dims: int, names: tuple[str, str] = ("function", "start")
) -> tuple[FixedPointProblem, Tensor, tuple[Tensor, ...]]:
    """The problem, its flat start and the parameters' tensors, with half precision promoted.

    Args:
        names: What errors call the function and the start.

    Raises:
        TypeError: `start` is no floating-point tensor, or `parameters` no tuple.
        ValueError: `item_dims` is not among the start's dimensions.
    """
    name, start_name = names
    floating(start_name, start)
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    instance("parameters", parameters, tuple, "a tuple, one entry for each argument after z, as (parameters,) of one")
    _check_call(function, name, len(parameters))
    whole_number("item_dims", item_dims, least=0, most=start.ndim)
    leaves, structure = pytree.tree_flatten(parameters)
    tensors = tuple(_promote(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    if torch.compiler.is_compiling():
        # A custom function in a compiled graph takes no tensor twice.
        tensors = tuple(
            leaf.clone() if any(leaf is other for other in tensors[:place]) else leaf
            for place, leaf in enumerate(tensors)
        )
    other_leaves = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    problem = FixedPointProblem(function, tuple(start.shape), item_dims, structure, other_leaves, name)
    return problem, problem.flat(_promote(start)), tensors


def _check_call(function: _Function, name: str, num_parameters: int) -> None:
    """Raise a TypeError if the function cannot be called with a state and so many parameters."""
    if torch.compiler.is_compiling():
        return
    # The signature of a module's `__call__` says nothing: it takes anything.
    called = function.forward if isinstance(function, torch.nn.Module) else function
    if not (inspect.isfunction(called) or inspect.ismethod(called)):
        return
    try:
        inspect.signature(called).bind(*[None] * (1 + num_parameters))
    except TypeError as error:
        advice = "give `parameters` one entry for each argument after the first"
        if isinstance(function, torch.nn.Module):
            advice += ", or take massieu.nn.Equilibrium, which passes the module's own parameters too"
        raise TypeError(
            f"{name} cannot be called with the state and {num_parameters} parameters ({error}): {advice}"
        ) from None


def _captured(image: Tensor) -> Tensor | None:
    """A tensor with derivatives that f got from elsewhere, where `image` is its value for detached arguments; else None."""
    if torch.compiler.is_compiling():
        return image if image.requires_grad else None
    for layer in layers(image):
        if _has_tangent(layer):
            return image
        if layer.requires_grad:
            return next(_leaves(layer.grad_fn), image)
    return None


def _has_tangent(layer: Tensor) -> bool:
    """Whether forward mode gave this layer a tangent."""
    # PyTorch cannot look for a tangent in the batch of a `vmap`. The batch's tangent is that of the layer below.
    if forward_ad._current_level < 0 or is_batchedtensor(layer):
        return False
    return forward_ad.unpack_dual(layer).tangent is not None


def _leaves(node: Any) -> Iterator[Tensor]:
    """The leaf tensors of the autograd graph that ends in a node."""
    visited = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [parent for parent, _ in node.next_functions if parent is not None]


def refuse_captured(image: Tensor, name: str = "function") -> None:
    """Raise a ValueError if f differentiably depends on anything but its arguments."""
    captured = _captured(image)
    if captured is None:
        return
    # Without a graph to follow only the image itself is known.
    which = "" if captured is image else f" of shape {tuple(captured.shape)}"
    raise ValueError(
        f"{name} uses a tensor{which} that requires grad and is not among its parameters, "
        "whose gradient would be lost; pass it in `parameters` (a module's by torch.func.functional_call, as "
        "massieu.nn.Equilibrium does)"
    )


def _promote(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if it is of half precision."""
    is_half = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32
    return tensor.float() if is_half else tensor
