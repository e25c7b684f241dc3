"""A sliding window in time and memory linear in queries and keys: chunks of queries, each with its band of keys.

Chunks that have all the keys they may see are folded into the batch and done as one problem, whose band of keys is the
same for each; what is before and after them are two smaller problems.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from massieu.ops import packed_rows
from massieu.ops.shapes import AttentionProblem, band_fields

LEAST = 64
"""Least queries of a chunk: fewer would not fill the kernels' blocks of queries."""
MOST = 512
"""Most queries of a chunk: more would compute many scores between a chunk's ends that the window hides."""

Function = Callable[..., tuple[Tensor, ...]]


def after_queries_before_keys(
    function: Function, without_keys: Function, problem: AttentionProblem, *others: Tensor
) -> tuple[Tensor, ...]:
    """``function(problem, *others)`` where a negative offset lets the first queries stand before all keys.

    The others are a problem of their own, in which the first query sees a key: no kernel is given a negative offset.

    Args:
        without_keys: the same function for the first queries, which are given no key.
    """
    length = problem.query.shape[3]
    keys = problem.key.shape[2]
    before = problem.queries_before_keys
    alone = replace(problem.narrow(slice(0, before), slice(0, 0)), is_causal=False, offset=0, window=None)
    parts = [without_keys(alone, *(other[:, :, :, :before] for other in others))]
    if before < length:
        low, high = problem.band or (None, 0)
        band = (None if low is None else low + before, high + before)
        rest = problem.narrow(slice(before, length), slice(0, keys))
        rest = replace(rest, **band_fields(band, length - before, keys))
        parts.append(function(rest, *(other[:, :, :, before:] for other in others)))
    return tuple(torch.cat(results, dim=3) for results in zip(*parts, strict=True))


def apply(function: Function, problem: AttentionProblem, *others: Tensor, without_keys: Function) -> tuple[Tensor, ...]:
    """``function(problem, *others)``, for a packed row document by document, and for a window chunk by chunk.

    Args:
        function: returns tensors ``(B, Hk, G, L, ...)``, a query's numbers from that query and the keys that it sees.
        others: further tensors of the query's shape, cut as the query is.
        without_keys: the same function for queries that are given no key, which not every kernel takes.
    """
    whole = partial(apply, function, without_keys=without_keys)
    if problem.documents is not None:
        return packed_rows.apply(whole, problem, *others)
    if problem.queries_before_keys:
        return after_queries_before_keys(whole, without_keys, problem, *others)
    if problem.window is None:
        return function(problem, *others)
    low, high = problem.window
    length = problem.query.shape[3]
    keys = problem.key.shape[2]
    # Leave out keys that no query sees, such as most of a long cache, but keep one, as kernels do not take none.
    begin = max(0, min(low, keys - 1))
    end = min(keys, length + high)
    if begin > 0 or 0 < end < keys:
        problem = _part(problem, slice(0, length), slice(begin, max(begin + 1, end)))
        low -= begin
        high -= begin
        keys = problem.key.shape[2]
    size = max(LEAST, min(MOST, (high - low) // 128 * 64))
    # The first chunk starts at the first query whose window starts at key 0 or later.
    first = max(0, -low)
    chunks = (min(length, keys - high) - first) // size
    if chunks < 2:
        return function(problem, *others)
    last = first + chunks * size
    parts = []

    def add(rows: slice, seen: slice) -> None:
        parts.append(function(_part(problem, rows, seen), *(other[:, :, :, rows] for other in others)))

    if first > 0:
        # At least one key, even if it is hidden: kernels do not take none.
        add(slice(0, first), slice(0, max(1, first + high)))
    folded = function(_fold(problem, first, last, size), *(_chunks(other, first, last, size) for other in others))
    parts.append(tuple(_unfold(result, problem.query.shape[0]) for result in folded))
    if last < length:
        add(slice(last, length), slice(min(last + low, keys - 1), keys))
    return tuple(torch.cat(results, dim=3) for results in zip(*parts, strict=True))


def _part(problem: AttentionProblem, rows: slice, seen: slice) -> AttentionProblem:
    """Some queries and a stretch of keys, among them all that these queries see."""
    assert problem.window is not None
    shift = rows.start - seen.start
    return replace(problem.narrow(rows, seen), window=(problem.window[0] + shift, problem.window[1] + shift))


def _fold(problem: AttentionProblem, first: int, last: int, size: int) -> AttentionProblem:
    """Chunks of queries and their bands of keys as items of the batch, ``(B·chunks, ...)``."""
    assert problem.window is not None
    low, high = problem.window
    batch = problem.query.shape[0]
    chunks = (last - first) // size
    # The keys that some chunk sees, and how many one chunk sees.
    seen = slice(first + low, last + high)
    width = size + high - low
    scale = problem.scale
    weight = problem.log_weight
    if isinstance(scale, Tensor) and scale.ndim > 0:
        scale = _items(_chunked(scale, first, last, size), batch, chunks)
    if weight is not None:
        weight = _items(_banded(_chunked(weight, first, last, size), seen, width, size), batch, chunks)
    return replace(
        problem,
        query=_chunks(problem.query, first, last, size),
        key=_bands(problem.key[:, :, seen], width, size),
        value=None if problem.value is None else _bands(problem.value[:, :, seen], width, size),
        log_weight=weight,
        scale=scale,
        window=(0, high - low),
    )


def _chunks(tensor: Tensor, first: int, last: int, size: int) -> Tensor:
    """From the query's shape ``(B, Hk, G, L, ...)`` to chunks as items of the batch, ``(B·chunks, Hk, G, size, ...)``."""
    return _chunked(tensor, first, last, size).flatten(0, 1)


def _unfold(result: Tensor, batch: int) -> Tensor:
    """The inverse of `_chunks`."""
    return result.unflatten(0, (batch, -1)).movedim(1, 3).flatten(3, 4)


def _bands(tensor: Tensor, width: int, size: int) -> Tensor:
    """Overlapping stretches of keys, ``(B·chunks, Hk, width, D)``: a view if the batch has one item."""
    return tensor.unfold(2, width, size).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _chunked(tensor: Tensor, first: int, last: int, size: int) -> Tensor:
    """From ``(#B, #Hk, #G, #L, ...)`` to ``(#B, #chunks, #Hk, #G, #size, ...)``."""
    if tensor.shape[3] == 1:
        return tensor.unsqueeze(1)
    return tensor[:, :, :, first:last].unflatten(3, (-1, size)).movedim(3, 1)


def _banded(weight: Tensor, seen: slice, width: int, size: int) -> Tensor:
    """From ``(#B, #chunks, #Hk, #G, #size, #N)`` to each chunk's band of keys, the last dimension."""
    if weight.shape[5] == 1:
        return weight
    bands = weight[..., seen].unfold(5, width, size)  # (#B, #chunks, #Hk, #G, #size, chunks, width)
    if weight.shape[1] == 1:
        return bands.squeeze(1).movedim(4, 1)
    # Each chunk of queries has the log-weights of all bands: its own is on the diagonal.
    return bands.diagonal(0, 1, 5).movedim(-1, 1)


def _items(tensor: Tensor, batch: int, chunks: int) -> Tensor:
    """From ``(#B, #chunks, ...)`` to ``(1 or B·chunks, ...)``."""
    if tensor.shape[0] > 1 or tensor.shape[1] > 1:
        tensor = tensor.expand(batch, chunks, *tensor.shape[2:])
    return tensor.flatten(0, 1)
