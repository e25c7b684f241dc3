"""Is a map the gradient of something? It is if and only if its Jacobian is symmetric (B19)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from massieu.foundation.arguments import floating, number
from massieu.foundation.doors import door, function
from massieu.foundation.values import promoted_dtype

Map = Callable[[Float[Tensor, "*lead d"]], Float[Tensor, "*lead d"]]


@door(function=function)
def jacobian_asymmetry(function: Map, state: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """How far a map is from a gradient: ‖J − Jᵀ‖/‖J‖ of its Jacobian J at each state, between 0 and 2 (Frobenius norm).

    Zero for every gradient, such as attention over keys = values by softmax or entmax; rounding makes it 1e-16 in float64.
    Other weights that are normalised by their sum are far from it. In one dimension every map is a gradient. NaN where the
    state, the function or its Jacobian is not finite.

    Args:
        function: A map of items, each on its own, that `torch.func` can differentiate.
        state: Points at which to differentiate, by their last dimension. Half precision is promoted.

    Raises:
        ValueError: the function changes the state's shape.
        TypeError: the state is not floating-point.

    Example:
        >>> import torch
        >>> from massieu.energy import jacobian_asymmetry
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> round(jacobian_asymmetry(lambda x: x @ turn, torch.ones(2)).item(), 3)
        2.0
    """
    if floating("state", state).ndim == 0:
        raise ValueError("state must have at least one dimension, got a scalar")
    state = state.to(promoted_dtype(state))
    matrix = jacobian(function, state)
    # The Jacobian of a linear map is finite at a NaN too, so the state and the value are looked at as well.
    finite = (state.isfinite() & function(state).isfinite()).all(-1) & matrix.isfinite().all((-2, -1))
    # In units of the largest entry, so that no square is beyond the dtype's range.
    largest = pad(matrix.detach().abs().flatten(-2), (0, 1)).amax(-1)
    matrix = matrix / torch.where(largest > 0, largest, 1.0)[..., None, None]
    size = torch.linalg.matrix_norm(matrix)
    asymmetry = torch.linalg.matrix_norm(matrix - matrix.mT) / torch.where(size == 0, 1.0, size)
    return torch.where(finite, asymmetry, torch.nan)


@door(function=function)
def is_conservative(
    function: Map, state: Float[Tensor, "*lead d"], *, tolerance: float | None = None
) -> Bool[Tensor, "*lead"]:
    """Whether the Jacobian at each state is symmetric within `tolerance`, relative to its size.

    A sample of states shows that a map is *not* a gradient; that it is one follows where all of a neighbourhood passes.
    False where the state, the function or its Jacobian is not finite.

    Args:
        function: As for `jacobian_asymmetry`.
        state: Points at which to differentiate, as for `jacobian_asymmetry`.
        tolerance: By default 64·d roundings.

    Raises:
        ValueError, TypeError: as `jacobian_asymmetry`; or the tolerance is negative.

    Example:
        >>> import torch
        >>> from massieu.energy import is_conservative
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> bool(is_conservative(torch.tanh, torch.ones(2))), bool(is_conservative(lambda x: x @ turn, torch.ones(2)))
        (True, False)
    """
    if tolerance is not None:
        number("tolerance", tolerance, least=0)
    asymmetry = jacobian_asymmetry(function, state)
    if tolerance is None:
        tolerance = 64 * state.shape[-1] * torch.finfo(asymmetry.dtype).eps
    return asymmetry <= tolerance


def jacobian(function: Map, state: Tensor, event_dims: int = 1) -> Float[Tensor, "*lead_event_event"]:
    """The derivative of each item of the function, of shape (*state.shape, *event)."""
    value, pull_back = torch.func.vjp(function, state)[:2]
    if value.shape != state.shape:
        raise ValueError(f"the function must keep the state's shape {tuple(state.shape)}, got {tuple(value.shape)}")
    event = state.shape[state.ndim - event_dims :]
    basis = torch.eye(event.numel(), dtype=value.dtype, device=value.device).reshape(event.numel(), *event)
    # Items do not depend on each other, so that one pull-back of a unit vector gives a row of every item's Jacobian.
    rows = torch.func.vmap(lambda vector: pull_back(vector.expand_as(value))[0])(basis)
    return rows.movedim(0, state.ndim - event_dims).reshape(*state.shape, *event)
