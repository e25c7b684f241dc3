"""Moments of attention's weights in tiles: few passes over the scores, in place or compiled, without gradient.

It gives the numbers of `moments`' reference to rounding. Only the sums are computed that the requested moments need. Moments
under p are those of scores relative to the largest, so that no variance is a difference of large numbers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Plan, Slab, Tile

FEWEST_PAIRS = 1 << 17
"""Least scores of a tile per thread: two float32 buffers of them fit a second-level cache, even one that two threads share."""
ROWS = 128
"""With many keys a tile grows to this many rows: a matrix product of fewer rows loses more than the cache gains."""
MOST_PAIRS = 1 << 19
"""Most scores of a tile per thread."""

COMPILED_PAIRS_PER_THREAD = 1 << 20
"""Scores of a compiled tile per thread. Compiled code reads a tile from memory once, so that it need not fit the cache."""

VARIANTS = 32
"""Limit on compilations. Two dtypes, few or all sums, with or without positions need eight; each change of a setting (threads,
determinism) needs as many more."""

COUNTED = 1 << 24
"""Whole numbers up to this are exact in float32."""

Sums = dict[str, Tensor]
"""Sums over the keys of each query, by name, each (h, G·rows, 1).

`mean`, `spread`: mean and root sum of squares of the scores over visible keys. `top`: the largest score; `position`: its
key. With x = score − top, e = exp(x): `total` Σe, `square` (Σe²)^½, `first` Σe·x, `second` Σe·x².
"""

FEW = ("top", "total", "first")
"""Sums of the smaller compiled kernel, which entropy and largest score need; either kernel can also find positions."""
MORE = ("second", "square", "mean", "spread")
"""What the larger kernel adds to `FEW`."""

Summarise = Callable[[Tile, Sums], None]
"""A function of a tile, and of its sums, which it fills; `count`, the visible keys of each query, is already there. It
overwrites the tile's buffers, and fills the slab's product."""


class Formula(NamedTuple):
    """How a moment follows from the sums."""

    needs: set[str]
    """Names of the sums."""
    compute: Callable[[Sums], Tensor]
    without_key: float
    """The moment of a query that sees no key."""


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
    "log_partition": Formula({"top", "total"}, lambda sums: sums["top"] + sums["total"].log(), -torch.inf),
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


def is_fusable(problem: AttentionProblem) -> bool:
    """Whether tiles can be compiled: there is no kernel for float log-weights."""
    return problem.log_weight is None or problem.log_weight.dtype == torch.bool


def gains_compiled(names: Names, problem: AttentionProblem) -> bool:
    """Whether compiled code would be faster. On the CPU it is not for the sums in `FEW`, which take as many passes eagerly."""
    needs_few = not any(MOMENTS[name].needs - {"position", *FEW} for name in names)
    return is_fusable(problem) and not (needs_few and problem.query.device.type == "cpu")


def moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of these names, each ``(B, Hk, G, L)``, and the output where there are values."""
    if is_fusable(problem):
        return _run_counted(Plan.of(problem, _pairs_per_thread(problem), buffers=2), names, summarise)
    return _run(Plan.of(problem, _pairs_per_thread(problem), buffers=3), WEIGHTED, names, _weighted)


def _pairs_per_thread(problem: AttentionProblem) -> int:
    """Scores of a tile per thread."""
    return min(max(FEWEST_PAIRS, ROWS * problem.key.shape[2]), MOST_PAIRS)


def compiled_moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """`moments` with each tile fused by `torch.compile` into two passes over its scores, if it is fusable."""
    if not is_fusable(problem):
        return moments(names, problem)
    return _run_counted(Plan.of(problem, COMPILED_PAIRS_PER_THREAD, buffers=2), names, summarise_compiled)


def _run_counted(plan: Plan, names: Names, summarise: Summarise) -> tuple[Tensor, ...]:
    """Moments where every visible key counts the same."""

    def sums_of(slab: Slab, needed: set[str]) -> Sums:
        sums = _empty_sums(slab, needed)
        sums["count"] = slab.per_query(slab.seen.count).clamp_min(1)
        if needed:
            for tile in slab.tiles():
                summarise(tile, {name: numbers[tile.heads] for name, numbers in sums.items()})
        return sums

    return _run(plan, MOMENTS, names, sums_of)


def _run(
    plan: Plan, formulas: dict[str, Formula], names: Names, sums_of: Callable[[Slab, set[str]], Sums]
) -> tuple[Tensor, ...]:
    """Moments from sums.

    Args:
        sums_of: of a slab and names, the sums of these names; it also fills the slab's product.
    """
    chosen = [formulas[name] for name in names]
    # The product is that of exp(score − top), divided by their sum.
    needed = set() if plan.problem.value is None else {"top", "total"}
    needed.update(*(formula.needs for formula in chosen))

    def work(slab: Slab) -> list[Tensor]:
        sums = sums_of(slab, needed)
        return [formula.compute(sums) for formula in chosen]

    return plan.run(work, [formula.without_key for formula in chosen])


def _empty_sums(slab: Slab, names: set[str]) -> Sums:
    """Tensors for the sums of these names, not filled, each (b·Hk, G·rows, 1)."""
    return {name: slab.new(1, dtype=torch.int64 if name == "position" else None)[0] for name in names}


def _weighted(slab: Slab, needed: set[str]) -> Sums:
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


