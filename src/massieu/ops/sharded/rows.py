"""Linear scores of all processes' rows and this process's columns: what the two sharded losses have in common.

A row's target is a column of one process, its holder. Every process receives all rows, its own first. It answers with log Z
over its columns and, for the rows whose target it holds, the excess of that log Z over the target's score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.ops.linear_scores import Direction
from massieu.ops.sharded.collectives import Peers, exchange_unequal, gather_unequal
from massieu.ops.sharded.keys import only


def gather_rows(tensor: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """The rows of all processes, this one's first and then those of the others by rank."""
    parts = gather_unequal(tensor, 0, lengths, group)
    return torch.cat([parts.pop(group.rank), *parts])


def own_first(tensor: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """Bring rows that are ordered by process into the order of `gather_rows`."""
    parts = list(tensor.split(list(lengths)))
    return torch.cat([parts.pop(group.rank), *parts])


def exchange_answers(answers: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """Send this process's answers to the rows' owners.

    Args:
        answers: (rows of all processes, numbers), in the order of `gather_rows`.
        lengths: rows of each process.

    Returns:
        All processes' answers for this one's rows, (processes, own rows, numbers).
    """
    other_lengths = [length for rank, length in enumerate(lengths) if rank != group.rank]
    to_self, *parts = answers.split([lengths[group.rank], *other_lengths])
    parts.insert(group.rank, to_self)
    return exchange_unequal(parts, 0, group)


def own_places(target: Tensor, counts: Sequence[int], group: Peers) -> tuple[Tensor, Tensor]:
    """Whether this process holds each target, and the target's place among its columns, −1 if it does not.

    Args:
        target: numbered over all processes' columns.
        counts: columns of each process.
    """
    first = sum(counts[: group.rank])
    is_own = (target >= first) & (target < first + counts[group.rank])
    return is_own, (target - first).where(is_own, -1)


def holders(target: Tensor, counts: Sequence[int]) -> Tensor:
    """The rank of each target's holder; any rank for a target out of range."""
    ends = torch.tensor(counts, device=target.device).cumsum(0)
    return torch.searchsorted(ends, target.contiguous(), right=True).clamp(max=len(counts) - 1)


def holder_excess(
    direction: Direction, row: Tensor, column: Tensor, bias: Tensor | None, is_own: Tensor, place: Tensor
) -> Tensor:
    """The excess of log Z over this process's columns over the target's score, if this process holds the target, else 0.

    A row may see none of these columns, as weights can hide the target from log Z and not from the loss. The result is then
    −score, the excess of 0, which is what `finite_level` makes of a log Z of −∞.

    Args:
        direction: log Z and its excess over this process's columns.
        bias: only if it belongs to the score.
        is_own, place: as from `own_places`.
    """
    excess = direction.excess.masked_fill(~is_own, 0.0)
    sees_no_column = (is_own & (direction.log_partition == -torch.inf)).nonzero().squeeze(1)
    if len(sees_no_column) == 0:
        return excess
    target_column = place[sees_no_column]
    score = (row[sees_no_column] * column[target_column].to(row.dtype)).sum(-1)
    if bias is not None:
        score = score + bias[target_column].to(row.dtype)
    return excess.index_put((sees_no_column,), -score)


def finite_level(log_partition: Tensor) -> Tensor:
    """Log Z, and 0 where a row sees no column: the level over which `holder_excess` is an excess."""
    return log_partition.masked_fill(log_partition == -torch.inf, 0.0)


def merge_answers(answers: Tensor, target: Tensor, counts: Sequence[int]) -> Direction:
    """Log Z over all processes' columns and its excess.

    Args:
        answers: (processes, rows, numbers) from `exchange_answers`; the first two numbers are log Z and `holder_excess`.
    """
    log_zs = answers[..., 0]
    log_z = only(log_zs).reduce(0).log_partition
    holder = holders(target, counts).unsqueeze(0)
    holder_log_z = log_zs.gather(0, holder).squeeze(0)
    excess = answers[..., 1].gather(0, holder).squeeze(0)
    # log Z − score = (the holder's log Z − score) + (log Z − the holder's log Z): small differences, not of rounded sums.
    return Direction(excess + (log_z - finite_level(holder_log_z)), log_z)
