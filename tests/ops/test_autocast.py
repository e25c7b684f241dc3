"""Under `torch.autocast`, as PyTorch's own attention: inputs are cast to its dtype; log Z stays float32."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.ops.explicit import log_partition_room
from tests.support.rows import every_row

from massieu import ops

BACKENDS = ["auto", "reference"]


def tensors(*dtypes, length=6, keys=9, size=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, size), (2, 4, keys, size), (2, 4, keys, 5)]
    return [torch.randn(*s, generator=generator).to(d).requires_grad_() for s, d in zip(shapes, dtypes, strict=True)]


MIXED = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32),
]


@every_row("dtypes", MIXED)
@every_row("backend", BACKENDS)
@every_row("kind", [torch.bfloat16, torch.float16])
def test_as_pytorchs_attention(kind, backend, dtypes):
    query, key, value = tensors(*dtypes)
    with torch.autocast("cpu", dtype=kind):
        theirs = F.scaled_dot_product_attention(query, key, value)
        output, log_z = ops.attention(query, key, value, backend=backend)
        alone = ops.log_partition(query, key, backend=backend)
    assert output.dtype == theirs.dtype == kind
    assert log_z.dtype == alone.dtype == torch.float32
    cast = [t.to(kind).double() for t in (query, key, value)]
    scores = cast[0] @ cast[1].mT / 4
    exact = torch.softmax(scores, -1) @ cast[2]
    assert torch.allclose(output.double(), exact, atol=8 * torch.finfo(kind).eps)
    # Scores of inputs cast once: in products cast again log Z would be wrong by 2⁻⁸.
    for level in (log_z, alone):
        wanted = torch.logsumexp(scores, -1)
        assert torch.allclose(level.double(), wanted, rtol=0, atol=log_partition_room(kind, wanted))


@every_row("inside", [False, True])
@every_row("backend", BACKENDS)
@every_row("dtypes", MIXED)
def test_derivatives(dtypes, backend, inside):
    """The first and second, taken after the context or within it."""
    inputs = tensors(*dtypes)
    double = [t.detach().to(torch.bfloat16).double().requires_grad_() for t in inputs]
    scores = double[0] @ double[1].mT / 4
    wanted = (torch.softmax(scores, -1) @ double[2]).sin().sum() + torch.logsumexp(scores, -1).sin().sum()
    exact = torch.autograd.grad(wanted, double, create_graph=True)
    exact_second = torch.autograd.grad(sum(g.sin().sum() for g in exact), double)

    def derivatives(loss):
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return first, torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, log_z = ops.attention(*inputs, backend=backend)
        loss = output.float().sin().sum() + log_z.sin().sum()
        found = derivatives(loss) if inside else None
    for ours, theirs in zip(found or derivatives(loss), (exact, exact_second), strict=True):
        for tensor, mine, true in zip(inputs, ours, theirs, strict=True):
            assert mine.dtype == tensor.dtype
            assert torch.allclose(mine.double(), true, atol=0.03 * float(true.detach().abs().max().clamp_min(1)))


def test_options_moments_and_fisher_information():
    query, key, value = (t.detach() for t in tensors(torch.float32, torch.bfloat16, torch.float32))
    cast = [t.bfloat16() for t in (query, key, value)]
    weight, sink, scale = torch.randn(9), torch.randn(4), torch.rand(4)
    options = {"log_weight": weight, "sink": sink, "scale": scale, "window": (3, 2)}
    calls = (
        lambda q, k, v: tuple(ops.attention(q, k, v, **options)),
        lambda q, k, v: tuple(ops.attention(q, k, v, softcap=3.0, **options)),
        lambda q, k, v: tuple(ops.attention_moments(q, k, v, softcap=3.0, **options)),
        lambda q, k, v: tuple(ops.attention_moments(q, k, v, backend="reference", **options)),
        lambda q, k, v: (ops.fisher_vp(q, k, k[:, :, :6], **options),),
        lambda q, k, v: (ops.fisher_vp(q, k, q, backend="reference", **options),),
        lambda q, k, v: (ops.moments_backend(q, k, v),),
    )
    for call in calls:
        wanted = call(*cast)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call(query, key, value)
        for a, b in zip(found, wanted, strict=True):
            if not isinstance(a, torch.Tensor):
                assert a == b
                continue
            assert a.dtype == b.dtype
            assert torch.allclose(a.float(), b.float(), atol=0.02)


def test_float64_is_left_alone_and_a_context_that_is_off_does_nothing():
    query, key, value = tensors(*[torch.float64] * 3)
    plain = ops.attention(query, key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(ops.attention(query, key, value), plain, strict=True))
    with torch.autocast("cpu", enabled=False), pytest.raises(TypeError, match="one dtype"):
        ops.attention(query, key.float(), value)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="query must be a floating-point tensor, got list"):
        ops.attention([1.0], key, value)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()

    def function(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tuple(ops.attention(*inputs, sink=0.5))

    inputs = tensors(torch.float32, torch.bfloat16, torch.float32)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for a, b in zip(found, function(*inputs), strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, atol=1e-2)
    first = torch.autograd.grad(found[0].float().sum() + found[1].sum(), inputs)
    assert [g.dtype for g in first] == [t.dtype for t in inputs]
