"""Several documents in one row, in time and memory that follow the documents.

Short documents of similar lengths are padded to one length and done as items of one batch. Nothing is moved where documents
already lie as they are needed: equal ones side by side, and long ones, each for itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem

OVERHEAD = 1 << 15
"""Scores that take as long as one more call of a backend: about 0.15 ms, at 5 ns a score and one thread of a CPU."""
MOVED = 48
"""Scores that take as long as moving a query, or a key, of one head into a batch, and its result back; on a CPU. On other
devices this is nothing beside a call."""

Function = Callable[..., tuple[Tensor, ...]]


class Bucket(NamedTuple):
    """Documents that are done as items of one batch, and what they are padded to."""

    members: tuple[int, ...]
    rows: int
    keys: int
    in_place: bool
    """Whether they lie side by side in the row, without padding."""


def apply(function: Function, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
    """``function(problem, *others)`` of a problem that has documents, its results along the row again.

    Args:
        function: gives tensors ``(B, Hk, G, L, ...)``, a query's numbers from that query and the keys it sees.
        others: tensors of the query's shape that go with it.
    """
    documents, batch, scale = problem.documents, problem.query.shape[0], problem.scale
    assert documents is not None
    moved = MOVED if problem.query.device.type == "cpu" else 0
    found = buckets(documents, problem.query.shape[:3].numel(), moved)
    rows = _Places.of(found, [bucket.rows for bucket in found], documents.query_boundaries, problem.query.device)
    keys = _Places.of(found, [bucket.keys for bucket in found], documents.key_boundaries, problem.query.device)
    inputs = (
        rows.items(problem.query, 3, batch),
        keys.items(problem.key, 2, batch),
        [None] * len(found) if problem.value is None else keys.items(problem.value, 2, batch),
        _weights(problem, documents, found, rows, keys),
        rows.items(scale, 3, batch) if isinstance(scale, Tensor) and scale.ndim > 0 else [scale] * len(found),
        *(rows.items(other, 3, batch) for other in others),
    )
    results = []
    for bucket, query, key, value, weight, own_scale, *more in zip(found, *inputs, strict=True):
        part = replace(problem, query=query, key=key, value=value, log_weight=weight, scale=own_scale, documents=None)
        made = function(part.with_least_band(), *more)
        results.append([one.unflatten(0, (batch, len(bucket.members))).movedim(1, 3).flatten(3, 4) for one in made])
    return tuple(rows.restore(one) for one in zip(*results, strict=True))


@lru_cache(maxsize=64)
def buckets(documents: Documents, heads: int, moved: int) -> tuple[Bucket, ...]:
    """Which documents are done together: while padding and moving cost less than a call; lengths about double at most.

    Args:
        heads: Scores of one query and one key.
        moved: Scores that take as long as moving a query or a key of one head.
    """
    # A kernel needs a query and a key.
    sizes = [(max(1, keys), max(1, rows)) for rows, keys in zip(documents.lengths, documents.key_lengths, strict=True)]
    is_empty = [0 in pair for pair in zip(documents.lengths, documents.key_lengths, strict=True)]
    found: list[_Group] = []
    widest = documents.query_boundaries[-1] + 2
    # The compiler sorts whole numbers alone.
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number][0] * widest + sizes[number][1]):
        alone = _Group([number], 1, sizes[number], sizes[number], sum(sizes[number]), not is_empty[number])
        together = found[-1].joined(alone) if found else alone
        if found and together.is_close:
            more = together.cost(moved) - found[-1].cost(moved) - alone.cost(moved)
            if heads * more <= OVERHEAD:
                together.members.append(number)
                found[-1] = together
                continue
        found.append(alone)
    groups = sorted(found, key=lambda group: min(group.members))
    return tuple(Bucket(tuple(sorted(each.members)), each.most[1], each.most[0], each.in_place) for each in groups)


class _Group(NamedTuple):
    """Documents that may become a bucket; pairs are (keys, rows)."""

    members: list[int]
    size: int
    least: tuple[int, int]
    most: tuple[int, int]
    tokens: int
    in_place: bool

    def joined(self, other: "_Group") -> "_Group":
        """With one more document, which is not yet among the members: there may be very many."""
        side_by_side = self.members[-1] + 1 == other.members[0] and self.least == self.most == other.most
        return _Group(
            self.members,
            self.size + 1,
            (min(self.least[0], other.least[0]), min(self.least[1], other.least[1])),
            (max(self.most[0], other.most[0]), max(self.most[1], other.most[1])),
            self.tokens + other.tokens,
            self.in_place and other.in_place and side_by_side,
        )

    @property
    def is_close(self) -> bool:
        return all(large <= 2 * small + 8 for large, small in zip(self.most, self.least, strict=True))

    def cost(self, moved: int) -> int:
        """In scores of one head."""
        pairs = self.size * self.most[0] * self.most[1]
        return pairs if self.in_place else pairs + moved * self.tokens


class _Run(NamedTuple):
    """A stretch of the row."""

    owner: int | None
    """The bucket that lies there; None for documents that are moved."""
    length: int

    @staticmethod
    def of(found: Sequence[Bucket], boundaries: tuple[int, ...]) -> "tuple[list[_Run], dict[int, int]]":
        """All of them in order, and of each document that is moved, where it starts among these."""
        owners = {bucket.members[0]: place for place, bucket in enumerate(found) if bucket.in_place}
        runs: list[_Run] = []
        starts: dict[int, int] = {}
        moved = number = 0
        while number < len(boundaries) - 1:
            owner = owners.get(number)
            following = number + (1 if owner is None else len(found[owner].members))
            length = boundaries[following] - boundaries[number]
            number, first = following, number
            if owner is None:
                starts[first], moved = moved, moved + length
                if runs and runs[-1].owner is None:
                    length += runs.pop().length
            runs.append(_Run(owner, length))
        return runs, starts


@dataclass(frozen=True)
class _Places:
    """Where the queries, or the keys, of a row go: bucket by bucket, padded by zeros.

    A bucket that is in place is a run of the row. The others are moved: their runs are joined, and then taken apart.
    """

    counts: list[int]
    """Documents of each bucket."""
    widths: list[int]
    """What they are padded to."""
    runs: list[_Run]
    """Of the row, in order."""
    there: Tensor | None
    """For each place of what is moved its number; None if nothing is moved."""
    back: Tensor | None
    """For each number its place."""
    gaps: Tensor | None
    """The places of padding."""

    @staticmethod
    def of(found: Sequence[Bucket], widths: list[int], boundaries: tuple[int, ...], device: torch.device) -> "_Places":
        counts = [len(bucket.members) for bucket in found]
        runs, starts = _Run.of(found, boundaries)
        if not starts:
            return _Places(counts, widths, runs, None, None, None)
        scattered = [place for place, bucket in enumerate(found) if not bucket.in_place]
        order = [number for place in scattered for number in found[place].members]
        wide = [widths[place] for place in scattered for _ in found[place].members]
        lengths = [boundaries[number + 1] - boundaries[number] for number in order]
        total, moved = sum(wide), sum(lengths)
        fields = torch.tensor(
            [[starts[number] for number in order], lengths, [0, *accumulate(wide)][:-1]], device=device
        )
        start, length, place = fields.repeat_interleave(torch.tensor(wide, device=device), 1, output_size=total)
        step = torch.arange(total, device=device) - place
        inside = step < length
        there = torch.where(inside, start + step, moved)
        # Every number has one place, and padding follows all of them.
        after = there.argsort()
        return _Places(counts, widths, runs, there.clamp(max=max(0, moved - 1)), after[:moved], after[moved:])

    def items(self, tensor: Tensor, dim: int, batch: int) -> list[Tensor]:
        """A tensor of the row, ``(#B, ..., #row at dim, ...)``, for each bucket, ``(1 or B·documents, ..., #width, ...)``."""
        if tensor.shape[dim] != self.row:
            return [_repeated(tensor, count) for count in self.counts]
        pieces = tensor.split([run.length for run in self.runs], dim) if len(self.runs) > 1 else (tensor,)
        parts: dict[int, Tensor] = {}
        scattered: list[Tensor] = []
        for run, piece in zip(self.runs, pieces, strict=True):
            if run.owner is None:
                scattered.append(piece)
            else:
                parts[run.owner] = piece
        if scattered:
            others = [place for place in range(len(self.counts)) if place not in parts]
            sizes = [self.counts[place] * self.widths[place] for place in others]
            moved = self._moved(_cat(scattered, dim), dim, packing=True)
            parts.update(zip(others, moved.split(sizes, dim), strict=True))
        found = []
        for place, (count, width) in enumerate(zip(self.counts, self.widths, strict=True)):
            part = parts[place]
            if count > 1:
                part = part.unflatten(dim, (count, width)).movedim(dim, 1)
                part = part.expand(batch, *part.shape[1:]).flatten(0, 1)
            found.append(part)
        return found

    @property
    def row(self) -> int:
        """The row's length."""
        return sum(run.length for run in self.runs)

    def restore(self, results: Sequence[Tensor]) -> Tensor:
        """The results of the buckets, each along the fourth dimension, along the row."""
        in_place = {run.owner for run in self.runs}
        scattered = [result for place, result in enumerate(results) if place not in in_place]
        moved: Iterator[Tensor] = iter(())
        if scattered:
            sizes = [run.length for run in self.runs if run.owner is None]
            moved = iter(self._moved(_cat(scattered, 3), 3, packing=False).split(sizes, 3))
        return _cat([next(moved) if run.owner is None else results[run.owner] for run in self.runs], 3)

    def _moved(self, tensor: Tensor, dim: int, packing: bool) -> Tensor:
        if self.there is None or self.back is None or self.gaps is None:
            return tensor
        lead, arguments = tensor.shape[:dim], (tensor.flatten(0, dim - 1), self.there, self.back, self.gaps, packing)
        # The compiler differentiates what it sees, and takes no function with a forward mode.
        moved = _move(*arguments) if torch.compiler.is_compiling() else _Move.apply(*arguments)
        return moved.unflatten(0, lead)  # pyright: ignore[reportAttributeAccessIssue]


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def _move(tensor: Tensor, there: Tensor, back: Tensor, gaps: Tensor, packing: bool) -> Tensor:
    """The second dimension, to its places or back."""
    if not packing:
        return tensor.index_select(1, back)
    if len(back) == 0:
        return tensor.new_zeros(tensor.shape[0], len(there), *tensor.shape[2:])
    # In place: it is a new tensor.
    return tensor.index_select(1, there).index_fill_(1, gaps, 0)


class _Move(torch.autograd.Function):
    """`_move`, whose either direction is the derivative of the other: no sums over what was copied."""

    forward = staticmethod(_move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:4])
        ctx.save_for_forward(*inputs[1:4])
        ctx.packing = inputs[4]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Move.apply(cotangent, *ctx.saved_tensors, not ctx.packing), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Move.apply(tangent, *ctx.saved_tensors, ctx.packing)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: Tensor, *others: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        moved = _Move.apply(tensor.movedim(in_dims[0], 0).flatten(0, 1), *others)
        return moved.unflatten(0, (info.batch_size, -1)), 0  # pyright: ignore[reportAttributeAccessIssue]


