"""Normalisations: LayerNorm, RMSNorm and the projection onto a sphere, each with its Lagrangian.

All three are x ↦ r·u/√(‖u‖² + s²) + bias, u = x or x less its mean, and R = r√(‖u‖² + s²) + bias·x. The range is the ball of
radius r about the bias (for LayerNorm, where it meets the hyperplane Σ(y − bias) = 0), R* = −s√(r² − ‖y − bias‖²) there.
"""

import math
from abc import abstractmethod
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.contraction.base import Contraction, align, need_batch, need_width, positive
from massieu.measures.value import values_are_readable
from massieu.solve.arguments import floating


class _Normalisation(Contraction):
    """r·u/√(‖u‖² + s²) + bias. Authors say what r, s², u and the bias are."""

    @abstractmethod
    def _radius(self, width: int) -> Tensor:
        """r, shape (*batch)."""

    @abstractmethod
    def _softening(self, width: int) -> Tensor:
        """s², shape (*batch)."""

    def _centred(self, x: Tensor) -> Tensor:
        """u, a projection of x."""
        return x

    def _offset(self, x: Tensor) -> Tensor | None:
        """The bias, aligned with x, or None."""
        return None

    def _log_partition(self, x: Tensor) -> Tensor:
        length = _length(self._centred(x), align(self._softening(x.shape[-1]), x.ndim - 1))
        value = align(self._radius(x.shape[-1]), x.ndim - 1) * length
        offset = self._offset(x)
        return value if offset is None else value + (offset * x).sum(-1)

    def _mean(self, x: Tensor) -> Tensor:
        u = self._centred(x)
        length = _length(u, align(self._softening(x.shape[-1]), x.ndim - 1)).unsqueeze(-1)
        # At u = s = 0 the subgradient of least norm.
        value = align(self._radius(x.shape[-1]), x.ndim) * u / torch.where(length == 0, 1.0, length)
        offset = self._offset(x)
        return value if offset is None else value + offset

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        radius = align(self._radius(y.shape[-1]), y.ndim - 1)
        softening = align(self._softening(y.shape[-1]), y.ndim - 1)
        offset = self._offset(y)
        deviation = y if offset is None else y - offset
        inner = self._centred(deviation)
        gap = radius.square() - inner.square().sum(-1)
        # What rounding may have made of a point of the range: of the point itself, and of what its bias moved.
        slack = rounding * (radius + y.detach().norm(dim=-1) + deviation.detach().norm(dim=-1))
        outside = (gap < -2 * radius * slack) | ((deviation - inner).detach().norm(dim=-1) > slack)
        # On the sphere itself the root has no derivative.
        within = (gap > 0) & (softening > 0)
        value = -torch.where(within, softening * gap, 1.0).sqrt()
        return torch.where(within, value, 0.0).masked_fill(outside, torch.inf)


def _length(u: Tensor, softening: Tensor) -> Tensor:
    """√(‖u‖² + s²), with derivative 0 where both are 0."""
    square = u.square().sum(-1) + softening
    positive_square = square > 0
    return torch.where(positive_square, torch.where(positive_square, square, 1.0).sqrt(), 0.0)


class SphereProjection(_Normalisation):
    """x ↦ radius·x/√(‖x‖² + eps), R = radius·√(‖x‖² + eps). Use `create`.

    With eps = 0 that is the point of the sphere nearest to x, and at x = 0, where there is none, 0.

    Attributes:
        radius: Shape (*batch), positive.
        eps: Shape (*batch) or (), at least 0.
    """

    radius: Float[Tensor, "*batch"]
    eps: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, radius: Float[Tensor, "*batch"] | float = 1.0, *, eps: float = 0.0) -> Self:
        """Raises ValueError unless `radius` is positive and `eps` at least 0, both finite."""
        radius = positive("radius", radius)
        return cls(radius, _softening(eps, radius))

    @property
    def lipschitz(self) -> Tensor:
        """radius/√eps, infinite for eps = 0."""
        return self.radius / self.eps.sqrt()

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.radius.shape, shape)

    def _radius(self, width: int) -> Tensor:
        return self.radius

    def _softening(self, width: int) -> Tensor:
        return self.eps


