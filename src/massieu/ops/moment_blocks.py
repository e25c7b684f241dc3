"""Moments of attention's weights in tiles: few passes over the scores, most of them in place, without gradient.

It gives the numbers of `moments`' reference to rounding. Only the sums are computed that the requested moments need. Moments
under p are those of scores relative to the largest, so that no variance is a difference of large numbers.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Plan, Slab, Tile

ROWS = 256
"""Queries of a tile per thread, at most."""
KEYS = 1024
"""Keys of a tile with so many queries. Its two float32 buffers fit a second-level cache; tiles of more keys are up to 1.6 times
slower, and so is a matrix product of fewer queries with more keys."""
FEWEST_PAIRS = 1 << 17
"""Least scores of a tile per thread, so that an operation takes longer than its start."""
WEIGHTED_PAIRS_PER_THREAD = 1 << 18
"""Scores of a tile per thread with float log-weights, whose tiles have all keys."""

COUNTED = 1 << 24
"""Whole numbers up to this are exact in float32."""

Sums = dict[str, Tensor]
"""Sums over the keys of each query, by name, each (h, G·rows, 1).

`mean`, `spread`: mean and root sum of squares of the scores over visible keys. `top`: the largest score; `position`: its
key. With x = score − top, e = exp(x): `total` Σe, `square` (Σe²)^½, `first` Σe·x, `second` Σe·x².
"""


class Formula(NamedTuple):
    """How a moment follows from the sums."""

    needs: set[str]
    """Names of the sums."""
    compute: Callable[[Sums], Tensor]
    without_key: float
    """The moment of a query that sees no key."""


def _log_partition(sums: Sums) -> Tensor:
    """top + log Σe; −∞ where a query has no score, though its weights are not numbers."""
    top = sums["top"]
    return (top + sums["total"].log()).masked_fill_(top == -torch.inf, -torch.inf)


def _variance(sums: Sums) -> Tensor:
    """E x² − (E x)². As x is relative to the largest score, both are at most the variance and log² n: few digits cancel."""
    mean = sums["first"] / sums["total"]
    return (sums["second"] / sums["total"] - mean.square_()).clamp_min_(0)


def _entropy(sums: Sums) -> Tensor:
    """log Z − E score = log Σe − E x, where the largest score cancels."""
    return sums["total"].log() - sums["first"] / sums["total"]


def _position(sums: Sums) -> Tensor:
    return sums["position"].masked_fill(~sums["top"].isfinite(), -1)


MOMENTS: dict[str, Formula] = {
    "log_partition": Formula({"top", "total"}, _log_partition, -torch.inf),
    "entropy": Formula({"top", "total", "first"}, _entropy, 0.0),
    "mean_score": Formula({"top", "total", "first"}, lambda sums: sums["top"] + sums["first"] / sums["total"], 0.0),
    "score_variance": Formula({"top", "total", "first", "second"}, _variance, 0.0),
    "max_weight": Formula({"top", "total"}, lambda sums: 1 / sums["total"], 0.0),
    "collision": Formula({"top", "total", "square"}, lambda sums: (sums["square"] / sums["total"]).square_(), 0.0),
    "prior_log_partition": Formula(set(), lambda sums: sums["count"].log(), -torch.inf),
    "prior_mean_score": Formula({"mean"}, lambda sums: sums["mean"], 0.0),
    "prior_score_variance": Formula(
        {"mean", "top", "spread"}, lambda sums: sums["spread"].square() / sums["count"], 0.0
    ),
    "max_score": Formula({"top"}, lambda sums: sums["top"], -torch.inf),
    "max_position": Formula({"top", "position"}, _position, -1),
}
"""Formulas without float log-weights: every visible key counts the same."""

WEIGHTED: dict[str, Formula] = MOMENTS | {
    "log_partition": Formula({"top", "tilt", "total"}, lambda sums: sums["tilt"] + sums["total"].log(), -torch.inf),
    "entropy": Formula(
        {"top", "total", "excess"}, lambda sums: sums["total"].log() - sums["excess"] / sums["total"], 0.0
    ),
    "score_variance": Formula(
        {"top", "total", "first", "deviation"}, lambda sums: sums["deviation"] / sums["total"], 0.0
    ),
    "prior_log_partition": Formula(set(), lambda sums: sums["prior"], -torch.inf),
    "prior_score_variance": Formula({"mean", "spread"}, lambda sums: sums["spread"], 0.0),
}
"""Formulas with float log-weights w. With m the largest x + w of a query, e = exp(x + w − m): `excess` is Σe·(x + w − m),
`deviation` is Σe·(x − E_p x)², and `tilt` is m + top. `spread` is the variance of the scores under the prior, and `prior` its
log-partition."""

Names = tuple[str, ...]


def counts_keys(problem: AttentionProblem) -> bool:
    """Whether every visible key counts the same: there are no float log-weights."""
    return problem.log_weight is None or problem.log_weight.dtype == torch.bool


def moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of these names, each ``(B, Hk, G, L)``, and the output where there are values."""
    if counts_keys(problem):
        pairs_per_thread = max(FEWEST_PAIRS, ROWS * min(KEYS, problem.key.shape[2]))
        return run(Plan.of(problem, pairs_per_thread, buffers=2, keys=KEYS), MOMENTS, names, counted)
    return run(Plan.of(problem, WEIGHTED_PAIRS_PER_THREAD, buffers=3), WEIGHTED, names, _weighted)


