"""`massieu.nn.EntmaxHeads` against softmax, sparsemax by projection, and its own potential's gradient."""

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch import nn

from massieu.nn import Attention, EntmaxHeads

KEYWORDS = {"average_attn_weights": False, "need_potential": True}


def module(**options):
    torch.manual_seed(0)
    made = Attention(8, 2, batch_first=True, dtype=torch.float64, heads=EntmaxHeads(**options))
    for parameter in (made.in_proj_weight, made.out_proj.weight):
        nn.init.normal_(parameter)
    return made


def inputs():
    torch.manual_seed(1)
    return [torch.randn(2, count, 8, dtype=torch.float64, requires_grad=True) for count in (4, 7, 7)]


def scores(made, query, key):
    q, k = (
        (tensor @ weight.T).unflatten(-1, (2, -1)).transpose(1, 2)
        for tensor, weight in zip((query, key), made.in_proj_weight.chunk(3), strict=False)
    )
    return q @ k.mT * 0.5


def projection(point):
    """The nearest point of the simplex, by bisection for the threshold."""
    low, high = point.amax(-1, keepdim=True) - 1, point.amax(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        above = (point - middle).clamp_min(0).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (point - low).clamp_min(0)


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-12])
def test_at_one_it_is_softmax(alpha):
    made, arguments = module(alpha=alpha), inputs()
    other = Attention(8, 2, batch_first=True, dtype=torch.float64)
    other.load_state_dict(made.state_dict())
    padding = torch.arange(7).expand(2, -1) >= 5
    wanted = other(*arguments, padding, average_attn_weights=False, need_log_partition=True)
    for got, want in zip(made(*arguments, padding, **KEYWORDS), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_a_learned_alpha_starts_where_it_is_told():
    torch.testing.assert_close(module(alpha=1.25, learn_alpha=True).heads.alpha, torch.full((2,), 1.25).double())


def test_at_two_weights_are_the_projection_to_the_simplex():
    made, (query, key, value) = module(alpha=2.0), inputs()
    _, weights, potential = made(query, key, value, **KEYWORDS)  # pyright: ignore[reportAssignmentType]
    z = scores(made, query, key)
    wanted = projection(z)
    torch.testing.assert_close(weights, wanted, rtol=1e-10, atol=1e-12)
    assert bool((weights == 0).any())
    # Ω*(z) = max p·z + (1 − ‖p‖²)/2 over the simplex.
    torch.testing.assert_close(potential, (wanted * z).sum(-1) + (1 - wanted.square().sum(-1)) / 2)


def test_alpha_may_be_each_heads_own_and_changes_the_output():
    made, arguments = module(alpha=torch.tensor([1.0, 2.0])), inputs()
    weights = made(*arguments, average_attn_weights=False)[1]
    z = scores(made, *arguments[:2])
    torch.testing.assert_close(weights[:, 0], torch.softmax(z[:, 0], -1))
    torch.testing.assert_close(weights[:, 1], projection(z[:, 1]))


@pytest.mark.parametrize("need_potential", [True, False])
def test_learned_alpha_and_scale_have_the_right_gradient(need_potential):
    made = module(alpha=1.4, learn_alpha=True, scale=nn.Parameter(torch.tensor([0.5, 0.9]).double()))
    torch.testing.assert_close(made.heads.alpha, torch.full((2,), 1.4).double(), rtol=1e-6, atol=0)
    arguments = [tensor.detach() for tensor in inputs()]

    def function(logit, scale):
        parameters = {"heads.order.logit": logit, "heads.scale": scale}
        keywords = {"need_potential": need_potential}
        return [x for x in torch.func.functional_call(made, parameters, tuple(arguments), keywords) if x is not None]

    check_derivatives(function, (made.heads.order.logit, made.heads.scale), second=False)


def test_masks_causality_and_rows_without_a_key():
    made, (query, key, value) = module(alpha=1.5), inputs()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:], padding[1] = True, True
    output, weights, potential = made(query, key, value, padding, **KEYWORDS)  # pyright: ignore[reportAssignmentType]
    short = made(query[:1], key[:1, :4], value[:1, :4])
    torch.testing.assert_close(output[:1], short[0])
    assert not weights[1].any()
    assert bool((potential[1] == -torch.inf).all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(output.sum(), [query, key, value]))
    causal = made(query, query, query, is_causal=True, average_attn_weights=False)[1]
    assert not causal.triu(1).any()
    torch.testing.assert_close(causal.sum(-1), torch.ones(2, 2, 4).double())


def test_bfloat16_and_vmap():
    made, arguments = module(alpha=1.5), [tensor.detach() for tensor in inputs()]
    wanted = made(*arguments)[0]
    torch.testing.assert_close(torch.func.vmap(lambda *x: made(*x)[0])(*arguments), wanted)
    found = made.bfloat16()(*(tensor.bfloat16() for tensor in arguments))[0]
    torch.testing.assert_close(found.double(), wanted, rtol=0.1, atol=0.3)


@pytest.mark.slow
def test_compiled():
    made, arguments = module(alpha=1.5, learn_alpha=True).float(), [tensor.detach().float() for tensor in inputs()]
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    outputs = [call(*arguments)[0] for call in (made, compiled)]
    gradients = [
        torch.autograd.grad(out.square().sum(), [made.heads.order.logit, made.in_proj_weight]) for out in outputs
    ]
    for eager, got in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


@every_row(
    ("options", "message"),
    [
        ({"alpha": 0.5}, r"alpha must lie in \[1, inf\), got 0.5"),
        ({"alpha": 3.0, "learn_alpha": True}, r"alpha must lie in \(1, 2\) to be learned, got 3.0"),
        ({"alpha": "2"}, "alpha must be a number, got '2'"),
        ({"scale": float("nan")}, "scale must be positive and finite"),
    ],
)
def test_what_cannot_be_made(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Attention(8, 2, heads=EntmaxHeads(**options))
