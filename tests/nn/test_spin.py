"""`massieu.nn.SpinAttention` against explicit loops, and what theory promises of its states (B16)."""

import math

import pytest
import torch
from tests.support.rows import one_in, some_slow
from torch import nn

from massieu.energy import KineticSpins
from massieu.errors import ConvergenceError
from massieu.measures import Sphere
from massieu.nn import SpinAttention


def layer(**options):
    torch.manual_seed(0)
    return SpinAttention(8, 2, **options).double()


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)


def by_hand(module, tokens, beta, steps, exact=False, hidden=None):
    """First order, with explicit matrices; `hidden`: (…, L, L), True where token j does not act on token i."""
    drive, query, key = (
        projection(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        for projection in (module.drive_proj, module.query_proj, module.key_proj)
    )
    scores = query @ key.mT / 2
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    coupling = torch.softmax(scores, -1).nan_to_num(0.0)
    theta = drive
    for _ in range(steps):
        theta = drive + coupling @ phi(theta, beta, exact)
    return module.out_proj(phi(theta, beta, exact).transpose(1, 2).flatten(2))


def phi(theta, beta, exact):
    if exact:
        return Sphere.create(torch.tensor(1.0).double(), dim=4).mean(beta * theta)
    return beta * theta / (1 + (1 + beta**2 * theta.square().sum(-1, keepdim=True)).sqrt())


@one_in(2, {"exact": [True, False], "steps": [1, 3]})
def test_first_order_is_its_loop(steps, exact):
    scale = nn.Parameter(torch.tensor([0.7, 1.6]))
    module, tokens = layer(steps=steps, exact=exact, scale=scale), inputs()
    found, wanted = module(tokens), by_hand(module, tokens, module.scale[:, None, None], steps, exact)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    of = [tokens, *module.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), of) for output in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_the_fixed_point_is_that_of_many_steps_with_its_gradients():
    module, tokens = layer(steps=None, scale=1.5), inputs()
    found, wanted = module(tokens), by_hand(module, tokens, 1.5, 200)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    of = [tokens, *module.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), of) for output in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.medium
@some_slow("steps", [1, 2, None], 2)
def test_second_order_solves_its_equation(steps):
    module, tokens = layer(order="second", steps=steps, scale=1.2), inputs()
    model = module.model(tokens)
    assert isinstance(model, KineticSpins)
    before = model.drive
    for _ in range((steps or 25) - 1):
        before = model.step(before, "second")
    state = module.state(model)
    echo = state - model.field(before)
    first = SpinAttention.state(layer(steps=steps, scale=1.2), model)
    assert (state - first).abs().max() > 1e-2  # the echo does something
    torch.testing.assert_close(echo, model._echo(state, before, model.field(before)), rtol=0, atol=1e-8)
    module(tokens).square().sum().backward()
    assert bool(tokens.grad.isfinite().all())


def test_the_echo_draws_spins_back():
    """For equal parameters, spins in parallel are shorter to second order: a spin does not add to its own field."""
    module = layer(steps=None)
    tokens = torch.ones(1, 5, 8).double()
    with torch.no_grad():
        lengths = {}
        for order in ("first", "second"):
            module.order = order
            model = module.model(tokens)
            lengths[order] = model.mean(module.state(model)).norm(dim=-1)
    assert bool((lengths["second"] < lengths["first"]).all())


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_causality(causal):
    module, tokens = layer(steps=2), inputs()
    padding = torch.tensor([[False] * 5, [False, True, False, True, True]])
    found = module(tokens, key_padding_mask=padding, is_causal=causal)
    hidden = padding[:, None, None, :].expand(2, 2, 5, 5)
    if causal:
        hidden = hidden | torch.ones(5, 5).triu(1).bool()
    torch.testing.assert_close(found, by_hand(module, tokens, 1.0, 2, hidden=hidden), rtol=1e-10, atol=1e-12)
    as_mask = module(tokens, attn_mask=hidden.flatten(0, 1))
    torch.testing.assert_close(as_mask, found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["first", "second"])
