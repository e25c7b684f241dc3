"""Kernels of conditional mean attention: frozen values whose numbers are one, or one a key head, and have gradients."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, dataclass_transform

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures.value import register, static_field, values_are_readable

Number = float | int | Tensor


@dataclass_transform(frozen_default=True)
class Kernel(ABC):
    """A positive definite function κ(a, b) of keys: what `conditional_mean_attention` takes its Gram matrix from.

    Subclasses are frozen dataclasses and pytrees by deriving: fields are tensors, or `static_field`s.
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        register(cls)

    @abstractmethod
    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """κ(left_i, right_n) for all pairs."""

    @abstractmethod
    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """κ(x, x) of each point."""

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N F"] | None:
        """φ with κ(a, b) = φ(a)·φ(b), where there is one of finitely many numbers; else None."""
        return None


class LogKernel(Kernel):
    """A positive kernel whose values may leave the floating range: methods then work with its logarithm.

    κ(a, b) = exp(h(a) + h(b))·κ'(a, b), where h is half the logarithm of κ(x, x), and κ' lies between 0 and 1.
    """

    @abstractmethod
    def log(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """log κ(left_i, right_n) for all pairs."""

    @abstractmethod
    def log_diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """log κ(x, x) of each point."""

    @abstractmethod
    def normalized(self) -> Kernel:
        """κ'."""

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """exp of `log`."""
        return self.log(left, right).exp()

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """exp of `log_diagonal`."""
        return self.log_diagonal(points).exp()


class LinearKernel(Kernel):
    """κ(a, b) = a·b, with features φ(a) = a: conditional mean attention is then ridge regression of values on keys."""

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """left_i·right_n."""
        return left @ right.mT

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """‖x‖²."""
        return points.square().sum(-1)

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        """The points themselves."""
        return points


class ExponentialKernel(LogKernel):
    """κ(a, b) = exp(scale·a·b), softmax attention's; on a sphere it is Gaussian up to a constant (Z7).

    Conditional means are found with logarithms of it, so that exp(scale·‖x‖²) may be beyond the dtype's range, at keys and
    at queries. Only what is returned must be within it, and the keys' scale·‖key‖² within 177 of each other in float32.

    Attributes:
        scale: Inverse temperature, shape () or (H,), one a key head.
    """

    scale: Float[Tensor, "*head"]

    @classmethod
    def create(cls, scale: Number) -> Self:
        """Raises ValueError unless `scale` is positive, finite, and one number or one a head."""
        return cls(_positive("scale", scale))

    def log(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """scale·left_i·right_n."""
        return _per_head(self.scale, left) * left @ right.mT

    def log_diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """scale·‖x‖²."""
        return _per_head(self.scale, points).squeeze(-1) * points.square().sum(-1)

    def normalized(self) -> "GaussianKernel":
        """The Gaussian kernel of variance 1/scale: −½scale·‖a − b‖² = scale·(a·b − ½‖a‖² − ½‖b‖²)."""
        return GaussianKernel(self.scale.rsqrt())


class GaussianKernel(Kernel):
    """κ(a, b) = exp(−‖a − b‖²/(2·lengthscale²)), to a relative rounding of some ε·r², r the keys' distance from their mean
    in lengthscales: below 1e-3 in float32 up to r = 50.

    Attributes:
        lengthscale: Shape () or (H,), one a key head.
    """

    lengthscale: Float[Tensor, "*head"]

    @classmethod
    def create(cls, lengthscale: Number) -> Self:
        """Raises ValueError unless `lengthscale` is positive, finite, and one number or one a head."""
        return cls(_positive("lengthscale", lengthscale))

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """exp(−‖left_i − right_n‖²/(2·lengthscale²))."""
        # Distances do not see a common shift, and squares lose digits far from the origin.
        centre = right.detach().mean(-2, keepdim=True)
        width = _per_head(self.lengthscale, left)
        left, right = (left - centre) / width, (right - centre) / width
        # −½‖a − b‖² as one product of longer vectors: no other matrix of pairs is made.
        left = torch.cat([left, -0.5 * left.square().sum(-1, keepdim=True), torch.ones_like(left[..., :1])], -1)
        right = torch.cat([right, torch.ones_like(right[..., :1]), -0.5 * right.square().sum(-1, keepdim=True)], -1)
        return (left @ right.mT).exp()

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """1."""
        return points.new_ones(points.shape[:-1])


class FeatureKernel(Kernel):
    """κ(a, b) = φ(a)·φ(b) for a map of one's own, such as harmonics, random features or a network.

    Attributes:
        map: From (B, H, N, D) to (B, H, N, F). Its own parameters are trained, if it has any.
    """

    map: Callable[[Tensor], Tensor] = static_field()

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """φ(left_i)·φ(right_n)."""
        return self.map(left) @ self.map(right).mT

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """‖φ(x)‖²."""
        return self.map(points).square().sum(-1)

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N F"]:
        """φ of each point."""
        return self.map(points)


def _per_head(number: Tensor, like: Tensor) -> Tensor:
    """To meet (B, H, L, N), in the dtype and on the device of the points."""
    if not isinstance(number, Tensor):
        raise TypeError(
            f"a kernel's number must be a tensor, got {type(number).__name__}: make the kernel by create, as in "
            "Exponential.create(0.5)"
        )
    return number.to(like.device, like.dtype).reshape(-1, 1, 1)


def _positive(name: str, value: Number) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, float | int | Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    number = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    if not number.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {number.dtype}")
    if number.ndim > 1:
        raise ValueError(f"{name} must be one number or one a head, got shape {tuple(number.shape)}")
    if values_are_readable(number) and not bool(((number > 0) & number.isfinite()).all()):
        raise ValueError(f"{name} must be positive and finite, got {number.tolist()}")
    return number
