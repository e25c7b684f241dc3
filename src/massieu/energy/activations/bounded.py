"""Activations of bounded range: tanh and normalisations, each with its Lagrangian.

Normalisations are x ↦ r·u/√(‖u‖² + s²) + bias, u = x or x less its mean, and L = r√(‖u‖² + s²) + bias·x. The range is the
ball of radius r about the bias (for LayerNorm, where it meets the hyperplane Σ(y − bias) = 0), L* = −s√(r² − ‖y − bias‖²)
there.
"""

import math
from abc import abstractmethod
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from massieu import measures
from massieu.energy.activations.base import Activation
from massieu.foundation.arguments import check_finite, floating, number, positive
from massieu.foundation.values import align, static_field


class Tanh(Activation):
    """tanh of each coordinate, the mean of a random sign (`massieu.measures.Spin`); L = Σ log cosh x.

    L* = Σ ½(1 + y) log(1 + y) + ½(1 − y) log(1 − y), without a gradient at ±1.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Tanh
        >>> Tanh.create()(torch.tensor([-9.0, 0.0, 9.0])).round().tolist()
        [-1.0, 0.0, 1.0]
    """

    @classmethod
    def create(cls) -> Self:
        """The activation, which has no parameters."""
        return cls()

    @property
    def lipschitz(self) -> Tensor:
        return torch.ones(())

    def _activate(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _lagrangian(self, x: Tensor) -> Tensor:
        return measures.Spin(x.new_zeros(x.shape[-1:])).log_partition(x)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        size = y.detach().abs()
        # On the boundary the gradient is infinite, and 0·∞ would make that of the unused branch NaN.
        inner = torch.where(size >= 1, 0.0, y)
        value = 0.5 * ((1 + inner) * torch.log1p(inner) + (1 - inner) * torch.log1p(-inner))
        at_boundary = torch.where(size <= 1 + rounding, math.log(2), torch.inf)
        return torch.where(size >= 1, at_boundary, value).sum(-1)


class _Normalisation(Activation):
    """The map r·u/√(‖u‖² + s²) + bias. A subclass gives r, s², u and the bias."""

    eps: float = static_field(default=0.0, kw_only=True)

    @abstractmethod
    def _scales(self, x: Tensor) -> tuple[Tensor, float]:
        """r, with as many dimensions as L(x), and s²."""

    def _centred(self, x: Tensor) -> Tensor:
        """u, a projection of x."""
        return x

    def _offset(self, x: Tensor) -> Tensor | None:
        """The bias, aligned with x, or None."""
        return None

    @property
    def lipschitz(self) -> Tensor:
        """The radius or gain over √eps, approached where u = 0; infinite for eps = 0."""
        radius_or_gain = self._tensors()[0]
        if self.eps == 0:
            return torch.full_like(radius_or_gain, torch.inf)
        return radius_or_gain / math.sqrt(self.eps)

    def _activate(self, x: Tensor) -> Tensor:
        radius, softening = self._scales(x)
        u = self._centred(x)
        length = _length(u, softening)
        # At u = s = 0 this gives 0, the subgradient of least norm.
        value = radius.unsqueeze(-1) * u / torch.where(length == 0, 1.0, length).unsqueeze(-1)
        bias = self._offset(x)
        if bias is None:
            return value
        return value + bias

    def _lagrangian(self, x: Tensor) -> Tensor:
        radius, softening = self._scales(x)
        value = radius * _length(self._centred(x), softening)
        bias = self._offset(x)
        if bias is None:
            return value
        return value + (bias * x).sum(-1)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        radius, softening = self._scales(y)
        bias = self._offset(y)
        deviation = y if bias is None else y - bias
        inner = self._centred(deviation)
        # L* = −s√(r² − ‖inner‖²) = −r·√(s²·gap), in units of the radius, whose square may be beyond the dtype's range.
        gap = 1 - (inner / radius.unsqueeze(-1)).square().sum(-1)
        # Rounding may have moved a point of the range by `slack` radii: the rounding of the point, and of its deviation.
        sizes = _length(y.detach(), 0.0) + _length(deviation.detach(), 0.0)
        slack = rounding * (1 + sizes / radius)
        beyond_ball = gap < -2 * slack
        off_hyperplane = _length((deviation - inner).detach(), 0.0) / radius > slack
        # On the sphere itself, where gap = 0, the root has no derivative. Negated, so that a NaN stays NaN.
        within = ~(gap <= 0) & (softening > 0)
        value = -radius * torch.where(within, softening * gap, 1.0).sqrt()
        return torch.where(within, value, 0.0 * gap).masked_fill(beyond_ball | off_hyperplane, torch.inf)


def _length(u: Tensor, softening: float) -> Tensor:
    """√(‖u‖² + s²), with derivative 0 where both are 0."""
    # Squares of very large and very small numbers are beyond the dtype's range: such vectors are divided by their largest
    # entry first. All others are not, so that they keep their bits.
    largest = pad(u.detach().abs(), (0, 1), value=math.sqrt(softening)).amax(-1)
    limit = math.sqrt(torch.finfo(u.dtype).max) / 2**10
    extreme = ((largest > limit) | (largest < 1 / limit)) & (largest > 0) & largest.isfinite()
    unit = torch.where(extreme, largest, 1.0)
    square = (u / unit.unsqueeze(-1)).square().sum(-1) + softening / unit / unit
    origin = square == 0
    return torch.where(origin, 0.0, unit * torch.where(origin, 1.0, square).sqrt())


class SphereProjection(_Normalisation):
    """Projection onto the sphere: x ↦ radius·x/√(‖x‖² + eps), L = radius·√(‖x‖² + eps). Use `create`.

    With eps = 0 that is the point of the sphere nearest to x, and at x = 0, where there is none, 0.

    Attributes:
        radius: Shape (*batch), positive.
        eps: At least 0.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import SphereProjection
        >>> [round(x, 3) for x in SphereProjection.create(10.0)(torch.tensor([3.0, 4.0])).tolist()]
        [6.0, 8.0]
    """

    radius: Float[Tensor, "*batch"]
    trained = {"radius": True}

    @classmethod
    def create(cls, radius: Float[Tensor, "*batch"] | float = 1.0, *, eps: float = 0.0) -> Self:
        """Raises ValueError unless `radius` is positive and `eps` at least 0, both finite."""
        return cls(positive("radius", radius), eps=number("eps", eps, least=0))

    def _scales(self, x: Tensor) -> tuple[Tensor, float]:
        return align(self.radius, x.ndim - 1), self.eps


class RMSNorm(_Normalisation):
    """RMS normalisation with one gain: x ↦ gain·x/√(mean x² + eps), L = d·gain·√(mean x² + eps). Use `create`.

    Attributes:
        gain: Shape (*batch), positive: one for all coordinates.
        eps: At least 0.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import RMSNorm
        >>> RMSNorm.create(eps=0.0)(torch.tensor([2.0, -2.0])).tolist()
        [1.0, -1.0]
    """

    gain: Float[Tensor, "*batch"]
    trained = {"gain": True}

    @classmethod
    def create(cls, gain: Float[Tensor, "*batch"] | float = 1.0, *, eps: float = 1e-6) -> Self:
        """Raises ValueError unless `gain` is positive and `eps` at least 0, both finite."""
        return cls(positive("gain", gain), eps=number("eps", eps, least=0))

    def _scales(self, x: Tensor) -> tuple[Tensor, float]:
        return math.sqrt(x.shape[-1]) * align(self.gain, x.ndim - 1), x.shape[-1] * self.eps


class LayerNorm(_Normalisation):
    """Layer normalisation with one gain: x ↦ gain·(x − mean x)/√(var x + eps) + bias. Use `create`.

    The Lagrangian is d·gain·√(var x + eps) + bias·x. The variance is divided by d, as in `torch.nn.LayerNorm`. A
    constant x is mapped to the bias.

    Attributes:
        gain: Shape (*batch), positive: one for all coordinates.
        bias: Shape (*batch, d), or (*batch, 1) for one bias everywhere.
        eps: At least 0.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import LayerNorm
        >>> LayerNorm.create(eps=0.0)(torch.tensor([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """

    gain: Float[Tensor, "*batch"]
    bias: Float[Tensor, "*batch d"]
    trained = {"gain": True, "bias": False}

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
        bias = gain.new_zeros((*gain.shape, 1)) if bias is None else floating("bias", bias)
        if bias.ndim != gain.ndim + 1 or bias.shape[:-1] != gain.shape:
            raise ValueError(
                f"bias must have shape {(*gain.shape, 'd')} for a gain of shape {tuple(gain.shape)} (one gain for all "
                f"coordinates; with one for each, LayerNorm is no gradient), got {tuple(bias.shape)}"
            )
        check_finite(bias=bias)
        return cls(gain, bias, eps=number("eps", eps, least=0))

    @property
    def _shape(self) -> tuple[torch.Size, tuple[int | str]]:
        width = self.bias.shape[-1]
        return self.gain.shape, (width if width > 1 else "d",)

    def _scales(self, x: Tensor) -> tuple[Tensor, float]:
        return math.sqrt(x.shape[-1]) * align(self.gain, x.ndim - 1), x.shape[-1] * self.eps

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def _offset(self, x: Tensor) -> Tensor:
        return align(self.bias, x.ndim, 1)