def test_a_causal_spin_does_not_see_the_future(order):
    module, tokens = layer(steps=2, order=order), inputs().detach()
    changed = tokens.clone()
    changed[:, 3:] += 1.0
    found = [module(each, is_causal=True) for each in (tokens, changed)]
    torch.testing.assert_close(found[0][:, :3], found[1][:, :3], rtol=0, atol=1e-9)
    assert (found[0][:, 3:] - found[1][:, 3:]).abs().max() > 1e-3


def test_a_spin_on_which_nothing_acts_is_alone_with_its_drive():
    module, tokens = layer(steps=None), inputs()
    padding = torch.ones(2, 5, dtype=torch.bool)
    drive = module.drive_proj(tokens).unflatten(-1, (2, 4))
    wanted = module.out_proj(phi(drive, 1.0, False).flatten(2))
    for order in ("first", "second"):
        module.order = order
        found = module(tokens, padding)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert bool(torch.autograd.grad(found.sum(), tokens)[0].isfinite().all())


def test_tokens_first_or_batch_first_and_equivariance():
    module, tokens = layer(steps=2, order="second"), inputs()
    found = module(tokens)
    order = torch.tensor([3, 1, 0, 4, 2])
    torch.testing.assert_close(module(tokens[:, order]), found[:, order], rtol=0, atol=1e-9)
    module.batch_first = False
    torch.testing.assert_close(module(tokens.transpose(0, 1)).transpose(0, 1), found)


def test_a_step_brings_states_nearer():
    module, tokens = layer(scale=1.8), inputs()
    model = module.model(tokens)
    torch.testing.assert_close(model.lipschitz, torch.full((2, 2), 0.9).double())
    state, fixed = model.drive, model.stationary().value
    for _ in range(10):
        after = model.step(state)
        distance = [(each - fixed).norm(dim=-1).amax(-1) for each in (state, after)]
        assert bool((distance[1] <= 0.9 * distance[0] + 1e-9).all())
        state = after


@one_in(3, {"order": ["first", "second"], "steps": [1, None], "autocast": [True, False]})
def test_half_precision(autocast, steps, order):
    module, tokens = layer(steps=steps, order=order), inputs()
    wanted = module(tokens)
    dtype = torch.float32 if autocast else torch.bfloat16
    module.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = module(tokens.to(dtype))
        assert module.model(tokens.to(dtype)).drive.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0.1, atol=0.05)
    found.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


@pytest.mark.slow
def test_compiled():
    scale = nn.Parameter(torch.tensor(1.2))
    module, tokens = layer(scale=scale, steps=None, order="second").float(), inputs(torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs = [call(tokens, is_causal=True) for call in (module, compiled)]
    gradients = [torch.autograd.grad(output.square().sum(), [tokens, module.scale]) for output in outputs]
    for eager, got in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


def test_not_converged_is_told():
    module, tokens = layer(steps=None, scale=1.9, max_steps=1, throw=True), inputs()
    with pytest.raises(ConvergenceError, match="residual"):
        module(tokens)


def test_wrong_numbers_and_calls():
    for options, message in (
        ({"num_heads": 3}, "multiple of num_heads, got 8 and 3"),
        ({"num_heads": 4}, "at least 3 dimensions, got 2"),
        ({"order": "third"}, "'first' or 'second', got 'third'"),
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"scale": -1.0}, "positive and finite, got -1.0"),
        ({"scale": None}, "got None"),
        ({"scale": math.nan}, "finite"),
        ({"scale": torch.ones(3)}, "one for each of 2 heads"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SpinAttention(8, **({"num_heads": 2} | options))
    module = layer()
    for tokens, message in (
        (torch.zeros(5, 8), r"\(batch, length, 8\), got \(5, 8\)"),
        (torch.zeros(2, 5, 7), r"got \(2, 5, 7\)"),
        (torch.zeros(2, 5, 8, dtype=torch.long), "tokens must be a floating-point tensor, got a tensor of torch.int64"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            module(tokens)
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        module(inputs(), torch.zeros(2, 4, dtype=torch.bool))
