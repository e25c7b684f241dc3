"""Alignment of the score matrix with a power of a covariance: planted matrices, cosines by hand, the null's distribution."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from tests.support.rows import every_row
from torch import Tensor

from massieu.papers.theory import equilibrium, key_law
from massieu.population import precision_alignment

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def covariance(width: int, seed: int = 0) -> Tensor:
    vectors, _ = torch.linalg.qr(draw(width, width, seed=seed))
    return (vectors * torch.linspace(-1, 1, width, dtype=F64).exp()) @ vectors.T


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_cosine_by_hand():
    target = covariance(5)
    score = draw(5, 5, seed=1)
    even = 0.5 * (score + score.T).numpy()
    inverse = np.linalg.inv(target.numpy())
    result = precision_alignment(score, target, draws=3, generator=generator())
    assert result.cosine == pytest.approx(
        (even * inverse).sum() / np.linalg.norm(even) / np.linalg.norm(inverse), rel=1e-12
    )
    assert result.rank == 5
    assert result.symmetric_share == pytest.approx(np.linalg.norm(even) / np.linalg.norm(score.numpy()), rel=1e-12)
    assert result.null.shape == (3,)


@every_row("power", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_the_planted_power_is_found(power: float):
    target = covariance(6)
    values, vectors = np.linalg.eigh(target.numpy())
    score = torch.from_numpy((vectors * values**power) @ vectors.T)
    cosines = {p: precision_alignment(score, target, power=p, draws=1).cosine for p in (-1.0, -0.5, 0.0, 0.5, 1.0)}
    assert cosines[power] == pytest.approx(1, abs=1e-12)
    assert max(value for other, value in cosines.items() if other != power) < 0.99


def test_trap_18_a_head_is_compared_on_its_own_span():
    target = covariance(12)
    frame, _ = torch.linalg.qr(draw(12, 3, seed=2))
    head = frame @ (frame.T @ torch.linalg.inv(target) @ frame) @ frame.T
    result = precision_alignment(head, target, draws=200, generator=generator())
    assert result.rank == 3
    assert result.cosine == pytest.approx(1, abs=1e-10)
    assert result.share == pytest.approx(1 / 201)
    inverse = torch.linalg.inv(target)
    assert (head * inverse).sum() / head.norm() / inverse.norm() < 0.9  # what comparing on the whole space would say


def test_trap_18_which_covariance_it_is():
    """Natural parameters at the equilibrium: M fits the keys' covariance, the inverse of the input's, and not the input's."""
    sigma = covariance(6)
    hidden = equilibrium(torch.zeros(6, dtype=F64), sigma)
    keys = key_law(hidden, sigma)
    assert precision_alignment(sigma, keys.covariance, power=1, draws=1).cosine == pytest.approx(1, abs=1e-12)
    assert precision_alignment(sigma, hidden.covariance, draws=1).cosine == pytest.approx(1, abs=1e-12)
    assert precision_alignment(sigma, keys.covariance, draws=1).cosine < 0.7
    assert precision_alignment(sigma, hidden.covariance, power=1, draws=1).cosine < 0.7


def test_a_wrong_sign_is_no_fit():
    target = covariance(4)
    assert precision_alignment(-torch.linalg.inv(target), target, draws=1).cosine == pytest.approx(-1, abs=1e-12)


def test_heads_that_know_nothing_have_uniform_p_values():
    target = covariance(6)
    source = generator(3)
    shares = [
        precision_alignment(
            draw(2, 6, seed=seed).T @ draw(2, 6, seed=seed + 1000), target, draws=199, generator=source
        ).share
        for seed in range(200)
    ]
    assert kstest(shares, "uniform").pvalue > 1e-4


def test_bad_calls():
    eye = torch.eye(3, dtype=F64)
    with pytest.raises(ValueError, match=r"one shape \(d, d\), got \(3, 3\) and \(2, 2\)"):
        precision_alignment(eye, torch.eye(2))
    with pytest.raises(ValueError, match="draws must be a whole number, at least 1"):
        precision_alignment(eye, eye, draws=0)
    with pytest.raises(ValueError, match="covariance must be symmetric"):
        precision_alignment(eye, torch.triu(torch.ones(3, 3)))
    with pytest.raises(ValueError, match="positive definite covariance for the power -1"):
        precision_alignment(eye, torch.diag(torch.tensor([1.0, 1.0, 0.0])))
    with pytest.raises(ValueError, match="symmetric part is not zero"):
        precision_alignment(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.eye(2))


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_cosines_know_no_scale(size):
    generator = torch.Generator().manual_seed(3)
    mixing, score = (torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    covariance = mixing @ mixing.T + torch.eye(5, dtype=torch.float64)
    even = 0.5 * (score + score.T)
    precision = torch.linalg.inv(covariance)
    expected = (even * precision).sum() / (even.norm() * precision.norm())
    for result in (precision_alignment(size * score, covariance), precision_alignment(score, size * covariance)):
        assert result.cosine == pytest.approx(expected.item(), abs=1e-12)
        assert result.symmetric_share == pytest.approx((even.norm() / score.norm()).item(), abs=1e-12)
