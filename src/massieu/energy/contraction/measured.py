"""Contractions that are mean maps of measures, for a state of any width."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import duality, measures
from massieu.energy.contraction.base import Contraction, need_batch, positive


class Spin(Contraction):
    """x ↦ tanh x, R = Σ log cosh x: coordinates are the means of signs (`massieu.measures.Spin`), of any number.

    R* = Σ ½(1 + y) log(1 + y) + ½(1 − y) log(1 − y), without a gradient at ±1.
    """

    @property
    def lipschitz(self) -> Tensor:
        return torch.ones(())

    def _log_partition(self, x: Tensor) -> Tensor:
        return measures.Spin(x.new_zeros(x.shape[-1:])).log_partition(x)

    def _mean(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        size = y.detach().abs()
        inner = torch.where(size < 1, y, 0.0)
        value = 0.5 * ((1 + inner) * torch.log1p(inner) + (1 - inner) * torch.log1p(-inner))
        edge = torch.where(size <= 1 + rounding, math.log(2), torch.inf)
        return torch.where(size < 1, value, edge).sum(-1)


class SoftSphere(Contraction):
    """x ↦ radius·A_d(radius‖x‖)·x/‖x‖: the mean of von Mises–Fisher's law (`massieu.measures.Sphere`), in any d ≥ 2.

    Short vectors shrink, long ones come near the sphere. Use `create`.

    Attributes:
        radius: Shape (*batch), positive.
    """

    radius: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, radius: Float[Tensor, "*batch"] | float = 1.0) -> Self:
        """Raises ValueError unless `radius` is positive and finite."""
        return cls(positive("radius", radius))

    @property
    def lipschitz(self) -> Tensor:
        """radius²/2, which is attained in two dimensions; in d it is radius²/d."""
        return self.radius.square() / 2

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.radius.shape, shape)
        if shape[-1] < 2:
            raise ValueError(f"SoftSphere needs at least two dimensions (in one, use Spin), got shape {shape}")

    def _log_partition(self, x: Tensor) -> Tensor:
        return self._sphere(x).log_partition(x)

    def _mean(self, x: Tensor) -> Tensor:
        return self._sphere(x).mean(x)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return duality.conjugate(self._sphere(y), y)

    def _sphere(self, x: Tensor) -> measures.Sphere:
        return measures.Sphere(self.radius, x.shape[-1])
