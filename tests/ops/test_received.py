"""What each key receives, against the sum of explicit weights: numbers, derivatives, extremes, memory, and where it runs."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.rows import every_row, one_in

from massieu import ops

SHAPES = {"square": (40, 40), "more queries": (51, 40), "more keys": (33, 40), "one query": (1, 40)}
POSITIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window": (3, 1)},
    "causal window": {"is_causal": True, "window": 5},
    "long window": {"window": (2, 90)},
    "offset": {"is_causal": True, "query_offset": 3},
    "long offset": {"is_causal": True, "query_offset": 30},
    "offset window": {"window": (1, 2), "query_offset": 4},
    "negative offset": {"is_causal": True, "query_offset": -2},
    "window behind a negative offset": {"window": (1, 2), "query_offset": -4},
    "nobody sees a key": {"is_causal": True, "query_offset": -40},
}
NEGATIVE = {"scale": -0.37, "is_causal": True}
WEIGHTS = ("none", "keys kept", "keys", "queries", "pairs kept", "pairs")


def inputs(length=40, keys=40, heads=4, key_heads=2, size=8, dtype=torch.float64):
    return draw(2, heads, length, size, dtype=dtype), draw(2, key_heads, keys, size, seed=1, dtype=dtype)


def weights(name, length, keys):
    some = draw(2, 1, length, keys, seed=2)
    of_keys = draw(4, 1, keys, seed=3)
    return {
        "none": None,
        "keys kept": of_keys > -0.5,
        "keys": of_keys.masked_fill(of_keys > 1.0, -math.inf),
        "queries": draw(length, 1, seed=4).masked_fill(torch.arange(length)[:, None] == 2, -math.inf),
        "pairs kept": some > 0.0,
        "pairs": some.masked_fill(some > 0.5, -math.inf),
    }[name]


@one_in(
    2,
    {
        "weight": WEIGHTS,
        "position, length, softcap": [
            ("causal", 51, None),
            ("offset", 33, 1.5),
            ("long offset", 33, None),
            ("offset window", 51, None),
        ],
    },
)
def test_it_is_the_sum_of_weights(position, length, softcap, weight):
    query, key = inputs(length, 40)
    options = POSITIONS[position] | {"log_weight": weights(weight, length, 40), "softcap": softcap}
    found, wanted = ops.attention_received(query, key, **options), explicit.received(query, key, **options)
    torch.testing.assert_close(found.total, wanted)
    torch.testing.assert_close(found.share, wanted / wanted.sum(-1, keepdim=True))


@pytest.mark.slow
@every_row(
    "weight, position, shape",
    zip(*zip(*itertools.product(WEIGHTS, POSITIONS), strict=True), itertools.cycle(SHAPES), strict=False),
)
def test_numbers_and_gradients_in_every_shape(shape, position, weight, monkeypatch):
    """In blocks of keys where each pair has a weight; capped, or with a sink."""
    monkeypatch.setattr("massieu.ops.reference.BLOCK_PAIRS", 4000)
    query, key = (tensor.requires_grad_() for tensor in inputs(*SHAPES[shape]))
    log_weight = weights(weight, *SHAPES[shape])
    leaves = [query, key]
    if log_weight is not None and log_weight.is_floating_point():
        leaves.append(log_weight.requires_grad_())
    sink = draw(4, seed=5).requires_grad_()
    for more in ({}, {"softcap": 1.5}, {"sink": sink}):
        options = POSITIONS[position] | {"log_weight": log_weight} | more
        found, wanted = ops.attention_received(query, key, **options), explicit.received(query, key, **options)
        torch.testing.assert_close(found.total, wanted, atol=1e-10, rtol=1e-10)
        whole = wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(found.share, wanted / torch.where(whole == 0, 1.0, whole), atol=1e-10, rtol=1e-10)
        of = [*leaves, sink] if "sink" in more else leaves
        cotangent = draw(*wanted.shape, seed=6)
        theirs = torch.autograd.grad(wanted, of, cotangent)
        for one, other in zip(torch.autograd.grad(found.total, of, cotangent), theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(ops.attention_received(query, key, **options).total, wanted)


@every_row("backend", ["fused", "blocks", "reference"])
def test_every_query_gives_one_and_the_sink_takes_the_rest(backend):
    query, key = inputs(70, 70)
    total, share = ops.attention_received(query, key, is_causal=True, backend=backend)
    torch.testing.assert_close(total.sum(-1), torch.full((2, 4), 70.0, dtype=torch.float64))
    torch.testing.assert_close(share.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    sink = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)
    taken = (sink[:, None] - ops.log_partition(query, key, is_causal=True, sink=sink)).exp().sum(-1)
    total, share = ops.attention_received(query, key, is_causal=True, sink=sink, backend=backend)
    torch.testing.assert_close(70 - total.sum(-1), taken)
    torch.testing.assert_close(share.sum(-1), torch.ones(2, 4, dtype=torch.float64))


@one_in(3, {"position": ["all", "causal", "offset window"], "weight": ["none", "keys", "pairs kept"]})
def test_documents_are_as_one_call_each(position, weight):
    """Of unlike lengths, one without queries and one without keys; with positions, and the position of the largest score."""
    query, key = (tensor.requires_grad_() for tensor in inputs(26, 30))
    lengths, key_lengths = [5, 0, 9, 4, 8], [6, 3, 13, 0, 8]
    log_weight, options = weights(weight, 26, 30), POSITIONS[position]
    documents = ops.Documents.of_lengths(lengths, key_lengths)
    found = ops.attention_received(query, key, log_weight=log_weight, documents=documents, **options)
    wanted, places, first = [], [], 0
    for some_queries, some_keys in zip(query.split(lengths, 2), key.split(key_lengths, 2), strict=True):
        rows = slice(sum(one.shape[3] for one in places) if places else 0, None)
        own = {"log_weight": log_weight} if log_weight is None else {
            "log_weight": log_weight[..., first : first + some_keys.shape[2]]
        }  # fmt: skip
        if weight == "pairs kept":
            assert own["log_weight"] is not None
            own["log_weight"] = own["log_weight"][:, :, rows][:, :, : some_queries.shape[2]]
        wanted.append(ops.attention_received(some_queries, some_keys, **own, **options))
        place = ops.attention_moments(some_queries, some_keys, moments=["max_position"], **own, **options).max_position
        assert place is not None
        places.append(torch.where(place < 0, -1, place + first)[:, :, None])
        first += some_keys.shape[2]
    for ours, theirs in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, -1))
    totals = torch.cat([one.total for one in wanted], -1)
    ours, theirs = (torch.autograd.grad(one.square().sum(), (query, key)) for one in (found.total, totals))
    torch.testing.assert_close(ours, theirs)
    for backend in ("blocks", "reference"):
        with torch.no_grad():
            place = ops.attention_moments(
                query,
                key,
                log_weight=log_weight,
                documents=documents,
                moments=["max_position"],
                backend=backend,
                **options,
            ).max_position
        assert torch.equal(place, torch.cat(places, -1).squeeze(2))


def test_it_is_the_derivative_of_log_z_by_log_weights():
    query, key = inputs(30, 20)
    level = torch.zeros(2, 4, 1, 20, dtype=torch.float64, requires_grad=True)
    log_z = ops.log_partition(query, key, log_weight=level, scale=0.7)
    (wanted,) = torch.autograd.grad(log_z.sum(), level)
    torch.testing.assert_close(ops.attention_received(query, key, scale=0.7).total, wanted.squeeze(2))


@every_row("scale", [0.4, -0.3, 0.0, "one", "head", "query"])
@every_row("grouped", [False, True])
def test_scales_and_both_forms_of_a_query(scale, grouped):
    query, key = inputs()
    if isinstance(scale, str):
        shape = {"one": (1,), "head": (4,), "query": (2, 4, 40, 1)}[scale]
        scale = draw(*shape, seed=2).requires_grad_()
    wanted = explicit.received(query, key, scale=scale, is_causal=True)
    given, own = query, scale
    if grouped:
        given = query.unflatten(1, (2, 2))
        own = scale.unflatten(1, (2, 2)) if isinstance(scale, torch.Tensor) and scale.ndim == 4 else scale
    found = ops.attention_received(given, key, scale=own, is_causal=True)
    assert found.total.shape == found.share.shape == ((2, 2, 2, 40) if grouped else (2, 4, 40))
    torch.testing.assert_close(found.total.flatten(1, -2), wanted.flatten(1, -2))
    if isinstance(scale, torch.Tensor):
        cotangent = draw(2, 4, 40, seed=3)
        theirs = torch.autograd.grad(wanted, scale, cotangent)
        ours = torch.autograd.grad(found.total.reshape(2, 4, 40), scale, cotangent)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.medium
@one_in(2, {"backend": ["fused", "reference"], "weight": ["none", "keys", "pairs"]})
def test_first_and_second_derivatives_by_finite_differences(weight, backend):
    query, key = (tensor.requires_grad_() for tensor in inputs(3, 3, 2, 1, 2))
    sink, given = draw(2, seed=3).requires_grad_(), None
    if weight != "none":
        given = draw(*((3,) if weight == "keys" else (3, 3)), seed=4).requires_grad_()
    backend = "reference" if weight == "pairs" else backend

    def function(q, k, b, w=None):
        return ops.attention_received(q, k, sink=b, log_weight=w, is_causal=True, backend=backend).total

    leaves = (query, key, sink) if given is None else (query, key, sink, given)
    check_derivatives(function, leaves)


@one_in(2, {"is_causal": [False, True], "weighted": [False, True]})
def test_transforms(is_causal, weighted):
    """`jvp`, `vmap` and the Hessian of `grad` in `grad`, against autograd through explicit weights."""
    query, key = inputs(4, 4, 2, 2, 3)
    options = {"is_causal": is_causal, "log_weight": draw(1, 2, 4, 4, seed=2) if weighted else None}

    def ours(q):
        return ops.attention_received(q, key, **options).share

    def theirs(q):
        total = explicit.received(q, key, **options)
        return total / total.sum(-1, keepdim=True)

    direction = draw(*query.shape, seed=3)
    found, wanted = (torch.func.jvp(function, (query,), (direction,)) for function in (ours, theirs))
    torch.testing.assert_close(found, wanted)
    several = torch.stack([query, 2 * query])
    torch.testing.assert_close(torch.func.vmap(ours)(several), torch.stack([theirs(query), theirs(2 * query)]))

    def along(function):
        slope = torch.func.grad(lambda q: (function(q) * draw(2, 2, 4, seed=5)).sum())
        return torch.func.grad(lambda q: (slope(q) * direction).sum())(query)

    torch.testing.assert_close(along(ours), along(theirs))


@one_in(2, {"dtype": [torch.bfloat16, torch.float16], "backend": ["fused", "blocks", "reference"]})
def test_half_precision_rounds_no_log_partition(dtype, backend):
    """Log Z near 40: rounded to bfloat16 the totals would be wrong by a tenth."""
    query, key = (6 * tensor for tensor in inputs(size=16))
    query, key = query.to(dtype), key.to(dtype)
    for options in (
        {"is_causal": True},
        {"log_weight": draw(2, 1, 40, 40) > 0},
        {"scale": torch.tensor([0.3])},
        NEGATIVE,
    ):
        found = ops.attention_received(query, key, backend=backend, **options).total
        assert found.dtype == torch.float32
        # Each weight is as far off as its row's log Z, and float32 has none below the smallest.
        tiny = torch.finfo(torch.float32).tiny
        level = explicit.attention(query, key, key, **options)[1]
        room = explicit.log_partition_room(dtype, level)
        torch.testing.assert_close(found.double(), explicit.received(query, key, **options), atol=tiny, rtol=room)
    if backend != "blocks":
        leaf = query.clone().requires_grad_()
        ops.attention_received(leaf, key, is_causal=True, backend=backend).total[..., 3].sum().backward()
        exact = query.double().requires_grad_()
        explicit.received(exact, key, is_causal=True)[..., 3].sum().backward()
        eps = torch.finfo(dtype).eps
        assert leaf.grad is not None and exact.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=8 * eps * float(exact.grad.abs().max()), rtol=0)


@one_in(
    3,
    {
        "backend": ["auto", "fused", "blocks", "reference"],
        "position": ["all", "causal", "window"],
        "pairs": [False, True],
    },
)
def test_nan_and_infinity_reach_the_keys_that_see_them(backend, position, pairs):
    query, key = inputs(20, 20, 2, 2)
    options = POSITIONS[position] | ({"log_weight": torch.ones(20, 20, dtype=torch.bool)} if pairs else {})
    *_, visible = explicit.tilted_scores(query, key, **options)
    plain = ops.attention_received(query, key, **options).total
    for number in (math.nan, math.inf):
        broken = query.clone()
        broken[0, 1, 9] = number
        total, share = ops.attention_received(broken, key, backend=backend, **options)
        seen = torch.zeros_like(visible[:, :, 0])
        seen[0, 1] = visible[0, 1, 9]
        assert torch.equal(total.isnan(), seen)
        assert share[0, 1].isnan().all() and not share[1].isnan().any()
        rest = ~seen & (torch.arange(20) > 12)
        torch.testing.assert_close(total[rest], plain[rest])
    hidden = {"log_weight": torch.arange(20) != 3}
    assert not ops.attention_received(broken, key, backend=backend, **POSITIONS[position], **hidden).total[..., 3].any()
    broken = query.clone().requires_grad_(backend != "blocks")
    with torch.no_grad():
        broken[0, 1, 9] = math.nan
    if backend != "blocks":
        (slope,) = torch.autograd.grad(
            ops.attention_received(broken, key, backend=backend, **options).total[0].sum(), broken
        )
        assert slope[0, 1, 9].isnan().all() and not slope[0, 0].isnan().any()


@every_row("backend", ["fused", "blocks", "reference"])
def test_queries_that_see_no_key_give_nothing(backend):
    query, key = inputs(20, 20, 2, 2)
    keep = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[7] = False
    query[:, :, 7] = math.nan
    found = ops.attention_received(query, key, log_weight=keep, backend=backend)
    others = torch.arange(20) != 7
    wanted = explicit.received(query[:, :, others], key, log_weight=keep[others])
    torch.testing.assert_close(found.total, wanted)
    nothing = ops.attention_received(query, key, log_weight=torch.zeros(20, dtype=torch.bool), backend=backend)
    assert (nothing.total == 0).all() and (nothing.share == 0).all()
    # Keys that come after every query.
    total = ops.attention_received(query[:, :, :5], key, is_causal=True, backend=backend).total
    assert (total[:, :, 5:] == 0).all() and (total[:, :, :5] > 0).all()


@every_row("backend", ["fused", "blocks", "reference"])
@every_row("hides", ["mask", "mask of pairs", "window"])
def test_queries_that_see_the_sink_alone_give_nothing(hides, backend):
    """Their log Z is finite, and what they hold, NaN too, or a sink of NaN, is nobody's."""
    query, key = inputs(20, 20, 2, 2)
    sink = torch.full((2, 2, 20, 1), 0.3, dtype=torch.float64)
    options = {"sink": sink}
    keep = (torch.arange(20) != 7).unsqueeze(1)
    shut = 7 if hides != "window" else 19
    if hides == "window":
        options |= {"window": 1, "query_offset": 2}
    else:
        options["log_weight"] = keep if hides == "mask" else keep.expand(20, 20)
    wanted = explicit.received(query, key, **options)
    query[:, :, shut] = sink[:, :, shut] = math.nan
    found = ops.attention_received(query, key, **options, backend=backend).total
    torch.testing.assert_close(found, wanted)


