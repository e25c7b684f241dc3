"""Heads with other kernels than softmax's: against explicit matrices, divergences, and the kernels that features estimate."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import one_in, some_slow
from torch import Tensor, nn

from massieu import measures
from massieu.nn import Attention, DualLinkHeads, RandomFeatureHeads, ReLUHeads, SigmoidHeads, SoftmaxHeads
from massieu.nn.strategy import Heads, Request

MADE = {
    "sigmoid": SigmoidHeads,
    "relu": ReLUHeads,
    "positive features": lambda: RandomFeatureHeads(features=6),
    "relu features": lambda: RandomFeatureHeads(kind="relu", features=24),
    **{name: partial(DualLinkHeads, name) for name in ("gaussian", "spin", "bernoulli", "poisson", "categorical")},
}


def module(heads: Heads, **options) -> Any:
    torch.manual_seed(0)
    made = Attention(8, 2, batch_first=True, dtype=torch.float64, heads=heads, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def inputs(length: int = 7) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def kernel(heads: Heads, query: Tensor, key: Tensor) -> Tensor:
    """Unnormalised weights before masks, (B, H, L, N), or for the logistic heads logits."""
    scores = query @ key.mT / 2
    if isinstance(heads, SigmoidHeads | ReLUHeads):
        return scores + heads.bias[:, None, None]
    if isinstance(heads, RandomFeatureHeads):
        parts = []
        for x in (query / 2**0.5, key / 2**0.5):
            along = torch.einsum("bhld,hmd->bhlm", x, heads.directions)
            parts.append(along.relu() if heads.kind == "relu" else (along - x.square().sum(-1, keepdim=True) / 2).exp())
        return parts[0] @ parts[1].mT / heads.features
    # The divergence of two members in the family's own terms, written out.
    q, k = query.unsqueeze(-2), key.unsqueeze(-3)
    if heads.family == "gaussian":
        each = (q - k).square() / 2
    elif heads.family == "poisson":
        each = k.exp() * (k - q) - k.exp() + q.exp()
    elif heads.family == "categorical":
        each = k.softmax(-1) * (k.log_softmax(-1) - q.log_softmax(-1))
    else:
        double = 2 if heads.family == "spin" else 1
        p, log_p, log_q = (double * k).sigmoid(), (double * k, -double * k), (double * q, -double * q)
        log = nn.functional.logsigmoid
        each = p * (log(log_p[0]) - log(log_q[0])) + (1 - p) * (log(log_p[1]) - log(log_q[1]))
    return (-each.sum(-1) / 2).exp()


def explicit(made: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights by the matrix; `bias` is the log-weight, −inf where hidden."""
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (2, 4)).transpose(1, 2)
        for x, w, b in zip((query, key, value), made.in_proj_weight.chunk(3), made.in_proj_bias.chunk(3), strict=True)
    )
    weights = kernel(made.heads, q, k)
    if isinstance(made.heads, SigmoidHeads):
        seen = (bias > -torch.inf).sum(-1, keepdim=True).clamp_min(1).double()
        weights = torch.sigmoid(weights + bias - seen.log())
    else:
        weights = (weights + bias).relu() if isinstance(made.heads, ReLUHeads) else weights * bias.exp()
        weights = weights / weights.sum(-1, keepdim=True)
        weights = torch.where(weights.isnan(), 0.0, weights)
    return made.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def masks(kind: str) -> tuple[dict, Tensor]:
    padding = torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])
    hidden = torch.zeros(2, 7).double().masked_fill(padding, -torch.inf)[:, None, None]
    if kind == "padding":
        return {"key_padding_mask": padding}, hidden
    if kind == "log-weights":
        weight = torch.randn(2, 7).double()
        return {"key_padding_mask": weight}, weight[:, None, None]
    if kind == "per query":
        weight = torch.randn(7, 7).double()
        return {"attn_mask": weight}, weight
    if kind == "causal":
        past = torch.zeros(7, 7).double().masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        return {"is_causal": True, "key_padding_mask": padding}, past + hidden
    return {}, torch.zeros(1, 7).double()


