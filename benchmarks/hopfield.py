"""Hopfield layers against the way of hopfield-layers, which holds every pass's weights.

    python benchmarks/hopfield.py

float32, one thread, batch 1, 4096 patterns of 512 numbers, 8 heads of size 64. About ten minutes and 10 GiB of memory.
hopfield-layers is no package that can be installed, so `_dense` does what it computes in a forward pass: the weights of
all pairs in each pass, of the heads that are still active, and their change since the last pass.
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cases
import explicit_attention
from cases import Case, Sides
from massieu.nn import Hopfield, HopfieldPooling

SIZE, HEADS, LENGTH = 512, 8, 4096
THRESHOLD = 1e-12


def _dense(query: Tensor, key: Tensor, value: Tensor, passes: int) -> Tensor:
    """(heads, L, D), (heads, N, D) and (heads, N, E) to (heads, L, E), by matrices of weights."""
    scale = query.shape[-1] ** -0.5
    active = torch.ones(len(query), 1, 1, dtype=torch.bool)
    weights = torch.softmax(query * scale @ key.mT, -1)
    for _ in range(passes - 1):
        chosen = weights.masked_select(active).view(-1, *weights.shape[1:])
        query = query.masked_scatter(active, chosen @ key.masked_select(active).view(-1, *key.shape[1:]))
        scores = (query * scale @ key.mT).masked_select(active).view(-1, *weights.shape[1:])
        before, weights = weights, weights.masked_scatter(active, torch.softmax(scores, -1))
        with torch.no_grad():
            active = active & ((before - weights).norm(dim=(1, 2)) > THRESHOLD)[:, None, None]
    return F.dropout(weights, 0.0) @ value


def _steps(passes: int, length: float) -> Sides:
    torch.manual_seed(0)
    layer = Hopfield(SIZE, HEADS, steps=passes)
    patterns = torch.randn(1, int(length), SIZE, requires_grad=True)
    inputs = [patterns, *layer.parameters()]

    def dense() -> object:
        parts = (layer.query(patterns), layer._part("stored", patterns), layer._part("projections", patterns))
        found = _dense(*(part.flatten(0, 1) for part in parts), passes)
        return torch.autograd.grad(layer.output(found.transpose(0, 1).flatten(1)).sum(), inputs)

    def ours() -> object:
        return torch.autograd.grad(layer(patterns).sum(), inputs)

    return dense, ours


def _pooling(passes: int, length: float) -> Sides:
    torch.manual_seed(0)
    pooling = HopfieldPooling(SIZE, HEADS, quantity=16, steps=passes)
    layer, patterns = pooling.hopfield, torch.randn(8, int(length), SIZE)
    inputs = list(pooling.parameters())

    def dense() -> object:
        query = layer.query(pooling.states).expand(len(patterns), -1, -1, -1)
        parts = (query, layer._part("stored", patterns), layer._part("projections", patterns))
        found = _dense(*(part.flatten(0, 1) for part in parts), passes).unflatten(0, (-1, HEADS))
        return torch.autograd.grad(layer.output(found.transpose(1, 2).flatten(2)).sum(), inputs)

    def ours() -> object:
        return torch.autograd.grad(pooling(patterns).sum(), inputs)

    return dense, ours


MEMORY_BOUND = (
    "the count is four passes of fused attention, forward and backward; the reference, which stores all weights, is limited "
    "by memory bandwidth, so that the result depends on the machine"
)
HELD, BOTH = "all weights held", "forward and backward"
CASES = {
    f"Hopfield, 1 pass, L = 4096, {BOTH}": Case(
        HELD, LENGTH, partial(_steps, 1), 0.5, 0.1, 7, count=explicit_attention.count(LENGTH, 1)
    ),
    f"Hopfield, 4 passes, L = 4096, {BOTH}": Case(
        HELD,
        LENGTH,
        partial(_steps, 4),
        0.1,
        0.03,
        rounds=3,
        fresh=True,
        count=explicit_attention.count(LENGTH, 4),
        why=MEMORY_BOUND,
    ),
    "HopfieldPooling, 16 states, 4 passes, 8 × 4096 patterns": Case(HELD, LENGTH, partial(_pooling, 4), 1.1, 1.1, 5),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES)
