"""Moments of attention's weights in tiles whose sums are compiled code: the CPU's counterpart of the kernel in Triton."""

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from massieu.ops import moment_blocks, tiles
from massieu.ops.compiled import row_sums
from massieu.ops.compiled.row_sums import RowSums
from massieu.ops.moment_blocks import Names, Sums
from massieu.ops.shapes import AttentionProblem
from massieu.ops.tiles import Plan, Slab, Tile

ROWS = 512
"""Queries of a tile per thread. A matrix product of fewer is slower, by more than a smaller tile gains."""
KEYS = 2048
"""Most keys of a tile."""
FEWEST_PAIRS, MOST_PAIRS = 1 << 18, 1 << 20
"""Scores of a tile per thread: at most four megabytes."""


class CompiledMoments:
    """The backend of some moments."""

    name = "compiled"
    bands = False
    device_type = "cpu"

    def __init__(self, names: Names) -> None:
        self._names = names

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why it cannot take this problem.

        It refuses other devices, float64, float log-weights, tensors that are not plain, machines without a C compiler, and
        what tiles refuse.
        """
        if problem.query.device.type != self.device_type:
            return f"it runs on the CPU, got {problem.query.device}"
        if problem.dtype != torch.float32:
            return "it has no float64"
        if not moment_blocks.counts_keys(problem):
            return "it has no log_weight but booleans"
        reason = tiles.Blocks(self.forward).refuses(problem, *others)
        if reason is not None:
            return reason
        tensors = (problem.query, problem.key, problem.value, problem.log_weight)
        if any(type(tensor) not in (Tensor, Parameter, type(None)) for tensor in tensors):
            return "it reads the memory of plain tensors"
        if _get_current_dispatch_mode() is not None:
            return "a dispatch mode would not see what it does"
        return row_sums.failure()

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """The moments ``(B, Hk, G, L)``, and the output where there are values."""
        pairs_per_thread = min(MOST_PAIRS, max(FEWEST_PAIRS, ROWS * problem.key.shape[2]))
        plan = Plan.of(problem, pairs_per_thread, buffers=1, keys=KEYS)
        return moment_blocks.run(plan, moment_blocks.MOMENTS, self._names, _sums)


def _sums(slab: Slab, needed: Set[str]) -> Sums:
    """The sums of a slab where every visible key counts the same, as tensor operations give them."""
    seen = slab.per_query(slab.seen.count)
    rows = RowSums.empty(slab.query.shape[:2], slab.query)
    for tile in slab.tiles() if needed else ():
        # The tiles of the same heads follow each other, from their first keys to the last.
        if tile.keys.start == 0:
            _write(tile, None, rows, tile.heads.start, needed)
            tile.add_product(tile.scores, None)
        else:
            _merge(tile, rows, needed)
    # Of all heads at once: for each tile it takes longer than its numbers need.
    moment_blocks.lose_without_score(rows.sums)
    if slab.product is not None:
        slab.product.div_(rows.sums["total"])
    if needed and not torch.equal(rows.sums["count"], seen):
        # A visible score of −∞ was taken for a hidden one: it is a product that overflowed, and rare.
        return _by_operations(slab, needed)
    position = rows.position.long() + slab.seen.first if "position" in needed else rows.position
    return rows.sums | {"count": seen.clamp_min(1), "position": position}


def _write(tile: Tile, before: Tensor | None, into: RowSums, head: int, needed: Set[str]) -> None:
    """Write the sums over a tile's keys, relative to the largest score of these and the keys before, from a head on."""
    ranges = tile.ranges()
    masked = ranges is None and tile.is_mixed
    if masked:
        tile.fill_hidden(-torch.inf)
    weights = tile.slab.product is not None
    into.write(tile.scores, before, head, ranges, masked, needed, weights)


def _merge(tile: Tile, rows: RowSums, needed: Set[str]) -> None:
    """Add a tile's keys to the sums over the keys before."""
    before = {name: rows.named(name)[tile.heads] for name in {"top", "count"} | needed}
    of_tile = RowSums.empty(tile.scores.shape[:2], tile.scores)
    _write(tile, before["top"], of_tile, 0, needed)
    of_tile.position.add_(tile.keys.start)
    new = {name: of_tile.named(name) for name in before}
    fall = (before["top"] - new["top"]).clamp_min_(moment_blocks.lowest_exponent(tile.scores.dtype))
    tile.add_product(tile.scores, fall.exp())
    for name, numbers in moment_blocks.merged(before, new, fall).items():
        before[name].copy_(numbers)


def _by_operations(slab: Slab, needed: Set[str]) -> Sums:
    """The same sums by tensor operations."""
    plan = replace(slab.plan, buffers=slab.plan.buffers.new_empty(2, slab.plan.buffers.shape[1]))
    again = replace(slab, plan=plan)
    sums = moment_blocks.counted(again, needed)
    if slab.product is not None and again.product is not None:
        slab.product.copy_(again.product)
    return sums
