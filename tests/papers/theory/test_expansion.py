"""Expansion of tokens over held keys: against sums in NumPy and finite differences; which entropy rises."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch import Tensor

from massieu.measures import Atoms, DomainError, Gaussian, Laplace, Spin
from massieu.papers.theory import expansion

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_everything_in_numpy():
    keys, weights, x, step = draw(7, 3).numpy(), draw(7, seed=1).numpy(), draw(5, 3, seed=2).numpy(), 0.8
    result = expansion(Atoms.create(torch.from_numpy(keys), torch.from_numpy(weights)), torch.from_numpy(x), step)

    def level(points: np.ndarray) -> np.ndarray:
        return np.asarray(logsumexp(points @ keys.T + weights, axis=-1))

    p = softmax(x @ keys.T + weights, axis=-1)
    mean = p @ keys
    after = x + step * mean
    np.testing.assert_allclose(result.points, after, rtol=1e-13)
    np.testing.assert_allclose(result.gain, level(after) - level(x), rtol=1e-11)
    np.testing.assert_allclose(result.first_order, step * (mean**2).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(
        result.bregman, level(after) - level(x) - step * (mean**2).sum(-1), rtol=1e-9, atol=1e-12
    )
    covariance = np.einsum("nk,ki,kj->nij", p, keys, keys) - np.einsum("ni,nj->nij", mean, mean)
    gain = np.log(np.linalg.det(np.eye(3) + step * covariance))
    np.testing.assert_allclose(result.entropy_gain, gain, rtol=1e-11)
    slope = -np.einsum("ni,nij,nj->n", x, covariance, mean)
    np.testing.assert_allclose(result.attention_slope, slope, rtol=1e-11)

    def squares(points: np.ndarray) -> np.ndarray:
        return ((points[:, None] - points[None]) ** 2).sum(-1)

    np.testing.assert_allclose(result.margin, squares(after) - squares(x) - step**2 * squares(mean), atol=1e-12)


def test_trap_17_attention_sharpens_while_the_population_spreads():
    keys, state = Atoms.create(draw(8, 3)), 0.5 * draw(16, 3, seed=1)
    entropies, volumes = [], []
    for _ in range(5):
        p = softmax(state.numpy() @ keys.points.numpy().T, axis=-1)
        entropies.append(-(p * np.log(p)).sum(-1).mean())
        result = expansion(keys, state, 1.0)
        volumes.append(result.entropy_gain.mean().item())
        state = result.points
    assert np.diff(entropies).max() < 0
    assert min(volumes) > 0


def test_batches_derivatives_and_a_step_of_zero():
    keys, points = Atoms.create(draw(2, 6, 3)), draw(2, 4, 3, seed=1)
    whole = expansion(keys, points, 0.5)
    for index in range(2):
        alone = expansion(Atoms.create(keys.points[index]), points[index], 0.5)
        for result, expected in zip(whole, alone, strict=True):
            torch.testing.assert_close(result[index], expected)
    still = expansion(keys, points, 0.0)
    torch.testing.assert_close(still.points, points)
    assert still.gain.abs().max() == 0
    assert still.margin.abs().max() == 0

    def differentiable(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(expansion(Atoms.create(keys.points[0]), x, 0.5))

    assert torch.autograd.gradcheck(differentiable, points[0].clone().requires_grad_())


def test_half_precision_is_promoted():
    result = expansion(Spin.create(dim=3), draw(4, 3).bfloat16(), 0.5)
    assert {part.dtype for part in result} == {torch.float32}


def test_bad_calls():
    law = Gaussian.create(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="step must be finite and at least 0, got -1"):
        expansion(law, torch.zeros(2, 3), -1)
    with pytest.raises(ValueError, match=r"points must have shape \('n', 3\), got \(3,\)"):
        expansion(law, torch.zeros(3), 1.0)
    with pytest.raises(DomainError):  # two steps up a Laplace law leave where A is finite
        expansion(Laplace.create(torch.ones(1, dtype=F64)), torch.full((1, 1), 0.9, dtype=F64), 1.0)
