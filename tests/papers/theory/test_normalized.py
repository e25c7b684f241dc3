"""Attention by normalised scores against NumPy, differences and principal component analysis."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch.func import grad, vmap

from massieu.energy import HopfieldEnergy
from massieu.papers.theory.normalized import ScoreDeviation


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_numpy(points, eta, g, b):
    """The layer as published: Σ (g(z_n − z̄)/σ + b) x_n, and its potential gNσ + bN z̄."""
    z = points.numpy() @ eta.numpy()
    deviation = z.std()
    weights = g * (z - z.mean()) / deviation + b
    return weights @ points.numpy(), len(z) * (g * deviation + b * z.mean())


@every_row(("g", "b"), [(0.7, 0.2), (0.1, 0.0), (1.0, -0.3)])
def test_the_published_layer_is_the_gradient_of_the_deviation(g, b):
    points, eta = draw(9, 4, seed=1), draw(5, 4, seed=2)
    potential = ScoreDeviation.create(points, gain=9 * g, bias=9 * b)
    slope = grad(lambda e: potential.log_partition(e).sum())(eta)
    assert torch.allclose(potential.mean(eta), slope, atol=1e-13)
    assert torch.allclose(potential.weights(eta).sum(-1), torch.tensor(9 * b, dtype=torch.float64), atol=1e-13)
    for row in range(5):
        mean, value = by_numpy(points, eta[row], g, b)
        assert potential.mean(eta)[row].numpy() == pytest.approx(mean, abs=1e-12)
        assert potential.log_partition(eta)[row].item() == pytest.approx(value, abs=1e-12)


def test_a_multiplicity_is_a_repeated_point_and_a_mask_a_missing_one():
    points, eta = draw(4, 3, seed=3), draw(6, 3, seed=4)
    log_weight = torch.tensor([2.0, 1.0, 0.0, 3.0], dtype=torch.float64).log()
    result = ScoreDeviation.create(points, bias=0.5, log_weight=log_weight)
    spread = ScoreDeviation.create(points[[0, 0, 1, 3, 3, 3]], bias=0.5)
    assert torch.allclose(result.mean(eta), spread.mean(eta), atol=1e-14)
    assert torch.allclose(result.log_partition(eta), spread.log_partition(eta), atol=1e-14)
    nothing = ScoreDeviation.create(points, log_weight=torch.zeros(4, dtype=torch.bool))
    assert (nothing.mean(eta) == 0).all() and (nothing.log_partition(eta) == -torch.inf).all()


@pytest.mark.medium
def test_second_derivatives():
    points, eta = draw(2, 5, 3, seed=5), draw(2, 2, 3, seed=6)
    gain, bias = (torch.tensor([0.8, 1.3], dtype=torch.float64) for _ in range(2))

    def value(points, eta, gain, bias, eps):
        return ScoreDeviation.create(points, gain=gain, bias=bias, eps=eps).log_partition(eta)

    for eps in (0.0, 0.1):
        check_derivatives(partial(value, eps=eps), (points, eta, gain, bias))
    zero = torch.zeros(2, 1, 3, dtype=torch.float64)
    check_derivatives(lambda eta: value(points, eta, 1.0, 0.0, 0.1), [zero])


@pytest.mark.parametrize("eta", [[0.0, 0.0], [0.0, 0.7]])
def test_equal_scores_have_the_slope_of_the_bias(eta):
    # The second coordinate is one constant, so its scores are equal.
    points = torch.tensor([[1.0, 0.3], [-2.0, 0.3], [0.4, 0.3]], dtype=torch.float64)
    state = torch.tensor(eta, dtype=torch.float64, requires_grad=True)
    potential = ScoreDeviation.create(points, bias=2.0)
    expected = 2 * points.mean(0)
    assert torch.allclose(potential.mean(state), expected, atol=1e-14)
    (slope,) = torch.autograd.grad(potential.log_partition(state), state)
    assert torch.allclose(slope, expected, atol=1e-14)


def test_a_hopfield_network_of_it_is_power_iteration():
    points, state = draw(40, 4, seed=7) * torch.tensor([3.0, 1.5, 1.0, 0.5]), draw(6, 4, seed=8)
    memory = ScoreDeviation.create(points, gain=1.5)
    covariance = np.cov(points.numpy().T, bias=True)
    values, vectors = np.linalg.eigh(covariance)
    result, axes = memory.principal_axes()
    assert result.numpy() == pytest.approx(values[::-1], rel=1e-12)
    assert axes.norm(dim=-1).numpy() == pytest.approx(1.5 * np.sqrt(values[::-1]), rel=1e-12)
    assert torch.allclose(memory.mean(axes), axes, atol=1e-12)
    hopfield = HopfieldEnergy.create(memory)
    path = hopfield.descend(state, steps=60)
    assert (path.energies.diff(dim=0) <= 1e-13).all()
    assert torch.allclose(path.states[-1].abs(), axes[:1].abs().expand(6, 4), atol=1e-8)
    least = hopfield.constant - 0.5 * 1.5**2 * values[-1]
    assert torch.allclose(path.energies[-1], least.expand(6), atol=1e-12)
    assert abs(vectors[:, -1] @ path.states[-1, 0].numpy()) == pytest.approx(1.5 * values[-1] ** 0.5, abs=1e-8)


def test_transforms_and_half_precision():
    points, eta = draw(3, 6, 4, seed=9), draw(3, 5, 4, seed=10)

    def mean(points, eta):
        return ScoreDeviation.create(points, bias=1.0).mean(eta)

    assert torch.allclose(vmap(mean)(points, eta), mean(points, eta), atol=1e-14)
    assert mean(points.bfloat16(), eta.bfloat16()).dtype == torch.float32


@pytest.mark.slow
def test_compiled():
    points, eta = draw(3, 6, 4, seed=9), draw(3, 5, 4, seed=10)

    def mean(points, eta):
        return ScoreDeviation.create(points, bias=1.0).mean(eta)

    torch._dynamo.reset()
    assert torch.allclose(torch.compile(mean, fullgraph=True, backend="aot_eager")(points, eta), mean(points, eta))


@every_row(
    ("keywords", "error", "message"),
    [
        ({"gain": 0.0}, ValueError, "gain must be positive"),
        ({"bias": float("nan")}, ValueError, "bias must be finite, got"),
        ({"eps": -1.0}, ValueError, "at least 0, got -1.0"),
        ({"gain": torch.ones(3)}, ValueError, r"gain of shape \(3,\) does not broadcast to the batch \(2,\)"),
        ({"log_weight": torch.zeros(3)}, ValueError, r"log_weight must have shape \(2, 3\)"),
    ],
)
def test_bad_input_is_one_clear_sentence(keywords, error, message):
    with pytest.raises(error, match=message):
        ScoreDeviation.create(torch.zeros(2, 3, 2), **keywords)