def run(
    plan: Plan, formulas: dict[str, Formula], names: Names, sums_of: Callable[[Slab, Set[str]], Sums]
) -> tuple[Tensor, ...]:
    """Moments from sums.

    Args:
        sums_of: of a slab and names, the sums of these names; it also fills the slab's product.
    """
    chosen = [formulas[name] for name in names]
    # The product is that of exp(score − top), divided by their sum.
    needed: set[str] = set() if plan.problem.value is None else {"top", "total"}
    needed.update(*(formula.needs for formula in chosen))

    def work(slab: Slab) -> list[Tensor]:
        sums = sums_of(slab, needed)
        return [formula.compute(sums) for formula in chosen]

    return plan.run(work, [formula.without_key for formula in chosen])


def _empty_sums(slab: Slab, names: Set[str]) -> Sums:
    """Tensors for the sums of these names, not filled, each (b·Hk, G·rows, 1)."""
    sums: Sums = {}
    for name in names:
        sums[name] = slab.new(dtype=torch.int64 if name == "position" else None)
    return sums


def counted(slab: Slab, needed: Set[str]) -> Sums:
    """The sums where every visible key counts the same."""
    sums = {"count": slab.per_query(slab.seen.count).clamp_min(1)}
    sums |= _empty_sums(slab, needed)
    of_heads: Sums = {}
    for tile in slab.tiles() if needed else ():
        # The tiles of the same heads follow each other, from their first keys to the last.
        of_heads = _with_tile(None if tile.keys.start == 0 else of_heads, tile, needed)
        if tile.keys.stop == slab.key.shape[2]:
            lose_without_score(of_heads)
            for name in needed:
                sums[name][tile.heads] = of_heads[name]
            if "total" in needed:
                tile.divide_product(of_heads["total"])
    return sums


def lose_without_score(sums: Sums) -> None:
    """Where a query has no score at a key that it sees, its largest one becomes −∞, and what has weights in it NaN.

    Of queries that see no key nobody reads them.
    """
    if "top" not in sums:
        return
    lost = tiles.without_score(sums["top"])
    sums["top"].masked_fill_(lost, -torch.inf)
    if "total" in sums:
        sums["total"].masked_fill_(lost, torch.nan)


