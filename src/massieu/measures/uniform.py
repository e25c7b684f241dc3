"""The uniform law on an interval, coordinate by coordinate: a box."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.transforms import all_true
from massieu.measures.coordinates import Coordinates, checked_parameters, in_words, magnitude

_LANGEVIN_TERMS = 24
"""Terms of the series of coth z − 1/z."""
_NEWTON_STEPS = 4
"""From the start's relative error of 5 % to rounding, since each step squares the error."""
_TAYLOR_RADIUS = 1e-3
"""Moves of eta, in units of A's radius of convergence, for which a Taylor polynomial of order six is exact to 1e-15."""


def _langevin_coefficients() -> list[float]:
    """Coefficients a_k of the Langevin function L(z) = coth z − 1/z = Σ a_k z^(2k − 1), k ≥ 1; a_0 is not used."""
    # By comparing powers of z in L' = 1 − L² − 2L/z: (2k + 1) a_k = −Σ a_i a_{k−i}.
    coefficients = [0.0, 1 / 3]
    for k in range(2, _LANGEVIN_TERMS):
        convolution = sum(coefficients[i] * coefficients[k - i] for i in range(1, k))
        coefficients.append(-convolution / (2 * k + 1))
    return coefficients


def _log_derivatives() -> list[list[int]]:
    """Coefficients in powers of q = 1/(eᵘ − 1) of the derivatives of log(1 − e⁻ᵘ) in u; orders 1 to 6."""
    # The first derivative is q. From q' = −q(1 + q), that of a polynomial P(q) is −(q + q²)·P'(q).
    table = [[0, 1]]
    for _ in range(5):
        slope = [power * coefficient for power, coefficient in enumerate(table[-1])][1:]
        times_q = [0, *slope, 0]
        times_q_squared = [0, 0, *slope]
        table.append([-(a + b) for a, b in zip(times_q, times_q_squared, strict=True)])
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
        if not all_true(low < high):
            raise ValueError(f"low must be below high, got {in_words(low)} and {in_words(high)}")
        return cls(low, high)

    def _box(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lower bound, upper bound and width, each to broadcast against `like`."""
        low = self._align(self.low, like)
        high = self._align(self.high, like)
        return low, high, high - low

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        low, high, width = self._box(eta)
        near = _is_near(width * eta)
        # Each formula sees only arguments that it is right for, so that the one not chosen cannot spoil the gradient.
        small = torch.where(near, eta, 0.0)
        large = torch.where(near, 2 / width, eta)
        series = 0.5 * (low + high) * small + _log_sinh_derivative(0.5 * width * small, 0)
        # Far from 0, A is its asymptote bound·eta plus a logarithm of the size of log|eta|.
        bound = torch.where(large < 0, low, high)
        asymptotic = bound * large + _far_log_fraction(magnitude(large), width)
        return torch.where(near, series, asymptotic)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        # From the third order on, the terms of the asymptotic form cancel near |a·eta| = 1: more than float32 can spare.
        if order > 2 and eta.dtype != torch.float64:
            return self.to(torch.float64)._cumulant(eta.double(), order).to(eta.dtype)
        low, high, width = self._box(eta)
        near = _is_near(width * eta)
        series = (0.5 * width) ** order * _log_sinh_derivative(0.5 * width * torch.where(near, eta, 0.0), order)
        # The derivatives of log((1 − e⁻ᵘ)/u), u = width·|eta|: a polynomial in q = 1/(eᵘ − 1), by Horner's form, and
        # those of −log u.
        large = torch.where(near, 2 / width, eta)
        is_negative = large < 0
        decay = torch.exp(-width * magnitude(large))
        q = decay / (1 - decay)
        polynomial = torch.zeros_like(large)
        for coefficient in reversed(_LOG_DERIVATIVES[order - 1]):
            polynomial = coefficient + q * polynomial
        asymptotic = math.factorial(order - 1) * (-1 / magnitude(large)) ** order + width**order * polynomial
        if order % 2 == 1:
            # They are derivatives in |eta|: an odd one changes its sign with eta.
            asymptotic = torch.where(is_negative, -asymptotic, asymptotic)
        if order == 1:
            series = series + 0.5 * (low + high)
            asymptotic = asymptotic + torch.where(is_negative, low, high)
        return torch.where(near, series, asymptotic)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """In float64: a Taylor polynomial for small delta, else differences of the logarithmic parts of A."""
        if eta.dtype != torch.float64:
            return self.to(torch.float64)._kl(eta.double(), delta.double()).to(eta.dtype)
        _, _, width = self._box(eta)
        # A has its nearest singularities at eta = ±2πi/width, and far from 0 varies on the scale of |eta|.
        radius = torch.maximum(eta.abs(), 2 * math.pi / width)
        close = delta.abs() < _TAYLOR_RADIUS * radius
        # KL = Σ_{n ≥ 2} κ_n deltaⁿ/n!, by Horner's form; the last factor delta follows below.
        small = torch.where(close, delta, 0.0)
        series = torch.zeros_like(delta)
        for order in range(6, 1, -1):
            series = small * (series + self._cumulant(eta, order) / math.factorial(order))
        # Otherwise the Bregman difference of A = bound·eta + log-fraction. Of the linear parts there remains the mean's
        # distance from the bound that eta pulls to, and width·|other| if `other` pulls to the opposite bound.
        other = eta + torch.where(close, radius, delta)
        difference = _log_fraction(other, width) - _log_fraction(eta, width)
        difference = difference + (other - eta) * torch.where(eta < 0, -1.0, 1.0) * _distance(eta, width)
        difference = difference + torch.where((other < 0) != (eta < 0), width * other.abs(), 0.0)
        return torch.where(close, small * series, difference).sum(-1)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        low, high, width = (part.double() for part in self._box(eta))
        decay = width * eta.double().abs()
        fraction = torch.rand(*shape, *eta.shape, dtype=torch.float64, device=eta.device, generator=generator)
        # The distance from the bound that eta pulls to, in widths, by inverting the distribution function
        # (1 − e^(−u·t))/(1 − e⁻ᵘ) of a truncated exponential; for u = 0 that is t itself.
        is_tilted = decay > 0
        scale = torch.where(is_tilted, decay, 1.0)
        distance = torch.where(is_tilted, -torch.log1p(fraction * torch.expm1(-scale)) / scale, fraction)
        return torch.where(eta < 0, low + width * distance, high - width * distance).to(eta.dtype)

    def _range(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        low, high, width = self._box(eta)
        # x·eta − A with A = bound·eta + log-fraction, for the bound that eta pulls to: what is linear in eta is combined.
        distance = torch.where(eta < 0, point - low, high - point)
        return -(magnitude(eta) * distance) - width.log() - _log_fraction(eta, width)

    def _natural_each(self, mu: Tensor) -> Tensor:
        """Newton's method for u = width·|eta|, in which the mean's distance from its bound is 1/u − 1/(eᵘ − 1) widths."""
        low, high, width = self._box(mu)
        # By symmetry eta ≥ 0 suffices: the mean's distance from the nearer bound, and its offset from the centre in half
        # widths. Each is computed from the bounds, since one of them is small next to the other.
        is_negative = mu - low < high - mu
        distance = torch.where(is_negative, mu - low, high - mu) / width
        offset = torch.where(is_negative, -1.0, 1.0) * ((mu - low) - (high - mu)) / width
        # The start, Cohen's approximation of L⁻¹, is right to 5 % (u = 2·L⁻¹(offset)).
        fixed_distance = distance.detach()
        fixed_offset = offset.detach()
        u = fixed_offset * (3 - fixed_offset.square()) / (fixed_distance * (1 + fixed_offset))
        for _ in range(_NEWTON_STEPS):
            u = _newton_step(u, fixed_distance, fixed_offset)
        # A step's result does not depend on its start to first order, so that each step makes one more derivative that of
        # the solution: two steps, two derivatives.
        for _ in range(2):
            u = _newton_step(u, distance, offset)
        return torch.where(is_negative, -u, u) / width


def _is_near(decay: Tensor) -> Tensor:
    """Whether the series are used: |a·eta| < 1 with a the half-width, for decay = 2a·eta."""
    return decay.abs() < 2


def _log_sinh_derivative(z: Tensor, order: int) -> Tensor:
    """The derivative of that order of log(sinh z/z), for |z| < 1."""
    # log(sinh z/z) is the integral of the Langevin function: Σ a_k z^(2k)/(2k). By Horner's form in z², from the first term
    # that `order` derivatives leave, times what remains of z in it.
    square = z.square()
    total = torch.zeros_like(z)
    first = max(1, (order + 1) // 2)
    for k in range(_LANGEVIN_TERMS - 1, first - 1, -1):
        total = _LANGEVIN[k] / (2 * k) * math.perm(2 * k, order) + square * total
    if 2 * first > order:
        return total * z ** (2 * first - order)
    return total


def _far_log_fraction(size: Tensor, width: Tensor) -> Tensor:
    """log((1 − e⁻ᵘ)/u) = A − bound·eta, for u = width·size ≥ 2 and size = |eta|."""
    return torch.log1p(-torch.exp(-width * size)) - width.log() - size.log()


def _log_fraction(eta: Tensor, width: Tensor) -> Tensor:
    """log((1 − e⁻ᵘ)/u) for every u = width·|eta|."""
    near = _is_near(width * eta)
    size = magnitude(eta)
    # (1 − e⁻ᵘ)/u = e^(−u/2)·sinh(u/2)/(u/2).
    half = 0.5 * width * torch.where(near, size, 0.0)
    series = _log_sinh_derivative(half, 0) - half
    asymptotic = _far_log_fraction(torch.where(near, 2 / width, size), width)
    return torch.where(near, series, asymptotic)


def _distance(eta: Tensor, width: Tensor) -> Tensor:
    """The distance of the mean from the bound that eta pulls to: width·(1/u − 1/(eᵘ − 1)), u = width·|eta|."""
    near = _is_near(width * eta)
    size = magnitude(eta)
    series = 0.5 * width * (1 - _log_sinh_derivative(0.5 * width * torch.where(near, size, 0.0), 1))
    large = torch.where(near, 2 / width, size)
    decay = torch.exp(-width * large)
    return torch.where(near, series, 1 / large - width * decay / (1 - decay))


def _newton_step(u: Tensor, distance: Tensor, offset: Tensor) -> Tensor:
    """A step of Newton's method on 1/h(u) = 1/distance, h(u) = 1/u − 1/(eᵘ − 1): nearly linear in u from 0 to ∞.

    The step is h(u)·(distance − h(u))/(distance·h'(u)).
    """
    near = u < 2
    # Near 0, h(u) = (1 − L(u/2))/2 and distance = (1 − offset)/2, by which the difference keeps its digits.
    half = 0.5 * torch.where(near, u, 0.0)
    langevin = _log_sinh_derivative(half, 1)
    slope = _log_sinh_derivative(half, 2)
    near_step = (1 - langevin) * (offset - langevin) / (distance * slope)
    # Beyond, by u·h(u) and −u²·h'(u), which tend to 1.
    large = torch.where(near, 2.0, u)
    decay = torch.exp(-large)
    scaled_value = 1 - large * decay / (1 - decay)  # u·h(u)
    scaled_slope = 1 - (large * torch.exp(-0.5 * large) / (1 - decay)).square()  # −u²·h'(u)
    far_step = scaled_value * (scaled_value - large * distance) / (distance * large) * large / scaled_slope
    return torch.where(near, u + near_step, large + far_step)
