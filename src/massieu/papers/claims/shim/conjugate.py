"""S16: a conjugate prior as a measure over natural parameters."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import (
    Bernoulli,
    ConjugatePrior,
    DomainError,
    Exponential,
    Gamma,
    Gaussian,
    Measure,
    Poisson,
    Spin,
)
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, QUADRATURE, SHIM, Check, all_raise, close
from massieu.papers.claims.inputs import Normal, normal_draws
from massieu.papers.claims.oracles import differences, quadrature
from massieu.papers.claims.registry import claim

_STATIONARITY = 1e-12
"""E ∇A₀ = χ/ν is the integral of a derivative, which quadrature gets to rounding."""


@dataclass(frozen=True)
class _Case:
    """A likelihood, a prior's parameters, and the integral over η written out.

    Attributes:
        name: Of the likelihood.
        likelihood: The law of one observation.
        strength: ν, shape (1,).
        chi: χ, inside the domain, shape (draws, 1).
        eta: Nodes of a quadrature over η.
        log_volume: Their log-weights.
        log_partition: A₀ at the nodes.
        slope: A₀′ at the nodes.
        observations: Draws of the likelihood, shape (n, 1).
        log_predictive: log p(x | χ, ν) in closed form.
        closed_b: B at `chi` in closed form, shape (draws, 1); None where there is none.
        closed_mean: E[η] at `chi` in closed form, shape (draws, 1); None where there is none.
    """

    name: str
    likelihood: Measure
    strength: Float[Tensor, "1"]
    chi: Float[Tensor, "draws 1"]
    eta: Float[Tensor, "nodes"]
    log_volume: Float[Tensor, "nodes"]
    log_partition: Float[Tensor, "nodes"]
    slope: Float[Tensor, "nodes"]
    observations: Float[Tensor, "n 1"]
    log_predictive: Callable[[Tensor, Tensor, Tensor], Tensor]
    closed_b: Float[Tensor, "draws 1"] | None = None
    closed_mean: Float[Tensor, "draws 1"] | None = None

    @property
    def prior(self) -> ConjugatePrior:
        return ConjugatePrior.create(self.likelihood, self.strength)

    def exponents(self) -> Float[Tensor, "draws nodes"]:
        """χη − νA₀(η), with the log-weights of the nodes."""
        return self.chi * self.eta - self.strength * self.log_partition + self.log_volume


@claim(
    "S16",
    title="A conjugate prior as measure",
    statement="A conjugate prior e^{χη − νA₀(η)} dη is a linear exponential family in η with natural parameter χ. "
    "∇B is the posterior mean of η, observations add to χ and ν, E ∇A₀(η) = χ/ν, and −∂B/∂ν = E A₀(η). The evidence "
    "is a difference of B.",
    source=f"{SHIM}, §4, where the case is named; its formulas are derived",
    status="quoted",
    corrected="Parameters (ξ, ν) are named without a formula; h = e^{−νA₀(η)} dη is a density in η, not a set of "
    "tokens.",
)
def conjugate_prior_as_a_measure(draws: int = 10, observations: int = 8, seed: int = 0) -> Iterator[Check]:
    normal = normal_draws(seed)
    for case in _cases(normal, draws, observations):
        yield from _integrals(case)
        yield from _closed_forms(case)
        yield from _evidence(case)
    strength = torch.tensor([2.0], dtype=torch.float64)
    prior = ConjugatePrior.create(Bernoulli.create(0.25 * strength), strength)
    yield all_raise(
        "Bernoulli: χ must lie between 0 and ν",
        DomainError,
        lambda: prior.mean(0 * strength),
        lambda: prior.mean(strength),
        lambda: prior.mean(-strength),
    )


def _integrals(case: _Case) -> Iterator[Check]:
    """B and expectations under the prior, against integrals over η."""
    name = case.name
    prior = case.prior
    chi = case.chi
    probability = case.exponents().softmax(-1)
    log_mass = case.exponents().logsumexp(-1)
    yield close(f"{name}: B and log ∫ e^(χη − νA₀) dη", prior.log_partition(chi), log_mass, QUADRATURE)
    mean = prior.mean(chi).squeeze(-1)
    yield close(f"{name}: ∇B and ∫ η p(η | χ, ν) dη", mean, probability @ case.eta, QUADRATURE)
    expected = (chi / case.strength).squeeze(-1)
    yield close(f"{name}: E ∇A₀(η) and χ/ν", probability @ case.slope, expected, _STATIONARITY)

    def log_partition(strength: Tensor) -> Tensor:
        return ConjugatePrior.create(case.likelihood, strength).log_partition(chi)

    derivative = -differences(log_partition, case.strength).squeeze(-1)
    expected = probability @ case.log_partition
    yield close(f"{name}: −∂B/∂ν and E A₀(η)", derivative, expected, GRADIENT_BY_DIFFERENCES)


def _closed_forms(case: _Case) -> Iterator[Check]:
    """B and ∇B against the table's closed forms, for the likelihoods that have one."""
    if case.closed_b is None or case.closed_mean is None:
        return
    name = case.name
    prior = case.prior
    mean = case.closed_mean
    yield close(f"{name}: B and its closed form", prior.log_partition(case.chi), case.closed_b.squeeze(-1))
    yield close(f"{name}: ∇B and its closed form", prior.mean(case.chi), mean)
    gradient = differences(prior.log_partition, case.chi)
    yield close(f"{name}: differences of B and the closed form of E[η]", gradient, mean, GRADIENT_BY_DIFFERENCES)