def summarise(tile: Tile, sums: Sums) -> None:
    """The sums of a tile, eagerly: each line is one pass over it. Most are over one buffer, which is three times as fast."""
    scores = tile.scores
    if "mean" in sums:
        # Before the hidden pairs are lowered: at 0 they add nothing to the mean over visible keys.
        tile.clear(scores)
        torch.sum(scores, -1, keepdim=True, out=sums["mean"]).div_(sums["count"])
    if "top" in sums:
        tile.hide()
        _shift(tile, sums)
    if "total" in sums:
        _exponential_sums(tile, sums)
    if "spread" in sums:
        # Last, since it overwrites the scores. A norm squares and adds in one pass.
        scores.sub_(sums["mean"] - sums["top"])
        tile.clear(scores)
        torch.linalg.vector_norm(scores, dim=-1, keepdim=True, out=sums["spread"])


def _exponential_sums(tile: Tile, sums: Sums) -> None:
    """The sums of a tile with e = exp(x) in their terms. The scores, relative to the largest, are not changed."""
    scores = tile.scores
    weights = tile.scratch[0]
    # exp2 is as fast as exp on processors where exp is fast, and several times as fast on others.
    torch.mul(scores, LOG2_E, out=weights).clamp_min_(lowest_exponent(scores.dtype) * LOG2_E).exp2_()
    tile.clear(weights)
    torch.sum(weights, -1, keepdim=True, out=sums["total"])
    if "square" in sums:
        torch.linalg.vector_norm(weights, dim=-1, keepdim=True, out=sums["square"])
    tile.multiply(weights, sums["total"])
    # e·x, and then e·x·x, in the same buffer.
    for name in ("first", "second"):
        if name in sums:
            torch.sum(weights.mul_(scores), -1, keepdim=True, out=sums[name])


def _shift(tile: Tile, sums: Sums) -> Tensor:
    """Subtract from each query's scores the largest, which is returned, and find the first key that has it if needed."""
    scores = tile.scores
    keys = scores.shape[-1]
    top = torch.amax(scores, -1, keepdim=True, out=sums.get("top"))
    if "position" in sums and keys > COUNTED:
        torch.argmax(scores, -1, keepdim=True, out=sums["position"])
    scores.sub_(top)
    if "position" in sums and keys <= COUNTED:
        # Three quick passes; an argmax is as slow as ten. The largest scores are 0 now, and the floor of every other is at
        # most −1: of floor(x)·keys − key the largest is −(the first key with x = 0).
        backwards = -torch.arange(keys, dtype=scores.dtype, device=scores.device)
        numbers = torch.add(backwards, torch.floor(scores, out=tile.scratch[0]), alpha=keys, out=tile.scratch[0])
        sums["position"].copy_(-numbers.amax(-1, keepdim=True))
    if "position" in sums:
        sums["position"].add_(tile.slab.seen.first)
    return top


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
    top = _shift(tile, sums)
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


@functools.cache
def compiler_exists(device: str) -> bool:
    """Whether `torch.compile` has a backend for this type of device: Triton for CUDA, a C++ compiler for the CPU."""
    # Imported here, as the compiler takes as long to import as all the rest of torch.
    if device == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def summarise_compiled(tile: Tile, sums: Sums) -> None:
    """`summarise` by compiled code, where that pays."""
    heads, rows, keys = tile.scores.shape
    # The compiler would compile anew for a size of 1, and the largest score alone takes one pass anyway.
    if heads * rows < 2 or not 2 <= keys <= COUNTED or "total" not in sums:
        summarise(tile, sums)
        return
    tile.hide()
    names: Names = FEW if sums.keys() <= {*FEW, "position", "count"} else (*FEW, *MORE)
    if "position" in sums:
        names = (*names, "position")
    kernel = _kernel()
    stacked = kernel(tile.scores.view(-1, keys), tile.scratch[0].view(-1, keys), sums["count"].reshape(-1), names)
    computed: Sums = dict(zip(names, stacked.view(-1, heads, rows, 1), strict=True))
    for name in sums.keys() & computed.keys():
        sums[name].copy_(computed[name])
    if "position" in sums:
        # From a key's place in the slab to its number.
        sums["position"].add_(tile.slab.seen.first)
    tile.multiply(tile.scratch[0], computed["total"])


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # The limit is this function's own; the user's configuration stays as it is.
    return torch.compile(_sums, dynamic=True, recompile_limit=VARIANTS)  # pyright: ignore[reportCallIssue]


def _sums(scores: Tensor, weights: Tensor, count: Tensor, names: Names) -> Tensor:
    """The sums of these names, stacked, from scores (rows, keys) in two passes; e is left in `weights`.

    Args:
        scores: hidden pairs lowered by `HIDDEN`.
        weights: a buffer of the same shape.
        count: visible keys of each row.
    """
    # In this order the compiler fuses them into two passes.
    seen = scores > HIDDEN / 2
    mean = torch.where(seen, scores, 0.0).sum(-1) / count
    top = scores.amax(-1)
    spread = torch.where(seen, scores - mean.unsqueeze(-1), 0.0).square().sum(-1).sqrt()
    shifted = scores - top.unsqueeze(-1)
    exponential = shifted.exp()
    weights.copy_(exponential)
    products = exponential * shifted
    results = [top, exponential.sum(-1), products.sum(-1)]
    if "second" in names:
        results += [(products * shifted).sum(-1), exponential.square().sum(-1).sqrt(), mean, spread]
    if "position" in names:
        number = torch.arange(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        results.append(torch.where(shifted == 0, number, float(COUNTED)).amin(-1))
    return torch.stack(results)