@pytest.mark.parametrize("name", MADE)
@one_in(2, {"kind": ["none", "padding", "log-weights", "per query", "causal"], "need_weights": [True, False]})
def test_equals_the_matrix_of_weights_and_so_do_gradients(name, kind, need_weights):
    made, arguments = module(MADE[name]()), inputs()
    given, bias = masks(kind)
    found = made(*arguments, **given, need_weights=need_weights, average_attn_weights=False)
    output, weights = explicit(made, *arguments, bias=bias.expand(2, 1, 7, 7))
    torch.testing.assert_close(found[0], output, rtol=1e-9, atol=1e-10)
    if need_weights:
        torch.testing.assert_close(found[1], weights, rtol=1e-9, atol=1e-10)
    of = [*arguments, *made.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), of, allow_unused=True) for out in (found[0], output)]
    for got, want in zip(*gradients, strict=True):
        if got is not None or want is not None:
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@some_slow("name", MADE, 3)
def test_gradients_of_gradients(name):
    made = module(MADE[name]())
    arguments = [tensor.detach()[:1, :3].requires_grad_() for tensor in inputs()]
    check_derivatives(lambda *a: made(*a, need_weights=False)[0], arguments)


@pytest.mark.parametrize("name", MADE)
def test_a_query_that_sees_no_key_gets_zero(name):
    made, (query, *_) = module(MADE[name]()), inputs()
    hidden = torch.tensor([[True] * 7, [False] * 7])
    for need_weights in (True, False):
        output, weights = made(query, query, query, key_padding_mask=hidden, need_weights=need_weights)
        torch.testing.assert_close(output[0], made.out_proj.bias.expand(7, 8))
        assert bool(output.isfinite().all()) and (weights is None or not bool(weights[0].any()))
        (gradient,) = torch.autograd.grad(output.sum(), query, retain_graph=True)
        assert bool(gradient.isfinite().all())


def test_logistic_weights_are_the_gradient_of_the_potential():
    heads = SigmoidHeads()
    made = module(heads, bias=False)
    nn.init.zeros_(made.in_proj_weight)
    with torch.no_grad():
        for part in made.in_proj_weight.chunk(3):
            part.copy_(torch.eye(8))
        made.out_proj.weight.copy_(torch.eye(8))
    query, key, _ = inputs()
    output, _, potential = made(query, key, key, need_potential=True)
    (gradient,) = torch.autograd.grad(potential.sum(), query)
    torch.testing.assert_close(gradient * 2, output)  # in scale·query, scale ½


def test_weights_by_divergence_are_a_distance_for_the_gaussian_and_the_prior_does_not_move_the_spin():
    made = module(DualLinkHeads(lambda size: measures.Gaussian.create(0.0, 4.0, dim=size)))
    query, key, value = inputs()
    _, weights = made(query, key, value, average_attn_weights=False)
    q, k, _ = made.project(query, key, value)
    torch.testing.assert_close(weights, torch.softmax(-torch.cdist(q, k).square(), -1))  # ½·4·d²/2
    plain = module(DualLinkHeads("gaussian", divergence=False))
    torch.testing.assert_close(plain(query, key, value)[0], module(SoftmaxHeads())(query, key, value)[0])


