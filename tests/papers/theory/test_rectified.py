"""The log-sum-ReLU memory: its gradient and its exact minima against differences, enumeration and NumPy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu.papers.theory.rectified import LogSumReLU


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_numpy(points, state, scale):
    rise = np.maximum(1 - scale / 2 * ((state - points) ** 2).sum(-1), 0).sum()
    return -np.log(rise) / scale if rise > 0 else np.inf


def test_energy_and_force():
    points, state = draw(7, 3, seed=1), 2 * draw(9, 3, seed=2)
    energy = LogSumReLU.create(points, scale=0.4)
    expected = [by_numpy(points.numpy(), row.numpy(), 0.4) for row in state]
    assert energy(state).tolist() == pytest.approx(expected, abs=1e-13)
    inside = energy(state).isfinite()
    assert 0 < inside.sum() < 9
    active, state = energy.active(state)[inside].double(), state[inside]
    squares = (state[:, None] - points).square().sum(-1)
    rise = (1 - 0.2 * squares).clamp_min(0).sum(-1, keepdim=True)
    force = (active[:, :, None] * (points - state[:, None])).sum(1) / rise
    assert torch.allclose(energy.force(state), force, atol=1e-13)
    scale = torch.tensor(0.4, dtype=torch.float64)

    def value(points, state, scale):
        return LogSumReLU.create(points, scale=scale)(state)

    check_derivatives(value, (points, state, scale))


def test_the_minima_are_the_centroids_of_what_is_active_at_them():
    """Every subset of patterns whose centroid activates exactly that subset; descents from many starts find just these."""
    points = draw(6, 2, seed=3)
    energy = LogSumReLU.create(points, scale=1.6)
    minima = []
    for size in range(1, 7):
        for subset in itertools.combinations(range(6), size):
            centroid = points[list(subset)].mean(0)
            active = (points - centroid).square().sum(-1) < 2 / 1.6
            if set(active.nonzero().flatten().tolist()) == set(subset):
                minima.append(centroid)
    starts = 2 * draw(300, 2, seed=4)
    # Some basins are small.
    starts = torch.cat([starts[energy(starts).isfinite()], torch.stack(minima) + 0.01])
    result = energy.retrieve(starts, max_steps=50)
    assert (result.status == 0).all() and (result.residual < 1e-14).all()
    distance = (result.state[:, None] - torch.stack(minima)).norm(dim=-1)
    assert (distance.min(-1).values < 1e-14).all()
    assert set(distance.argmin(-1).tolist()) == set(range(len(minima))) and len(minima) > 1
    assert (energy.hessian(result.state).diagonal(dim1=-2, dim2=-1) > 0).all()


def test_a_memory_with_no_other_in_reach_is_a_minimum_exactly():
    points = torch.tensor([[0.1, 0.7], [5.3, 0.3], [0.2, -6.1]])
    energy = LogSumReLU.create(points, scale=1.0)
    near = points + torch.tensor([0.5, -0.4])
    assert torch.equal(energy.step(near), points) and torch.equal(energy(points), torch.zeros(3))
    assert energy.radius.item() == pytest.approx(2**0.5)


@given(st.integers(0, 10_000), st.floats(0.05, 3), st.floats(0.05, 1.95), st.integers(0, 4))
def test_the_energy_never_rises(seed, scale, damping, masked):
    points, state = draw(2, 5, 3, seed=seed), draw(2, 6, 3, seed=seed + 1)
    log_weight = 0.5 * draw(2, 5, seed=seed + 2)
    log_weight[0, :masked] = -torch.inf
    energy = LogSumReLU.create(points, scale=scale, log_weight=log_weight)
    before, after = energy(state), energy(energy.step(state, damping=damping))
    outside = before == torch.inf
    assert (after[~outside] <= before[~outside] + 1e-13 * (1 + before[~outside].abs())).all()
    assert torch.equal(energy.step(state)[outside], state[outside])
    assert (energy.force(state)[outside] == 0).all()


def test_multiplicities_masks_and_precision():
    points, state = draw(3, 2, seed=5), 0.3 * draw(8, 2, seed=6)
    weighted = LogSumReLU.create(points, scale=0.3, log_weight=torch.tensor([2.0, 1.0, 0.0]).double().log())
    repeated = LogSumReLU.create(points[[0, 0, 1]], scale=0.3)
    assert torch.allclose(weighted(state), repeated(state), atol=1e-14)
    assert torch.allclose(weighted.step(state), repeated.step(state), atol=1e-14)
    nothing = LogSumReLU.create(points, log_weight=torch.zeros(3, dtype=torch.bool))
    assert (nothing(state) == torch.inf).all() and torch.equal(nothing.step(state), state)
    rough = LogSumReLU.create(points.bfloat16(), scale=0.3)
    assert rough(state.bfloat16()).dtype == torch.float32
    heads = LogSumReLU.create(draw(2, 4, 2, seed=7), scale=torch.tensor([0.2, 0.5]).double())
    single = LogSumReLU.create(draw(2, 4, 2, seed=7)[1], scale=0.5)
    assert torch.allclose(heads(state.expand(2, 8, 2))[1], single(state), atol=1e-14)


@every_row(
    ("keywords", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be positive"),
        ({"scale": torch.ones(3)}, ValueError, r"scale of shape \(3,\) does not broadcast to the memory's batch \(\)"),
        ({"scale": torch.tensor(1)}, TypeError, "scale must be"),
        ({"points": torch.full((2, 2), torch.nan)}, ValueError, "points must be finite"),
        ({"points": torch.zeros(0, 2)}, ValueError, "N, d ≥ 1"),
    ],
)
def test_bad_input_is_one_clear_sentence(keywords, error, message):
    with pytest.raises(error, match=message):
        LogSumReLU.create(**{"points": torch.zeros(2, 2)} | keywords)
