"""Bounds of an evidence: a conjugate Gaussian with its log Z in closed form, quadrature, and Jensen's inequality."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.derivatives import check_derivatives
from torch import Tensor
from torch.distributions import Categorical, Normal

from massieu.inference import evidence_bounds

F64 = torch.float64
ERRORS = 5
"""Standard errors allowed: chance exceeds them once in two million numbers."""
DATA = torch.tensor([-1.0, 0.5, 2.0], dtype=F64)
NOISE = 0.5
"""x given z has this variance; z has the law N(0, 1)."""


def log_joint(latent: Tensor) -> Tensor:
    prior = -(latent**2) / 2 - math.log(2 * math.pi) / 2
    return prior - (DATA - latent) ** 2 / (2 * NOISE) - math.log(2 * math.pi * NOISE) / 2


EXACT = torch.tensor(stats.norm(0, math.sqrt(1 + NOISE)).logpdf(DATA.numpy()))
POSTERIOR = Normal(DATA / (1 + NOISE), math.sqrt(NOISE / (1 + NOISE)))
PROPOSAL = Normal(torch.tensor([-0.3, 0.2, 1.5], dtype=F64), torch.tensor(0.8, dtype=F64))


def draw(count: int, law: Normal = PROPOSAL) -> Tensor:
    noise = torch.randn(count, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    return law.loc + law.scale * noise


def test_the_posterior_as_proposal_gives_log_z_without_error():
    bounds = evidence_bounds(log_joint, POSTERIOR.log_prob, draw(12, POSTERIOR), samples=3)
    for value in (bounds.elbo, bounds.importance_bound, bounds.log_partition):
        torch.testing.assert_close(value, EXACT, rtol=1e-13, atol=1e-13)
    for error in (bounds.elbo_error, bounds.importance_error, bounds.log_partition_error):
        assert float(error.max()) < 1e-13
    torch.testing.assert_close(bounds.effective_sample_size, torch.full((3,), 12.0, dtype=F64))


def test_the_elbo_is_log_z_less_the_divergence():
    """KL(q ‖ posterior) of two Gaussians."""
    bounds = evidence_bounds(log_joint, PROPOSAL.log_prob, draw(20_000), samples=20)
    wanted = EXACT - torch.distributions.kl_divergence(PROPOSAL, POSTERIOR)
    assert bool(((bounds.elbo - wanted).abs() < ERRORS * bounds.elbo_error).all())
    # Var log w: log w is a quadratic a·ε² + b·ε + const in standard Gaussian ε, of variance 2a² + b².
    scale, precision = 0.8, 1 + 1 / NOISE
    quadratic = 0.5 - precision * scale**2 / 2
    linear = scale * (DATA / NOISE - precision * PROPOSAL.loc)
    error = ((2 * quadratic**2 + linear**2) / 20_000).sqrt()
    torch.testing.assert_close(bounds.elbo_error, error, rtol=0.05, atol=0)
    assert bool(((bounds.log_partition - EXACT).abs() < ERRORS * bounds.log_partition_error).all())
    assert bool((bounds.elbo < bounds.importance_bound).all())
    assert bool((bounds.importance_bound < EXACT + ERRORS * bounds.importance_error).all())


def test_the_bound_of_two_samples_is_that_of_quadrature():
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = torch.tensor(weights / weights.sum())
    latent = PROPOSAL.loc + PROPOSAL.scale * torch.tensor(nodes).unsqueeze(-1)
    log_weight = log_joint(latent) - PROPOSAL.log_prob(latent)  # (nodes, items)
    pairs = torch.logaddexp(log_weight[:, None], log_weight[None]) - math.log(2)
    wanted = torch.einsum("i,j,ijk->k", weights, weights, pairs)
    bounds = evidence_bounds(log_joint, PROPOSAL.log_prob, draw(20_000), samples=2)
    assert bool(((bounds.importance_bound - wanted).abs() < ERRORS * bounds.importance_error).all())
    assert float(bounds.importance_error.max()) < 0.02


def test_the_bound_rises_with_the_samples_on_the_same_draws():
    """By Jensen's inequality, for any draws: from the ELBO with one sample to log of the mean with all."""
    results = [evidence_bounds(log_joint, PROPOSAL.log_prob, draw(64), samples=2**k) for k in range(7)]
    values = torch.stack([result.importance_bound for result in results])
    assert bool((values.diff(dim=0) > 0).all())
    torch.testing.assert_close(values[0], results[0].elbo)
    torch.testing.assert_close(values[-1], results[0].log_partition)
    torch.testing.assert_close(results[0].importance_error, results[0].elbo_error)
    assert bool(results[-1].importance_error.isnan().all())


