"""Newton's method on an energy, held to descent (N23)."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import Energy, promoted
from massieu.foundation.arguments import of_class
from massieu.foundation.doors import door

_ROUNDINGS = 32
"""Energies that differ by less, relative to their size, are equal: forces decide between them."""


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
    plain, state = energy.step(state), promoted(state)
    if energy._event_dims != 1:
        raise ValueError(f"newton_step needs an energy whose states are vectors, got {type(energy).__name__}")
    root, failed = torch.linalg.cholesky_ex(energy.hessian(state))
    convex = (failed == 0).unsqueeze(-1)
    root = torch.where(convex.unsqueeze(-1), root, torch.eye(state.shape[-1], dtype=root.dtype, device=root.device))
    move = torch.cholesky_solve(energy.force(state).unsqueeze(-1), root).squeeze(-1)
    newton = torch.where(convex, state + move, plain)
    return torch.where(_better(energy, newton, plain).unsqueeze(-1), newton, plain)


def _better(energy: Energy, newton: Tensor, plain: Tensor) -> Tensor:
    here, there = energy(newton), energy(plain)
    rounding = _ROUNDINGS * torch.finfo(here.dtype).eps * (1 + there.abs())
    calmer = energy.force(newton).norm(dim=-1) <= energy.force(plain).norm(dim=-1)
    return torch.where((here - there).abs() <= rounding, calmer, here < there)
