"""`massieu.nn.ImplicitHeads` against hundreds of unrolled iterations and what theory says of its fixed points (B12)."""

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch import nn

from massieu.errors import ConvergenceError
from massieu.nn import Attention, ImplicitHeads
from massieu.solve import Status


def layer(heads=2, **options):
    """Attention with a bias that is not 0."""
    torch.manual_seed(0)
    module = Attention(6, heads, batch_first=True, dtype=torch.float64, heads=ImplicitHeads(**options))
    nn.init.normal_(module.in_proj_bias, std=0.3)
    return module


def projected(module, *tensors):
    """The projections of queries, and of keys, before they are cut into heads."""
    weights, biases = module.in_proj_weight.chunk(2), module.in_proj_bias.chunk(2)
    return [tensor @ weight.T + bias for tensor, weight, bias in zip(tensors, weights, biases, strict=False)]


def by_head(module, *tensors):
    return [tensor.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for tensor in projected(module, *tensors)]


def solved(module, *tensors, **masks):
    return module.heads.solve(*module.project(*tensors), **masks)


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(2, count, 6, dtype=dtype, requires_grad=True) for count in (4, 7)]


def unrolled(module, query, key, alpha, scale, log_weight=0.0, count=400):
    """The same by iterating explicit matrices."""
    q, k = by_head(module, query, key)
    z = q
    for _ in range(count):
        z = (1 - alpha) * q + alpha * torch.softmax(scale * z @ k.mT + log_weight, -1) @ k
    return module.out_proj(z.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_outputs_and_gradients_are_those_of_many_iterations(alpha):
    module, (query, key) = layer(alpha=alpha, scale=nn.Parameter(torch.tensor([0.5, 1.1]))), inputs()
    mask = torch.randn(4, 7).double()
    found, nothing = module(query, key, attn_mask=mask)
    assert nothing is None
    wanted = unrolled(module, query, key, alpha, module.heads.scale[:, None, None], mask)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    of = [query, key, *module.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), of) for output in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)
    assert bool(gradients[0][0].any())


def test_alpha_is_learned_within_its_interval():
    module, (query, key) = layer(alpha=torch.tensor([0.3, 0.6]), learn_alpha=True, scale=0.7), inputs()
    torch.testing.assert_close(module.heads.alpha, torch.tensor([0.3, 0.6]).double(), rtol=1e-6, atol=0)
    found, _ = module(query, key)
    wanted = unrolled(module, query, key, module.heads.alpha[:, None, None], 0.7)
    got, want = (torch.autograd.grad(output.square().sum(), module.heads.pull.logit)[0] for output in (found, wanted))
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.medium
def test_second_derivatives():
    module = Attention(2, 1, batch_first=True, dtype=torch.float64, heads=ImplicitHeads(alpha=0.5, scale=0.8))
    function = lambda query, key: module(query, key)[0]  # noqa: E731
    query, key = (torch.randn(1, count, 2, dtype=torch.float64, requires_grad=True) for count in (2, 3))
    check_derivatives(function, (query, key))


def test_the_solution_is_a_fixed_point_and_says_so():
    module, (query, key) = layer(scale=1.0), inputs()
    found = solved(module, query, key)
    assert found.value.shape == (2, 2, 4, 3)
    assert bool((found.status == Status.CONVERGED).all())
    assert found.residual.max() < 1e-9
    again = unrolled(module, query, key, 0.5, 1.0)
    torch.testing.assert_close(module.out_proj(found.value.transpose(1, 2).flatten(2)), again, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_self_attention_padding_and_causality(causal):
    module, (query, _) = layer(scale=0.8), inputs()
    padding = torch.tensor([[False] * 4, [False, True, False, True]])
    found, _ = module(query, key_padding_mask=padding, is_causal=causal)
    mask = torch.zeros(2, 1, 1, 4).double().masked_fill(padding[:, None, None], -torch.inf)
    if causal:
        mask = mask + torch.full((4, 4), -torch.inf).triu(1).double()
    torch.testing.assert_close(found, unrolled(module, query, query, 0.5, 0.8, mask), rtol=1e-8, atol=1e-9)


def test_without_keys_the_query_is_kept():
    module, (query, key) = layer(alpha=0.25), inputs()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1] = True
    found, _ = module(query, key, key_padding_mask=padding)
    torch.testing.assert_close(found[1], module.out_proj(0.75 * projected(module, query[1])[0]))
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(found.sum(), [query, key]))


def test_length_first_and_other_key_sizes():
    torch.manual_seed(0)
    module = Attention(6, 2, kdim=5, heads=ImplicitHeads())
    query, key = torch.randn(4, 2, 6), torch.randn(7, 2, 5)
    found, _ = module(query, key)
    module.batch_first = True
    torch.testing.assert_close(found.transpose(0, 1), module(query.transpose(0, 1), key.transpose(0, 1))[0])


def test_items_do_not_depend_on_their_batch_mates():
    module, (query, key) = layer(scale=2.0).float(), inputs(torch.float32)
    together, _ = module(query, key)
    for item in (slice(0, 1), slice(1, 2)):
        torch.testing.assert_close(together[item], module(query[item], key[item])[0], rtol=1e-5, atol=1e-5)


