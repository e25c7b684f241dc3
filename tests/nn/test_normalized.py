"""`massieu.nn.NormalizedHeads` against explicit matrices, its potential, and power iteration (B18)."""

import pytest
import torch
from tests.support.rows import every_row
from torch import nn

from massieu.nn import Attention, NormalizedHeads


def module(**options):
    torch.manual_seed(0)
    made = Attention(8, 2, batch_first=True, dtype=torch.float64, heads=NormalizedHeads(), **options)
    nn.init.normal_(made.heads.gain)
    nn.init.normal_(made.heads.level)
    return made


def inputs():
    torch.manual_seed(1)
    return [torch.randn(2, count, 8, dtype=torch.float64, requires_grad=True) for count in (7, 7, 7)]


def explicit(made, query, key, value, shares):
    """By the matrix of weights, shares (…, L, N) summing to one."""
    q, k, v = (
        (tensor @ weight.T).unflatten(-1, (made.num_heads, -1)).transpose(1, 2)
        for tensor, weight in zip((query, key, value), made.in_proj_weight.chunk(3), strict=True)
    )
    z = q @ k.mT / made.head_dim**0.5
    mean = (shares * z).sum(-1, keepdim=True)
    sigma = ((shares * z.square()).sum(-1, keepdim=True) - mean.square() + made.heads.eps).sqrt()
    gain, level = made.heads.gain[:, None, None], made.heads.level[:, None, None]
    weights = shares * (gain * (z - mean) / sigma + level)
    return made.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights, (gain * sigma + level * mean).squeeze(-1)


def masks(kind):
    padding = torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])
    if kind == "padding":
        return {"key_padding_mask": padding}, (~padding).double()[:, None, None]
    if kind == "log-weights":
        weight = torch.randn(2, 7).double()
        return {"key_padding_mask": weight}, weight.exp()[:, None, None]
    if kind == "causal":
        return {"is_causal": True, "key_padding_mask": padding}, (~padding).double()[:, None, None].tile(7, 1).tril()
    return {}, torch.ones(1, 7).double()


@every_row("kind", ["none", "padding", "log-weights", "causal"])
@every_row("need_weights", [True, False])
def test_equals_the_matrix_of_weights(kind, need_weights):
    made, arguments = module(), inputs()
    given, weight = masks(kind)
    keywords = {"need_weights": need_weights, "average_attn_weights": False, "need_potential": True}
    found = made(*arguments, **given, **keywords)
    wanted = explicit(made, *arguments, weight / weight.sum(-1, keepdim=True))
    for got, want in zip(found, wanted, strict=True):
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    if need_weights:
        torch.testing.assert_close(found[1].sum(-1), made.heads.level[:, None].expand(2, 2, 7))
    of = [*arguments, made.heads.gain, made.heads.level]
    gradients = [torch.autograd.grad(out[0].square().sum(), of) for out in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_zero_key_is_one_more_key_also_when_causal(need_weights):
    made, arguments = module(add_zero_attn=True), inputs()
    found = made(*arguments, is_causal=True, need_weights=need_weights)[0]
    other = module(bias=False)
    other.load_state_dict({name: made.state_dict()[name] for name in other.state_dict()})
    seen = torch.cat([torch.ones(7, 7).double().tril(), torch.ones(7, 1).double()], 1)
    padded = [arguments[0], *(torch.cat([x, torch.zeros(2, 1, 8).double()], 1) for x in arguments[1:])]
    torch.testing.assert_close(found, explicit(other, *padded, seen / seen.sum(-1, keepdim=True))[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_output_is_the_gradient_of_the_potential(need_weights):
    made = Attention(8, 1, bias=False, batch_first=True, dtype=torch.float64, heads=NormalizedHeads())
    with torch.no_grad():
        made.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        made.out_proj.weight.copy_(torch.eye(8))
        made.heads.gain.fill_(1.3)
        made.heads.level.fill_(0.4)
    query, key, _ = inputs()
    output, _, potential = made(query, key, key, need_weights=need_weights, need_potential=True)
    (gradient,) = torch.autograd.grad(potential.sum(), query)
    torch.testing.assert_close(gradient * 8**0.5, output, rtol=1e-10, atol=1e-10)


def test_iterated_it_finds_the_first_principal_component():
    """q ← Σ̂q/σ: power iteration; the limit has norm √λ (B18)."""
    made = Attention(6, 1, bias=False, batch_first=True, dtype=torch.float64, heads=NormalizedHeads(eps=1e-24))
    with torch.no_grad():
        made.in_proj_weight.copy_(torch.eye(6).repeat(3, 1))
        made.out_proj.weight.copy_(torch.eye(6))
        made.heads.level.zero_()
    torch.manual_seed(0)
    keys = torch.randn(1, 40, 6).double() * torch.tensor([3.0, 1, 1, 1, 1, 0.5])
    values, vectors = torch.linalg.eigh(torch.cov(keys[0].T, correction=0))
    state = torch.randn(1, 1, 6).double()
    made.requires_grad_(False)
    for _ in range(100):
        state = made(state, keys, keys, need_weights=False)[0]
    assert float(state.norm()) == pytest.approx(values[-1].sqrt().item(), rel=1e-10)
    assert abs(float(state[0, 0] @ vectors[:, -1]) / float(state.norm())) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_without_a_key_and_zero_queries(need_weights):
    made, (query, key, value) = module(), inputs()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1] = True
    keywords = {"need_weights": need_weights, "need_potential": True}
    output, _, potential = made(0 * query, key, value, padding, **keywords)
    assert torch.equal(output[1], made.out_proj.bias.expand(7, -1))
    assert not potential[1].any()
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(first.sum(), [query, key, value]))


@pytest.mark.parametrize("need_weights", [True, False])
def test_bfloat16_and_vmap(need_weights):
    made, arguments = module(), [tensor.detach() for tensor in inputs()]
    call = lambda *x: made(*x, need_weights=need_weights)[0]  # noqa: E731
    wanted = call(*arguments)
    torch.testing.assert_close(torch.func.vmap(call)(*arguments), wanted)
    found = made.bfloat16()(*(tensor.bfloat16() for tensor in arguments), need_weights=need_weights)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("need_weights", [True, False])
def test_compiled(need_weights):
    torch._dynamo.reset()
    made, arguments = module(), [tensor.detach() for tensor in inputs()]
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    wanted = made(*arguments, need_weights=need_weights)[0]
    torch.testing.assert_close(compiled(*arguments, need_weights=need_weights)[0], wanted)


def test_eps_must_be_positive():
    with pytest.raises(ValueError, match="eps must be positive and finite, got 0"):
        NormalizedHeads(eps=0)
