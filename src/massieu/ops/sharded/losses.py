"""Losses whose words or negatives are sharded over processes."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from massieu.ops import contrastive, vocabulary
from massieu.ops.contrastive import Contrast, FalseNegatives
from massieu.ops.linear_scores import EVERYTHING, Direction, Seen, check_integers, log_partitions
from massieu.ops.sharded.collectives import Group, exchange, gather, replicate, total
from massieu.ops.sharded.keys import DTYPES, Placement, Processes, merge, only, together, wants_gradient
from massieu.ops.uncompiled import uncompiled
from massieu.ops.vocabulary import CrossEntropy


@uncompiled
def linear_cross_entropy(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["none", "sum", "mean"] = "mean",
    return_log_partition: bool = False,
    loss: Placement = "replicated",
    group: Processes = None,
) -> Tensor | CrossEntropy:
    """`massieu.ops.linear_cross_entropy` with the vocabulary sharded: each process has some of the words.

    Args:
        hidden, target: replicated; targets number all words, those of process 0 first, then those of process 1, ….
        weight, bias: of this process's words, at least one; a bias on all processes or on none.
        ignore_index, label_smoothing, z_loss, reduction, return_log_partition: as in `massieu.ops.linear_cross_entropy`.
        loss: "replicated" where every process goes on with the same result, which counts once; "sharded" where what they
            make of it differs, and the objective is the sum; see `massieu.ops.sharded`.
        group: as in `massieu.ops.sharded.attention`.

    About five numbers a token are summed over processes, whatever the number of words, and in the backward pass the
    gradient of `hidden`. Results and gradients equal those of one process to rounding.

    Raises:
        TypeError: as `massieu.ops.linear_cross_entropy`.
        ValueError: the same, a target out of range on any device; processes differ in what must be alike.
        RuntimeError: another process's arguments are wrong, or it died.
    """
    shard = Group.of(group)

    def check() -> tuple[None, dict[str, int], dict[str, int]]:
        vocabulary.check_shapes(hidden, weight, target, bias)
        vocabulary.check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
        if loss not in ("replicated", "sharded"):
            raise ValueError(f"loss must be 'replicated' or 'sharded', got {loss!r}")
        given = {
            "number of tokens": target.numel(),
            "size of hidden": hidden.shape[-1],
            "presence of a bias": int(bias is not None),
            "dtype (0 float64, 1 float32, 2 bfloat16, 3 float16)": DTYPES.index(hidden.dtype),
            "loss (0 replicated, 1 sharded)": int(loss == "sharded"),
            "presence of label smoothing": int(label_smoothing > 0),
            "requires_grad of hidden": wants_gradient(hidden),
            "requires_grad of any tensor": wants_gradient(hidden, weight, bias),
        }
        return None, given, {"words": len(weight)}

    _, words = together(shard, check, "words")
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    first, last, count = sum(words[: shard.rank]), sum(words[: shard.rank + 1]), sum(words)
    with torch.autocast(hidden.device.type, enabled=False):
        tokens = target.reshape(-1).long()
        counted = tokens != ignore_index
        # Each process looks, so each raises.
        wrong = tokens[counted & ((tokens < 0) | (tokens >= count))]
        if len(wrong):
            raise ValueError(f"target must be in 0 … {count - 1}, got {wrong[0].item()}")
        rows = replicate(hidden.reshape(-1, hidden.shape[-1]), shard).to(dtype)
        mine = counted & (tokens >= first) & (tokens < last)
        (found,) = log_partitions(rows, weight, bias, (tokens - first).where(mine, 0), bias_in_score=True)
        level = merge(only(found.log_partition), shard).log_partition
        # Where a process holds the word: log Z − score = (its own log Z − score) + (log Z − its own log Z).
        nats = found.excess + (replicate(level, shard) - found.log_partition)
        nats = total(nats.masked_fill(~mine, 0.0), shard)
        if label_smoothing:
            scores = rows @ weight.sum(0, dtype=dtype)
            scores = scores if bias is None else scores + bias.sum(dtype=dtype)
            nats = (1 - label_smoothing) * nats + label_smoothing * (level - total(scores, shard) / count)
        if z_loss:
            nats = nats + z_loss * level.square()
        nats = nats.masked_fill(~counted, 0.0)
        if loss == "sharded":
            nats, level = replicate(torch.stack([nats, level]), shard)
        if reduction == "mean":
            nats = nats.sum() / counted.sum()
        else:
            nats = nats.sum() if reduction == "sum" else nats.reshape(target.shape)
    return CrossEntropy(nats, level.reshape(target.shape)) if return_log_partition else nats


@uncompiled
def info_nce(
    query: Float[Tensor, "B D"],
    key: Float[Tensor, "B D"],
    *,
    negatives: Float[Tensor, "M D"] | None = None,
    log_weight: FalseNegatives | None = None,
    temperature: float | Float[Tensor, ""],
    symmetric: bool = False,
    return_log_partition: bool = False,
    group: Processes = None,
) -> Tensor | Contrast:
    """`massieu.ops.info_nce` with the keys of all processes as negatives of every query.

    Args:
        query, key: this process's pairs, of any number; query i's positive is key i.
        negatives: this process's further keys, of any number, for the queries of all processes.
        log_weight: `FalseNegatives` with the ids of this process's queries and keys: keys of any process with a query's
            id are hidden, but for its positive.
        temperature, symmetric, return_log_partition: as in `massieu.ops.info_nce`. A temperature that is a tensor belongs
            to this process's queries: where it is one parameter, its gradient is the sum over processes.
        group: as in `massieu.ops.sharded.attention`.

    Every process gets the same loss, the mean over all processes' queries, and goes backward from it; that loss, once, is
    the objective. Log-partitions are those of this process's queries (and keys). Queries (and keys, if symmetric) are sent
    to all processes, and a number for each comes back from each.

    Raises:
        TypeError: as `massieu.ops.info_nce`.
        ValueError: the same; processes differ in what must be alike.
        RuntimeError: another process's arguments are wrong, or it died.
    """
    shard = Group.of(group)

    def check() -> tuple[tuple[Tensor | None, Tensor | None], dict[str, int], dict[str, int]]:
        ids = _check_contrast(query, key, negatives, log_weight, symmetric, return_log_partition)
        contrastive.checked_temperature(temperature, query, query.dtype)
        given = {
            "size of queries": query.shape[1],
            "dtype (0 float64, 1 float32, 2 bfloat16, 3 float16)": DTYPES.index(query.dtype),
            "symmetric": int(symmetric),
            "presence of ids": int(ids[0] is not None),
            "requires_grad of the query": wants_gradient(query, temperature),
            "requires_grad of the key": wants_gradient(key) if symmetric else 0,
            "requires_grad of any tensor": wants_gradient(query, key, negatives, temperature),
        }
        return ids, given, {"queries": len(query)}

    (own_ids, other_ids), counts = together(shard, check, "queries")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        scale = 1 / contrastive.checked_temperature(temperature, query, dtype)
        keys = key if negatives is None else torch.cat([key, negatives])
        found = [_over_all(query.to(dtype) * scale, keys, own_ids, other_ids, counts, shard)]
        if symmetric:
            key_ids = None if other_ids is None else other_ids[: len(key)]
            found.append(_over_all(key.to(dtype) * scale, query, key_ids, own_ids, counts, shard))
        sums = torch.stack([direction.excess.sum() for direction in found])
        loss = (total(sums, shard) / sum(counts)).mean()
    if not return_log_partition:
        return loss
    levels = [direction.log_partition for direction in found]
    return Contrast(loss, torch.stack(levels) if symmetric else levels[0])


def _check_contrast(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None,
    log_weight: FalseNegatives | None,
    symmetric: bool,
    return_log_partition: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The ids of queries and keys."""
    contrastive.check_keys(query, key, negatives)
    for name, option in (("symmetric", symmetric), ("return_log_partition", return_log_partition)):
        if not isinstance(option, bool):
            raise TypeError(f"{name} must be True or False, got {option!r}")
    if len(query) != len(key):
        raise ValueError(f"query and key must be as many, got {len(query)} and {len(key)}")
    if log_weight is None:
        return None, None
    if not isinstance(log_weight, FalseNegatives):
        raise TypeError(f"log_weight must be FalseNegatives or None, got {type(log_weight).__name__}")
    own, others = log_weight.query_ids, log_weight.key_ids
    others = own if others is None else others
    count = len(key) + (0 if negatives is None else len(negatives))
    check_integers("query_ids", own, (len(query),), f"for query {tuple(query.shape)}", query.device)
    check_integers("key_ids", others, (count,), f"for {count} keys, negatives included", query.device)
    return own.long(), others.long()


def _over_all(
    row: Tensor, column: Tensor, row_ids: Tensor | None, column_ids: Tensor | None, counts: list[int], group: Group
) -> Direction:
    """Log Z of this process's rows over all processes' columns, and its excess over the score of the row's own column."""
    own, longest = len(row), max(counts)
    place = slice(group.rank * longest, group.rank * longest + own)
    everyone = gather(F.pad(row, (0, 0, 0, longest - own)), group).flatten(0, 1)
    # The own column of another process's row is elsewhere.
    target = torch.full((len(everyone),), -1, device=row.device)
    target[place] = torch.arange(own, device=row.device)
    seen = EVERYTHING
    if row_ids is not None and column_ids is not None:
        ids = gather(F.pad(row_ids, (0, longest - own)), group).flatten()
        seen = Seen("no equals", ids, column_ids)
    (found,) = log_partitions(everyone, column, None, target, seen)
    levels = exchange(found.log_partition.unflatten(0, (group.size, longest)), group)[:, :own]
    level = only(levels).reduce(0).log_partition
    return Direction(found.excess[place] + (level - found.log_partition[place]), level)
