"""Tensors in any layout of memory, and the comparison of results and gradients: what Hypothesis over shapes needs."""

import math

import torch
from hypothesis import strategies as st
from tests.support.ops.explicit import draw, finite
from tests.support.ops.layouts import LAYOUTS


def leaf_and_view(shape, layout, seed, make=draw):
    """A leaf, and a view of it of the shape in a layout of memory."""
    of_leaf, view = LAYOUTS[layout]
    leaf = make(*of_leaf(shape), seed=seed)
    return (leaf.requires_grad_() if leaf.is_floating_point() else leaf), lambda leaf: view(leaf, shape)


layouts = st.sampled_from(list(LAYOUTS))
few = st.sampled_from([0, 1, 1, 2, 3, 3, 3])


def make_booleans(shape, seed, threshold):
    return draw(*shape, seed=seed) > threshold


def make_weights(shape, seed, threshold):
    weight = draw(*shape, seed=seed)
    return weight.masked_fill(draw(*shape, seed=seed + 1) <= threshold, -math.inf)


def same(found, wanted, leaves, bound=1e-9):
    """Equal results, and equal gradients of their sum with unlike factors."""
    losses = [0.0, 0.0]
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape
        assert not one.isnan().any()
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=bound)
        factor = draw(*one.shape, seed=place + 50)
        losses = [losses[0] + (finite(one) * factor).sum(), losses[1] + (finite(other) * factor).sum()]
    if not any(loss.requires_grad for loss in losses):
        return
    ours, theirs = (torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True) for loss in losses)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound)
