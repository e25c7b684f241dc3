"""`massieu.nn.TAPHeads` against Glauber's dynamics, spin models, linear algebra and unrolled iterations (B13, B14)."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import one_in
from torch import nn

from massieu.energy import SpinModel
from massieu.errors import ConvergenceError
from massieu.measures import Gaussian, Spin
from massieu.nn import Attention, TAPHeads
from massieu.solve import Status


def layer(heads=2, **options):
    """Attention with a bias that is not 0."""
    torch.manual_seed(0)
    module = Attention(6, heads, batch_first=True, dtype=torch.float64, heads=TAPHeads(**options))
    nn.init.normal_(module.in_proj_bias, std=0.3)
    return module


def inputs(length=5, dtype=torch.float64):
    return torch.randn(2, length, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def projected(module, tokens):
    """Queries, keys and fields, before they are cut into heads."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    return [tokens @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]


def by_head(module, tokens):
    return [part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in projected(module, tokens)]


def solved(module, tokens, **options):
    return module.heads.solve(*module.project(tokens), **options)


def couplings(module, tokens, log_weight=0.0):
    query, key, _ = by_head(module, tokens)
    scores = query @ key.mT / math.sqrt(query.shape[-1]) + log_weight
    scores = scores.masked_fill(torch.eye(tokens.shape[1], dtype=torch.bool), -torch.inf)
    alone = (scores == -torch.inf).all(-1, keepdim=True)
    return module.heads.strength * torch.softmax(scores.masked_fill(alone, 0.0), -1).masked_fill(alone, 0.0)


def unrolled(module, tokens, log_weight=0.0):
    """300 plain iterations with explicit matrices."""
    field, coupling = by_head(module, tokens)[2], couplings(module, tokens, log_weight)
    mean = torch.zeros_like(field)
    for _ in range(300):
        onsager = mean * (coupling.square() @ (1 - mean.square())) if module.heads.order == "tap" else 0.0
        mean = torch.tanh(field + coupling @ mean - onsager)
    return module.out_proj(mean.transpose(1, 2).flatten(2))


@pytest.mark.medium
@one_in(2, {"order": ["mean_field", "tap"], "causal": [True, False]})
def test_unrolled_iterations_with_masks_and_their_gradients(order, causal):
    module, tokens = layer(order=order, strength=0.6), inputs().requires_grad_()
    padding = torch.tensor([[False] * 5, [False, True, False, False, True]])
    mask = torch.zeros(2, 1, 1, 5).double().masked_fill(padding[:, None, None], -torch.inf)
    if causal:
        mask = mask + torch.full((5, 5), -torch.inf).triu(1).double()
    found, nothing = module(tokens, key_padding_mask=padding, is_causal=causal)
    wanted = unrolled(module, tokens, mask)
    assert nothing is None
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    gradients = [torch.autograd.grad(output.sin().sum(), [tokens, *module.parameters()]) for output in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def glauber(field, coupling):
    """Mean spins in the stationary state: at each step one spin, drawn at random, is drawn anew in its local field."""
    states = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(field)))).double()
    place = {tuple(state.tolist()): index for index, state in enumerate(states)}
    transition = torch.zeros(len(states), len(states)).double()
    for index, state in enumerate(states):
        for spin in range(len(field)):
            mean = torch.tanh(field[spin] + coupling[spin] @ state)
            for sign in (-1.0, 1.0):
                after = state.clone()
                after[spin] = sign
                transition[index, place[tuple(after.tolist())]] += (1 + sign * mean) / 2 / len(field)
    system = torch.cat([transition.T - torch.eye(len(states)).double(), torch.ones(1, len(states)).double()])
    stationary = torch.linalg.lstsq(
        system, torch.eye(len(states) + 1)[-1:].T.double(), driver="gelsd"
    ).solution.flatten()
    return stationary @ states


@pytest.mark.medium
@one_in(2, {"order, power": [("mean_field", 2), ("tap", 3)], "causal": [True, False]})
def test_asymmetric_couplings_are_those_of_glaubers_dynamics(order, power, causal):
    errors = []
    for strength in (0.4, 0.1):
        module, tokens = layer(6, order=order, strength=strength), inputs()[:1]
        found = solved(module, tokens, is_causal=causal).value[0, 0, :, 0]
        field = by_head(module, tokens)[2][0, 0, :, 0]
        mask = torch.full((5, 5), -torch.inf).triu(1).double() if causal else 0.0
        coupling = couplings(module, tokens, mask)[0, 0]
        assert (coupling - coupling.T).abs().max() > 0.1 * strength
        errors.append((found - glauber(field, coupling)).norm())
    assert power - 0.3 < torch.log(errors[0] / errors[1]) / math.log(4) < power + 1


