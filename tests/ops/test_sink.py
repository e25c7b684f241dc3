"""Learned sinks against softmax over explicitly concatenated logits, as gpt-oss writes it."""

import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.ops.explicit import log_partition_room
from tests.support.rows import every_row
from torch.autograd import gradcheck

from massieu import ops

BACKENDS = ["reference", "fused"]


def tensors(batch=2, heads=4, key_heads=2, length=5, keys=7, size=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, 3), (heads,)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def eager_gpt_oss(query, key, value, sinks, scaling, attention_mask=None):
    """The formula of transformers' `modeling_gpt_oss.eager_attention_forward`, without dropout; and its log Z."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined_logits = torch.cat([attn_weights, sinks], dim=-1)
    combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
    probs = torch.softmax(combined_logits, dim=-1)
    whole = torch.cat([attn_weights, sinks], dim=-1).double()
    return torch.matmul(probs[..., :-1], value), torch.logsumexp(whole, -1)


def close(found, wanted, tolerance=1e-10):
    return all(
        torch.allclose(a.double(), b.double(), atol=tolerance, rtol=0) for a, b in zip(found, wanted, strict=True)
    )


@every_row("backend", BACKENDS)
@every_row("mask", ["none", "keys", "pairs", "causal", "window"])
def test_the_formula_of_gpt_oss(mask, backend):
    query, key, value, sink = (t.requires_grad_() for t in tensors())
    generator = torch.Generator().manual_seed(1)
    distance = torch.arange(7) - torch.arange(5)[:, None]
    hidden = {
        "none": None,
        "keys": torch.tensor([False, True, False, False, True, False, False]).expand(5, 7),
        "pairs": torch.rand(2, 1, 5, 7, generator=generator) > 0.5,
        "causal": distance > 0,
        "window": (distance < -1) | (distance > 2),
    }[mask]
    additive = None if hidden is None else torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
    options = {
        "none": {}, "keys": {"log_weight": ~torch.tensor([False, True, False, False, True, False, False])},
        "pairs": {"log_weight": None if hidden is None else ~hidden}, "causal": {"is_causal": True},
        "window": {"window": (1, 2)},
    }[mask]  # fmt: skip
    found = ops.attention(query, key, value, sink=sink, scale=0.4, backend=backend, **options)
    wanted = eager_gpt_oss(query, key, value, sink, 0.4, additive)
    assert close(found, wanted)
    assert close([ops.log_partition(query, key, sink=sink, scale=0.4, backend=backend, **options)], wanted[1:])
    inputs = (query, key, value, sink)
    slopes = [torch.autograd.grad((r[0].sin().sum() + r[1].cos().sum()), inputs) for r in (found, wanted)]
    assert close(*slopes)


@every_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    query, key, value, sink = tensors(dtype=dtype)
    wanted = eager_gpt_oss(query.double(), key.double(), value.double(), sink.double(), 0.4)
    for given in (sink, sink.float()):
        output, log_z = ops.attention(query, key, value, sink=given, scale=0.4)
        assert output.dtype == dtype
        assert log_z.dtype == torch.float32
        assert close([output], wanted[:1], 4 * torch.finfo(dtype).eps * 2)
        assert close([log_z], wanted[1:], log_partition_room(dtype, wanted[1]))


def test_forms_of_a_sink():
    """A number, one for all, one a head, one a query."""
    query, key, value, sink = tensors()
    one = torch.tensor(0.3, dtype=torch.float64)
    wanted = ops.attention(query, key, value, sink=one.expand(4))
    for form in (0.3, one, one.expand(1, 1, 1, 1), one.expand(2, 4, 5, 1)):
        assert close(ops.attention(query, key, value, sink=form), wanted)
    per_query = torch.linspace(-1, 1, 40, dtype=torch.float64).view(2, 4, 5, 1)
    found = ops.attention(query, key, value, sink=per_query)
    plain = ops.attention(query, key, value)
    assert torch.allclose(found.log_partition.exp(), plain.log_partition.exp() + per_query.squeeze(-1).exp())
    grouped = ops.attention(query.unflatten(1, (2, 2)), key, value, sink=sink)
    assert close([t.flatten(1, 2) for t in grouped], ops.attention(query, key, value, sink=sink))


def test_softmax_off_by_one():
    """sink 0 is exp(s)/(1 + Σ exp(s)): right after the maximum is subtracted, above and far below it."""
    scores = torch.tensor([[3.0, 1.0, -2.0], [-500.0, -501.0, -502.0], [800.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    query = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    key, value = scores.double().T.reshape(1, 1, 3, 4), torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    top = scores.double().amax(-1, keepdim=True).clamp_min(0)
    weights = (scores.double() - top).exp()
    wanted = weights / (weights.sum(-1, keepdim=True) + (-top).exp())
    for backend in BACKENDS:
        output, log_z = ops.attention(query, key, value, scale=1.0, sink=0, backend=backend)
        assert torch.allclose(output[0, 0], wanted, atol=1e-15, rtol=1e-12)
        exact = (top + (weights.sum(-1, keepdim=True) + (-top).exp()).log()).squeeze(-1)
        assert torch.allclose(log_z[0, 0], exact, atol=1e-14)


@pytest.mark.medium
@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_by_finite_differences(backend):
    query, key, value, sink = (t.requires_grad_() for t in tensors(1, 2, 1, 2, 3, 2))
    # At log Z = sink the derivatives of a maximum would be wrong.
    tie = ops.log_partition(query, key).detach().amax().expand(2).clone().requires_grad_()

    def function(q, k, v, s):
        return tuple(ops.attention(q, k, v, sink=s, backend=backend))

    for given in (sink, tie):
        check_derivatives(function, (query, key, value, given), forward=True)


@every_row("backend", BACKENDS)
@every_row("level", [0.0, 1e4, -1e4, -math.inf])
def test_rows_without_a_key_and_levels_of_any_size(backend, level):
    query, key, value, _ = tensors(dtype=torch.float32)
    query[:, :, 1] *= 1e4
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    inputs = [t.requires_grad_() for t in (query, key, value, torch.full((4,), level))]
    output, log_z = ops.attention(*inputs[:3], sink=inputs[3], log_weight=keep, backend=backend)
    assert (output[:, :, 2] == 0).all()
    assert (log_z[:, :, 2] == level).all()
    loss = output.sin().sum() + torch.where(log_z > -math.inf, log_z, 0.0).square().sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), inputs, allow_unused=True)
    for tensor in (*first, *second, output):
        assert tensor is None or tensor.isfinite().all()
    assert (first[0][:, :, 2] == 0).all()
    if level == -math.inf:
        without = ops.attention(*inputs[:3], log_weight=keep, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip((output, log_z), without, strict=True))
        assert (first[3] == 0).all()


def test_the_gradient_of_a_sink_is_its_weight():
    query, key, _, sink = tensors()
    (slope,) = torch.autograd.grad(ops.log_partition(query, key, sink=sink.requires_grad_()).sum(), sink)
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
    whole = torch.cat([scores, sink.detach().view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    assert torch.allclose(slope, torch.softmax(whole, -1)[..., -1].sum((0, 2)))


@every_row("backend", ["reference", "blocks"])
@every_row("softcap", [None, 2.0])
@every_row("level", [0.7, -math.inf, 300.0])
def test_moments_are_those_with_a_key_at_the_origin(level, softcap, backend):
    query, key, value, sink = tensors()
    sink = sink + level
    keep = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[0, 0, 1] = False
    found = ops.attention_moments(query, key, value, sink=sink, log_weight=keep, softcap=softcap, backend=backend)
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = torch.cat([scores, torch.zeros(2, 4, 5, 1)], -1)
    weight = torch.zeros(2, 1, 5, 7, dtype=torch.float64).masked_fill(~keep, -math.inf).expand(2, 4, 5, 7)
    weight = torch.cat([weight, sink.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    p, h = torch.softmax(scores + weight, -1).nan_to_num(), torch.softmax(weight, -1).nan_to_num()
    mean, prior_mean = (p * scores).sum(-1), (h * scores).sum(-1)
    wanted = {
        "output": p[..., :-1] @ value.repeat_interleave(2, 1),
        "log_partition": torch.logsumexp(scores + weight, -1),
        "entropy": torch.special.entr(p).sum(-1),
        "mean_score": mean,
        "score_variance": (p * (scores - mean[..., None]).square()).sum(-1),
        "max_weight": p.amax(-1),
        "collision": p.square().sum(-1),
        "prior_log_partition": torch.logsumexp(weight, -1),
        "prior_mean_score": prior_mean,
        "prior_score_variance": (h * (scores - prior_mean[..., None]).square()).sum(-1),
        "max_score": scores.masked_fill(weight == -math.inf, -math.inf).amax(-1),
    }
    for name, moment in wanted.items():
        assert torch.allclose(getattr(found, name), moment, atol=1e-10), name


def test_moments_with_a_sink_have_finite_derivatives():
    query, key, value, _ = tensors()
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    for level in (0.0, 1e4, -1e4, -math.inf):
        inputs = [t.requires_grad_() for t in (query, key, value, torch.full((4,), level, dtype=torch.float64))]
        found = ops.attention_moments(*inputs[:3], sink=inputs[3], log_weight=keep)
        numbers = [m for m in found if m is not None]
        assert len(numbers) == len(found)
        loss = sum(torch.where(m > -math.inf, m, 0.0).sin().sum() for m in numbers)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)
        assert all(t.isfinite().all() for t in (*first, *second))
    inputs = [t.requires_grad_() for t in tensors(1, 2, 1, 2, 3, 2)]
    assert gradcheck(lambda q, k, v, s: tuple(ops.attention_moments(q, k, v, sink=s)), inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_fisher_information_is_that_with_a_key_at_the_origin(backend):
    query, key, _, sink = tensors()
    vector = tensors(seed=5)[0]
    found = ops.fisher_vp(query, key, vector, sink=sink, backend=backend)
    keys = torch.cat([key, torch.zeros(2, 2, 1, 8)], 2).repeat_interleave(2, 1)
    weight = torch.cat([torch.zeros(4, 7), sink.view(4, 1)], -1).view(1, 4, 1, 8)
    p = torch.softmax(query @ keys.mT / math.sqrt(8) + weight, -1)
    centred = keys.unsqueeze(2) - (p @ keys).unsqueeze(3)
    wanted = ((p.unsqueeze(-1) * centred).mT @ centred @ vector.unsqueeze(-1)).squeeze(-1)
    assert close([found], [wanted])

    def log_z(q):
        return ops.log_partition(q, key, sink=sink, scale=0.7).sum()

    product = torch.func.jvp(torch.func.grad(log_z), (query,), (vector,))[1]
    assert close([0.49 * ops.fisher_vp(query, key, vector, sink=sink, scale=0.7, backend=backend)], [product])


WRONG = {
    "heads": (torch.zeros(3), ValueError, r"sink must be one number, 4 \(one a head\).*\(3,\)"),
    "pairs": (torch.zeros(2, 4, 5, 7), ValueError, r"sink .*\(2, 4, 5, 7\)"),
    "integers": (torch.zeros(4, dtype=torch.int64), TypeError, "sink .*int64"),
    "a word": ("0", TypeError, "sink .*got '"),
    "True": (True, TypeError, "sink .*True"),
    "NaN": (math.nan, ValueError, "sink .*nan"),
    "infinity": (math.inf, ValueError, "sink .*inf"),
    "elsewhere": (torch.zeros(4, device="meta"), ValueError, "sink .*meta"),
}


@every_row("name", WRONG)
def test_wrong_sinks(name):
    sink, error, words = WRONG[name]
    query, key, value, _ = tensors()
    calls = (
        lambda: ops.attention(query, key, value, sink=sink),
        lambda: ops.log_partition(query, key, sink=sink),
        lambda: ops.attention_moments(query, key, sink=sink),
        lambda: ops.fisher_vp(query, key, query, sink=sink),
    )
    for call in calls:
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
