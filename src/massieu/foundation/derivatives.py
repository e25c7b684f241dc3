"""Products with a function's Jacobian, for the backward and forward rules of custom functions.

Both are made of `torch.func.vjp`, so that they can be differentiated again and stand inside any transform.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]
from torch.autograd import forward_ad

from massieu.foundation.transforms import in_functorch

Function = Callable[..., Any]
"""From tensors, or None where an argument is left out, to one tensor or a tuple of them."""


def is_differentiable(tensor: Tensor | None) -> bool:
    """Whether an argument is a tensor that can have a derivative."""
    return tensor is not None and tensor.is_floating_point()


def reverse_derivative(
    function: Function,
    tensors: Sequence[Tensor | None],
    cotangents: Tensor | Sequence[Tensor | None],
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor | None, ...]:
    """The cotangents of a function's arguments, one for each; None for those not needed or not floating-point.

    Args:
        function: From the tensors to one result or several.
        tensors: The arguments.
        cotangents: Of the function's results: a tensor for one, else a sequence, in which None is zero.
        needed: True for each argument whose cotangent is needed; by default all that are floating-point.
    """
    active = _active_arguments(tensors, needed)
    if not any(active):
        return (None,) * len(active)
    restricted, primals = _restrict(function, tensors, active)
    results, pull_back = torch.func.vjp(restricted, *primals)  # pyright: ignore[reportAssignmentType]
    if isinstance(results, Tensor):
        return _scattered(pull_back(cotangents), active)
    filled = tuple(
        torch.zeros_like(result) if cotangent is None else cotangent
        for result, cotangent in zip(results, cotangents, strict=True)
    )
    return _scattered(pull_back(filled), active)


def lean_reverse_derivative(
    function: Function, tensors: Sequence[Tensor | None], cotangent: Tensor, needed: Sequence[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """`reverse_derivative` at half the memory, of a function that returns one tensor and changes nothing in place.

    Outside of transforms a plain backward pass keeps a graph only where derivatives of these cotangents are being taken.
    """
    if torch.compiler.is_compiling() or in_functorch() or forward_ad._current_level >= 0:
        return reverse_derivative(function, tensors, cotangent, needed)
    active = _active_arguments(tensors, needed)
    restricted, primals = _restrict(function, tensors, active)
    if not primals or any(map(is_functorch_wrapped_tensor, primals)):
        # Pulled back after a transform has ended, tensors are still wrapped: a plain pass would find zeros there.
        return reverse_derivative(function, tensors, cotangent, active)
    # Gradients are enabled here only while derivatives of these cotangents are being taken.
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that only this use of the primals counts, and none elsewhere in a caller's graph.
        inputs = [
            primal.view_as(primal) if create_graph and primal.requires_grad else primal.detach().requires_grad_()
            for primal in primals
        ]
        result = restricted(*inputs)
        if not result.requires_grad:
            return _scattered(tuple(map(torch.zeros_like, primals)), active)
        options = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(result, inputs, cotangent, **options)
    return _scattered(gradients, active)


def forward_derivative(function: Function, tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Any:
    """The tangents of a function's results, one for each; an argument whose tangent is None is a constant.

    They are the gradient of a gradient, as forward mode itself does not nest.
    """
    active = [
        is_differentiable(tensor) and tangent is not None for tensor, tangent in zip(tensors, tangents, strict=True)
    ]
    if not any(active):
        results = function(*tensors)
        if isinstance(results, Tensor):
            return torch.zeros_like(results)
        return tuple(map(torch.zeros_like, results))
    restricted, primals = _restrict(function, tensors, active)
    results, pull_back = torch.func.vjp(restricted, *primals)  # pyright: ignore[reportAssignmentType]
    active_tangents = tuple(tangent for tangent, is_active in zip(tangents, active, strict=True) if is_active)
    # The pull-back c ↦ Jᵀc is linear, so that its own pull-back is v ↦ Jv, the product that is needed. For the same
    # reason it does not matter at which cotangents it is differentiated: at zeros.
    if isinstance(results, Tensor):
        return torch.func.vjp(pull_back, torch.zeros_like(results))[1](active_tangents)[0]
    cotangents = tuple(torch.zeros_like(result) for result in results)
    return torch.func.vjp(lambda *parts: pull_back(parts), *cotangents)[1](active_tangents)


def _active_arguments(tensors: Sequence[Tensor | None], needed: Sequence[bool] | None) -> list[bool]:
    """Which arguments can have a derivative, and need one."""
    differentiable = [is_differentiable(tensor) for tensor in tensors]
    if needed is None:
        return differentiable
    return [can and must for can, must in zip(differentiable, needed, strict=True)]


def _restrict(
    function: Function, tensors: Sequence[Tensor | None], active: Sequence[bool]
) -> tuple[Function, tuple[Tensor, ...]]:
    """``function`` as one of its active arguments alone, and these arguments."""

    def restricted(*primals: Tensor) -> Any:
        remaining = iter(primals)
        arguments = [
            next(remaining) if is_active else tensor for is_active, tensor in zip(active, tensors, strict=True)
        ]
        return function(*arguments)

    primals = tuple(
        tensor for tensor, is_active in zip(tensors, active, strict=True) if is_active and tensor is not None
    )
    return restricted, primals


def _scattered(gradients: Sequence[Tensor], active: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients in the places of the active arguments, None in the others."""
    remaining = iter(gradients)
    return tuple(next(remaining) if is_active else None for is_active in active)
