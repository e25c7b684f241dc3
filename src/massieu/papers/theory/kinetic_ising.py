"""The kinetic mean field of spins ±1, with which the claims check the orders of that of vector spins (B16)."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.kinetic import Kinetic, check_drive_and_coupling
from massieu.foundation.arguments import floating


class KineticIsing(Kinetic):
    """Kinetic Ising model of spins ±1: m = tanh θ, with the Onsager echo −m_i Σ_j J_ij² (1 − m_j²) (B16). Use `create`.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import KineticIsing
        >>> spins = KineticIsing.create(torch.tensor([1.0, 0.0]), torch.zeros(2, 2))
        >>> [round(m, 3) for m in spins.mean(spins.stationary().value).tolist()]  # tanh of the drives
        [0.762, 0.0]
    """

    _spin_dims = 0

    @classmethod
    def create(cls, drive: Float[Tensor, "*batch N"], coupling: Float[Tensor, "*batch N N"]) -> Self:
        """N spins.

        Raises:
            TypeError: a tensor that is not floating-point.
            ValueError: shapes that do not fit.
        """
        check_drive_and_coupling(drive, coupling, spin_dims=0)
        return cls(drive, coupling)

    @property
    def lipschitz(self) -> Float[Tensor, "*batch"]:
        """max_i Σ_j |J_ij|: the Lipschitz constant of a first-order step in the maximum norm.

        Below 1 the step has one fixed point.
        """
        return self.coupling.abs().sum(-1).amax(-1)

    def mean(self, state: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
        return torch.tanh(floating("state", state))

    def _echo(self, state: Tensor, before: Tensor, field: Tensor) -> Tensor:
        variance = 1 - torch.tanh(before).square()
        return -torch.tanh(state) * (self.coupling.square() @ variance.unsqueeze(-1)).squeeze(-1)

    def _stiffness(self) -> Tensor:
        return self.coupling.square().sum(-1)
