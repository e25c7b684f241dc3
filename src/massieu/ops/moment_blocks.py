"""Moments of attention's weights in tiles: few passes over the scores, in place or compiled, without gradient.

The twin of the formulas in `moments`; the same numbers to rounding. Scores are held relative to each query's mean score
over its visible keys, and their moments under p relative to the largest, so that no variance is a difference of large
numbers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Plan, Slab, Tile

PAIRS_PER_THREAD = 3 << 16
"""Scores of a tile per thread: two float32 buffers of this size stay in a 2 MiB second-level cache."""

COMPILED_PAIRS_PER_THREAD = 1 << 20
"""The same where each is read from memory once, so that a tile need not fit the cache."""

VARIANTS = 16
"""At most so many compilations; two dtypes need two, changed settings (threads, determinism) one more each."""

LEVELS = [-torch.inf if place in (0, 6, 9) else 0.0 for place in range(10)]
"""The ten moments, in the order of `MomentsResult`, of a query that sees no key."""

Summarise = Callable[[Tile, Tensor, Tensor], None]
"""(tile, numbers of visible keys, where seven sums go); it overwrites the tile's buffers, and multiplies the values.

The sums, stacked first: mean and root sum of squares of the scores over visible keys; then, of the scores less that
mean: the largest, `top`; and with e = exp(score − top): Σe, (Σe²)^½, Σe·(score − top),
Σe·(score − top)·(score − E_p score).
"""


def is_fusable(problem: AttentionProblem) -> bool:
    """Whether tiles can be compiled: float log-weights have none."""
    return problem.log_weight is None or problem.log_weight.dtype == torch.bool


def moments(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The ten moments in the order of `MomentsResult`, each ``(B, Hk, G, L)``, and the output where there are values."""
    if not is_fusable(problem):
        return Plan.of(problem, PAIRS_PER_THREAD, buffers=3).run(_weighted_slab, LEVELS)
    return Plan.of(problem, PAIRS_PER_THREAD, buffers=2).run(functools.partial(_slab, summarise), LEVELS)


