"""Log-weights of sharded queries: each process is given rows for its own queries, and needs columns for its own keys."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from massieu.ops.shapes import CallLayout, layout_log_weight
from massieu.ops.sharded.agreement import Call, derivatives_wanted
from massieu.ops.sharded.collectives import Peers, exchange_unequal, padded

# What a log-weight is for. As integers, since they are sent to the other processes.
OWN_KEYS = 0
"""All queries, and this process's keys."""
EITHER = 1
"""One number, or one per key for a single query: the log-weights of the other processes decide."""
ALL_KEYS = 2
"""This process's queries, and the keys of all processes."""


def kind_of_weight(log_weight: object, query: Tensor, key: Tensor) -> int:
    """`OWN_KEYS`, `EITHER` or `ALL_KEYS`, by the shapes of arguments that are not yet checked."""
    if not all(isinstance(tensor, Tensor) and tensor.ndim > 1 for tensor in (log_weight, query, key)):
        return OWN_KEYS
    assert isinstance(log_weight, Tensor)
    rows, columns = log_weight.shape[-2:]
    if rows != query.shape[-2]:
        return OWN_KEYS
    if rows == 1 and columns in (1, key.shape[-2]):
        return EITHER
    return ALL_KEYS


def layout_for_all_keys(log_weight: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A log-weight in the common layout, with its own number of keys in place of the key's."""
    return layout_log_weight(log_weight, query, CallLayout.of(query, key)._replace(keys=log_weight.shape[-1]))


def with_weights(call: Call, weight: Tensor | None, kind: int) -> Call:
    """A call with sharded queries, with its log-weight: all processes must send one form, with derivatives or without."""
    assert weight is not None
    alike = {
        "dtype of log_weight": weight.dtype,
        "batch and heads of log_weight": tuple(weight.shape[:3]),
        "derivatives of log_weight": tuple(derivatives_wanted("it", [weight], []).values()),
    }
    numbers = {"kind": kind, "columns": weight.shape[4]}
    return replace(call, alike={**call.alike, **alike}, numbers={**call.numbers, **numbers})


def weights_for_own_keys(
    weight: Tensor | None, all_key_weight: Tensor | None, numbers_of: Mapping[str, Sequence[int]], group: Peers
) -> Tensor | None:
    """The log-weights of all processes' queries and this process's keys.

    Args:
        weight: the result if no process has a log-weight for all keys.
        all_key_weight: of this process's queries and all keys.
        numbers_of: the kinds of log-weights, their columns, queries and keys of each process.

    Raises:
        ValueError: on all processes, if one has a log-weight of another kind, or not for all keys.
    """
    kinds = list(numbers_of["kind"])
    columns = list(numbers_of["columns"])
    lengths = list(numbers_of["queries"])
    keys = list(numbers_of["keys"])
    if ALL_KEYS not in kinds:
        return weight
    for rank, (kind, count) in enumerate(zip(kinds, columns, strict=True)):
        if kind == OWN_KEYS or count not in (1, sum(keys)):
            raise ValueError(
                f"with sharded queries log_weight must be one a key for all queries on all processes, or for each query "
                f"the {sum(keys)} keys of all processes, got {count} on process {rank} for its {lengths[rank]} queries"
            )
    assert all_key_weight is not None
    is_mask = all_key_weight.dtype == torch.bool
    rows = padded(all_key_weight.expand(*all_key_weight.shape[:4], sum(keys)), 3, max(lengths))
    if is_mask:
        # Not every backend sends booleans.
        rows = rows.to(torch.uint8)
    # The columns for process j's keys go to process j; what comes back are all processes' rows for this one's keys.
    received = exchange_unequal(rows.split(keys, 4), 4, group)
    own_keys = torch.cat([part.narrow(3, 0, length) for part, length in zip(received, lengths, strict=True)], 3)
    return own_keys.bool() if is_mask else own_keys