def test_log_partition_of_a_dual_link_is_that_of_the_kernel():
    made = module(DualLinkHeads("spin", scale=1.0))
    query, key, value = inputs()
    _, _, level = made(query, key, value, need_weights=False, need_log_partition=True)
    q, k, _ = made.project(query, key, value)
    spin = measures.Spin.create(torch.zeros(4).double())
    divergence = -2 * kernel(made.heads, q, k).log()
    torch.testing.assert_close(level, torch.logsumexp(-divergence, -1) + spin.log_partition(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_key_beyond_the_links_range_has_no_weight(dtype):
    heads = DualLinkHeads("poisson")
    heads.bind(1, 4, dtype=dtype)
    query, key, value = (x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 1, 5, 4))
    far = key.detach().clone()
    far[:, :, 2] = 12.0  # e^12 is beyond float16, not beyond what it is computed in
    far[:, :, 3] = 1000.0
    for need_weights in (True, False):
        output = heads(query, far.requires_grad_(), value, Request(None, False, need_weights, None, 0.0)).output
        near = [x[:, :, [0, 1, 4]] for x in (key, value)]
        wanted = heads(query, *near, Request(None, False, need_weights, None, 0.0)).output
        torch.testing.assert_close(output, wanted, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
        gradients = torch.autograd.grad(output.float().sum(), [query, far, value])
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_a_scale_given_as_a_number_keeps_its_digits():
    query, key, value = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    found = []
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        heads = RandomFeatureHeads(features=6, scale=scale)
        heads.bind(1, 4, dtype=torch.float64)
        found.append(heads(query, key, value, Request(None, False, False, None, 0.0)).output)
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["positive", "relu"])
def test_features_estimate_their_kernel_within_the_standard_error(kind):
    torch.manual_seed(0)
    size, features = 3, 200_000
    heads = RandomFeatureHeads(kind=kind, features=features, scale=1.0)
    heads.bind(1, size, dtype=torch.float64)
    query, key, value = 0.4 * torch.randn(3, 1, 1, 5, size, dtype=torch.float64)
    kwargs = {"is_causal": False, "need_weights": False, "dropout": 0.0}
    found = heads(query, key, value, Request(None, extra="variance", **kwargs))
    if kind == "positive":
        exact = (query @ key.mT).exp()
    else:
        norms = query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
        angle = (query @ key.mT / norms).clamp(-1, 1).acos()
        exact = norms * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    wanted = exact @ value / exact.sum(-1, keepdim=True)
    error = found.extra.sqrt()
    assert bool(((found.output - wanted).norm(dim=-1) < 5 * error).all()) and float(error.max()) < 0.01
    level = heads(query, key, value, Request(None, extra="log_partition", **kwargs)).extra
    assert level == pytest.approx(exact.sum(-1).log(), abs=0.05)


@pytest.mark.parametrize("kind", ["positive", "relu"])
def test_the_variance_is_that_over_draws(kind):
    torch.manual_seed(0)
    draws, size = 400, 3
    heads = RandomFeatureHeads(kind=kind, features=256, scale=1.0)
    heads.bind(draws, size, dtype=torch.float64)  # each head draws its own
    query, key, value = (x.expand(1, draws, -1, -1) for x in 0.3 * torch.randn(3, 1, 1, 6, size, dtype=torch.float64))
    found = heads(query, key, value, Request(None, False, False, "variance", 0.0))
    over_draws = found.output[0].var(0).sum(-1)
    # Of 400 draws' variance the relative standard error is about √(2/400); the delta method's own error is of order 1/m.
    assert found.extra[0].mean(0) == pytest.approx(over_draws, rel=5 * (2 / draws) ** 0.5)


def test_features_reach_far_without_overflow_and_a_causal_query_is_one_of_its_prefix():
    for kind in ("positive", "relu"):
        made = module(RandomFeatureHeads(kind=kind, features=16))
        query = 40 * inputs()[0].detach()
        whole = made(query, is_causal=True, need_weights=False)[0]
        for length in (1, 3, 7):
            part = made(query[:, :length], need_weights=False)[0][:, -1]
            torch.testing.assert_close(whole[:, length - 1], part, rtol=1e-6, atol=1e-8)


def test_other_features_are_drawn_on_request_and_belong_to_the_state():
    made = module(RandomFeatureHeads(features=8))
    before = made.heads.directions.clone()
    assert "heads.directions" in made.state_dict()
    made.heads.redraw()
    assert not torch.equal(before, made.heads.directions)
    made.load_state_dict(made.state_dict() | {"heads.directions": before})
    assert torch.equal(before, made.heads.directions)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomFeatureHeads(features=1), "features must be"),
        (partial(RandomFeatureHeads, kind="cosine"), "kind must be"),  # pyright: ignore[reportArgumentType]
        (partial(DualLinkHeads, *["beta"]), "family must be"),
        (partial(DualLinkHeads, divergence=1), "divergence must be"),  # pyright: ignore[reportArgumentType]
        (
            lambda: module(RandomFeatureHeads())(inputs()[0], is_causal=True, need_variance=True),
            "without|mask of keys",
        ),
        (lambda: module(ReLUHeads())(inputs()[0], need_potential=True), "can return no result"),
    ],
)
def test_what_does_not_fit_is_named(make, said):
    with pytest.raises((TypeError, ValueError), match=said):
        make()