def _with_tile(before: Sums | None, tile: Tile, needed: Set[str]) -> Sums:
    """The sums over a tile's keys and the keys before it: each line is one pass over the tile, most of them in place.

    Args:
        before: over the keys before it; None where there are none.
    """
    scores = tile.scores
    sums: Sums = {}
    if "mean" in needed:
        tile.clear(scores)
        sums["count"] = tile.count()
        sums["mean"] = scores.sum(-1, keepdim=True).div_(sums["count"].clamp_min(1))
    if "top" in needed:
        tile.hide()
        # Not −∞: no difference from it is one of infinities.
        sums["top"] = scores.amax(-1, keepdim=True).clamp_min_(HIDDEN)
        if before is not None:
            sums["top"] = torch.maximum(sums["top"], before["top"])
        scores.sub_(sums["top"])
    if "position" in needed:
        sums["position"] = _first_largest(scores, tile.scratch[0]) + tile.slab.seen.first + tile.keys.start
    # By what the exponentials of the keys before shrink, now that another score is the largest.
    fall = None
    if before is not None and "top" in needed:
        fall = (before["top"] - sums["top"]).clamp_min_(lowest_exponent(scores.dtype))
    if "spread" in needed:
        deviations = torch.sub(scores, sums["mean"] - sums["top"], out=tile.scratch[0])
        tile.clear(deviations)
        sums["spread"] = torch.linalg.vector_norm(deviations, dim=-1, keepdim=True)
    if "total" in needed:
        # Last, since it changes the scores.
        sums |= _exponential_sums(tile, needed, None if fall is None else fall.exp())
    return sums if before is None else merged(before, sums, fall)


def _exponential_sums(tile: Tile, needed: Set[str], kept: Tensor | None) -> Sums:
    """The sums of a tile that have e in them, and its product. Of the scores, relative to the largest, the lowest are raised.

    Args:
        kept: the factor of the product of the keys before; None where there are none.
    """
    scores, weights = tile.scores, tile.scratch[0]
    # exp2 is as fast as exp where that is fast, and several times as fast where it is not.
    torch.mul(scores.clamp_min_(lowest_exponent(scores.dtype)), LOG2_E, out=weights).exp2_()
    tile.clear(weights)
    sums = {"total": weights.sum(-1, keepdim=True)}
    if "square" in needed:
        sums["square"] = torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    tile.add_product(weights, kept)
    for name in ("first", "second"):
        if name in needed:
            sums[name] = weights.mul_(scores).sum(-1, keepdim=True)
    return sums


def merged(before: Sums, new: Sums, fall: Tensor | None) -> Sums:
    """The sums over two sets of keys.

    Args:
        before: over the first keys, relative to the largest score of these.
        new: over the others, relative to the largest of all, which `top` is already.
        fall: the first top less the second, at most 0.
    """
    sums = dict(new)
    if fall is not None:
        # With x' = x + fall: Σe' = Σe·exp(fall), Σe'x' = (Σex + fall Σe) exp(fall), Σe'x'² likewise.
        kept = fall.exp()
        if "total" in new:
            sums["total"] = new["total"] + kept * before["total"]
        if "square" in new:
            sums["square"] = torch.hypot(new["square"], kept * before["square"])
        if "first" in new:
            sums["first"] = new["first"] + kept * (before["first"] + fall * before["total"])
        if "second" in new:
            second = before["second"] + fall * (2 * before["first"] + fall * before["total"])
            sums["second"] = new["second"] + kept * second
        if "position" in new:
            sums["position"] = torch.where(before["top"] < new["top"], new["position"], before["position"])
    if "count" in new:
        sums["count"] = before["count"] + new["count"]
    if "mean" in new:
        # Means and sums of squares of two samples (Chan, Golub and LeVeque, 1983).
        share = new["count"] / sums["count"].clamp_min(1)
        difference = new["mean"] - before["mean"]
        sums["mean"] = before["mean"] + share * difference
        if "spread" in new:
            between = difference * (share * before["count"]).sqrt()
            sums["spread"] = torch.hypot(torch.hypot(before["spread"], new["spread"]), between)
    return sums


def _first_largest(scores: Tensor, buffer: Tensor) -> Tensor:
    """The first key whose score is 0, which is the largest; any key where there is none."""
    keys = scores.shape[-1]
    if keys > COUNTED:
        return torch.argmax(scores, -1, keepdim=True)
    # Three quick passes; an argmax is as slow as ten. Every score but the largest has its floor below 0.
    backwards = -torch.arange(keys, dtype=scores.dtype, device=scores.device)
    numbers = torch.add(backwards, torch.floor(scores, out=buffer), alpha=keys, out=buffer)
    return (-numbers.amax(-1, keepdim=True)).long()


