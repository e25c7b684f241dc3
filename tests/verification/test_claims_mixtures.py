"""Claims on mixtures, cumulants and attention maps notice what is wrong; the traps of Gaussian mixtures."""

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from tests.support.rows import every_row
from tests.support.verification.small import SMALL
from torch import Tensor

from massieu.errors import InputError
from massieu.measures import Atoms, ConjugatePrior, Gaussian, Laplace, Spin, boosting, mixture
from massieu.measures.mixture import Mixture
from massieu.verification.bal.priors import Prior, one, priors
from massieu.verification.inputs import normal_draws
from massieu.verification.oracles import quadrature
from massieu.verification.run import verify
from massieu.verification.shim import boosting as boosting_claims

_MEAN, _LAPLACE, _PRIOR = Atoms._mean, Laplace._cumulant, ConjugatePrior._cumulant
_HEADS = Mixture.lower_bound


def _heads_of_equal_weight(self: Mixture, eta: Tensor, weights: Tensor | None = None) -> Tensor:
    return _HEADS(self, eta, torch.softmax(0 * self.log_weight, -1))


def _one_sided(self: Laplace, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Each side with probability ½, the tilt only in the sizes."""
    size = torch.empty((2, *shape, *eta.shape), dtype=eta.dtype).exponential_(generator=generator)
    positive = torch.rand(size.shape[1:], generator=generator) < 0.5
    return torch.where(positive, size[0] / (1 / self.scale - eta), -size[1] / (1 / self.scale + eta))


WRONG = {
    "S14: heads of equal weight": ("S14", Mixture, "lower_bound", _heads_of_equal_weight),
    "S16: a posterior mean one percent off": (
        "S16",
        ConjugatePrior,
        "_cumulant",
        lambda self, eta, order: 1.01 * _PRIOR(self, eta, order),
    ),
    "S17: weights of the wrong sign": (
        "S17",
        boosting_claims,
        "boosting",
        lambda labels, logits, learners: boosting(-labels, logits, learners),
    ),
    "S18: half the covariance": (
        "S18",
        Gaussian,
        "_mean",
        lambda self, eta: self.location + self._covariance_times(eta) / 2,
    ),
    "B2: no domain": ("B2", Laplace, "_in_domain", lambda self, eta: None),
    "B3: the published cumulants of Laplace": (
        "B3",
        Laplace,
        "_cumulant",
        lambda self, eta, order: _LAPLACE(self, eta, order) / 2,
    ),
    "B9: a Laplace unit that is positive half of the time": ("B9", Laplace, "_sample", _one_sided),
    "B19: an output that is no gradient": ("B19", Atoms, "_mean", lambda self, eta: _MEAN(self, eta).roll(1, -1)),
    "X8: −A for the entropy": ("X8", Spin, "_entropy", lambda self, eta: -self._log_partition(eta)),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_measure_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id, settings=SMALL.get(id))[0].verdict == "fails"


@every_row(
    ("id", "settings"),
    [
        ("S14", {"heads": 1}),
        ("S17", {"examples": 12, "learners": 12}),
        ("B9", {"samples": 100}),
        ("B19", {"dimensions": 1}),
        ("B18", {"atoms": 4, "dimensions": 4}),
        ("X8", {"draws": 1}),
    ],
)
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@every_row(
    ("id", "settings"),
    [
        ("S14", {"heads": 2, "tokens": 2, "dimensions": 1}),
        ("S14", {"heads": 12, "tokens": 32, "dimensions": 32}),
        ("S16", {"draws": 100, "observations": 60}),
        ("S17", {"examples": 3, "learners": 1, "rounds": 1}),
        ("S17", {"examples": 100, "learners": 30, "rounds": 60}),
        ("S18", {"atoms": 1, "dimensions": 1}),
        ("S18", {"atoms": 32, "dimensions": 64}),
        ("B19", {"atoms": 50, "dimensions": 32, "draws": 4}),
        ("B18", {"atoms": 50, "dimensions": 32, "draws": 4}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, int]):
    assert verify(id, settings=settings)[0].verdict == "holds"


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


@every_row("beta", [0.4, 1.0, 2.5])
def test_the_hopfield_density_is_a_mixture_with_its_normaliser(beta: float):
    patterns = normal_draws(0)(5, 2)
    line, log_weight = quadrature(-15.0, 15.0, panels=30)
    points = torch.cartesian_prod(line, line)
    minus_energy = (beta * points @ patterns.T).logsumexp(-1) - 0.5 * beta * points.square().sum(-1)
    volume = (log_weight.unsqueeze(-1) + log_weight).flatten()
    mass = (minus_energy + volume).logsumexp(0)
    measure, origin = _hopfield(patterns, beta), torch.zeros(2, dtype=torch.float64)
    torch.testing.assert_close(measure.log_partition(origin), mass, rtol=0, atol=1e-8)
    some = points[::9973]
    torch.testing.assert_close(measure.log_prob(origin, some), minus_energy[::9973] - mass, rtol=1e-10, atol=1e-8)


def test_weights_without_the_normaliser_do_not_add_up_to_one():
    patterns = normal_draws(1)(6, 4)
    size = (0.5 * patterns.square().sum(-1)).exp()
    weights = _hopfield(patterns, 1.0).responsibilities(torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(weights, size / size.sum(), rtol=1e-12, atol=0)
    # As published: Z_μ = e^{½‖W_μ‖²}, and Z = (2π)^{d/2} Σ Z_μ.
    published = size / ((2 * math.pi) ** 2 * size.sum())
    assert math.isclose(published.sum().item(), (2 * math.pi) ** -2, rel_tol=1e-12)


def test_weights_of_patterns_are_far_from_uniform_at_unit_temperature():
    count, dimensions = 1000, 64
    patterns = normal_draws(2)(count, dimensions)

    def used(beta: float) -> float:
        """The perplexity of the weights over the number of patterns."""
        weights = _hopfield(patterns, beta).responsibilities(torch.zeros(dimensions, dtype=torch.float64))
        return math.exp(-(weights * weights.log()).sum().item()) / count

    assert used(1.0) < 0.05
    # ½‖W‖² is gamma of shape d/2: KL(w ‖ uniform) → d/2·(β/(1 − β) + log(1 − β)) for many patterns.
    beta = dimensions**-0.5
    limit = math.exp(-0.5 * dimensions * (beta / (1 - beta) + math.log(1 - beta)))
    assert abs(used(beta) - limit) < 0.05
