"""Edges: long counts in float32, and what has no answer."""

import math

import pytest
import scipy.stats
import torch
from tests.support.rows import every_row

from massieu.measures import Bernoulli
from massieu.posteriors import (
    BayesianLinearRegression,
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
    NoisyLinearRegression,
)

NAN, INF = math.nan, math.inf


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_counts_beside_a_strong_prior_in_float32():
    """1e8 + 1 is 1e8 in float32: tokens are counted first; the evidence is no difference of float32 numbers of 1e9."""
    prior = DirichletMultinomial.create(torch.tensor([1e8, 1e8]))
    law = prior.posterior(torch.zeros(1000, dtype=torch.long))
    assert (law.concentration - prior.concentration).tolist() == [1000.0, 0.0]
    exact = scipy.stats.dirichlet_multinomial([1e8, 1e8], 1000).logpmf([1000, 0])
    # scipy's own lgamma differences have 1e9·1e-16·a few.
    assert law.log_evidence.item() == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("strength", [10.0, 1e6])
def test_evidence_is_the_sum_of_predictives_in_float32(strength):
    categories = DirichletMultinomial.create(torch.tensor([0.3, 0.7]) * strength)
    one = categories.posterior(torch.tensor([1])).log_evidence
    assert one.item() == pytest.approx(math.log(0.7), rel=1e-6)
    coin = ExponentialFamily.create(
        Bernoulli.create(torch.tensor([0.5])), torch.tensor([0.7 * strength]), torch.tensor(strength)
    )
    seen = torch.ones(1, 1)
    assert coin.posterior(seen).log_evidence.item() == pytest.approx(math.log(0.7), rel=1e-5)
    assert coin.log_predictive(seen[0]).item() == pytest.approx(math.log(0.7), rel=1e-5)
    assert coin.posterior(seen).log_evidence.dtype == coin.posterior(seen).chi.dtype == torch.float32


@every_row("seed", range(4))
def test_prediction_with_unknown_noise_is_students(seed):
    """By SciPy's multivariate t: mean and covariance."""
    root = draws(3, 3, seed=seed)
    prior = NoisyLinearRegression.create(
        draws(3, 2, seed=seed + 9), root @ root.T + torch.eye(3), torch.tensor(1.7).double(), torch.tensor(0.8).double()
    )
    law, features = prior.posterior(draws(5, 5, seed=seed + 20)), draws(4, 3, seed=seed + 30)
    found = law.predict(features)
    for row, mean, variance in zip(features, found.mean, found.variance, strict=True):
        leverage = (row @ torch.linalg.inv(law.precision) @ row).item()
        student = scipy.stats.t(2 * law.shape.item(), scale=math.sqrt(law.rate / law.shape * (1 + leverage)))
        assert variance.item() == pytest.approx(student.var(), rel=1e-9)
        torch.testing.assert_close(mean, row @ law.mean)
    heavy = NoisyLinearRegression.create(prior.mean, prior.precision, prior.shape * 0 + 1, prior.rate)
    assert bool(heavy.predict(features).variance.isinf().all())


SURE = torch.tensor([[0.0, -INF], [0.0, -INF]])
"""Two concepts that never emit token 1."""


def test_tokens_that_no_concept_emits():
    law = DiscreteLatent.create(torch.zeros(2), SURE)
    for read in (law.posterior, law.as_attention):
        with pytest.raises(ValueError, match="every concept rules out"):
            read(torch.tensor([0, 1]))
    assert law.log_predictive(torch.tensor(1)).item() == -INF
    assert law.as_attention(torch.tensor([0])).attend().output.tolist() == [0.5, 0.5]


def test_values_of_concepts_keep_their_precision():
    values = draws(2, 3)
    found = (
        DiscreteLatent.create(torch.zeros(2), torch.zeros(2, 2)).as_attention(torch.tensor([0]), values=values).attend()
    )
    assert found.output.dtype == torch.float64
    torch.testing.assert_close(found.output, values.mean(0), rtol=0, atol=1e-15)


def _nothing(tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([tokens * NAN, tokens], -1)


MEAN = GaussianMean.create(torch.zeros(2), torch.tensor(1.0), torch.tensor(1.0))
LINE = BayesianLinearRegression.create(torch.zeros(2, 1), torch.eye(2), torch.tensor(1.0))
COIN = ExponentialFamily.create(Bernoulli.create(torch.tensor([0.5])), torch.tensor([0.5]), torch.tensor(1.0))


@every_row(
    ("call", "error", "named"),
    [
        (lambda: MEAN.posterior(torch.tensor([[NAN, 0.0]])), ValueError, "tokens must be finite, got nan"),
        (lambda: MEAN.as_attention(torch.tensor([[INF, 0.0]])), ValueError, "tokens must be finite, got inf"),
        (lambda: MEAN.log_predictive(torch.tensor([NAN, 0.0])), ValueError, "token must be finite, got nan"),
        (
            lambda: MEAN.posterior(torch.zeros(1, 2), torch.ones(1, dtype=torch.bool), precision=2.0),
            TypeError,
            "precision must be a floating-point tensor, got 2.0",
        ),
        (lambda: LINE.posterior(torch.full((2, 3), NAN)), ValueError, "tokens must be finite, got nan"),
        (
            # Two equal features of 1e4 beside a prior precision of 1e-6: rounding in float32.
            lambda: BayesianLinearRegression.create(
                torch.zeros(2, 1), 1e-6 * torch.eye(2), torch.tensor(1.0)
            ).posterior(1e4 * torch.linspace(1.1, 1.9, 7).unsqueeze(-1).expand(7, 3)),
            ValueError,
            "the precision is singular to rounding in torch.float32",
        ),
        (lambda: LINE.predict(torch.full((2,), NAN)), ValueError, "features must be finite, got nan"),
        (lambda: LINE.log_predictive(torch.tensor([0.0, 0.0, NAN])), ValueError, "token must be finite, got nan"),
        (lambda: COIN.as_attention(torch.tensor([[7.0]])), ValueError, r"support of Bernoulli, got \(7\)"),
        (lambda: DiscreteLatent.create(torch.zeros(2), _nothing).posterior(torch.zeros(3)), ValueError, "NaN or .inf"),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), _nothing).log_predictive(torch.zeros(3)),
            ValueError,
            "NaN or .inf",
        ),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), _nothing).posterior([1.0]),
            TypeError,
            "tokens must be a tensor",
        ),
        (
            lambda: HiddenMarkov.create(torch.zeros(2), torch.zeros(2, 2), _nothing).path(torch.zeros(3)),
            ValueError,
            "log_likelihood must be finite or -inf, got NaN",
        ),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), SURE).as_attention(torch.tensor([0]), values=[[1.0], [2.0]]),
            TypeError,
            "values must be a floating-point tensor, got list",
        ),
    ],
)
def test_posteriors_refuse(call, error, named):
    with pytest.raises(error, match=named):
        call()
