"""Derivatives of a function against finite differences, at a cost that does not grow with the number of entries."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck


def check_derivatives(
    function: Callable, leaves: Sequence[Tensor], forward_mode: bool = True, absent_cotangents: bool = False
) -> None:
    """First and second derivatives in float64, along random directions of all leaves and all results at once.

    Args:
        function: of the leaves, to one tensor or a tuple of tensors.
        leaves: float64 tensors that require a gradient.
        forward_mode: also the forward derivatives of the function and of its gradient.
        absent_cotangents: also that results without a cotangent are as those with a cotangent of 0.
    """
    leaves = tuple(leaves)
    absent = absent_cotangents
    assert gradcheck(function, leaves, check_forward_ad=forward_mode, fast_mode=True, check_undefined_grad=absent)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=forward_mode, fast_mode=True, check_undefined_grad=absent)