def test_extremes():
    query, key = inputs(16, 16, dtype=torch.float32)
    for size in (0.0, 1e-20, 60.0, 1e4):
        wanted = explicit.received(size * query, key, is_causal=True)
        found = ops.attention_received(size * query, key, is_causal=True).total
        # A score of size s is known to s/2^23, and so is the logarithm of a weight.
        torch.testing.assert_close(found.double(), wanted, atol=2e-5 + 2e-6 * size, rtol=0)
    no_keys, no_queries = query[:, :, :0], key[:, :, :0]
    for is_causal in (False, True):
        assert ops.attention_received(query, no_queries, is_causal=is_causal).total.shape == (2, 4, 0)
        none = ops.attention_received(no_keys, key, is_causal=is_causal)
        assert torch.equal(none.total, torch.zeros(2, 4, 16)) and torch.equal(none.share, none.total)
    with torch.autocast("cpu", torch.bfloat16):
        half = ops.attention_received(query, key, is_causal=True).total
    torch.testing.assert_close(half, ops.attention_received(query.bfloat16(), key.bfloat16(), is_causal=True).total)


@pytest.mark.parametrize("position", ["all", "causal", "causal window", "rectangular"])
def test_memory_is_linear(position):
    length = 700 if position == "rectangular" else 1024
    query, key = inputs(length, 1024, 2, 1, dtype=torch.float32)
    query.requires_grad_()
    options = {"is_causal": True} if position == "rectangular" else POSITIONS[position]
    with LargestTensor() as largest:
        ops.attention_received(query, key, **options).total.square().sum().backward()
    assert largest.numbers <= 10 * query.numel() < length * 1024


