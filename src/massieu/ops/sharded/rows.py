"""Linear scores of all processes' rows and this process's columns: what the two sharded losses have in common.

A row's target is a column of some process, which holds it. Rows go to all processes, this one's first in the order of each;
back come, from every process, log Z over its columns, and from the holder by how much that exceeds the target's score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.ops.linear_scores import Direction
from massieu.ops.sharded.collectives import Peers, exchange_unequal, gather_unequal
from massieu.ops.sharded.keys import only


def everyone(tensor: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """The rows of all processes, this one's first and then those of the others by rank."""
    parts = gather_unequal(tensor, 0, lengths, group)
    return torch.cat([parts.pop(group.rank), *parts])


def own_first(tensor: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """Rows that are ordered by process, in the order of `everyone`."""
    parts = list(tensor.split(list(lengths)))
    return torch.cat([parts.pop(group.rank), *parts])


def answers(numbers: Tensor, lengths: Sequence[int], group: Peers) -> Tensor:
    """What each process says of this one's rows, stacked, from what this one says of everyone's, (rows, numbers)."""
    others = [length for rank, length in enumerate(lengths) if rank != group.rank]
    own, *parts = numbers.split([lengths[group.rank], *others])
    parts.insert(group.rank, own)
    return exchange_unequal(parts, 0, group)


def places(target: Tensor, counts: Sequence[int], group: Peers) -> tuple[Tensor, Tensor]:
    """Whether this process holds the target, and its place among this process's columns, −1 where it does not."""
    first = sum(counts[: group.rank])
    mine = (target >= first) & (target < first + counts[group.rank])
    return mine, (target - first).where(mine, -1)


def holders(target: Tensor, counts: Sequence[int]) -> Tensor:
    """Which process holds the target; some process for a target that nobody holds."""
    ends = torch.tensor(counts, device=target.device).cumsum(0)
    return torch.searchsorted(ends, target.contiguous(), right=True).clamp(max=len(counts) - 1)


def held(found: Direction, row: Tensor, column: Tensor, bias: Tensor | None, mine: Tensor, place: Tensor) -> Tensor:
    """By how much log Z over this process's columns exceeds the score of a target it holds; 0 where it does not.

    Where a row sees none of them the score is still there: the excess is then over 0, as `seen_level` is 0.

    Args:
        bias: where it belongs to the score.
    """
    excess = found.excess.masked_fill(~mine, 0.0)
    blind = (mine & (found.log_partition == -torch.inf)).nonzero().squeeze(1)
    if len(blind) == 0:
        return excess
    score = (row[blind] * column[place[blind]].to(row.dtype)).sum(-1)
    score = score if bias is None else score + bias[place[blind]].to(row.dtype)
    return excess.index_put((blind,), -score)


def seen_level(level: Tensor) -> Tensor:
    """Log Z, or 0 where a row sees nothing, for differences of which the other half is `held`."""
    return level.masked_fill(level == -torch.inf, 0.0)


def settled(found: Tensor, target: Tensor, counts: Sequence[int]) -> Direction:
    """Log Z over all processes' columns and its excess, from the `answers` (log Z, held, …) of each process."""
    levels, excesses = found[..., 0], found[..., 1]
    level = only(levels).reduce(0).log_partition
    holder = holders(target, counts).unsqueeze(0)
    own, excess = (numbers.gather(0, holder).squeeze(0) for numbers in (levels, excesses))
    # log Z − score = (the holder's log Z − score) + (log Z − the holder's log Z), both before rounding.
    return Direction(excess + (level - seen_level(own)), level)
