"""Contractions with parameters: normalisations that are gradients of convex functions.

Each module holds the numbers of a map in `massieu.energy.contraction`, which `map()` builds anew from them. Positive
numbers are kept as logarithms, so that training cannot leave their domain.
"""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.energy import contraction as maps


class Contraction(nn.Module, ABC):
    """x ↦ ∇R(x). Half precision is computed in float32 and returned as it came."""

    @abstractmethod
    def map(self) -> maps.Contraction:
        """The map at the current parameters: a potential with `log_partition`, R, and `conjugate`, R*."""

    def forward(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
        """∇R(x).

        Raises:
            ValueError, TypeError: `x` has another width than the map, or is not floating-point.
        """
        return self.map().mean(x).to(x.dtype)

    def log_partition(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
        """R(x), the Lagrangian; its gradient is `forward`."""
        return self.map().log_partition(x)


class _Positive(Contraction):
    """A contraction of one positive number."""

    log_size: nn.Parameter

    def __init__(self, name: str, size: float) -> None:
        super().__init__()
        if not (isinstance(size, int | float) and 0 < size < math.inf):
            raise ValueError(f"{name} must be a positive number, got {size!r}")
        self.log_size = nn.Parameter(torch.tensor(math.log(size)))

    @property
    def size(self) -> Float[Tensor, ""]:
        """The number: a factor, gain or radius."""
        return self.log_size.exp()


class Spin(Contraction):
    """x ↦ tanh x. No parameter."""

    def map(self) -> maps.Spin:
        """The map."""
        return maps.Spin()


class Scalar(_Positive):
    """x ↦ factor·x."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__("factor", factor)

    def map(self) -> maps.Scalar:
        """The map at the current factor."""
        return maps.Scalar.create(self.size)


class SoftSphere(_Positive):
    """x ↦ the mean of von Mises–Fisher's law on the sphere of that radius, of natural parameter x."""

    def __init__(self, radius: float = 1.0) -> None:
        super().__init__("radius", radius)

    def map(self) -> maps.SoftSphere:
        """The map at the current radius."""
        return maps.SoftSphere.create(self.size)


class SphereProjection(_Positive):
    """x ↦ radius·x/√(‖x‖² + eps)."""

    def __init__(self, radius: float = 1.0, *, eps: float = 1e-6) -> None:
        super().__init__("radius", radius)
        self.eps = eps

    def map(self) -> maps.SphereProjection:
        """The map at the current radius."""
        return maps.SphereProjection.create(self.size, eps=self.eps)


class RMSNorm(_Positive):
    """x ↦ gain·x/√(mean x² + eps), of one gain: with one for each coordinate it would be no gradient."""

    def __init__(self, gain: float = 1.0, *, eps: float = 1e-6) -> None:
        super().__init__("gain", gain)
        self.eps = eps

    def map(self) -> maps.RMSNorm:
        """The map at the current gain."""
        return maps.RMSNorm.create(self.size, eps=self.eps)


class LayerNorm(_Positive):
    """x ↦ gain·(x − mean x)/√(var x + eps) + bias, of one gain: with one for each coordinate it would be no gradient."""

    def __init__(self, width: int, gain: float = 1.0, *, eps: float = 1e-5) -> None:
        super().__init__("gain", gain)
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def map(self) -> maps.LayerNorm:
        """The map at the current gain and bias."""
        return maps.LayerNorm.create(self.size, self.bias, eps=self.eps)
