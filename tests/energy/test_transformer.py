"""The Energy Transformer's energy against explicit sums, its descent against what is certain of it, its padding (N1)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from tests.energy.cases import F64, constant, draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from massieu.energy import EnergyTransformer, mutual
from massieu.energy.contraction import LayerNorm
from massieu.solve import Status


def weights(heads=3, size=4, width=6, quantity=10, seed=0):
    return [
        draw(heads, size, width, seed=seed),
        draw(heads, size, width, seed=seed + 1),
        draw(quantity, width, seed=seed + 2),
    ]


def network(seed=0, gain=0.8, keep=None, scale=None, **sizes):
    key, query, memories = weights(seed=seed, **sizes)
    normalisation = LayerNorm.create(constant(gain), draw(key.shape[-1], seed=seed + 3), eps=1e-2)
    scale = torch.linspace(0.5, 2.0, len(key), dtype=F64) if scale is None else scale
    return EnergyTransformer.create(key, query, memories, normalisation=normalisation, scale=scale, keep=keep)


def padding(batch=3, count=5) -> Tensor:
    """Items of all, all but one, two, …; the last of one token."""
    return torch.arange(count) < torch.linspace(count, 1, batch).ceil().unsqueeze(-1)


def explicit_energy(energy: EnergyTransformer, g: Tensor) -> Tensor:
    """Of one item of tokens that are all there, by explicit matrices."""
    total = -0.5 * torch.relu(g @ energy.memories.T).square().sum()
    for key, query, scale in zip(energy.key, energy.query, energy.scale, strict=True):
        scores = scale * (g @ key.T) @ (g @ query.T).T
        scores = scores.masked_fill(torch.eye(len(g), dtype=torch.bool), -torch.inf)
        if len(g) > 1:
            total = total - torch.logsumexp(scores, 0).sum() / scale
    return total


@pytest.fixture(params=["explicit", "fused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By matrices, and as many tokens are done."""
    if request.param == "fused":
        monkeypatch.setattr(mutual, "EXPLICIT", 0)


# --- energy and force ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_energy_is_that_of_the_formula(count):
    energy = network()
    state = energy.normalise(draw(2, count, 6, seed=9))
    for g, found in zip(state.numpy(), energy(state).tolist(), strict=True):
        expected = -0.5 * np.square(np.maximum(g @ energy.memories.numpy().T, 0)).sum()
        for key, query, scale in zip(*(each.numpy() for each in (energy.key, energy.query, energy.scale)), strict=True):
            for own in range(count if count > 1 else 0):
                others = [b for b in range(count) if b != own]
                expected -= logsumexp([scale * (key @ g[b]) @ (query @ g[own]) for b in others]) / scale
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_force_is_the_gradient_for_every_batch_and_token_count(count):
    energy = network()
    for batch in (1, 4):
        state = energy.normalise(draw(batch, count, 6, seed=9)).requires_grad_()
        total = torch.stack([explicit_energy(energy, item) for item in state]).sum()
        (slope,) = torch.autograd.grad(total, state)
        torch.testing.assert_close(energy.force(state), -slope, rtol=1e-11, atol=1e-11)
        (own,) = torch.autograd.grad(energy(state).sum(), state)
        torch.testing.assert_close(own, slope, rtol=1e-11, atol=1e-11)


