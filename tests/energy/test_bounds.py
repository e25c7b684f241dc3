"""B5: every inequality on 2000 random memories, the constants against SciPy, the pitchfork."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from scipy.special import lambertw
from tests.energy.cases import F64, constant, draw
from tests.support.rows import every_row, some_slow

from massieu import measures
from massieu.energy import HopfieldEnergy, activations, bounds
from massieu.papers.theory import damped_descent, energy_range, least_descent, path_length, smallest_move

MANY = 500


def memories(seed: int, count: int = 6, width: int = 4) -> tuple[HopfieldEnergy, torch.Tensor]:
    """Many memories of every size and temperature, and a state for each."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    patterns = normal(MANY, count, width) * normal(MANY, 1, 1).exp()
    log_weight = torch.where(torch.rand(MANY, count, generator=generator) < 0.3, -torch.inf, normal(MANY, count))
    log_weight[:, 0] = 0.0
    energy = HopfieldEnergy.create(measures.Atoms.create(patterns, log_weight), scale=normal(MANY).exp())
    return energy, normal(MANY, width) * patterns.norm(dim=-1).amax(-1, keepdim=True)


def test_energies_lie_in_their_range():
    energy, state = memories(0)
    low, top = energy_range(energy)
    norm = bounds.largest_norm(energy)
    torch.testing.assert_close(top, 2 * norm.square())
    assert (energy(state) >= low - 1e-10 * top).all()
    inside = state * (norm / state.norm(dim=-1).clamp_min(1e-300)).clamp(max=1).unsqueeze(-1)
    # With weights other than one, log Σw/β differs from log N/β, which the upper bound does not need: lse ≥ −M‖ξ‖ + log Σw/β.
    assert (energy(inside) <= top * (1 + 1e-10)).all()


def test_a_step_descends_by_half_its_square():
    energy, state = memories(1)
    for _ in range(4):
        after = energy.step(state)
        drop, size = energy(state) - energy(after), energy(state).abs() + 1
        assert (drop >= least_descent(state, after) - 1e-11 * size).all()
        state = after


def test_the_smallest_of_many_moves():
    energy, state = memories(2)
    path = energy.descend(state, steps=10)
    moves = (path.states[1:] - path.states[:-1]).norm(dim=-1).amin(0)
    drop = path.energies[0] - path.energies[-1]
    assert (moves <= smallest_move(drop, 10) + 1e-6).all()
    assert (moves <= smallest_move(path.energies[0], 10) + 1e-6).all()


@every_row("damping", [0.05, 0.5, 1.0, 1.5, 1.95])
def test_damped_steps_descend(damping: float):
    energy, state = memories(3)
    drop = energy(state) - energy(energy.step(state, damping=damping))
    assert (drop >= damped_descent(energy.force(state), damping) - 1e-11 * (energy(state).abs() + 1)).all()


def test_the_contraction_factor_bounds_the_jacobian_and_the_force():
    energy, state = memories(4)
    factor = bounds.lipschitz(energy)
    jacobian = torch.eye(4, dtype=F64) - energy.hessian(state)
    steepest = torch.linalg.matrix_norm(jacobian, ord=2)
    assert (steepest <= factor * (1 + 1e-9) + 1e-12).all()
    after = energy.step(state)
    assert (energy.force(after).norm(dim=-1) <= factor * (state - after).norm(dim=-1) * (1 + 1e-9) + 1e-10).all()
    rough = bounds.lipschitz(energy, method="radius")
    assert (factor <= rough * (1 + 1e-12)).all()
    assert (rough <= 4 * factor * (1 + 1e-12) + 1e-12).all()


def test_below_one_the_path_is_as_short_as_the_bound_says():
    energy, state = memories(5)
    energy = HopfieldEnergy.create(energy.memory, scale=energy.scale * (0.4 / bounds.lipschitz(energy)).clamp(max=1))
    factor = bounds.lipschitz(energy)
    assert (factor <= 0.4 + 1e-9).all()
    path = energy.descend(state, steps=28).states
    length = (path[1:] - path[:-1]).norm(dim=-1)
    limit = path_length(length[0], factor)
    assert (length.sum(0) <= limit * (1 + 1e-9) + 1e-9).all()
    other = energy.retrieve(torch.zeros_like(state), steps=28).state
    torch.testing.assert_close(path[-1], other, rtol=1e-6, atol=1e-6)  # one fixed point
    assert path_length(constant(1.0), constant(1.0)) == torch.inf


