"""Linear contractions, whose Lagrangians are quadratic: identity, a scalar, whitening."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import matrices
from massieu.energy.contraction.base import Contraction, align, need_batch, need_width, positive
from massieu.solve.arguments import floating


class Identity(Contraction):
    """x ↦ x, R = ½‖x‖²: the reference of plain attention, a standard Gaussian."""

    quadratic = True

    @property
    def lipschitz(self) -> Tensor:
        return torch.ones(())

    def _log_partition(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().sum(-1)

    def _mean(self, x: Tensor) -> Tensor:
        return x

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return 0.5 * y.square().sum(-1)


class Scalar(Contraction):
    """x ↦ factor·x, R = ½ factor ‖x‖². Use `create`.

    Attributes:
        factor: Shape (*batch), positive.
    """

    factor: Float[Tensor, "*batch"]
    quadratic = True

    @classmethod
    def create(cls, factor: Float[Tensor, "*batch"] | float) -> Self:
        """Raises ValueError unless `factor` is positive and finite."""
        return cls(positive("factor", factor))

    @property
    def lipschitz(self) -> Tensor:
        return self.factor

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.factor.shape, shape)

    def _log_partition(self, x: Tensor) -> Tensor:
        return 0.5 * align(self.factor, x.ndim - 1) * x.square().sum(-1)

    def _mean(self, x: Tensor) -> Tensor:
        return align(self.factor, x.ndim) * x

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return 0.5 * y.square().sum(-1) / align(self.factor, y.ndim - 1)


class Whitening(Contraction):
    """x ↦ Σ^(−½)(x − location), R = ½(x − location)ᵀ Σ^(−½)(x − location). Use `create` or `of`.

    Σ^(−½) is symmetric; the whitening by a Cholesky factor is no gradient. After it the cloud that `of` was given has mean 0
    and covariance 1 (S13).

    Attributes:
        location: Shape (*batch, d).
        root: Σ^½, symmetric and positive definite, shape (*batch, d, d).
        inverse_root: Σ^(−½).
    """

    location: Float[Tensor, "*batch d"]
    root: Float[Tensor, "*batch d d"]
    inverse_root: Float[Tensor, "*batch d d"]
    quadratic = True

    @classmethod
    def create(cls, location: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"]) -> Self:
        """From a mean and a covariance, positive definite. Differentiable three times in both.

        Raises:
            ValueError: shapes that do not fit, or a covariance that is not positive definite.
        """
        for name, tensor in (("location", location), ("covariance", covariance)):
            floating(name, tensor)
        if covariance.shape != (*location.shape, *location.shape[-1:]):
            raise ValueError(
                f"covariance must have shape {(*location.shape, *location.shape[-1:])} for a location of shape "
                f"{tuple(location.shape)}, got {tuple(covariance.shape)}"
            )
        dtype = torch.promote_types(torch.float32, torch.promote_types(location.dtype, covariance.dtype))
        root = matrices.square_root(covariance.to(dtype), owner="Whitening")
        return cls(location.to(dtype), root, torch.linalg.inv(root))

    @classmethod
    def of(cls, points: Float[Tensor, "*batch N d"], *, eps: float = 0.0) -> Self:
        """The whitening of a cloud, with `eps` added to the eigenvalues of its covariance (divided by N).

        Raises:
            ValueError: the covariance is singular, as always for N ≤ d without an `eps`.
        """
        if floating("points", points).ndim < 2 or 0 in points.shape[-2:]:
            raise ValueError(f"points must have shape (*batch, N, d) with N, d ≥ 1, got {tuple(points.shape)}")
        points = points.to(torch.promote_types(torch.float32, points.dtype))
        location = points.mean(-2)
        centred = points - location.unsqueeze(-2)
        identity = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        return cls.create(location, centred.mT @ centred / points.shape[-2] + eps * identity)

    @property
    def lipschitz(self) -> Tensor:
        return torch.linalg.eigvalsh(self.inverse_root)[..., -1]

    def _check(self, shape: tuple[int, ...]) -> None:
        need_batch(self, self.location.shape[:-1], shape)
        need_width(self, self.location.shape[-1], shape)

    def _times(self, matrix: Tensor, x: Tensor) -> Tensor:
        batch = self.location.ndim - 1
        flat = x.reshape(*x.shape[:batch], -1, x.shape[-1])
        return (flat @ matrix).reshape(x.shape)

    def _log_partition(self, x: Tensor) -> Tensor:
        deviation = x - align(self.location, x.ndim, 1)
        return 0.5 * (deviation * self._times(self.inverse_root, deviation)).sum(-1)

    def _mean(self, x: Tensor) -> Tensor:
        return self._times(self.inverse_root, x - align(self.location, x.ndim, 1))

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return (y * (0.5 * self._times(self.root, y) + align(self.location, y.ndim, 1))).sum(-1)
