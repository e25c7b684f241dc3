"""Attention and log Z in tiles that stay in cache, for soft-capped scores, which the fused kernel does not have.

Without gradient: the twin of `reference`, the same numbers to rounding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem

PAIRS_PER_THREAD = 1 << 18
"""Scores of a tile per thread: one float32 buffer of this size, a query's scores and values fill the cache of a core."""


def attention(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, Hk, G, L, E)`` and log-partition ``(B, Hk, G, L)``."""
    output, log_z = _run(problem)
    assert output is not None
    return output.to(problem.query.dtype), log_z


def log_partition(problem: AttentionProblem) -> tuple[Tensor]:
    """log Z alone."""
    return (_run(replace(problem, value=None))[1],)


@torch.no_grad()
def _run(problem: AttentionProblem) -> tuple[Tensor | None, Tensor]:
    problem = tiles.prepared(problem)
    query, value = problem.query, problem.value
    assert isinstance(problem.scale, float)
    capacity = tiles.tile_capacity(problem, PAIRS_PER_THREAD)
    buffers = query.new_empty(1, min(capacity, problem.pairs))
    log_z = query.new_full(query.shape[:4], -torch.inf)
    output = None if value is None else query.new_zeros(*query.shape[:4], value.shape[-1])
    for slab in tiles.slabs(problem, capacity):
        weight = tiles.finite_weight(problem, slab)
        none = slab.per_query(slab.seen.count) == 0
        levels = slab.new()
        product = None if slab.value is None else query.new_empty(*slab.query.shape[:2], slab.value.shape[-1])
        for tile in slab.tiles(buffers, problem.scale, problem.softcap):
            top, total = tile.exponentiate(weight)
            torch.add(top, total.log(), out=levels[tile.heads])
            if product is not None and slab.value is not None:
                torch.bmm(tile.scores, slab.value[tile.heads], out=product[tile.heads]).div_(total)
        slab.of(log_z).copy_(levels.masked_fill_(none, -torch.inf).view(slab.shape))
        if output is not None and product is not None:
            slab.of(output).copy_(product.masked_fill_(none, 0.0).view(*slab.shape, -1))
    return output, log_z
