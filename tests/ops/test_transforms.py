"""Derivatives of every order and kind, against finite differences and the closed forms of softmax."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow
from torch.autograd import gradcheck

from massieu import ops
from massieu.ops import reference

BACKENDS = ["reference", "fused"]


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture(params=["whole", "blocks"])
def block_pairs(request, monkeypatch):
    """The reference in one block, and in blocks of two queries and of one that are computed again."""
    if request.param == "blocks":
        monkeypatch.setattr(reference, "BLOCK_PAIRS", 24)
    return request.param


BACKENDS_AND_BLOCKS = pytest.mark.parametrize(
    ("backend", "block_pairs"),
    [
        ("fused", "whole"),
        ("reference", "blocks"),
        pytest.param("fused", "blocks", marks=pytest.mark.slow),
    ],
    indirect=["block_pairs"],
)


@pytest.fixture
def inputs():
    return leaf(1, 2, 3, 4), leaf(1, 1, 5, 4, seed=1), leaf(1, 1, 5, 3, seed=2)


def covariance_of_keys(query, key):
    """∇² log Z for one head: scale²·Cov_p(key), per query."""
    p = torch.softmax(query @ key.mT / math.sqrt(key.shape[-1]), -1)
    centred = key - (p @ key).unsqueeze(-2)
    return (p.unsqueeze(-1) * centred).mT @ centred / key.shape[-1]


@pytest.mark.medium
@BACKENDS_AND_BLOCKS
def test_reverse_forward_and_second_derivatives(backend, inputs, block_pairs):
    log_weight, scale = leaf(1, 2, 1, 5, seed=3), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, w, s):
        return tuple(ops.attention(q, k, v, log_weight=w, scale=s, is_causal=True, backend=backend))

    check_derivatives(function, (*inputs, log_weight, scale), forward=True, absent_cotangents=True)


@pytest.mark.medium
@BACKENDS_AND_BLOCKS
def test_derivatives_of_log_partition_with_a_mask(backend, inputs, block_pairs):
    query, key, _ = inputs
    keep = torch.tensor([True, False, True, True, False]).view(1, 1, 1, 5)

    def function(q, k):
        return ops.log_partition(q, k, log_weight=keep, backend=backend)

    check_derivatives(function, (query, key), forward=True)
    assert (torch.autograd.grad(function(query, key).sum(), key)[0][:, :, [1, 4]] == 0).all()


@pytest.mark.usefixtures("block_pairs")
def test_log_weights_per_query_and_key(inputs):
    query, key, value = inputs
    weight = leaf(1, 2, 3, 5, seed=4)

    def function(q, k, v, w):
        return tuple(ops.attention(q, k, v, log_weight=w))

    check_derivatives(function, (query, key, value, weight))


@pytest.mark.medium
@pytest.mark.usefixtures("block_pairs")
def test_moments_are_differentiable(inputs):
    def function(q, k, v, w):
        return tuple(ops.attention_moments(q, k, v, log_weight=w, softcap=2.0))

    arguments = (*inputs, leaf(1, 1, 1, 5, seed=5))
    assert gradcheck(function, arguments, check_forward_ad=True, fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_see_nothing_have_zero_derivatives(backend, inputs):
    keep = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    keep[0, 0, 1] = False
    output, log_z = ops.attention(*inputs, log_weight=keep, backend=backend)
    first = torch.autograd.grad(output.sum() + log_z.sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert all(g.isfinite().all() for g in (*first, *second))
    assert (first[0][:, :, 1] == 0).all()
    moments = ops.attention_moments(*inputs, log_weight=keep)
    finite = [m[:, :, 1].sum() for m in moments[:-1] if m is not None and m[:, :, 1].isfinite().all()]
    assert len(finite) == 8
    assert (moments.max_position[:, :, 1] == -1).all()
    gradients = torch.autograd.grad(sum(finite), inputs, allow_unused=True)
    assert all(g is None or bool((g == 0).all()) for g in gradients)


@every_row("backend", BACKENDS)
@every_row("scale", [1e-35, 1e-20, 1.0, 1e20])
def test_cotangents_of_any_size(backend, scale):
    """The two cotangents are folded into one tensor, by dividing by the first's norm."""
    query, key, value = (leaf(1, 1, 4, 8, seed=s).detach().float().requires_grad_() for s in range(3))
    grad_output, grad_log_z = torch.ones(1, 1, 4, 8) * scale, torch.tensor([0.0, 1.0, 1e-20, 1e10]).view(1, 1, 4)
    found = torch.autograd.grad(
        ops.attention(query, key, value, backend=backend), (query, key), (grad_output, grad_log_z)
    )
    double = [t.detach().double().requires_grad_() for t in (query, key, value)]
    scores = double[0] @ double[1].mT * 8**-0.5
    results = torch.softmax(scores, -1) @ double[2], torch.logsumexp(scores, -1)
    wanted = torch.autograd.grad(results, double[:2], (grad_output.double(), grad_log_z.double()))
    for ours, theirs in zip(found, wanted, strict=True):
        # The kernel's exponential is good to 20 units in the last place.
        assert torch.allclose(ours.double(), theirs, atol=20 * 2**-23 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hessian_is_the_covariance_of_the_keys(backend, inputs):
    query, key = inputs[0].detach(), inputs[1].detach()

    def total(q):
        return ops.log_partition(q, key, backend=backend).sum()

    wanted = covariance_of_keys(query[0], key[0])
    for hessian in (torch.func.hessian(total), torch.func.jacrev(torch.func.jacrev(total))):
        found = hessian(query)[0, :, :, :, 0]
        for head in range(2):
            for position in range(3):
                assert torch.allclose(found[head, position, :, head, position], wanted[head, position], atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_each_argument(backend, inputs):
    query, key, value = (t.detach() for t in inputs)
    keep = torch.rand(3, 1, 1, 1, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    keep[..., 0] = True
    queries, keys = torch.stack([query, -query, 2 * query]), torch.stack([key, 2 * key, -key], dim=1)
    mapped = torch.func.vmap(
        lambda q, k, w: tuple(ops.attention(q, k, value, log_weight=w, backend=backend)), in_dims=(0, 1, 0)
    )(queries, keys, keep)
    for item in range(3):
        scores = (queries[item] @ keys[:, item].mT * 0.5).masked_fill(~keep[item], -math.inf)
        assert torch.allclose(mapped[0][item], torch.softmax(scores, -1) @ value)
        assert torch.allclose(mapped[1][item], torch.logsumexp(scores, -1))


@pytest.mark.parametrize("name", ["log_weight", "scale"])
def test_gradient_of_a_mapped_function(name, inputs):
    """A derivative that starts outside vmap is not lost for arguments the fused kernel has none for."""
    query, key = inputs[0].detach(), inputs[1].detach()
    values = leaf(3, 1, 1, 1, 5, seed=6) if name == "log_weight" else leaf(3, seed=6)

    def found(values):
        mapped = torch.func.vmap(lambda x: ops.log_partition(query, key, **{name: x}))
        return mapped(values).sin().sum()

    def wanted(values):
        scores = query @ key.mT
        tilted = scores * 0.5 + values if name == "log_weight" else scores * values.view(3, 1, 1, 1, 1)
        return torch.logsumexp(tilted, -1).sin().sum()

    assert torch.allclose(torch.func.grad(found)(values.detach()), torch.func.grad(wanted)(values.detach()))


@pytest.mark.medium
@some_slow(("backend", "mode"), itertools.product(["auto", "reference"], ["reverse", "forward"]), 1)
def test_compiling_a_transform_keeps_the_gradient(backend, mode, inputs):
    """`torch.compile` ignores the backward of custom functions inside `torch.func`: gradient 0 without the plain path."""
    query, key = inputs[0].detach(), inputs[1].detach()

    def total(q):
        return ops.log_partition(q, key, backend=backend).sum()

    wanted = torch.softmax(query @ key.mT * 0.5, -1) @ key * 0.5
    torch._dynamo.reset()
    if mode == "reverse":
        found = torch.compile(torch.func.grad(total), backend="aot_eager")(query)
    else:
        found = torch.compile(lambda q: torch.func.jvp(total, (q,), (q,))[1], backend="aot_eager")(query)
        wanted = (wanted * query).sum()
    assert torch.allclose(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_training_step(backend, inputs):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: ops.attention(*t, backend=backend), backend="aot_eager", fullgraph=True)
    output, log_z = compiled(*inputs)
    scores = inputs[0] @ inputs[1].mT * 0.5
    loss, wanted = output.sum() + 2 * log_z.sum(), 0.0
    wanted = (torch.softmax(scores, -1) @ inputs[2]).sum() + 2 * torch.logsumexp(scores, -1).sum()
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.usefixtures("block_pairs")
def test_forward_mode_within_forward_mode(backend, inputs):
    """The third derivative of log Z along a line is the third central moment of the scores' slopes."""
    query, key = inputs[0].detach(), inputs[1].detach()
    line = leaf(*query.shape, seed=7).detach()

    def along(function):
        return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]

    def log_z(t):
        return ops.log_partition(query + t.unsqueeze(-1) * line, key, scale=1.0, backend=backend)

    found = along(along(along(log_z)))(query.new_zeros(query.shape[:-1]))
    p, slope = torch.softmax(query @ key.mT, -1), line @ key.mT
    centred = slope - (p * slope).sum(-1, keepdim=True)
    assert torch.allclose(found, (p * centred**3).sum(-1), atol=1e-12)


OPTIONS = {
    "sink": {"sink": torch.tensor([0.3, -0.5], dtype=torch.float64)},
    "cap": {"softcap": 1.5},
    "window and weights": {"window": (1, 1), "log_weight": torch.linspace(-1, 1, 5, dtype=torch.float64)},
    "hidden": {"log_weight": torch.tensor([True, False, True, True, False]), "is_causal": True},
    "all": {
        "sink": 0.0,
        "softcap": 2.0,
        "window": (2, 0),
        "log_weight": torch.tensor([0.0, 1.0, -1.0, -math.inf, 0.5]),
    },
}


def explicit(query, key, value, *, scale=0.5, sink=None, softcap=None, window=None, is_causal=False, log_weight=None):
    """Output and log Z by a matrix of scores, with the sink as one more column."""
    scores = query @ key.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if log_weight is not None:
        scores = scores.masked_fill(~log_weight, -math.inf) if log_weight.dtype == torch.bool else scores + log_weight
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2]).unsqueeze(1)
    left, right = window or (math.inf, math.inf)
    scores = scores.masked_fill((distance < -left) | (distance > (0 if is_causal else right)), -math.inf)
    if sink is None:
        return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)
    column = torch.as_tensor(sink, dtype=scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1)[..., :-1] @ value, torch.logsumexp(scores, -1)


