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
from massieu.ops.shapes import AttentionProblem, Band, hidden_by_position, scores_per_tile, slices

HIDDEN = -1e30
"""Stands for −inf where 0·score must stay 0. What is not above it is no score of a visible pair; see `without_score`."""

PAIRS_PER_THREAD = 1 << 18
"""Scores of an attention's tile per thread: one float32 buffer of this size, a query's scores and values fill the cache of
a core."""


MOST_QUERIES = 1 << 18
"""Queries of a slab, all heads counted, without a mask: the numbers of each are in memory at once."""


@dataclass(frozen=True)
class Blocks:
    """A backend that works in tiles."""

    forward: Callable[..., tuple[Tensor, ...]]
    name = "blocks"
    bands = False

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
    """Most keys of a tile that has as many queries as a slab may have."""

    @staticmethod
    def of(problem: AttentionProblem, pairs_per_thread: int, buffers: int, keys: int | None = None) -> "Plan":
        """Plan tiles of a problem.

        Args:
            problem: its tensors are copied where they are not contiguous or not of the working dtype.
            pairs_per_thread: scores of a tile for each thread of the CPU. A tile has at least the scores of one query
                position in one key head.
            buffers: how many buffers of a tile's size its work needs.
            keys: most keys of a tile on the CPU, where there are many queries. None, and other devices: all keys.
        """
        query = problem.query.to(problem.dtype)
        scale = problem.scale
        if isinstance(scale, Tensor):
            # `torch.baddbmm` takes one number as factor, so a scale per head or query goes into the query.
            query = (query * scale).to(problem.dtype)
            scale = 1.0
        key = problem.key.to(problem.dtype).contiguous()
        value = problem.value
        if value is not None:
            value = value.to(problem.dtype).contiguous()
        if keys is None or query.device.type != "cpu":
            keys = key.shape[2]
        keys = min(keys, key.shape[2])
        pairs = scores_per_tile(pairs_per_thread * torch.get_num_threads(), query.device)
        capacity = max(pairs, query.shape[2] * keys)
        space = query.new_empty(buffers, min(capacity, problem.pairs))
        return Plan(
            replace(problem, query=query.contiguous(), key=key, value=value, scale=scale), capacity, space, keys
        )

    @torch.no_grad()
    def run(self, work: Callable[["Slab"], Sequence[Tensor]], levels: Sequence[float] = ()) -> tuple[Tensor, ...]:
        """Results of `work` over all slabs, each ``(B, Hk, G, L)``; then the products ``(B, Hk, G, L, E)`` if there are values.

        Args:
            work: returns numbers (b·Hk, G·rows, 1) of its slab's queries, and fills the slab's product.
            levels: for each of these numbers its value for queries that see no key. The product of such a query is 0.
                Numbers with an integer level are int64.
        """
        query = self.problem.query
        value = self.problem.value
        results = []
        for level in levels:
            dtype = torch.int64 if isinstance(level, int) else None
            results.append(query.new_full(query.shape[:4], level, dtype=dtype))
        product: Tensor | None = None
        for slab in self._slabs():
            slab_results = work(slab)
            # Without `keep` every query of the slab sees all keys of it.
            sees_no_key = None if slab.seen.keep is None else slab.seen.count == 0
            if sees_no_key is not None and can_sync(query.device) and not bool(sees_no_key.any()):
                sees_no_key = None
            for result, numbers, level in zip(results, slab_results, levels, strict=True):
                part = slab.of(result)
                part.copy_(numbers.view(part.shape))
                if sees_no_key is not None:
                    part.masked_fill_(sees_no_key, level)
            if slab.product is None:
                continue
            of_slab = slab.product.view(*slab.shape, -1)
            if sees_no_key is not None:
                of_slab.masked_fill_(sees_no_key[..., None], 0.0)
            if slab.shape == query.shape[:4]:
                product = of_slab  # of all queries
            else:
                product = query.new_zeros(*query.shape[:4], of_slab.shape[-1]) if product is None else product
                slab.of(product).copy_(of_slab)
        if value is not None:
            # Where no slab has a visible key, there is none.
            results.append(query.new_zeros(*query.shape[:4], value.shape[-1]) if product is None else product)
        return tuple(results)

    def _slabs(self) -> Iterator["Slab"]:
        """All slabs that have a visible key."""
        problem = self.problem
        batch, key_heads, group, length, _ = problem.query.shape
        keys = self.keys
        rows = length
        weight = problem.log_weight
        if problem.band is not None or (weight is not None and weight.shape[3] > 1):
            # Short blocks skip more of what a causal mask hides; longer ones multiply faster, and a device waits for
            # each operation to begin: there a tile is as full as it may be.
            short = max(128, min(256, length // 8))
            full = self.capacity // (key_heads * group * keys)
            rows = min(rows, short if problem.query.device.type == "cpu" else max(short, full))
        # A tile has one key head at least, with all query heads that share it.
        rows = min(rows, max(1, self.capacity // (group * keys)))
        if weight is None:
            items = max(1, MOST_QUERIES // (key_heads * group * rows))
        elif rows == length:
            items = max(1, self.capacity // (key_heads * group * length * keys))
        else:
            items = 1
        for batch_slice in slices(batch, items):
            for row_slice in slices(length, rows):
                seen = _visible(problem, batch_slice, row_slice)
                if seen.last > seen.first:
                    yield Slab(self, batch_slice, row_slice, seen)


@dataclass(frozen=True)
class Slab:
    """Some items, all heads, some queries: the part of a problem whose mask is read once.

    Pairs (item, key head) are one index, as are pairs (query head that shares the key head, query).
    """

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
        """The slab's part of ``(B, Hk, G, L, ...)``, a view."""
        return result[self.batch, :, :, self.rows]

    def fold(self, tensor: Tensor) -> Tensor:
        """The slab's part of ``(B, Hk, G, L, C)`` as (b·Hk, G·rows, C)."""
        part = self.of(tensor)
        return part.reshape(part.shape[0] * part.shape[1], -1, part.shape[-1])

    def new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer ``(*size, b·Hk, G·rows, 1)``, of the query's dtype if no other is given."""
        return self.query.new_empty(*size, *self.query.shape[:2], 1, dtype=dtype)

    def per_query(self, numbers: Tensor) -> Tensor:
        """From (#b, #Hk, #G, #rows) to (b·Hk, G·rows, 1)."""
        return numbers.expand(self.shape).reshape(*self.query.shape[:2], 1)

    def weight(self) -> Tensor | None:
        """Float log-weights of the visible keys, shape (#b, #Hk, #G, #rows, keys); None if they change no score.

        A log-weight of −∞ is 0 here: `Tile.hide` hides those pairs.
        """
        weight = slab_log_weight(self.plan.problem, self.batch, self.rows)
        if weight is None or weight.dtype == torch.bool:
            return None
        weight = weight[..., self.seen.first : self.seen.last].to(self.query.dtype)
        weight = weight.masked_fill(weight == -torch.inf, 0.0)
        if can_sync(weight.device) and not bool(weight.any()):
            return None
        return weight

    @cached_property
    def highest(self) -> Tensor | None:
        """What a score may be at most: `HIDDEN` for hidden pairs, however large theirs are; (#b, #Hk, #G, #rows, mixed)."""
        if self.seen.keep is None:
            return None
        return torch.where(self.seen.keep == 0, HIDDEN, torch.inf).to(self.seen.keep.dtype)

    @cached_property
    def ranges(self) -> Tensor | None:
        """For each query the first key that it sees, and the one after the last, counted from `seen.first`: (rows, 2), int32.

        None where more than the band decides what a query sees.
        """
        problem = self.plan.problem
        if problem.band is None or problem.log_weight is not None:
            return None
        low, high = problem.band
        keys = problem.key.shape[2]
        query = torch.arange(self.rows.start, self.rows.stop, dtype=torch.int32, device=problem.query.device)
        first = torch.zeros_like(query) if low is None else (query + low).clamp_(0, keys)
        end = (query + high + 1).clamp_(0, keys)
        return torch.stack([first, torch.maximum(first, end)], 1) - self.seen.first

    @cached_property
    def is_hidden(self) -> Tensor | None:
        """Whether a pair is hidden, of the same shape."""
        return None if self.seen.keep is None else self.seen.keep == 0

    def tiles(self) -> Iterator["Tile"]:
        """The (soft-capped) scores of a few heads at a time, in buffers that the next tile reuses.

        Where a tile does not hold all keys, the tiles of the same heads follow each other, in the order of the keys.
        """
        count, rows = self.query.shape[:2]
        keys = self.key.shape[2]
        scale = self.plan.problem.scale
        softcap = self.plan.problem.softcap
        assert isinstance(scale, float)
        factor = scale if softcap is None else scale / softcap
        # Of several items with a mask only all heads together: their part of it has a dimension of items.
        fewest_heads = count if self.shape[0] > 1 and self.plan.problem.log_weight is not None else 1
        # Where a slab has fewer queries than it may, a tile has room for more keys. Tiles of the same heads are of about
        # equal length, as a short last one would take nearly as long as a full one.
        most_keys = max(self.plan.keys, self.plan.capacity // (fewest_heads * rows))
        keys_per_tile = math.ceil(keys / math.ceil(keys / most_keys))
        heads_per_tile = max(fewest_heads, self.plan.capacity // (rows * keys_per_tile))
        buffers = self.plan.buffers.unbind()
        # Nearly all tiles have the same shape: their views are made once.
        views: list[Tensor] = []
        for heads in slices(count, heads_per_tile):
            for part in slices(keys, keys_per_tile):
                shape = (heads.stop - heads.start, rows, part.stop - part.start)
                if not views or views[0].shape != shape:
                    views = [buffer[: math.prod(shape)].view(shape) for buffer in buffers]
                scores, *scratch = views
                # With beta = 0 the kernel ignores what the buffer holds, NaN too.
                torch.baddbmm(scores, self.query[heads], self.key[heads, :, part], beta=0, alpha=factor, out=scores)
                if softcap is not None:
                    scores.tanh_().mul_(softcap)
                yield Tile(self, heads, part, scores, tuple(scratch))


@dataclass(frozen=True)
class Tile:
    """The scores of a few heads of a slab, for all or some of its keys; those of hidden pairs too until `hide` is called."""

    slab: Slab
    heads: slice
    keys: slice
    """Counted from the slab's first visible key."""
    scores: Tensor
    """Shape (h, G·rows, keys)."""
    scratch: tuple[Tensor, ...]
    """More buffers of that shape."""

    def split_heads(self, numbers: Tensor) -> Tensor:
        """View a buffer of the tile, (h, G·rows, keys), in the layout of masks and log-weights.

        That is (b, Hk, G, rows, keys) for a tile of all heads, else (1, h, G, rows, keys).
        """
        batch, _, *rest = self.slab.shape
        return numbers.view(batch if self._has_all_heads() else 1, -1, *rest, numbers.shape[-1])

    def select_heads(self, weights: Tensor) -> Tensor:
        """The part for the tile's heads of a tensor that broadcasts to (b, Hk, G, rows, …)."""
        if self._has_all_heads() or weights.shape[1] == 1:
            return weights
        return weights[:, self.heads]

    def _has_all_heads(self) -> bool:
        batch, key_heads = self.slab.shape[:2]
        return len(self.scores) == batch * key_heads

    def exponentiate(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Replace each score s, with its log-weight w, by exp(s + w − top), so that the largest weight of a query is 1.

        Args:
            weight: of the slab, as `Slab.weight` returns it.

        Returns:
            top, the largest s + w of each query, and the sum of its weights, both (h, G·rows, 1): log Z = top + log sum.
            The sum is NaN for a query without a score.
        """
        if weight is not None:
            self.split_heads(self.scores).add_(self.select_heads(weight))
        self.hide()
        top = self.scores.amax(-1, keepdim=True)
        total = exp_(self.scores.sub_(top)).sum(-1, keepdim=True)
        return top, total.masked_fill_(without_score(top), torch.nan)

    def multiply(self, weights: Tensor, total: Tensor) -> None:
        """Put Σ weight·value/total in the slab's product, where there are values."""
        if self.slab.value is not None and self.slab.product is not None:
            torch.bmm(weights, self.slab.value[self.heads], out=self.slab.product[self.heads]).div_(total)

    def add_product(self, weights: Tensor, kept: Tensor | None) -> None:
        """Add Σ weight·value over the tile's keys to the slab's product, where there are values.

        Args:
            kept: factor of the sum over the keys before; None for the first keys.
        """
        if self.slab.value is None or self.slab.product is None:
            return
        value = self.slab.value[self.heads, self.keys]
        product = self.slab.product[self.heads]
        if kept is None:
            torch.bmm(weights, value, out=product)
        else:
            product.mul_(kept).baddbmm_(weights, value)

    def divide_product(self, total: Tensor) -> None:
        """Divide the slab's product by the sum of weights, where there are values."""
        if self.slab.product is not None:
            self.slab.product[self.heads].div_(total)

    @property
    def is_mixed(self) -> bool:
        """Whether some of its queries see a key that others do not."""
        return self.slab.seen.keep is not None and self._mixed_keys() is not None

    def hide(self) -> None:
        """Lower the scores of hidden pairs far below all others."""
        self._change_mixed(
            self.scores, lambda scores, highest: torch.minimum(scores, highest, out=scores), self.slab.highest
        )

    def fill_hidden(self, score: float) -> None:
        """Set the scores of hidden pairs, whatever they are."""
        self._change_mixed(
            self.scores, lambda numbers, hidden: numbers.masked_fill_(hidden, score), self.slab.is_hidden
        )

    def ranges(self) -> Tensor | None:
        """For each query of the slab the tile's first key that it sees, and the one after the last: (rows, 2), int32.

        None where a mask decides, or each query sees all keys of the tile.
        """
        if self.slab.ranges is None or not self.is_mixed:
            return None
        return (self.slab.ranges - self.keys.start).clamp_(0, self.keys.stop - self.keys.start)

    def clear(self, numbers: Tensor) -> None:
        """Set a buffer of the tile to 0 at hidden pairs."""
        self._change_mixed(numbers, Tensor.mul_, self.slab.seen.keep)

    def count(self) -> Tensor:
        """How many of the tile's keys each query sees, (h, G·rows, 1) or one number for all."""
        heads, queries, keys = self.scores.shape
        mixed = self._mixed_keys()
        if self.slab.seen.keep is None or mixed is None:
            return self.scores.new_full((1, 1, 1), keys)
        keep = self.select_heads(self.slab.seen.keep)[..., mixed.of_mask]
        counts = keep.sum(-1) + (keys - keep.shape[-1])
        batch = self.slab.shape[0] if self._has_all_heads() else 1
        return counts.expand(batch, heads // batch, *self.slab.shape[2:]).reshape(heads, queries, 1)

    def _change_mixed(self, numbers: Tensor, change: Callable[[Tensor, Tensor], Tensor], by: Tensor | None) -> None:
        """Change a buffer in place where some queries see a key and some do not."""
        mixed = self._mixed_keys()
        if by is not None and mixed is not None:
            change(self.split_heads(numbers)[..., mixed.of_tile], self.select_heads(by)[..., mixed.of_mask])

    def _mixed_keys(self) -> "_MixedKeys | None":
        """Which of the tile's keys some queries see and some do not; None where there are none."""
        seen = self.slab.seen
        mask_start = seen.mixed_first - seen.first
        first = max(mask_start, self.keys.start)
        last = min(seen.mixed_last - seen.first, self.keys.stop)
        if last <= first:
            return None
        of_tile = slice(first - self.keys.start, last - self.keys.start)
        return _MixedKeys(of_tile, slice(first - mask_start, last - mask_start))


@dataclass(frozen=True)
class _MixedKeys:
    """Keys of a tile that some queries see and some do not."""

    of_tile: slice
    """Counted from the tile's first key."""
    of_mask: slice
    """Counted from the first key of `Visible.keep`."""


def without_score(top: Tensor) -> Tensor:
    """Queries without a score above `HIDDEN` at a key that they see, as where products overflow; from their largest score."""
    return top <= HIDDEN


def slab_log_weight(problem: AttentionProblem, batch: slice, rows: slice) -> Tensor | None:
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
    keys = problem.key.shape[2]
    device = problem.query.device
    dtype = problem.dtype
    low, high = problem.band or (None, keys)
    # Keys first … last − 1 are those that some query sees: from the first query's low end to the last query's high end.
    first = 0 if low is None else max(0, rows.start + low)
    last = min(keys, rows.stop + high)
    if last <= first:
        return Visible(torch.zeros(1, 1, 1, 1, dtype=dtype, device=device))
    # Every query sees the keys all_first … all_last − 1: from the last query's low end to the first query's high end.
    all_first = first if low is None else min(last, max(first, rows.stop - 1 + low))
    all_last = max(first, min(last, rows.start + high + 1))
    weight = slab_log_weight(problem, batch, rows)
    if weight is None:
        if all_first == first and all_last == last:
            return Visible(torch.full((1, 1, 1, 1), last - first, dtype=dtype, device=device), first, last)
        mixed_first = all_last if all_first == first else first
        mixed_last = all_first if all_last == last else last
        keep = _inside(problem.band, rows, mixed_first, mixed_last, device).to(dtype)[None, None, None]
        count = keep.sum(-1) + (last - first - keep.shape[-1])
        return Visible(count, first, last, mixed_first, mixed_last, keep)
    visible = weight[..., first:last]
    if visible.dtype != torch.bool:
        visible = visible != -torch.inf
    if all_first > first or all_last < last:
        visible = visible & _inside(problem.band, rows, first, last, device)
    count = visible.sum(-1).to(dtype)
    if can_sync(device):
        return _narrowed(visible, count, first)
    return Visible(count, first, last, first, last, visible.to(dtype))


def can_sync(device: torch.device) -> bool:
    """Whether values may be read on the host, to skip what a mask hides: on other devices reading waits for their work."""
    return device.type == "cpu"


def _inside(band: Band, rows: slice, first: int, last: int, device: torch.device) -> Tensor:
    """Whether each of the queries `rows` sees each of the keys first … last − 1 by the band, shape (rows, keys)."""
    hidden = hidden_by_position(band, rows.start - first, rows.stop - rows.start, last - first, device)
    assert hidden is not None
    return ~hidden


def _narrowed(visible: Tensor, count: Tensor, start: int) -> Visible:
    """The same from a mask of keys `start` …, without the keys at either end that no query sees.

    Args:
        visible: (#b, #Hk, #G, #rows, keys).
        count: visible keys of each query.
        start: number of the mask's first key.
    """
    columns = visible.flatten(0, 3)
    seen_keys = columns.any(0).nonzero()
    if len(seen_keys) == 0:
        return Visible(count)
    first = int(seen_keys[0])
    last = int(seen_keys[-1]) + 1
    mixed_keys = (~columns[:, first:last].all(0)).nonzero()
    if len(mixed_keys) == 0:
        return Visible(count, start + first, start + last)
    mixed_first = first + int(mixed_keys[0])
    mixed_last = first + int(mixed_keys[-1]) + 1
    keep = visible[..., mixed_first:mixed_last].to(count.dtype)
    return Visible(count, start + first, start + last, start + mixed_first, start + mixed_last, keep)


def attention(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
    log_z, *output = Plan.of(problem, PAIRS_PER_THREAD, buffers=1).run(_attend, [-torch.inf])
    return *(part.to(problem.query.dtype) for part in output), log_z


def _attend(slab: Slab) -> list[Tensor]:
    log_z = slab.new()
    weight = slab.weight()
    for tile in slab.tiles():
        top, total = tile.exponentiate(weight)
        torch.add(top, total.log(), out=log_z[tile.heads])
        tile.multiply(tile.scores, total)
        lost = without_score(top)
        if slab.product is not None and (not can_sync(top.device) or bool(lost.any())):
            slab.product[tile.heads].masked_fill_(lost, 0.0)
        log_z[tile.heads].masked_fill_(lost, -torch.inf)
    return [log_z]
