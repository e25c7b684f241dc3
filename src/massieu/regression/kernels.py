"""Kernels of conditional mean attention: frozen values with parameters, one number or one a key head, that have gradients."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_broadcastable, check_range, described, floating, real_tensor
from massieu.foundation.values import Value, static_field


class Kernel(Value):
    """A positive definite function κ(a, b) of keys: what `conditional_mean_attention` takes its Gram matrix from.

    Subclasses are frozen dataclasses and pytrees by deriving: fields are tensors, or `static_field`s. All are made by
    `create`, whose numbers are a number, one a key head as a list, an array or a tensor (H,), positive and finite.

    Example:
        >>> from massieu.regression import ExponentialKernel, Kernel
        >>> isinstance(ExponentialKernel.create(0.5), Kernel)
        True
    """

    _family: ClassVar[str] = "kernels"

    @abstractmethod
    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """κ(left_i, right_n) for all pairs."""

    @abstractmethod
    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """κ(x, x) of each point."""

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N F"] | None:
        """φ with κ(a, b) = φ(a)·φ(b), if there is one of finite dimension; otherwise None."""
        _check_points(points)
        return None


class FeatureKernel(Kernel):
    """The kernel κ(a, b) = φ(a)·φ(b) of your own feature map: harmonics, random features or a network.

    Attributes:
        map: From (B, H, N, D) to (B, H, N, F). Its own parameters are trained, if it has any.

    Example:
        >>> import torch
        >>> from massieu.regression import FeatureKernel
        >>> affine = FeatureKernel.create(lambda x: torch.cat([torch.ones_like(x), x], -1))
        >>> two = torch.full((1, 1, 1, 1), 2.0)
        >>> affine(two, 1.5 * two).item()  # 1 + ab
        7.0
    """

    map: Callable[[Tensor], Tensor] = static_field()

    @classmethod
    def create(cls, map: Callable[[Tensor], Tensor]) -> Self:
        """Raises TypeError unless the map is callable."""
        if not callable(map):
            raise TypeError(f"map must be a function, got {described(map)}")
        return cls(map)

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        _check_pair(left, right)
        return self.features(left) @ self.features(right).mT

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        return self.features(_check_points(points)).square().sum(-1)

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N F"]:
        return self.map(_check_points(points))


class LinearKernel(Kernel):
    """The linear kernel κ(a, b) = a·b: conditional mean attention is then ridge regression of values on keys.

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel
        >>> two = torch.full((1, 1, 1, 1), 2.0)
        >>> LinearKernel.create()(two, 1.5 * two).item()
        6.0
    """

    @classmethod
    def create(cls) -> Self:
        """It has no numbers."""
        return cls()

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        _check_pair(left, right)
        return left @ right.mT

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        return _check_points(points).square().sum(-1)

    def features(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        return _check_points(points)


class ExponentialKernel(Kernel):
    """The kernel of softmax attention, κ(a, b) = exp(scale·a·b); on a sphere it is Gaussian up to a constant (Z7).

    Conditional means are found with logarithms of it, so that exp(scale·‖x‖²) may be beyond the dtype's range, at keys and
    at queries. Only what is returned must be within it, and the keys' scale·‖key‖² within 177 of each other in float32.

    Attributes:
        scale: Inverse temperature, shape () or (H,), one a key head; None for D^-½, that of `massieu.ops.attention`.

    Example:
        >>> import torch
        >>> from massieu.regression import ExponentialKernel
        >>> two = torch.full((1, 1, 1, 1), 2.0)
        >>> ExponentialKernel.create(0.5).log(two, 1.5 * two).item()
        3.0
    """

    scale: Float[Tensor, "*head"] | None

    @classmethod
    def create(cls, scale: Any = None) -> Self:
        """By default of the scale D^-½."""
        return cls(None if scale is None else _positive("scale", scale))

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        return self.log(left, right).exp()

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        return self.log_diagonal(points).exp()

    def log(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        """log κ(left_i, right_n) for all pairs."""
        _check_pair(left, right)
        return _per_head(self._scale(left), left) * left @ right.mT

    def log_diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        """log κ(x, x) of each point."""
        points = _check_points(points)
        return _per_head(self._scale(points), points).squeeze(-1) * points.square().sum(-1)

    def normalized(self, points: Float[Tensor, "B H N D"]) -> "GaussianKernel":
        """κ' with κ(a, b) = exp(h(a) + h(b))·κ'(a, b), h half of `log_diagonal`: the Gaussian kernel of variance 1/scale."""
        scale = self._scale(_check_points(points))
        _per_head(scale, points)
        return GaussianKernel(scale.rsqrt())

    def _scale(self, points: Tensor) -> Tensor:
        return points.new_full((), points.shape[-1] ** -0.5) if self.scale is None else self.scale


class GaussianKernel(Kernel):
    """κ(a, b) = exp(−‖a − b‖²/(2·lengthscale²)), to a relative rounding of some ε·r², r the keys' distance from their mean
    in lengthscales: below 1e-3 in float32 up to r = 50.

    Attributes:
        lengthscale: Shape () or (H,), one a key head.

    Example:
        >>> import torch
        >>> from massieu.regression import GaussianKernel
        >>> two = torch.full((1, 1, 1, 1), 2.0)
        >>> round(GaussianKernel.create(2.0)(0 * two, two).log().item(), 4)  # −½(2/2)²
        -0.5
    """

    lengthscale: Float[Tensor, "*head"]

    @classmethod
    def create(cls, lengthscale: Any) -> Self:
        """Of this lengthscale."""
        return cls(_positive("lengthscale", lengthscale))

    def __call__(self, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L N"]:
        _check_pair(left, right)
        # A common shift does not change distances, but squares lose digits far from the origin.
        centre = right.detach().mean(-2, keepdim=True)
        width = _per_head(self.lengthscale, left)
        left = (left - centre) / width
        right = (right - centre) / width
        # −½‖a − b‖² = a·b − ½‖a‖² − ½‖b‖² as one product of longer vectors, so that no second matrix of pairs is made.
        left = torch.cat([left, -0.5 * left.square().sum(-1, keepdim=True), torch.ones_like(left[..., :1])], -1)
        right = torch.cat([right, torch.ones_like(right[..., :1]), -0.5 * right.square().sum(-1, keepdim=True)], -1)
        return (left @ right.mT).exp()

    def diagonal(self, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N"]:
        points = _check_points(points)
        return points.new_ones(points.shape[:-1]).masked_fill(points.isnan().any(-1), torch.nan)


def _check_pair(left: Tensor, right: Tensor) -> None:
    """Raise unless the two lists of points have one dimension, one dtype and batches that broadcast."""
    if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"left and right must have shapes (…, L, D) and (…, N, D), got {tuple(left.shape)} and {tuple(right.shape)}"
        )
    if left.dtype != right.dtype:
        raise TypeError(f"left and right must have one dtype, got {left.dtype} and {right.dtype}")
    check_broadcastable(left=left[..., :1, :1], right=right[..., :1, :1])


def _check_points(points: object) -> Tensor:
    if floating("points", points).ndim < 2:
        raise ValueError(f"points must have shape (…, N, D), got {tuple(points.shape)}")  # pyright: ignore[reportAttributeAccessIssue]
    return points  # pyright: ignore[reportReturnType]


def _per_head(number: Tensor, like: Tensor) -> Tensor:
    """A kernel's number with shape (H, 1, 1), to broadcast against (B, H, L, N), in the points' dtype and on their device."""
    if not isinstance(number, Tensor):
        raise TypeError(
            f"a kernel's number must be a tensor, got {type(number).__name__}: make the kernel by create, as in "
            "ExponentialKernel.create(0.5)"
        )
    return number.to(like.device, like.dtype).reshape(-1, 1, 1)


def _positive(name: str, value: Any) -> Tensor:
    """The value as a tensor: numbers in float64, so that they are exact for points of any dtype; tensors as they are."""
    number = real_tensor(name, value, torch.empty((), dtype=torch.float64))
    if number.ndim > 1:
        raise ValueError(f"{name} must be one number or one a head, got shape {tuple(number.shape)}")
    check_range(name, number, above=0)
    return number