def test_the_force_has_both_terms_of_a_token_and_the_memories():
    energy = network()
    g = energy.normalise(draw(7, 6, seed=9))
    expected = torch.relu(g @ energy.memories.T) @ energy.memories
    for key, query, scale in zip(energy.key, energy.query, energy.scale, strict=True):
        scores = (scale * (g @ key.T) @ (g @ query.T).T).fill_diagonal_(-torch.inf)
        p = torch.softmax(scores, 0)
        as_query, as_key = p.T @ (g @ key.T) @ query, p @ (g @ query.T) @ key
        expected = expected + as_query + as_key
        assert as_key.abs().max() > 0.1
    torch.testing.assert_close(energy.force(g), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("way")
def test_padding_contributes_nothing_whatever_is_in_it():
    keep = padding()
    energy, tokens = network(keep=keep), draw(3, 5, 6, seed=9)
    tokens[~keep] = torch.nan
    state = energy.normalise(tokens)
    state[~keep] = torch.inf
    moved, stepped, sizes = energy.move(tokens, 0.1), energy.step(state), energy.safe_step_size(tokens)
    for item, count in enumerate(keep.sum(-1).tolist()):
        alone, own = network(), tokens[item, :count]
        g = alone.normalise(own)
        torch.testing.assert_close(energy(state)[item], alone(g), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(energy.force(state)[item, :count], alone.force(g), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stepped[item, :count], alone.step(g), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moved[item, :count], alone.move(own, 0.1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sizes[item, :count], alone.safe_step_size(own), rtol=1e-12, atol=0)
    assert (energy.force(state)[~keep] == 0).all()
    assert stepped[~keep].isposinf().all()


@pytest.mark.usefixtures("way")
def test_no_token_at_all_has_no_energy():
    energy = network(keep=torch.zeros(2, 4, dtype=torch.bool))
    tokens = draw(2, 4, 6).requires_grad_()
    path = energy.flow(tokens, steps=2, step_size=0.1)
    assert (path.energies == 0).all() and torch.equal(path.states[-1], tokens)
    (slope,) = torch.autograd.grad(path.energies.sum(), tokens)
    assert (slope == 0).all()


@pytest.mark.usefixtures("way")
def test_an_item_does_not_depend_on_its_batch_mates():
    energy, tokens = network(), draw(2, 3, 5, 6, seed=9)
    together, energies = energy.flow(tokens, steps=3, step_size=0.05)
    for place in np.ndindex(2, 3):
        alone = energy.flow(tokens[place], steps=3, step_size=0.05)
        torch.testing.assert_close(together[:, *place], alone.states, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(energies[:, *place], alone.energies, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("way")
def test_scores_of_ten_thousand_are_finite_with_their_derivatives():
    energy = network(scale=1e4)
    state = energy.normalise(draw(5, 6, seed=9)).requires_grad_()
    found = energy(state)
    torch.testing.assert_close(found, explicit_energy(energy, state), rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(found, state)
    (expected,) = torch.autograd.grad(explicit_energy(energy, state), state)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-10)
    assert energy.hessian(state.detach()).isfinite().all()
    float32 = EnergyTransformer.create(*(each.float() for each in weights()), scale=1e4)
    assert float32.force(draw(5, 6).float()).isfinite().all()


def test_outside_the_range_the_energy_is_infinite():
    energy = network()
    state = energy.normalise(draw(2, 5, 6, seed=9))
    state[0, 3] += 0.1
    assert energy(state).isposinf().tolist() == [True, False]


@pytest.mark.parametrize("padded", [True, False])
def test_both_ways_agree(padded, monkeypatch):
    tensors = (draw(2, 3, 9, 4).requires_grad_(), draw(2, 3, 9, 4, seed=1).requires_grad_())
    scale = torch.tensor([0.3, 1.0, 5.0], dtype=F64, requires_grad=True)
    keep = padding(2, 9) if padded else None
    found = []
    for most in (9, 8):
        monkeypatch.setattr(mutual, "EXPLICIT", most)
        parts = mutual.mutual_attention(*tensors, scale, keep)
        assert torch.equal(parts[0], mutual.mutual_log_partition(*tensors, scale, keep))
        total = sum((draw(*part.shape, seed=5) * part).sum() for part in parts)
        found.append((*parts, *torch.autograd.grad(total, (*tensors, scale))))
    for explicit, fused in zip(*found, strict=True):
        torch.testing.assert_close(explicit, fused, rtol=1e-12, atol=1e-12)


def test_a_large_common_part_of_a_token_leaves_it_in_the_range():
    energy, tokens = EnergyTransformer.create(*(each.float() for each in weights())), draw(5, 6, seed=9).float()
    state = energy.normalise(tokens + 3e3)
    torch.testing.assert_close(energy(state), energy(energy.normalise(tokens)), rtol=1e-2, atol=0)


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.numel = max(self.numel, part.numel())
        return result


@pytest.mark.parametrize("padded", [True, False])
def test_memory_is_linear_in_tokens(padded):
    count = 1024
    keep = torch.arange(count).unsqueeze(0) < 1000 if padded else None
    energy = network(heads=1, keep=keep)
    tokens = draw(1, count, 6).requires_grad_()
    with _Largest() as largest:
        path = energy.flow(tokens, steps=1, step_size=0.1)
        path.states[-1].square().sum().backward()
    assert largest.numel <= 64 * count


# --- descent ---------------------------------------------------------------------------------------------------------

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


@random_networks
@settings(max_examples=25, deadline=None)
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


@random_networks
@settings(max_examples=25, deadline=None)
def test_a_safe_step_of_the_flow_lowers_the_energy(**drawn):
    energy, tokens = randomly(**drawn)
    sizes = energy.safe_step_size(tokens)
    for size in (None, sizes, 0.4 * sizes, sizes.amin(-1, keepdim=True).expand_as(sizes)):
        path = energy.flow(tokens, steps=1 if isinstance(size, Tensor) else 4, step_size=size)
        rise = path.energies.diff(dim=0)
        assert (rise <= 1e-11 * (1 + path.energies[:-1].abs())).all()


@pytest.mark.parametrize("size", [1e-3, 0.1, 3.0])
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
    energy = EnergyTransformer.create(unit, -unit, torch.zeros(0, 6, dtype=F64), scale=0.01)
    tokens = draw(20, 3, 6, seed=9)
    assert (energy.flow(tokens, steps=6, step_size=50.0).energies.diff(dim=0) > 1.0).any()
    assert (energy.flow(tokens, steps=20).energies.diff(dim=0) <= 1e-12).all()


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
    energy = EnergyTransformer.create(matrix, matrix, torch.zeros(0, 3, dtype=F64), scale=400.0)
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
    for found, level in zip(path.states, path.energies, strict=True):
        torch.testing.assert_close(found, state)
        torch.testing.assert_close(level, energy(energy.normalise(state)))
        state = state + 0.07 * energy.force(energy.normalise(state))


def test_retrieval_ends_where_the_force_is_normal_to_the_range():
    energy = network()
    found = energy.retrieve(energy.normalise(draw(3, 4, 6, seed=9)), max_steps=20_000)
    assert (found.status == Status.CONVERGED).all()
    deviation, force = found.state - energy.normalisation.bias, energy.force(found.state)
    torch.testing.assert_close(deviation.norm(dim=-1), torch.full((3, 4), 0.8 * 6**0.5, dtype=F64))
    inner = force - force.mean(-1, keepdim=True)
    tangent = inner - (inner * deviation).sum(-1, keepdim=True) / deviation.square().sum(-1, keepdim=True) * deviation
    assert tangent.abs().max() < 1e-6 and ((inner * deviation).sum(-1) > 0).all()


def test_gradients_at_the_end_are_those_of_many_steps():
    key, query, memories = (each.requires_grad_() for each in weights(heads=1, size=3, width=4, quantity=5))
    energy = EnergyTransformer.create(key, query, memories)
    start = energy.normalise(draw(1, 3, 4, seed=9)).detach()
    slopes = [
        torch.autograd.grad((draw(1, 3, 4, seed=8) * found.state).sum(), (key, query, memories))
        for found in (energy.retrieve(start, max_steps=20_000), energy.retrieve(start, steps=500))
    ]
    for implicit, unrolled in zip(*slopes, strict=True):
        torch.testing.assert_close(implicit, unrolled, rtol=1e-5, atol=1e-6)


# --- derivatives, precision, transforms ------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_derivatives_of_both_orders_in_everything():
    keep = torch.tensor([[True, True, True, False]])
    tensors = (
        *weights(heads=2, size=2, width=3, quantity=2),
        constant(0.8),
        draw(3, seed=3),
        torch.tensor([0.5, 1.5], dtype=F64),
        draw(1, 4, 3, seed=9),
    )

    def network_of(key, query, memories, gain, bias, scale, tokens):
        normalisation = LayerNorm.create(gain, bias, eps=0.1)
        return EnergyTransformer.create(
            key, query, memories, normalisation=normalisation, scale=scale, keep=keep
        ), tokens

    def level(*tensors):
        energy, tokens = network_of(*tensors)
        return energy(energy.normalise(tokens))

    def moved(*tensors):
        energy, tokens = network_of(*tensors)
        return energy.move(tokens, 0.1)

    def safely(*tensors):
        energy, tokens = network_of(*tensors)
        return energy.move(tokens)

    inputs = tuple(tensor.requires_grad_() for tensor in tensors)
    for function in (level, moved, safely):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(moved, inputs, fast_mode=True)


def test_half_precision_is_computed_in_single():
    energy = EnergyTransformer.create(*(each.bfloat16() for each in weights()))
    wide = EnergyTransformer.create(*(each.bfloat16().double() for each in weights()), scale=energy.scale.double())
    tokens = draw(2, 5, 6, seed=9).bfloat16()
    state = energy.normalise(tokens)
    assert state.dtype == energy(state).dtype == energy.move(tokens, 0.1).dtype == torch.float32
    torch.testing.assert_close(energy(state).double(), wide(wide.normalise(tokens.double())), rtol=1e-5, atol=1e-4)
    # Roundings of the state's own dtype are no way out of the range.
    assert wide(state).isfinite().all() and wide(state.bfloat16()).isfinite().all()
    torch.testing.assert_close(energy.move(tokens, 0.1).double(), wide.move(tokens.double(), 0.1), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("way")
def test_under_transforms():
    energy, tokens = network(), draw(3, 5, 6, seed=9)
    state = energy.normalise(tokens)
    torch.testing.assert_close(torch.func.vmap(energy)(state), energy(state))
    torch.testing.assert_close(torch.func.vmap(energy.force)(state), energy.force(state))
    torch.testing.assert_close(torch.func.grad(lambda g: energy(g).sum())(state), -energy.force(state))

    key, query, memories = weights()

    def of_scale(scale):
        own = EnergyTransformer.create(key, query, memories, normalisation=energy.normalisation, scale=scale)
        return own(state)

    scales = torch.tensor([0.5, 2.0], dtype=F64)
    expected = torch.stack([network(scale=float(scale))(state) for scale in scales])
    torch.testing.assert_close(torch.func.vmap(of_scale)(scales), expected)


@pytest.mark.usefixtures("way")
@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    energy, tokens = network(keep=padding()), draw(3, 5, 6, seed=9)

    def function(tokens):
        state = energy.normalise(tokens)
        return energy(state), energy.step(state), energy.move(tokens), torch.func.grad(lambda g: energy(g).sum())(state)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(tokens), function(tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# --- what is refused -------------------------------------------------------------------------------------------------

KEY, QUERY, MEMORIES = weights()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: EnergyTransformer.create(KEY, QUERY[:2], MEMORIES), ValueError, r"\(3, 4, 6\) and \(2, 4, 6\)"),
        (lambda: EnergyTransformer.create(KEY, QUERY, MEMORIES[:, :5]), ValueError, r"\(M, 6\), got \(10, 5\)"),
        (
            lambda: EnergyTransformer.create(KEY.long(), QUERY, MEMORIES),
            TypeError,
            "key must be a floating-point tensor",
        ),
        (lambda: network(scale=-1.0), ValueError, "scale must be positive"),
        (lambda: network(scale=torch.ones(2)), ValueError, r"one for each of 3 heads, got \(2,\)"),
        (lambda: network(keep=torch.ones(2, 5)), TypeError, "keep must be a boolean tensor"),
        (lambda: network(keep=torch.tensor(True)), ValueError, r"keep must have shape \(\*batch, n\)"),
        (
            lambda: EnergyTransformer.create(KEY, QUERY, MEMORIES, normalisation=LayerNorm.create(torch.ones(2))),
            ValueError,
            r"one gain and a bias of 6 numbers, got shapes \(2,\)",
        ),
        (
            lambda: EnergyTransformer.create(KEY, QUERY, MEMORIES, normalisation=3),
            TypeError,
            "must be a LayerNorm, got int",
        ),
        (lambda: network()(draw(5, 4)), ValueError, r"\(\*queries, n, 6\), got \(5, 4\)"),
        (lambda: network(keep=padding())(draw(2, 5, 6)), ValueError, r"\(3,\) \+ \(\*queries, 5, 6\), got \(2, 5, 6\)"),
        (lambda: network()(torch.ones(5, 6, dtype=torch.long)), TypeError, "got a tensor of torch.int64"),
        (lambda: network().normalise(torch.ones(5, 6, dtype=torch.long)), TypeError, "got a tensor of torch.int64"),
        (lambda: network().step(draw(5, 6), damping=1.5), ValueError, r"\(0, 1\] for this EnergyTransformer, got 1.5"),
        (lambda: network().move(draw(5, 6), -0.1), ValueError, "at least 0, got -0.1"),
        (lambda: network().move(draw(5, 6), "0.1"), TypeError, "got str"),
        (lambda: network().move(draw(5, 6), draw(4)), ValueError, r"one for each token, \(5,\), got \(4,\)"),
        (lambda: network().flow(draw(5, 6), steps=-1), ValueError, "at least 0, got -1"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
