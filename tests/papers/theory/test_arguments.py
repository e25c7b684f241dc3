"""Arguments that no ideal case can use are named."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.papers.theory import (
    GaussianTokens,
    attention_lipschitz,
    deconvolution,
    excess_risk_bound,
    harmonic_count,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    optimal_scale,
    smoothing_error,
    sphere_multipliers,
    transfer,
    urn_total_variation,
)

NAN, INF = math.nan, math.inf
ONE, TWO = torch.ones(1, dtype=torch.float64), torch.eye(2)


@every_row(
    ("call", "error", "named"),
    [
        (lambda: masked_mean(TWO, torch.full((2,), -INF), torch.zeros(2)), ValueError, "every latent excludes"),
        (
            lambda: masked_mean(["a"], torch.zeros(2), torch.zeros(2)),
            TypeError,
            "targets must be a floating-point tensor",
        ),
        (
            lambda: masked_mean(TWO, torch.tensor([NAN, 0]), torch.zeros(2)),
            ValueError,
            "log_likelihood must be finite or",
        ),
        (lambda: masked_gaussian_mean(TWO * NAN, torch.zeros(2), 1.0), ValueError, "observed must be finite, got nan"),
        (
            lambda: masked_gaussian_mean(TWO, torch.zeros(2), "a"),
            TypeError,
            "prior_weight must be a number or a floating-point tensor, got 'a'",
        ),
        (
            lambda: masked_token_probabilities(torch.tensor([INF, 1]), torch.ones(2)),
            ValueError,
            "counts must be finite",
        ),
        (lambda: transfer([["a"]], TWO), TypeError, "self_supervised must be a floating-point tensor"),
        (lambda: transfer(TWO, TWO, tolerance="a"), TypeError, "tolerance must be a number, got 'a'"),
        (lambda: excess_risk_bound("a", 1.0), TypeError, "condition_number must be a number, got 'a'"),
        (lambda: attention_lipschitz("a", 1.0), TypeError, "radius must be a number, got 'a'"),
        (lambda: harmonic_count(1.5, 3), TypeError, "degree must be a whole number, got 1.5"),
        (lambda: sphere_multipliers(1, 3.0, 1.0), TypeError, "dimension must be a whole number, got 3.0"),
        (
            lambda: sphere_multipliers(1, 3, "a"),
            TypeError,
            "scale must be a floating-point tensor, or numbers to make one of, got 'a'",
        ),
        (lambda: smoothing_error(-3, ONE, 0.1, 3, 1.0), ValueError, "keys must be finite and at least 1, got -3"),
        (lambda: optimal_scale(NAN, ONE, 0.1, 3), ValueError, "keys must be finite and at least 1, got nan"),
        (lambda: deconvolution(None, 0), TypeError, "multipliers must be a floating-point tensor"),
        (lambda: urn_total_variation([1.5, 2], 2), TypeError, "each of counts must be a whole number, got 1.5"),
        (lambda: GaussianTokens.create([0.0], ONE, ONE, ONE, ONE), TypeError, "key_mean must be a floating-point"),
        (lambda: GaussianTokens.create(ONE * NAN, ONE, *(ONE[None],) * 3), ValueError, "key_mean must be finite"),
        (
            lambda: GaussianTokens.create(*(torch.zeros(2),) * 2, TWO, 0 * TWO, TWO + torch.tensor([[0, 0.9], [0, 0]])),
            ValueError,
            "value_covariance must be symmetric",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, named):
    with pytest.raises(error, match=named):
        call()