@pytest.mark.medium
@pytest.mark.parametrize("name", OPTIONS)
def test_transforms_with_options(name, inputs):
    query, key, value = (t.detach() for t in inputs)

    def loss(attention, q):
        return sum(r.sin().sum() for r in attention(q, key, value, **OPTIONS[name]))

    for transform in (
        lambda f: f(query),
        lambda f: torch.func.grad(f)(query),
        lambda f: torch.func.hessian(f)(query),
        lambda f: torch.func.jvp(torch.func.grad(f), (query,), (query.cos(),))[1],
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([query, -query])),
    ):
        found, wanted = (transform(lambda q, a=a: loss(a, q)) for a in (ops.attention, explicit))
        assert torch.allclose(found, wanted, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "hidden"])
def test_compiled_for_any_length(name):
    """One graph, no break, gradients of both results; also where key and value are one tensor."""
    torch._dynamo.reset()
    options = dict(OPTIONS.get(name, {"scale": 0.7}))
    weight = options.pop("log_weight", None)

    def mask(key):
        column = key[0, 0, :, 0]
        return None if weight is None else column > -1 if weight.dtype == torch.bool else column

    def function(query, key):
        output, log_z = ops.attention(query, key, key, log_weight=mask(key), **options)
        return output, log_z, ops.log_partition(query, key, **options)

    def wanted(query, key):
        output, log_z = explicit(query, key, key, log_weight=mask(key), **options)
        return output, log_z, explicit(query, key, key, **options)[1]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (7, 12):
        query, key = leaf(1, 2, length, 4, seed=length), leaf(1, 1, length, 4, seed=1)
        key.data[0, 0, 0, 0] = 0.0
        found, exact = compiled(query, key), wanted(query, key)
        for a, b in zip(found, exact, strict=True):
            assert torch.allclose(a, b)
        slopes = [torch.autograd.grad(sum(r.sin().sum() for r in rs), (query, key)) for rs in (found, exact)]
        for a, b in zip(*slopes, strict=True):
            assert torch.allclose(a, b)
