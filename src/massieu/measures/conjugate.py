"""Conjugate priors: measures over the natural parameter of a likelihood (S16)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_shape, real_tensor
from massieu.foundation.transforms import all_true, unwrapped
from massieu.measures.base import Measure
from massieu.measures.continuous import Exponential, Gamma, standard_gammas
from massieu.measures.coordinates import Coordinates, checked_parameters, in_words
from massieu.measures.deviance import deviance, log_gamma_density, log_poisson, stirling_error
from massieu.measures.discrete import Bernoulli, Poisson, Spin
from massieu.measures.gaussian import Gaussian

_RECURRENCE_STEPS = 32
"""Steps of the recurrence of trigamma, to arguments for which `torch.polygamma(1, x)` is exact to rounding."""


class ConjugatePrior(Coordinates):
    """The conjugate prior exp(−strength·A_0(η)) dη of a likelihood's natural parameter η, in each coordinate (S16).

    A_0 is the log-partition of one coordinate of the likelihood, a Bernoulli, Spin, Poisson, Exponential, Gamma or
    Gaussian with independent coordinates. This measure's own natural parameter, its `eta`, is the pseudo-sum χ of the
    statistic, worth `strength` pseudo-observations: ``mean(chi)`` is the posterior mean of η, E ∇A_0(η) = χ/strength
    (Diaconis and Ylvisaker), and χ/strength must lie inside the range of the likelihood's means. h is no probability:
    ``log_partition`` is B(χ, strength) = log ∫ exp(χη − strength·A_0(η)) dη. Everything is computed in float64.

    Attributes:
        likelihood: The law of one observation; batch (*batch), event (d,).
        strength: Pseudo-observations ν, shape (*batch, d).

    Example:
        >>> from massieu.measures import Bernoulli, ConjugatePrior
        >>> prior = ConjugatePrior.create(Bernoulli.create([0.5]), 2.0)
        >>> round(prior.evidence([1.0], [[1.0], [1.0]]).exp().item(), 6)  # Pólya's urn: 1/2 · 2/3
        0.333333
    """

    likelihood: Measure
    strength: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, likelihood: Measure, strength: Float[Tensor, "*batch d"]) -> Self:
        """The conjugate prior of `likelihood`, worth `strength` observations.

        Raises:
            ValueError, TypeError: see `Measure`; another likelihood, a strength that is not of the likelihood's batch and
                event shape, a Gaussian of correlated coordinates, or with a variance of zero.
        """
        if type(likelihood) not in _LAWS:
            families = ", ".join(family.__name__ for family in _LAWS)
            raise TypeError(f"ConjugatePrior needs one of {families} as likelihood, got {type(likelihood).__name__}")
        expected = (*likelihood.batch_shape, *likelihood.event_shape)
        strength = real_tensor("strength", strength, likelihood._some_leaf())
        if strength.ndim == 0:
            strength = strength.expand(expected)
        (strength,) = checked_parameters(strength=strength, positive=True)
        check_shape("strength", strength, expected)
        if isinstance(likelihood, Gaussian):
            _check_independent(likelihood)
        return cls(likelihood, strength)

    def update(
        self, chi: Float[Tensor, "*batch d"], observations: Float[Tensor, "*batch n d"]
    ) -> tuple[Float[Tensor, "*batch d"], "ConjugatePrior"]:
        """The posterior given independent observations: (χ + Σ x, the prior of strength ν + n).

        Raises:
            ValueError: shapes that do not fit, or an observation outside the likelihood's support.
        """
        measure, chi, observations = self._with_observations(chi, observations)
        return measure._update(chi, observations)

    def evidence(
        self, chi: Float[Tensor, "*batch d"], observations: Float[Tensor, "*batch n d"]
    ) -> Float[Tensor, "*batch"]:
        """log p(x_1 … x_n), η integrated out: B(χ', ν') − B(χ, ν) + Σ log h_0(x_i), in nats.

        h_0 is the likelihood's density at η = 0, by the counting measure (Bernoulli, Spin, Poisson) or Lebesgue's.
        """
        measure, chi, observations = self._with_observations(chi, observations)
        dtype = chi.dtype
        prior = measure.to(torch.float64)
        chi = chi.double()
        observations = observations.double()
        posterior_chi, posterior = prior._update(chi, observations)
        # Bayes' rule, evidence = likelihood·prior/posterior, holds at any η. At the posterior mean no term is much larger
        # than the result.
        point = posterior._mean(posterior_chi).detach()
        likelihood = prior.likelihood._log_prob(point.unsqueeze(-2), observations).sum(-1)
        return (likelihood + prior._log_prob(chi, point) - posterior._log_prob(posterior_chi, point)).to(dtype)

    def _with_observations(self, chi: Tensor, observations: Tensor) -> tuple["ConjugatePrior", Tensor, Tensor]:
        """The prior, χ and the observations, checked and in one dtype."""
        shape = tuple(self.strength.shape)
        chi = real_tensor("chi", chi, self.strength)
        observations = real_tensor("observations", observations, self.strength)
        check_shape("chi", chi, shape)
        check_shape("observations", observations, (*shape[:-1], "n", shape[-1]))
        inside = observations.isfinite()
        if isinstance(self.likelihood, Coordinates):
            inside = inside & self.likelihood._holds(observations)
        if not all_true(inside):
            raise ValueError(
                f"observations must lie in the support of {type(self.likelihood).__name__}, got "
                f"{float(unwrapped(observations)[~unwrapped(inside)][0]):.6g}"
            )
        measure, chi = self._admit(chi)
        return measure, chi, observations.to(chi.dtype)

    def _update(self, chi: Tensor, observations: Tensor) -> tuple[Tensor, "ConjugatePrior"]:
        posterior = ConjugatePrior(self.likelihood, self.strength + observations.shape[-2])
        return chi + observations.sum(-2), posterior

    def _law(self, eta: Tensor) -> "_Law":
        measure = self.to(torch.float64)
        strength = measure._align(measure.strength, eta)
        return _LAWS[type(self.likelihood)](measure.likelihood, strength, eta.double())

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        return self._law(eta).log_partition().to(eta.dtype)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return self._law(eta).cumulant(order).to(eta.dtype)

    def _entropy(self, eta: Tensor) -> Tensor:
        return self._log_partition(eta) - self._dot(eta, self._mean(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self._law(eta).sample((*shape, *eta.shape), generator).to(eta.dtype)

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        return self._law(eta).log_prob(point.double()).to(eta.dtype)

    def _limits(self) -> tuple[Tensor, Tensor] | None:
        if not isinstance(self.likelihood, Coordinates):
            return None
        low, high = self.likelihood._range()
        return low * self.strength, high * self.strength

    def _domain(self) -> str:
        if isinstance(self.likelihood, Bernoulli):
            return f"0 < eta < strength = {in_words(self.strength)} in every coordinate"
        if isinstance(self.likelihood, Spin):
            return f"|eta| < strength = {in_words(self.strength)} in every coordinate"
        return "0 < eta in every coordinate"

    def _interior(self) -> Tensor:
        mean = self.strength * self.likelihood._mean(torch.zeros_like(self.strength))
        limits = self._limits()
        if limits is None:
            return mean
        # If the likelihood is all but certain, its mean rounds to the bound. The middle of an interval does not.
        middle = 0.5 * (limits[0] + limits[1])
        return torch.where(middle.isfinite(), middle, mean)

    def _range(self) -> tuple[Tensor, Tensor]:
        limits = self.likelihood._limits() if isinstance(self.likelihood, Coordinates) else None
        if limits is None:
            return torch.full_like(self.strength, -torch.inf), torch.full_like(self.strength, torch.inf)
        return limits

    def _holds(self, point: Tensor) -> Tensor:
        low, high = (self._align(bound, point) for bound in self._range())
        return (low < point) & (point < high)

    def _log_density_each(self, point: Tensor) -> Tensor:
        likelihood = self.likelihood
        if isinstance(likelihood, Gaussian):
            location = likelihood._align(likelihood.location, point)
            variance = _variance(likelihood, point)
            log_partition = location * point + 0.5 * variance * point.square()
        else:
            assert isinstance(likelihood, Coordinates)
            log_partition = likelihood._log_partition_each(point)
        return -self._align(self.strength, point) * log_partition

    def _natural_each(self, mu: Tensor) -> Tensor | None:
        if not isinstance(self.likelihood, Exponential | Gamma | Gaussian):
            return None
        strength = self._align(self.strength, mu)
        if isinstance(self.likelihood, Gaussian):
            location = self.likelihood._align(self.likelihood.location, mu)
            variance = _variance(self.likelihood, mu)
            return strength * (location + variance * mu)
        shape, rate = self.likelihood._shape_and_rate(mu)
        return (strength * shape + 1) / (rate - mu)


class _Law(ABC):
    """The law of each coordinate of η under h tilted by χ, and the log-mass B of that tilted h."""

    @abstractmethod
    def log_partition(self) -> Tensor:
        """B(χ, strength)."""

    @abstractmethod
    def cumulant(self, order: int) -> Tensor:
        """The cumulant of that order of η."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws of η, of that shape."""

    @abstractmethod
    def log_prob(self, point: Tensor) -> Tensor:
        """The log-density of η, without differences of numbers of the size of χ and ν."""


