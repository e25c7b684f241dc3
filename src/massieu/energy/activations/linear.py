"""Linear activations, whose Lagrangians are quadratic: identity, a scalar, whitening."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations.base import Activation
from massieu.energy.base import times
from massieu.foundation import matrices
from massieu.foundation.arguments import check_shape, floating, number, positive
from massieu.foundation.values import align, promoted_dtype


class _Linear(Activation):
    @property
    def quadratic(self) -> bool:
        return True


class Identity(_Linear):
    """The identity x ↦ x, L = ½‖x‖²: the reference of plain attention, a standard Gaussian.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Identity
        >>> Identity.create().lagrangian(torch.tensor([3.0, 4.0])).item()
        12.5
    """

    @classmethod
    def create(cls) -> Self:
        """The activation, which has no parameters."""
        return cls()

    @property
    def lipschitz(self) -> Tensor:
        return torch.ones(())

    def _activate(self, x: Tensor) -> Tensor:
        return x

    def _lagrangian(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().sum(-1)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return self._lagrangian(y)


class Scalar(_Linear):
    """Multiplication by a number: x ↦ factor·x, L = ½ factor ‖x‖². Use `create`.

    Attributes:
        factor: Shape (*batch), positive.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Scalar
        >>> Scalar.create(0.5)(torch.tensor([2.0, 4.0])).tolist()
        [1.0, 2.0]
    """

    factor: Float[Tensor, "*batch"]
    trained = {"factor": True}

    @classmethod
    def create(cls, factor: Float[Tensor, "*batch"] | float = 1.0) -> Self:
        """Raises ValueError unless `factor` is positive and finite."""
        return cls(positive("factor", factor))

    @property
    def lipschitz(self) -> Tensor:
        return self.factor

    def _activate(self, x: Tensor) -> Tensor:
        return align(self.factor, x.ndim) * x

    def _lagrangian(self, x: Tensor) -> Tensor:
        return 0.5 * align(self.factor, x.ndim - 1) * x.square().sum(-1)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return 0.5 * y.square().sum(-1) / align(self.factor, y.ndim - 1)


class Whitening(_Linear):
    """Whitening: x ↦ Σ^(−½)(x − location), L = ½(x − location)ᵀ Σ^(−½)(x − location). Use `create` or `of`.

    Σ^(−½) is symmetric; the whitening by a Cholesky factor is no gradient. After it the cloud that `of` was given has mean 0
    and covariance 1 (S13).

    Attributes:
        location: Shape (*batch, d).
        root: Σ^½, symmetric and positive definite, shape (*batch, d, d).
        inverse_root: Σ^(−½).

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Whitening
        >>> cloud = torch.tensor([[1.0], [5.0]])
        >>> [round(x, 3) for x in Whitening.of(cloud)(cloud).flatten().tolist()]
        [-1.0, 1.0]
    """

    location: Float[Tensor, "*batch d"]
    root: Float[Tensor, "*batch d d"]
    inverse_root: Float[Tensor, "*batch d d"]

    @classmethod
    def create(cls, location: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"]) -> Self:
        """From a mean and a covariance, positive definite. Differentiable three times in both.

        Raises:
            ValueError: shapes that do not fit, or a covariance that is not positive definite.
        """
        floating("location", location)
        check_shape("covariance", floating("covariance", covariance), (*location.shape, *location.shape[-1:]))
        dtype = promoted_dtype(location, covariance)
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
        points = points.to(promoted_dtype(points))
        location = points.mean(-2)
        centred = points - location.unsqueeze(-2)
        identity = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        return cls.create(location, centred.mT @ centred / points.shape[-2] + number("eps", eps, least=0) * identity)

    @property
    def lipschitz(self) -> Tensor:
        return torch.linalg.eigvalsh(self.inverse_root)[..., -1]

    @property
    def _shape(self) -> tuple[torch.Size, tuple[int | str]]:
        return self.location.shape[:-1], (self.location.shape[-1],)

    def _activate(self, x: Tensor) -> Tensor:
        return times(x - align(self.location, x.ndim, 1), self.inverse_root)

    def _lagrangian(self, x: Tensor) -> Tensor:
        return 0.5 * ((x - align(self.location, x.ndim, 1)) * self._activate(x)).sum(-1)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        return (y * (0.5 * times(y, self.root) + align(self.location, y.ndim, 1))).sum(-1)
