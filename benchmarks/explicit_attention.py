"""Attention with its matrix of weights written out: what libraries without a fused kernel do, for comparison.

Eight heads of size 64 with projections to and from a width of 512; `passes` retrievals, of which all but the last read
the keys back as the next query and the last one reads the values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from massieu import ops

HEADS, SIZE = 8, 64
WIDTH = HEADS * SIZE
SCALE = SIZE**-0.5
Retrieve = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def explicit(query: Tensor, key: Tensor, value: Tensor, passes: int) -> Tensor:
    """softmax(β q kᵀ) in each pass, nothing else kept or looked at: the leanest way."""
    for _ in range(passes - 1):
        query = torch.softmax(SCALE * query @ key.mT, -1) @ key
    return torch.softmax(SCALE * query @ key.mT, -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, passes: int) -> Tensor:
    """The same by fused attention, no matrix kept."""
    for _ in range(passes - 1):
        query = ops.attention(query, key, key, scale=SCALE).output
    return ops.attention(query, key, value, scale=SCALE).output


def layer(retrieve: Retrieve, length: int, passes: int) -> harness.Work:
    """Forward and backward pass of a layer over `length` tokens, to the tokens and the four projections."""
    torch.manual_seed(0)
    tokens = torch.randn(1, length, WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4)]
    inputs = [tensor.requires_grad_() for tensor in (tokens, *weights)]

    def work() -> object:
        parts = [F.linear(tokens, weight).view(1, length, HEADS, SIZE).transpose(1, 2) for weight in weights[:3]]
        found = retrieve(parts[0], parts[1], parts[2], passes).transpose(1, 2).reshape(1, length, WIDTH)
        return torch.autograd.grad(F.linear(found, weights[3]).sum(), inputs)

    return work


def count(length: int, passes: int) -> harness.Count:
    """Two products and an exponential of each score forwards, five and one backwards; three products a projection."""
    pairs = HEADS * length**2
    attention = harness.Count(flops=7 * 2 * SIZE * pairs, exponentials=2 * pairs)
    return attention * passes + harness.Count(flops=4 * 3 * 2 * length * WIDTH**2)