def _evidence(case: _Case) -> Iterator[Check]:
    """The evidence of all observations, and the product of predictives, one observation after the other."""
    chi = case.chi[0]
    strength = case.strength
    log_product = torch.zeros(1, dtype=torch.float64)
    for observation in case.observations:
        log_product = log_product + case.log_predictive(observation, chi, strength)
        chi = chi + observation
        strength = strength + 1
    evidence = case.prior.evidence(case.chi[0], case.observations)
    yield close(f"{case.name}: evidence and the product of predictives", evidence, log_product.squeeze(-1))
    updated_chi, posterior = case.prior.update(case.chi[0], case.observations)
    yield close(f"{case.name}: χ + Σx and what update returns", updated_chi, chi)
    yield close(f"{case.name}: ν + n and the strength update returns", posterior.strength, strength)


def _cases(normal: Normal, draws: int, observations: int) -> list[_Case]:
    makers = (_bernoulli, _spin, _poisson, _gaussian, _exponential, _gamma)
    return [make(normal, draws, observations) for make in makers]


def _strength(normal: Normal) -> Tensor:
    return 1.5 + 2 * normal(1).abs()


def _share(normal: Normal, draws: int) -> Tensor:
    """Between 0.15 and 0.85."""
    return 0.15 + 0.7 * torch.sigmoid(normal(draws, 1))


def _vector(value: float) -> Float[Tensor, "1"]:
    return torch.tensor([value], dtype=torch.float64)


def _bernoulli(normal: Normal, draws: int, observations: int) -> _Case:
    """h₀ = ½ on both points: A₀ = log(1 + e^η) − log 2."""
    strength = _strength(normal)
    chi = strength * _share(normal, draws)
    # Less than e^−50 of the integral lies beyond.
    eta, log_volume = quadrature(-250.0, 250.0, panels=500)
    rest = strength - chi
    return _Case(
        name="Bernoulli",
        likelihood=Bernoulli.create(_vector(0.5)),
        strength=strength,
        chi=chi,
        eta=eta,
        log_volume=log_volume,
        log_partition=F.softplus(eta) - math.log(2),
        slope=torch.sigmoid(eta),
        observations=(normal(observations, 1) > 0).double(),
        log_predictive=lambda x, chi, strength: (torch.where(x == 1, chi, strength - chi) / strength).log(),
        closed_b=chi.lgamma() + rest.lgamma() - strength.lgamma() + strength * math.log(2),
        closed_mean=chi.digamma() - rest.digamma(),
    )


def _spin(normal: Normal, draws: int, observations: int) -> _Case:
    """Fair signs: A₀ = log cosh η."""
    strength = _strength(normal)
    chi = strength * (2 * _share(normal, draws) - 1)
    eta, log_volume = quadrature(-150.0, 150.0, panels=500)
    return _Case(
        name="spin",
        likelihood=Spin.create(_vector(0.0)),
        strength=strength,
        chi=chi,
        eta=eta,
        log_volume=log_volume,
        # log cosh η without overflow.
        log_partition=eta.abs() + F.softplus(-2 * eta.abs()) - math.log(2),
        slope=eta.tanh(),
        observations=torch.sign(normal(observations, 1)),
        log_predictive=lambda x, chi, strength: (0.5 * (1 + x * chi / strength)).log(),
    )


