"""Layers as velocities: exponentials of matrices, SciPy's integrator, and the layers themselves."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from tests.population.cases import draw
from tests.support.derivatives import check_derivatives
from torch import Tensor

from massieu.population import AttentionLayer, FeedForward, integrate

CLOUD = draw(4, 3)
MATRICES = [0.4 * draw(3, 3, seed=seed) for seed in (1, 2)]


def linear(matrix: Tensor):
    return lambda x: x + x @ matrix.T


def test_one_euler_step_a_layer_is_the_network():
    layers = [FeedForward.create(torch.tanh), AttentionLayer.from_score(MATRICES[0], MATRICES[1]), torch.nn.Identity()]
    states = integrate(layers, CLOUD, [0, 1, 2, 3])
    state = CLOUD
    for place, layer in enumerate(layers):
        state = layer(state)
        torch.testing.assert_close(states[place + 1], state, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(states[0], CLOUD)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_errors_fall_with_the_order(order):
    """Halving the steps divides the error by 2^order, in the limit."""
    exact = CLOUD @ torch.tensor(expm(1.5 * MATRICES[0].numpy())).T
    counts = (16, 32)
    errors = [
        float((integrate(linear(MATRICES[0]), CLOUD, [0.0, 1.5], steps=steps, order=order)[-1] - exact).norm())
        for steps in counts
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


def test_each_layer_is_the_velocity_of_its_unit_of_time():
    first, second = (matrix.numpy() for matrix in MATRICES)
    layers = [linear(matrix) for matrix in MATRICES]
    states = integrate(layers, CLOUD, [0.5, 1.25, 2.0, 0.25], steps=40, order=4)
    at_5_quarters = expm(0.25 * second) @ expm(0.5 * first)
    at_end = expm(0.75 * second) @ at_5_quarters
    back = expm(-0.75 * first) @ expm(-second) @ at_end
    for state, matrix in zip(states, (np.eye(3), at_5_quarters, at_end, back), strict=True):
        np.testing.assert_allclose(state, CLOUD.numpy() @ matrix.T, rtol=1e-8, atol=1e-8)


def test_self_attention_is_that_of_another_integrator():
    layer = AttentionLayer.from_score(MATRICES[0], MATRICES[1])

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        x = flat.reshape(4, 3)
        scores = x @ MATRICES[0].numpy() @ x.T
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        return (weights @ x @ MATRICES[1].numpy().T).ravel()

    wanted = solve_ivp(velocity, (0, 2), CLOUD.numpy().ravel(), rtol=1e-10, atol=1e-12).y[:, -1].reshape(4, 3)
    np.testing.assert_allclose(integrate(layer, CLOUD, [0.0, 2.0], steps=32, order=4)[-1], wanted, rtol=1e-6, atol=1e-7)


def test_steps_are_as_many_as_asked_for():
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x

    for times, steps, wanted in (
        ([0, 0.07], 100, 7),
        ([0, 0.31], 10, 4),
        ([0, 0.01], 1, 1),
        ([2, 2], 5, 0),
        ([0, 2], 1, 2),
    ):
        calls.clear()
        integrate(counted, CLOUD, times, steps=steps)
        assert len(calls) == wanted


@pytest.mark.medium
def test_derivatives():
    def function(cloud: Tensor, matrix: Tensor) -> Tensor:
        return integrate(lambda x: x + torch.tanh(x @ matrix.T), cloud, [0.0, 0.5, 2.0], order=4)

    check_derivatives(function, (CLOUD, MATRICES[0]))


def test_batches_types_and_errors():
    assert integrate(torch.tanh, draw(2, 4, 3), [0, 1]).shape == (2, 2, 4, 3)
    wide = integrate(FeedForward.create(torch.relu), CLOUD.half(), [0, 1])
    assert wide.dtype == torch.float32
    for call, error, message in (
        (lambda: integrate([], CLOUD, [0]), ValueError, "layers must be one or more, got none"),
        (lambda: integrate([torch.tanh, 3], CLOUD, [0]), TypeError, "each of layers must be callable, got "),
        (
            lambda: integrate([torch.tanh] * 2, CLOUD, [0, 3]),
            ValueError,
            "between 0 and 2, the number of layers, got 3",
        ),
        (lambda: integrate(torch.tanh, CLOUD, []), ValueError, "at least one time"),
        (lambda: integrate(torch.tanh, CLOUD, [0, math.inf]), ValueError, "finite"),
        (lambda: integrate(torch.tanh, CLOUD, [0, 1], order=3), ValueError, "order must be 1, 2 or 4, got 3"),
        (lambda: integrate(torch.tanh, CLOUD, [0, 1], steps=0), ValueError, "steps must be"),
        (lambda: integrate(lambda x: x[:1], CLOUD, [0, 1]), ValueError, "must keep the shape"),
        (lambda: integrate(lambda x: None, CLOUD, [0, 1]), TypeError, "must return a tensor"),
        (lambda: integrate(torch.tanh, CLOUD.long(), [0, 1]), TypeError, "particles must be a floating-point tensor"),
    ):
        with pytest.raises(error, match=message):
            call()