def test_a_discrete_latent_is_a_sum():
    """Each state drawn once under a uniform proposal: the mean of weights is the sum over states."""
    log_table = torch.tensor([0.3, -1.0, -torch.inf, 0.7], dtype=F64)
    proposal = Categorical(logits=torch.zeros(4, dtype=F64))
    states = torch.arange(4, dtype=F64)
    bounds = evidence_bounds(lambda z: log_table[z.long()], lambda z: proposal.log_prob(z.long()), states, samples=2)
    torch.testing.assert_close(bounds.log_partition, log_table.logsumexp(0))
    assert bounds.elbo == -math.inf
    assert bool(bounds.elbo_error.isnan())
    two = [torch.logsumexp(log_table[:2], 0), torch.logsumexp(log_table[2:], 0)]
    torch.testing.assert_close(bounds.importance_bound, (two[0] + two[1]) / 2 + math.log(2))


@pytest.mark.medium
def test_derivatives_in_the_proposal():
    noise = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))

    def function(loc: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        law = Normal(loc, log_scale.exp())
        bounds = evidence_bounds(log_joint, law.log_prob, loc + log_scale.exp() * noise, samples=3)
        return bounds.elbo, bounds.importance_bound, bounds.log_partition

    check_derivatives(function, (PROPOSAL.loc, torch.tensor([0.1, -0.2, 0.3], dtype=F64)))


def test_half_precision_and_huge_weights():
    latent = draw(8).half()
    assert evidence_bounds(lambda z: z, lambda z: 0 * z, latent).elbo.dtype == torch.float32
    bounds = evidence_bounds(lambda z: z + 1e6, lambda z: 0 * z, draw(8))
    assert bool(bounds.log_partition_error.isfinite().all())
    assert bool(bounds.log_partition.isfinite().all())


def test_errors_say_what_is_needed():
    latent = draw(6)
    with pytest.raises(ValueError, match="samples must divide the number of draws, a positive one, got 4 and 6"):
        evidence_bounds(log_joint, PROPOSAL.log_prob, latent, samples=4)
    with pytest.raises(ValueError, match="samples must divide the number of draws, a positive one, got 1 and 0"):
        evidence_bounds(log_joint, PROPOSAL.log_prob, latent[:0])
    with pytest.raises(ValueError, match="log_joint must return one number for each draw"):
        evidence_bounds(lambda z: log_joint(z).sum(), PROPOSAL.log_prob, latent)
    with pytest.raises(ValueError, match=r"log_proposal\(latent\)"):
        evidence_bounds(log_joint, lambda z: PROPOSAL.log_prob(z).sum(-1), latent)
    with pytest.raises(ValueError, match="which gives one of the draws the density 0"):
        evidence_bounds(log_joint, lambda z: torch.full_like(z, -torch.inf), latent)
    with pytest.raises(ValueError, match=r"log_joint\(latent\) must not be NaN"):
        evidence_bounds(lambda z: z * torch.nan, PROPOSAL.log_prob, latent)
    with pytest.raises(ValueError, match=r"log-densities must be below \+inf at every draw"):
        evidence_bounds(lambda z: z + torch.inf, PROPOSAL.log_prob, latent)
    with pytest.raises(TypeError, match="log_proposal must be a function"):
        evidence_bounds(log_joint, PROPOSAL, latent)  # pyright: ignore[reportArgumentType]
