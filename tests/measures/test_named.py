"""Boosting, and the KL kernel, against the recursions and sums written out (S17, X8)."""

import math

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import (
    Bernoulli,
    Categorical,
    Gaussian,
    Poisson,
    Spin,
    boosting,
    divergence_kernel,
    hybrid,
    switched,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signs(*shape: int, seed: int = 0) -> Tensor:
    return torch.where(draw(*shape, seed=seed) > 0, 1.0, -1.0).double()


def test_boosting_is_the_exponential_loss():
    labels = signs(20)
    logits = draw(20, seed=1)
    learners = draw(20, 3, seed=2)
    alpha = draw(3, seed=3)
    measure = boosting(labels, logits, learners)
    loss = torch.exp(-labels * (logits + learners @ alpha))
    torch.testing.assert_close(measure.log_partition(alpha), loss.sum().log())
    weights = loss / loss.sum()
    edges = (weights * labels) @ learners
    torch.testing.assert_close(measure.mean(alpha), -edges)


def test_adaboost_is_tilting():
    """Three rounds of AdaBoost by its textbook recursion: its weights are the tilted measures', its loss their Z."""
    labels = signs(30)
    stumps = signs(30, 3, seed=4)
    measure = boosting(labels, torch.zeros(30).double(), stumps)
    weights = torch.full((30,), 1 / 30, dtype=torch.float64)
    log_loss = math.log(30)
    for round_ in range(3):
        wrong = stumps[:, round_] != labels
        error = weights[wrong].sum()
        coefficient = 0.5 * ((1 - error) / error).log()
        alpha = torch.zeros(3).double()
        alpha[round_] = coefficient
        log_loss += float(measure.tilt(torch.zeros(3).double()).log_partition(alpha))
        measure = measure.tilt(alpha)
        weights = weights * torch.exp(-coefficient * labels * stumps[:, round_])
        ratio = weights.sum()
        torch.testing.assert_close(ratio, 2 * (error * (1 - error)).sqrt(), atol=1e-14, rtol=0)
        weights = weights / ratio
        torch.testing.assert_close(measure.log_weight.exp(), weights, atol=1e-14, rtol=0)
        # The learner just used has no edge under the new weights.
        assert abs(float(measure.mean(torch.zeros(3).double())[round_])) < 1e-15


@every_row(
    "measure",
    [
        Spin.create(draw(3)),
        Bernoulli.create(torch.sigmoid(draw(3))),
        Poisson.create(draw(3).exp()),
        Categorical.create(torch.softmax(draw(3), -1)),
        Gaussian.create(draw(3), draw(3, 3, seed=1) @ draw(3, 3, seed=1).mT),
    ],
    ids=lambda measure: type(measure).__name__,
)
def test_attention_over_the_kernel_weighs_by_divergence(measure):
    keys = draw(6, 3, seed=2)
    queries = draw(4, 3, seed=3)
    values = draw(6, 2, seed=4)
    pairs = keys.expand(4, 6, 3), queries.unsqueeze(1).expand(4, 6, 3)
    weights = torch.softmax(-measure.kl(*pairs), -1)
    result = divergence_kernel(measure, keys).expectation(queries, values)
    torch.testing.assert_close(result, weights @ values, atol=1e-12, rtol=0)


def test_the_gaussian_kernel_is_mahalanobis_distance():
    root = draw(3, 3)
    covariance = root @ root.mT
    keys = draw(6, 3, seed=2)
    queries = draw(4, 3, seed=3)
    values = draw(6, 2, seed=4)
    difference = queries.unsqueeze(1) - keys
    distance = 0.5 * torch.einsum("qni,ij,qnj->qn", difference, covariance, difference)
    result = divergence_kernel(Gaussian.create(draw(3, seed=5), covariance), keys).expectation(queries, values)
    torch.testing.assert_close(result, torch.softmax(-distance, -1) @ values, atol=1e-12, rtol=0)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"got \(3,\), \(3,\) and \(4, 2\)"):
        boosting(torch.ones(3), torch.zeros(3), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"labels must be \+1 or −1"):
        boosting(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"eta of shape \('N', 3\)|\(.N., 3\), got \(3,\)"):
        divergence_kernel(Spin.create(dim=3), torch.zeros(3))
    atoms = boosting(torch.ones(3), torch.zeros(3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="concentration must be positive and finite, got -1"):
        hybrid(atoms, Gaussian.create(torch.zeros(2), torch.tensor(1.0)), -1)


def test_switched_copies_are_where_the_measure_is():
    law = switched(Bernoulli.create([0.3, 0.8]).to("meta"), 2)
    assert {tensor.device.type for tensor in law._tensors()} == {"meta"}
