"""What modules that iterate keep of it: they never end a training run for one slow query."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from massieu.solve.loops import in_functorch, readable
from massieu.solve.telling import tell


class Convergence(NamedTuple):
    """What became of each item of a forward pass, without derivatives."""

    status: Int[Tensor, "*items"]
    """Values of `massieu.solve.Status`; 0 is converged."""
    residual: Float[Tensor, "*items"]
    """‖f(z) − z‖ of the state that was used; of systems of equations, relative to their right sides."""


class Converging:
    """A module with this keeps the `convergence` of its last forward pass, and warns once where an item has not converged.

    An item that has not goes on with its last state. It has that state's derivative if it ran out of steps, and none if it
    diverged, so that the parameters of the others train on. In transforms of `torch.func` nothing is kept; compiled code keeps
    it and cannot warn.
    """

    convergence: Convergence | None = None
    """Of the last forward pass; None before the first, and where nothing was solved for."""
    _told: bool = False

    def _keep(self, status: Tensor, residual: Tensor) -> None:
        if in_functorch():
            return
        self.convergence = Convergence(status.detach(), residual.detach())
        if readable() and not self._told:
            self._told = tell(status, residual, type(self).__name__)
