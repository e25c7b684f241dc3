"""Derivatives of every order and kind, against finite differences and the closed forms of softmax."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from massieu import ops
from massieu.ops import reference

BACKENDS = ["reference", "flash"]


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture(params=["whole", "blocks"])
def block_pairs(request, monkeypatch):
    """The reference in one block, and in blocks of a query or two that are computed again."""
    if request.param == "blocks":
        monkeypatch.setattr(reference, "BLOCK_PAIRS", 12)
    return request.param


@pytest.fixture
def inputs():
    return leaf(1, 2, 3, 4), leaf(1, 1, 5, 4, seed=1), leaf(1, 1, 5, 3, seed=2)


def covariance_of_keys(query, key):
    """∇² log Z for one head: scale²·Cov_p(key), per query."""
    p = torch.softmax(query @ key.mT / math.sqrt(key.shape[-1]), -1)
    centred = key - (p @ key).unsqueeze(-2)
    return (p.unsqueeze(-1) * centred).mT @ centred / key.shape[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_reverse_forward_and_second_derivatives(backend, is_causal, inputs, block_pairs):
    log_weight, scale = leaf(1, 2, 1, 5, seed=3), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, w, s):
        return tuple(ops.attention(q, k, v, log_weight=w, scale=s, is_causal=is_causal, backend=backend))

    arguments = (*inputs, log_weight, scale)
    fast = block_pairs == "blocks"
    assert gradcheck(function, arguments, check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True, fast_mode=fast)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_log_partition_with_a_mask(backend, inputs, block_pairs):
    query, key, _ = inputs
    keep = torch.tensor([True, False, True, True, False]).view(1, 1, 1, 5)

    def function(q, k):
        return ops.log_partition(q, k, log_weight=keep, backend=backend)

    fast = block_pairs == "blocks"
    assert gradcheck(function, (query, key), check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(function, (query, key), check_fwd_over_rev=True, fast_mode=fast)
    assert (torch.autograd.grad(function(query, key).sum(), key)[0][:, :, [1, 4]] == 0).all()


@pytest.mark.usefixtures("block_pairs")
def test_log_weights_per_query_and_key(inputs):
    query, key, value = inputs
    weight = leaf(1, 2, 3, 5, seed=4)
    assert gradgradcheck(lambda q, k, v, w: tuple(ops.attention(q, k, v, log_weight=w)), (query, key, value, weight))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.usefixtures("block_pairs")
def test_moments_are_differentiable(softcap, inputs):
    def function(q, k, v, w):
        return tuple(ops.attention_moments(q, k, v, log_weight=w, softcap=softcap))

    assert gradcheck(function, (*inputs, leaf(1, 1, 1, 5, seed=5)), check_forward_ad=True)


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
    finite = [m[:, :, 1].sum() for m in moments if (m[:, :, 1].isfinite()).all()]
    assert len(finite) == 8
    gradients = torch.autograd.grad(sum(finite), inputs, allow_unused=True)
    assert all(g is None or bool((g == 0).all()) for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1.0, 1e20])
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


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compiling_a_transform_keeps_the_gradient(backend, inputs):
    """`torch.compile` ignores the backward of custom functions inside `torch.func`: gradient 0 without the plain path."""
    query, key = inputs[0].detach(), inputs[1].detach()

    def total(q):
        return ops.log_partition(q, key, backend=backend).sum()

    p = torch.softmax(query @ key.mT * 0.5, -1)
    torch._dynamo.reset()
    gradient = torch.compile(torch.func.grad(total), backend="aot_eager")(query)
    assert torch.allclose(gradient, p @ key * 0.5)
    torch._dynamo.reset()
    direction = torch.compile(lambda q: torch.func.jvp(total, (q,), (q,))[1], backend="aot_eager")(query)
    assert torch.allclose(direction, (gradient * query).sum())


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
