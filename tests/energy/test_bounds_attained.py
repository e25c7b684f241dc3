"""Bounds in their worst direction: a basin towards the nearest other pattern, and where inequalities are equalities."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu import measures
from massieu.energy import BoltzmannMachine, HopfieldEnergy, bounds
from massieu.papers.theory import damped_descent, least_descent

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def towards(start: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Unit vectors."""
    return torch.nn.functional.normalize(target - start, dim=-1)


@every_row("radius", [0.05, 0.2, 0.4])
@every_row("count", [2, 5])
def test_a_basin_keeps_its_promise_towards_the_other_patterns(count, radius):
    """400 memories at inverse temperatures about the least at which anything is promised: pairs are antipodal, so that
    a step towards the other pattern takes off a lead of 2M·radius, as much as anything can."""
    patterns = torch.nn.functional.normalize(normal(400, count, 6), dim=-1)
    if count == 2:
        patterns[:, 1] = -patterns[:, 0]
    energy = HopfieldEnergy.create(patterns, scale=torch.linspace(0.3, 60.0, 400, dtype=F64))
    found = bounds.basin(energy, radius)
    assert found.unique.any()
    assert not found.exists.all()
    for shift in range(1, count):
        other = patterns.roll(-shift, -2)
        start = patterns + radius * towards(patterns, other)
        after = energy.step(start)
        apart = (after - patterns).norm(dim=-1)
        assert (apart <= radius + 1e-12)[found.exists].all()
        assert (apart <= found.distance + 1e-12)[found.exists].all()
        # And the map contracts between the edge and the pattern.
        moved = (after - energy.step(patterns)).norm(dim=-1)
        assert (moved < radius)[found.unique].all()


@every_row("radius", [0.02, 0.1, 0.3, 0.6])
def test_a_basins_distance_is_attained_by_a_pair(radius):
    """x and −x of norm M: after one step from the ball's edge the weight missed is e/(1 + e), e = exp(−β(2M² − 2M·radius))."""
    for norm in (0.7, 1.0, 2.0):
        pattern = norm * torch.eye(3, dtype=F64)[:1]
        energy = HopfieldEnergy.create(torch.cat([pattern, -pattern]), scale=9.0 / norm**2)
        found = bounds.basin(energy, radius * norm)
        missed = math.exp(-9.0 * (2 - 2 * radius))
        start = pattern * (1 - radius)
        apart = (energy.step(start) - pattern).norm().item()
        assert apart == pytest.approx(2 * norm * missed / (1 + missed), rel=1e-9)
        assert found.distance[0].item() == pytest.approx(apart * (1 + missed), rel=1e-9)


@every_row("count", [2, 4, 7])
def test_retrieval_bounds_are_attained(count):
    """Where all other patterns are as far behind, 1 − p is (N − 1)e^(−βΔ) but for a factor 1/(1 + (N − 1)e^(−βΔ))."""
    lead = 8.0
    patterns = torch.eye(count, dtype=F64)
    energy = HopfieldEnergy.create(patterns, scale=lead)
    bound = bounds.retrieval_bound(energy, patterns[0])
    share = torch.softmax(lead * patterns @ patterns[0], -1)
    others = (count - 1) * math.exp(-lead)
    assert bound.weight[0].item() == pytest.approx((1 - share[0]).item() * (1 + others), rel=1e-9)
    pair = torch.stack([patterns[0], -patterns[0]])
    energy = HopfieldEnergy.create(pair, scale=lead)
    bound, apart = bounds.retrieval_bound(energy, pair[0]), (energy.step(pair[0]) - pair[0]).norm()
    assert bound.distance[0].item() == pytest.approx(apart.item() * (1 + math.exp(-2 * lead)), rel=1e-9)


@every_row("damping", [0.05, 0.5, 1.0, 1.5, 1.95])
def test_damped_descent_is_attained_by_one_pattern(damping):
    """Its log-partition is linear, so that E is ½‖ξ − x‖² and a constant."""
    pattern, state = normal(1, 5), normal(40, 5, seed=1)
    energy = HopfieldEnergy.create(pattern, scale=1.7)
    drop = energy(state) - energy(energy.step(state, damping=damping))
    exact = 0.5 * (1 - (1 - damping) ** 2) * (state - pattern).square().sum(-1)
    torch.testing.assert_close(drop, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(damped_descent(energy.force(state), damping), exact, rtol=1e-9, atol=1e-12)
    if damping == 1.0:
        torch.testing.assert_close(least_descent(state, energy.step(state)), exact, rtol=1e-9, atol=1e-12)


def test_hidden_units_whose_measure_has_another_mass_than_one():
    """By enumeration: atoms of mass Σw = 7.3 are the probability w/Σw of them."""
    points, weight = normal(4, 2, seed=3), torch.tensor([0.3, 5.0, 1.5, 0.5], dtype=F64)
    field, coupling = normal(3, seed=4), normal(3, 2, seed=5)
    machine = BoltzmannMachine.create(
        measures.Spin.create(field), measures.Atoms.create(points, weight.log()), coupling
    )
    visible = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 3)
    prior = torch.exp(visible @ field) / torch.exp(visible @ field).sum()
    joint = prior[:, None] * (weight / weight.sum()) * torch.exp(visible @ coupling @ points.T)
    torch.testing.assert_close(machine.effective_energy(visible), -joint.sum(-1).log())
    torch.testing.assert_close(machine.log_partition(), joint.sum().log())