@pytest.mark.parametrize("weights", [False, True])
def test_retrieval_bounds_hold(weights: bool):
    energy, state = memories(6)
    if not weights:
        energy = HopfieldEnergy.create(energy.memory.points, scale=energy.scale)
    bound = bounds.retrieval_bound(energy, state)
    memory = energy.memory
    scores = energy.scale[:, None] * (memory.points @ state.unsqueeze(-1)).squeeze(-1) + memory.log_weight
    share = torch.softmax(scores, -1)
    kept = memory.log_weight > -torch.inf
    missed = torch.where(kept, 1 - share, 0.0)
    assert (missed <= bound.weight * (1 + 1e-9) + 1e-12).all()
    apart = (energy.step(state).unsqueeze(-2) - memory.points).norm(dim=-1)
    assert (torch.where(kept, apart, 0.0) <= bound.distance * (1 + 1e-9) + 1e-9).all()


def test_separation_by_its_definition():
    patterns, state = draw(5, 3), draw(7, 3, seed=1)
    log_weight = torch.tensor([0.0, -1.0, -torch.inf, 0.5, 0.0], dtype=F64)
    energy = HopfieldEnergy.create(measures.Atoms.create(patterns, log_weight), scale=2.0)
    found, own = bounds.separation(energy, state), bounds.separation(energy)
    for n in range(5):
        others = [m for m in (0, 1, 3, 4) if m != n]

        def lead(x, n=n, others=others):
            return min(float((patterns[n] - patterns[m]) @ x + (log_weight[n] - log_weight[m]) / 2) for m in others)

        expected = [-math.inf] * 7 if n == 2 else [lead(x) for x in state]
        np.testing.assert_allclose(found[:, n], expected, rtol=1e-12)
        np.testing.assert_allclose(own[n], -math.inf if n == 2 else lead(patterns[n]), rtol=1e-12)
    alone = HopfieldEnergy.create(patterns[:1])
    assert bounds.separation(alone, state).isposinf().all()
    assert (bounds.retrieval_bound(alone, state).distance == 0).all()


def test_what_a_basin_promises():
    generator = torch.Generator().manual_seed(7)
    patterns = torch.nn.functional.normalize(torch.randn(200, 5, 8, generator=generator, dtype=F64), dim=-1)
    energy, radius = HopfieldEnergy.create(patterns, scale=40.0), 0.05
    found = bounds.basin(energy, radius)
    assert found.unique.float().mean() > 0.5
    assert not (found.unique & ~found.exists).any()
    for sign in (-1, 1):
        offset = torch.nn.functional.normalize(torch.randn(200, 5, 8, generator=generator, dtype=F64), dim=-1)
        start = patterns + sign * radius * offset
        after = energy.step(start)
        assert ((after - patterns).norm(dim=-1)[found.exists] <= radius).all()
        end = energy.retrieve(start, steps=60).state
        assert ((end - patterns).norm(dim=-1)[found.exists] <= found.distance[found.exists] + 1e-12).all()
        from_pattern = energy.retrieve(patterns, steps=60).state
        torch.testing.assert_close(end[found.unique], from_pattern[found.unique], rtol=0, atol=1e-9)


@pytest.mark.medium
@some_slow(("squared", "splits"), [(0.9, False), (1.05, True), (1.0, False)], 2)
def test_the_pitchfork_is_at_one(squared: float, splits: bool):
    a = torch.tensor([0.6, 0.8], dtype=F64)
    energy = HopfieldEnergy.create(torch.stack([a, -a]), scale=squared)
    torch.testing.assert_close(bounds.lipschitz(energy), constant(squared))
    steps = 300
    end = energy.retrieve(0.5 * a, steps=steps).state.norm()
    # x = tanh(squared·x) on the line through ±a.
    expected = 0.0
    if splits:
        expected = 1.0
        for _ in range(2000):
            expected = math.tanh(squared * expected)
        assert 0.3707 < expected < 0.3708
    # At the pitchfork itself the state falls like √(3/(2·steps)), from below.
    atol = math.sqrt(1.5 / steps) if squared == 1.0 else 1e-9
    assert abs(float(end) - expected) <= atol


def test_diameter_leaves_out_what_a_mask_does():
    patterns = draw(3, 40, 5)
    keep = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[2] = False
    patterns[~keep] *= 100
    energy = HopfieldEnergy.create(measures.Atoms.create(patterns, keep))
    exact, rough = bounds.diameter(energy), bounds.diameter(energy, method="radius")
    for item in range(2):
        np.testing.assert_allclose(exact[item], pdist(patterns[item][keep[item]].numpy()).max(), rtol=1e-12)
    assert exact[2] == rough[2] == 0
    assert (exact <= rough).all()
    assert (rough <= 2 * exact).all()


def test_diameter_in_blocks():
    patterns = draw(2500, 3)
    np.testing.assert_allclose(
        bounds.diameter(HopfieldEnergy.create(patterns)), pdist(patterns.numpy()).max(), rtol=1e-12
    )
    own = bounds.separation(HopfieldEnergy.create(patterns))
    scores = patterns @ patterns.T
    scores.fill_diagonal_(-torch.inf)
    torch.testing.assert_close(own, patterns.square().sum(-1) - scores.amax(-1))


