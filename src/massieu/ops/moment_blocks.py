"""Moments of attention's weights in tiles: few passes over the scores, in place or compiled, without gradient.

The twin of the formulas in `moments`; the same numbers to rounding. Only the sums are taken that the wanted moments need.
Moments under p are those of scores relative to the largest, so that no variance is a difference of large numbers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.foundation.numerics import LOG2_E
from massieu.ops import tiles
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.ops.tiles import HIDDEN, Plan, Slab, Tile

FEWEST_PAIRS, ROWS, MOST_PAIRS = 1 << 17, 128, 1 << 19
"""Scores of a tile per thread: two float32 buffers of the fewest fit a second-level cache, even one that two threads share.
Where there are many keys, a product of fewer rows loses more than the cache gains: tiles grow to that many rows."""

COMPILED_PAIRS_PER_THREAD = 1 << 20
"""The same where each is read from memory once, so that a tile need not fit the cache."""

VARIANTS = 32
"""At most so many compilations; two dtypes, with few or all sums and with positions or without, need eight, changed settings
(threads, determinism) as many more each."""

COUNTED = 1 << 24
"""Positions below this are float32 numbers."""

Sums = dict[str, Tensor]
"""Of each query, those that the moments need, in the order in which they are found.

`mean`, `spread`: mean and root sum of squares of the scores over visible keys. `top`: the largest score; `position`: its
key. With x = score − top, e = exp(x): `total` Σe, `square` (Σe²)^½, `first` Σe·x, `second` Σe·x².
"""

FEW, MORE = ("top", "total", "first"), ("second", "square", "mean", "spread")
"""The sums of the two kinds of kernels: those of entropy and largest score alone, and all. Either also has positions."""

Summarise = Callable[[Tile, Sums], None]
"""(tile, where its sums go, and `count`, its queries' visible keys); it overwrites the tile's buffers, and multiplies the
values."""


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


def is_fusable(problem: AttentionProblem) -> bool:
    """Whether tiles can be compiled: float log-weights have none."""
    return problem.log_weight is None or problem.log_weight.dtype == torch.bool


def gains_compiled(names: Names, problem: AttentionProblem) -> bool:
    """Whether compiled code would be quicker: on the CPU not for those few sums that take as many passes eagerly."""
    few = not any(MOMENTS[name][0] - {"position", *FEW} for name in names)
    return is_fusable(problem) and not (few and problem.query.device.type == "cpu")


def moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of these names, each ``(B, Hk, G, L)``, and the output where there are values."""
    if is_fusable(problem):
        return _run_counted(Plan.of(problem, _pairs_per_thread(problem), buffers=2), names, summarise)
    return _run(Plan.of(problem, _pairs_per_thread(problem), buffers=3), WEIGHTED, names, _weighted)


def _pairs_per_thread(problem: AttentionProblem) -> int:
    """Scores of a tile per thread."""
    return min(max(FEWEST_PAIRS, ROWS * problem.key.shape[2]), MOST_PAIRS)


def compiled_moments(names: Names, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """`moments`, each tile fused by `torch.compile` into two passes over its scores, where that can be."""
    if not is_fusable(problem):
        return moments(names, problem)
    return _run_counted(Plan.of(problem, COMPILED_PAIRS_PER_THREAD, buffers=2), names, summarise_compiled)


def _run_counted(plan: Plan, names: Names, summarise: Summarise) -> tuple[Tensor, ...]:
    """Moments where every visible key counts the same."""

    def sums_of(slab: Slab, needed: set[str]) -> Sums:
        found = _space(slab, needed) | {"count": slab.per_query(slab.seen.count).clamp_min(1)}
        for tile in slab.tiles() if needed else ():
            summarise(tile, {name: numbers[tile.heads] for name, numbers in found.items()})
        return found

    return _run(plan, MOMENTS, names, sums_of)


def _run(plan: Plan, formulas: Formulas, names: Names, sums_of: Callable[[Slab, set[str]], Sums]) -> tuple[Tensor, ...]:
    """Moments by the sums that `sums_of` finds for a slab."""
    needed = set() if plan.problem.value is None else {"top", "total"}
    needed.update(*(formulas[name][0] for name in names))

    def work(slab: Slab) -> list[Tensor]:
        found = sums_of(slab, needed)
        return [formulas[name][1](found) for name in names]

    return plan.run(work, [formulas[name][2] for name in names])


def _space(slab: Slab, needed: set[str]) -> Sums:
    """Where the sums of a slab go."""
    return {name: slab.new(1, dtype=torch.int64 if name == "position" else None)[0] for name in needed}


def _weighted(slab: Slab, needed: set[str]) -> Sums:
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


def summarise(tile: Tile, sums: Sums) -> None:
    """The sums of a tile, eagerly: each line is one pass over it. Most are over one buffer, which is three times as fast."""
    scores, weights = tile.scores, tile.scratch[0]
    if "mean" in sums:
        tile.clear(scores)
        torch.sum(scores, -1, keepdim=True, out=sums["mean"]).div_(sums["count"])
    if "top" in sums:
        tile.hide()
        _shift(tile, sums)
    if "total" in sums:
        _exponential_sums(tile, sums)
    if "spread" in sums:
        # Last, since it spoils the scores.
        scores.sub_(sums["mean"] - sums["top"])
        tile.clear(scores)
        torch.linalg.vector_norm(scores, dim=-1, keepdim=True, out=sums["spread"])


def _exponential_sums(tile: Tile, sums: Sums) -> None:
    """The sums of a tile that have e in them; the scores, relative to the largest, stay as they are."""
    scores, weights = tile.scores, tile.scratch[0]
    # exp2 is as fast as exp where that is fast, and several times as fast where it is not.
    torch.mul(scores, LOG2_E, out=weights).clamp_min_(lowest_exponent(scores.dtype) * LOG2_E).exp2_()
    tile.clear(weights)
    torch.sum(weights, -1, keepdim=True, out=sums["total"])
    if "square" in sums:
        torch.linalg.vector_norm(weights, dim=-1, keepdim=True, out=sums["square"])
    tile.multiply(weights, sums["total"])
    for name in ("first", "second"):
        if name in sums:
            torch.sum(weights.mul_(scores), -1, keepdim=True, out=sums[name])


def _shift(tile: Tile, sums: Sums) -> Tensor:
    """Make scores relative to each query's largest, which is returned, and find the first that has it."""
    scores, keys = tile.scores, tile.scores.shape[-1]
    top = torch.amax(scores, -1, keepdim=True, out=sums.get("top"))
    if "position" in sums and keys > COUNTED:
        torch.argmax(scores, -1, keepdim=True, out=sums["position"])
    scores.sub_(top)
    if "position" in sums and keys <= COUNTED:
        # Three quick passes; an argmax is as slow as ten. The largest score is 0 now, and every other's floor below.
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
    top = _shift(tile, sums)
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


@functools.cache
def compiler_exists(device: str) -> bool:
    """Whether `torch.compile` would find what it needs there: Triton for CUDA, a C++ compiler for the CPU."""
    # Here and not above: the compiler takes as long to import as all the rest of torch.
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
    """`summarise` compiled; a tile of a single row or key, which would be compiled anew, and largest scores alone, eagerly."""
    heads, rows, keys = tile.scores.shape
    if heads * rows < 2 or not 2 <= keys <= COUNTED or "total" not in sums:
        summarise(tile, sums)
        return
    tile.hide()
    names = FEW if sums.keys() <= {*FEW, "position", "count"} else (*FEW, *MORE)
    names = names if "position" not in sums else (*names, "position")
    found = _kernel()(tile.scores.view(-1, keys), tile.scratch[0].view(-1, keys), sums["count"].reshape(-1), names)
    found = dict(zip(names, found.view(-1, heads, rows, 1), strict=True))
    for name in sums.keys() & found.keys():
        sums[name].copy_(found[name])
    if "position" in sums:
        sums["position"].add_(tile.slab.seen.first)
    tile.multiply(tile.scratch[0], found["total"])


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # The limit is this function's own; the user's configuration stays as it is.
    return torch.compile(_sums, dynamic=True, recompile_limit=VARIANTS)  # pyright: ignore[reportCallIssue]


def _sums(scores: Tensor, weights: Tensor, count: Tensor, names: Names) -> Tensor:
    """The sums of each row by two passes over it; e is left in `weights`."""
    # The order is that in which the compiler makes two passes of them.
    seen = scores > HIDDEN / 2
    mean = torch.where(seen, scores, 0.0).sum(-1) / count
    top = scores.amax(-1)
    spread = torch.where(seen, scores - mean.unsqueeze(-1), 0.0).square().sum(-1).sqrt()
    shifted = scores - top.unsqueeze(-1)
    exponential = shifted.exp()
    weights.copy_(exponential)
    products = exponential * shifted
    found = [top, exponential.sum(-1), products.sum(-1)]
    if "second" in names:
        found += [(products * shifted).sum(-1), exponential.square().sum(-1).sqrt(), mean, spread]
    if "position" in names:
        number = torch.arange(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        found.append(torch.where(shifted == 0, number, float(COUNTED)).amin(-1))
    return torch.stack(found)
