"""Products with a function's Jacobian, for the backward and forward rules of custom functions.

They can be differentiated again and stand inside any transform, where they are made of `torch.func.vjp`. That records what its
own derivatives would need, so outside of transforms the graph of a plain backward pass takes its place, at half the memory.
"""

from collections.abc import Callable, Iterator, Sequence
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
    if (found := _pulled_back(restricted, primals, cotangents)) is not None:
        return tuple(next(found) if one else None for one in chosen)
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


def _pulled_back(
    function: Function, primals: Sequence[Tensor], cotangents: Tensor | Sequence[Tensor | None]
) -> Iterator[Tensor] | None:
    """By a plain backward pass, which keeps a graph only where derivatives are being taken; None near a transform."""
    if torch.compiler.is_compiling() or in_functorch() or forward_ad._current_level >= 0:
        return None
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that only this use of them counts.
        inputs = [
            primal.view_as(primal) if again and primal.requires_grad else primal.detach().requires_grad_()
            for primal in primals
        ]
        results = function(*inputs)
        pairs = [(results, cotangents)] if isinstance(results, Tensor) else list(zip(results, cotangents, strict=True))
        # Pulled back after a transform has ended, tensors are still wrapped: plain passes would find zeros there.
        if any(map(is_functorch_wrapped_tensor, (*primals, *(result for result, _ in pairs)))):
            return None
        moving = [(result, given) for result, given in pairs if given is not None and result.requires_grad]
        if not moving:
            return iter(map(torch.zeros_like, primals))
        outputs, given = zip(*moving, strict=True)
        options = {"create_graph": again, "allow_unused": True, "materialize_grads": True}
        return iter(torch.autograd.grad(outputs, inputs, given, **options))


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
