"""The normal distribution: the only measure whose log-partition is quadratic."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_shape, real_tensor, whole_number
from massieu.foundation.matrices import eigenvalue_rounding, is_singular
from massieu.foundation.transforms import any_true, unwrapped, values_are_readable
from massieu.measures.base import Measure
from massieu.measures.hooks import MissingFormError


class Gaussian(Measure):
    """A Gaussian N(location, Σ): A(eta) = location·eta + ½ etaᵀ Σ eta (S5). Degenerate covariances are allowed.

    Σ is `covariance` plus ``factor @ factor.mT``. If `covariance` has one dimension less than `location`, it is one
    variance for all coordinates; with as many dimensions it is one variance per coordinate; with one more, the full matrix.
    Low rank plus diagonal costs d·r for each eta; only `fisher`, `log_prob` and the inverse map form the matrix. Use
    `create`, which checks.

    Attributes:
        location: The mean of h, shape (*batch, d).
        covariance: Shape (*batch), (*batch, d) or (*batch, d, d).
        factor: Shape (*batch, d, r), r = 0 for none.

    Example:
        >>> from massieu.measures import Gaussian
        >>> law = Gaussian.create([1.0, 0.0], 2.0)
        >>> law.mean([0.5, 1.0]).tolist(), law.kl([0.0, 0.0], [1.0, 1.0]).tolist()
        ([2.0, 2.0], 2.0)
    """

    location: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch"] | Float[Tensor, "*batch d"] | Float[Tensor, "*batch d d"]
    factor: Float[Tensor, "*batch d r"]

    @classmethod
    def create(
        cls,
        location: Float[Tensor, "*batch d"] | float,
        covariance: Float[Tensor, "*batch"]
        | Float[Tensor, "*batch d"]
        | Float[Tensor, "*batch d d"]
        | float
        | None = None,
        *,
        factor: Float[Tensor, "*batch d r"] | None = None,
        dim: int | None = None,
    ) -> Self:
        """A Gaussian from its mean and its covariance, a factor of it, or both: their sum.

        Args:
            location: The mean.
            covariance: Isotropic, diagonal or full, told apart by the number of dimensions; positive semi-definite. A
                number is the variance of every coordinate and batch item.
            factor: L, which adds L Lᵀ: a Cholesky factor, or any matrix of d rows.
            dim: d, where `location` is a number.

        Raises:
            ValueError, TypeError: see `Measure`; neither covariance nor factor; a negative variance; a matrix that is not
                symmetric or has a negative eigenvalue (beyond rounding).
        """
        like = next((argument for argument in (location, covariance, factor) if isinstance(argument, Tensor)), None)
        location = real_tensor("location", location, like)
        if location.ndim == 0:
            location = location.expand(1 if dim is None else whole_number("dim", dim, least=1))
        batch = location.shape[:-1]
        size = location.shape[-1] if dim is None else dim
        if size == 0:
            raise ValueError(f"location must have shape (*batch, d) with d ≥ 1, got {tuple(location.shape)}")
        check_shape("location", location, (*batch, size))
        if covariance is None and factor is None:
            raise ValueError("Gaussian needs a covariance, a factor of it, or both")
        if factor is None:
            factor = location.new_zeros((*batch, size, 0))
        factor = real_tensor("factor", factor, location)
        check_shape("factor", factor, (*batch, size, "r"))
        covariance = real_tensor("covariance", 0.0 if covariance is None else covariance, location)
        if covariance.ndim == 0:
            covariance = covariance.expand(batch)
        allowed = [tuple(batch), (*batch, size), (*batch, size, size)]
        if tuple(covariance.shape) not in allowed:
            raise ValueError(
                f"covariance must have shape {' or '.join(map(str, allowed))} for a location of shape "
                f"{tuple(location.shape)}, got {tuple(covariance.shape)}"
            )
        check_finite(location=location, covariance=covariance, factor=factor)
        if values_are_readable(covariance):
            _check_positive(covariance, full=covariance.ndim > location.ndim)
        return cls(location, covariance, factor)

    @property
    def _rank(self) -> int:
        """The number of dimensions of `covariance` that are not batch: 0 isotropic, 1 diagonal, 2 full."""
        return self.covariance.ndim - self.location.ndim + 1

    @property
    def _is_diagonal(self) -> bool:
        return self._rank < 2 and self.factor.shape[-1] == 0

    def _covariance_times(self, vector: Tensor) -> Tensor:
        """Σ·vector, without the matrix where Σ is low rank plus diagonal."""
        covariance = self._align(self.covariance, vector, self._rank)
        if self._rank == 0:
            product = covariance.unsqueeze(-1) * vector
        elif self._rank == 1:
            product = covariance * vector
        else:
            product = (covariance @ vector.unsqueeze(-1)).squeeze(-1)
        if self.factor.shape[-1] == 0:
            return product
        factor = self._align(self.factor, vector, 2)
        return product + (factor @ (factor.mT @ vector.unsqueeze(-1))).squeeze(-1)

    def _matrix(self) -> Tensor:
        """Σ, shape (*batch, d, d)."""
        matrix = self.covariance
        if self._rank == 0:
            matrix = matrix.unsqueeze(-1).expand(self.location.shape)
        if self._rank < 2:
            matrix = torch.diag_embed(matrix)
        return matrix if self.factor.shape[-1] == 0 else matrix + self.factor @ self.factor.mT

    def _variances(self) -> Tensor:
        """The diagonal of Σ, shape (*batch, d)."""
        if self._rank == 0:
            variances = self.covariance.unsqueeze(-1).expand_as(self.location)
        elif self._rank == 1:
            variances = self.covariance.expand_as(self.location)
        else:
            variances = self.covariance.diagonal(dim1=-2, dim2=-1)
        return variances + self.factor.square().sum(-1)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._dot(eta, self._align(self.location, eta) + 0.5 * self._covariance_times(eta))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._align(self.location, eta) + self._covariance_times(eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._covariance_times(vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        return self._align(self._matrix(), eta, 2).expand(*eta.shape, eta.shape[-1])

    def _entropy(self, eta: Tensor) -> Tensor:
        return -0.5 * self._dot(eta, self._covariance_times(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return 0.5 * self._dot(delta, self._covariance_times(delta))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        image = self._covariance_times(direction)
        mean = self._dot(direction, self._mean(eta))
        variance = self._dot(direction, image)
        cumulants = torch.stack([mean, variance][:order], -1)
        # All later ones are 0.
        return torch.cat([cumulants, cumulants.new_zeros((*cumulants.shape[:-1], max(order - 2, 0)))], -1)

    def _tilt(self, eta: Tensor) -> "Gaussian":
        return Gaussian(self._mean(eta), self.covariance, self.factor)

    def _power(self, exponent: float) -> "Gaussian":
        return Gaussian(exponent * self.location, exponent * self.covariance, math.sqrt(exponent) * self.factor)

    def _support(self, direction: Tensor) -> Tensor:
        variance = self._dot(direction, self._covariance_times(direction))
        rounding = self._align(self._rounding(), direction, 0) * self._dot(direction, direction)
        return torch.where(variance > rounding, torch.inf, self._dot(direction, self._align(self.location, direction)))

    def _range(self) -> tuple[Tensor, Tensor]:
        varies = self._variances() > self._rounding().unsqueeze(-1)
        return self.location.masked_fill(varies, -torch.inf), self.location.masked_fill(varies, torch.inf)

    def _rounding(self) -> Tensor:
        """The variance below which a direction's is rounding alone, shape (*batch)."""
        variances = self._variances()
        return 8 * torch.finfo(variances.dtype).eps * variances.sum(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        return self._log_prob(torch.zeros_like(point), point)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """The log-density of N(mean(eta), Σ), which depends on the deviation from the mean alone, whatever eta's size."""
        deviation = point - self._mean(eta)
        if self._is_diagonal:
            variances = self._variances()
            self._refuse_degenerate(~(variances > 0).all(-1))
            log_volume = 0.5 * variances.log().sum(-1)
            whitened = deviation / self._align(variances.sqrt(), point)  # Σ^-½ deviation
        else:
            matrix = self._matrix()
            self._refuse_degenerate(is_singular(matrix))
            root = torch.linalg.cholesky_ex(matrix).L
            log_volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            # One system with a column for each point: (*batch, d, points). Broadcasting would copy the root for each.
            columns = deviation.unsqueeze(-2).flatten(len(self.batch_shape), -2).mT
            whitened = torch.linalg.solve_triangular(root, columns, upper=False).mT.reshape(deviation.shape)
        normaliser = self._align(log_volume, point, 0) + 0.5 * point.shape[-1] * math.log(2 * math.pi)
        return -0.5 * whitened.square().sum(-1) - normaliser

    def _unit_sizes(self) -> list[int]:
        size = self.event_shape[0]
        return [1] * size if self._is_diagonal else [size]

    def _log_partition_of_units(self, eta: Tensor) -> Tensor:
        if not self._is_diagonal:
            return super()._log_partition_of_units(eta)
        return eta * (self._align(self.location, eta) + 0.5 * self._covariance_times(eta))

    def _log_prob_of_units(self, eta: Tensor, point: Tensor) -> Tensor:
        if not self._is_diagonal:
            return super()._log_prob_of_units(eta, point)
        variances = self._variances()
        self._refuse_degenerate(~(variances > 0).all(-1))
        variances = self._align(variances, point)
        return -0.5 * ((point - self._mean(eta)).square() / variances + (2 * math.pi * variances).log())

    def _refuse_degenerate(self, is_degenerate: Tensor) -> None:
        if any_true(is_degenerate):
            raise MissingFormError(
                f"Gaussian: a degenerate covariance (singular to rounding in {self.covariance.dtype}) has no density"
            )

    def _natural(self, mu: Tensor) -> Tensor:
        deviation = mu - self._align(self.location, mu)
        if self._is_diagonal:
            variance = self._align(self._variances(), mu)
            is_constant = variance == 0
            solution = deviation / torch.where(is_constant, 1.0, variance)
            return torch.where(is_constant, torch.where(deviation == 0, 0.0, torch.nan), solution)
        matrix = self._matrix()
        rounding = eigenvalue_rounding(matrix.shape[-1], mu.dtype)
        inverse = torch.linalg.pinv(matrix, rtol=rounding, hermitian=True)
        solution = self._align(inverse, mu, 2) @ deviation.unsqueeze(-1)
        # A mean off the affine hull of the support has no eta: its deviation has a part in the null space of Σ.
        eigenvalues, vectors = torch.linalg.eigh(matrix.detach())
        is_null = (eigenvalues <= rounding * eigenvalues[..., -1:]).to(mu.dtype)
        null_part = self._align(is_null.unsqueeze(-1) * vectors.mT, mu, 2) @ deviation.detach().unsqueeze(-1)
        size = mu.detach().norm(dim=-1) + self._align(self.location.detach().norm(dim=-1), mu, 0)
        is_outside = null_part.squeeze(-1).norm(dim=-1) > 8 * rounding * size
        return torch.where(is_outside.unsqueeze(-1), torch.nan, solution.squeeze(-1))

    def _conjugate(self, mu: Tensor) -> Tensor:
        eta = self._natural(mu)
        is_outside = eta.isnan().any(-1)
        eta = torch.where(is_outside.unsqueeze(-1), 0.0, eta)
        value = self._fenchel(eta, torch.where(is_outside.unsqueeze(-1), self._mean(eta), mu))
        return torch.where(is_outside, torch.inf, value)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        def noise(*lead: int) -> Tensor:
            return torch.randn(*shape, *lead, dtype=eta.dtype, device=eta.device, generator=generator)

        if self._rank == 2:
            # A symmetric root exists for every positive semi-definite matrix; a Cholesky factor does not.
            eigenvalues, vectors = torch.linalg.eigh(self.covariance)
            root = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
            deviation = (self._align(root, eta, 2) @ noise(*eta.shape, 1)).squeeze(-1)
        else:
            root = self._align(self.covariance, eta, self._rank).sqrt()
            if self._rank == 0:
                root = root.unsqueeze(-1)
            deviation = root * noise(*eta.shape)
        if self.factor.shape[-1] > 0:
            # Independent of the first part, so that the covariances add.
            factor = self._align(self.factor, eta, 2)
            deviation = deviation + (factor @ noise(*eta.shape[:-1], factor.shape[-1], 1)).squeeze(-1)
        return self._mean(eta) + deviation


def _check_positive(covariance: Tensor, *, full: bool) -> None:
    """Raise a ValueError unless variances are not negative, or a full matrix is symmetric and positive semi-definite."""
    if not full:
        if any_true(covariance < 0):
            raise ValueError(f"variances must not be negative, got {float(unwrapped(covariance).min()):.3g}")
        return
    matrix = covariance.detach().double()
    rounding = matrix.shape[-1] * torch.finfo(covariance.dtype).eps * matrix.abs().amax((-2, -1), keepdim=True)
    if any_true((matrix - matrix.mT).abs() > 8 * rounding):
        raise ValueError("covariance must be symmetric")
    smallest = torch.linalg.eigvalsh(matrix)[..., 0]
    if any_true(smallest < -8 * rounding[..., 0, 0]):
        least = float(unwrapped(smallest).min())
        raise ValueError(f"covariance must be positive semi-definite, got an eigenvalue of {least:.3g}")
