"""The log-sum-ReLU memory: Epanechnikov's kernel in place of the Gaussian, minima in closed form (N4)."""

from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.base import Energy, times
from massieu.energy.hopfield import checked_scale
from massieu.foundation.arguments import floating
from massieu.foundation.values import align, need_batch
from massieu.measures import Atoms


class LogSumReLU(Energy):
    """Log-sum-ReLU memory: E(x) = −log(Σ w_n relu(1 − scale·‖x − x_n‖²/2))/scale; a step goes to the active centroid.

    A pattern is active within √(2/scale). Σ relu(…) is at least its sum over the patterns active at x, a concave quadratic with
    its top at their centroid: so E never rises for a damping in (0, 2), and a descent *ends*, after finitely many steps, in a
    minimum that is exactly a centroid: a single memory, where no other is within √(2/scale), or an emergent one.

    Where nothing is active E is +inf, its force is 0 and T stays (Hoover et al., arXiv 2506.10801). Use `create`.

    Attributes:
        atoms: Patterns and the logs of their multiplicities.
        scale: The inverse temperature β, shape of the memory's batch.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import LogSumReLU
        >>> memory = LogSumReLU.create(torch.tensor([[0.0], [1.0], [9.0]]), scale=0.5)
        >>> memory.retrieve(torch.tensor([0.2])).state.tolist()  # a memory that emerges: the centroid of two
        [0.5]
    """

    atoms: Atoms
    scale: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        points: Float[Tensor, "*batch N d"],
        *,
        scale: Float[Tensor, "..."] | float | None = None,
        log_weight: Float[Tensor, "*batch N"] | Bool[Tensor, "*batch N"] | None = None,
    ) -> Self:
        """The energy of patterns.

        Args:
            points: Finite points, at least one.
            scale: Positive; d^-½ by default. A tensor broadcasts to the batch, as one for each head does. Gradients flow to it.
            log_weight: The log of each pattern's multiplicity, or booleans of which True keeps it.

        Raises:
            ValueError: shapes that do not fit, no pattern, a NaN, a scale that is not positive.
            TypeError: something is not floating-point.
        """
        atoms = Atoms.create(floating("points", points), log_weight)
        return cls(atoms, checked_scale(atoms, scale))

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of memories."""
        return self.scale.shape

    @property
    def radius(self) -> Float[Tensor, "*batch"]:
        """√(2/scale), the distance within which a pattern is active."""
        return (2 / self.scale).sqrt()

    def active(self, state: Float[Tensor, "*batch_query d"]) -> Bool[Tensor, "*batch_query N"]:
        """Whether each pattern is within `radius` of the state, the boundary left out."""
        energy, state = self._in_common_dtype(state)
        return energy._kernel_values(state) > 0

    @property
    def _dampings(self) -> str:
        return "(0, 2)"

    def _energy(self, state: Tensor) -> Tensor:
        energy, state = self._in_common_dtype(state)
        total = energy._kernel_values(state).sum(-1)
        is_outside = total == 0
        scale = align(energy.scale.unsqueeze(-1), state.ndim, 1).squeeze(-1)
        value = -torch.log(torch.where(is_outside, 1.0, total)) / scale
        return torch.where(is_outside, torch.inf, value)

    def _step(self, state: Tensor) -> Tensor:
        energy, promoted_state = self._in_common_dtype(state)
        kernel_values = energy._kernel_values(promoted_state)
        # 0 · value is 0, or NaN where the state is.
        weight = torch.where(kernel_values > 0, energy._multiplicities(state.ndim), 0.0 * kernel_values)
        total = weight.sum(-1, keepdim=True)
        has_active = total != 0
        centroid = times(weight, energy.atoms.points) / torch.where(has_active, total, 1.0)
        return torch.where(has_active, centroid, state.to(centroid.dtype))

    def _in_common_dtype(self, state: Tensor) -> tuple[Self, Tensor]:
        need_batch("LogSumReLU", "a state", self._checked_state(state).shape, self.batch_shape, self.atoms.event_shape)
        energy, state = self._promoted(state)
        return energy, state

    def _kernel_values(self, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query N"]:
        """w_n relu(1 − scale·‖x − x_n‖²/2)."""
        scale = align(self.scale.unsqueeze(-1), state.ndim, 1)
        # Differences, not expanded squares: at a memory the distance is 0.
        squares = (state.unsqueeze(-2) - align(self.atoms.points, state.ndim + 1, 2)).square().sum(-1)
        return torch.relu(1 - 0.5 * scale * squares) * self._multiplicities(state.ndim)

    def _multiplicities(self, ndim: int) -> Float[Tensor, "*batch_query N"]:
        """w_n, with as many dimensions as the state."""
        return align(self.atoms.log_weight, ndim, 1).exp()
