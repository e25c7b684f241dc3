"""Losses over any shape, stride, mask and type of integer: those of all scores formed at once, gradients too."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ops import explicit
from tests.support.ops.layouts import LAYOUTS
from tests.support.ops.views import (
    few,
    layouts,
    leaf_and_view,
    make_booleans,
    make_weights,
    same,
)

from massieu import ops
from massieu.ops import reference, score_tiles

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def integers(shape, seed, below, dtype):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def vocabularies(draw_from):
    lead = tuple(draw_from(st.lists(few, max_size=3)))
    size, words, seed = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 9)), draw_from(st.integers(0, 99))
    shapes = {"hidden": (*lead, size), "weight": (words, size), "bias": (words,)}
    named = {
        name: leaf_and_view(shape, draw_from(layouts), seed + place)
        for place, (name, shape) in enumerate(shapes.items())
    }
    dtype = draw_from(st.sampled_from(INTEGERS))
    target, view = leaf_and_view(lead, draw_from(layouts), seed + 5, lambda *s, seed: integers(s, seed, words, dtype))
    options = {
        "reduction": draw_from(st.sampled_from(["none", "sum", "mean"])),
        "label_smoothing": draw_from(st.sampled_from([0.0, 0.2, 1.0])),
        "ignore_index": draw_from(st.sampled_from([-100, 0, words - 1])),
    }
    biased = draw_from(st.booleans())
    return named, biased, view(target), options, draw_from(st.sampled_from([(1, 1), (7, 3), (1 << 20, 2048)]))


@pytest.mark.medium
@given(vocabularies())
def test_linear_cross_entropy(drawn):
    with pytest.MonkeyPatch.context() as monkeypatch:
        named, biased, target, options, tile = drawn
        monkeypatch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        monkeypatch.setattr(score_tiles, "TILE_ROWS", tile[1])
        leaves = [leaf for name, (leaf, _) in named.items() if biased or name != "bias"]
        hidden, weight, bias = (view(leaf) for leaf, view in named.values())
        bias = bias if biased else None
        for with_level in (False, True):
            found = ops.linear_cross_entropy(
                hidden, weight, target, bias=bias, return_log_partition=with_level, **options
            )
            logits = torch.einsum("...d,vd->...v", hidden, weight) + (0.0 if bias is None else bias)
            flat = logits.reshape(-1, logits.shape[-1])
            wanted = F.cross_entropy(flat, target.long().reshape(-1), **options)
            wanted = wanted.reshape(target.shape) if options["reduction"] == "none" else wanted
            counted = (target.long() != options["ignore_index"]).any()
            if options["reduction"] == "mean" and not counted:
                assert (found.loss if with_level else found).isnan()
                return
            level = torch.logsumexp(logits, -1)
            same(tuple(found) if with_level else [found], [wanted, level] if with_level else [wanted], leaves)


@st.composite
def contrasts(draw_from):
    pairs, size = draw_from(st.integers(1, 7)), draw_from(st.integers(1, 5))
    extra, seed = draw_from(st.sampled_from([None, 0, 1, 4])), draw_from(st.integers(0, 99))
    shapes = {"query": (pairs, size), "key": (pairs, size)}
    if extra is not None:
        shapes["negatives"] = (extra, size)
    named = {
        name: leaf_and_view(shape, draw_from(layouts), seed + place)
        for place, (name, shape) in enumerate(shapes.items())
    }
    count = pairs + (extra or 0)
    kind = draw_from(st.sampled_from(["none", "booleans", "weights"]))
    if kind != "none":
        shape = (count,) if draw_from(st.booleans()) else (pairs, count)
        make = make_booleans if kind == "booleans" else make_weights
        threshold = draw_from(st.sampled_from([-math.inf, -0.7, math.inf]))
        named["log_weight"] = leaf_and_view(
            shape, draw_from(layouts), seed + 7, lambda *s, seed: make(s, seed, threshold)
        )
    symmetric = draw_from(st.booleans())
    positive = None
    if not symmetric and draw_from(st.booleans()):
        positive, view = leaf_and_view(
            (pairs,), draw_from(layouts), seed + 9, lambda *s, seed: integers(s, seed, pairs, torch.int64)
        )
        positive = view(positive).to(draw_from(st.sampled_from(INTEGERS)))
    return named, symmetric, positive, draw_from(st.sampled_from([(1, 1), (7, 3), (1 << 20, 2048)]))


def direction(scores, weight, visible, own):
    """Mean of log Z − the positive's score, 0 where nothing is visible; and log Z."""
    _, level = explicit.normalised(scores + weight, visible)
    some = visible.any(-1)
    return torch.where(some, level - own, 0.0).mean(), explicit.hide(level, visible)


