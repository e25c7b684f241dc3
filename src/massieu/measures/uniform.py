"""The uniform law on an interval, coordinate by coordinate: a box."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.transforms import every
from massieu.measures.coordinates import Coordinates, checked_parameters, in_words, magnitude

_TERMS = 24
_NEWTON_STEPS = 4  # from a relative error of 5 % to rounding, quadratically
_CLOSE = 1e-3  # the sixth-order Taylor polynomial is then exact to 1e-15


def _langevin_coefficients() -> list[float]:
    """Coefficients a_k of coth z − 1/z = Σ a_k z^(2k − 1), from L' = 1 − L² − 2L/z; a_0 stands for nothing."""
    coefficients = [0.0, 1 / 3]
    for k in range(2, _TERMS):
        coefficients.append(-sum(coefficients[i] * coefficients[k - i] for i in range(1, k)) / (2 * k + 1))
    return coefficients


def _log_derivatives() -> list[list[int]]:
    """Coefficients in q = 1/(eᵘ − 1) of the derivatives of log(1 − e⁻ᵘ), from q' = −q(1 + q); orders 1 to 6."""
    table = [[0, 1]]
    for _ in range(5):
        slope = [power * c for power, c in enumerate(table[-1])][1:]
        table.append([-(a + b) for a, b in zip([0, *slope, 0], [0, 0, *slope], strict=True)])
    return table


_LANGEVIN = _langevin_coefficients()
_LOG_DERIVATIVES = _log_derivatives()