@dataclass(frozen=True)
class _LogRatio(_Law):
    """η = shift + slope·log(g/g') for independent gammas of shapes `first` and `second`: log-odds of a beta variable."""

    first: Tensor
    second: Tensor
    slope: float
    shift: Tensor
    log_constant: Tensor
    """B less the logarithm of the beta function."""

    def log_partition(self) -> Tensor:
        return self.log_constant + self.first.lgamma() + self.second.lgamma() - (self.first + self.second).lgamma()

    def cumulant(self, order: int) -> Tensor:
        # The cumulants of log g are the polygamma functions of g's shape.
        value = self.slope**order * (_polygamma(order, self.first) + (-1) ** order * _polygamma(order, self.second))
        return value + self.shift if order == 1 else value

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        ratio = _log_gammas(self.first, shape, generator) - _log_gammas(self.second, shape, generator)
        return self.shift + self.slope * ratio

    def log_prob(self, point: Tensor) -> Tensor:
        """Loader's form of the binomial: deviances of the shapes from those expected at η, and Stirling's errors."""
        log_odds = (point - self.shift) / self.slope
        count = self.first + self.second
        log_first = F.logsigmoid(log_odds)
        log_second = F.logsigmoid(-log_odds)
        deviances = deviance(self.first, count * log_first.exp(), count.log() + log_first)
        deviances = deviances + deviance(self.second, count * log_second.exp(), count.log() + log_second)
        volume = 0.5 * (self.first.log() + self.second.log() - count.log() - math.log(2 * math.pi))
        errors = stirling_error(count) - stirling_error(self.first) - stirling_error(self.second)
        return volume + errors - deviances - math.log(abs(self.slope))