def _weights(
    problem: AttentionProblem, documents: Documents, found: Sequence[Bucket], rows: _Places, keys: _Places
) -> list[Tensor | None]:
    """The log-weights of each bucket, −∞ (or False) for keys that are padding, where a query could see them."""
    weight, batch = problem.log_weight, problem.query.shape[0]
    if weight is None:
        parts: list[Any] = [None] * len(found)
    elif weight.shape[4] == 1:
        parts = rows.items(weight, 3, batch)
    elif weight.shape[3] == 1:
        parts = keys.items(weight, 4, batch)
    else:
        parts = [
            _columns(part, bucket, documents.key_boundaries)
            for part, bucket in zip(rows.items(weight, 3, batch), found, strict=True)
        ]
    return [_without_padding(part, bucket, documents, problem) for part, bucket in zip(parts, found, strict=True)]


def _columns(part: Tensor, bucket: Bucket, boundaries: tuple[int, ...]) -> Tensor:
    """Of log-weights a query and key of the row, those of each document's keys."""
    if len(bucket.members) == 1 and bucket.keys == boundaries[bucket.members[0] + 1] - boundaries[bucket.members[0]]:
        return part.narrow(4, boundaries[bucket.members[0]], bucket.keys)
    if part.shape[4] == 0:
        return part.new_zeros(*part.shape[:4], bucket.keys)
    first = torch.tensor([boundaries[member] for member in bucket.members], device=part.device)
    place = first.unsqueeze(1) + torch.arange(bucket.keys, device=part.device)
    place = place.clamp(max=boundaries[-1] - 1)[:, None, None, None]
    return part.gather(4, _folded(place, part.shape[0] // len(bucket.members)).expand(*part.shape[:4], -1))


def _without_padding(
    weight: Tensor | None, bucket: Bucket, documents: Documents, problem: AttentionProblem
) -> Tensor | None:
    band, lengths = problem.band, [documents.key_lengths[member] for member in bucket.members]
    padded = [member for member, length in zip(bucket.members, lengths, strict=True) if length < bucket.keys]
    if band is not None and weight is None:
        # Position alone hides what comes behind the last key that the last query sees.
        padded = [one for one in padded if documents.lengths[one] + band[1] > documents.key_lengths[one]]
    if not padded:
        return weight
    device, batch = problem.query.device, problem.query.shape[0]
    kept = torch.arange(bucket.keys, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
    kept = _folded(kept[:, None, None, None], batch)
    if weight is None:
        return kept
    return weight & kept if weight.dtype == torch.bool else weight.masked_fill(~kept, -torch.inf)


def _folded(tensor: Tensor, batch: int) -> Tensor:
    """What is the same for every item of the caller's batch."""
    return tensor if batch == 1 else tensor.repeat(batch, *(1,) * (tensor.ndim - 1))


def _repeated(tensor: Tensor, count: int) -> Tensor:
    """What is the same for every document."""
    return tensor if tensor.shape[0] == 1 or count == 1 else tensor.repeat_interleave(count, 0)
