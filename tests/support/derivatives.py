"""Derivatives of a function of many tensors against finite differences, in one direction of all of them at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck


def check_derivatives(
    function: Callable[..., Any],
    arguments: Sequence[Tensor],
    *,
    first: bool = True,
    second: bool = True,
    forward: bool = False,
    absent_cotangents: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    eps: float = 1e-6,
) -> None:
    """First and second derivatives in all arguments, by reverse mode and, on request, by forward mode.

    `gradcheck(..., fast_mode=True)` compares one direction for each pair of an input and an output. Here the entries of
    all arguments are one vector, and so are those of all outputs: one direction mixes every derivative with every
    other, so that a wrong one shows at a small part of the price. The tolerances are tight for that: a derivative that
    is small beside the others must still be seen.

    Args:
        function: Takes the arguments, returns one tensor or several.
        arguments: Tensors in float64.
        first: Whether first derivatives are checked.
        second: Whether second derivatives are checked.
        forward: Whether forward mode is checked too, alone and over reverse mode.
        absent_cotangents: Whether results without a cotangent must be as those with a cotangent of 0.
        rtol: Relative to the derivative along the direction.
        atol: Absolute, for one entry.
        eps: Length of the step of the finite differences.
    """
    shapes = [argument.shape for argument in arguments]
    vector = torch.cat([argument.detach().reshape(-1) for argument in arguments]).requires_grad_()
    assert vector.dtype == torch.float64

    def of_one_vector(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        outputs = function(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return torch.cat([output.reshape(-1) for output in outputs])

    # Where there is one result, that it may have no cotangent is true of `torch.cat` whatever is behind it.
    settings: dict[str, Any] = {
        "rtol": rtol,
        "atol": atol,
        "eps": eps,
        "fast_mode": True,
        "check_undefined_grad": False,
    }
    if first:
        assert gradcheck(of_one_vector, (vector,), check_forward_ad=forward, **settings)
    if second:
        assert gradgradcheck(of_one_vector, (vector,), check_fwd_over_rev=forward, **settings)
    if absent_cotangents:
        assert gradcheck(function, tuple(arguments), fast_mode=True, check_undefined_grad=True)
