"""How the scores of a long attention are cut into pieces, and which keys each piece sees.

On the CPU a piece stays in a core's cache; on CUDA it keeps the device busy, and nothing there waits for a value. What
works in tiles does so without derivative, and gives the numbers of the reference to rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import in_functorch, may_be_differentiated
from massieu.ops.shapes import AttentionProblem, Band, at_once, hidden_by_position, slices

HIDDEN = -1e30
"""Stands for −inf where 0·score must stay 0."""

PAIRS_PER_THREAD = 1 << 18
"""Scores of an attention's tile per thread: one float32 buffer of this size, a query's scores and values fill the cache of
a core."""


@dataclass(frozen=True)
class Blocks:
    """A backend that works in tiles."""

    forward: Callable[..., tuple[Tensor, ...]]
    name, bands = "blocks", False

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why tiles cannot take this problem."""
        tensors = (problem.query, problem.key, problem.value, problem.log_weight, problem.scale, *others)
        if problem.query.device.type not in ("cpu", "cuda"):
            return f"it runs on the CPU and on CUDA, got {problem.query.device}"
        if torch.compiler.is_compiling():
            return "it cannot be compiled into something else"
        if in_functorch() or may_be_differentiated(*(tensor for tensor in tensors if isinstance(tensor, Tensor))):
            return "it has no derivative, which may be needed here"
        if problem.pairs == 0:
            return "it needs at least one query and one key"
        return None


@dataclass(frozen=True)
class Visible:
    """The keys that a slab's queries can see.

    Outside ``first:last`` no query sees a key; inside it, outside ``mixed_first:mixed_last``, every query sees every
    key; between these, `keep` is 1 where the key is seen and 0 elsewhere.
    """

    count: Tensor
    """How many keys each query sees, shape (#b, #Hk, #G, #rows)."""
    first: int = 0
    last: int = 0
    mixed_first: int = 0
    mixed_last: int = 0
    keep: Tensor | None = None
    """Shape (#b, #Hk, #G, #rows, mixed)."""


