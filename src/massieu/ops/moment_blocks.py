"""Moments of attention's weights in tiles: few passes over the scores, most of them in place, without gradient.

The twin of the formulas in `moments`; the same numbers to rounding. Only the sums are taken that the wanted moments need.
Moments under p are those of scores relative to the largest, so that no variance is a difference of large numbers.
"""

from collections.abc import Callable, Set

import torch
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Plan, Slab, Tile

ROWS, KEYS = 256, 1024
"""Queries a thread and keys of a tile, at most: two float32 buffers of this size fit a second-level cache. Longer tiles are up
to 1.6 times slower, and so is the product of fewer queries with the keys."""

FEWEST_PAIRS = 1 << 17
"""Scores of a tile per thread, so that an operation takes longer than its start."""

WEIGHTED_PAIRS_PER_THREAD = 1 << 18
"""Scores of a tile per thread with float log-weights, whose tiles have all keys."""

COUNTED = 1 << 24
"""Positions below this are float32 numbers."""

Sums = dict[str, Tensor]
"""Of each query, those that the moments need.

`mean`, `spread`: mean of the scores over visible keys, and root of the sum of their squares about it. `top`: the largest
score; `position`: its key. With x = score − top, e = exp(x): `total` Σe, `square` (Σe²)^½, `first` Σe·x, `second` Σe·x².
"""


def _variance(sums: Sums) -> Tensor:
    """A difference of numbers no larger than itself and log² n: x is relative to the largest score."""
    mean = sums["first"] / sums["total"]
    return (sums["second"] / sums["total"] - mean.square_()).clamp_min_(0)


Formulas = dict[str, tuple[set[str], Callable[[Sums], Tensor], float]]

MOMENTS: Formulas = {
    "log_partition": ({"top", "total"}, lambda of: of["top"] + of["total"].log(), -torch.inf),
    "entropy": ({"top", "total", "first"}, lambda of: of["total"].log() - of["first"] / of["total"], 0.0),
    "mean_score": ({"top", "total", "first"}, lambda of: of["top"] + of["first"] / of["total"], 0.0),
    "score_variance": ({"top", "total", "first", "second"}, _variance, 0.0),
    "max_weight": ({"top", "total"}, lambda of: 1 / of["total"], 0.0),
    "collision": ({"top", "total", "square"}, lambda of: (of["square"] / of["total"]).square_(), 0.0),
    "prior_log_partition": (set(), lambda of: of["count"].log(), -torch.inf),
    "prior_mean_score": ({"mean"}, lambda of: of["mean"], 0.0),
    "prior_score_variance": ({"mean", "top", "spread"}, lambda of: of["spread"].square() / of["count"], 0.0),
    "max_score": ({"top"}, lambda of: of["top"], -torch.inf),
    "max_position": ({"top", "position"}, lambda of: of["position"].masked_fill(~of["top"].isfinite(), -1), -1),
}
"""What each moment needs, its formula where there are no log-weights, and what it is for a query that sees no key."""

WEIGHTED: Formulas = MOMENTS | {
    "log_partition": ({"top", "tilt", "total"}, lambda of: of["tilt"] + of["total"].log(), -torch.inf),
    "entropy": ({"top", "total", "excess"}, lambda of: of["total"].log() - of["excess"] / of["total"], 0.0),
    "score_variance": ({"top", "total", "first", "deviation"}, lambda of: of["deviation"] / of["total"], 0.0),
    "prior_log_partition": (set(), lambda of: of["prior"], -torch.inf),
    "prior_score_variance": ({"mean", "spread"}, lambda of: of["spread"], 0.0),
}
"""The same with float log-weights w: `tilt` is the largest x + w, e = exp(x + w − tilt), `excess` Σe·(x + w − tilt) and
`deviation` Σe·(x − E_p x)², `tilt` with the largest score added; `spread` is a variance under the prior."""

Names = tuple[str, ...]


def counts_keys(problem: AttentionProblem) -> bool:
    """Whether every visible key counts the same: there are no float log-weights."""
    return problem.log_weight is None or problem.log_weight.dtype == torch.bool


def moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of these names, each ``(B, Hk, G, L)``, and the output where there are values."""
    if counts_keys(problem):
        pairs_per_thread = max(FEWEST_PAIRS, ROWS * min(KEYS, problem.key.shape[2]))
        return _run(Plan.of(problem, pairs_per_thread, buffers=2, keys=KEYS), MOMENTS, names, _counted)
    return _run(Plan.of(problem, WEIGHTED_PAIRS_PER_THREAD, buffers=3), WEIGHTED, names, _weighted)


def _run(plan: Plan, formulas: Formulas, names: Names, sums_of: Callable[[Slab, Set[str]], Sums]) -> tuple[Tensor, ...]:
    """Moments by the sums that `sums_of` finds for a slab."""
    needed = set() if plan.problem.value is None else {"top", "total"}
    needed.update(*(formulas[name][0] for name in names))

    def work(slab: Slab) -> list[Tensor]:
        found = sums_of(slab, needed)
        return [formulas[name][1](found) for name in names]

    return plan.run(work, [formulas[name][2] for name in names])


def _space(slab: Slab, needed: Set[str]) -> Sums:
    """Where the sums of a slab go."""
    return {name: slab.new(1, dtype=torch.int64 if name == "position" else None)[0] for name in needed}


def _counted(slab: Slab, needed: Set[str]) -> Sums:
    """The sums where every visible key counts the same."""
    sums = _space(slab, needed) | {"count": slab.per_query(slab.seen.count).clamp_min(1)}
    of_heads: Sums = {}
    for tile in slab.tiles() if needed else ():
        # The tiles of the same heads follow each other, from their first keys to the last.
        of_heads = _with_tile(None if tile.keys.start == 0 else of_heads, tile, needed)
        if tile.keys.stop == slab.key.shape[2]:
            for name in needed:
                sums[name][tile.heads] = of_heads[name]
            if "total" in needed:
                tile.divide_product(of_heads["total"])
    return sums


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
        sums["top"] = scores.amax(-1, keepdim=True)
        if before is not None:
            sums["top"] = torch.maximum(sums["top"], before["top"])
        scores.sub_(sums["top"])
    if "position" in needed:
        sums["position"] = _first_largest(scores, tile.scratch[0]) + tile.slab.seen.first + tile.keys.start
    # By what the exponentials of the keys before shrink, now that another score is the largest.
    fall = None
    if before is not None and "top" in needed:
        fall = (before["top"] - sums["top"]).clamp_min_(lowest_exponent(scores.dtype))
    if "total" in needed:
        sums |= _exponential_sums(tile, needed, None if fall is None else fall.exp())
    if "spread" in needed:
        # Last, since it spoils the scores.
        scores.sub_(sums["mean"] - sums["top"])
        tile.clear(scores)
        sums["spread"] = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)
    return sums if before is None else _merged(before, sums, fall)


def _exponential_sums(tile: Tile, needed: Set[str], kept: Tensor | None) -> Sums:
    """The sums of a tile that have e in them, and its product; the scores, relative to the largest, stay as they are.

    Args:
        kept: the factor of the product of the keys before; None where there are none.
    """
    scores, weights = tile.scores, tile.scratch[0]
    # exp2 is as fast as exp where that is fast, and several times as fast where it is not.
    torch.mul(scores, LOG2_E, out=weights).clamp_min_(lowest_exponent(scores.dtype) * LOG2_E).exp2_()
    tile.clear(weights)
    sums = {"total": weights.sum(-1, keepdim=True)}
    if "square" in needed:
        sums["square"] = torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    tile.add_product(weights, kept)
    for name in ("first", "second"):
        if name in needed:
            sums[name] = weights.mul_(scores).sum(-1, keepdim=True)
    return sums


def _merged(before: Sums, new: Sums, fall: Tensor | None) -> Sums:
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
    if "mean" in new:
        # Means and sums of squares of two samples (Chan, Golub and LeVeque, 1983).
        sums["count"] = before["count"] + new["count"]
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
    prior = (weight - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    total = prior.sum(-1, keepdim=True)
    level = slab.per_query((total.log() + top).squeeze(-1))
    prior.div_(total.masked_fill_(total == 0, 1.0))
    weight = weight.masked_fill(weight == -torch.inf, HIDDEN)
    found = _space(slab, needed) | {"prior": level}
    for tile in slab.tiles() if needed else ():
        sums = {name: numbers[tile.heads] for name, numbers in found.items()}
        _summarise_weighted(tile, tile.of_heads(weight), tile.of_heads(prior), sums)
    return found


def lowest_exponent(dtype: torch.dtype) -> float:
    """The lowest score whose exp is still a normal number: below, the CPU's exp is a hundred times slower."""
    return -708.0 if dtype == torch.float64 else -87.0


def _float_weight(slab: Slab) -> Tensor:
    """Log-weights of a slab's visible keys, shape (#b, #Hk, #G, #rows, keys), causality and window in them."""
    problem, seen, rows = slab.plan.problem, slice(slab.seen.first, slab.seen.last), slab.rows
    weight = tiles.slab_weight(problem, slab.batch, rows)
    assert weight is not None
    weight = weight[..., seen].to(problem.dtype)
    hidden = hidden_by_position(problem.band, rows.start, rows.stop - rows.start, problem.key.shape[2], weight.device)
    return weight if hidden is None else torch.where(hidden[:, seen], -torch.inf, weight)


def _summarise_weighted(tile: Tile, log_weight: Tensor, prior: Tensor, sums: Sums) -> None:
    scores, (products, weights) = tile.scores, tile.scratch
    wide, wide_products = tile.spread_out(scores), tile.spread_out(products)
    tile.hide()
    top = scores.amax(-1, keepdim=True)
    scores.sub_(top)
    if "top" in sums:
        sums["top"].copy_(top)
    if "position" in sums:
        sums["position"].copy_(_first_largest(scores, products) + tile.slab.seen.first)
    tile.clear(scores)
    if "mean" in sums:
        torch.mul(wide, prior, out=wide_products)
        torch.sum(products, -1, keepdim=True, out=sums["mean"]).add_(top)
    if "spread" in sums:
        torch.sub(scores, sums["mean"] - top, out=weights)
        torch.mul(tile.spread_out(weights), prior, out=wide_products)
        torch.sum(products.mul_(weights), -1, keepdim=True, out=sums["spread"])
    if "total" not in sums:
        return
    torch.add(wide, log_weight, out=wide_products)
    tilt = products.amax(-1, keepdim=True)
    products.sub_(tilt).clamp_min_(lowest_exponent(scores.dtype))
    torch.mul(products, LOG2_E, out=weights).exp2_()
    tile.clear(weights)
    torch.sum(weights, -1, keepdim=True, out=sums["total"])
    if "tilt" in sums:
        torch.add(top, tilt, out=sums["tilt"])
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