@pytest.mark.slow
@every_row("case", ["causal", "pairs"])
def test_compiled_without_graph_breaks(case):
    query, key = (tensor.requires_grad_() for tensor in inputs(33, 33, dtype=torch.float32))
    options = {"log_weight": draw(2, 1, 33, 33) > 0} if case == "pairs" else POSITIONS[case]

    def loss(q, k):
        total, share = ops.attention_received(q, k, **options)
        return (total.square() + share).sum()

    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(query, key), (query, key))
    for one, other in zip(found, torch.autograd.grad(loss(query, key), (query, key)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        query[0, 0, 5] = math.nan
        total = torch.compile(loss, backend="aot_eager", fullgraph=True)(query, key)
        assert total.isnan()


@every_row("backend", ["fused", "flash", 3])
def test_bad_calls(backend):
    query, key = inputs(5, 5)
    if backend == "fused":
        with pytest.raises(ValueError, match="soft cap"):
            ops.attention_received(query, key, softcap=2.0, backend=backend)
        query.requires_grad_()
        with pytest.raises(ValueError, match="blocks"):
            ops.attention_received(query, key, backend="blocks")
    else:
        with pytest.raises((TypeError, ValueError), match=f"backend.*{backend}"):
            ops.attention_received(query, key, backend=backend)
