"""Sequential Monte Carlo by attention's draws, beside exact filters: tokens are particles, one target for all of them."""

import math

import pytest
import torch
from torch import Tensor

from massieu import ops
from massieu.posteriors import HiddenMarkov

METHODS = ["multinomial", "systematic"]


def step(points: Tensor, log_weight: Tensor, method: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Particles (R, N, d) drawn by their weights (R, N), and log-mean-weights (R,): attention of queries without direction."""
    key, weight = points.unsqueeze(1), log_weight[:, None, None]
    query = torch.zeros_like(key)
    level = ops.log_partition(query[:, :, :1], key, log_weight=weight).flatten() - math.log(points.shape[1])
    drawn = ops.resample_attention(query, key, key, generator=generator, method=method, log_weight=weight)
    assert ((drawn.effective_size >= 1) & (drawn.effective_size <= points.shape[1] * (1 + 1e-9))).all()
    torch.testing.assert_close(drawn.offspring[:, 0], points.shape[1] * torch.softmax(log_weight, -1))
    return drawn.sample[:, 0, :, 0], level


def near(found: Tensor, wanted: Tensor | float) -> bool:
    """The mean over independent runs lies within five of its standard errors."""
    return bool(((found.mean(0) - wanted).abs() < 5 * found.std(0) / len(found) ** 0.5).all())


@pytest.mark.parametrize("method", METHODS)
def test_a_hidden_markov_chain_is_filtered(method):
    """The estimate of the evidence is unbiased; filtered probabilities are, times it."""
    runs, count, generator = 300, 32, torch.Generator().manual_seed(0)
    first, moves = torch.tensor([0.5, 0.3, 0.2]).double(), torch.rand(3, 3, generator=generator).double() + 0.1
    moves = moves / moves.sum(-1, keepdim=True)
    emits = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]).double()
    observed = torch.tensor([0, 1, 1, 0])
    exact = HiddenMarkov.create(first.log(), moves.log(), emits.log()).path(observed)
    state = torch.multinomial(first, runs * count, replacement=True, generator=generator).reshape(runs, count)
    log_evidence = torch.zeros(runs, dtype=torch.float64)
    for token in observed:
        points = torch.nn.functional.one_hot(state, 3).double()
        points, level = step(points, emits[state, token].log(), method, generator)
        log_evidence, filtered = log_evidence + level, points.mean(1)
        state = torch.multinomial(moves[points.argmax(-1).flatten()], 1, generator=generator).reshape(runs, count)
    ratio = (log_evidence - exact.log_predictive.sum()).exp()
    assert near(ratio, 1.0)
    assert near(ratio.unsqueeze(-1) * filtered, exact.filtered[-1].exp())


def test_a_linear_gaussian_chain_is_filtered():
    """Kalman's recursions written out for one dimension."""
    runs, count, generator = 200, 64, torch.Generator().manual_seed(1)
    memory, drift, blur = 0.8, 0.6, 0.7
    state = torch.randn(runs, count, 1, dtype=torch.float64, generator=generator)
    mean, variance, log_evidence = 0.0, 1.0, 0.0
    found = torch.zeros(runs, dtype=torch.float64)
    for seen in (0.5, -1.0, 0.3):
        spread = variance + blur**2
        log_evidence += -0.5 * (seen - mean) ** 2 / spread - 0.5 * math.log(2 * math.pi * spread)
        gain = variance / spread
        mean, variance = mean + gain * (seen - mean), (1 - gain) * variance
        weight = -0.5 * ((seen - state[..., 0]) / blur).square() - 0.5 * math.log(2 * math.pi * blur**2)
        state, level = step(state, weight, "systematic", generator)
        found, filtered, square = found + level, state.mean((1, 2)), state.square().mean((1, 2))
        ratio = (found - log_evidence).exp()
        assert near(ratio, 1.0)
        assert near(ratio * filtered, mean) and near(ratio * square, variance + mean**2)
        state = memory * state + drift * torch.randn(state.shape, dtype=torch.float64, generator=generator)
        mean, variance = memory * mean, memory**2 * variance + drift**2


@pytest.mark.parametrize("method", METHODS)
def test_offspring_are_unbiased_and_systematic_ones_nearly_certain(method):
    """E[offspring] = N·P; the variance is N·P(1 − P) of independent draws, f(1 − f) of the fraction f of N·P on a grid."""
    runs, count, generator = 3000, 10, torch.Generator().manual_seed(2)
    log_weight = torch.randn(count, dtype=torch.float64, generator=generator)
    points = torch.eye(count, dtype=torch.float64).expand(runs, -1, -1)
    drawn, _ = step(points, log_weight.expand(runs, -1), method, generator)
    offspring, expected = drawn.sum(1), count * torch.softmax(log_weight, -1)
    assert near(offspring, expected)
    fraction = expected - expected.floor()
    variance = expected * (1 - expected / count) if method == "multinomial" else fraction * (1 - fraction)
    assert near((offspring - expected).square(), variance)
    if method == "systematic":
        assert ((offspring - expected).abs() < 1).all()