def _weighted(slab: Slab, needed: Set[str]) -> Sums:
    """The sums with float log-weights."""
    weight = _float_weight(slab)
    top = weight.amax(-1, keepdim=True)
    # The prior is the softmax of the log-weights; all zeros for a query that sees no key.
    prior = (weight - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    total = prior.sum(-1, keepdim=True)
    prior_log_partition = slab.per_query((total.log() + top).squeeze(-1))
    prior.div_(total.masked_fill_(total == 0, 1.0))
    weight = weight.masked_fill(weight == -torch.inf, HIDDEN)
    sums = _empty_sums(slab, needed)
    sums["prior"] = prior_log_partition
    if needed:
        for tile in slab.tiles():
            tile_sums = {name: numbers[tile.heads] for name, numbers in sums.items()}
            _summarise_weighted(tile, tile.select_heads(weight), tile.select_heads(prior), tile_sums)
    return sums


def lowest_exponent(dtype: torch.dtype) -> float:
    """The lowest score whose exp is still a normal number: below, the CPU's exp is a hundred times slower."""
    return -708.0 if dtype == torch.float64 else -87.0


def _float_weight(slab: Slab) -> Tensor:
    """Log-weights of a slab's visible keys, shape (#b, #Hk, #G, #rows, keys), causality and window in them."""
    problem = slab.plan.problem
    rows = slab.rows
    seen = slice(slab.seen.first, slab.seen.last)
    weight = tiles.slab_log_weight(problem, slab.batch, rows)
    assert weight is not None
    weight = weight[..., seen].to(problem.dtype)
    hidden = hidden_by_position(problem.band, rows.start, rows.stop - rows.start, problem.key.shape[2], weight.device)
    if hidden is None:
        return weight
    return torch.where(hidden[:, seen], -torch.inf, weight)


def _summarise_weighted(tile: Tile, log_weight: Tensor, prior: Tensor, sums: Sums) -> None:
    """The sums of a tile with float log-weights, `HIDDEN` for hidden pairs, and their softmax."""
    scores = tile.scores
    products, weights = tile.scratch
    # The same numbers in the layout of log-weights: (b, Hk, G, rows, keys), or (1, h, G, rows, keys).
    split_scores = tile.split_heads(scores)
    split_products = tile.split_heads(products)
    tile.hide()
    top = scores.amax(-1, keepdim=True)
    scores.sub_(top)
    if "top" in sums:
        sums["top"].copy_(top)
    if "position" in sums:
        sums["position"].copy_(_first_largest(scores, products) + tile.slab.seen.first)
    # Scores are x = score − top from here on, and 0 for hidden pairs.
    tile.clear(scores)
    if "mean" in sums:
        torch.mul(split_scores, prior, out=split_products)
        torch.sum(products, -1, keepdim=True, out=sums["mean"]).add_(top)
    if "spread" in sums:
        torch.sub(scores, sums["mean"] - top, out=weights)
        torch.mul(tile.split_heads(weights), prior, out=split_products)
        torch.sum(products.mul_(weights), -1, keepdim=True, out=sums["spread"])
    if "total" not in sums:
        return
    torch.add(split_scores, log_weight, out=split_products)
    largest = products.amax(-1, keepdim=True)
    products.sub_(largest).clamp_min_(lowest_exponent(scores.dtype))
    torch.mul(products, LOG2_E, out=weights).exp2_()
    tile.clear(weights)
    torch.sum(weights, -1, keepdim=True, out=sums["total"])
    if "tilt" in sums:
        torch.add(top, largest, out=sums["tilt"])
    if "square" in sums:
        torch.linalg.vector_norm(weights, dim=-1, keepdim=True, out=sums["square"])
    if "excess" in sums:
        torch.sum(products.mul_(weights), -1, keepdim=True, out=sums["excess"])
    if "first" in sums:
        torch.sum(torch.mul(scores, weights, out=products), -1, keepdim=True, out=sums["first"])
    if "deviation" in sums:
        scores.sub_(sums["first"] / sums["total"])
        torch.sum(torch.mul(scores, weights, out=products).mul_(scores), -1, keepdim=True, out=sums["deviation"])
    tile.multiply(weights, sums["total"])
