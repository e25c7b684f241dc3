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
"""Of tensors, or None where an argument is left out, to a tensor or a tuple of them."""


def is_differentiable(tensor: Tensor | None) -> bool:
    """Whether an argument is a tensor that can have a derivative."""
    return tensor is not None and tensor.is_floating_point()


def reverse_derivative(
    function: Function,
    tensors: Sequence[Tensor | None],
    cotangents: Tensor | Sequence[Tensor | None],
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor | None, ...]:
    """The cotangents of a function's arguments, one for each; None for those that are not wanted or not floating-point.

    Args:
        cotangents: Of the function's results: a tensor for one, else a sequence, in which None is zero.
        wanted: Which arguments; by default all that are floating-point.
    """
    chosen = [is_differentiable(tensor) for tensor in tensors]
    if wanted is not None:
        chosen = [own and want for own, want in zip(chosen, wanted, strict=True)]
    if not any(chosen):
        return (None,) * len(chosen)
    restricted, primals = _restrict(function, tensors, chosen)
    results, pull_back = torch.func.vjp(restricted, *primals)  # pyright: ignore[reportAssignmentType]
    if isinstance(results, Tensor):
        given: Any = cotangents
    else:
        given = tuple(
            torch.zeros_like(result) if cotangent is None else cotangent
            for result, cotangent in zip(results, cotangents, strict=True)
        )
    found = iter(pull_back(given))
    return tuple(next(found) if one else None for one in chosen)


def lean_reverse_derivative(
    function: Function, tensors: Sequence[Tensor | None], cotangent: Tensor, wanted: Sequence[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """`reverse_derivative` of a function of one result, which changes nothing in place, at half the memory.

    Outside of transforms a plain backward pass keeps a graph only where derivatives of these cotangents are being taken.
    """
    if torch.compiler.is_compiling() or in_functorch() or forward_ad._current_level >= 0:
        return reverse_derivative(function, tensors, cotangent, wanted)
    chosen = [is_differentiable(tensor) for tensor in tensors]
    if wanted is not None:
        chosen = [own and want for own, want in zip(chosen, wanted, strict=True)]
    restricted, primals = _restrict(function, tensors, chosen)
    if not primals or any(map(is_functorch_wrapped_tensor, primals)):
        # Pulled back after a transform has ended, tensors are still wrapped: a plain pass would find zeros there.
        return reverse_derivative(function, tensors, cotangent, chosen)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that only this use of them counts.
        inputs = [
            primal.view_as(primal) if again and primal.requires_grad else primal.detach().requires_grad_()
            for primal in primals
        ]
        result, found = restricted(*inputs), iter(map(torch.zeros_like, primals))
        if result.requires_grad:
            options = {"create_graph": again, "allow_unused": True, "materialize_grads": True}
            found = iter(torch.autograd.grad(result, inputs, cotangent, **options))
    return tuple(next(found) if one else None for one in chosen)


def forward_derivative(function: Function, tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Any:
    """The tangents of a function's results, as many as these; of arguments without a tangent nothing moves.

    They are the gradient of a gradient, as forward mode itself does not nest.
    """
    moving = [
        is_differentiable(tensor) and tangent is not None for tensor, tangent in zip(tensors, tangents, strict=True)
    ]
    if not any(moving):
        results = function(*tensors)
        return torch.zeros_like(results) if isinstance(results, Tensor) else tuple(map(torch.zeros_like, results))
    restricted, primals = _restrict(function, tensors, moving)
    results, pull_back = torch.func.vjp(restricted, *primals)  # pyright: ignore[reportAssignmentType]
    given = tuple(tangent for tangent, one in zip(tangents, moving, strict=True) if one)
    # The pull-back is linear in the cotangents, so it does not matter at which of them it is differentiated.
    if isinstance(results, Tensor):
        return torch.func.vjp(pull_back, torch.zeros_like(results))[1](given)[0]
    cotangents = tuple(torch.zeros_like(result) for result in results)
    return torch.func.vjp(lambda *back: pull_back(back), *cotangents)[1](given)


def _restrict(
    function: Function, tensors: Sequence[Tensor | None], chosen: Sequence[bool]
) -> tuple[Function, tuple[Tensor, ...]]:
    """``function`` of the chosen arguments alone, and those."""

    def restricted(*primals: Tensor) -> Any:
        given = iter(primals)
        return function(*(next(given) if one else tensor for one, tensor in zip(chosen, tensors, strict=True)))

    return restricted, tuple(tensor for tensor, one in zip(tensors, chosen, strict=True) if one and tensor is not None)