@pytest.mark.medium
@pytest.mark.parametrize("order", ["mean_field", "tap"])
def test_symmetric_couplings_are_a_spin_model(order):
    module, tokens = layer(order=order, strength=0.4), inputs()
    drawn = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(2)).double() / 3
    found = solved(module, tokens, coupling=drawn + drawn.mT).value
    field = by_head(module, tokens)[2]
    for item, head in ((0, 1), (1, 0)):
        coupling = 0.4 * (drawn + drawn.mT)[0, head]
        model = SpinModel.create(Spin.create(field[item, head].detach()), coupling - coupling.diagonal().diag())
        torch.testing.assert_close(found[item, head], getattr(model, order)().mean, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", ["mean_field", "tap"])
def test_gaussian_sites_solve_a_linear_system_whatever_the_order(order):
    module, tokens = layer(site="gaussian", order=order, strength=0.7), inputs()
    field, coupling = by_head(module, tokens)[2], couplings(module, tokens)
    wanted = torch.linalg.solve(torch.eye(5).double() - coupling, field)
    torch.testing.assert_close(solved(module, tokens).value, wanted, rtol=1e-8, atol=1e-9)
    # Symmetric couplings: adaptive TAP of the spin model, whose means the Onsager term leaves alone (trap 31).
    symmetric = (coupling + coupling.mT) / (2 * 0.7)
    found = solved(module, tokens, coupling=symmetric).value[0, 0].detach()
    site = Gaussian.create(field[0, 0].detach(), torch.ones(5).double())
    model = SpinModel.create(site, 0.7 * symmetric[0, 0].detach())
    torch.testing.assert_close(found, model.adaptive_tap().mean, rtol=1e-8, atol=1e-8)


@pytest.mark.medium
def test_second_derivatives():
    module = Attention(2, 1, batch_first=True, dtype=torch.float64, heads=TAPHeads(strength=0.5))
    function = lambda tokens: module(tokens)[0]  # noqa: E731
    tokens = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    check_derivatives(function, (tokens,))


def test_strength_and_scale_train_one_a_head():
    strength, scale = (nn.Parameter(torch.tensor(pair).double()) for pair in ([0.3, 0.6], [1.0, 2.0]))
    module, tokens = layer(strength=strength, scale=scale), inputs()
    step = 1e-6

    def loss():
        return module(tokens)[0].sin().sum()

    gradients = torch.autograd.grad(loss(), [strength, scale])
    for parameter, gradient in zip((strength, scale), gradients, strict=True):
        for head in range(2):
            values = []
            for move in (step, -step):
                with torch.no_grad():
                    parameter[head] += move
                    values.append(loss())
                    parameter[head] -= move
            torch.testing.assert_close(gradient[head], (values[0] - values[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_token_alone_keeps_its_own_spins():
    for site, own in (("spin", torch.tanh), ("gaussian", nn.Identity())):
        module, tokens = layer(site=site), inputs().requires_grad_()
        for found in (
            module(tokens, is_causal=True)[0][:, 0],
            module(tokens, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))[0][:, 0],
            module(tokens[:, :1])[0][:, 0],
        ):
            torch.testing.assert_close(found, module.out_proj(own(projected(module, tokens[:, 0])[2])))
            assert bool(torch.autograd.grad(found.sum(), tokens)[0].isfinite().all())


def test_length_first_and_batch_mates():
    module, tokens = layer(), inputs()
    together, _ = module(tokens)
    for item in (slice(0, 1), slice(1, 2)):
        torch.testing.assert_close(together[item], module(tokens[item])[0], rtol=1e-9, atol=1e-9)
    module.batch_first = False
    torch.testing.assert_close(module(tokens.transpose(0, 1))[0].transpose(0, 1), together)


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_solved_in_float32(autocast):
    module, tokens = layer(), inputs()
    wanted, _ = module(tokens)
    dtype = torch.float32 if autocast else torch.bfloat16
    module.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, _ = module(tokens.to(dtype))
        assert solved(module, tokens.to(dtype)).value.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0.1, atol=0.05)
    found.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


def test_vmap():
    module, tokens = layer(), inputs()
    mapped = torch.func.vmap(lambda item: module(item.unsqueeze(0))[0].squeeze(0))(tokens)
    torch.testing.assert_close(mapped, module(tokens)[0], rtol=1e-9, atol=1e-9)


def test_not_converged_is_told():
    module, tokens = layer(strength=30.0, max_steps=3, throw=True), inputs()
    with pytest.raises(ConvergenceError, match="residual"):
        module(tokens)
    module.heads.throw = False
    assert bool((solved(module, tokens).status == Status.MAX_STEPS).any())


def test_wrong_numbers_and_calls():
    for options, message in (
        ({"order": "bethe"}, "order must be 'mean_field' or 'tap', got 'bethe'"),
        ({"site": "potts"}, "site must be 'spin' or 'gaussian', got 'potts'"),
        ({"strength": None}, "strength must be a number"),
        ({"strength": math.inf}, "strength must be finite"),
        ({"scale": torch.ones(3)}, "one for each of 2 heads"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            layer(**options)
    module, tokens = layer(), inputs()
    for call, message in (
        (lambda: module(tokens, tokens[:, 1:]), r"as many keys as queries, 5, got 4"),
        (lambda: module(tokens[..., :4]), r"got \(2, 5, 4\)"),
        (
            lambda: module(tokens, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool)),
            r"key_padding_mask must have shape \(2, 5\)",
        ),
        (
            lambda: solved(module, tokens, coupling=torch.ones(5, 5)),
            r"shape \(1 or batch, 1 or heads, 5, 5\), got \(5, 5\)",
        ),
        (lambda: solved(module, tokens, coupling=torch.ones(1, 1, 5, 4)), r"got \(1, 1, 5, 4\)"),
        (lambda: solved(module, tokens, coupling=[1.0]), "floating-point tensor, got list"),
        (lambda: solved(module, tokens, is_causal=True, coupling=torch.ones(1, 1, 5, 5)), "does not go with"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    module, tokens = layer(heads=1), inputs(length=3)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens, is_causal=True)[0], module(tokens, is_causal=True)[0])
