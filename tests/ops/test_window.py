"""Sliding windows against explicit masks: values, derivatives of every order, memory, transforms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.ops.explicit import log_partition_room
from tests.support.rows import every_row, one_in

from massieu import ops
from massieu.ops import band, reference

BACKENDS = ["reference", "fused"]


def tensors(batch=1, heads=2, key_heads=1, length=9, keys=9, size=4, value_size=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def visible(length, keys, window, is_causal=False):
    """Query i sees keys i − left … i + right."""
    left, right = (window, window) if isinstance(window, int) else window
    distance = torch.arange(keys) - torch.arange(length)[:, None]
    return (distance >= -left) & (distance <= (0 if is_causal else right))


def masked(query, key, value, seen, log_weight=0.0, scale=None):
    """Output and log Z of each query from the keys that it sees, one matrix of scores; 0 and −inf where none is."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale) + log_weight
    hidden = ~seen | (scores == -math.inf)
    none = hidden.all(-1, keepdim=True)
    scores = torch.where(none, 0.0, scores.masked_fill(hidden, -math.inf))
    p = torch.where(none, 0.0, torch.softmax(scores, -1))
    return p @ value, torch.where(none.squeeze(-1), -math.inf, torch.logsumexp(scores, -1))


def close(found, wanted, tolerance=1e-10):
    return all(
        torch.allclose(a.double(), b.double(), atol=tolerance, rtol=0) for a, b in zip(found, wanted, strict=True)
    )


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of four queries, so that small inputs have many."""
    monkeypatch.setattr(band, "LEAST", 4)
    monkeypatch.setattr(band, "MOST", 4)


@pytest.mark.medium
@one_in(
    3,
    {
        "backend": BACKENDS,
        "is_causal": [False, True],
        "window": [0, 1, (3, 0), (0, 2), (2, 5), (7, 1), 40, (10**12, 2), (2, 10**12)],
    },
)
@pytest.mark.usefixtures("short_chunks")
def test_windows_are_masks(window, is_causal, backend):
    for length, keys in ((1, 1), (30, 30), (31, 29), (40, 17), (17, 40), (2, 30), (30, 2)):
        query, key, value = tensors(2, 4, 2, length, keys)
        seen = visible(length, keys, window, is_causal)
        wanted = masked(query, key, value, seen)
        found = ops.attention(query, key, value, window=window, is_causal=is_causal, backend=backend)
        assert close(found, wanted)
        assert close([ops.log_partition(query, key, window=window, is_causal=is_causal, backend=backend)], wanted[1:])


@pytest.mark.medium
@given(
    batch=st.integers(1, 3), key_heads=st.integers(1, 2), group=st.integers(1, 2), length=st.integers(1, 150),
    keys=st.integers(1, 150), left=st.integers(0, 40), right=st.integers(0, 40), is_causal=st.booleans(),
    weight=st.sampled_from(["none", "keys", "items", "heads", "pairs", "queries", "boolean", "boolean pairs"]),
    scaled=st.sampled_from(["none", "heads", "queries"]), backend=st.sampled_from(BACKENDS),
)  # fmt: skip
def test_any_composition(batch, key_heads, group, length, keys, left, right, is_causal, weight, scaled, backend):
    heads = key_heads * group
    query, key, value = tensors(batch, heads, key_heads, length, keys)
    generator = torch.Generator().manual_seed(length)
    shape = {
        "none": (1,), "keys": (keys,), "items": (batch, 1, 1, keys), "heads": (1, heads, 1, keys),
        "pairs": (1, 1, length, keys), "queries": (batch, 1, length, 1), "boolean": (batch, 1, 1, keys),
        "boolean pairs": (batch, heads, length, keys),
    }[weight]  # fmt: skip
    log_weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
    log_weight = log_weight.masked_fill(log_weight < -0.8, -math.inf)
    given_weight = log_weight > -0.5 if "boolean" in weight else log_weight
    if "boolean" in weight:
        log_weight = torch.zeros(shape, dtype=torch.float64).masked_fill(~given_weight, -math.inf)
    if weight == "none":
        log_weight, given_weight = torch.zeros(1, dtype=torch.float64), None
    sizes = {"none": None, "heads": (1, heads, 1, 1), "queries": (batch, heads, length, 1)}[scaled]
    scale = None if sizes is None else torch.rand(*sizes, generator=generator, dtype=torch.float64)
    options = {"window": (left, right), "is_causal": is_causal, "log_weight": given_weight, "scale": scale}
    seen = visible(length, keys, (left, right), is_causal)
    wanted = masked(query, key, value, seen, log_weight, scale)
    assert close(ops.attention(query, key, value, backend=backend, **options), wanted)
    moments = ops.attention_moments(query, key, value, **options)
    assert close((moments.output, moments.log_partition), wanted)
    count = (seen & (log_weight > -math.inf)).sum(-1)
    assert (moments.prior_log_partition.isfinite() == (count > 0)).all()


@pytest.mark.parametrize("kind", ["none", "keys", "pairs"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("short_chunks")
def test_first_and_second_derivatives(backend, kind, monkeypatch):
    arguments = [t.requires_grad_() for t in tensors(length=13, keys=12)]
    seen = visible(13, 12, (2, 1))
    generator = torch.Generator().manual_seed(3)
    shape = {"none": (1,), "keys": (2, 1, 12), "pairs": (2, 13, 12)}[kind]
    weight = torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(kind != "none")
    if kind == "pairs" and backend == "fused":
        with pytest.raises(ValueError, match="no gradient for a log_weight"):
            ops.attention(*arguments, window=(2, 1), log_weight=weight, backend="fused")
        return
    if kind != "none":
        arguments.append(weight)

    def ours(query, key, value, *weights):
        log_weight = weights[0] if weights else None
        return ops.attention(query, key, value, window=(2, 1), log_weight=log_weight, backend=backend)

    def theirs(query, key, value, *weights):
        return masked(query, key, value, seen, *weights)

    cotangents = [torch.randn(*r.shape, generator=generator, dtype=torch.float64) for r in theirs(*arguments)]
    derivatives = []
    for function in (ours, theirs):
        output, log_z = function(*arguments)
        loss = (output * cotangents[0]).sum() + (torch.where(log_z > -math.inf, log_z, 0.0).sin() * cotangents[1]).sum()
        first = torch.autograd.grad(loss, arguments, create_graph=True)
        second = torch.autograd.grad(
            sum((g.sin() * t.detach().cos()).sum() for g, t in zip(first, arguments, strict=True)), arguments
        )
        derivatives.append((*first, *second))
    assert close(*derivatives)


@pytest.mark.medium
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("short_chunks")
def test_derivatives_by_finite_differences(backend):
    inputs = tuple(t.requires_grad_() for t in tensors(1, 1, 1, 10, 10, 2, 2))

    def function(*arguments):
        return tuple(ops.attention(*arguments, window=(1, 1), backend=backend))

    check_derivatives(function, inputs, forward=True)


@pytest.mark.usefixtures("short_chunks")
def test_moments_and_fisher_information_of_a_window():
    query, key, value = tensors(2, 4, 2, 30, 28)
    seen = visible(30, 28, (3, 2))
    vector = tensors(2, 4, 2, 30, 28, seed=5)[0]
    whole = {"log_weight": seen}
    for backend in ("reference", "blocks"):
        found = ops.attention_moments(query, key, value, window=(3, 2), backend=backend)
        assert close(found, ops.attention_moments(query, key, value, backend="reference", **whole))
        product = ops.fisher_vp(query, key, vector, window=(3, 2), backend=backend)
        keys = key.repeat_interleave(2, 1)
        p = torch.softmax((query @ keys.mT / 2).masked_fill(~seen, -math.inf), -1).nan_to_num()
        centred = keys.unsqueeze(2) - (p @ keys).unsqueeze(3)
        covariance = (p.unsqueeze(-1) * centred).mT @ centred
        assert close([product], [(covariance @ vector.unsqueeze(-1)).squeeze(-1)])
        weighted = torch.randn(28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found = ops.attention_moments(query, key, value, window=(3, 2), log_weight=weighted, backend=backend)
        pairs = (weighted + torch.zeros(30, 28, dtype=torch.float64)).masked_fill(~seen, -math.inf)
        assert close(found, ops.attention_moments(query, key, value, log_weight=pairs, backend="reference"))


@pytest.mark.parametrize("what", ["fused", "reference", "padded", "moments", "blocks", "fisher"])
def test_memory_is_linear(what):
    """Nothing of a size like queries times keys, forwards or backwards, in either route."""
    length, window = 4096, (60, 3)
    inputs = [t.float().requires_grad_(what != "blocks") for t in tensors(1, 1, 1, length, length, 8, 8)]
    keep = (torch.arange(length) > 5).view(1, 1, 1, length) if what == "padded" else None
    with LargestTensor() as mode:
        if what in ("moments", "blocks"):
            found = ops.attention_moments(*inputs, window=window, log_weight=keep)[:6]
        elif what == "fisher":
            found = [ops.fisher_vp(*inputs, window=window)]
        else:
            backend = "auto" if what == "padded" else what
            found = ops.attention(*inputs, window=window, log_weight=keep, backend=backend)
        if what != "blocks":
            torch.autograd.grad(sum(f.nan_to_num(neginf=0.0).sum() for f in found if f is not None), inputs)
    assert mode.numbers <= max(length * (2 * 63 + 2 * 64) * 2, reference.BLOCK_PAIRS)
    assert mode.numbers < length * length / 16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("short_chunks")
def test_transforms(backend):
    query, key, value = tensors(1, 2, 1, 21, 21)
    seen = visible(21, 21, (3, 1))

    def ours(q, k=key):
        return ops.log_partition(q, k, window=(3, 1), backend=backend)

    def theirs(q, k=key):
        return masked(q, k, value, seen)[1]

    stacked = torch.stack([query, -query]), torch.stack([key, 2 * key])
    assert close([torch.func.vmap(ours)(*stacked)], [torch.func.vmap(theirs)(*stacked)])
    gradients = [torch.func.vmap(torch.func.grad(lambda q, f=f: f(q).sin().sum()))(stacked[0]) for f in (ours, theirs)]
    assert close(gradients[:1], gradients[1:])
    pushed = [torch.func.jvp(f, (query,), (query.cos(),))[1] for f in (ours, theirs)]
    assert close(pushed[:1], pushed[1:])
    hessians = [torch.func.hessian(lambda q, f=f: f(q).sin().sum())(query) for f in (ours, theirs)]
    assert close(hessians[:1], hessians[1:])


@every_row("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precisions(dtype):
    query, key, value = tensors(2, 4, 2, 400, 400, 16, 8, dtype=dtype)
    wanted = masked(query.double(), key.double(), value.double(), visible(400, 400, (50, 0)))
    output, log_z = ops.attention(query, key, value, window=50, is_causal=True)
    assert output.dtype == dtype
    assert log_z.dtype == torch.float32
    assert close([output], wanted[:1], 4 * torch.finfo(dtype).eps * 4)
    assert close([log_z], wanted[1:], log_partition_room(dtype, wanted[1]))


WRONG = {
    "negative": (-1, ValueError, "window must not be negative, got -1"),
    "negative side": ((3, -2), ValueError, r"\(3, -2\)"),
    "a fraction": (2.5, TypeError, "whole number.*2.5"),
    "True": (True, TypeError, "whole number.*True"),
    "three sides": ((1, 2, 3), TypeError, r"pair of them.*\(1, 2, 3\)"),
    "no sides": ((1, None), TypeError, "window"),
    "a list": ([1, 2], TypeError, "list"),
    "a mask": (torch.ones(3, 3), TypeError, "tensor"),
}


@every_row("name", WRONG)
def test_wrong_windows(name):
    window, error, words = WRONG[name]
    query, key, value = tensors()
    calls = (
        lambda: ops.attention(query, key, value, window=window),
        lambda: ops.log_partition(query, key, window=window),
        lambda: ops.attention_moments(query, key, window=window),
        lambda: ops.fisher_vp(query, key, query, window=window),
    )
    for call in calls:
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "lengths"), [("auto", [160, 231]), ("reference", [160])])
def test_compiled_with_any_length(backend, lengths):
    torch._dynamo.reset()

    def function(query, key, value):
        return tuple(ops.attention(query, key, value, window=(70, 5), backend=backend))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in lengths:
        inputs = [t.requires_grad_() for t in tensors(1, 2, 1, length, length)]
        wanted = masked(*inputs, visible(length, length, (70, 5)))
        found = compiled(*inputs)
        assert close(found, wanted)
        gradients = [torch.autograd.grad(r[0].square().sum() + r[1].sum(), inputs) for r in (found, wanted)]
        assert close(*gradients)


def test_a_log_weight_of_queries_alone_moves_log_z_by_itself():
    """One number for all keys of a query: it has a last dimension of 1, which no band cuts."""
    query, key, value = tensors(1, 2, 1, 40, 40)
    shift = torch.linspace(-1.0, 1.0, 40, dtype=query.dtype).reshape(1, 1, 40, 1)
    output, log_z = ops.attention(query, key, value, window=(5, 2), log_weight=shift, backend="reference")
    wanted = masked(query, key, value, visible(40, 40, (5, 2)))
    torch.testing.assert_close(output, wanted[0])
    torch.testing.assert_close(log_z, wanted[1] + shift[..., 0])
