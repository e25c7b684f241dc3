"""Moments of attention's weights in tiles that stay in cache: few passes, in place, without gradient.

The twin of the formulas in `moments`, without gradient; the same numbers to rounding. Scores are held relative to each
query's mean score over its visible keys, and their moments under p relative to the largest, so that no variance is a
difference of large numbers.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Slab, Tile

PAIRS_PER_THREAD = 3 << 16
"""Scores of a tile per thread: two float32 buffers of this size stay in a 2 MiB second-level cache."""

Summarise = Callable[[Tile, Tensor, Tensor, Callable[[], None]], None]
"""(tile, numbers of visible keys, where seven sums go, what to do once exp(score − top) is in ``scratch[0]``).

The sums, stacked first: mean and root sum of squares of the scores over visible keys; then, of the scores less that
mean: the largest, `top`; and with e = exp(score − top): Σe, (Σe²)^½, Σe·(score − top),
Σe·(score − top)·(score − E_p score). The tile's buffers are overwritten.
"""


def moments(problem: AttentionProblem, summarise: Summarise, pairs_per_thread: int) -> tuple[Tensor, ...]:
    """The ten moments in the order of `MomentsResult`, each ``(B, Hk, G, L)``, and the output where there are values.

    Args:
        summarise: used where the log-weights are boolean or absent.
    """
    problem = tiles.prepared(problem)
    query, value = problem.query, problem.value
    assert isinstance(problem.scale, float)
    weighted = problem.log_weight is not None and problem.log_weight.dtype != torch.bool
    capacity = tiles.tile_capacity(problem, pairs_per_thread)
    buffers = query.new_empty(3 if weighted else 2, min(capacity, problem.pairs))
    results = [query.new_full(query.shape[:4], -torch.inf if i in (0, 6, 9) else 0.0) for i in range(10)]
    output = None if value is None else query.new_zeros(*query.shape[:4], value.shape[-1])
    for slab in tiles.slabs(problem, capacity):
        product = None if slab.value is None else query.new_empty(*slab.query.shape[:2], slab.value.shape[-1])
        parts = slab.tiles(buffers, problem.scale, problem.softcap)
        if weighted:
            found, total = _weighted_slab(problem, slab, parts, product)
        else:
            found, total = _slab(slab, parts, product, summarise)
        for result, moment in zip(results, found, strict=True):
            slab.of(result).copy_(moment.view(slab.shape))
        if output is not None and product is not None:
            product.div_(total).masked_fill_(total == torch.inf, 0.0)
            slab.of(output).copy_(product.view(*slab.shape, -1))
    return tuple(results) if output is None else (*results, output)


def _slab(
    slab: Slab, parts: Iterator[Tile], product: Tensor | None, summarise: Summarise
) -> tuple[list[Tensor], Tensor]:
    """The moments of a slab from its tiles' sums, and what divides the product of weights and values."""
    count = slab.per_query(slab.seen.count)
    divisor = count.clamp_min(1)
    sums = slab.new(7)
    for tile in parts:

        def multiply(tile: Tile = tile) -> None:
            if product is not None and slab.value is not None:
                torch.bmm(tile.scratch[0], slab.value[tile.heads], out=product[tile.heads])

        summarise(tile, divisor[tile.heads], sums[:, tile.heads], multiply)
    mean, spread, top, total, square, first, second = sums
    none = count == 0
    log_total, excess, highest = total.log(), first / total, mean + top
    return [
        (highest + log_total).masked_fill_(none, -torch.inf),
        (log_total - excess).masked_fill_(none, 0.0),
        (highest + excess).masked_fill_(none, 0.0),
        (second / total).clamp_min_(0).masked_fill_(none, 0.0),
        (1 / total).masked_fill_(none, 0.0),
        (square / total).square_().masked_fill_(none, 0.0),
        count.log(),
        mean.masked_fill(none, 0.0),
        (spread.square() / divisor).masked_fill_(none, 0.0),
        highest.masked_fill(none, -torch.inf),
    ], total.masked_fill_(none, torch.inf)


def summarise(tile: Tile, count: Tensor, sums: Tensor, weights_ready: Callable[[], None]) -> None:
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
    weights_ready()
    torch.sum(weights.mul_(scores), -1, keepdim=True, out=first)
    scores.sub_(first / total)
    torch.sum(weights.mul_(scores), -1, keepdim=True, out=second)


def lowest_exponent(dtype: torch.dtype) -> float:
    """Where exp is still a normal number: below, the CPU's exp is a hundred times slower."""
    return -708.0 if dtype == torch.float64 else -87.0


def _weighted_slab(
    problem: AttentionProblem, slab: Slab, parts: Iterator[Tile], product: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The same with float log-weights."""
    weight = _float_weight(problem, slab)
    top = weight.amax(-1, keepdim=True)
    prior = (weight - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    prior_total = prior.sum(-1, keepdim=True)
    none = slab.per_query((prior_total == 0).squeeze(-1))
    prior_log_z = slab.per_query((prior_total.log() + top).squeeze(-1))
    prior.div_(prior_total.masked_fill_(prior_total == 0, 1.0))
    weight = weight.masked_fill(weight == -torch.inf, HIDDEN)
    sums = slab.new(10)
    for tile in parts:
        _summarise_weighted(tile, tile.of_heads(weight), tile.of_heads(prior), sums[:, tile.heads])
        if product is not None and slab.value is not None:
            torch.bmm(tile.scratch[1], slab.value[tile.heads], out=product[tile.heads])
    *found, total = sums
    found.insert(6, prior_log_z)
    found = [m.masked_fill(none, -torch.inf if i in (0, 6, 9) else 0.0) for i, m in enumerate(found)]
    return found, total.masked_fill_(none, torch.inf)


def _float_weight(problem: AttentionProblem, slab: Slab) -> Tensor:
    """Log-weights of a slab's visible keys, shape (#b, #Hk, #G, #rows, keys), causality and window in them."""
    weight = tiles.slab_weight(problem, slab.batch, slab.rows)
    assert weight is not None
    seen, rows = slice(slab.seen.first, slab.seen.last), slab.rows
    weight = weight[..., seen].to(problem.dtype)
    hidden = hidden_by_position(problem.band, rows.start, rows.stop - rows.start, problem.key.shape[2], weight.device)
    return weight if hidden is None else torch.where(hidden[:, seen], -torch.inf, weight)


def _summarise_weighted(tile: Tile, log_weight: Tensor, prior: Tensor, sums: Tensor) -> None:
    """Nine moments of a tile and Σ exp(score + log-weight − largest), whose terms are left in ``scratch[1]``."""
    log_z, entropy, mean, variance, max_weight, collision, prior_mean, prior_variance, highest, total = sums.unbind(0)
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
    torch.sum(weights, -1, keepdim=True, out=total)
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