class RMSNorm(_Normalisation):
    """x ↦ gain·x/√(mean x² + eps), R = d·gain·√(mean x² + eps). Use `create`.

    Attributes:
        gain: Shape (*batch), positive: one for all coordinates.
        eps: Shape (*batch) or (), at least 0.
    """

    gain: Float[Tensor, "*batch"]
    eps: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, gain: Float[Tensor, "*batch"] | float = 1.0, *, eps: float = 1e-6) -> Self:
        """Raises ValueError unless `gain` is positive and `eps` at least 0, both finite."""
        gain = positive("gain", gain)
        return cls(gain, _softening(eps, gain))

    @property
    def lipschitz(self) -> Tensor:
        """gain/√eps, approached at x = 0; infinite for eps = 0."""
        return self.gain / self.eps.sqrt()

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.gain.shape, shape)

    def _radius(self, width: int) -> Tensor:
        return math.sqrt(width) * self.gain

    def _softening(self, width: int) -> Tensor:
        return width * self.eps


class LayerNorm(_Normalisation):
    """x ↦ gain·(x − mean x)/√(var x + eps) + bias, R = d·gain·√(var x + eps) + bias·x. Use `create`.

    The variance is divided by d, as in `torch.nn.LayerNorm`. A constant x is mapped to the bias.

    Attributes:
        gain: Shape (*batch), positive: one for all coordinates.
        bias: Shape (*batch, d), or (*batch, 1) for one bias everywhere.
        eps: Shape (*batch) or (), at least 0.
    """

    gain: Float[Tensor, "*batch"]
    bias: Float[Tensor, "*batch d"]
    eps: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        gain: Float[Tensor, "*batch"] | float = 1.0,
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        eps: float = 1e-5,
    ) -> Self:
        """One gain for all coordinates, a bias for each, zero by default.

        Raises:
            ValueError: `gain` is not positive or `eps` negative; `bias` has not the shape (*gain.shape, d) or is not
                finite. A gain for every coordinate makes the map no gradient (its Jacobian is not symmetric).
        """
        gain = positive("gain", gain)
        if bias is not None:
            floating("bias", bias)
        else:
            bias = gain.new_zeros((*gain.shape, 1))
        if bias.ndim != gain.ndim + 1 or bias.shape[:-1] != gain.shape:
            raise ValueError(
                f"bias must have shape {(*gain.shape, 'd')} for a gain of shape {tuple(gain.shape)} (one gain for all "
                f"coordinates; with one for each, LayerNorm is no gradient), got {tuple(bias.shape)}"
            )
        if values_are_readable(bias) and not bool(bias.isfinite().all()):
            raise ValueError("bias must be finite")
        return cls(gain, bias, _softening(eps, gain))

    @property
    def lipschitz(self) -> Tensor:
        """gain/√eps, approached at constant x; infinite for eps = 0."""
        return self.gain / self.eps.sqrt()

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.gain.shape, shape)
        if self.bias.shape[-1] > 1:
            need_width(self, self.bias.shape[-1], shape)

    def _radius(self, width: int) -> Tensor:
        return math.sqrt(width) * self.gain

    def _softening(self, width: int) -> Tensor:
        return width * self.eps

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def _offset(self, x: Tensor) -> Tensor:
        return align(self.bias, x.ndim, 1)


def _softening(eps: float, like: Tensor) -> Tensor:
    if not (isinstance(eps, (int, float)) and 0 <= eps < math.inf):
        raise ValueError(f"eps must be a number, at least 0 and finite, got {eps!r}")
    return like.new_full(like.shape, eps)
