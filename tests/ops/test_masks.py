"""Additive masks of every form and dtype, every head size, and what is at the edge: no key, one key, huge scores."""

import itertools
import math

import pytest
import torch
from tests.support.ops import explicit as matrices
from tests.support.ops.explicit import log_partition_room
from tests.support.rows import every_row, one_in

from massieu import ops

BACKENDS = ["reference", "fused"]


def tensors(batch=2, heads=4, key_heads=2, length=6, keys=9, size=8, value_size=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def explicit(query, key, value, weight=0.0, softcap=None, sink=None):
    """Output and log Z from the matrix of scores; rows that see no key have output 0 and log Z −∞, or the sink."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + weight
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    none = (scores == -math.inf).all(-1, keepdim=True)
    safe = torch.where(none, 0.0, scores)
    p = torch.where(none, 0.0, torch.softmax(safe, -1))
    return p @ value, torch.where(none, -math.inf, torch.logsumexp(safe, -1, keepdim=True)).squeeze(-1)


def close(found, wanted, tolerance=1e-10):
    return all(
        torch.allclose(a.double(), b.double(), atol=tolerance, rtol=0) for a, b in zip(found, wanted, strict=True)
    )


def finite_sum(output, log_z):
    return output.sin().sum() + torch.where(log_z > -math.inf, log_z, 0.0).sin().sum()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(9,), (1, 1, 1, 9), (2, 1, 1, 9), (1, 4, 1, 9), (6, 9), (2, 1, 6, 9), (2, 4, 6, 9), (2, 4, 6, 1)]


@pytest.mark.medium
@every_row("learns", [False, True])
@every_row(
    "shape, dtype, is_causal", zip(SHAPES, itertools.cycle(DTYPES), itertools.cycle([False, True, True]), strict=False)
)
def test_float_masks(dtype, shape, is_causal, learns):
    """Of any float dtype beside a query of another; −∞ hides; the gradient has the mask's dtype."""
    generator = torch.Generator().manual_seed(len(shape))
    mask = torch.randn(*shape, generator=generator).to(dtype)
    mask = mask.masked_fill(mask < -0.7, -math.inf).requires_grad_(learns)
    inputs = [t.requires_grad_() for t in tensors()]
    later = torch.ones(6, 9, dtype=torch.bool).triu(1) & is_causal
    double = mask.detach().double().requires_grad_(learns)
    wanted = explicit(*inputs, torch.where(later, -math.inf, double))
    own = [mask] if learns else []
    others = [double] if learns else []
    exact = torch.autograd.grad(finite_sum(*wanted), (*inputs, *others))
    per_pair = learns and len(shape) > 1 and shape[-2] > 1
    for backend in ["reference", "auto"] if per_pair else BACKENDS:
        found = ops.attention(*inputs, log_weight=mask, is_causal=is_causal, backend=backend)
        assert close(found, wanted)
        slopes = torch.autograd.grad(finite_sum(*found), (*inputs, *own))
        assert close(slopes[:3], exact[:3])
        if learns:
            assert slopes[3].dtype == dtype
            assert close(slopes[3:], exact[3:], 1e-10 + 8 * torch.finfo(dtype).eps)
            assert (slopes[3][mask == -math.inf] == 0).all()


@every_row("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_row("backend", BACKENDS)
def test_masks_are_not_rounded_to_the_query(backend, dtype):
    """A float32 mask beside a half-precision query keeps its digits."""
    query, key, value = tensors(dtype=dtype)
    mask = 100 + torch.linspace(0, 1, 9)
    wanted = explicit(query.double(), key.double(), value.double(), mask.double())
    for given in (mask, mask.clone().requires_grad_()):
        log_z = ops.log_partition(query, key, log_weight=given, backend=backend)
        assert close([log_z], wanted[1:], log_partition_room(dtype, wanted[1]))


SIZES = [(1, 1), (1, 64), (3, 257), (257, 1), (64, 256), (512, 8), (1000, 3)]


@pytest.mark.medium
@one_in(
    2,
    {"size, value_size, is_causal": [(*size, place % 2 == 0) for place, size in enumerate(SIZES)], "backend": BACKENDS},
)
def test_head_sizes(backend, size, value_size, is_causal):
    """Values and all gradients, in one direction and the other, with and without a gradient for the mask."""
    inputs = [t.requires_grad_() for t in tensors(1, 2, 1, 5, 40, size, value_size)]
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64)
    hidden = torch.ones(5, 40, dtype=torch.bool).triu(1) & is_causal
    for log_weight in (None, weight, weight.clone().requires_grad_()):
        mine = [*inputs, *([log_weight] if log_weight is not None and log_weight.requires_grad else [])]
        mask = torch.zeros(40, dtype=torch.float64) if log_weight is None else log_weight
        wanted = explicit(*inputs, torch.where(hidden, -math.inf, mask))
        exact = torch.autograd.grad(finite_sum(*wanted), mine)
        options = {"log_weight": log_weight, "is_causal": is_causal, "backend": backend}
        found = ops.attention(*inputs, **options)
        assert close(found, wanted)
        assert close(torch.autograd.grad(finite_sum(*found), mine), exact)
        alone = ops.log_partition(*inputs[:2], **options)
        assert close([alone], wanted[1:])
        own = [t for t in mine if t is not inputs[2]]
        level = explicit(*inputs, torch.where(hidden, -math.inf, mask))[1]
        exact = torch.autograd.grad(level.sin().sum(), own)
        assert close(torch.autograd.grad(alone.sin().sum(), own), exact)


SEEN = torch.eye(6, 9, dtype=torch.bool) & (torch.arange(6) != 2).unsqueeze(1)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (1, 0)},
    "hidden": {"log_weight": torch.zeros(6, 9, dtype=torch.bool)},
    "hidden keys": {"log_weight": torch.full((9,), -math.inf)},
    "some hidden": {"log_weight": SEEN},
    "sink": {"sink": 0.5},
    "no sink": {"sink": -math.inf, "log_weight": torch.zeros(6, 9, dtype=torch.bool)},
    "cap": {"softcap": 5.0},
    "all": {"softcap": 5.0, "sink": 0.0, "window": (0, 1), "log_weight": torch.full((9,), -math.inf)},
}


