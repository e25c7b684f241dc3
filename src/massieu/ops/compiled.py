"""The tile's sums of `moment_blocks` fused by `torch.compile` into two passes over the scores.

Worth its compilation (5 to 30 seconds, once a process and kind of problem, needs a C++ compiler) only for long runs.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.ops import moment_blocks
from massieu.ops.tiles import HIDDEN, Tile

PAIRS_PER_THREAD = 1 << 20
"""Scores of a tile per thread: each is read from memory once, so that a tile need not fit the cache."""

VARIANTS = 16
"""At most so many compilations; two dtypes need two, changed settings (threads, determinism) one more each."""


@functools.cache
def compiler_exists() -> bool:
    """Whether `torch.compile` would find a C++ compiler."""
    # Here and not above: the compiler takes as long to import as all the rest of torch.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def summarise(tile: Tile, count: Tensor, sums: Tensor, weights_ready: Callable[[], None]) -> None:
    """One tile, as `moment_blocks.summarise`; one of a single row or key, which would be compiled anew, eagerly."""
    heads, rows, keys = tile.scores.shape
    if heads * rows < 2 or keys < 2:
        moment_blocks.summarise(tile, count, sums, weights_ready)
        return
    tile.hide()
    found = _kernel()(tile.scores.view(-1, keys), tile.scratch[0].view(-1, keys), count.reshape(-1))
    sums.copy_(found.view(-1, heads, rows, 1))
    weights_ready()


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # The limit is this function's own; the user's configuration stays as it is.
    return torch.compile(_sums, dynamic=True, recompile_limit=VARIANTS)  # pyright: ignore[reportCallIssue]


def _sums(scores: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """Seven sums of each row; exp(score − top) is left in `weights`.

    Two passes over a row: its mean and largest, then the rest. So the last sum is a difference here, of numbers no
    larger than its own size plus log² n.
    """
    seen = scores > HIDDEN / 2
    mean = torch.where(seen, scores, 0.0).sum(-1) / count
    top = scores.amax(-1)
    spread = torch.where(seen, scores - mean.unsqueeze(-1), 0.0).square().sum(-1).sqrt()
    shifted = scores - top.unsqueeze(-1)
    exponential = shifted.exp()
    weights.copy_(exponential)
    total = exponential.sum(-1)
    square = exponential.square().sum(-1).sqrt()
    products = exponential * shifted
    first = products.sum(-1)
    second = (products * shifted).sum(-1) - first.square() / total
    return torch.stack([mean, spread, top - mean, total, square, first, second])
