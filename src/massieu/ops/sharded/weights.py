"""Log-weights of sharded queries: each process holds rows for its own queries, and needs columns for its own keys."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from massieu.ops.shapes import CallLayout, layout_log_weight
from massieu.ops.sharded.agreement import Call, derivatives_wanted
from massieu.ops.sharded.collectives import Peers, exchange_unequal, padded

OWN_KEYS, EITHER, ALL_KEYS = 0, 1, 2
"""What a log-weight is for: this process's keys and all queries; its queries and all keys; or as the others' say."""


def for_own_queries(log_weight: object, query: Tensor, key: Tensor) -> int:
    """Which of them it is by its shape, of arguments that are not yet checked."""
    if not all(isinstance(tensor, Tensor) and tensor.ndim > 1 for tensor in (log_weight, query, key)):
        return OWN_KEYS
    assert isinstance(log_weight, Tensor)
    rows, columns = log_weight.shape[-2:]
    if rows != query.shape[-2]:
        return OWN_KEYS
    return EITHER if rows == 1 and columns in (1, key.shape[-2]) else ALL_KEYS


def layout_for_all_keys(log_weight: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """In the common layout, for however many keys it has."""
    return layout_log_weight(log_weight, query, CallLayout.of(query, key)._replace(keys=log_weight.shape[-1]))


def with_weights(call: Call, weight: Tensor | None, kind: int) -> Call:
    """The call of a process with sharded queries: what is sent must be of one form, and its derivatives wanted by all."""
    assert weight is not None
    alike = {
        "dtype of log_weight": weight.dtype,
        "batch and heads of log_weight": tuple(weight.shape[:3]),
        "derivatives of log_weight": tuple(derivatives_wanted("it", [weight], []).values()),
    }
    own = {"kind": kind, "columns": weight.shape[4]}
    return replace(call, alike={**call.alike, **alike}, own={**call.own, **own})


def weights_for_own_keys(
    weight: Tensor | None, pairs: Tensor | None, numbers_of: Mapping[str, Sequence[int]], group: Peers
) -> Tensor | None:
    """All processes' queries and this process's keys, from what each has for its own queries and all keys.

    Args:
        weight: what it is where it was not for own queries.

    Raises:
        ValueError: on all processes, if one has a log-weight of another kind, or not for all keys.
    """
    kinds, columns, lengths, keys = (list(numbers_of[name]) for name in ("kind", "columns", "queries", "keys"))
    if ALL_KEYS not in kinds:
        return weight
    for rank, (kind, count) in enumerate(zip(kinds, columns, strict=True)):
        if kind == OWN_KEYS or count not in (1, sum(keys)):
            raise ValueError(
                f"with sharded queries log_weight must be one a key for all queries on all processes, or for each query "
                f"the {sum(keys)} keys of all processes, got {count} on process {rank} for its {lengths[rank]} queries"
            )
    assert pairs is not None
    is_mask = pairs.dtype == torch.bool
    rows = padded(pairs.expand(*pairs.shape[:4], sum(keys)), 3, max(lengths))
    # Not every backend sends booleans.
    parts = (rows.to(torch.uint8) if is_mask else rows).split(keys, 4)
    came = exchange_unequal(parts, 4, group)
    own = torch.cat([part.narrow(3, 0, length) for part, length in zip(came, lengths, strict=True)], 3)
    return own.bool() if is_mask else own