def masks_of(options):
    """The mask of pairs that the options stand for."""
    distance = torch.arange(9) - torch.arange(6)[:, None]
    hidden = torch.zeros(6, 9, dtype=torch.bool)
    if "window" in options:
        left, right = options["window"]
        hidden |= (distance < -left) | (distance > right)
    if options.get("is_causal"):
        hidden |= distance > 0
    weight = options.get("log_weight")
    if weight is not None:
        hidden |= ~weight if weight.dtype == torch.bool else weight == -math.inf
    return torch.zeros(6, 9, dtype=torch.float64).masked_fill(hidden, -math.inf)


@pytest.mark.medium
@one_in(3, {"spread": [1.0, 200.0], "name": OPTIONS, "backend": ["reference", "auto"]})
def test_two_derivatives_are_finite_and_right(backend, name, spread):
    """Rows that see no key, and scores of ±1e4."""
    options = OPTIONS[name]
    inputs = [t.mul(spread).requires_grad_() for t in tensors()[:2]] + [tensors()[2].requires_grad_()]
    sink = options.get("sink")
    sink = None if sink is None else torch.tensor([sink], dtype=torch.float64)

    def derivatives(output, log_z):
        first = torch.autograd.grad(finite_sum(output, log_z), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g / spread).sin().sum() for g in first), inputs)
        return output, log_z, *first, *second

    found = derivatives(*ops.attention(*inputs, backend=backend, **options))
    wanted = derivatives(*explicit(*inputs, masks_of(options), options.get("softcap"), sink))
    if spread > 1 and name != "cap":
        assert bool(((inputs[0][:, 0] @ inputs[1][:, 0].mT).abs() > 1e4).any())
    for ours, theirs in zip(found, wanted, strict=True):
        assert not ours.isnan().any()
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9 * spread**2)