class Uniform(Coordinates):
    """The uniform law on the box between `low` and `high`.

    With c its centre and a its half-widths, A(eta) = Σ c_i eta_i + log(sinh(a_i eta_i)/(a_i eta_i)) and
    ∇A = c + a (coth(a eta) − 1/(a eta)) (S2). Tilted, truncated exponentials. Series where |a eta| < 1, exponentials of
    −2|a eta| beyond, keep the digits of A, mean and variance from 0 to the largest finite eta.

    Attributes:
        low: Shape (*batch, d).
        high: Shape (*batch, d), above `low`.

    Example:
        >>> from massieu.measures import Uniform
        >>> round(Uniform.create(-1.0, 1.0).fisher([0.0]).item(), 4)  # the variance, 1/3
        0.3333
    """

    low: Float[Tensor, "*batch d"]
    high: Float[Tensor, "*batch d"]

    @classmethod
    def create(
        cls, low: Float[Tensor, "*batch d"] | float, high: Float[Tensor, "*batch d"] | float, *, dim: int | None = None
    ) -> Self:
        """The law between `low` and a higher `high` (one value is a `Constant`'s); raises what `Measure` says."""
        low, high = checked_parameters(dim, low=low, high=high)
        if not every(low < high):
            raise ValueError(f"low must be below high, got {in_words(low)} and {in_words(high)}")
        return cls(low, high)

    def _box(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Low and high bounds and width."""
        low, high = self._align(self.low, like), self._align(self.high, like)
        return low, high, high - low

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        low, high, width = self._box(eta)
        near = _is_near(width * eta)
        small, large = torch.where(near, eta, 0.0), torch.where(near, 2 / width, eta)
        close = 0.5 * (low + high) * small + _log_sinh_derivative(0.5 * width * small, 0)
        far = torch.where(large < 0, low, high) * large + _far_log_fraction(magnitude(large), width)
        return torch.where(near, close, far)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        if order > 2 and eta.dtype != torch.float64:
            return self.to(torch.float64)._cumulant(eta.double(), order).to(eta.dtype)
        low, high, width = self._box(eta)
        near = _is_near(width * eta)
        close = (0.5 * width) ** order * _log_sinh_derivative(0.5 * width * torch.where(near, eta, 0.0), order)
        far = torch.where(near, 2 / width, eta)
        negative, decay = far < 0, torch.exp(-width * magnitude(far))
        ratio, slope = decay / (1 - decay), torch.zeros_like(far)
        for coefficient in reversed(_LOG_DERIVATIVES[order - 1]):
            slope = coefficient + ratio * slope
        apart = math.factorial(order - 1) * (-1 / magnitude(far)) ** order + width**order * slope
        if order % 2 == 1:
            apart = torch.where(negative, -apart, apart)
        if order == 1:
            close, apart = close + 0.5 * (low + high), apart + torch.where(negative, low, high)
        return torch.where(near, close, apart)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """In float64: a Taylor polynomial for small delta, else differences of the logarithmic parts of A."""
        if eta.dtype != torch.float64:
            return self.to(torch.float64)._kl(eta.double(), delta.double()).to(eta.dtype)
        _, _, width = self._box(eta)
        radius = torch.maximum(eta.abs(), 2 * math.pi / width)
        close = delta.abs() < _CLOSE * radius
        small, series = torch.where(close, delta, 0.0), torch.zeros_like(delta)
        for order in range(6, 1, -1):
            series = small * (series + self._cumulant(eta, order) / math.factorial(order))
        other = eta + torch.where(close, radius, delta)
        apart = _log_fraction(other, width) - _log_fraction(eta, width)
        apart = apart + (other - eta) * torch.where(eta < 0, -1.0, 1.0) * _distance(eta, width)
        apart = apart + torch.where((other < 0) != (eta < 0), width * other.abs(), 0.0)
        return torch.where(close, small * series, apart).sum(-1)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        low, high, width = (bound.double() for bound in self._box(eta))
        decay = width * eta.double().abs()
        share = torch.rand(*shape, *eta.shape, dtype=torch.float64, device=eta.device, generator=generator)
        tilted = decay > 0
        scale = torch.where(tilted, decay, 1.0)
        share = torch.where(tilted, -torch.log1p(share * torch.expm1(-scale)) / scale, share)
        return torch.where(eta < 0, low + width * share, high - width * share).to(eta.dtype)

    def _range(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        low, high, width = self._box(eta)
        # A = bound·eta + log-fraction, for the bound that eta pulls to.
        distance = torch.where(eta < 0, point - low, high - point)
        return -(magnitude(eta) * distance) - width.log() - _log_fraction(eta, width)

    def _natural_each(self, mu: Tensor) -> Tensor:
        """Newton's method for u = width·|eta|, in which the mean's distance from its bound is 1/u − 1/(eᵘ − 1) widths."""
        low, high, width = self._box(mu)
        negative = mu - low < high - mu
        distance = torch.where(negative, mu - low, high - mu) / width
        offset = torch.where(negative, -1.0, 1.0) * ((mu - low) - (high - mu)) / width
        fixed_distance, fixed_offset = distance.detach(), offset.detach()
        u = fixed_offset * (3 - fixed_offset.square()) / (fixed_distance * (1 + fixed_offset))
        for _ in range(_NEWTON_STEPS):
            u = _newton_step(u, fixed_distance, fixed_offset)
        # Newton's method forgets where it started: after two more steps two derivatives are those of the solution.
        for _ in range(2):
            u = _newton_step(u, distance, offset)
        return torch.where(negative, -u, u) / width


def _is_near(decay: Tensor) -> Tensor:
    """Where the series are used: |a·eta| < 1, for decay = 2a·eta."""
    return decay.abs() < 2


def _log_sinh_derivative(z: Tensor, order: int) -> Tensor:
    """The derivative of that order of log(sinh z/z), for |z| < 1."""
    square, total = z.square(), torch.zeros_like(z)
    first = max(1, (order + 1) // 2)
    for k in range(_TERMS - 1, first - 1, -1):
        total = _LANGEVIN[k] / (2 * k) * math.perm(2 * k, order) + square * total
    return total * z ** (2 * first - order) if 2 * first > order else total


def _far_log_fraction(size: Tensor, width: Tensor) -> Tensor:
    """log((1 − e⁻ᵘ)/u), u = width·|eta| ≥ 2: what A is above its asymptote bound·eta."""
    return torch.log1p(-torch.exp(-width * size)) - width.log() - size.log()


def _log_fraction(eta: Tensor, width: Tensor) -> Tensor:
    """log((1 − e⁻ᵘ)/u) for every u = width·|eta|."""
    near, size = _is_near(width * eta), magnitude(eta)
    half = 0.5 * width * torch.where(near, size, 0.0)
    far = _far_log_fraction(torch.where(near, 2 / width, size), width)
    return torch.where(near, _log_sinh_derivative(half, 0) - half, far)


def _distance(eta: Tensor, width: Tensor) -> Tensor:
    """How far the mean is from the bound that eta pulls to."""
    near, size = _is_near(width * eta), magnitude(eta)
    close = 0.5 * width * (1 - _log_sinh_derivative(0.5 * width * torch.where(near, size, 0.0), 1))
    far = torch.where(near, 2 / width, size)
    decay = torch.exp(-width * far)
    return torch.where(near, close, 1 / far - width * decay / (1 - decay))


def _newton_step(u: Tensor, distance: Tensor, offset: Tensor) -> Tensor:
    """A step of Newton's method on 1/h(u) = 1/distance, h(u) = 1/u − 1/(eᵘ − 1): nearly linear in u from 0 to ∞."""
    near = u < 2
    half = 0.5 * torch.where(near, u, 0.0)
    langevin, slope = _log_sinh_derivative(half, 1), _log_sinh_derivative(half, 2)
    close = (1 - langevin) * (offset - langevin) / (distance * slope)
    far = torch.where(near, 2.0, u)
    decay = torch.exp(-far)
    reached = 1 - far * decay / (1 - decay)  # u·h(u)
    curvature = 1 - (far * torch.exp(-0.5 * far) / (1 - decay)).square()  # −u²·h'(u)
    apart = reached * (reached - far * distance) / (distance * far) * far / curvature
    return torch.where(near, u + close, far + apart)
