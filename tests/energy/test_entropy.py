"""The least entropy of bounded scores: a minimum found by SciPy, the vector that attains it, and heads that obey it (N11)."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.energy.cases import F64, constant, draw
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow

from massieu import nn, ops
from massieu.energy import least_entropy


def entropy(scores: np.ndarray) -> float:
    p = np.exp(scores - scores.max())
    p /= p.sum()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def spike(sigma: float, keys: int) -> np.ndarray:
    """The vector of the theorem."""
    scores = np.full(keys, -sigma / math.sqrt(keys * (keys - 1)))
    scores[0] = sigma * math.sqrt((keys - 1) / keys)
    return scores


@every_row("keys", [2, 3, 8, 100])
@every_row("sigma", [1e-3, 0.5, 3.0, 12.0])
def test_it_is_attained(keys, sigma):
    assert np.linalg.norm(spike(sigma, keys)) == pytest.approx(sigma, rel=1e-12)
    assert float(least_entropy(constant(sigma), keys)) == pytest.approx(
        entropy(spike(sigma, keys)), rel=1e-12, abs=1e-13
    )


@pytest.mark.medium
@some_slow(("keys", "sigma"), [(2, 1.0), (3, 0.3), (5, 6.0), (5, 2.0), (16, 2.0), (16, 5.0)], 3)
def test_no_search_finds_less(keys, sigma):
    bound, generator = float(least_entropy(constant(sigma), keys)), np.random.default_rng(0)

    def on_the_ball(x):
        return entropy(sigma * x / max(1.0, np.linalg.norm(x)))

    starts = [generator.normal(size=keys) for _ in range(3)] + [np.eye(keys)[0] + 0.1 * generator.normal(size=keys)]
    found = min(minimize(on_the_ball, start, tol=1e-12).fun for start in starts)
    assert bound - 1e-9 <= found <= bound + 1e-6


def test_numbers_of_the_theory():
    assert float(least_entropy(constant(2.0), 16)) == pytest.approx(2.418708, abs=5e-7)


def test_ends_of_the_range():
    sigmas = torch.tensor([0.0, 1.0, 50.0, 1e4], dtype=F64)
    found = least_entropy(sigmas, torch.tensor([[1], [64]]))
    assert (found[0] == 0).all()
    assert found[1, 0].item() == pytest.approx(math.log(64), rel=1e-14)
    assert (found[1].diff() < 0).all() and found[1, 3] == 0 and found.isfinite().all()
    # Small ones keep their digits.
    with mpmath.workdps(40):
        b = mpmath.exp(-50 * mpmath.sqrt(mpmath.mpf(64) / 63))
        exact = mpmath.log(1 + 63 * b) + 50 * mpmath.sqrt(64 * 63) * b / (1 + 63 * b)
    assert found[1, 2].item() == pytest.approx(float(exact), rel=1e-12)


def test_derivatives():
    sigma = torch.tensor([0.3, 2.0, 9.0], dtype=F64, requires_grad=True)
    function = lambda sigma: least_entropy(sigma, torch.tensor([5, 1, 64]))  # noqa: E731
    check_derivatives(function, [sigma])


def test_every_head_obeys_it_by_the_variance_of_its_scores():
    query, key = 3 * draw(2, 4, 10, 8), draw(2, 4, 20, 8, seed=1)
    keep = torch.arange(20) < torch.tensor([20, 13]).reshape(2, 1, 1, 1)
    found = ops.attention_moments(query, key, log_weight=keep)
    count = keep.sum(-1).expand(2, 4, 10)
    bound = least_entropy((count * found.prior_score_variance).sqrt(), count)
    assert (found.entropy >= bound - 1e-12).all()
    assert (bound > 0.05).any()


def test_a_layer_with_reparametrised_projections_cannot_collapse():
    """‖scores‖ ≤ scale·‖W_Q‖‖x‖·‖W_K‖√Σ‖x_n‖², known before training."""
    torch.manual_seed(0)
    query, key = (torch.nn.Linear(12, 8, bias=False).double() for _ in range(2))
    for layer in (query, key):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.SigmaReparametrization(0.7).double())
        layer.parametrizations.weight.original.data *= 1e3
    x = draw(1, 1, 9, 12)
    sigma = 8**-0.5 * 0.7**2 * x.norm(dim=-1) * x.square().sum((-2, -1), keepdim=True).squeeze(-1).sqrt()
    found = ops.attention_moments(query(x), key(x))
    assert (found.entropy >= least_entropy(sigma, 9)).all()


@every_row(
    ("call", "error", "message"),
    [
        (lambda: least_entropy(-1.0, 4), ValueError, "at least 0, got"),
        (lambda: least_entropy(math.inf, 4), ValueError, "finite"),
        (lambda: least_entropy(torch.ones(2), 0), ValueError, "keys must be at least 1"),
        (lambda: least_entropy(torch.ones(2), 2.0), TypeError, "whole number"),
        (lambda: least_entropy(torch.ones(2, dtype=torch.long), 2), TypeError, "got a tensor of torch.int64"),
        (lambda: least_entropy(torch.ones(2), torch.ones(3, dtype=torch.long)), ValueError, r"\(2,\) and keys \(3,\)"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
