"""Every operator keeps the laws of operators, against explicit sums over particles."""

import numpy as np
import pytest
import torch
from tests.population.cases import by_hand, draw, layer
from tests.support.suites import compiled, every_check, without_a_case
from torch import Tensor

from massieu.energy.activations import LayerNorm, RMSNorm, Tanh
from massieu.measures import Gaussian, Spin
from massieu.population import (
    AttentionLayer,
    Composition,
    DoublyStochasticLayer,
    FeedForward,
    Normalisation,
    Operator,
    PushForward,
    Renormalisation,
    ResampledLayer,
    TraceRenormalisation,
)
from massieu.testing import OperatorCase, operator_checks

CLOUDS = draw(3, 6, 3, seed=5)
SCORE = 0.5 * draw(3, 3)
WRITE = 0.5 * draw(3, 3, seed=2)
MEAN = draw(3)
COVARIANCE = torch.eye(3, dtype=torch.float64) + 0.2
GAIN = draw(3, seed=3).abs()
BIAS = draw(3, seed=4)
LAW_MEAN = 0.3 * draw(3, seed=1)
LAW = Gaussian.create(LAW_MEAN, 0.5 * torch.eye(3, dtype=torch.float64))
GENERATOR = torch.Generator()
VALUES = "it needs values: tensors on meta are refused"
DRAWS = "which numbers are drawn depends on the batch and the order"

attention = AttentionLayer.from_score(SCORE, WRITE)
many_heads = layer()


def _attention(x: Tensor) -> Tensor:
    """x_i + W softmax_j(x_i·B x_j/√d) x_j, with the scores (B x_i)·x_j that `from_score` stands for."""
    return x + (attention.scale * (x @ attention.query_weight[0].T) @ (x @ attention.key_weight[0].T).T).softmax(-1) @ (
        x @ (attention.output_weight[0] @ attention.value_weight[0]).T
    )


def _doubly_stochastic(x: Tensor) -> Tensor:
    plan = (x @ x.T).exp().numpy()
    for _ in range(2000):
        plan /= plan.sum(1, keepdims=True)
        plan /= plan.sum(0, keepdims=True)
    return torch.from_numpy(plan) @ x


def _renormalised(x: Tensor) -> np.ndarray:
    """By eigenvectors, in NumPy."""
    points = x.numpy()
    centred = points - points.mean(0)

    def root(matrix: np.ndarray, power: float) -> np.ndarray:
        values, vectors = np.linalg.eigh(matrix)
        return (vectors * values**power) @ vectors.T

    own = centred.T @ centred / len(points)
    return MEAN.numpy() + centred @ (root(COVARIANCE.numpy(), 0.5) @ root(own, -0.5)).T


def _layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return GAIN * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + BIAS


def _of_trace(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred * (2.0 / centred.square().sum(-1).mean()).sqrt()


CASES = {
    "attention": OperatorCase(attention, CLOUDS, _attention, LAW),
    "attention of many heads": OperatorCase(many_heads, draw(3, 6, 4, seed=5), lambda x: x + by_hand(many_heads, x, x)),
    "attention between normalisations": OperatorCase(
        AttentionLayer.from_score(SCORE, WRITE, normalisation=RMSNorm.create(1.0), activation=Tanh.create()), CLOUDS
    ),
    "attention to frozen atoms": OperatorCase(
        AttentionLayer.from_score(SCORE, WRITE, population=draw(5, 3, seed=8)), CLOUDS
    ),
    "attention to a frozen law": OperatorCase(
        AttentionLayer.from_score(SCORE, WRITE, population=LAW, residual=False), CLOUDS
    ),
    "normalisation": OperatorCase(Normalisation.create(LayerNorm.create(1.0), GAIN, BIAS), CLOUDS, _layer_norm),
    "feed-forward": OperatorCase(
        FeedForward.create(torch.tanh, step_size=0.5), CLOUDS, lambda x: x + 0.5 * torch.tanh(x)
    ),
    "composition": OperatorCase(
        Composition.create([attention, TraceRenormalisation.create(2.0)]),
        CLOUDS,
        lambda x: _of_trace(_attention(x)),
        LAW,
    ),
    "push-forward": OperatorCase(PushForward.create(LAW), CLOUDS, lambda x: LAW_MEAN + 0.5 * x, LAW),
    "push-forward to spins": OperatorCase(
        PushForward.create(Spin.create(LAW_MEAN)), CLOUDS, lambda x: (x + LAW_MEAN).tanh()
    ),
    "renormalisation": OperatorCase(Renormalisation.create(MEAN, COVARIANCE), CLOUDS, _renormalised, LAW),
    "trace": OperatorCase(TraceRenormalisation.create(2.0), CLOUDS, _of_trace, LAW),
    "doubly stochastic": OperatorCase(
        DoublyStochasticLayer.create(scale=1.0),
        CLOUDS,
        _doubly_stochastic,
        LAW,
        kept=lambda x: x.mean(-2),
        exempt={"meta": VALUES},
    ),
    "resampled with a background": OperatorCase(
        ResampledLayer.create(generator=GENERATOR, background=LAW),
        CLOUDS,
        prepare=lambda: GENERATOR.manual_seed(3),
        exempt={
            "meta": VALUES,
            "derivatives": "a draw has none in the covariance that it is of; those in the tokens are in test_background",
            "compiled": "a generator is no argument of a graph",
            "no query": "a cloud is a head, and drawing needs one",
            **dict.fromkeys(("permutation", "copies", "one by one", "vmap"), DRAWS),
        },
    ),
    "resampled": OperatorCase(
        ResampledLayer.create(generator=GENERATOR),
        CLOUDS,
        law=LAW,
        prepare=lambda: GENERATOR.manual_seed(3),
        exempt={
            "meta": VALUES,
            "compiled": "a generator is no argument of a graph",
            "no query": "a cloud is a head, and drawing needs one",
            **dict.fromkeys(("permutation", "copies", "one by one", "vmap"), DRAWS),
        },
    ),
}


@every_check(
    operator_checks,
    CASES,
    medium=("doubly stochastic", "attention: derivatives"),
    slow=["doubly stochastic: many particles"],
    representatives=("normalisation", "composition", "trace"),
)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", compiled(operator_checks, CASES))
def test_compiled_is_eager(check):
    check()


@pytest.mark.medium
def test_every_operator_has_a_case():
    assert not without_a_case(Operator, [case.operator for case in CASES.values()])
