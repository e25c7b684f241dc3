"""Potentials of scores: A(eta) = Φ(x_1·eta, …, x_N·eta), whose gradient is attention with weights ∇Φ over the points.

Every such attention is a gradient, whatever the points (B19). Φ = log Σ exp is the measure `Atoms`; the potentials that derive
from `PatternPotential` are no log-partition of a measure, but serve as a memory all the same.
"""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from typing import Any, Self, dataclass_transform, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures import Atoms
from massieu.measures.value import register, static_field
from massieu.solve.arguments import floating, need_device


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class PatternPotential(ABC):
    """A convex function of scores. A value and a pytree, as measures are; a class is abstract or final.

    Attributes:
        atoms: The points and their log-weights: the first field of each class that derives from this one.
    """

    atoms: Atoms

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for parent in cls.__mro__[1:]:
            if (
                issubclass(parent, PatternPotential)
                and parent is not PatternPotential
                and not inspect.isabstract(parent)
            ):
                raise TypeError(f"{parent.__name__} is final; derive {cls.__name__} from PatternPotential")
        register(dataclasses.dataclass(frozen=True, eq=False)(cls))

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
        """A(eta), convex, at least float32; −inf where all points are left out.

        Raises:
            ValueError: `eta` has not the shape ``(*batch, *query, d)``.
            TypeError: it is not floating-point.
        """
        potential, eta = self._admit(eta)
        return potential._of_scores(potential._scores(eta))

    @final
    def mean(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """∇A(eta) = Σ weights_n x_n; 0 where all points are left out.

        Raises:
            ValueError, TypeError: as `log_partition`.
        """
        potential, eta = self._admit(eta)
        weights = potential._weights_of_scores(potential._scores(eta))
        flat = weights.reshape(*potential.points.shape[:-2], -1, weights.shape[-1])
        return (flat @ potential.points).reshape(eta.shape)

    @final
    def weights(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query N"]:
        """∇Φ: what the mean multiplies the points with.

        Raises:
            ValueError, TypeError: as `log_partition`.
        """
        potential, eta = self._admit(eta)
        return potential._weights_of_scores(potential._scores(eta))

    # What an author writes. Scores x_n·eta have shape (*batch, *query, N).

    @abstractmethod
    def _of_scores(self, scores: Tensor) -> Tensor:
        """Φ."""

    @abstractmethod
    def _weights_of_scores(self, scores: Tensor) -> Tensor:
        """∇Φ."""

    # Helpers.

    def _scores(self, eta: Tensor) -> Tensor:
        flat = eta.reshape(*self.points.shape[:-2], -1, eta.shape[-1])
        return (flat @ self.points.mT).reshape(*eta.shape[:-1], self.points.shape[-2])

    def _align(self, tensor: Tensor, scores: Tensor, rest: int = 1) -> Tensor:
        """`tensor` (*batch, *rest) with singleton query dimensions, to broadcast against the scores."""
        own = tensor.ndim - rest
        return tensor.reshape((*tensor.shape[:own], *[1] * (scores.ndim - tensor.ndim), *tensor.shape[own:]))

    def _admit(self, eta: Tensor) -> tuple[Self, Tensor]:
        """Check the shape; promote the potential and eta to one dtype of at least float32."""
        need_device(type(self).__name__, "eta", floating("eta", eta), self.points)
        _, eta = self.atoms._fit(eta=eta)
        dtype = eta.dtype
        for leaf in pytree.tree_leaves(self):
            dtype = torch.promote_types(dtype, leaf.dtype)
        return pytree.tree_map(lambda leaf: leaf.to(dtype), self), eta.to(dtype)