@one_in(
    3,
    {
        "name": [n for n in OPTIONS if "log_weight" not in OPTIONS[n]],
        "batch, length, keys": [(2, 6, 1), (2, 1, 1), (2, 0, 5), (2, 3, 0), (0, 3, 4), (2, 0, 0)],
    },
)
def test_few_queries_and_keys(batch, length, keys, name):
    inputs = [t.requires_grad_() for t in tensors(batch, 4, 2, length, keys)]
    options = OPTIONS[name]
    output, log_z = ops.attention(*inputs, **options)
    alone = ops.log_partition(*inputs[:2], **options)
    moments = ops.attention_moments(*inputs, **options)
    assert output.shape == (batch, 4, length, 5)
    assert log_z.shape == alone.shape == moments.entropy.shape == (batch, 4, length)
    if keys == 0:
        assert (output == 0).all()
        assert (log_z == options.get("sink", -math.inf)).all()
        assert torch.equal(alone, log_z)
        assert torch.equal(moments.log_partition, log_z)
    for loss in (finite_sum(output, log_z), torch.where(alone > -math.inf, alone, 0.0).sin().sum()):
        first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        found = [g for g in first if g is not None]
        second = torch.autograd.grad(sum(g.sin().sum() for g in found), inputs, allow_unused=True)
        assert all(g.isfinite().all() for g in (*found, *second) if g is not None)
    with torch.no_grad():
        bare = [t.detach() for t in inputs]
        assert close(ops.attention(*bare, **options), (output, log_z))
        assert close(ops.attention_moments(*bare, **options)[:2], moments[:2])
        if "softcap" not in options:
            assert ops.fisher_vp(bare[0], bare[1], bare[0], **options).isfinite().all()


@every_row("scale", [0.0, -1.3, 0])
@every_row("mask", ["causal", "window", "causal with weights"])
@every_row("backend", BACKENDS)
def test_scales_that_are_not_positive(backend, mask, scale):
    options = {"window": (2, 1)} if mask == "window" else {"is_causal": True}
    options |= {"log_weight": torch.ones(9)} if mask == "causal with weights" else {}
    inputs = [t.requires_grad_() for t in tensors()]
    query, key, value = inputs
    found = ops.attention(query, key, value, scale=scale, backend=backend, **options)
    mask = masks_of({k: v for k, v in options.items() if k != "log_weight"}) + (
        torch.ones(9) if mask == "causal with weights" else 0.0
    )
    wanted = explicit(query * scale * 8**0.5, key, value, mask)
    assert close(found, wanted)
    assert close(*(torch.autograd.grad(finite_sum(*r), inputs) for r in (found, wanted)))


EVERY_SHAPE = [(), (1,), (9,), (1, 1), (1, 9), (6, 1), (6, 9), (4, 1, 1), (4, 1, 9), (4, 6, 1), (2, 1, 1, 1), (2, 1, 6, 1),
               (2, 4, 1, 1), (1, 4, 6, 1), (2, 4, 6, 1), (2, 1, 1, 9), (2, 4, 6, 9)]  # fmt: skip


@pytest.mark.medium
@one_in(4, {"sink": [None, 0.0, "heads"], "boolean": [True, False], "shape": EVERY_SHAPE})
def test_a_mask_of_any_shape_is_what_it_broadcasts_to(shape, boolean, sink):
    """In every kernel and backend; with a sink, a query that is shut has a log Z all the same."""
    query, key, value = tensors()
    keep = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) > -0.4
    weight = keep if boolean else torch.full(shape, 0.7, dtype=torch.float64).masked_fill(~keep, -math.inf)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64) if sink == "heads" else sink
    given, wide = {"log_weight": weight, "sink": sink}, {"log_weight": weight.expand(2, 4, 6, 9), "sink": sink}
    output, level = matrices.attention(query, key, value, **wide)
    for backend in ("fused", "blocks", "reference"):
        found = ops.attention(query, key, value, **given, backend=backend)
        assert close(found, (output, level))
        assert close([ops.log_partition(query, key, **given, backend=backend)], [level])
        total = ops.attention_received(query, key, **given, backend=backend).total
        assert close([total], [matrices.received(query, key, **wide)])
    moments = matrices.moments(query, key, value, **wide)
    for backend in ("blocks", "reference"):
        found = ops.attention_moments(query, key, value, **given, backend=backend)._asdict()
        assert close([found[name] for name in moments], moments.values())
        product = ops.fisher_vp(query, key, query, **given, backend=backend)
        assert close([product], [matrices.fisher_vp(query, key, query, **wide)])


@every_row("window", [None, (1, 0)])
@every_row("keys", [1, 9])
def test_a_mask_of_no_queries(keys, window):
    query, key, _ = tensors(length=0)
    keep = torch.ones(4, 0, keys, dtype=torch.bool)
    found = ops.attention_received(query, key, log_weight=keep, window=window, sink=0.0)
    assert torch.equal(found.total, torch.zeros(2, 4, 9, dtype=torch.float64))
