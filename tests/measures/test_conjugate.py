"""Conjugate priors against integrals over the natural parameter (S16)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from tests.support.rows import every_row

from massieu.measures import (
    Atoms,
    Bernoulli,
    ConjugatePrior,
    DomainError,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Measure,
    Poisson,
    Spin,
)

F64 = torch.float64
LOGIT = math.log(0.3 / 0.7)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@dataclass(frozen=True)
class Likelihood:
    measure: Measure
    log_partition: Callable[[Any], Any]
    mean: Callable[[Any], Any]
    log_probability: Callable[[Any, float], Any]  # of an observation, given the natural parameter
    observations: tuple[float, ...]
    chi: tuple[float, ...]
    upper: float = math.inf  # bound of the natural parameter
    strength: float = 2.5


LIKELIHOODS = {
    "bernoulli": Likelihood(
        Bernoulli.create(tensor(0.3)),
        lambda t: np.logaddexp(math.log(0.7), math.log(0.3) + t),
        lambda t: special.expit(t + LOGIT),
        lambda t, x: stats.bernoulli.logpmf(x, special.expit(t + LOGIT)),
        (1.0, 0.0, 1.0, 1.0),
        (0.25, 1.0, 2.375),
    ),
    "spin": Likelihood(
        Spin.create(tensor(0.4)),
        lambda t: np.logaddexp(t + 0.4, -t - 0.4) - math.log(2 * math.cosh(0.4)),
        lambda t: np.tanh(t + 0.4),
        lambda t, x: special.log_expit(2 * x * (t + 0.4)),
        (1.0, -1.0, 1.0, 1.0),
        (-2.25, 0.0, 1.5),
    ),
    "poisson": Likelihood(
        Poisson.create(tensor(1.5)),
        lambda t: 1.5 * np.expm1(t),
        lambda t: 1.5 * np.exp(t),
        lambda t, x: stats.poisson.logpmf(x, 1.5 * np.exp(t)),
        (2.0, 0.0, 1.0, 5.0),
        (0.375, 1.0, 6.0),
    ),
    "exponential": Likelihood(
        Exponential.create(tensor(1.75)),
        lambda t: -np.log1p(-t / 1.75),
        lambda t: 1 / (1.75 - t),
        lambda t, x: stats.expon.logpdf(x, scale=1 / (1.75 - t)),
        (0.3, 2.0, 0.01),
        (0.5, 1.0, 4.0),
        upper=1.75,
    ),
    "gamma": Likelihood(
        Gamma.create(tensor(0.75), tensor(0.4)),
        lambda t: -0.75 * np.log1p(-0.4 * t),
        lambda t: 0.3 / (1 - 0.4 * t),
        lambda t, x: stats.gamma.logpdf(x, 0.75, scale=0.4 / (1 - 0.4 * t)),
        (0.3, 2.0, 0.01),
        (0.5, 1.0, 4.0),
        upper=2.5,
    ),
    "gaussian": Likelihood(
        Gaussian.create(tensor(-0.5), tensor(2.0)),
        lambda t: -0.5 * t + t * t,
        lambda t: -0.5 + 2 * t,
        lambda t, x: stats.norm.logpdf(x, -0.5 + 2 * t, math.sqrt(2)),
        (0.3, -2.0, 1.0),
        (-3.0, 0.0, 4.0),
    ),
    "gaussian, isotropic": Likelihood(
        Gaussian.create(tensor(1.0), torch.tensor(0.25, dtype=F64)),
        lambda t: t + t * t / 8,
        lambda t: 1 + t / 4,
        lambda t, x: stats.norm.logpdf(x, 1 + t / 4, 0.5),
        (0.3, -2.0, 1.0),
        (-3.0, 0.0, 4.0),
    ),
}
CASES = pytest.mark.parametrize("name", LIKELIHOODS)


def prior(name: str) -> ConjugatePrior:
    case = LIKELIHOODS[name]
    return ConjugatePrior.create(case.measure, tensor(case.strength))


def grid(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points η and log-weights of the trapezoidal rule, which converges exponentially for analytic integrands."""
    upper = LIKELIHOODS[name].upper
    step = 1 / 64
    if upper == math.inf:
        points = np.arange(-300, 300, step)
        return points, np.full_like(points, math.log(step))
    t = np.arange(-30, 8, step)
    return upper - np.exp(t), t + math.log(step)  # in log(upper − η), smooth up to the bound


