"""Wrong laws of exchangeable tokens."""

import math

import torch

from massieu.papers.claims.beyond import empirical_bayes
from massieu.papers.claims.bridges import sinks
from massieu.papers.claims.zhang import exchangeability, positions
from massieu.papers.claims.zhang import posterior as posterior_claims
from massieu.posteriors import DirichletMultinomial, DiscreteLatent, GaussianMean, averaging_regret, base, conjugate

_BOUND = exchangeability.finite_extension_bound
_SUFFICIENCY = exchangeability.sufficiency
_GAP = positions.permutation_gap
_ATTENTION = sinks.attention
_DIRICHLET = DirichletMultinomial.posterior
_CONCEPTS = DiscreteLatent.posterior
_SINK = base.with_sink


def _no_count(self, tokens, mask=None, *, precision=None):
    """An average: the right mean, but the strength of one token."""
    average = tokens.mean(-2)
    return GaussianMean(average, self.strength + 1, self.variance, log_evidence=self.log_evidence)


def _order_counts(self, tokens, mask=None):
    posterior = _DIRICHLET(self, tokens, mask)
    log_evidence = posterior.log_evidence + 0.1 * tokens[..., 0]
    return DirichletMultinomial(posterior.concentration, log_evidence=log_evidence)


def _without_prior(value, strength, tokens, log_weight):
    return _SINK(value, 1e-300 * strength, tokens, log_weight)


def _in_bits(result):
    return result._replace(information=result.information / math.log(2))


def _weaker_sink(*inputs, sink=None, **options):
    if sink is not None:
        sink = sink - 0.7
    return _ATTENTION(*inputs, sink=sink, **options)


WRONG = {
    "Z1: a bound of half the size": ("Z1", exchangeability, "finite_extension_bound", lambda k, n: _BOUND(k, n) / 2),
    "Z1: with replacement on both sides": ("Z1", exchangeability, "urn_total_variation", lambda counts, k: 0.0),
    "Z1: a law that is not exchangeable": ("Z1", DirichletMultinomial, "posterior", _order_counts),
    "Z2: an average for the sum": ("Z2", GaussianMean, "posterior", _no_count),
    "Z2: information in bits": (
        "Z2",
        exchangeability,
        "sufficiency",
        lambda *inputs, **label: _in_bits(_SUFFICIENCY(*inputs, **label)),
    ),
    "Z3: no sink": ("Z3", conjugate, "with_sink", _without_prior),
    "Z3: a posterior that forgets the count": ("Z3", GaussianMean, "posterior", _no_count),
    "Z11: a predictor that is no average": (
        "Z11",
        DiscreteLatent,
        "posterior",
        lambda self, tokens: DiscreteLatent(
            _CONCEPTS(self, tokens).log_weight.roll(1, -1), self.log_likelihood, log_evidence=self.log_evidence
        ),
    ),
    "Z11: a best concept that loses more": (
        "Z11",
        posterior_claims,
        "averaging_regret",
        lambda *inputs: averaging_regret(*inputs)._replace(best=averaging_regret(*inputs).best + 1),
    ),
    "Z14: positions left in place": (
        "Z14",
        positions,
        "permutation_gap",
        lambda *inputs, positions=None, **more: _GAP(*inputs, positions=positions, **more)._replace(with_positions=0.1),
    ),
    "X4: a prior of half the strength": (
        "X4",
        sinks,
        "attention",
        _weaker_sink,
    ),
    "N9: no log-weights": (
        "N9",
        empirical_bayes,
        "_denoise",
        lambda noisy, context, variance: torch.softmax(noisy @ context.mT / variance, -1) @ context,
    ),
}
