"""Two-layer dynamics against SciPy's integrator, the orders of the methods, and the Hopfield limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.special import logsumexp, softmax
from tests.support.rows import every_row, some_slow

from massieu.energy import HopfieldEnergy
from massieu.energy.activations import LayerNorm, Tanh
from massieu.energy.fenchel_young import SparseAtoms
from massieu.papers.theory.two_layer import TwoLayer

LAYERS = {
    "Hopfield": (lambda: None, lambda: None),
    "LayerNorm": (lambda: LayerNorm.create(eps=1e-2), lambda: None),
    "spins": (Tanh.create, Tanh.create),
    "sparse": (lambda: None, lambda: SparseAtoms.create(torch.eye(5, dtype=torch.float64), 1.5)),
}


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(name, seed=1, **keywords):
    visible, hidden = LAYERS[name]
    return TwoLayer.create(draw(3, 5, seed=seed), visible=visible(), hidden=hidden(), **keywords)


@pytest.mark.medium
def test_the_path_is_that_of_scipy():
    layers = network("Hopfield", visible_time=0.7, hidden_time=0.5)
    coupling, start = layers.coupling.numpy(), draw(8, seed=2)

    def velocity(time, state):
        v, h = state[:3], state[3:]
        return [*((coupling @ softmax(h) - v) / 0.7), *((coupling.T @ v - h) / 0.5)]

    end = solve_ivp(velocity, (0, 0.25), start.numpy(), rtol=1e-12, atol=1e-13).y[:, -1]
    for method, order in (("split", 2), ("runge_kutta", 4)):
        errors = [
            (layers.flow(start, 0.25, steps=steps, method=method).states[-1] - torch.from_numpy(end)).norm().item()
            for steps in (10, 20)
        ]
        assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.15)
    assert errors[1] < 1e-8


def test_the_energy_is_that_of_the_formula():
    layers, state = network("Hopfield"), draw(4, 8, seed=3)
    for row, result in zip(state.numpy(), layers(state).tolist(), strict=True):
        v, h = row[:3], row[3:]
        active = softmax(h)
        expected = v @ v / 2 + h @ active - logsumexp(h) - v @ layers.coupling.numpy() @ active
        assert result == pytest.approx(expected, abs=1e-13)


@pytest.mark.medium
@given(st.sampled_from(sorted(LAYERS)), st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(0.01, 100))
def test_the_split_flow_and_the_step_never_raise_the_energy(name, seed, duration, hidden_time):
    layers, state = network(name, seed, hidden_time=hidden_time), draw(3, 8, seed=seed + 1, scale=2.0)
    path = layers.flow(state, duration, steps=4)
    assert (path.energies.diff(dim=0) <= 1e-12 * (1 + path.energies[:-1].abs())).all()
    steps = layers.descend(state, steps=4)
    assert (steps.energies.diff(dim=0) <= 1e-12 * (1 + steps.energies[:-1].abs())).all()


@pytest.mark.medium
@some_slow("name", LAYERS, 3)
def test_runge_kutta_raises_the_energy_by_no_more_than_its_order(name):
    layers, state = network(name), draw(6, 8, seed=4)
    steps = 20
    path = layers.flow(state, 1.0, steps=steps, method="runge_kutta")
    assert path.energies.diff(dim=0).max() <= (1.0 / steps) ** 4
    assert (path.energies[-1] < path.energies[0]).all()


@pytest.mark.parametrize("name", LAYERS)
def test_the_energy_falls_at_the_rate_of_the_theorem(name):
    """dℰ/dt = −τ_v v̇ᵀ∇²L_v v̇ − τ_h ḣᵀ∇²L_h ḣ, the left side by differences of a path, the right one by autograd."""
    layers, start = network(name, visible_time=0.5, hidden_time=2.0), draw(8, seed=5)
    time = 1e-3
    path = layers.flow(start, 2 * time, steps=2, method="runge_kutta")
    rate = (path.energies[2] - path.energies[0]).item() / (2 * time)
    v, h = layers.split(path.states[1])
    velocity = (path.states[2] - path.states[0]) / (2 * time)
    curvature = [torch.func.jacfwd(part)(x) for part, x in ((layers.visible, v), (layers.hidden, h))]
    moved = velocity.split((3, 5))
    expected = -0.5 * moved[0] @ curvature[0] @ moved[0] - 2.0 * moved[1] @ curvature[1] @ moved[1]
    assert rate == pytest.approx(expected.item(), rel=1e-4)


def test_at_the_hidden_limit_it_is_the_hopfield_network():
    layers, query = network("Hopfield"), draw(6, 3, seed=6)
    hopfield = HopfieldEnergy.create(layers.coupling.T.contiguous(), scale=1.0)
    state = layers.join(query)
    assert torch.allclose(layers(state), hopfield(query) - hopfield.constant, atol=1e-14)
    assert torch.allclose(layers.step(state)[..., :3], hopfield.step(query), atol=1e-14)
    result, expected = layers.retrieve(state), hopfield.retrieve(query)
    assert (result.status == 0).all()
    assert torch.allclose(result.state[..., :3], expected.state, atol=1e-8)


@pytest.mark.medium
def test_fast_hidden_units_follow_their_limit():
    """v̇ = attention(v) − v by SciPy, with an error of the order of τ_h."""
    query, coupling = draw(3, seed=9), network("Hopfield").coupling.numpy()
    end = solve_ivp(lambda t, v: coupling @ softmax(coupling.T @ v) - v, (0, 0.5), query.numpy(), rtol=1e-11).y[:, -1]
    errors = []
    for time in (16e-3, 8e-3):
        layers = network("Hopfield", hidden_time=time)
        path = layers.flow(layers.join(query), 0.5, steps=round(0.5 / time), method="runge_kutta")
        errors.append((path.states[-1][:3] - torch.from_numpy(end)).norm().item())
    assert errors[0] < 0.04 and errors[0] / errors[1] == pytest.approx(2, rel=0.05)


def test_shapes_gradients_and_precision():
    coupling, state = draw(2, 3, 5, seed=7).requires_grad_(), draw(2, 4, 8, seed=8)
    layers = TwoLayer.create(coupling)
    path = layers.flow(state, 1.0, steps=3)
    assert path.states.shape == (4, 2, 4, 8) and path.energies.shape == (4, 2, 4)
    (slope,) = torch.autograd.grad(path.energies[-1].sum(), coupling)
    assert slope.isfinite().all() and (slope != 0).any()
    visible, hidden = layers.split(state)
    assert torch.equal(layers.join(visible, hidden), state)
    single = TwoLayer.create(coupling[1])
    assert torch.allclose(single.step(state[1]), layers.step(state)[1], atol=1e-15)
    assert TwoLayer.create(coupling.detach().bfloat16())(state.bfloat16()).dtype == torch.float32


@every_row(
    ("call", "error", "message"),
    [
        (lambda: TwoLayer.create(torch.zeros(3)), ValueError, r"\(\*batch, n_v, n_h\), got \(3,\)"),
        (lambda: TwoLayer.create(torch.tensor([[1]])), TypeError, "got a tensor of torch.int64"),
        (lambda: TwoLayer.create(torch.tensor([[torch.nan]])), ValueError, "coupling must be finite"),
        (lambda: TwoLayer.create(torch.eye(2), hidden_time=0.0), ValueError, "hidden_time must be positive"),
        (
            lambda: TwoLayer.create(torch.eye(2), visible=3),
            TypeError,
            "visible must be an activation or a measure, got 3",
        ),
        (lambda: network("Hopfield")(torch.zeros(7)), ValueError, r"\(\) \+ queries \+ \(8,\).*, got \(7,\)"),
        (
            lambda: network("Hopfield").step(torch.zeros(8), damping=0.5),
            ValueError,
            r"in \{1\} for this TwoLayer, got 0.5",
        ),
        (lambda: network("Hopfield").flow(torch.zeros(8), -1.0, steps=1), ValueError, "duration must be"),
        (lambda: network("Hopfield").flow(torch.zeros(8), 1.0, steps=0), ValueError, "at least 1, got 0"),
        (lambda: network("Hopfield").flow(torch.zeros(8), 1.0, steps=1, method="euler"), ValueError, "got 'euler'"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
