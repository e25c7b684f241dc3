"""Several documents in one row, in time and memory that follow the documents.

Short documents of similar lengths are padded to one length and done as items of one batch. Documents that lie in the row as
the backend needs them are not moved: equal ones side by side, and long ones, each by itself.
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
"""Scores that take as long as one more call of a backend: about 0.15 ms, at 5 ns a score on one thread of a CPU."""
MOVED = 48
"""Scores that take as long as moving a query, or a key, of one head into a batch, and its result back, on a CPU. On other
devices moving costs nothing beside a call."""

Function = Callable[..., tuple[Tensor, ...]]


class Bucket(NamedTuple):
    """Documents that are done as items of one batch."""

    members: tuple[int, ...]
    """Numbers of the documents."""
    rows: int
    """Queries of each, padding included."""
    keys: int
    """Keys of each, padding included."""
    in_place: bool
    """Whether the documents lie side by side in the row and need no padding."""


def apply(function: Function, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
    """``function(problem, *others)`` of a problem that has documents, with the results along the row again.

    Args:
        function: returns tensors ``(B, Hk, G, L, ...)``, a query's numbers from that query and the keys that it sees.
        others: further tensors of the query's shape, cut into documents as the query is.
    """
    documents = problem.documents
    assert documents is not None
    batch = problem.query.shape[0]
    device = problem.query.device
    if problem.band is None:
        # Without causality and window positions mean nothing, and documents need not be kept apart for them.
        documents = replace(documents, query_offsets=())
    groups = buckets(documents, problem.query.shape[:3].numel(), MOVED if device.type == "cpu" else 0)
    rows = _Places.of(groups, [bucket.rows for bucket in groups], documents.query_boundaries, device)
    keys = _Places.of(groups, [bucket.keys for bucket in groups], documents.key_boundaries, device)
    queries = rows.items(problem.query, 3, batch)
    key_items = keys.items(problem.key, 2, batch)
    values: list[Any] = [None] * len(groups)
    if problem.value is not None:
        values = keys.items(problem.value, 2, batch)
    weights = _weights(problem, documents, groups, rows, keys)
    scales: list[Any] = [problem.scale] * len(groups)
    if isinstance(problem.scale, Tensor) and problem.scale.ndim > 0:
        scales = rows.items(problem.scale, 3, batch)
    other_items = [rows.items(other, 3, batch) for other in others]
    results = []
    for place, bucket in enumerate(groups):
        part = replace(
            problem,
            query=queries[place],
            key=key_items[place],
            value=values[place],
            log_weight=weights[place],
            scale=scales[place],
            documents=None,
            **problem.least_band(bucket.rows, bucket.keys, documents.query_offset(bucket.members[0])),
        )
        bucket_results = function(part, *(items[place] for items in other_items))
        num_members = len(bucket.members)
        if num_members > 1:
            # From (B·documents, Hk, G, rows, ...) to (B, Hk, G, documents·rows, ...).
            bucket_results = tuple(
                result.unflatten(0, (batch, num_members)).movedim(1, 3).flatten(3, 4) for result in bucket_results
            )
        results.append(bucket_results)
    return tuple(rows.restore(bucket_results) for bucket_results in zip(*results, strict=True))


@lru_cache(maxsize=64)
def buckets(documents: Documents, heads: int, moved: int) -> tuple[Bucket, ...]:
    """Group documents of similar lengths, in order of length, as long as padding and moving cost less than a call.

    Args:
        heads: scores that one query and one key have in all items and heads.
        moved: scores that take as long as moving a query or a key of one head.
    """
    # A kernel needs a query and a key, so an empty document is padded to one of either.
    sizes = [(max(1, keys), max(1, rows)) for rows, keys in zip(documents.lengths, documents.key_lengths, strict=True)]
    is_empty = [0 in pair for pair in zip(documents.lengths, documents.key_lengths, strict=True)]
    groups: list[_Group] = []
    # By keys and then by rows, as one whole number: the compiler cannot sort by pairs.
    widest = documents.query_boundaries[-1] + 2
    order = sorted(range(len(sizes)), key=lambda number: sizes[number][0] * widest + sizes[number][1])
    if documents.query_offsets:
        # Sorting keeps the order of equals: documents of one offset stand together, still by size.
        order.sort(key=documents.query_offset)
    for number in order:
        alone = _Group(
            members=[number],
            size=1,
            least=sizes[number],
            most=sizes[number],
            tokens=sum(sizes[number]),
            in_place=not is_empty[number],
            query_offset=documents.query_offset(number),
        )
        together = groups[-1].joined(alone) if groups else alone
        if groups and together.is_close and groups[-1].query_offset == alone.query_offset:
            extra_cost = together.cost(moved) - groups[-1].cost(moved) - alone.cost(moved)
            if heads * extra_cost <= OVERHEAD:
                together.members.append(number)
                groups[-1] = together
                continue
        groups.append(alone)
    groups = sorted(groups, key=lambda group: min(group.members))
    return tuple(group.bucket() for group in groups)


class _Group(NamedTuple):
    """Documents that may become a bucket; pairs are (keys, rows)."""

    members: list[int]
    size: int
    """Number of documents. While joining is considered it is one more than the members."""
    least: tuple[int, int]
    """The fewest keys and the fewest rows of a document."""
    most: tuple[int, int]
    tokens: int
    """Keys and rows of all documents."""
    in_place: bool
    """Whether the documents are equally long and lie side by side."""
    query_offset: int
    """Position of the first query of each."""

    def bucket(self) -> Bucket:
        keys, rows = self.most
        return Bucket(tuple(sorted(self.members)), rows, keys, self.in_place)

    def joined(self, other: "_Group") -> "_Group":
        """The group with one more document, whose number the caller adds to the members.

        The list of members is shared and not copied, as there may be very many.
        """
        side_by_side = self.members[-1] + 1 == other.members[0] and self.least == self.most == other.most
        return _Group(
            members=self.members,
            size=self.size + 1,
            least=(min(self.least[0], other.least[0]), min(self.least[1], other.least[1])),
            most=(max(self.most[0], other.most[0]), max(self.most[1], other.most[1])),
            tokens=self.tokens + other.tokens,
            in_place=self.in_place and other.in_place and side_by_side,
            query_offset=self.query_offset,
        )

    @property
    def is_close(self) -> bool:
        """Whether the longest document is at most about twice as long as the shortest, in keys and in rows."""
        return all(large <= 2 * small + 8 for large, small in zip(self.most, self.least, strict=True))

    def cost(self, moved: int) -> int:
        """Time of the group's call, in scores of one head."""
        keys, rows = self.most
        pairs = self.size * keys * rows
        return pairs if self.in_place else pairs + moved * self.tokens


