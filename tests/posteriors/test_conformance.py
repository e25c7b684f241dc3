"""Every posterior keeps the laws of posteriors, against joint laws of all tokens, SciPy's and enumeration."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from tests.posteriors.cases import cases
from tests.support.suites import compiled, every_check, without_a_case
from torch import Tensor

from massieu.posteriors import Posterior
from massieu.testing import PosteriorCase, posterior_checks

F64 = torch.float64


def _joint_normal(law: Any, tokens: Tensor) -> float:
    """Of tokens' coordinates, each N(m, σ²(1 + 11ᵀ/κ))."""
    count = len(tokens)
    joint = float(law.variance) * (np.eye(count) + 1 / float(law.strength))
    return sum(
        stats.multivariate_normal(np.full(count, m), joint).logpdf(x) for m, x in zip(law.mean, tokens.T, strict=True)
    )


def _gamma(law: Any, tokens: Tensor) -> float:
    """Poisson counts of a rate with a gamma law: χ and ν tokens are its shape and rate; coordinates are independent."""
    total = 0.0
    for chi, counts in zip(law.chi.tolist(), tokens.T.numpy(), strict=True):
        nu = float(law.strength)
        for x in counts:
            total += stats.nbinom(chi, nu / (nu + 1)).logpmf(x)
            chi, nu = chi + x, nu + 1
    return total


def _beta(law: Any, tokens: Tensor) -> float:
    """Bernoulli tokens: a ratio of beta functions for each coordinate."""
    one, both = law.chi.numpy(), float(law.strength)
    heads, count = tokens.sum(0).numpy(), len(tokens)
    after = special.betaln(one + heads, both - one + count - heads)
    return float((after - special.betaln(one, both - one)).sum())


def _polya(law: Any, tokens: Tensor) -> float:
    """Balls drawn and put back with another of their colour."""
    alpha, total = law.concentration.numpy().copy(), 0.0
    for token in tokens.tolist():
        total += np.log(alpha[token] / alpha.sum())
        alpha[token] += 1
    return total


def _paths(law: Any, tokens: Tensor) -> float:
    """Of a hidden chain, over all of its paths."""
    start, move, emit = (part.numpy() for part in (law.log_weight, law.log_transition, law.log_likelihood))
    found = []
    for path in itertools.product(range(3), repeat=len(tokens)):
        value = start[path[0]] + sum(move[a, b] for a, b in itertools.pairwise(path))
        found.append(value + sum(emit[state, token] for state, token in zip(path, tokens.tolist(), strict=True)))
    return float(special.logsumexp(found))


def _concepts(law: Any, tokens: Tensor) -> Tensor:
    """log P(z) + Σ log p(x | z) of each concept."""
    return law.log_weight + law.log_likelihood[:, tokens].sum(-1)


def _regression(law: Any, tokens: Tensor) -> float:
    """Targets of all rows are jointly normal, of covariance noise·1 + ΦΛ⁻¹Φᵀ."""
    features, targets = tokens[:, :3].numpy(), tokens[:, 3:].numpy()
    covariance = float(law.noise) * np.eye(len(tokens)) + features @ np.linalg.inv(law.precision.numpy()) @ features.T
    centre = features @ law.mean.numpy()
    return sum(stats.multivariate_normal(m, covariance).logpdf(y) for m, y in zip(centre.T, targets.T, strict=True))


EVIDENCE: dict[str, Callable[[Any, Tensor], Any]] = {
    "Gaussian mean": _joint_normal,
    "Poisson": _gamma,
    "Bernoulli": _beta,
    "Dirichlet": _polya,
    "concepts": lambda law, tokens: _concepts(law, tokens).logsumexp(-1),
    "hidden Markov": _paths,
    "regression": _regression,
}
MEANS: dict[str, Callable[[Any, Tensor], Any]] = {
    "Gaussian mean": lambda law, tokens: (law.strength * law.mean + tokens.sum(0)) / (law.strength + len(tokens)),
    "Poisson": lambda law, tokens: (law.chi + tokens.sum(0)) / (law.strength + len(tokens)),
    "Bernoulli": lambda law, tokens: (law.chi + tokens.sum(0)) / (law.strength + len(tokens)),
    "concepts": lambda law, tokens: _concepts(law, tokens).softmax(-1),
}
FOUR = torch.arange(4), torch.zeros(4, dtype=F64)
COINS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=F64), torch.zeros(4, dtype=F64)
OUTCOMES = {"Dirichlet": FOUR, "concepts": FOUR, "hidden Markov": FOUR, "Bernoulli": COINS}
OUTCOMES["spin"] = 2 * COINS[0] - 1, COINS[1]
OUTCOMES["Poisson"] = torch.cartesian_prod(*[torch.arange(60, dtype=F64)] * 2), torch.zeros(3600, dtype=F64)

ORDERED = dict.fromkeys(
    ("order", "masked"), "the order of tokens counts, and one that is not seen is a step of the chain"
)
OWN = {"half precision": "a function works in a precision of its own"}


def _case(name: str, tokens: Tensor, prior: Posterior) -> PosteriorCase:
    sequences = torch.stack([tokens, tokens.flip(1), tokens.roll(1, 1)], 1)
    exempt = ORDERED if name == "hidden Markov" else OWN if name == "concepts of a function" else {}
    event = sequences.ndim - 3
    return PosteriorCase(
        prior, sequences, event, EVIDENCE.get(name), MEANS.get(name), OUTCOMES.get(name), exempt=exempt
    )


CASES = {name: _case(name, case.tokens, case.prior) for name, case in cases(4).items()}
MEDIUM = ("exponential", "gamma", "Gaussian", "regression of unknown noise")


# Of one class: two of its likelihoods' derivatives are enough in the fast tier.
SLOW = [f"{name}: derivatives" for name in ("exponential", "gamma", "Gaussian", "spin")]


@every_check(
    posterior_checks, CASES, medium=MEDIUM, slow=SLOW, representatives=("Gaussian mean", "concepts", "Dirichlet")
)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", compiled(posterior_checks, CASES))
def test_compiled_is_eager(check):
    check()


@pytest.mark.medium
def test_every_posterior_has_a_case():
    assert not without_a_case(Posterior, [case.prior for case in CASES.values()])