def explicit_contrast(query, key, negatives, log_weight, positive, symmetric, temperature):
    keys = key if negatives is None else torch.cat([key, negatives])
    shaped = log_weight if log_weight is None or log_weight.ndim == 2 else log_weight.unsqueeze(0)
    scores, weight, visible = (
        part[0, 0]
        for part in explicit.tilted_scores(query[None, None], keys[None, None], shaped, scale=1 / temperature)
    )
    positive = torch.arange(len(query)) if positive is None else positive.long()
    own = scores.gather(1, positive.unsqueeze(1)).squeeze(1)
    loss, level = direction(scores, weight, visible, own)
    if not symmetric:
        return loss, level
    square = slice(None), slice(len(query))
    if log_weight is None or log_weight.ndim == 1:
        weight, visible = torch.zeros_like(weight), torch.ones_like(visible)
    back, other = direction(scores[square].mT, weight[square].mT, visible[square].mT, own)
    return (loss + back) / 2, torch.stack([level, other])


@pytest.mark.medium
@given(contrasts())
def test_info_nce(drawn):
    with pytest.MonkeyPatch.context() as monkeypatch:
        named, symmetric, positive, tile = drawn
        monkeypatch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        monkeypatch.setattr(score_tiles, "TILE_ROWS", tile[1])
        monkeypatch.setattr(reference, "BLOCK_PAIRS", tile[0])
        temperature = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
        arguments = {name: view(leaf) for name, (leaf, view) in named.items()}
        found = ops.info_nce(
            **arguments, positive=positive, symmetric=symmetric, temperature=temperature, return_log_partition=True
        )
        everything = {"negatives": None, "log_weight": None} | arguments
        wanted = explicit_contrast(**everything, positive=positive, symmetric=symmetric, temperature=temperature)
        leaves = [leaf for leaf, _ in named.values() if leaf.requires_grad]
        same(found, wanted, [*leaves, temperature])


@st.composite
def points(draw_from):
    count, size, seed = draw_from(st.integers(0, 8)), draw_from(st.integers(1, 4)), draw_from(st.integers(0, 99))
    named = leaf_and_view(
        (count, size), draw_from(st.sampled_from([name for name in LAYOUTS if name != "expanded"])), seed
    )
    labels = integers((count,), seed, 3, draw_from(st.sampled_from(INTEGERS)))
    return named, labels, draw_from(st.sampled_from([(1, 1), (7, 3), (1 << 20, 2048)]))


@pytest.mark.medium
@given(points())
def test_nca(drawn):
    with pytest.MonkeyPatch.context() as monkeypatch:
        (leaf, view), labels, tile = drawn
        monkeypatch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        monkeypatch.setattr(score_tiles, "TILE_ROWS", tile[1])
        x = view(leaf)
        found = ops.nca(x, labels, return_log_partition=True)
        others = ~torch.eye(len(x), dtype=torch.bool)
        distance = -(x.unsqueeze(1) - x).square().sum(-1)
        p, level = explicit.normalised(distance, others)
        peers = others & (labels.long().unsqueeze(1) == labels.long())
        share = torch.where(peers, p, 0.0).sum(-1)[peers.any(-1)]
        wanted = -share.log().mean(), explicit.hide(level, others)
        if not len(share):
            assert found.loss.isnan()
            found, wanted = found[1:], wanted[1:]
        same(found, wanted, [leaf])