def _poisson(normal: Normal, draws: int, observations: int) -> _Case:
    """h₀(x) = e^−1/x!: A₀ = e^η − 1."""
    strength = _strength(normal)
    chi = 0.3 + normal(draws, 1).abs()
    eta, log_volume = quadrature(-200.0, 8.0, panels=400)

    def log_predictive(x: Tensor, chi: Tensor, strength: Tensor) -> Tensor:
        coefficient = (chi + x).lgamma() - chi.lgamma() - (x + 1).lgamma()
        return coefficient + chi * strength.log() - (chi + x) * (strength + 1).log()

    return _Case(
        name="Poisson",
        likelihood=Poisson.create(_vector(1.0)),
        strength=strength,
        chi=chi,
        eta=eta,
        log_volume=log_volume,
        log_partition=eta.expm1(),
        slope=eta.exp(),
        observations=normal(observations, 1).mul(2).abs().floor(),
        log_predictive=log_predictive,
        closed_b=chi.lgamma() - chi * strength.log() + strength,
        closed_mean=chi.digamma() - strength.log(),
    )


def _gaussian(normal: Normal, draws: int, observations: int) -> _Case:
    """h₀ = N(0, variance): A₀ = ½ variance·η²."""
    strength = _strength(normal)
    variance = torch.exp(0.3 * torch.tanh(normal(1)))
    chi = normal(draws, 1)
    eta, log_volume = quadrature(-60.0, 60.0)
    precision = strength * variance

    def log_predictive(x: Tensor, chi: Tensor, strength: Tensor) -> Tensor:
        spread = variance * (1 + 1 / strength)
        return -0.5 * (x - chi / strength).square() / spread - 0.5 * (2 * math.pi * spread).log()

    return _Case(
        name="Gaussian",
        likelihood=Gaussian.create(torch.zeros_like(variance), variance),
        strength=strength,
        chi=chi,
        eta=eta,
        log_volume=log_volume,
        log_partition=0.5 * variance * eta.square(),
        slope=variance * eta,
        observations=normal(observations, 1),
        log_predictive=log_predictive,
        closed_b=0.5 * chi.square() / precision + 0.5 * (2 * math.pi / precision).log(),
        closed_mean=chi / precision,
    )


def _exponential(normal: Normal, draws: int, observations: int) -> _Case:
    rate = torch.exp(0.3 * torch.tanh(normal(1)))
    return _gamma_like("exponential", Exponential.create(rate), _vector(1.0), rate, normal, draws, observations)


def _gamma(normal: Normal, draws: int, observations: int) -> _Case:
    shape = 0.8 + normal(1).abs()
    rate = torch.exp(0.3 * torch.tanh(normal(1)))
    return _gamma_like("gamma", Gamma.create(shape, 1 / rate), shape, rate, normal, draws, observations)


def _gamma_like(
    name: str, likelihood: Measure, shape: Tensor, rate: Tensor, normal: Normal, draws: int, observations: int
) -> _Case:
    """A₀ = −shape·log(1 − η/rate), η < rate: integrated in log(rate − η), where it is smooth."""
    strength = _strength(normal)
    chi = 0.3 + normal(draws, 1).abs()
    logarithm, log_step = quadrature(-60.0, 8.0, panels=400)
    below_rate = logarithm.exp()  # rate − η

    def log_predictive(x: Tensor, chi: Tensor, strength: Tensor) -> Tensor:
        count = strength * shape + 1
        coefficient = (count + shape).lgamma() - count.lgamma() - shape.lgamma()
        return coefficient + (shape - 1) * x.log() + count * chi.log() - (count + shape) * (chi + x).log()

    return _Case(
        name=name,
        likelihood=likelihood,
        strength=strength,
        chi=chi,
        eta=rate - below_rate,
        log_volume=log_step + logarithm,
        log_partition=-shape * (logarithm - rate.log()),
        slope=shape / below_rate,
        observations=0.1 + normal(observations, 1).abs(),
        log_predictive=log_predictive,
    )
