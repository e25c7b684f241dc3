"""The descent of the Energy Transformer: what is certain of its steps in g and in x, and where they end (N1)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.energy.cases import F64, draw
from tests.energy.transformer_cases import explicit_energy, network, weights
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import TransformerEnergy
from massieu.solve import Status

random_networks = given(
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 3),
    count=st.integers(1, 6),
    gain=st.sampled_from([0.3, 1.0, 4.0]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    quantity=st.sampled_from([0, 8]),
    padded=st.booleans(),
)


def randomly(seed, heads, count, gain, scale, quantity, padded):
    keep = (draw(4, count, seed=seed + 9) > -0.5) if padded else None
    return network(seed, gain, keep, scale, heads=heads, quantity=quantity), 2 * draw(4, count, 6, seed=seed + 10)


@pytest.mark.medium
@random_networks
def test_a_step_lowers_the_energy_by_what_is_certain(**drawn):
    energy, tokens = randomly(**drawn)
    state = energy.normalise(tokens)
    for damping in (1.0, 1.0, 0.3):
        after = energy.step(state, damping=damping)
        drop = energy(state) - energy(after)
        if damping == 1:
            least = 0.5 * energy.curvature(state) * (after - state).square().sum((-2, -1))
            assert (drop >= least - 1e-11 * (1 + energy(state).abs())).all()
        assert (drop >= -1e-11 * (1 + energy(state).abs())).all()
        state = after


@pytest.mark.medium
@random_networks
def test_a_safe_step_of_the_flow_lowers_the_energy(**drawn):
    energy, tokens = randomly(**drawn)
    sizes = energy.safe_step_size(tokens)
    for size in (None, sizes, 0.4 * sizes, sizes.amin(-1, keepdim=True).expand_as(sizes)):
        path = energy.flow(tokens, steps=1 if isinstance(size, Tensor) else 4, step_size=size)
        rise = path.energies.diff(dim=0)
        assert (rise <= 1e-11 * (1 + path.energies[:-1].abs())).all()


@every_row("size", [1e-3, 0.1, 3.0])
def test_any_step_of_the_flow_obeys_the_inequality(size):
    """E falls by at least Σ_B ((ℓ⁺ + ℓ)/(2r·size) − ½ curvature)‖g⁺ − g‖², also where that is negative."""
    energy, tokens = network(), draw(50, 5, 6, seed=9)
    path = energy.flow(tokens, steps=1, step_size=size)
    before, after = energy.normalise(tokens), energy.normalise(path.states[1])
    length = [(6 * (x.var(-1, correction=0) + 1e-2)).sqrt() for x in path.states]
    rate = sum(length) / (2 * 0.8 * 6**0.5 * size) - 0.5 * energy.curvature(before).unsqueeze(-1)
    least = (rate * (after - before).square().sum(-1)).sum(-1)
    assert (path.energies[0] - path.energies[1] >= least - 1e-10).all()


def test_long_steps_are_not_promised():
    """Warm tokens that repel each other, all moved at once: they overshoot together, and E rises."""
    unit = torch.eye(6, dtype=F64).unsqueeze(0)
    energy = TransformerEnergy.create(unit, -unit, torch.zeros(0, 6, dtype=F64), scale=0.01)
    tokens = draw(20, 3, 6, seed=9)
    assert (energy.flow(tokens, steps=6, step_size=50.0).energies.diff(dim=0) > 1.0).any()
    assert (energy.flow(tokens, steps=20).energies.diff(dim=0) <= 1e-12).all()


@pytest.mark.medium
@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_curvature_bounds_every_hessian(count):
    energy = network(heads=2, quantity=4)
    states = energy.normalise(torch.cat([draw(6, count, 6, seed=9), 1e-3 * draw(2, count, 6, seed=8)]))
    for state in states:
        hessian = torch.func.hessian(lambda g: explicit_energy(energy, g))(state).reshape(count * 6, -1)
        torch.testing.assert_close(energy.hessian(state).reshape(count * 6, -1), hessian, rtol=1e-9, atol=1e-9)
        assert torch.linalg.eigvalsh(hessian)[-1] <= energy.curvature(state)


def test_the_curvature_is_of_the_right_order_where_all_attend_to_one():
    """One token that all others attend to: the Hessian's largest eigenvalue grows like √(n − 1), half the bound."""
    matrix = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=F64)).unsqueeze(0)
    energy = TransformerEnergy.create(matrix, matrix, torch.zeros(0, 3, dtype=F64), scale=400.0)
    for count in (5, 17):
        state = torch.zeros(count, 3, dtype=F64)
        state[0, 0], state[1:, 0] = 2.0, 1.0
        top = torch.linalg.eigvalsh(energy.hessian(state).reshape(3 * count, -1))[-1]
        assert 0.4 < top / energy.curvature(state) <= 1


def test_in_continuous_time_the_energy_falls_at_the_rate_of_the_theorem():
    """dE/dt = −Fᵀ∇²L F, the left side by a central difference along the flow."""
    energy, tokens = network(), draw(5, 6, seed=9)
    force = energy.force(energy.normalise(tokens))
    levels = [energy(energy.normalise(tokens + time * force)) for time in (-1e-5, 1e-5)]
    moved = torch.func.jvp(energy.normalise, (tokens,), (force,))[1]
    rate = (levels[1] - levels[0]) / 2e-5
    torch.testing.assert_close(rate, -(force * moved).sum(), rtol=1e-6, atol=0)
    assert rate < 0


def test_steps_of_the_flow_are_the_formula():
    energy, tokens = network(), draw(2, 5, 6, seed=9)
    path = energy.flow(tokens, steps=3, step_size=0.07)
    state = tokens
    for point, level in zip(path.states, path.energies, strict=True):
        torch.testing.assert_close(point, state)
        torch.testing.assert_close(level, energy(energy.normalise(state)))
        state = state + 0.07 * energy.force(energy.normalise(state))


@pytest.mark.medium
def test_retrieval_ends_where_the_force_is_normal_to_the_range():
    energy = network()
    retrieved = energy.retrieve(energy.normalise(draw(3, 2, 6, seed=9)), max_steps=20_000)
    assert (retrieved.status == Status.CONVERGED).all()
    deviation, force = retrieved.state - energy.normalisation.bias, energy.force(retrieved.state)
    torch.testing.assert_close(deviation.norm(dim=-1), torch.full((3, 2), 0.8 * 6**0.5, dtype=F64))
    inner = force - force.mean(-1, keepdim=True)
    tangent = inner - (inner * deviation).sum(-1, keepdim=True) / deviation.square().sum(-1, keepdim=True) * deviation
    assert tangent.abs().max() < 1e-6 and ((inner * deviation).sum(-1) > 0).all()


@pytest.mark.slow
def test_gradients_at_the_end_are_those_of_many_steps():
    key, query, memories = (each.requires_grad_() for each in weights(heads=1, size=3, width=4, quantity=5))
    energy = TransformerEnergy.create(key, query, memories)
    start = energy.normalise(draw(1, 3, 4, seed=9)).detach()
    slopes = [
        torch.autograd.grad((draw(1, 3, 4, seed=8) * retrieved.state).sum(), (key, query, memories))
        for retrieved in (energy.retrieve(start, max_steps=20_000), energy.retrieve(start, steps=150))
    ]
    for implicit, unrolled in zip(*slopes, strict=True):
        torch.testing.assert_close(implicit, unrolled, rtol=1e-5, atol=1e-6)