BOUNDED = {"one": {"alpha": 0.9}, "a head": {"alpha": torch.tensor([0.2, 0.95]), "scale": 3.0}}


def bounded(options):
    """A module whose keys are all too long."""
    module = layer(**options, max_lipschitz=0.7)
    with torch.no_grad():
        module.in_proj_weight[6:].mul_(20)
    return module


@every_row("name", BOUNDED)
def test_the_lipschitz_constant_is_kept_whatever_the_weights(name):
    options = BOUNDED[name]
    module = bounded(options)
    query, key = inputs()
    found = solved(module, query, key)
    assert found.converged.all()
    alpha = torch.as_tensor(options["alpha"]).double().reshape(-1, 1, 1)
    queries, keys = by_head(module, query, key)
    scale = options.get("scale", keys.shape[-1] ** -0.5)
    drawn_in = keys * (0.7 / (alpha * scale)).sqrt() / keys.norm(dim=-1, keepdim=True)  # all are too long

    def step(z):
        return (1 - alpha) * queries + alpha * torch.softmax(scale * z @ drawn_in.mT, -1) @ drawn_in

    torch.testing.assert_close(step(found.value), found.value, rtol=0, atol=1e-6)
    start = found.value.detach() + 30 * torch.randn(found.value.shape, dtype=torch.float64)
    first, second = step(start), step(found.value)
    ratio = (first - second).norm(dim=-1) / (start - found.value).norm(dim=-1)
    assert ratio.max() <= 0.7


@pytest.mark.slow
@every_row("name", BOUNDED)
def test_derivatives_where_keys_are_drawn_in(name):
    module = bounded(BOUNDED[name])
    check_derivatives(lambda query, key: solved(module, query, key).value, inputs(), second=False)


def test_a_learned_alpha_starts_where_it_is_told():
    torch.testing.assert_close(layer(alpha=0.3, learn_alpha=True).heads.alpha, torch.full((2,), 0.3).double())


def test_a_contraction_that_holds_anyway_changes_nothing():
    query, key = inputs()
    torch.testing.assert_close(
        layer(alpha=0.1, scale=0.01, max_lipschitz=0.99)(query, key)[0],
        layer(alpha=0.1, scale=0.01)(query, key)[0],
        rtol=0,
        atol=0,
    )


def test_not_converged_is_told():
    module, (query, key) = layer(alpha=0.9, scale=3.0, max_steps=1, throw=True), inputs()
    with pytest.raises(ConvergenceError, match="residual"):
        module(query, key)
    module.heads.throw = False
    assert bool((solved(module, query, key).status == Status.MAX_STEPS).any())


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast):
    module, (query, key) = layer(scale=0.8), inputs()
    wanted, _ = module(query, key)
    dtype = torch.float32 if autocast else torch.bfloat16
    module.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, _ = module(query.to(dtype), key.to(dtype))
    torch.testing.assert_close(found.double(), wanted, rtol=0.1, atol=0.05)
    found.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.slow
def test_compiled():
    module, (query, key) = layer(scale=nn.Parameter(torch.tensor(0.8)), learn_alpha=True).float(), inputs(torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs, statuses = [], []
    for call in (module, compiled):
        module.heads.convergence = None
        outputs.append(call(query, key)[0])
        statuses.append(module.heads.convergence.status)
    assert torch.equal(*statuses)
    gradients = [torch.autograd.grad(output.square().sum(), [query, key, module.heads.scale]) for output in outputs]
    for eager, got in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


def test_wrong_numbers_and_calls():
    for options, message in (
        ({"alpha": 1.0}, r"alpha must lie in \[0, 1\), got 1.0"),
        ({"alpha": 1.0, "learn_alpha": True}, r"\(0, 1\) to be learned"),
        ({"alpha": nn.Parameter(torch.tensor(0.5))}, "learn_alpha=True trains it"),
        ({"max_lipschitz": 1.0}, "max_lipschitz must be finite, above 0 and below 1, got 1.0"),
        ({"scale": torch.ones(3)}, "one for each of 2 heads"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0"),
        ({"beta": 1.0}, "unexpected keyword"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            layer(**options)
    module, (query, key) = layer(), inputs()
    for options, message in (
        ({"dropout": 0.1}, "ImplicitHeads does not support dropout: there are no weights to drop"),
        ({"vdim": 6}, "does not support vdim: keys are the values"),
        ({"add_bias_kv": True}, "does not support add_bias_kv"),
        ({"heads": module.heads}, "this ImplicitHeads is already bound to another module"),
    ):
        with pytest.raises(ValueError, match=message):
            Attention(6, 2, **({"heads": ImplicitHeads()} | options))
    with pytest.raises(ValueError, match="ImplicitHeads uses the keys as values"):
        module(query, key, key + 1)
    with pytest.raises(ValueError, match="can return no result besides output and weights; got need_moments"):
        module(query, key, need_moments=True)
