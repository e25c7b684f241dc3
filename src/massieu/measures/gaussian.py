"""The normal distribution: the only measure whose log-partition is quadratic."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures.base import Measure, values_are_readable


class Gaussian(Measure):
    """h = N(location, covariance): A(eta) = location·eta + ½ etaᵀ covariance eta (S5). Degenerate covariances allowed.

    The number of dimensions of `covariance` says what it is: one less than `location`'s, a variance for all
    coordinates; as many, one variance per coordinate; one more, the full matrix. Use `create`, which checks.

    Attributes:
        location: The mean of h, shape (*batch, d).
        covariance: Shape (*batch), (*batch, d) or (*batch, d, d).
    """

    location: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch"] | Float[Tensor, "*batch d"] | Float[Tensor, "*batch d d"]

    @classmethod
    def create(
        cls,
        location: Float[Tensor, "*batch d"],
        covariance: Float[Tensor, "*batch"] | Float[Tensor, "*batch d"] | Float[Tensor, "*batch d d"] | None = None,
        *,
        factor: Float[Tensor, "*batch d r"] | None = None,
    ) -> Self:
        """A Gaussian from its mean and either its covariance or a factor of it.

        Args:
            location: The mean.
            covariance: Isotropic, diagonal or full, told apart by the number of dimensions; positive semi-definite.
            factor: L with covariance L Lᵀ: a Cholesky factor, or any matrix of d rows.

        Raises:
            ValueError: both or none of covariance and factor; shapes that do not fit; a NaN or an infinity; a negative
                variance; a matrix that is not symmetric or has a negative eigenvalue (beyond rounding).
            TypeError: `location` is not floating-point.
        """
        if not location.is_floating_point():
            raise TypeError(f"location must be a floating-point tensor, got {location.dtype}")
        if location.ndim == 0:
            raise ValueError("location must have shape (*batch, d), got a scalar")
        if (covariance is None) == (factor is None):
            raise ValueError("Gaussian needs exactly one of covariance and factor")
        if factor is not None:
            if factor.ndim != location.ndim + 1 or factor.shape[:-1] != location.shape:
                raise ValueError(
                    f"factor must have shape {(*location.shape, 'r')} for a location of shape "
                    f"{tuple(location.shape)}, got {tuple(factor.shape)}"
                )
            covariance = factor @ factor.mT
        assert covariance is not None
        allowed = [location.shape[:-1], location.shape, (*location.shape, location.shape[-1])]
        if tuple(covariance.shape) not in [tuple(shape) for shape in allowed]:
            raise ValueError(
                f"covariance must have shape {' or '.join(str(tuple(shape)) for shape in allowed)} for a location of "
                f"shape {tuple(location.shape)}, got {tuple(covariance.shape)}"
            )
        if values_are_readable(location, covariance):
            if not bool(location.isfinite().all() & covariance.isfinite().all()):
                raise ValueError("location and covariance must be finite")
            if factor is None:
                _check_positive(covariance, full=covariance.ndim > location.ndim)
        return cls(location, covariance)

    @property
    def batch_shape(self) -> torch.Size:
        return self.location.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        return self.location.shape[-1:]

    @property
    def _rank(self) -> int:
        """How many dimensions of `covariance` are not batch: 0 isotropic, 1 diagonal, 2 full."""
        return self.covariance.ndim - self.location.ndim + 1

    def _covariance_times(self, vector: Tensor) -> Tensor:
        covariance = self._align(self.covariance, vector, self._rank)
        if self._rank == 2:
            return (covariance @ vector.unsqueeze(-1)).squeeze(-1)
        return (covariance.unsqueeze(-1) if self._rank == 0 else covariance) * vector

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._dot(eta, self._align(self.location, eta) + 0.5 * self._covariance_times(eta))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._align(self.location, eta) + self._covariance_times(eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._covariance_times(vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        matrix = self.covariance
        if self._rank == 0:
            matrix = matrix.unsqueeze(-1).expand(self.location.shape)
        if self._rank < 2:
            matrix = torch.diag_embed(matrix)
        return self._align(matrix, eta, 2).expand(*eta.shape, eta.shape[-1])

    def _entropy(self, eta: Tensor) -> Tensor:
        return -0.5 * self._dot(eta, self._covariance_times(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return 0.5 * self._dot(delta, self._covariance_times(delta))

    def _tilt(self, eta: Tensor) -> "Gaussian":
        return Gaussian(self._mean(eta), self.covariance)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(*shape, *eta.shape, dtype=eta.dtype, device=eta.device, generator=generator)
        if self._rank == 2:
            # A symmetric root exists for every positive semi-definite matrix; a Cholesky factor does not.
            eigenvalues, vectors = torch.linalg.eigh(self.covariance)
            root = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
            deviation = (self._align(root, eta, 2) @ noise.unsqueeze(-1)).squeeze(-1)
        else:
            root = self._align(self.covariance, eta, self._rank).sqrt()
            deviation = (root.unsqueeze(-1) if self._rank == 0 else root) * noise
        return self._mean(eta) + deviation


def _check_positive(covariance: Tensor, *, full: bool) -> None:
    if not full:
        if bool((covariance < 0).any()):
            raise ValueError(f"variances must not be negative, got {float(covariance.detach().min()):.3g}")
        return
    matrix = covariance.detach().double()
    rounding = matrix.shape[-1] * torch.finfo(covariance.dtype).eps * matrix.abs().amax((-2, -1), keepdim=True)
    if bool(((matrix - matrix.mT).abs() > 8 * rounding).any()):
        raise ValueError("covariance must be symmetric")
    smallest = torch.linalg.eigvalsh(matrix)[..., 0]
    if bool((smallest < -8 * rounding[..., 0, 0]).any()):
        raise ValueError(f"covariance must be positive semi-definite, got an eigenvalue of {float(smallest.min()):.3g}")
