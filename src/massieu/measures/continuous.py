"""Measures on the line, the half-line and the interval, coordinate by coordinate; and the point."""

import math
from abc import abstractmethod
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures.coordinates import Coordinates, checked_parameters, in_words
from massieu.measures.deviance import deviance, log_gamma_density
from massieu.measures.hooks import Listed, Reference

_SERIES_RADIUS = 0.125
"""Ratios delta/slack for which `_excess` is a series."""
_SERIES_TERMS = 19  # 0.125^19 < 1e-17


class _GammaFamily(Coordinates):
    """Independent gamma variables of the given shapes and rates; eta is subtracted from the rates."""

    _bounds = (0.0, torch.inf)

    @abstractmethod
    def _shape_and_rate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both, to broadcast against `like`."""

    def _tilted_rate(self, eta: Tensor) -> Tensor:
        _, rate = self._shape_and_rate(eta)
        return rate - eta

    def _limits(self) -> tuple[Tensor, Tensor]:
        _, rate = self._shape_and_rate(self._first)
        return torch.full_like(rate, -torch.inf), rate

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        shape, rate = self._shape_and_rate(eta)
        return shape * _log_growth(eta, rate)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        shape, rate = self._shape_and_rate(eta)
        return math.factorial(order - 1) * shape * (1 / (rate - eta)) ** order

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        shape, rate = self._shape_and_rate(eta)
        return (shape * _excess(delta, rate - eta)).sum(-1)

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        shape, rate = self._shape_and_rate(eta)
        return log_gamma_density(point, shape, rate - eta)

    def _natural_each(self, mu: Tensor) -> Tensor:
        shape, rate = self._shape_and_rate(mu)
        return rate - shape / mu

    def _conjugate_each(self, mu: Tensor) -> Tensor:
        """shape·(r − 1 − log r) for the ratio of means r = mu·rate/shape: shape times the KL divergence of exponentials."""
        shape, rate = self._shape_and_rate(mu)
        ratio = mu / shape * rate
        return shape * deviance(torch.ones_like(ratio), ratio, ratio.log())


class Exponential(_GammaFamily):
    """Independent waiting times of density rate·exp(−rate·x): A(eta) = −Σ log(1 − eta_i/rate_i) for eta < rate (S2).

    Tilted, exponentials of rate − eta; κ_n = (n − 1)!/(rate − eta)ⁿ (B3).

    Attributes:
        rate: Shape (*batch, d).

    Example:
        >>> from massieu.measures import Exponential
        >>> Exponential.create(2.0).mean([1.5]).tolist()  # a waiting time of rate 2 − 1.5
        [2.0]
    """

    rate: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, rate: Float[Tensor, "*batch d"] | float, *, dim: int | None = None) -> Self:
        """Exponentials of mean 1/rate; see `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, rate=rate, positive=True))

    def _shape_and_rate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        rate = self._align(self.rate, like)
        return torch.ones_like(rate), rate

    def _domain(self) -> str:
        return f"eta < rate = {in_words(self.rate)} in every coordinate"

    def _tilt(self, eta: Tensor) -> "Exponential":
        return Exponential(self._tilted_rate(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return _standard_exponentials(eta, shape, generator) / self._tilted_rate(eta)

    def _power(self, exponent: float) -> "Gamma":
        return Gamma(torch.full_like(self.rate, exponent), 1 / self.rate)


class Gamma(_GammaFamily):
    """Independent gamma variables: A(eta) = −Σ shape_i log(1 − scale_i eta_i) for eta < 1/scale (S2).

    Tilted, gammas of the same shape and scale/(1 − scale·eta); κ_n = shape·(n − 1)!·(that scale)ⁿ (B3).

    Attributes:
        shape: Shape parameter k, of tensor shape (*batch, d).
        scale: Shape (*batch, d); h has mean shape·scale.

    Example:
        >>> from massieu.measures import Gamma
        >>> Gamma.create(shape=3.0, scale=2.0).mean([0.0]).tolist()
        [6.0]
    """

    shape: Float[Tensor, "*batch d"]
    scale: Float[Tensor, "*batch d"]

    @classmethod
    def create(
        cls,
        shape: Float[Tensor, "*batch d"] | float,
        scale: Float[Tensor, "*batch d"] | float,
        *,
        dim: int | None = None,
    ) -> Self:
        """Gammas of mean shape·scale and variance shape·scale²; see `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, shape=shape, scale=scale, positive=True))

    def _shape_and_rate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self._align(self.shape, like), 1 / self._align(self.scale, like)

    def _domain(self) -> str:
        return f"eta < 1/scale = {in_words(1 / self.scale)} in every coordinate"

    def _tilt(self, eta: Tensor) -> "Gamma":
        return Gamma(self.shape, 1 / self._tilted_rate(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        concentration = self._align(self.shape, eta).expand(*shape, *eta.shape)
        return standard_gammas(concentration, generator) / self._tilted_rate(eta)

    def _power(self, exponent: float) -> "Gamma":
        return Gamma(exponent * self.shape, self.scale)


class Laplace(Coordinates):
    """Independent double exponentials of density exp(−|x|/scale)/(2 scale).

    A(eta) = −Σ log(1 − scale_i² eta_i²) for |eta| < 1/scale (S2): the difference of two exponentials. Tilted, an
    asymmetric Laplace law (B9); its cumulants of odd order vanish at eta = 0 (B3).

    Attributes:
        scale: Shape (*batch, d); h has variance 2·scale².

    Example:
        >>> from massieu.measures import Laplace
        >>> Laplace.create(0.5).fisher([0.0]).tolist()  # the variance, 2·scale²
        [[0.5]]
    """

    scale: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, scale: Float[Tensor, "*batch d"] | float, *, dim: int | None = None) -> Self:
        """Double exponentials of mean absolute value `scale`; see `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, scale=scale, positive=True))

    def _lengths(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The mean lengths of the right and the left tail of p_eta."""
        limit = 1 / self._align(self.scale, eta)
        return 1 / (limit - eta), 1 / (limit + eta)

    def _limits(self) -> tuple[Tensor, Tensor]:
        return -1 / self.scale, 1 / self.scale

    def _domain(self) -> str:
        return f"|eta| < 1/scale = {in_words(1 / self.scale)} in every coordinate"

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        scale = self._align(self.scale, eta)
        is_small = (scale * eta).abs() < 0.5
        small_value = -torch.log1p(-((scale * torch.where(is_small, eta, 0.0)) ** 2))
        # Near the limits 1 − (scale·eta)² cancels; each factor of (limit − eta)(limit + eta) is exact there.
        large = torch.where(is_small, 0.0, eta)
        limit = 1 / scale
        large_value = 2 * limit.log() - (limit - large).log() - (limit + large).log()
        return torch.where(is_small, small_value, large_value)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        # (n − 1)!·(rightⁿ ± leftⁿ): the difference of two exponentials.
        right, left = self._lengths(eta)
        if order % 2 == 0:
            return math.factorial(order - 1) * (right**order + left**order)
        # The difference of odd powers cancels at eta = 0. It is right − left = 2·eta·right·left times Σ rightⁿ⁻¹⁻ʲ leftʲ.
        quotient = torch.stack([right ** (order - 1 - j) * left**j for j in range(order)]).sum(0)
        return math.factorial(order - 1) * 2 * eta * right * left * quotient

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        limit = 1 / self._align(self.scale, eta)
        return (_excess(delta, limit - eta) + _excess(-delta, limit + eta)).sum(-1)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        right, left = (length.expand(*shape, *eta.shape) for length in self._lengths(eta))
        # Each tail has a share of its mean length.
        is_positive = torch.bernoulli(right / (right + left), generator=generator) == 1
        return _standard_exponentials(eta, shape, generator) * torch.where(is_positive, right, -left)

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        limit = 1 / self._align(self.scale, eta)
        right_rate = limit - eta
        left_rate = limit + eta
        decay = torch.where(point < 0, left_rate, right_rate) * point.abs()
        return right_rate.log() + left_rate.log() - (2 * limit).log() - decay

    def _natural_each(self, mu: Tensor) -> Tensor:
        # The solution of mu = 2·eta/(limit² − eta²): with r = mu·limit, eta = limit·r/(1 + √(1 + r²)).
        limit = 1 / self._align(self.scale, mu)
        reduced = mu * limit
        return reduced * limit / (1 + torch.hypot(torch.ones_like(reduced), reduced))

    def _conjugate_each(self, mu: Tensor) -> Tensor:
        """u − log(1 + u/2), u = √(1 + (mu/scale)²) − 1."""
        reduced = mu / self._align(self.scale, mu)
        length = torch.hypot(torch.ones_like(reduced), reduced)
        excess = reduced / (1 + length) * reduced
        return excess - torch.log1p(0.5 * excess)


class Constant(Coordinates):
    """The point mass at `value`: A(eta) = value·eta, ∇A = value, F = 0 (S2, B3).

    Every eta has the mean `value`, so its natural parameter is 0, that of least norm.

    Attributes:
        value: Shape (*batch, d).

    Example:
        >>> from massieu.measures import Constant
        >>> Constant.create([1.0, 2.0]).log_partition([3.0, 4.0]).tolist()
        11.0
    """

    value: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, value: Float[Tensor, "*batch d"] | float, *, dim: int | None = None) -> Self:
        """The point mass at `value`; see `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, value=value))

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        return self._align(self.value, eta) * eta

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return self._align(self.value, eta).expand_as(eta) if order == 1 else torch.zeros_like(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])

    def _tilt(self, eta: Tensor) -> "Constant":
        return self

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self._mean(eta).expand(*shape, *eta.shape).clone()

    def _range(self) -> tuple[Tensor, Tensor]:
        return self.value, self.value

    def _listed(self) -> Listed:
        points = self.value.unsqueeze(-2)
        return Listed(points, torch.zeros_like(self.value[..., :1]), points.abs())

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        return torch.zeros_like(point)

    def _natural(self, mu: Tensor) -> Tensor:
        return torch.where(self._holds(mu), 0.0, torch.nan)

    def _conjugate(self, mu: Tensor) -> Tensor:
        return torch.where(self._holds(mu).all(-1), 0.0, torch.inf)

    def _power(self, exponent: float) -> "Constant":
        return Constant(exponent * self.value)


def _log_growth(eta: Tensor, rate: Tensor) -> Tensor:
    """−log(1 − eta/rate) for eta < rate, accurate at 0, near the rate and at the largest negative eta."""
    is_small = eta.abs() < 0.5 * rate
    small_value = -torch.log1p(-torch.where(is_small, eta, 0.0) / rate)
    return torch.where(is_small, small_value, rate.log() - (rate - torch.where(is_small, 0.0, eta)).log())


def _excess(delta: Tensor, slack: Tensor) -> Tensor:
    """−log(1 − r) − r ≥ 0 for r = delta/slack < 1: the KL divergence of exponentials of rates slack, slack − delta."""
    is_small = delta.abs() < _SERIES_RADIUS * slack
    # The series r²/2 + r³/3 + …, by Horner's form.
    ratio = torch.where(is_small, delta, 0.0) / slack
    series = torch.full_like(ratio, 1 / _SERIES_TERMS)
    for order in range(_SERIES_TERMS - 1, 1, -1):
        series = 1 / order + ratio * series
    large = torch.where(is_small, 0.0, delta)
    return torch.where(is_small, ratio.square() * series, _log_growth(large, slack) - large / slack)


def _standard_exponentials(eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Exponentials of rate one, in the shape of a sample."""
    return eta.new_empty(*shape, *eta.shape).exponential_(generator=generator)


def standard_gammas(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma variables of scale one; torch's public sampler takes no generator."""
    return torch._standard_gamma(concentration, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
