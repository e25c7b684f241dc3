"""The Energy Transformer's energy and force against explicit sums, its padding, its derivatives (N1)."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from tests.energy.cases import F64, constant, draw
from tests.energy.transformer_cases import explicit_energy, network, padding, weights
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.rows import every_row

from massieu.energy import TransformerEnergy, mutual
from massieu.energy.activations import LayerNorm


@pytest.fixture(params=["explicit", "fused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By matrices, and as many tokens are done."""
    if request.param == "fused":
        monkeypatch.setattr(mutual, "EXPLICIT", 0)


# --- energy and force ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@every_row("count", [1, 2, 7])
def test_the_energy_is_that_of_the_formula(count):
    energy = network()
    state = energy.normalise(draw(2, count, 6, seed=9))
    for g, found in zip(state.numpy(), energy(state).tolist(), strict=True):
        expected = -0.5 * np.square(np.maximum(g @ energy.memories.numpy().T, 0)).sum()
        for key, query, scale in zip(
            *(each.numpy() for each in (energy.key_weight, energy.query_weight, energy.scale)), strict=True
        ):
            for own in range(count if count > 1 else 0):
                others = [b for b in range(count) if b != own]
                expected -= logsumexp([scale * (key @ g[b]) @ (query @ g[own]) for b in others]) / scale
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("way")
@every_row("count", [1, 2, 7])
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
    for key, query, scale in zip(energy.key_weight, energy.query_weight, energy.scale, strict=True):
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
    float32 = TransformerEnergy.create(*(each.float() for each in weights()), scale=1e4)
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
    energy, tokens = TransformerEnergy.create(*(each.float() for each in weights())), draw(5, 6, seed=9).float()
    state = energy.normalise(tokens + 3e3)
    torch.testing.assert_close(energy(state), energy(energy.normalise(tokens)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("padded", [True, False])
def test_memory_is_linear_in_tokens(padded):
    count = 1024
    keep = torch.arange(count).unsqueeze(0) < 1000 if padded else None
    energy = network(heads=1, keep=keep)
    tokens = draw(1, count, 6).requires_grad_()
    with LargestTensor() as largest:
        path = energy.flow(tokens, steps=1, step_size=0.1)
        path.states[-1].square().sum().backward()
    assert largest.numbers <= 64 * count


# --- derivatives, precision, transforms ------------------------------------------------------------------------------


@pytest.mark.medium
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
        return TransformerEnergy.create(
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

    for function in (level, moved, safely):
        check_derivatives(function, tensors, second=function is moved)


def test_half_precision_is_computed_in_single():
    energy = TransformerEnergy.create(*(each.bfloat16() for each in weights()))
    wide = TransformerEnergy.create(*(each.bfloat16().double() for each in weights()), scale=energy.scale.double())
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
        own = TransformerEnergy.create(key, query, memories, normalisation=energy.normalisation, scale=scale)
        return own(state)

    scales = torch.tensor([0.5, 2.0], dtype=F64)
    expected = torch.stack([network(scale=float(scale))(state) for scale in scales])
    torch.testing.assert_close(torch.func.vmap(of_scale)(scales), expected)


@pytest.mark.slow
def test_compiled(monkeypatch):
    """The fused way; the suite of energies compiles the explicit one."""
    monkeypatch.setattr(mutual, "EXPLICIT", 0)
    torch._dynamo.reset()
    energy, tokens = network(keep=padding()), draw(3, 5, 6, seed=9)

    def function(tokens):
        state = energy.normalise(tokens)
        return energy(state), energy.move(tokens), torch.func.grad(lambda g: energy(g).sum())(state)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(tokens), function(tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# --- what is refused -------------------------------------------------------------------------------------------------

KEY, QUERY, MEMORIES = weights()


@every_row(
    ("call", "error", "message"),
    [
        (lambda: TransformerEnergy.create(KEY, QUERY[:2], MEMORIES), ValueError, r"\(3, 4, 6\) and \(2, 4, 6\)"),
        (lambda: TransformerEnergy.create(KEY, QUERY, MEMORIES[:, :5]), ValueError, r"\(M, 6\), got \(10, 5\)"),
        (
            lambda: TransformerEnergy.create(KEY.long(), QUERY, MEMORIES),
            TypeError,
            "key_weight must be a floating-point tensor",
        ),
        (lambda: network(scale=-1.0), ValueError, "scale must be positive"),
        (lambda: network(scale=torch.ones(2)), ValueError, r"\(2,\) does not broadcast to the heads \(3,\)"),
        (lambda: network(keep=torch.ones(2, 5)), TypeError, "keep .* must be a boolean tensor"),
        (lambda: network(keep=torch.tensor(True)), ValueError, r"keep must have shape \(\*batch, n\)"),
        (
            lambda: TransformerEnergy.create(KEY, QUERY, MEMORIES, normalisation=LayerNorm.create(torch.ones(2))),
            ValueError,
            r"one gain and a bias of 6 numbers, got shapes \(2,\)",
        ),
        (
            lambda: TransformerEnergy.create(KEY, QUERY, MEMORIES, normalisation=3),
            TypeError,
            "must be a LayerNorm, got 3",
        ),
        (lambda: network()(draw(5, 4)), ValueError, r"queries \+ \(n, 6\).*, got \(5, 4\)"),
        (
            lambda: network(keep=padding())(draw(2, 5, 6)),
            ValueError,
            r"\(3,\) \+ queries \+ \(5, 6\).* got \(2, 5, 6\)",
        ),
        (lambda: network()(torch.ones(5, 6, dtype=torch.long)), TypeError, "got a tensor of torch.int64"),
        (lambda: network().normalise(torch.ones(5, 6, dtype=torch.long)), TypeError, "got a tensor of torch.int64"),
        (lambda: network().step(draw(5, 6), damping=1.5), ValueError, r"\(0, 1\] for this TransformerEnergy, got 1.5"),
        (lambda: network().move(draw(5, 6), -0.1), ValueError, "at least 0, got -0.1"),
        (lambda: network().move(draw(5, 6), "0.1"), TypeError, "got '0.1'"),
        (
            lambda: network().move(draw(5, 6), draw(4)),
            ValueError,
            r"\(4,\) does not broadcast to one for each token, \(5,\)",
        ),
        (lambda: network().flow(draw(5, 6), steps=-1), ValueError, "at least 0, got -1"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