@dataclass(frozen=True)
class _LogGamma(_Law):
    """η = shift + log g for a gamma variable g of that shape."""

    shape: Tensor
    shift: Tensor
    log_constant: Tensor
    """B less log Γ(shape)."""

    def log_partition(self) -> Tensor:
        return self.log_constant + self.shape.lgamma()

    def cumulant(self, order: int) -> Tensor:
        value = _polygamma(order, self.shape)
        return value + self.shift if order == 1 else value

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.shift + _log_gammas(self.shape, shape, generator)

    def log_prob(self, point: Tensor) -> Tensor:
        # The density of log g is that of g times g: gᵏe⁻ᵍ/Γ(k), the Poisson probability of k at mean g, times k.
        log_gamma = point - self.shift
        return log_poisson(self.shape, log_gamma.exp(), log_gamma) + self.shape.log()


@dataclass(frozen=True)
class _GammaBelow(_Law):
    """η = bound − g/rate for a gamma variable g of that shape."""

    bound: Tensor
    shape: Tensor
    rate: Tensor
    log_constant: Tensor
    """B less the log-mass of the gamma law."""

    def log_partition(self) -> Tensor:
        return self.log_constant + self.shape.lgamma() - self.shape * self.rate.log()

    def cumulant(self, order: int) -> Tensor:
        value = math.factorial(order - 1) * self.shape * (-1 / self.rate) ** order
        return value + self.bound if order == 1 else value

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.bound - standard_gammas(self.shape.expand(shape), generator) / self.rate

    def log_prob(self, point: Tensor) -> Tensor:
        return log_gamma_density(self.bound - point, self.shape, self.rate)


@dataclass(frozen=True)
class _Normal(_Law):
    """η normal; B is the integral of exp(−½(η − mean)²/variance + ½ mean²/variance)."""

    mean: Tensor
    variance: Tensor

    def log_partition(self) -> Tensor:
        return 0.5 * (self.mean.square() / self.variance + (2 * math.pi * self.variance).log())

    def cumulant(self, order: int) -> Tensor:
        if order == 1:
            return self.mean
        if order == 2:
            return self.variance.expand_as(self.mean)
        return torch.zeros_like(self.mean)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator)
        return self.mean + self.variance.sqrt() * noise

    def log_prob(self, point: Tensor) -> Tensor:
        return -0.5 * ((point - self.mean).square() / self.variance + (2 * math.pi * self.variance).log())


def _of_bernoulli(likelihood: Bernoulli, strength: Tensor, chi: Tensor) -> _Law:
    # h tilted is a beta law of the probability σ(η + logit), of shapes χ and ν − χ.
    logit = likelihood._align(likelihood.logit, chi)
    return _LogRatio(
        first=chi,
        second=strength - chi,
        slope=1.0,
        shift=-logit,
        log_constant=strength * F.softplus(logit, threshold=40) - chi * logit,
    )


