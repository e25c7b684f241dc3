"""Descent to stored patterns by repeated attention over them, at the cost of fused attention."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.energy.contraction import Contraction
from massieu.nn.heads import Mask
from massieu.ops.shapes import without_autocast
from massieu.solve import FixedPointResult, fixed_point


def descend(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    steps: int,
    contraction: Contraction | None,
    **options: Any,
) -> Float[Tensor, "B H L D"]:
    """The state after so many steps x ↦ ∇R(Σ p_n key_n). Its backward pass keeps states, not weights: memory steps·(L + N)."""
    for _ in range(steps):
        state = ops.attention(state, key, key, **options).output.contiguous()
        if contraction is not None:
            state = contraction.mean(state).to(state.dtype)
    return state


def settle(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    contraction: Contraction | None,
    log_weight: Mask | None,
    scale: float | Tensor | None,
    sink: float | Tensor | None,
    max_steps: int,
    throw: bool,
) -> FixedPointResult:
    """Where the descent ends, in at least float32; gradients by the implicit function theorem, none for the start (B12).

    Plain steps: each lowers the energy, so that the end is in the basin of the start (B5.5).
    """
    tensors = {"log_weight": _as_number(log_weight, state), "scale": scale, "sink": sink}
    options = {name: value for name, value in tensors.items() if value is not None}
    maps = () if contraction is None else (contraction,)

    def step(point: Tensor, key: Tensor, options: dict[str, Any], maps: tuple[Contraction, ...]) -> Tensor:
        return descend(point, key, 1, maps[0] if maps else None, **options)

    with without_autocast(state.device):
        return fixed_point(
            step,
            state,
            (key, options, maps),
            method="picard",
            max_steps=max_steps,
            # β times a covariance is symmetric; a contraction after it is not.
            linear_solver="auto" if maps else "cg",
            throw=throw,
            lost_derivative="nan" if throw else "zero",
        )


def _as_number(log_weight: Mask | None, like: Tensor) -> Tensor | None:
    if log_weight is None or log_weight.dtype != torch.bool:
        return log_weight
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros_like(log_weight, dtype=dtype).masked_fill(~log_weight, -torch.inf)
