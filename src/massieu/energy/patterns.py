"""Potentials of scores: A(eta) = Φ(x_1·eta, …, x_N·eta), whose gradient is attention with weights ∇Φ over the points.

Every such attention is a gradient, whatever the points (B19). Φ = log Σ exp is the measure `Atoms`; the potentials that derive
from `PatternPotential` are no log-partition of a measure, but serve as a memory all the same.
"""

from abc import abstractmethod
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import times
from massieu.foundation.arguments import floating
from massieu.foundation.values import Value, align, need_batch
from massieu.measures import Atoms


class PatternPotential(Value):
    """A convex function of scores. Its methods raise a ValueError at an eta of another shape than ``(*batch, *query, d)``,
    and a TypeError at one that is not floating-point.

    Attributes:
        atoms: The points and their log-weights: the first field of each class that derives from this one.
    """

    _family = "potentials"

    atoms: Atoms

    @property
    def points(self) -> Float[Tensor, "*batch N d"]:
        """What is stored."""
        return self.atoms.points

    @property
    def log_weight(self) -> Float[Tensor, "*batch N"]:
        """−inf leaves a point out."""
        return self.atoms.log_weight

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of memories."""
        return self.atoms.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        """(d,)."""
        return self.atoms.event_shape

    @final
    def log_partition(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """A(eta), convex, at least float32; −inf where all points are left out."""
        potential, eta = self._admit(eta)
        return potential._of_scores(potential._scores(eta))

    @final
    def mean(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """∇A(eta) = Σ weights_n x_n; 0 where all points are left out."""
        potential, eta = self._admit(eta)
        return times(potential._weights_of_scores(potential._scores(eta)), potential.points)

    @final
    def weights(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query N"]:
        """∇Φ: the weights of the points in the mean."""
        potential, eta = self._admit(eta)
        return potential._weights_of_scores(potential._scores(eta))

    # Hooks of a subclass. Scores x_n·eta have shape (*batch, *query, N).

    @abstractmethod
    def _of_scores(self, scores: Tensor) -> Tensor:
        """Φ."""

    @abstractmethod
    def _weights_of_scores(self, scores: Tensor) -> Tensor:
        """∇Φ."""

    # Helpers.

    def _scores(self, eta: Tensor) -> Tensor:
        return times(eta, self.points.mT)

    def _align(self, tensor: Tensor, scores: Tensor) -> Tensor:
        """`tensor` (*batch, 1 or N) with singleton query dimensions, to broadcast against the scores."""
        return align(tensor, scores.ndim, 1)

    def _admit(self, eta: Tensor) -> tuple[Self, Tensor]:
        """Check the shape; promote the potential and eta to one dtype of at least float32."""
        self._check_device(eta=floating("eta", eta))
        need_batch(type(self).__name__, "eta", eta.shape, self.batch_shape, self.event_shape)
        return self._promoted(eta)
