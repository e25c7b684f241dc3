"""The Hopfield memory as a density: p ∝ exp(−βE) is a mixture of Gaussians, and attention is its denoiser (B6, B7)."""

import math
from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.bounds import stored
from massieu.energy.hopfield import HopfieldEnergy
from massieu.foundation.arguments import described
from massieu.foundation.transforms import any_true
from massieu.foundation.values import Value, align
from massieu.measures import Atoms, Gaussian, mixture
from massieu.measures.mixture import Mixture


class HopfieldDensity(Value):
    """A Hopfield memory as a probability density p ∝ exp(−βE): a mixture of Gaussians at its patterns. Use `create`.

    E is the energy of stored patterns under the identity. For patterns x_n of weights w_n, exp(−βE(v))/Z = Σ_n π_n N(v;
    x_n, 1/β) exactly, π_n ∝ w_n exp(½β‖x_n‖²). With another exponent than β times the energy it is no mixture. States
    are checked as the energy checks them.

    Attributes:
        hopfield: The energy.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldDensity, HopfieldEnergy
        >>> density = HopfieldDensity.create(HopfieldEnergy.create(torch.tensor([[-1.0], [1.0]]), scale=1.0))
        >>> density.responsibilities(torch.tensor([0.0])).tolist()
        [0.5, 0.5]
    """

    hopfield: HopfieldEnergy

    @classmethod
    def create(cls, hopfield: HopfieldEnergy) -> Self:
        """The density of a memory.

        Raises:
            TypeError: the memory is not a set of patterns, or the reference not the identity.
            ValueError: a memory is masked altogether: it has no density.
        """
        if any_true((stored(hopfield).log_weight == -torch.inf).all(-1)):
            raise ValueError("a memory that is masked altogether has no density")
        return cls(hopfield)

    @property
    def log_pattern_weights(self) -> Float[Tensor, "*batch N"]:
        """log π_n: far from uniform where the norms differ by more than 1/β (B6)."""
        return torch.log_softmax(self._log_terms, -1)

    @property
    def log_normaliser(self) -> Float[Tensor, "*batch"]:
        """log ∫ exp(−βE(v)) dv = (d/2) log(2π/β) + log Σ w_n exp(½β‖x_n‖²) − β·constant, E with all constants (B6)."""
        scale = self._scale
        width = self.hopfield.memory.event_shape[0]
        # Each pattern's Gaussian integrates to (2π/β)^{d/2} times w_n exp(½β‖x_n‖²).
        total = torch.logsumexp(self._log_terms, -1)
        return 0.5 * width * torch.log(2 * math.pi / scale) + total - scale * self.hopfield.constant

    def measure(self) -> Mixture:
        """p as a measure: its ``log_prob(0, v)`` is the log-density, its tilts are Hopfield densities too."""
        points = self._memory.points
        variance = (1 / self._scale).unsqueeze(-1).expand(points.shape[:-1])
        return mixture(self.log_pattern_weights, Gaussian.create(points, variance))

    def log_prob(self, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """log p(v), minus the loss whose minimum in the patterns is maximum likelihood (B7).

        −½β‖v‖² + log Σ w_n exp(βx_n·v) − log Σ w_n exp(½β‖x_n‖²) − (d/2) log(2π/β), without the score matrix. It can be
        differentiated in patterns, weights and β; the gradient of the loss in the patterns is the data's mean with attention
        weights, less that of the patterns themselves.
        """
        energy = self.hopfield(state)
        return -align(self._scale, energy.ndim) * energy - align(self.log_normaliser, energy.ndim)

    def responsibilities(self, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query N"]:
        """P(n | v): which pattern v came from. They are the attention weights, softmax(β x_n·v + log w_n) (B6)."""
        memory = self._memory
        eta = self.hopfield._eta(self.hopfield._checked_state(state))
        # The expectation of the indicators of the patterns, which are the rows of the unit matrix.
        identity = torch.eye(memory.points.shape[-2], dtype=memory.points.dtype, device=memory.points.device)
        return memory.expectation(eta, identity.expand(*memory.points.shape[:-1], -1))

    def score(self, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """∇ log p(v) = −β∇E(v) = β(T(v) − v) (B6)."""
        move = self.hopfield.step(state) - promoted(state)
        return align(self._scale, move.ndim) * move

    def denoise(self, noisy: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """E[pattern | pattern + noise of variance 1/β = noisy] = noisy + score/β (Tweedie): the attention step itself (B6).

        The prior over patterns is π, not the weights w: dot-product attention prefers long patterns.
        """
        return self.hopfield.step(noisy)

    def sample(
        self, shape: Sequence[int] | int = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*shape_batch d"]:
        """Exact independent draws: a pattern by its weight π, and noise of variance 1/β. No gradient."""
        if not isinstance(shape, int | tuple | list):
            raise TypeError(f"shape must be a number or a sequence of them, got {described(shape)}")
        points = self._memory.points
        origin = points.new_zeros((*points.shape[:-2], points.shape[-1]))
        return self.measure().sample(origin, shape, generator=generator)

    @property
    def _memory(self) -> Atoms:
        return stored(self.hopfield)

    @property
    def _scale(self) -> Tensor:
        return promoted(self.hopfield.scale)

    @property
    def _log_terms(self) -> Tensor:
        """log w_n + ½β‖x_n‖²."""
        memory = self._memory
        return memory.log_weight + 0.5 * self._scale.unsqueeze(-1) * memory.points.square().sum(-1)
