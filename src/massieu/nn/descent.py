"""The descent of Hopfield layers: attention over patterns, repeated a number of times or until it has converged."""

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

    −‖query − key‖²/2 = query·key − ‖key‖²/2 − ‖query‖²/2, of which softmax cannot see the last term: it is left out.
    Distances do not depend on the origin. About the mean key the squares are smallest, so that little cancels.
    """
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=key.device)
    if log_weight is not None:
        is_kept = log_weight if log_weight.dtype == torch.bool else log_weight > -torch.inf
        # Keys that no query sees, such as padding, may hold anything and must not move the origin: (B, H, N, 1).
        visible = is_kept.any(-2).unsqueeze(-1)
    total = key.detach().masked_fill(~visible, 0.0).sum(2, keepdim=True)
    # Detached, since the result does not depend on the origin and so has no derivative in it.
    centre = total / visible.expand(*key.shape[:3], 1).sum(2, keepdim=True).clamp_min(1)
    query = query - centre
    key = key - centre
    squares = key.to(torch.promote_types(key.dtype, torch.float32)).square().sum(-1).unsqueeze(-2)
    beta = key.shape[-1] ** -0.5 if scale is None else per_head(scale)
    return query, key, added(log_weight, -0.5 * beta * squares)


def descend(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    steps: int,
    activation: energy.activations.Activation | None,
    **options: Any,
) -> Float[Tensor, "B H L D"]:
    """The state after `steps` steps x ↦ ∇L(Σ p_n key_n). The backward pass keeps states, not weights: memory steps·(L + N)."""
    for _ in range(steps):
        state = ops.attention(state, key, key, **options).output.contiguous()
        if activation is not None:
            state = activation(state).to(state.dtype)
    return state


@torch.no_grad()
def last_move(before: Float[Tensor, "B H L D"], state: Float[Tensor, "B H L D"]) -> tuple[Tensor, Tensor]:
    """Status and residual of each state by the rule of `fixed_point`; the residual is the length of the last step."""
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
    """The end of the descent, in at least float32; gradients by the implicit function theorem, none for the start (B12).

    Undamped Picard steps: each lowers the energy, so that the end is in the basin of the start (B5.5).
    """
    # Parameters of a fixed point are floating-point tensors: a boolean mask becomes 0 and −∞, and None is left out.
    set_options = {name: value for name, value in options.items() if value is not None}
    mask = set_options.get("log_weight")
    if mask is not None and mask.dtype == torch.bool:
        zero = state.new_zeros((), dtype=torch.promote_types(state.dtype, torch.float32))
        set_options["log_weight"] = added(mask, zero)
    activations = () if activation is None else (activation,)

    def step(point: Tensor, key: Tensor, options: dict[str, Any], activations: tuple[Any, ...]) -> Tensor:
        return descend(point, key, 1, activations[0] if activations else None, **options)

    with without_autocast(state.device):
        return fixed_point(
            step,
            state,
            (key, set_options, activations),
            method=Picard(),
            # The step's derivative is β times a covariance, which is symmetric; with an activation's after it, it is not.
            adjoint=Implicit(GMRES() if activations else ConjugateGradients(), lost="nan" if throw else "zero"),
            max_steps=max_steps,
            throw=throw,
        )