class _Run(NamedTuple):
    """A stretch of the row."""

    owner: int | None
    """The bucket that lies there; None for documents that are moved."""
    length: int

    @staticmethod
    def of(groups: Sequence[Bucket], boundaries: tuple[int, ...]) -> "tuple[list[_Run], dict[int, int]]":
        """The row's stretches in order; and for each document that is moved, where it starts among the moved ones."""
        owners = {bucket.members[0]: place for place, bucket in enumerate(groups) if bucket.in_place}
        runs: list[_Run] = []
        starts: dict[int, int] = {}
        moved_length = 0
        number = 0
        while number < len(boundaries) - 1:
            owner = owners.get(number)
            following = number + (1 if owner is None else len(groups[owner].members))
            length = boundaries[following] - boundaries[number]
            if owner is None:
                starts[number] = moved_length
                moved_length += length
                # Neighbours that are moved are one stretch.
                if runs and runs[-1].owner is None:
                    length += runs.pop().length
            runs.append(_Run(owner, length))
            number = following
        return runs, starts


@dataclass(frozen=True)
class _Places:
    """Where the queries, or the keys, of a row go: bucket by bucket, padded by zeros.

    A bucket in place is a stretch of the row. The documents of all other buckets are moved: their stretches, joined in the
    order of the row, are brought into the order of the buckets with padding between them.
    """

    counts: list[int]
    """Documents of each bucket."""
    widths: list[int]
    """Rows, or keys, of each document of a bucket, padding included."""
    runs: list[_Run]
    """Stretches of the row, in order."""
    source: Tensor | None
    """For each place in the order of the buckets its number in the order of the row; None if nothing is moved."""
    target: Tensor | None
    """For each number in the order of the row its place in the order of the buckets."""
    padding: Tensor | None
    """The places that no number has."""

    @staticmethod
    def of(groups: Sequence[Bucket], widths: list[int], boundaries: tuple[int, ...], device: torch.device) -> "_Places":
        """The places for documents with these boundaries.

        Args:
            widths: rows, or keys, of each document of a bucket, padding included.
        """
        counts = [len(bucket.members) for bucket in groups]
        runs, starts = _Run.of(groups, boundaries)
        if not starts:
            return _Places(counts, widths, runs, None, None, None)
        moved_buckets = [place for place, bucket in enumerate(groups) if not bucket.in_place]
        order = [number for place in moved_buckets for number in groups[place].members]
        padded_lengths = [widths[place] for place in moved_buckets for _ in groups[place].members]
        lengths = [boundaries[number + 1] - boundaries[number] for number in order]
        padded_total = sum(padded_lengths)
        total = sum(lengths)
        # A column for each document: where it starts in the order of the row, its length, where it starts in that of the
        # buckets. Repeated for each of its places, (3, padded_total).
        fields = torch.tensor(
            [[starts[number] for number in order], lengths, [0, *accumulate(padded_lengths)][:-1]], device=device
        )
        repeats = torch.tensor(padded_lengths, device=device)
        start, length, padded_start = fields.repeat_interleave(repeats, 1, output_size=padded_total)
        step = torch.arange(padded_total, device=device) - padded_start
        source = torch.where(step < length, start + step, total)
        # Sorted by number, the places are the inverse permutation; padding, with the largest number, follows all of them.
        sorted_places = source.argsort()
        return _Places(
            counts=counts,
            widths=widths,
            runs=runs,
            source=source.clamp(max=max(0, total - 1)),
            target=sorted_places[:total],
            padding=sorted_places[total:],
        )

    def items(self, tensor: Tensor, dim: int, batch: int) -> list[Tensor]:
        """Cut a tensor of the row into buckets.

        Args:
            tensor: ``(#B, ..., #row at dim, ...)``.
            dim: the row's dimension. A tensor with another size there is the same for all documents.
            batch: B.

        Returns:
            For each bucket ``(1 or B·documents, ..., #width, ...)``.
        """
        if tensor.shape[dim] != self.row:
            return [_repeated(tensor, count) for count in self.counts]
        pieces = tensor.split([run.length for run in self.runs], dim) if len(self.runs) > 1 else (tensor,)
        parts: dict[int, Tensor] = {}
        moved_pieces: list[Tensor] = []
        for run, piece in zip(self.runs, pieces, strict=True):
            if run.owner is None:
                moved_pieces.append(piece)
            else:
                parts[run.owner] = piece
        if moved_pieces:
            moved_buckets = [place for place in range(len(self.counts)) if place not in parts]
            sizes = [self.counts[place] * self.widths[place] for place in moved_buckets]
            moved = self._moved(_cat(moved_pieces, dim), dim, to_buckets=True)
            parts.update(zip(moved_buckets, moved.split(sizes, dim), strict=True))
        items = []
        for place, (count, width) in enumerate(zip(self.counts, self.widths, strict=True)):
            part = parts[place]
            if count > 1:
                # From (#B, ..., count·width, ...) to (B·count, ..., width, ...).
                part = part.unflatten(dim, (count, width)).movedim(dim, 1)
                part = part.expand(batch, *part.shape[1:]).flatten(0, 1)
            items.append(part)
        return items

    @property
    def row(self) -> int:
        """The row's length."""
        return sum(run.length for run in self.runs)

    def restore(self, results: Sequence[Tensor]) -> Tensor:
        """Put the buckets' results, ``(B, Hk, G, documents·width, ...)``, back along the row."""
        in_place = {run.owner for run in self.runs}
        moved_results = [result for place, result in enumerate(results) if place not in in_place]
        moved: Iterator[Tensor] = iter(())
        if moved_results:
            sizes = [run.length for run in self.runs if run.owner is None]
            moved = iter(self._moved(_cat(moved_results, 3), 3, to_buckets=False).split(sizes, 3))
        return _cat([next(moved) if run.owner is None else results[run.owner] for run in self.runs], 3)

    def _moved(self, tensor: Tensor, dim: int, to_buckets: bool) -> Tensor:
        """The moved documents along `dim` from the order of the row to that of the buckets, or back."""
        if self.source is None or self.target is None or self.padding is None:
            return tensor
        lead = tensor.shape[:dim]
        arguments = (tensor.flatten(0, dim - 1), self.source, self.target, self.padding, to_buckets)
        # The compiler differentiates the operations that it sees, and refuses a function with a forward mode.
        moved = _move(*arguments) if torch.compiler.is_compiling() else _Move.apply(*arguments)
        return moved.unflatten(0, lead)  # pyright: ignore[reportAttributeAccessIssue]


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` that does not copy a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def _move(tensor: Tensor, source: Tensor, target: Tensor, padding: Tensor, to_buckets: bool) -> Tensor:
    """The second dimension to the order of the buckets, zeros for padding, or back to that of the row."""
    if not to_buckets:
        return tensor.index_select(1, target)
    if len(target) == 0:
        return tensor.new_zeros(tensor.shape[0], len(source), *tensor.shape[2:])
    # `index_select` made a new tensor, which may be changed in place.
    return tensor.index_select(1, source).index_fill_(1, padding, 0)


class _Move(torch.autograd.Function):
    """`_move`, whose two directions are each other's derivatives, as one gathers what the other scatters.

    The derivative of `index_select` would add up numbers at equal places, which is slow, and here no two are equal.
    """

    forward = staticmethod(_move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:4])
        ctx.save_for_forward(*inputs[1:4])
        ctx.to_buckets = inputs[4]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Move.apply(cotangent, *ctx.saved_tensors, not ctx.to_buckets), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Move.apply(tangent, *ctx.saved_tensors, ctx.to_buckets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: Tensor, *others: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        moved = _Move.apply(tensor.movedim(in_dims[0], 0).flatten(0, 1), *others)
        return moved.unflatten(0, (info.batch_size, -1)), 0  # pyright: ignore[reportAttributeAccessIssue]


def _weights(
    problem: AttentionProblem, documents: Documents, groups: Sequence[Bucket], rows: _Places, keys: _Places
) -> list[Tensor | None]:
    """The log-weights of each bucket, −∞ (or False) for keys that are padding, where a query could see them."""
    weight = problem.log_weight
    batch = problem.query.shape[0]
    if weight is None:
        parts: list[Any] = [None] * len(groups)
    elif weight.shape[4] == 1:
        parts = rows.items(weight, 3, batch)
    elif weight.shape[3] == 1:
        parts = keys.items(weight, 4, batch)
    else:
        parts = [
            _own_keys(part, bucket, documents.key_boundaries)
            for part, bucket in zip(rows.items(weight, 3, batch), groups, strict=True)
        ]
    # The lengths are computed from the boundaries of all documents: once, and not for each bucket.
    lengths = documents.lengths
    key_lengths = documents.key_lengths
    return [
        _hide_padding(part, bucket, documents, lengths, key_lengths, problem)
        for part, bucket in zip(parts, groups, strict=True)
    ]


def _own_keys(weight: Tensor, bucket: Bucket, boundaries: tuple[int, ...]) -> Tensor:
    """From a bucket's log-weights for all keys of the row to those for the keys of each document."""
    first_member = bucket.members[0]
    if len(bucket.members) == 1 and bucket.keys == boundaries[first_member + 1] - boundaries[first_member]:
        return weight.narrow(4, boundaries[first_member], bucket.keys)
    if weight.shape[4] == 0:
        return weight.new_zeros(*weight.shape[:4], bucket.keys)
    first_key = torch.tensor([boundaries[member] for member in bucket.members], device=weight.device)
    place = first_key.unsqueeze(1) + torch.arange(bucket.keys, device=weight.device)
    # Padding beyond the row's end reads its last key; `_hide_padding` hides it.
    place = place.clamp(max=boundaries[-1] - 1)[:, None, None, None]
    batch = weight.shape[0] // len(bucket.members)
    return weight.gather(4, _repeat_for_batch(place, batch).expand(*weight.shape[:4], -1))


def _hide_padding(
    weight: Tensor | None,
    bucket: Bucket,
    documents: Documents,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    problem: AttentionProblem,
) -> Tensor | None:
    """A bucket's log-weights with its keys that are padding hidden.

    Args:
        lengths, key_lengths: queries and keys of every document.
    """
    band = problem.band
    padded = [member for member in bucket.members if key_lengths[member] < bucket.keys]
    if band is not None and weight is None:
        # The band alone hides the padding where the last query of the document sees no key beyond the last one.
        _, high = band
        padded = [
            member for member in padded if lengths[member] + documents.query_offset(member) + high > key_lengths[member]
        ]
    if not padded:
        return weight
    device = problem.query.device
    visible_keys = torch.tensor([key_lengths[member] for member in bucket.members], device=device)
    visible = torch.arange(bucket.keys, device=device) < visible_keys.unsqueeze(1)
    visible = _repeat_for_batch(visible[:, None, None, None], problem.query.shape[0])
    if weight is None:
        return visible
    if weight.dtype == torch.bool:
        return weight & visible
    return weight.masked_fill(~visible, -torch.inf)


def _repeat_for_batch(tensor: Tensor, batch: int) -> Tensor:
    """From ``(documents, ...)``, the same for all items, to ``(B·documents, ...)``."""
    return tensor if batch == 1 else tensor.repeat(batch, *(1,) * (tensor.ndim - 1))


def _repeated(tensor: Tensor, count: int) -> Tensor:
    """From ``(#B, ...)``, the same for all documents, to ``(1 or B·documents, ...)``."""
    return tensor if tensor.shape[0] == 1 or count == 1 else tensor.repeat_interleave(count, 0)
