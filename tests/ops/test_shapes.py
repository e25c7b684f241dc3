"""Any shape, stride, mask, scale and spelling: results and gradients are those of all weights formed at once.

None, one or many of everything; tensors that are transposed, expanded, every second of a larger one, or a slice of it;
masks of every layout that broadcasts; scales of every form; grouped queries in both spellings.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.ops.small_tiles import use_small_tiles
from tests.support.ops.views import few, layouts, leaf_and_view, make_booleans, make_weights, same

from massieu import ops
from massieu.ops import AtomBlock, AtomStore, fisher, fused, reference
from massieu.ops.shapes import check_problem


@st.composite
def problems(draw_from):
    """Leaves by name, and how the arguments are views of them."""
    batch, key_heads, group = draw_from(few), draw_from(st.integers(1, 3)), draw_from(st.integers(1, 3))
    length, keys = draw_from(st.sampled_from([0, 1, 2, 5, 9, 17])), draw_from(st.sampled_from([0, 1, 2, 6, 11, 19]))
    size, value_size = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 5))
    seed, heads = draw_from(st.integers(0, 99)), key_heads * group
    shapes = {
        "query": (batch, heads, length, size),
        "key": (batch, key_heads, keys, size),
        "value": (batch, key_heads, keys, value_size),
        "vector": (batch, heads, length, size),
    }
    named = {
        name: leaf_and_view(shape, draw_from(layouts), seed + place)
        for place, (name, shape) in enumerate(shapes.items())
    }
    pairs = (batch, heads, length, keys)
    mask = draw_from(st.sampled_from(["none", "booleans", "booleans", "weights", "weights"]))
    if mask != "none":
        shape = tuple(n if draw_from(st.booleans()) else 1 for n in pairs)
        while shape and shape[0] == 1 and draw_from(st.booleans()):
            shape = shape[1:]
        hidden = draw_from(st.sampled_from([-math.inf, -0.7, math.inf]))
        make = make_booleans if mask == "booleans" else make_weights
        named["log_weight"] = leaf_and_view(shape, draw_from(layouts), seed + 7, lambda *s, seed: make(s, seed, hidden))
    scale = draw_from(st.sampled_from([None, 0.7, 0, -1.3, "one", "heads", "broadcast"]))
    if isinstance(scale, str):
        some = (*(n if draw_from(st.booleans()) else 1 for n in pairs[:3]), 1)
        shape = {"one": (), "heads": (heads,), "broadcast": some}[scale]
        named["scale"] = leaf_and_view(shape, draw_from(layouts), seed + 8)
        scale = None
    sink = draw_from(st.sampled_from([None, None, 0.3, -math.inf, "one", "single", "heads", "broadcast"]))
    if isinstance(sink, str):
        some = (*(n if draw_from(st.booleans()) else 1 for n in pairs[:3]), 1)
        shape = {"one": (), "single": (1,), "heads": (heads,), "broadcast": some}[sink]
        named["sink"] = leaf_and_view(shape, draw_from(layouts), seed + 9, lambda *s, seed: make_weights(s, seed, -1))
        sink = None
    sides = st.sampled_from([0, 1, 4, 30])
    options = {
        "is_causal": draw_from(st.booleans()),
        "scale": scale,
        "sink": sink,
        "window": draw_from(st.none() | st.none() | sides | st.tuples(sides, sides)),
        "softcap": draw_from(st.sampled_from([None, None, 0.5, 4.0])),
    }
    options = {name: option for name, option in options.items() if option is not None}
    spelling = draw_from(st.sampled_from(["four", "five"])), (key_heads, group)
    blocks = draw_from(st.sampled_from([1, 7, 60, 1 << 20]))
    return (
        {name: pair[0] for name, pair in named.items()},
        {n: p[1] for n, p in named.items()},
        options,
        spelling,
        blocks,
    )


def spelt(arguments, options, spelling):
    """Queries, log-weights and scales as (B, Hk, G, L, ...), where the problem is to be spelt so."""
    form, heads = spelling
    five = dict(arguments)
    if form == "four":
        return five | options
    for name in ("query", "vector"):
        if name in five:
            five[name] = five[name].unflatten(1, heads)
    for name in ("log_weight", "scale", "sink"):
        if name in five and five[name].ndim > 2:
            four = five[name].reshape((1,) * (4 - five[name].ndim) + five[name].shape)
            five[name] = four.unsqueeze(1) if four.shape[1] == 1 else four.unflatten(1, heads)
    return five | options


def split(named, *positional):
    """Positional arguments and options of a call."""
    others = ["log_weight", "scale", "sink", "is_causal", "window"] + ([] if "vector" in positional else ["softcap"])
    return [named[name] for name in positional], {name: named[name] for name in others if name in named}


def differentiable(leaves, names):
    return [leaves[name] for name in names if name in leaves and leaves[name].requires_grad]


def backends_of(arguments, options):
    """Those that must all be right; the fused kernel, where it says that it is."""
    problem = check_problem(*arguments, **({"log_weight": None, "scale": None} | options))
    return ["auto", "reference"] + ([] if fused.CPU.refuses(problem) else ["fused"])


@pytest.mark.medium
@given(problems())
def test_attention_and_log_partition(problem):
    with pytest.MonkeyPatch.context() as monkeypatch:
        leaves, views, options, spelling, blocks = problem
        monkeypatch.setattr(reference, "BLOCK_PAIRS", blocks)
        arguments = {name: views[name](leaf) for name, leaf in leaves.items()}
        ours = spelt(arguments, options, spelling)
        found_arguments, found_options = split(ours, "query", "key", "value")
        wanted_arguments, wanted_options = split(arguments | options, "query", "key", "value")
        wanted = explicit.attention(*wanted_arguments, **wanted_options)
        four = [wanted[0], wanted[1]]
        some = differentiable(leaves, ("query", "key", "value", "log_weight", "scale", "sink"))
        for backend in backends_of(found_arguments, found_options):
            found = ops.attention(*found_arguments, backend=backend, **found_options)
            found = [result.reshape(like.shape) for result, like in zip(found, four, strict=True)]
            alone = ops.log_partition(*found_arguments[:2], backend=backend, **found_options)
            wanted = explicit.attention(*wanted_arguments, **wanted_options)
            same([*found, alone.reshape(four[1].shape)], [*wanted, wanted[1]], some)


@pytest.mark.medium
@given(problems())
def test_moments(problem):
    with pytest.MonkeyPatch.context() as monkeypatch:
        leaves, views, options, spelling, blocks = problem
        monkeypatch.setattr(reference, "BLOCK_PAIRS", blocks)
        use_small_tiles(monkeypatch, blocks)
        arguments = {name: views[name](leaf) for name, leaf in leaves.items()}
        ours = spelt(arguments, options, spelling)
        found_arguments, found_options = split(ours, "query", "key", "value")
        wanted_arguments, wanted_options = split(arguments | options, "query", "key", "value")
        wanted = explicit.moments(*wanted_arguments, **wanted_options)
        some = differentiable(leaves, ("query", "key", "value", "log_weight", "scale", "sink"))
        with torch.no_grad():
            tiles = ops.attention_moments(*found_arguments, **found_options)
        for name, other in wanted.items():
            one = getattr(tiles, name).reshape(other.shape)
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-9, msg=name)
        found = ops.attention_moments(*found_arguments, **found_options)
        found = [getattr(found, name).reshape(other.shape) for name, other in wanted.items()]
        same(found, list(wanted.values()), some)


@pytest.mark.medium
@given(problems())
def test_fisher_vp(problem):
    with pytest.MonkeyPatch.context() as monkeypatch:
        leaves, views, options, spelling, blocks = problem
        monkeypatch.setattr(reference, "BLOCK_PAIRS", blocks)
        monkeypatch.setattr(fisher, "PAIRS_PER_THREAD", blocks)
        arguments = {name: views[name](leaf) for name, leaf in leaves.items()}
        found_arguments, found_options = split(spelt(arguments, options, spelling), "query", "key", "vector")
        wanted_arguments, wanted_options = split(arguments | options, "query", "key", "vector")
        wanted = explicit.fisher_vp(*wanted_arguments, **wanted_options)
        with torch.no_grad():
            tiles = ops.fisher_vp(*found_arguments, **found_options).reshape(wanted.shape)
        torch.testing.assert_close(tiles, wanted.detach(), rtol=0, atol=1e-9)
        found = ops.fisher_vp(*found_arguments, **found_options).reshape(wanted.shape)
        same([found], [wanted], differentiable(leaves, ("query", "key", "vector", "log_weight", "scale", "sink")))


# --- stores ----------------------------------------------------------------------------------------------------------

BUFFER = draw(2, 2, 9, 6, seed=1)
VIEWS = {
    "halves of one buffer": (BUFFER[0], BUFFER[1]),
    "one tensor twice": (BUFFER[0], BUFFER[0]),
    "overlapping": (BUFFER.flatten()[:108].view(2, 9, 6), BUFFER.flatten()[30:138].view(2, 9, 6)),
    "columns of one": (BUFFER[0, ..., :4], BUFFER[0, ..., 4:]),
    "transposed": (BUFFER[0].mT.contiguous().mT, BUFFER[1].transpose(0, 1).contiguous().transpose(0, 1)),
    "expanded": (BUFFER[0, :1].expand(2, 9, 6), None),
    "every second": (BUFFER[0, :, ::2], BUFFER[1, :, ::2]),
    "negated in place of a copy": (torch._neg_view(BUFFER[0]), None),
    "leaf with a gradient": (torch.nn.Parameter(BUFFER[0]), None),
    "none": (BUFFER[0, :, :0], BUFFER[1, :, :0]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_atoms_of_any_strides_are_stored(name, tmp_path):
    points, values = VIEWS[name]
    weight = torch.zeros(1, 1, dtype=torch.float64).expand(points.shape[:2])
    store = AtomStore.write(tmp_path / "store", [AtomBlock(points, values, weight)])
    assert len(store) == points.shape[1]
    for block in store.blocks():
        for found, wanted in zip(block, (points, values, weight), strict=True):
            assert found is None if wanted is None else torch.equal(found, wanted.detach())
