"""How the scores of a long attention are cut into pieces that stay in a core's cache, and which keys each piece sees."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import in_functorch, may_be_differentiated
from massieu.ops.shapes import AttentionProblem, hidden_by_position

HIDDEN = -1e30
"""Stands for −inf where 0·score must stay 0."""


@dataclass(frozen=True)
class Visible:
    """The keys that a slab's queries can see.

    Outside ``first:last`` no query sees a key; inside it, outside ``mixed_first:mixed_last``, every query sees every
    key; between these, `keep` is 1 where the key is seen and 0 elsewhere.
    """

    first: int
    last: int
    mixed_first: int
    mixed_last: int
    keep: Tensor | None
    """Shape (#b, #Hk, #G, #rows, mixed)."""
    count: Tensor
    """How many keys each query sees, shape (#b, #Hk, #G, #rows)."""


@dataclass(frozen=True)
class Slab:
    """Some items, all heads, some queries: what shares one look at the mask. Pairs (item, key head) are one index."""

    batch: slice
    rows: slice
    seen: Visible
    shape: torch.Size
    """(b, Hk, G, rows)."""
    query: Tensor
    """Shape (b·Hk, G·rows, D)."""
    key: Tensor
    """Shape (b·Hk, D, keys)."""
    value: Tensor | None
    """Shape (b·Hk, keys, E)."""
    heads_per_tile: int

    def new(self, *size: int) -> Tensor:
        """A buffer ``(*size, b·Hk, G·rows, 1)``."""
        return self.query.new_empty(*size, *self.query.shape[:2], 1)

    def per_query(self, numbers: Tensor) -> Tensor:
        """From (#b, #Hk, #G, #rows) to (b·Hk, G·rows, 1)."""
        return numbers.expand(self.shape).reshape(*self.query.shape[:2], 1)

    def of(self, result: Tensor) -> Tensor:
        """The slab's part of ``(B, Hk, G, L, ...)``."""
        return result[self.batch, :, :, self.rows]

    def tiles(self, buffers: Tensor, scale: float, softcap: float | None = None) -> Iterator["Tile"]:
        """The (soft-capped) scores of a few heads at a time, in buffers that the next tile reuses."""
        pairs = self.query.shape[1] * self.key.shape[2]
        views = None
        for start in range(0, self.query.shape[0], self.heads_per_tile):
            heads = slice(start, min(self.query.shape[0], start + self.heads_per_tile))
            number = heads.stop - heads.start
            if views is None or len(views[0]) != number:
                views = tuple(b[: number * pairs].view(number, -1, self.key.shape[2]) for b in buffers)
            scores, *scratch = views
            query, key = self.query[heads], self.key[heads]
            torch.baddbmm(scores, query, key, beta=0, alpha=scale if softcap is None else scale / softcap, out=scores)
            if softcap is not None:
                scores.tanh_().mul_(softcap)
            yield Tile(self, heads, scores, tuple(scratch))


@dataclass(frozen=True)
class Tile:
    """The scores of a few heads of a slab; hidden pairs hold their true score."""

    slab: Slab
    heads: slice
    scores: Tensor
    """Shape (h, G·rows, keys)."""
    scratch: tuple[Tensor, ...]
    """More buffers of that shape."""

    def spread_out(self, numbers: Tensor) -> Tensor:
        """A buffer of the tile as (b, h, G, rows, keys), as masks and log-weights are."""
        batch, key_heads, *rest = self.slab.shape
        whole = len(numbers) == batch * key_heads
        return numbers.view(batch if whole else 1, -1, *rest, numbers.shape[-1])

    def of_heads(self, weights: Tensor) -> Tensor:
        """The part for the tile's heads of what broadcasts to (b, Hk, G, rows, …)."""
        whole = len(self.scores) == self.slab.shape[0] * self.slab.shape[1]
        return weights if whole or weights.shape[1] == 1 else weights[:, self.heads]

    def exponentiate(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turn scores and log-weights of a slab into weights of which the largest is 1; their logarithm's shift, their sum."""
        if weight is not None:
            self.spread_out(self.scores).add_(self.of_heads(weight))
        self.hide()
        top = self.scores.amax(-1, keepdim=True)
        return top, exp_(self.scores.sub_(top)).sum(-1, keepdim=True)

    def hide(self) -> None:
        """Put the scores of hidden pairs far below every other."""
        keep = self.slab.seen.keep
        if keep is not None:
            self._mixed(self.scores).add_(self.of_heads((1 - keep) * HIDDEN))

    def clear(self, numbers: Tensor) -> None:
        """Set a buffer of the tile to 0 at hidden pairs."""
        keep = self.slab.seen.keep
        if keep is not None:
            self._mixed(numbers).mul_(self.of_heads(keep))

    def _mixed(self, numbers: Tensor) -> Tensor:
        """The part of a buffer for keys that some queries see and some do not."""
        seen = self.slab.seen
        return self.spread_out(numbers)[..., seen.mixed_first - seen.first : seen.mixed_last - seen.first]


def prepared(problem: AttentionProblem) -> AttentionProblem:
    """Contiguous tensors of the working dtype and a scale that is a number."""
    query, scale = problem.query.to(problem.dtype), problem.scale
    if isinstance(scale, Tensor):
        query, scale = (query * scale).to(problem.dtype), 1.0
    value = None if problem.value is None else problem.value.to(problem.dtype).contiguous()
    key = problem.key.to(problem.dtype).contiguous()
    return replace(problem, query=query.contiguous(), key=key, value=value, scale=scale)


def slabs(problem: AttentionProblem, capacity: int) -> Iterator[Slab]:
    """Cut a problem so that a tile holds about `capacity` scores; slabs without a visible key are left out."""
    batch, key_heads, group, length, _ = problem.query.shape
    keys = problem.key.shape[2]
    items, rows = max(1, capacity // (key_heads * group * length * keys)), length
    weight = problem.log_weight
    if problem.band is not None or (weight is not None and weight.shape[3] > 1):
        # Short blocks skip more of what a causal mask hides; longer ones multiply faster.
        rows = min(rows, max(128, min(256, length // 8)))
    rows = min(rows, max(1, capacity // (group * keys)))
    items = items if rows == length else 1
    for start in range(0, batch, items):
        for row in range(0, length, rows):
            part = slice(start, min(batch, start + items)), slice(row, min(length, row + rows))
            seen = _visible(problem, *part)
            if seen.last > seen.first:
                yield _slab(problem, *part, seen, capacity)


def _slab(problem: AttentionProblem, batch: slice, rows: slice, seen: Visible, capacity: int) -> Slab:
    query = problem.query[batch, :, :, rows]
    shape = query.shape[:4]
    query = query.reshape(shape[0] * shape[1], -1, query.shape[-1])
    key = problem.key[batch, :, seen.first : seen.last].flatten(0, 1)
    value = None if problem.value is None else problem.value[batch, :, seen.first : seen.last].flatten(0, 1)
    # Several items are only taken together when all their heads fit.
    heads = len(query) if shape[0] > 1 else max(1, capacity // (query.shape[1] * key.shape[1]))
    return Slab(batch, rows, seen, shape, query, key.mT, value, heads)


def slab_weight(problem: AttentionProblem, batch: slice, rows: slice) -> Tensor | None:
    """The log-weights of some items and queries, shape (#b, #Hk, #G, #rows, N)."""
    weight = problem.log_weight
    if weight is None:
        return None
    if weight.shape[0] > 1:
        weight = weight[batch]
    if weight.shape[3] > 1:
        weight = weight[:, :, :, rows]
    return weight.expand(*weight.shape[:-1], problem.key.shape[2])


def finite_weight(problem: AttentionProblem, slab: Slab) -> Tensor | None:
    """Float log-weights of a slab, 0 for the hidden pairs that `Tile.hide` takes care of; None if all are 0."""
    weight = slab_weight(problem, slab.batch, slab.rows)
    if weight is None or weight.dtype == torch.bool:
        return None
    weight = weight[..., slab.seen.first : slab.seen.last].to(problem.dtype)
    weight = weight.masked_fill(weight == -torch.inf, 0.0)
    return weight if bool(weight.any()) else None


def _visible(problem: AttentionProblem, batch: slice, rows: slice) -> Visible:
    """Which keys some items and queries see, by mask, causality and window."""
    weight, keys = slab_weight(problem, batch, rows), problem.key.shape[2]
    kept = weight if weight is None or weight.dtype == torch.bool else weight != -torch.inf
    dtype, device = problem.dtype, problem.query.device
    causal = problem.is_causal and rows.start < keys - 1
    if problem.window is not None or (causal and kept is not None):
        outside = hidden_by_position(problem.band, rows.start, rows.stop - rows.start, keys, device)
        assert outside is not None
        inside = ~outside[None, None, None]
        return _from_mask(inside if kept is None else kept & inside, dtype)
    if kept is not None:
        return _from_mask(kept, dtype)
    if not causal:
        return Visible(0, keys, 0, 0, None, torch.full((1, 1, 1, 1), keys, dtype=dtype, device=device))
    position = torch.arange(rows.start, rows.stop, device=device)
    last = min(rows.stop, keys)
    keep = torch.arange(rows.start + 1, last, device=device) <= position[:, None]
    count = (position + 1).clamp_max(keys).to(dtype)
    return Visible(0, last, rows.start + 1, last, keep.to(dtype)[None, None, None], count[None, None, None])


def _from_mask(kept: Tensor, dtype: torch.dtype) -> Visible:
    columns = kept.flatten(0, 3)
    anywhere = columns.any(0).nonzero()
    count = kept.sum(-1).to(dtype)
    if len(anywhere) == 0:
        return Visible(0, 0, 0, 0, None, count)
    first, last = int(anywhere[0]), int(anywhere[-1]) + 1
    partly = (~columns[:, first:last].all(0)).nonzero()
    if len(partly) == 0:
        return Visible(first, last, 0, 0, None, count)
    mixed_first, mixed_last = first + int(partly[0]), first + int(partly[-1]) + 1
    return Visible(first, last, mixed_first, mixed_last, kept[..., mixed_first:mixed_last].to(dtype), count)


def tile_capacity(problem: AttentionProblem, pairs_per_thread: int) -> int:
    """Scores of a tile: so many a thread, and at least those of one query of a key head."""
    return max(pairs_per_thread * torch.get_num_threads(), problem.query.shape[2] * problem.key.shape[2])


def unusable(problem: AttentionProblem, *others: Tensor | None) -> str | None:
    """Why tiles cannot take this problem, with the other tensors that go in; None where they can."""
    tensors = (problem.query, problem.key, problem.log_weight, problem.scale, *others)
    if problem.query.device.type != "cpu":
        return f"it runs on the CPU, got {problem.query.device}"
    if torch.compiler.is_compiling():
        return "it cannot be compiled into something else"
    if in_functorch() or may_be_differentiated(*(tensor for tensor in tensors if isinstance(tensor, Tensor))):
        return "it has no derivative, and one may be wanted here"
    if problem.pairs == 0:
        return "it needs at least one query and one key"
    return None
