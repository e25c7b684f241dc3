"""The descent of Hopfield layers: attention over patterns, so many times or until it rests."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import energy, ops
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, added, per_head
from massieu.solve import GMRES, ConjugateGradients, Implicit, Picard, fixed_point
from massieu.solve.methods import default_tolerance
from massieu.solve.status import CONVERGED, MAX_STEPS, NOT_FINITE, FixedPointResult


def as_distances(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    log_weight: Mask | None,
    scale: float | Tensor | None,
) -> tuple[Tensor, Tensor, Mask]:
    """Queries and keys about the mean key, and the log-weight with which their scores are −scale·‖query − key‖²/2.

    Up to a number of each query. No distance depends on the origin; about the mean, the squares are as small as can be,
    and cancel nothing. No derivative goes through the mean for the same reason.
    """
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=key.device)
    if log_weight is not None:
        # What nobody sees may be anything, and must not move the origin.
        seen = (log_weight if log_weight.dtype == torch.bool else log_weight > -torch.inf).any(-2).unsqueeze(-1)
    total = key.detach().masked_fill(~seen, 0.0).sum(2, keepdim=True)
    centre = total / seen.expand(*key.shape[:3], 1).sum(2, keepdim=True).clamp_min(1)
    query, key = query - centre, key - centre
    level = key.to(torch.promote_types(key.dtype, torch.float32)).square().sum(-1).unsqueeze(-2)
    beta = key.shape[-1] ** -0.5 if scale is None else per_head(scale)
    return query, key, added(log_weight, -0.5 * beta * level)


def descend(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    steps: int,
    activation: energy.activations.Activation | None,
    **options: Any,
) -> Float[Tensor, "B H L D"]:
    """The state after so many steps x ↦ ∇L(Σ p_n key_n). Its backward pass keeps states, not weights: memory steps·(L + N)."""
    for _ in range(steps):
        state = ops.attention(state, key, key, **options).output.contiguous()
        if activation is not None:
            state = activation(state).to(state.dtype)
    return state


@torch.no_grad()
def moved(before: Float[Tensor, "B H L D"], state: Float[Tensor, "B H L D"]) -> tuple[Tensor, Tensor]:
    """The status of each state as `fixed_point` would have it, and how far the last step went."""
    wide = torch.promote_types(state.dtype, torch.float32)
    residual = torch.linalg.vector_norm(state - before, dim=-1, dtype=wide)
    size = torch.linalg.vector_norm(state, dim=-1, dtype=wide)
    rtol, atol = default_tolerance(wide)
    status = torch.where(residual <= atol + rtol * size, CONVERGED, MAX_STEPS)
    return torch.where(residual.isfinite(), status, NOT_FINITE), residual


def settle(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    activation: energy.activations.Activation | None,
    max_steps: int,
    throw: bool,
    **options: Any,
) -> FixedPointResult:
    """Where the descent ends, in at least float32; gradients by the implicit function theorem, none for the start (B12).

    Plain steps: each lowers the energy, so that the end is in the basin of the start (B5.5).
    """
    given = {name: value for name, value in options.items() if value is not None}
    hidden = given.get("log_weight")
    if hidden is not None and hidden.dtype == torch.bool:
        given["log_weight"] = added(hidden, state.new_zeros((), dtype=torch.promote_types(state.dtype, torch.float32)))
    behind = () if activation is None else (activation,)

    def step(point: Tensor, key: Tensor, options: dict[str, Any], behind: tuple[Any, ...]) -> Tensor:
        return descend(point, key, 1, behind[0] if behind else None, **options)

    with without_autocast(state.device):
        return fixed_point(
            step,
            state,
            (key, given, behind),
            method=Picard(),
            # β times a covariance is symmetric; an activation after it is not.
            adjoint=Implicit(GMRES() if behind else ConjugateGradients(), lost="nan" if throw else "zero"),
            max_steps=max_steps,
            throw=throw,
        )
