"""Newton's method on an energy, held to descent (N23)."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import Energy, promoted
from massieu.foundation.arguments import of_class
from massieu.foundation.doors import door

_ROUNDINGS = 32
"""Energies that differ by fewer roundings count as equal; then the smaller force is better."""


@door(energy=partial(of_class, kind="Energy"))
def newton_step(energy: Energy, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
    """x − (∇²E)⁻¹∇E where the Hessian is positive definite and E falls at least as far as by `energy.step`; else that step.

    For a Hopfield memory that is ξ − (I − βCov_p)⁻¹(ξ − T(ξ)) (arXiv 2511.00907). Near a minimum the error is squared with
    every step, where plain steps shrink it by a factor; far from it the Hessian may be indefinite and Newton's step climb, so
    that it is not taken there: the energy never rises, but for rounding. A step costs a d × d matrix and its factorisation
    for each state.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> from massieu.papers.theory import newton_step
        >>> energy = HopfieldEnergy.create(torch.tensor([[1.0, 2.0]]))
        >>> [round(x, 3) for x in newton_step(energy, torch.zeros(2)).tolist()]  # quadratic: one step
        [1.0, 2.0]
    """
    descent_state = energy.step(state)
    state = promoted(state)
    if energy._event_dims != 1:
        raise ValueError(f"newton_step needs an energy whose states are vectors, got {type(energy).__name__}")
    root, failed = torch.linalg.cholesky_ex(energy.hessian(state))
    is_convex = (failed == 0).unsqueeze(-1)
    # Any positive definite matrix where the Hessian is none; its step is not taken.
    identity = torch.eye(state.shape[-1], dtype=root.dtype, device=root.device)
    root = torch.where(is_convex.unsqueeze(-1), root, identity)
    move = torch.cholesky_solve(energy.force(state).unsqueeze(-1), root).squeeze(-1)
    newton_state = torch.where(is_convex, state + move, descent_state)
    is_better = _is_better(energy, newton_state, descent_state).unsqueeze(-1)
    return torch.where(is_better, newton_state, descent_state)


def _is_better(energy: Energy, newton_state: Tensor, descent_state: Tensor) -> Tensor:
    """Whether Newton's state has the lower energy, or the same and a force that is not larger."""
    newton_energy = energy(newton_state)
    descent_energy = energy(descent_state)
    rounding = _ROUNDINGS * torch.finfo(newton_energy.dtype).eps * (1 + descent_energy.abs())
    is_equal = (newton_energy - descent_energy).abs() <= rounding
    has_less_force = energy.force(newton_state).norm(dim=-1) <= energy.force(descent_state).norm(dim=-1)
    return torch.where(is_equal, has_less_force, newton_energy < descent_energy)
