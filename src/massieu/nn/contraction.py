"""Contractions with parameters: normalisations that are gradients of convex functions.

Each module holds the numbers of a map in `massieu.energy.contraction`, which `map()` builds anew from them. Positive
numbers are kept as logarithms, so that training cannot leave their domain.
"""

import math
from abc import ABC, abstractmethod
from typing import Self

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


class Whitening(Contraction):
    """x ↦ Σ^(−½)(x − location), whose mean and covariance `fit` takes from a cloud of points; the identity before that.

    Both are buffers: no gradient reaches them, and they are saved with the module.
    """

    location: Float[Tensor, "d"]
    covariance: Float[Tensor, "d d"]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("location", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(width))

    @torch.no_grad()
    def fit(self, points: Float[Tensor, "N d"], *, eps: float = 0.0) -> Self:
        """Take mean and covariance (divided by N) of the points, with `eps` added to its eigenvalues (S13).

        Raises:
            ValueError: points of another width, or a covariance that is singular, as always for N ≤ d without an `eps`.
        """
        width = len(self.location)
        if points.ndim != 2 or points.shape[1] != width:
            raise ValueError(f"points must have shape (N, {width}), got {tuple(points.shape)}")
        found = maps.Whitening.of(points, eps=eps)
        self.location.copy_(found.location)
        self.covariance.copy_(found.root @ found.root)
        return self

    def map(self) -> maps.Whitening:
        """The map at the cloud's mean and covariance."""
        return maps.Whitening.create(self.location, self.covariance)
