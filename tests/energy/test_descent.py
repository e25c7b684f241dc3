"""Descent to the end: retrieval, Newton's steps, and tokens that cluster."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.energy.cases import F64, REFERENCES, draw
from tests.support.rows import every_row

from massieu.energy import HopfieldEnergy
from massieu.errors import ConvergenceError, ConvergenceWarning
from massieu.papers.theory import ClusteringEnergy, newton_step
from massieu.solve import Status

# --- retrieval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["identity", "spin", "LayerNorm", "Gaussian"])
def test_retrieval_ends_where_a_step_stays(name: str):
    energy = HopfieldEnergy.create(draw(3, 5, 4), reference=REFERENCES[name](4), scale=3.0)
    start = energy.step(draw(3, 6, 4, seed=1))
    found = energy.retrieve(start, tol=1e-11)
    apart = (energy.step(found.state) - found.state).norm(dim=-1)
    torch.testing.assert_close(found.residual, apart, atol=1e-14, rtol=1e-6)
    assert (apart <= 1e-11 * (1 + found.state.norm(dim=-1))).all()
    assert (found.status == Status.CONVERGED).all()
    assert (found.energy <= energy(start) + 1e-12).all()
    torch.testing.assert_close(found.energy, energy(found.state))


@every_row("scale", [4.0, 16.0, 32.0])
def test_cold_memories_converge(scale: float):
    energy = HopfieldEnergy.create(draw(4, 16, 8).float(), scale=scale)
    found = energy.retrieve(draw(4, 20, 8, seed=1).float())
    assert (found.status == Status.CONVERGED).all()


def test_a_number_of_steps_is_that_many():
    energy, state = HopfieldEnergy.create(draw(5, 4), scale=2.0), draw(6, 4, seed=1)
    found = energy.retrieve(state, steps=3)
    torch.testing.assert_close(found.state, energy.step(energy.step(energy.step(state))))
    apart = (energy.step(found.state) - found.state).norm(dim=-1)
    torch.testing.assert_close(found.residual, apart)
    settled = apart <= 1e-10 * (1 + found.state.norm(dim=-1))
    assert ((found.status == Status.CONVERGED) == settled).all()
    assert (found.status[~settled] == Status.MAX_STEPS).all()
    torch.testing.assert_close(energy.retrieve(state, steps=0).state, state)


def test_not_converged_is_said():
    energy = HopfieldEnergy.create(torch.stack([draw(4), -draw(4)]), scale=1 / float(draw(4).square().sum()))
    state = draw(3, 4, seed=1)
    with pytest.raises(ConvergenceError, match=r"3 of 3 items.*residual"):
        energy.retrieve(state, max_steps=5, tol=1e-12)  # at the pitchfork convergence is not geometric
    found = energy.retrieve(state, max_steps=5, tol=1e-12, throw=False)
    assert (found.status == Status.MAX_STEPS).all()
    assert (found.residual > 1e-12).all()


@every_row("make", [lambda: HopfieldEnergy.create(draw(20, 4), scale=8.0), lambda: ClusteringEnergy.create(2.0)])
def test_a_state_that_is_not_finite_is_said(make):
    """It has a status of its own, is raised or warned of, and its batch mates are what they are alone."""
    energy = make()
    state = torch.nn.functional.normalize(draw(3, 5, 4, seed=1), dim=-1)
    good, last = energy.retrieve(state[1:], tol=1e-4, throw=False), energy.retrieve(state[1:], steps=2)
    state[0, 0] = torch.nan
    with pytest.raises(ConvergenceError, match="not finite"):
        energy.retrieve(state, tol=1e-4)
    found = energy.retrieve(state, tol=1e-4, throw=False)
    with pytest.warns(ConvergenceWarning, match="NOT_FINITE"):
        stepped = energy.retrieve(state, steps=2)
    for whole, alone in ((found, good), (stepped, last)):
        assert (whole.status[0].flatten()[0] == Status.NOT_FINITE).all()
        torch.testing.assert_close(whole.state[1:], alone.state)
        assert torch.equal(whole.status[1:], alone.status)


def test_gradients_at_the_end_are_those_of_many_steps():
    patterns, scale = draw(5, 4).requires_grad_(), torch.tensor(3.0, dtype=F64, requires_grad=True)
    state = draw(6, 4, seed=1).requires_grad_()
    energy = HopfieldEnergy.create(patterns, scale=scale)
    weights = draw(6, 4, seed=2)
    slopes = []
    for found in (energy.retrieve(state, tol=1e-13), energy.retrieve(state, steps=300)):
        total = (weights * found.state).sum() + found.energy.sum()
        slopes.append(torch.autograd.grad(total, (patterns, scale, state), allow_unused=True))
    torch.testing.assert_close(slopes[0][0], slopes[1][0], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(slopes[0][1], slopes[1][1], rtol=1e-8, atol=1e-10)
    # Where the descent ends does not depend on where it began.
    assert slopes[0][2] is None or (slopes[0][2] == 0).all()
    assert slopes[1][2].abs().max() < 1e-12


def test_an_item_does_not_wait_for_its_batch_mates():
    patterns, state = draw(3, 5, 4), draw(3, 6, 4, seed=1)
    whole = HopfieldEnergy.create(patterns, scale=2.0).retrieve(state)
    for item in range(3):
        alone = HopfieldEnergy.create(patterns[item], scale=2.0).retrieve(state[item])
        torch.testing.assert_close(whole.state[item], alone.state, rtol=1e-13, atol=1e-14)
        assert (whole.steps[item] == alone.steps).all()


def test_low_precision_starts():
    energy = HopfieldEnergy.create(draw(5, 4), scale=4.0)
    found = energy.retrieve(draw(6, 4, seed=1).bfloat16())
    assert found.state.dtype == F64
    assert (found.status == Status.CONVERGED).all()


REFUSED = {
    "both": ({"steps": 3, "tol": 1e-3}, "not both"),
    "tol": ({"tol": 0.0}, "tol"),
    "steps": ({"steps": -1}, "-1"),
    "damping": ({"damping": 2.0}, "damping"),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        HopfieldEnergy.create(draw(5, 4)).retrieve(draw(2, 4), **arguments)


# --- Newton ----------------------------------------------------------------------------------------------------------


def test_newtons_steps_converge_quadratically():
    energy = HopfieldEnergy.create(draw(6, 4), scale=2.0)
    state = energy.retrieve(draw(3, 4, seed=1), steps=5).state
    errors = []
    for _ in range(6):
        state = newton_step(energy, state)
        errors.append(float(energy.force(state).norm(dim=-1).max()))
    assert errors[-1] < 1e-13
    # Each error is at most a constant times the square of the one before.
    ratios = [after / before**2 for before, after in pairwise(errors) if before > 1e-7]
    assert len(ratios) >= 2
    assert max(ratios) < 10
    torch.testing.assert_close(energy.step(state), state)


def test_a_newton_step_is_its_formula():
    patterns, scale = draw(6, 4), 1.5
    energy = HopfieldEnergy.create(patterns, scale=scale)
    state = energy.retrieve(draw(4, seed=1), steps=30).state + 1e-3 * draw(4, seed=2)
    x = patterns.numpy()
    scores = scale * x @ state.numpy()
    p = np.exp(scores - scores.max())
    p /= p.sum()
    mean = p @ x
    covariance = (p[:, None] * (x - mean)).T @ (x - mean)
    expected = state.numpy() - np.linalg.solve(np.eye(4) - scale * covariance, state.numpy() - mean)
    np.testing.assert_allclose(newton_step(energy, state), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.medium
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.3, 2.0, 20.0]),
    name=st.sampled_from(["identity", "spin"]),
)
def test_newtons_energy_never_rises(seed: int, scale: float, name: str):
    energy = HopfieldEnergy.create(draw(2, 4, 3, seed=seed), reference=REFERENCES[name](3), scale=scale)
    state = energy.step(2 * draw(2, 5, 3, seed=seed + 1))
    for _ in range(2):
        after = newton_step(energy, state)
        assert (energy(after) <= energy(state) + 1e-10).all()
        state = after


# --- clustering ------------------------------------------------------------------------------------------------------


def test_clustering_energy_and_step_by_their_formulas():
    tokens, scale = F.normalize(draw(2, 5, 3), dim=-1), 1.7
    energy = ClusteringEnergy.create(scale)
    for item in range(2):
        x = tokens[item].numpy()
        weights = np.exp(scale * x @ x.T)
        np.testing.assert_allclose(energy(tokens)[item], -weights.sum() / (2 * scale * 25), rtol=1e-12)
        pull = weights @ x
        pull /= np.linalg.norm(pull, axis=-1, keepdims=True)
        np.testing.assert_allclose(energy.step(tokens)[item], pull, atol=1e-13)


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 8),
    width=st.integers(1, 5),
    scale=st.sampled_from([0.01, 1.0, 9.0, 100.0]),
    damping=st.sampled_from([1.0, 0.2]),
)
def test_clustering_never_raises_its_energy(seed, count, width, scale, damping):
    energy = ClusteringEnergy.create(scale)
    tokens = F.normalize(draw(3, count, width, seed=seed), dim=-1)
    path = energy.descend(tokens, steps=6, damping=damping)
    size = path.energies.abs().amax() + 1
    assert (path.energies[1:] <= path.energies[:-1] + 1e-13 * size * (1 + scale)).all()


def test_a_generic_cloud_ends_in_one_cluster():
    energy = ClusteringEnergy.create(torch.tensor(1.0, dtype=F64))
    path = energy.descend(F.normalize(draw(10, 4), dim=-1), steps=200)
    torch.testing.assert_close(path.states[-1] @ path.states[-1].T, torch.ones(10, 10, dtype=F64))
    torch.testing.assert_close(path.energies[-1], torch.tensor(-math.e / 2, dtype=F64))


def test_clustering_force_counts_both_parts_of_a_token():
    """Each pair counts twice in the sum, once in the gradient for each of its tokens: ∇_i E = −Σ_j W_ij x_j/n²."""
    tokens, scale = 0.9 * F.normalize(draw(5, 3), dim=-1), 1.3
    weights = (scale * tokens @ tokens.T).exp()
    torch.testing.assert_close(ClusteringEnergy.create(scale).force(tokens), weights @ tokens / 25)


def test_clustering_batches_precision_and_input():
    scale = torch.tensor([0.5, 2.0], dtype=F64)
    tokens = F.normalize(draw(2, 3, 5, 4), dim=-1)
    whole = ClusteringEnergy.create(scale)
    for item in range(2):
        alone = ClusteringEnergy.create(scale[item])
        torch.testing.assert_close(whole(tokens)[item], alone(tokens[item]))
        torch.testing.assert_close(whole.step(tokens)[item], alone.step(tokens[item]))
    low = tokens[0].bfloat16()
    assert ClusteringEnergy.create()(low).isfinite().all()
    assert ClusteringEnergy.create()(1.1 * tokens[0]).isposinf().all()
    with pytest.raises(ValueError, match="positive"):
        ClusteringEnergy.create(-1.0)
    with pytest.raises(ValueError, match=r"\(3, 5, 4\)"):
        whole(draw(3, 5, 4))
