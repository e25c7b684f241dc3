"""Metropolis-corrected Langevin dynamics against quadrature and against its own transition densities."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from tests.support.rows import every_row

from massieu.inference import langevin_init, langevin_noise, langevin_step
from massieu.inference.langevin import LangevinNoiseResult


def double_well(position):
    """In one dimension, not symmetric; nothing of it is Gaussian."""
    x = position[:, 0]
    return -(x.square() - 1).square() + 0.3 * x


def test_moments_of_a_double_well():
    generator = torch.Generator().manual_seed(0)
    chains = 4000
    state = langevin_init(2 * torch.rand(chains, 1, generator=generator, dtype=torch.float64) - 1, double_well)
    for _ in range(300):
        state = langevin_step(state, langevin_noise(state, generator), double_well, step_size=0.5).state
    density = lambda x: math.exp(-((x * x - 1) ** 2) + 0.3 * x)  # noqa: E731
    total = quad(density, -5, 5)[0]
    for order in (1, 2, 3, 4):
        wanted = quad(lambda x: x**order * density(x), -5, 5)[0] / total  # noqa: B023
        powers = state.position[:, 0] ** order
        assert abs(powers.mean() - wanted) < 5 * powers.std() / math.sqrt(chains), order


def test_detailed_balance():
    """p(x) q(x → y) a(x → y) = p(y) q(y → x) a(y → x), with the proposal's density written out."""
    step_size = 0.6
    x, y = 3 * torch.rand(2, 50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1.5

    def log_flow(here, there):
        state = langevin_init(here, double_well)
        slope = -4 * here * (here.square() - 1) + 0.3
        normal = (there - here - 0.5 * step_size**2 * slope) / step_size
        noise = LangevinNoiseResult(normal, torch.ones(50, dtype=torch.float64))
        acceptance = langevin_step(state, noise, double_well, step_size=step_size).acceptance
        proposal = -0.5 * normal.square()[:, 0]
        return state.log_density + proposal + acceptance.log()

    assert torch.allclose(log_flow(x, y), log_flow(y, x), atol=1e-10)


def test_a_refused_proposal_changes_nothing():
    state = langevin_init(torch.zeros(2, 1, dtype=torch.float64), double_well)
    noise = LangevinNoiseResult(torch.tensor([[50.0], [0.1]]).double(), torch.full((2,), 0.5).double())
    found = langevin_step(state, noise, double_well, step_size=1.0)
    assert found.accepted.tolist() == [False, True]
    assert all(torch.equal(new[0], old[0]) for new, old in zip(found.state, state, strict=True))
    assert torch.equal(found.state.log_density, double_well(found.state.position))


def test_what_is_not_finite_is_refused():
    def log_gamma(position):
        return torch.where(position[:, 0] > 0, position[:, 0].log() - position[:, 0], math.nan)

    state = langevin_init(torch.tensor([[1.0]]), log_gamma)
    found = langevin_step(state, LangevinNoiseResult(torch.tensor([[-9.0]]), torch.zeros(1)), log_gamma, step_size=1.0)
    assert not found.accepted.item()
    assert found.acceptance.item() == 0


def test_small_steps_are_all_accepted_and_follow_the_gradient():
    state = langevin_init(torch.full((1000, 1), 0.3, dtype=torch.float64), double_well)
    found = langevin_step(state, langevin_noise(state, torch.Generator().manual_seed(0)), double_well, step_size=1e-3)
    assert found.accepted.all()
    slope = -4 * 0.3 * (0.3**2 - 1) + 0.3
    np.testing.assert_allclose(state.gradient[:, 0], slope, rtol=1e-12)


@every_row(
    ("call", "error", "message"),
    [
        (lambda: langevin_init(torch.zeros(2, 1, dtype=torch.int64), double_well), TypeError, "int64"),
        (lambda: langevin_init([1.0], double_well), TypeError, "list"),
        (lambda: langevin_init(torch.zeros(0, 1), double_well), ValueError, "\\(0, 1\\)"),
        (lambda: langevin_init(torch.zeros(2, 1), lambda x: x), ValueError, "\\(2,\\), got \\(2, 1\\)"),
        (lambda: langevin_init(torch.full((1, 1), math.inf), double_well), ValueError, "finite"),
        # The density is finite at 0, its slope is not: no proposal from there could be accepted.
        (lambda: langevin_init(torch.zeros(1, 1), lambda x: -x.abs().sqrt().sum(-1)), ValueError, "its gradient"),
    ],
)
def test_bad_starts(call, error, message):
    with pytest.raises(error, match=message):
        call()


@every_row("step_size", [0.0, -1.0, math.inf, math.nan])
def test_bad_step_sizes(step_size):
    state = langevin_init(torch.zeros(1, 1), double_well)
    with pytest.raises(ValueError, match="step_size"):
        langevin_step(state, langevin_noise(state), double_well, step_size=step_size)