@dataclass(frozen=True)
class Plan:
    """How a problem is cut: slabs of items and queries, each done in tiles of a few heads and, where asked, of a few keys."""

    problem: AttentionProblem
    """Of contiguous tensors of the working dtype, its scale a number."""
    capacity: int
    """Scores of a tile."""
    buffers: Tensor
    """(number, scores of a tile): what a tile works in, its scores first, and the next tile uses again."""
    keys: int
    """Keys of a tile, at most, where it has as many queries as a slab may have."""

    @staticmethod
    def of(problem: AttentionProblem, pairs_per_thread: int, buffers: int, keys: int | None = None) -> "Plan":
        """Tiles of so many scores a thread of the CPU, or for a device, and of at least a query's of one key head.

        Args:
            keys: of a tile on the CPU, at most, where there are many queries; all if not given, and on other devices.
        """
        query, scale = problem.query.to(problem.dtype), problem.scale
        if isinstance(scale, Tensor):
            query, scale = (query * scale).to(problem.dtype), 1.0
        key, value = (
            None if part is None else part.to(problem.dtype).contiguous() for part in (problem.key, problem.value)
        )
        assert key is not None
        if keys is None or query.device.type != "cpu":
            keys = key.shape[2]
        keys = min(keys, key.shape[2])
        pairs = at_once(pairs_per_thread * torch.get_num_threads(), query.device)
        capacity = max(pairs, query.shape[2] * keys)
        space = query.new_empty(buffers, min(capacity, problem.pairs))
        return Plan(
            replace(problem, query=query.contiguous(), key=key, value=value, scale=scale), capacity, space, keys
        )

    @torch.no_grad()
    def run(self, work: Callable[["Slab"], Sequence[Tensor]], levels: Sequence[float] = ()) -> tuple[Tensor, ...]:
        """What `work` finds for each slab, as ``(B, Hk, G, L)``; then the slabs' products ``(B, Hk, G, L, E)``, if any.

        Args:
            work: gives numbers (b·Hk, G·rows, 1) of its slab's queries, and fills the slab's product.
            levels: what these numbers are for queries that see no key, whose product is 0; an integer's are int64.
        """
        query, value = self.problem.query, self.problem.value
        results = [
            query.new_full(query.shape[:4], level, dtype=torch.int64 if isinstance(level, int) else None)
            for level in levels
        ]
        products = [] if value is None else [query.new_zeros(*query.shape[:4], value.shape[-1])]
        for slab in self._slabs():
            found = [*work(slab), *([] if slab.product is None else [slab.product])]
            none = None if slab.seen.keep is None else slab.seen.count == 0
            for result, numbers, level in zip([*results, *products], found, [*levels, 0.0], strict=False):
                part = slab.of(result)
                part.copy_(numbers.view(part.shape))
                if none is not None:
                    part.masked_fill_(none if part.ndim == 4 else none[..., None], level)
        return *results, *products

    def _slabs(self) -> Iterator["Slab"]:
        """Slabs without a visible key are left out."""
        problem = self.problem
        batch, key_heads, group, length, _ = problem.query.shape
        keys = self.keys
        items, rows = max(1, self.capacity // (key_heads * group * length * keys)), length
        weight = problem.log_weight
        if problem.band is not None or (weight is not None and weight.shape[3] > 1):
            # Short blocks skip more of what a causal mask hides; longer ones multiply faster, and a device waits for
            # each operation to begin: there a tile is as full as it may be.
            short = max(128, min(256, length // 8))
            full = self.capacity // (key_heads * group * keys)
            rows = min(rows, short if problem.query.device.type == "cpu" else max(short, full))
        rows = min(rows, max(1, self.capacity // (group * keys)))
        for part in slices(batch, items if rows == length else 1):
            for some in slices(length, rows):
                seen = _visible(problem, part, some)
                if seen.last > seen.first:
                    yield Slab(self, part, some, seen)


@dataclass(frozen=True)
class Slab:
    """Some items, all heads, some queries: what shares one look at the mask. Pairs (item, key head) are one index."""

    plan: Plan
    batch: slice
    rows: slice
    seen: Visible

    @cached_property
    def shape(self) -> torch.Size:
        """(b, Hk, G, rows)."""
        return self.of(self.plan.problem.query).shape[:4]

    @cached_property
    def query(self) -> Tensor:
        """Shape (b·Hk, G·rows, D)."""
        return self.fold(self.plan.problem.query)

    @cached_property
    def key(self) -> Tensor:
        """Shape (b·Hk, D, keys)."""
        return self._visible_part(self.plan.problem.key).mT

    @cached_property
    def value(self) -> Tensor | None:
        """Shape (b·Hk, keys, E)."""
        return None if self.plan.problem.value is None else self._visible_part(self.plan.problem.value)

    @cached_property
    def product(self) -> Tensor | None:
        """Where `Tile.multiply` puts Σ weight·value, shape (b·Hk, G·rows, E); None without values."""
        return None if self.value is None else self.query.new_empty(*self.query.shape[:2], self.value.shape[-1])

    def _visible_part(self, tensor: Tensor) -> Tensor:
        return tensor[self.batch, :, self.seen.first : self.seen.last].flatten(0, 1)

    def of(self, result: Tensor) -> Tensor:
        """The slab's part of ``(B, Hk, G, L, ...)``."""
        return result[self.batch, :, :, self.rows]

    def fold(self, tensor: Tensor) -> Tensor:
        """The slab's part of ``(B, Hk, G, L, C)`` as (b·Hk, G·rows, C)."""
        return self.of(tensor).reshape(self.shape[0] * self.shape[1], -1, tensor.shape[-1])

    def new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer ``(*size, b·Hk, G·rows, 1)``, of the query's dtype if no other is given."""
        return self.query.new_empty(*size, *self.query.shape[:2], 1, dtype=dtype)

    def per_query(self, numbers: Tensor) -> Tensor:
        """From (#b, #Hk, #G, #rows) to (b·Hk, G·rows, 1)."""
        return numbers.expand(self.shape).reshape(*self.query.shape[:2], 1)

    def weight(self) -> Tensor | None:
        """Float log-weights, 0 for the hidden pairs that `Tile.hide` takes care of; None if all are 0 or there are none."""
        weight = slab_weight(self.plan.problem, self.batch, self.rows)
        if weight is None or weight.dtype == torch.bool:
            return None
        weight = weight[..., self.seen.first : self.seen.last].to(self.query.dtype)
        weight = weight.masked_fill(weight == -torch.inf, 0.0)
        return None if may_look(weight.device) and not bool(weight.any()) else weight

    @cached_property
    def hidden(self) -> Tensor | None:
        """What puts the scores of hidden pairs far below every other, shape (#b, #Hk, #G, #rows, mixed)."""
        return None if self.seen.keep is None else (1 - self.seen.keep) * HIDDEN

    def tiles(self) -> Iterator["Tile"]:
        """The (soft-capped) scores of a few heads at a time, in buffers that the next tile reuses.

        Where a tile has not all keys of its heads, those of the same heads follow each other.
        """
        heads, rows, keys = *self.query.shape[:2], self.key.shape[2]
        scale, softcap = self.plan.problem.scale, self.plan.problem.softcap
        assert isinstance(scale, float)
        most_keys = max(self.plan.keys, self.plan.capacity // rows)
        # Of equal length: a short last one would take nearly as long as a full one.
        keys_at_once = -(-keys // -(-keys // most_keys))
        # Several items are only taken together when all their heads fit.
        heads_at_once = heads if self.shape[0] > 1 else max(1, self.plan.capacity // (rows * keys_at_once))
        alpha = scale if softcap is None else scale / softcap
        for some_heads in slices(heads, heads_at_once):
            for some_keys in slices(keys, keys_at_once):
                shape = (some_heads.stop - some_heads.start, rows, some_keys.stop - some_keys.start)
                scores, *scratch = (buffer[: math.prod(shape)].view(shape) for buffer in self.plan.buffers)
                key = self.key[some_heads, :, some_keys]
                torch.baddbmm(scores, self.query[some_heads], key, beta=0, alpha=alpha, out=scores)
                if softcap is not None:
                    scores.tanh_().mul_(softcap)
                yield Tile(self, some_heads, some_keys, scores, tuple(scratch))


@dataclass(frozen=True)
class Tile:
    """The scores of a few heads of a slab, and of all or some of its keys; hidden pairs hold their true score."""

    slab: Slab
    heads: slice
    keys: slice
    """Counted from the first visible key of the slab."""
    scores: Tensor
    """Shape (h, G·rows, keys)."""
    scratch: tuple[Tensor, ...]
    """More buffers of that shape."""

    def spread_out(self, numbers: Tensor) -> Tensor:
        """A buffer of the tile as (b, h, G, rows, keys), as masks and log-weights are."""
        batch, _, *rest = self.slab.shape
        return numbers.view(batch if self._has_all_heads() else 1, -1, *rest, numbers.shape[-1])

    def of_heads(self, weights: Tensor) -> Tensor:
        """The part for the tile's heads of what broadcasts to (b, Hk, G, rows, …)."""
        return weights if self._has_all_heads() or weights.shape[1] == 1 else weights[:, self.heads]

    def _has_all_heads(self) -> bool:
        return len(self.scores) == self.slab.shape[0] * self.slab.shape[1]

    def exponentiate(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turn scores and log-weights of a slab into weights of which the largest is 1; their logarithm's shift, their sum."""
        if weight is not None:
            self.spread_out(self.scores).add_(self.of_heads(weight))
        self.hide()
        top = self.scores.amax(-1, keepdim=True)
        return top, exp_(self.scores.sub_(top)).sum(-1, keepdim=True)

    def multiply(self, weights: Tensor, total: Tensor) -> None:
        """Put Σ weight·value/total in the slab's product, where there are values."""
        if self.slab.value is not None and self.slab.product is not None:
            torch.bmm(weights, self.slab.value[self.heads], out=self.slab.product[self.heads]).div_(total)

    def add_product(self, weights: Tensor, kept: Tensor | None) -> None:
        """Add Σ weight·value to the slab's product, where there are values.

        Args:
            kept: the factor of what the product holds from other keys; None where it holds nothing.
        """
        if self.slab.value is None or self.slab.product is None:
            return
        value, product = self.slab.value[self.heads, self.keys], self.slab.product[self.heads]
        if kept is None:
            torch.bmm(weights, value, out=product)
        else:
            product.mul_(kept).baddbmm_(weights, value)

    def divide_product(self, total: Tensor) -> None:
        """Divide the slab's product by the sum of weights, where there are values."""
        if self.slab.product is not None:
            self.slab.product[self.heads].div_(total)

    def hide(self) -> None:
        """Put the scores of hidden pairs far below every other."""
        self._change_mixed(self.scores, Tensor.add_, self.slab.hidden)

    def clear(self, numbers: Tensor) -> None:
        """Set a buffer of the tile to 0 at hidden pairs."""
        self._change_mixed(numbers, Tensor.mul_, self.slab.seen.keep)

    def count(self) -> Tensor:
        """How many of the tile's keys each query sees, (h, G·rows, 1)."""
        heads, queries, keys = self.scores.shape
        mixed = self._mixed_keys()
        if self.slab.seen.keep is None or mixed is None:
            return self.scores.new_full((1, 1, 1), keys)
        kept = self.of_heads(self.slab.seen.keep)[..., mixed.of_mask]
        counts = kept.sum(-1) + (keys - kept.shape[-1])
        batch = self.slab.shape[0] if self._has_all_heads() else 1
        return counts.expand(batch, heads // batch, *self.slab.shape[2:]).reshape(heads, queries, 1)

    def _change_mixed(self, numbers: Tensor, change: Callable[[Tensor, Tensor], Tensor], by: Tensor | None) -> None:
        """Change the part of a buffer for keys that some queries see and some do not."""
        mixed = self._mixed_keys()
        if by is not None and mixed is not None:
            change(self.spread_out(numbers)[..., mixed.of_tile], self.of_heads(by)[..., mixed.of_mask])

    def _mixed_keys(self) -> "_MixedKeys | None":
        """Which of the tile's keys some queries see and some do not; None where there are none."""
        seen = self.slab.seen
        first = max(seen.mixed_first - seen.first, self.keys.start)
        last = min(seen.mixed_last - seen.first, self.keys.stop)
        if last <= first:
            return None
        of_tile = slice(first - self.keys.start, last - self.keys.start)
        before = seen.mixed_first - seen.first
        return _MixedKeys(of_tile, slice(first - before, last - before))


@dataclass(frozen=True)
class _MixedKeys:
    """Keys of a tile that some queries see and some do not."""

    of_tile: slice
    """Counted from the tile's first key."""
    of_mask: slice
    """Counted from the first key of `Visible.keep`."""


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


def _visible(problem: AttentionProblem, batch: slice, rows: slice) -> Visible:
    """Which keys some items and queries see, by causality and window, and by the mask inside these."""
    keys, device, dtype = problem.key.shape[2], problem.query.device, problem.dtype
    low, high = problem.band or (None, keys)
    first, last = 0 if low is None else max(0, rows.start + low), min(keys, rows.stop + high)
    if last <= first:
        return Visible(torch.zeros(1, 1, 1, 1, dtype=dtype, device=device))
    # Every query sees the keys between these two.
    whole = first if low is None else min(last, max(first, rows.stop - 1 + low))
    end = max(first, min(last, rows.start + high + 1))
    weight = slab_weight(problem, batch, rows)
    if weight is None:
        if whole == first and end == last:
            return Visible(torch.full((1, 1, 1, 1), last - first, dtype=dtype, device=device), first, last)
        mixed_first, mixed_last = end if whole == first else first, whole if end == last else last
        keep = _inside(problem.band, rows, mixed_first, mixed_last, device).to(dtype)[None, None, None]
        return Visible(keep.sum(-1) + (last - first - keep.shape[-1]), first, last, mixed_first, mixed_last, keep)
    kept = weight[..., first:last]
    kept = kept if kept.dtype == torch.bool else kept != -torch.inf
    if whole > first or end < last:
        kept = kept & _inside(problem.band, rows, first, last, device)
    count = kept.sum(-1).to(dtype)
    if may_look(device):
        return _narrowed(kept, count, first)
    return Visible(count, first, last, first, last, kept.to(dtype))


def may_look(device: torch.device) -> bool:
    """Whether to look where a mask hides or weighs something: other processors than this one would have to be waited for."""
    return device.type == "cpu"


def _inside(band: Band, rows: slice, first: int, last: int, device: torch.device) -> Tensor:
    """Whether the band shows queries `rows` keys first … last − 1, shape (rows, keys)."""
    hidden = hidden_by_position(band, rows.start - first, rows.stop - rows.start, last - first, device)
    assert hidden is not None
    return ~hidden


def _narrowed(kept: Tensor, count: Tensor, start: int) -> Visible:
    """What a mask of keys from `start` on shows, by its values."""
    columns = kept.flatten(0, 3)
    anywhere = columns.any(0).nonzero()
    if len(anywhere) == 0:
        return Visible(count)
    first, last = int(anywhere[0]), int(anywhere[-1]) + 1
    partly = (~columns[:, first:last].all(0)).nonzero()
    if len(partly) == 0:
        return Visible(count, start + first, start + last)
    mixed_first, mixed_last = first + int(partly[0]), first + int(partly[-1]) + 1
    keep = kept[..., mixed_first:mixed_last].to(count.dtype)
    return Visible(count, start + first, start + last, start + mixed_first, start + mixed_last, keep)


def attention(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
    log_z, *output = Plan.of(problem, PAIRS_PER_THREAD, buffers=1).run(_attend, [-torch.inf])
    return *(part.to(problem.query.dtype) for part in output), log_z


def _attend(slab: Slab) -> list[Tensor]:
    log_z, weight = slab.new(), slab.weight()
    for tile in slab.tiles():
        top, total = tile.exponentiate(weight)
        torch.add(top, total.log(), out=log_z[tile.heads])
        tile.multiply(tile.scores, total)
    return [log_z]