@every_row(
    ("reference", "constant_"),
    [
        (activations.Scalar.create(0.5), 0.5),
        (activations.Tanh.create(), 1.0),
        (activations.RMSNorm.create(2.0, eps=0.25), 4.0),
    ],
)
def test_the_references_constant_is_a_factor(reference, constant_: float):
    patterns = draw(6, 4)
    plain = bounds.lipschitz(HopfieldEnergy.create(patterns, scale=2.0))
    found = bounds.lipschitz(HopfieldEnergy.create(patterns, reference=reference, scale=2.0))
    torch.testing.assert_close(found, constant_ * plain)
    gaussian = measures.Gaussian.create(torch.zeros(4, dtype=F64), torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=F64))
    found = bounds.lipschitz(HopfieldEnergy.create(patterns, reference=gaussian, scale=2.0))
    torch.testing.assert_close(found, 3 * plain)


@every_row("dimension", [2, 20, 75, 500])
@every_row("radius", [0.5, 1.0, 3.0])
@every_row("scale", [0.3, 1.0, 4.0])
def test_capacity_against_scipy(dimension: int, radius: float, scale: float):
    found = bounds.capacity(dimension, scale=scale, radius=radius, failure=0.001)
    a = 2 / (dimension - 1) * (1 + math.log(2 * scale * radius**2 * 0.001 * (dimension - 1)))
    b = 2 * radius**2 * scale / 5
    base = b / lambertw(math.exp(a + math.log(b))).real
    np.testing.assert_allclose(found.base, base, rtol=1e-12)
    np.testing.assert_allclose(found.patterns, math.sqrt(0.001) * base ** ((dimension - 1) / 4), rtol=1e-11)


@every_row("dimension, scale, radius", [(20_000, 1.0, 3.0), (2, 1e-300, 1.0), (3, 1.0, 1e-200), (2, 1.0, 1e200)])
def test_capacity_beyond_the_range_of_floats(dimension: int, scale: float, radius: float):
    """log c solves c = b/W, that is log c = W − a where W e^W = b e^a: put back into its own equation, in logarithms."""
    found = bounds.capacity(dimension, scale=scale, radius=radius)
    log_size = 2 * np.log(radius) + np.log(scale)
    a = 2 / (dimension - 1) * (1 + np.log(2 * 0.001 * (dimension - 1)) + log_size)
    log_base = 4 / (dimension - 1) * (np.log(found.patterns) - 0.5 * np.log(0.001))
    if np.isfinite(found.patterns):
        w = np.exp(a + np.log(0.4) + log_size - log_base - a)  # b/c
        np.testing.assert_allclose(w, log_base + a, rtol=1e-9, atol=1e-9)
    else:
        assert 0.5 * np.log(0.001) + (dimension - 1) / 4 * np.log(found.base) > 700


def test_capacity_constants_of_the_literature():
    first, second = bounds.capacity(20, scale=1.0, radius=3.0), bounds.capacity(75, scale=1.0)
    assert abs(first.base - 3.1546) < 5e-5
    assert abs(second.base - 1.3718) < 5e-4
    assert first.holds
    assert second.holds
    assert not bounds.capacity(5, scale=1.0).holds


REFUSED = {
    "not patterns": (
        lambda: bounds.separation(HopfieldEnergy.create(measures.Spin.create(dim=3))),
        TypeError,
        "stored patterns, got Spin",
    ),
    "another reference": (
        lambda: energy_range(HopfieldEnergy.create(draw(4, 3), reference=activations.Tanh.create())),
        TypeError,
        "identity",
    ),
    "a reference without a constant": (
        lambda: bounds.lipschitz(
            HopfieldEnergy.create(draw(4, 3), reference=measures.Bernoulli.create(torch.full((3,), 0.5)))
        ),
        TypeError,
        "Bernoulli",
    ),
    "method": (lambda: bounds.diameter(HopfieldEnergy.create(draw(4, 3)), method="fast"), ValueError, "fast"),
    "steps": (lambda: smallest_move(constant(1.0), 0), ValueError, "0"),
    "radius": (lambda: bounds.basin(HopfieldEnergy.create(draw(4, 3)), 0.0), ValueError, "radius"),
    "capacity": (lambda: bounds.capacity(1), ValueError, "dimension"),
    "failure": (lambda: bounds.capacity(5, failure=1.0), ValueError, "failure"),
    "state": (lambda: bounds.separation(HopfieldEnergy.create(draw(4, 3)), draw(2, 2)), ValueError, r"\(2, 2\)"),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