def _of_spin(likelihood: Spin, strength: Tensor, chi: Tensor) -> _Law:
    # As for a bit of twice the field: shapes (ν ± χ)/2, and η is half of a log-odds.
    field = likelihood._align(likelihood.field, chi)
    # strength·log cosh(field) + (strength − 1)·log 2, by log cosh t = |t| + softplus(−2|t|) − log 2.
    log_mass = strength * (field.abs() + F.softplus(-2 * field.abs())) - math.log(2)
    return _LogRatio(
        first=(strength + chi) / 2,
        second=(strength - chi) / 2,
        slope=0.5,
        shift=-field,
        log_constant=log_mass - chi * field,
    )


def _of_poisson(likelihood: Poisson, strength: Tensor, chi: Tensor) -> _Law:
    # exp(χη − ν·rate·(exp η − 1)) dη is a gamma law of exp η, of shape χ and rate ν·rate.
    rate = strength * likelihood._align(likelihood.rate, chi)
    return _LogGamma(shape=chi, shift=-rate.log(), log_constant=rate - chi * rate.log())


def _of_gamma(likelihood: Exponential | Gamma, strength: Tensor, chi: Tensor) -> _Law:
    # exp(χη)·(1 − η/rate)^(ν·shape) dη is a gamma law of rate − η, of shape ν·shape + 1 and rate χ.
    shape, rate = likelihood._shape_and_rate(chi)
    return _GammaBelow(
        bound=rate,
        shape=strength * shape + 1,
        rate=chi,
        log_constant=chi * rate - strength * shape * rate.log(),
    )


def _of_gaussian(likelihood: Gaussian, strength: Tensor, chi: Tensor) -> _Law:
    # exp(χη − ν·(location·η + ½ variance·η²)) is a Gaussian of precision ν·variance.
    precision = strength * _variance(likelihood, chi)
    location = likelihood._align(likelihood.location, chi)
    return _Normal((chi - strength * location) / precision, 1 / precision)


_LAWS: dict[type[Measure], Callable[[Any, Tensor, Tensor], _Law]] = {
    Bernoulli: _of_bernoulli,
    Spin: _of_spin,
    Poisson: _of_poisson,
    Exponential: _of_gamma,
    Gamma: _of_gamma,
    Gaussian: _of_gaussian,
}


def _variance(likelihood: Gaussian, like: Tensor) -> Tensor:
    """The variance of each coordinate, to broadcast against `like`."""
    is_isotropic = likelihood.covariance.ndim < likelihood.location.ndim
    covariance = likelihood.covariance.unsqueeze(-1) if is_isotropic else likelihood.covariance
    return likelihood._align(covariance, like)


def _check_independent(likelihood: Gaussian) -> None:
    if likelihood.covariance.ndim > likelihood.location.ndim or likelihood.factor.shape[-1] > 0:
        raise ValueError(
            "ConjugatePrior needs a Gaussian of independent coordinates (isotropic or diagonal covariance, no factor), "
            f"got a covariance of shape {tuple(likelihood.covariance.shape)} and a factor of shape "
            f"{tuple(likelihood.factor.shape)}"
        )
    if not all_true(likelihood.covariance > 0):
        raise ValueError("ConjugatePrior needs a Gaussian of positive variances, got a variance of 0")


def _polygamma(order: int, value: Tensor) -> Tensor:
    """The derivative of log Γ of that order."""
    if order == 1:
        return torch.digamma(value)
    if order > 2:
        return torch.polygamma(order - 1, value)
    # torch's trigamma has a relative error of 5e-10 at small arguments. The recurrence ψ'(x) = ψ'(x + 1) + 1/x² leads to
    # large ones, where it is exact.
    steps = torch.arange(_RECURRENCE_STEPS, dtype=value.dtype, device=value.device)
    return torch.polygamma(1, value + _RECURRENCE_STEPS) + (value.unsqueeze(-1) + steps).pow(-2).sum(-1)


def _log_gammas(concentration: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Logarithms of gamma variables, exact where the variables themselves underflow: log g(a) = log g(a + 1) + log(U)/a."""
    concentration = concentration.expand(shape)
    # −log U is an exponential variable.
    exponential = torch.empty_like(concentration, memory_format=torch.contiguous_format)
    exponential.exponential_(generator=generator)
    return standard_gammas(concentration + 1, generator).log() - exponential / concentration