def compiled_moments(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """`moments`, each tile fused by `torch.compile` into two passes over its scores, where that can be."""
    if not is_fusable(problem):
        return moments(problem)
    plan = Plan.of(problem, COMPILED_PAIRS_PER_THREAD, buffers=2)
    return plan.run(functools.partial(_slab, summarise_compiled), LEVELS)


def _slab(summarise: Summarise, slab: Slab) -> list[Tensor]:
    """The moments of a slab from its tiles' sums."""
    count = slab.per_query(slab.seen.count)
    divisor = count.clamp_min(1)
    sums = slab.new(7)
    for tile in slab.tiles():
        summarise(tile, divisor[tile.heads], sums[:, tile.heads])
    mean, spread, top, total, square, first, second = sums
    log_total, excess, highest = total.log(), first / total, mean + top
    return [
        highest + log_total,
        log_total - excess,
        highest + excess,
        (second / total).clamp_min_(0),
        1 / total,
        (square / total).square_(),
        count.log(),
        mean,
        spread.square() / divisor,
        highest,
    ]


def summarise(tile: Tile, count: Tensor, sums: Tensor) -> None:
    """The sums of a tile, eagerly: each line is one pass over it (see `Summarise`)."""
    mean, spread, top, total, square, first, second = sums.unbind(0)
    scores, weights = tile.scores, tile.scratch[0]
    tile.clear(scores)
    torch.sum(scores, -1, keepdim=True, out=mean).div_(count)
    scores.sub_(mean)
    tile.clear(scores)
    torch.linalg.vector_norm(scores, dim=-1, keepdim=True, out=spread)
    tile.hide()
    torch.amax(scores, -1, keepdim=True, out=top)
    torch.exp(scores.sub_(top).clamp_min_(lowest_exponent(scores.dtype)), out=weights)
    tile.clear(weights)
    torch.sum(weights, -1, keepdim=True, out=total)
    torch.linalg.vector_norm(weights, dim=-1, keepdim=True, out=square)
    tile.multiply(weights, total)
    torch.sum(weights.mul_(scores), -1, keepdim=True, out=first)
    scores.sub_(first / total)
    torch.sum(weights.mul_(scores), -1, keepdim=True, out=second)


def lowest_exponent(dtype: torch.dtype) -> float:
    """Where exp is still a normal number: below, the CPU's exp is a hundred times slower."""
    return -708.0 if dtype == torch.float64 else -87.0


def _weighted_slab(slab: Slab) -> list[Tensor]:
    """The same with float log-weights."""
    weight = _float_weight(slab)
    top = weight.amax(-1, keepdim=True)
    prior = (weight - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    prior_total = prior.sum(-1, keepdim=True)
    prior_log_z = slab.per_query((prior_total.log() + top).squeeze(-1))
    prior.div_(prior_total.masked_fill_(prior_total == 0, 1.0))
    weight = weight.masked_fill(weight == -torch.inf, HIDDEN)
    sums = slab.new(9)
    for tile in slab.tiles():
        _summarise_weighted(tile, tile.of_heads(weight), tile.of_heads(prior), sums[:, tile.heads])
    found = list(sums)
    found.insert(6, prior_log_z)
    return found


def _float_weight(slab: Slab) -> Tensor:
    """Log-weights of a slab's visible keys, shape (#b, #Hk, #G, #rows, keys), causality and window in them."""
    problem, seen, rows = slab.plan.problem, slice(slab.seen.first, slab.seen.last), slab.rows
    weight = tiles.slab_weight(problem, slab.batch, rows)
    assert weight is not None
    weight = weight[..., seen].to(problem.dtype)
    hidden = hidden_by_position(problem.band, rows.start, rows.stop - rows.start, problem.key.shape[2], weight.device)
    return weight if hidden is None else torch.where(hidden[:, seen], -torch.inf, weight)


def _summarise_weighted(tile: Tile, log_weight: Tensor, prior: Tensor, sums: Tensor) -> None:
    """Nine moments of a tile, all but the seventh."""
    log_z, entropy, mean, variance, max_weight, collision, prior_mean, prior_variance, highest = sums.unbind(0)
    scores, (products, weights) = tile.scores, tile.scratch
    wide, wide_products = tile.spread_out(scores), tile.spread_out(products)
    tile.hide()
    torch.amax(scores, -1, keepdim=True, out=highest)
    tile.clear(scores)
    torch.mul(wide, prior, out=wide_products)
    torch.sum(products, -1, keepdim=True, out=prior_mean)
    scores.sub_(prior_mean)
    torch.mul(wide, prior, out=wide_products)
    torch.sum(products.mul_(scores), -1, keepdim=True, out=prior_variance)
    torch.add(wide, log_weight, out=wide_products)
    top = products.amax(-1, keepdim=True)
    torch.exp(products.sub_(top).clamp_min_(lowest_exponent(scores.dtype)), out=weights)
    tile.clear(weights)
    total = weights.sum(-1, keepdim=True)
    log_total = total.log()
    torch.sub(log_total, products.mul_(weights).sum(-1, keepdim=True).div_(total), out=entropy)
    shift = torch.mul(scores, weights, out=products).sum(-1, keepdim=True).div_(total)
    scores.sub_(shift)
    torch.mul(scores, weights, out=products)
    torch.div(products.mul_(scores).sum(-1, keepdim=True), total, out=variance)
    torch.add(prior_mean, shift, out=mean)
    torch.add(prior_mean + top, log_total, out=log_z)
    torch.reciprocal(total, out=max_weight)
    collision.copy_(torch.linalg.vector_norm(weights, dim=-1, keepdim=True).div_(total).square_())
    tile.multiply(weights, total)


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


def summarise_compiled(tile: Tile, count: Tensor, sums: Tensor) -> None:
    """`summarise` compiled; a tile of a single row or key, which would be compiled anew, eagerly."""
    heads, rows, keys = tile.scores.shape
    if heads * rows < 2 or keys < 2:
        summarise(tile, count, sums)
        return
    tile.hide()
    found = _kernel()(tile.scores.view(-1, keys), tile.scratch[0].view(-1, keys), count.reshape(-1))
    sums.copy_(found.view(-1, heads, rows, 1))
    tile.multiply(tile.scratch[0], sums[3])


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