def integral(name: str, chi: float, function: Callable[[Any], Any] = np.ones_like) -> tuple[float, float]:
    """∫ function(η) exp(χη − νA_0(η)) dη over that of exp(χη − νA_0(η)), and the logarithm of the latter."""
    case, (points, log_weight) = LIKELIHOODS[name], grid(name)
    with np.errstate(over="ignore"):
        scores = chi * points - case.strength * case.log_partition(points) + log_weight
        mass = float(special.logsumexp(scores))
        kept = scores > mass - 700
        return float(np.sum(np.exp(scores[kept] - mass) * function(points[kept]))), mass


@CASES
def test_log_partition_is_the_log_of_the_integral(name):
    for chi in LIKELIHOODS[name].chi:
        _, expected = integral(name, chi)
        assert prior(name).log_partition(tensor(chi)).item() == pytest.approx(expected, abs=1e-9)


@CASES
def test_mean_of_the_expectation_parameter_is_chi_over_strength(name):
    """Diaconis and Ylvisaker."""
    case = LIKELIHOODS[name]
    measure = prior(name)
    for chi in case.chi:
        mean, mass = integral(name, chi, case.mean)
        ours = mean * math.exp(mass - measure.log_partition(tensor(chi)).item())
        assert ours == pytest.approx(chi / case.strength, abs=1e-12)


@CASES
def test_moments_by_integration_and_six_cumulants(name):
    case = LIKELIHOODS[name]
    measure = prior(name)
    chi = case.chi[1]
    cumulants = measure.cumulants(tensor(chi), tensor(1.0), 6).tolist()
    mean, _ = integral(name, chi, lambda t: t)
    second, third, fourth, fifth, sixth = (integral(name, chi, lambda t, n=n: (t - mean) ** n)[0] for n in range(2, 7))
    expected = [
        mean,
        second,
        third,
        fourth - 3 * second**2,
        fifth - 10 * third * second,
        sixth - 15 * fourth * second - 10 * third**2 + 30 * second**3,
    ]
    assert cumulants == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert measure.mean(tensor(chi)).item() == pytest.approx(mean, abs=1e-12)
    assert measure.fisher(tensor(chi)).item() == pytest.approx(second, rel=1e-12)


@CASES
def test_derivative_in_the_strength_is_minus_the_mean_of_the_log_partition(name):
    case = LIKELIHOODS[name]
    chi = case.chi[1]
    strength = tensor(case.strength).requires_grad_()
    (slope,) = torch.autograd.grad(ConjugatePrior.create(case.measure, strength).log_partition(tensor(chi)), strength)
    expected, _ = integral(name, chi, case.log_partition)
    assert -slope.item() == pytest.approx(expected, abs=1e-9)


def test_closed_forms_of_the_table():
    chi = tensor(0.7, 1.9)
    strength = tensor(2.0, 5.0)
    bernoulli = ConjugatePrior.create(Bernoulli.create(tensor(0.5, 0.5)), strength)
    a = chi.numpy()
    total = strength.numpy()
    expected = special.betaln(a, total - a) + total * math.log(2)
    assert bernoulli.log_partition(chi).item() == pytest.approx(expected.sum().item(), rel=1e-13)
    expected = special.digamma(a) - special.digamma(total - a)
    np.testing.assert_allclose(bernoulli.mean(chi).numpy(), expected, rtol=1e-13)
    poisson = ConjugatePrior.create(Poisson.create(tensor(1.0, 1.0)), strength)
    expected = special.gammaln(a) - a * np.log(total) + total
    assert poisson.log_partition(chi).item() == pytest.approx(expected.sum().item(), rel=1e-13)
    np.testing.assert_allclose(poisson.mean(chi).numpy(), special.digamma(a) - np.log(total), rtol=1e-13)
    gaussian = ConjugatePrior.create(Gaussian.create(tensor(0.0, 0.0), tensor(1.5, 3.0)), strength)
    torch.testing.assert_close(gaussian.mean(chi), chi / (strength * tensor(1.5, 3.0)))


