"""Several documents in one row, in time and memory that follow the documents.

Documents of similar lengths are padded to one length and done as items of one batch. Nothing is moved where documents in
their order already lie as they are needed: equal ones side by side, or each one for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.foundation.derivatives import is_differentiable
from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem

OVERHEAD = 1 << 15
"""So many scores take as long as a call of a backend does for nothing: about 0.15 ms at 5 ns a score, forwards."""

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Bucket:
    """Documents that are done as items of one batch, and what they are padded to."""

    members: tuple[int, ...]
    rows: int
    keys: int
    has_hidden_keys: bool


def apply(function: Function, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
    """``function(problem, *others)`` document by document, the results along the row again.

    Args:
        function: gives tensors ``(B, Hk, G, L, ...)``, a query's numbers from that query and the keys it sees.
        others: tensors of the query's shape that go with it.
    """
    documents, device = problem.documents, problem.query.device
    assert documents is not None
    heads = problem.query.shape[:3].numel()
    found = buckets(documents, heads)
    rows = _Places.of(found, documents.query_boundaries, [bucket.rows for bucket in found], device)
    keys = _Places.of(found, documents.key_boundaries, [bucket.keys for bucket in found], device)
    scale, weight = problem.scale, problem.log_weight
    split = [
        rows.items(problem.query, 3),
        keys.items(problem.key, 2),
        [None] * len(found) if problem.value is None else keys.items(problem.value, 2),
        _weights(problem, weight, rows, keys),
        rows.items(scale, 3) if isinstance(scale, Tensor) and scale.ndim > 0 else [scale] * len(found),
        *(rows.items(other, 3) for other in others),
    ]
    results = []
    for bucket, query, key, value, weight, scale, *more in zip(found, *split, strict=True):
        part = replace(
            problem, query=query, key=key, value=value, log_weight=weight, scale=scale, documents=None
        ).with_simplest_window()
        results.append(
            [
                result.unflatten(0, (-1, len(bucket.members))).movedim(1, 3).flatten(3, 4)
                for result in function(part, *more)
            ]
        )
    return tuple(rows.restore(torch.cat(parts, 3) if len(parts) > 1 else parts[0]) for parts in zip(*results, strict=True))


@lru_cache(maxsize=64)
def buckets(documents: Documents, heads: int) -> tuple[Bucket, ...]:
    """Which documents are done together: as long as padding costs less than one more call, and at most doubles lengths.

    Args:
        heads: Scores for each pair of a query and a key.
    """
    sizes = [(max(1, keys), max(1, rows)) for rows, keys in zip(documents.lengths, documents.key_lengths, strict=True)]
    groups: list[tuple[list[int], int, int]] = []
    for number in sorted(range(len(sizes)), key=sizes.__getitem__):
        keys, rows = sizes[number]
        if groups:
            members, most_rows, most_keys = groups[-1]
            least_rows, least_keys = (min(sizes[member][place] for member in (*members[:1], number)) for place in (1, 0))
            wider = max(most_rows, rows)
            more = (len(members) + 1) * wider * keys - len(members) * most_rows * most_keys - rows * keys
            close = wider <= 2 * least_rows + 8 and keys <= 2 * least_keys + 8
            if heads * more <= OVERHEAD and close:
                groups[-1] = ([*members, number], wider, keys)
                continue
        groups.append(([number], rows, keys))
    found = []
    for members, rows, keys in groups:
        members.sort()
        padded = any(documents.key_lengths[member] < keys for member in members)
        found.append(Bucket(tuple(members), rows, keys, padded))
    return tuple(sorted(found, key=lambda bucket: bucket.members))
