"""Claims on mixtures, cumulants and attention maps notice what is wrong; the traps of Gaussian mixtures."""

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor

from massieu.measures import Gaussian, mixture
from massieu.measures.mixture import Mixture
from massieu.papers.claims.bal.priors import Prior, one, priors
from massieu.papers.claims.inputs import normal_draws
from massieu.papers.claims.oracles import quadrature

# --- B3 by symbols ---------------------------------------------------------------------------------------------------

_T = sympy.Symbol("t")

SYMBOLIC: dict[str, Callable[..., sympy.Expr]] = {
    "Bernoulli": lambda p: sympy.log(1 - p + p * sympy.exp(_T)),
    "spin": lambda: sympy.log(sympy.cosh(_T)),
    "Gaussian": lambda location, variance: location * _T + variance * _T**2 / 2,
    "Poisson": lambda rate: rate * (sympy.exp(_T) - 1),
    "exponential": lambda rate: -sympy.log(1 - _T / rate),
    "Laplace": lambda scale: -sympy.log(1 - scale**2 * _T**2),
    "gamma": lambda shape, scale: -shape * sympy.log(1 - scale * _T),
    "constant": lambda value: value * _T,
}
PARAMETERS = {
    "Bernoulli": lambda measure: [torch.sigmoid(measure.logit)],
    "spin": lambda measure: [],
    "Gaussian": lambda measure: [measure.location, measure.covariance],
    "Poisson": lambda measure: [measure.rate],
    "exponential": lambda measure: [measure.rate],
    "Laplace": lambda measure: [measure.scale],
    "gamma": lambda measure: [measure.shape, measure.scale],
    "constant": lambda measure: [measure.value],
}


@pytest.mark.medium
@pytest.mark.parametrize("prior", priors(normal_draws(3)), ids=lambda prior: prior.name)
def test_the_cumulants_are_symbolic_derivatives(prior: Prior):
    values = [sympy.Float(value.item(), 30) for value in PARAMETERS[prior.name](prior.measure)]
    generating = SYMBOLIC[prior.name](*values)
    derivatives = [float(sympy.diff(generating, _T, order).subs(_T, 0)) for order in range(1, 7)]
    expected = torch.tensor(derivatives, dtype=torch.float64)
    torch.testing.assert_close(prior.cumulants, expected, rtol=1e-12, atol=1e-12)
    measured = prior.measure.cumulants(one(0.0), one(1.0), 6)
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


# --- traps 7 and 8 ---------------------------------------------------------------------------------------------------


def _hopfield(patterns: Tensor, beta: float) -> Mixture:
    """e^{−βE(v)} dv, E = ½‖v‖² − β⁻¹ log Σ e^{βW_μ·v}, as a mixture of N(W_μ, I/β)."""
    count, dimensions = patterns.shape
    log_weight = 0.5 * beta * patterns.square().sum(-1) + 0.5 * dimensions * math.log(2 * math.pi / beta)
    covariance = torch.eye(dimensions, dtype=torch.float64).expand(count, -1, -1) / beta
    return mixture(log_weight, Gaussian.create(patterns, covariance))


@pytest.mark.parametrize("beta", [0.4, 1.0, 2.5])
def test_the_hopfield_density_is_a_mixture_with_its_normaliser(beta: float):
    patterns = normal_draws(0)(5, 2)
    nodes, log_weight = quadrature(-15.0, 15.0, panels=30)
    points = torch.cartesian_prod(nodes, nodes)
    minus_energy = (beta * points @ patterns.T).logsumexp(-1) - 0.5 * beta * points.square().sum(-1)
    log_cell = (log_weight.unsqueeze(-1) + log_weight).flatten()
    log_mass = (minus_energy + log_cell).logsumexp(0)
    measure = _hopfield(patterns, beta)
    origin = torch.zeros(2, dtype=torch.float64)
    torch.testing.assert_close(measure.log_partition(origin), log_mass, rtol=0, atol=1e-8)
    log_prob = measure.log_prob(origin, points[::9973])
    torch.testing.assert_close(log_prob, minus_energy[::9973] - log_mass, rtol=1e-10, atol=1e-8)


def test_weights_without_the_normaliser_do_not_add_up_to_one():
    patterns = normal_draws(1)(6, 4)
    shares = (0.5 * patterns.square().sum(-1)).exp()
    weights = _hopfield(patterns, 1.0).responsibilities(torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(weights, shares / shares.sum(), rtol=1e-12, atol=0)
    # As published: Z_μ = e^{½‖W_μ‖²}, and Z = (2π)^{d/2} Σ Z_μ.
    published = shares / ((2 * math.pi) ** 2 * shares.sum())
    assert math.isclose(published.sum().item(), (2 * math.pi) ** -2, rel_tol=1e-12)


def test_weights_of_patterns_are_far_from_uniform_at_unit_temperature():
    count = 1000
    dimensions = 64
    patterns = normal_draws(2)(count, dimensions)

    def share_in_use(beta: float) -> float:
        """The perplexity of the weights over the number of patterns."""
        weights = _hopfield(patterns, beta).responsibilities(torch.zeros(dimensions, dtype=torch.float64))
        return math.exp(-(weights * weights.log()).sum().item()) / count

    assert share_in_use(1.0) < 0.05
    # ½‖W‖² is gamma of shape d/2: KL(w ‖ uniform) → d/2·(β/(1 − β) + log(1 − β)) for many patterns.
    beta = dimensions**-0.5
    limit = math.exp(-0.5 * dimensions * (beta / (1 - beta) + math.log(1 - beta)))
    assert abs(share_in_use(beta) - limit) < 0.05