@CASES
def test_evidence_is_the_product_of_predictives_and_the_integral_of_the_likelihood(name):
    case = LIKELIHOODS[name]
    measure = prior(name)
    data = tensor(*case.observations)[:, None]
    chi = tensor(case.chi[1])
    whole = measure.evidence(chi, data)
    assert whole.shape == ()
    total = 0.0
    running = measure
    state = chi
    for one in data:
        total += running.evidence(state, one[None]).item()
        state, running = running.update(state, one[None])
    assert whole.item() == pytest.approx(total, rel=1e-12)
    after, posterior = measure.update(chi, data)
    assert after.item() == pytest.approx(state.item()) and posterior.strength.item() == case.strength + len(data)

    points, log_weight = grid(name)
    inside = np.isfinite(measure._log_density(torch.from_numpy(points)[:, None]).numpy()) & (np.abs(points) < 100)
    points, log_weight = points[inside], log_weight[inside]
    etas = torch.from_numpy(points)[:, None]
    scores = measure.log_prob(chi.expand_as(etas), etas).numpy() + log_weight
    scores = scores + sum(case.log_probability(points, x) for x in case.observations)
    assert whole.item() == pytest.approx(special.logsumexp(scores), abs=1e-9)


def test_evidence_of_bits_is_that_of_the_polya_urn():
    measure = ConjugatePrior.create(Bernoulli.create(tensor(0.5)), tensor(3.0))
    data = torch.tensor([1, 0, 1, 1, 0])[:, None]
    urn = math.prod([1 / 3, 2 / 4, 2 / 5, 3 / 6, 3 / 7])
    assert measure.evidence(tensor(1.0), data).item() == pytest.approx(math.log(urn), rel=1e-13)


@CASES
def test_batches_and_float32(name):
    case = LIKELIHOODS[name]
    single = torch.utils._pytree.tree_map(lambda leaf: leaf.expand(3, *leaf.shape), case.measure)
    strength = tensor(case.strength).expand(3, 1)
    measure = ConjugatePrior.create(single, strength)
    chi = tensor(*case.chi)[:, None]
    data = tensor(*case.observations)[:, None].expand(3, -1, 1)
    alone = [prior(name).evidence(row, data[0]).item() for row in chi]
    assert measure.evidence(chi, data).tolist() == pytest.approx(alone)
    later, posterior = measure.update(chi, data)
    assert later.shape == (3, 1) and posterior.strength.shape == (3, 1)
    half = ConjugatePrior.create(case.measure.to(torch.float32), torch.tensor([case.strength]))
    exact = half.to(F64)
    point = chi.float()
    for function in ("log_partition", "mean", "fisher"):
        result = getattr(half, function)(point)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, getattr(exact, function)(point.double()).float(), rtol=2e-7, atol=0)


def test_the_interior_is_inside_even_for_a_certain_likelihood():
    for likelihood in (Spin.create(tensor(30.0)), Bernoulli.create(tensor(1e-30))):
        measure = ConjugatePrior.create(likelihood, tensor(2.0))
        assert measure.mean(measure._interior()).isfinite()


def test_samples_where_gammas_underflow():
    measure = ConjugatePrior.create(Poisson.create(tensor(1.0)), tensor(1.0))
    chi = tensor(1e-4)
    count = 20_000
    draws = measure.sample(chi, (count,), generator=torch.Generator().manual_seed(0))
    assert draws.isfinite().all() and draws.min() < -2e4
    assert abs(draws.mean().item() - special.digamma(1e-4)) < 5 * 1e4 / math.sqrt(count)


@CASES
def test_natural_inverts_the_mean(name):
    chi = tensor(*LIKELIHOODS[name].chi)[:, None]
    measure = prior(name)
    result = measure._natural(measure.mean(chi))
    if name in ("bernoulli", "spin", "poisson"):
        assert result is None
    else:
        torch.testing.assert_close(result, chi)
    inside = measure._in_domain(measure._interior())
    assert inside is None or bool(inside.all())


