"""Several documents in one row, in time and memory that follow the documents.

Documents of similar lengths are padded to one length and done as items of one batch. Nothing is moved where documents in
their order already lie as they are needed: equal ones side by side, or each one for itself.
"""

from collections.abc import Callable, Sequence
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

Function = Callable[..., tuple[Tensor, ...]]


class Bucket(NamedTuple):
    """Documents that are done as items of one batch, and what they are padded to."""

    members: tuple[int, ...]
    rows: int
    keys: int


def apply(function: Function, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
    """``function(problem, *others)`` of a problem that has documents, its results along the row again.

    Args:
        function: gives tensors ``(B, Hk, G, L, ...)``, a query's numbers from that query and the keys it sees.
        others: tensors of the query's shape that go with it.
    """
    documents, batch, scale = problem.documents, problem.query.shape[0], problem.scale
    assert documents is not None
    found = buckets(documents, problem.query.shape[:3].numel())
    members = [bucket.members for bucket in found]
    rows = _Places.of(members, [bucket.rows for bucket in found], documents.query_boundaries, problem.query.device)
    keys = _Places.of(members, [bucket.keys for bucket in found], documents.key_boundaries, problem.query.device)
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
    return tuple(rows.restore(torch.cat(one, 3) if len(found) > 1 else one[0]) for one in zip(*results, strict=True))


@lru_cache(maxsize=64)
def buckets(documents: Documents, heads: int) -> tuple[Bucket, ...]:
    """Which documents are done together: while padding costs less than a call, and about doubles lengths at most.

    Args:
        heads: Scores of one query and one key.
    """
    # A kernel needs a query and a key.
    sizes = [(max(1, keys), max(1, rows)) for rows, keys in zip(documents.lengths, documents.key_lengths, strict=True)]
    found: list[list[int]] = []
    least = most = first = (0, 0)
    widest = documents.query_boundaries[-1] + 2
    # The compiler sorts whole numbers alone.
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number][0] * widest + sizes[number][1]):
        keys, rows = sizes[number]
        wide = (keys, max(most[1], rows))
        narrow = (first[0], min(least[1], rows))
        close = all(large <= 2 * small + 8 for large, small in zip(wide, narrow, strict=True))
        if found and close:
            count = len(found[-1])
            more = (count + 1) * wide[0] * wide[1] - count * most[0] * most[1] - keys * rows
            if heads * more <= OVERHEAD:
                found[-1].append(number)
                least, most = narrow, wide
                continue
        found.append([number])
        least = most = first = (keys, rows)
    groups = sorted([sorted(group) for group in found], key=lambda group: group[0])
    return tuple(
        Bucket(tuple(group), *(max([sizes[number][side] for number in group]) for side in (1, 0))) for group in groups
    )


@dataclass(frozen=True)
class _Places:
    """Where the queries, or the keys, of a row go: document by document and bucket by bucket, padded by zeros."""

    counts: list[int]
    """Documents of each bucket."""
    widths: list[int]
    """What they are padded to."""
    there: Tensor | None
    """For each place its number in the row; None if every number stays where it is."""
    back: Tensor | None
    """For each number in the row its place."""
    gaps: Tensor | None
    """The places of padding."""

    @staticmethod
    def of(
        members: list[tuple[int, ...]], widths: list[int], boundaries: tuple[int, ...], device: torch.device
    ) -> "_Places":
        order = [number for group in members for number in group]
        counts = [len(group) for group in members]
        wide = [width for group, width in zip(members, widths, strict=True) for _ in group]
        lengths = [boundaries[number + 1] - boundaries[number] for number in order]
        if lengths == wide and order == list(range(len(order))):
            return _Places(counts, widths, None, None, None)
        total, row = sum(wide), boundaries[-1]
        starts = [boundaries[number] for number in order]
        fields = torch.tensor([starts, lengths, [0, *accumulate(wide)][:-1]], device=device)
        repeats = torch.tensor(wide, device=device)
        start, length, place = fields.repeat_interleave(repeats, 1, output_size=total)
        step = torch.arange(total, device=device) - place
        inside = step < length
        there = torch.where(inside, start + step, row)
        # Every number of the row has one place, and padding follows all of them.
        after = there.argsort()
        return _Places(counts, widths, there.clamp(max=max(0, row - 1)), after[:row], after[row:])

    def items(self, tensor: Tensor, dim: int, batch: int) -> list[Tensor]:
        """A tensor of the row, ``(#B, ..., #row at dim, ...)``, for each bucket, ``(1 or B·documents, ..., #width, ...)``."""
        if tensor.shape[dim] != self.row:
            return [_repeated(tensor, count) for count in self.counts]
        tensor = self._moved(tensor, dim, packing=True)
        sizes = [count * width for count, width in zip(self.counts, self.widths, strict=True)]
        parts = tensor.split(sizes, dim) if len(sizes) > 1 else (tensor,)
        found = []
        for part, count, width in zip(parts, self.counts, self.widths, strict=True):
            if count > 1:
                part = part.unflatten(dim, (count, width)).movedim(dim, 1)
                part = part.expand(batch, *part.shape[1:]).flatten(0, 1)
            found.append(part)
        return found

    @property
    def row(self) -> int:
        """The row's length."""
        if self.back is None:
            return sum(count * width for count, width in zip(self.counts, self.widths, strict=True))
        return len(self.back)

    def restore(self, result: Tensor) -> Tensor:
        """The results of all buckets, one after the other in the fourth dimension, along the row."""
        return self._moved(result, 3, packing=False)

    def _moved(self, tensor: Tensor, dim: int, packing: bool) -> Tensor:
        if self.there is None or self.back is None or self.gaps is None:
            return tensor
        lead, arguments = tensor.shape[:dim], (tensor.flatten(0, dim - 1), self.there, self.back, self.gaps, packing)
        # The compiler differentiates what it sees, and takes no function with a forward mode.
        moved = _move(*arguments) if torch.compiler.is_compiling() else _Move.apply(*arguments)
        return moved.unflatten(0, lead)  # pyright: ignore[reportAttributeAccessIssue]


def _move(tensor: Tensor, there: Tensor, back: Tensor, gaps: Tensor, packing: bool) -> Tensor:
    """The second dimension, to its places or back."""
    if not packing:
        return tensor.index_select(1, back)
    if len(back) == 0:
        return tensor.new_zeros(tensor.shape[0], len(there), *tensor.shape[2:])
    return tensor.index_select(1, there).index_fill(1, gaps, 0)


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
