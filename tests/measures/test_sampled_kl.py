"""KL between laws of two families, from draws, against closed forms and sums."""

import math

import pytest
import torch

from massieu import measures
from massieu.measures import Bernoulli, Gaussian, Laplace, Poisson, sampled_kl

ZERO = torch.zeros(1, dtype=torch.float64)


def generator():
    return torch.Generator().manual_seed(0)


def test_a_normal_and_a_laplace_law():
    """E log φ + log 2 + E|x| = −½ log 2π − ½ + log 2 + √(2/π)."""
    normal, laplace = Gaussian.create(ZERO, 1.0), Laplace.create(torch.ones(1, dtype=torch.float64))
    found = sampled_kl(normal, ZERO, laplace, ZERO, draws=20_000, generator=generator())
    exact = -0.5 * math.log(2 * math.pi) - 0.5 + math.log(2) + math.sqrt(2 / math.pi)
    # Five standard errors: one run in two million is off by more.
    assert abs(found.value.item() - exact) < 5 * found.standard_error.item()
    assert 0 < found.standard_error.item() < 0.01


def test_a_bernoulli_and_a_poisson_law():
    """Σ_k p_k log(p_k/q_k) over both values."""
    coin, counts = Bernoulli.create(torch.tensor([0.3], dtype=torch.float64)), Poisson.create(torch.ones(1).double())
    found = sampled_kl(coin, ZERO, counts, ZERO, generator=generator(), draws=20_000)
    p = [0.7, 0.3]
    exact = sum(p[k] * (math.log(p[k]) + 1.0 + math.lgamma(k + 1)) for k in range(2))
    assert abs(found.value.item() - exact) < 5 * found.standard_error.item()
    back = sampled_kl(counts, ZERO, coin, ZERO, generator=generator())
    assert back.value.item() == math.inf and back.standard_error.isnan()


def test_what_is_refused():
    normal, coin = Gaussian.create(ZERO, 1.0), Bernoulli.create(torch.tensor([0.3]))
    with pytest.raises(ValueError, match="infinite: p has a density, and q is discrete"):
        sampled_kl(normal, ZERO, coin, ZERO)
    with pytest.raises(ValueError, match="draws must be at least 2"):
        sampled_kl(normal, ZERO, normal, ZERO, draws=1)
    with pytest.raises(TypeError, match=r"got the measure Bernoulli for eta_q; .* measures\.sampled_kl"):
        normal.kl(ZERO, coin)
    with pytest.raises(TypeError, match=r"got the measure Bernoulli for eta_p; .* measures\.sampled_kl"):
        normal.kl(coin)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        TypeError, match=r"eta_p must be .*, got the measure Bernoulli: sampled_kl\(p, eta_p, q, eta_q\)"
    ):
        sampled_kl(normal, coin)  # pyright: ignore[reportCallIssue]
    assert "sampled_kl" in measures.__all__