@CASES
def test_derivatives(name):
    case = LIKELIHOODS[name]
    leaves, structure = torch.utils._pytree.tree_flatten(case.measure)
    inputs = [leaf.clone().requires_grad_() for leaf in (tensor(case.chi[1]), tensor(case.strength), *leaves)]

    def log_partition(chi: torch.Tensor, strength: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        likelihood = torch.utils._pytree.tree_unflatten(list(leaves), structure)
        return ConjugatePrior.create(likelihood, strength).log_partition(chi)

    assert torch.autograd.gradcheck(log_partition, inputs)
    assert torch.autograd.gradgradcheck(log_partition, inputs)


def test_domain_errors_name_the_bound():
    for name, chi, message in (
        ("bernoulli", 2.5, r"0 < eta < strength = 2\.5"),
        ("bernoulli", 0.0, r"0 < eta < strength = 2\.5"),
        ("spin", -2.5, r"\|eta\| < strength = 2\.5"),
        ("poisson", 0.0, "0 < eta in every"),
        ("exponential", -1.0, "0 < eta in every"),
        ("gamma", 0.0, "0 < eta in every"),
    ):
        with pytest.raises(DomainError, match=message):
            prior(name).mean(tensor(chi))
        with pytest.raises(DomainError, match=message):
            prior(name).update(tensor(chi), torch.ones(1, 1))
    assert prior("gaussian").mean(tensor(-1e6)).isfinite()


@every_row(
    ("call", "kind", "message"),
    [
        (lambda: ConjugatePrior.create(Laplace.create(tensor(1.0)), tensor(1.0)), TypeError, "got Laplace"),
        (lambda: ConjugatePrior.create(Atoms.create(torch.zeros(2, 2)), tensor(1.0)), TypeError, "got Atoms"),
        (lambda: ConjugatePrior.create(Spin.create(dim=2), tensor(1.0)), ValueError, r"shape \(2,\), got \(1,\)"),
        (
            lambda: ConjugatePrior.create(Spin.create(dim=1), tensor(0.0)),
            ValueError,
            "strength must be positive and finite, got 0",
        ),
        (lambda: ConjugatePrior.create(Spin.create(dim=1), torch.tensor([1j])), TypeError, "strength must be real"),
        (
            lambda: ConjugatePrior.create(Gaussian.create(torch.zeros(2), torch.eye(2)), torch.ones(2)),
            ValueError,
            "independent coordinates",
        ),
        (
            lambda: ConjugatePrior.create(Gaussian.create(torch.zeros(2), torch.zeros(2)), torch.ones(2)),
            ValueError,
            "variance of 0",
        ),
        (
            lambda: prior("poisson").update(tensor(1.0, 1.0), torch.ones(1, 1)),
            ValueError,
            r"chi must have shape \(1,\)",
        ),
        (lambda: prior("poisson").update(tensor(1.0), torch.ones(1)), ValueError, r"\(n, 1\), got \(1,\)"),
        (lambda: prior("poisson").update(tensor(1.0), tensor(1.5)[:, None]), ValueError, "support of Poisson, got 1.5"),
        (lambda: prior("bernoulli").evidence(tensor(1.0), tensor(2.0)[:, None]), ValueError, "support of Bernoulli"),
        (lambda: prior("gaussian").update(tensor(1.0), tensor(math.nan)[:, None]), ValueError, "support of Gaussian"),
    ],
)
def test_bad_input_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_bit_that_is_nearly_certain_keeps_its_digits():
    """ν·log(1 + e^l) − χ·l + log B(χ, ν − χ): past l = 20 the logarithm is not l yet."""
    logit = 22.0
    strength = 2.5
    chi = 2.0
    likelihood = Bernoulli(tensor(logit))
    result = ConjugatePrior.create(likelihood, tensor(strength)).log_partition(tensor(chi))
    expected = (strength - chi) * logit + strength * math.log1p(math.exp(-logit)) + special.betaln(chi, strength - chi)
    assert result.item() == pytest.approx(expected, rel=1e-14)
