"""Contrastive losses whose keys and negatives are those of all processes."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_one_device, check_shape, choice
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops import contrastive
from massieu.ops.contrastive import ContrastResult, LogWeight
from massieu.ops.linear_scores import Direction, check_places, log_partitions, one_number
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import working_dtype
from massieu.ops.sharded import rows
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import Peers, exchange_unequal, padded, replicate, total
from massieu.ops.sharded.keys import Placement, Processes, only


@uncompiled
def info_nce(
    query: Float[Tensor, "B D"],
    key: Float[Tensor, "K D"],
    *,
    positive: Int[Tensor, "B"] | Bool[Tensor, "B keys"] | None = None,
    negatives: Float[Tensor, "M D"] | None = None,
    log_weight: LogWeight = None,
    temperature: float | Float[Tensor, ""],
    symmetric: bool = False,
    return_log_partition: bool = False,
    loss: Placement = "replicated",
    group: Processes = None,
) -> Tensor | ContrastResult:
    """`massieu.ops.info_nce` with the keys of all processes as negatives of every query.

    Args:
        query, key: those of this process, any number. Without `positive`, query i's positive is key i of this process.
        positive: (B,) integers, the number of each query's positive among the keys of all processes: those of process 0
            first, then those of process 1, …, without their negatives. Or (B, keys of all processes) booleans in that order,
            True for its positives: the supervised contrastive loss, as in `massieu.ops.info_nce`. A query without a positive
            anywhere is left out of the mean over all processes' queries.
        negatives: further keys of this process, any number, for the queries of all processes.
        log_weight: for this process's keys, negatives last; floats or booleans. (N,), one per key, or (all processes'
            queries, N), one per query and key, queries of process 0 first. Or `FalseNegatives` with the ids of this process's
            queries and keys: it hides the keys of any process that have a query's id, except its positive.
        temperature, symmetric, return_log_partition: as in `massieu.ops.info_nce`, the same on all processes. The gradient
            of a tensor temperature is that of this process's queries; add it over processes for a shared parameter.
        loss: "replicated": the loss, once, is the objective, for those who add up gradients over processes. "sharded": for
            `DistributedDataParallel`, which divides that sum by the number of processes: the gradients of its parameters
            are then those of the whole batch, where "replicated" would give 1/processes of them.
        group: as in `massieu.ops.sharded.attention`.

    Every process gets the same loss, the mean over all processes' queries. Log-partitions are those of this process's
    queries (and keys). Queries are sent to all processes, and two numbers for each come back from each, whatever the number
    of keys; the other direction of a symmetric loss is answered by them too.

    Raises:
        TypeError: as `massieu.ops.info_nce`.
        ValueError: the same, a positive out of range on any device; processes differ in what must be alike.
        RuntimeError: another process refused its arguments, or it died; a call inside `torch.func.vmap`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> round(float(sharded.info_nce(torch.zeros(4, 2), torch.zeros(4, 2), temperature=1.0).exp()), 3)
        4.0
        >>> dist.destroy_process_group()
    """
    shard = Peers.of(group)
    mask = positive if isinstance(positive, Tensor) and positive.dtype == torch.bool else None
    by_mask = mask is not None

    def check() -> tuple[tuple[Tensor, dict[str, Any]], Call]:
        count = contrastive.check_arguments(query, key, negatives, symmetric, return_log_partition)
        choice("loss", loss, "replicated", "sharded")
        if mask is not None:
            _check_mask(mask, query, key, symmetric and return_log_partition)
            target = mask
        else:
            target = contrastive.targets(query, key, positive, symmetric)
        weight = log_weight if isinstance(log_weight, Tensor) else None
        pair_rows = None if weight is None or weight.ndim != 2 else len(weight)
        fields = contrastive.weights(log_weight, query, count, pair_rows)
        number = one_number("temperature", temperature, query.dtype, above=0, query=query)
        tensors = {"query": query, "key": key, "negatives": negatives, "temperature": number, "log_weight": weight}
        check_sendable(shard, **tensors)
        alike = {
            "size of queries": query.shape[1],
            "dtype": query.dtype,
            "temperature": "a tensor" if isinstance(number, Tensor) else number,
            "symmetric": symmetric,
            "return_log_partition": return_log_partition,
            "loss": loss,
            "presence of positive": positive is not None,
            "whether positive is of booleans": by_mask,
            "kind of log_weight": type(log_weight).__name__ if weight is None else f"of {weight.ndim} dimensions",
            "number of queries in log_weight": pair_rows,
        } | derivatives_wanted("the query", [query, temperature], list(tensors.values()))
        replicated = {"temperature": number} if isinstance(number, Tensor) else {}
        numbers = {"queries": len(query), "keys": len(key), "columns": target.shape[1] if by_mask else 0}
        return (target, fields), Call("info_nce", alike, replicated, numbers)

    (own_target, fields), numbers_of = together(shard, check)
    lengths = numbers_of["queries"]
    counts = numbers_of["keys"]
    dtype = working_dtype(query)
    if by_mask:
        _check_columns(numbers_of["columns"], counts)
        with without_autocast(query.device):
            mean, log_partitions_of = _of_several_positives(
                query,
                key,
                negatives,
                own_target,
                fields,
                temperature,
                symmetric,
                return_log_partition,
                lengths,
                counts,
                shard,
            )
            if loss == "sharded":
                mean = replicate(mean, shard)
        return contrastive.contrast_result(mean, log_partitions_of) if return_log_partition else mean
    with without_autocast(query.device):
        keys = key if negatives is None else torch.cat([key, negatives])
        if positive is None:
            # From this process's numbers to those over all processes.
            own_target = own_target + sum(counts[: shard.rank])
        own_integers = [own_target, fields["row_ids"]] if "row_ids" in fields else [own_target]
        # The positives of all queries, and their ids if there are any, in one message. Each process checks all, so all raise.
        target, *ids = rows.gather_rows(torch.stack(own_integers, -1), lengths, shard).unbind(-1)
        check_places("positive", target, sum(counts))
        if ids:
            fields["row_ids"] = ids[0]
        if "log_weight" in fields:
            fields["log_weight"] = _pair_weights(fields["log_weight"], lengths, shard)
        row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
        row = rows.gather_rows(row, lengths, shard)
        is_own, place = rows.own_places(target, counts, shard)
        first, *second = log_partitions(ScorePlan(row, keys, target=place, both=symmetric, **fields))
        excess = rows.holder_excess(first, row, keys, None, is_own, place)
        answers = torch.stack([first.log_partition, excess], -1)
        directions = [rows.merge_answers(rows.exchange_answers(answers, lengths, shard), own_target, counts)]
        # All queries are here, so the log-partitions of this process's keys over them are complete.
        directions += [Direction(*(numbers[: len(key)] for numbers in direction)) for direction in second]
        sums = torch.stack([direction.seen_excess().sum() for direction in directions])
        mean = (total(sums, shard) / sum(lengths)).mean()
        if loss == "sharded":
            mean = replicate(mean, shard)
    if return_log_partition:
        return contrastive.contrast_result(mean, [direction.log_partition for direction in directions])
    return mean


def _check_mask(positive: Tensor, query: Tensor, key: Tensor, returns_both: bool) -> None:
    """Check this process's rows of a mask; how many columns it needs, the other processes know."""
    check_shape("positive", positive, (len(query), "keys of all processes"))
    check_one_device(query=query, positive=positive)
    if returns_both and len(query) != len(key):
        raise ValueError(
            "the log-partitions of both directions need as many queries as keys to be one tensor, "
            f"got {len(query)} and {len(key)}"
        )


def _check_columns(columns: list[int], counts: list[int]) -> None:
    """Raise, on all processes alike, unless every mask has a column for each key of all processes."""
    for rank, count in enumerate(columns):
        if count != sum(counts):
            raise ValueError(
                f"positive must have a column for each of the {sum(counts)} keys of all processes, got {count} "
                f"on process {rank}"
            )


def _of_several_positives(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None,
    own_mask: Bool[Tensor, "B keys"],
    fields: dict[str, Any],
    temperature: float | Tensor,
    symmetric: bool,
    is_returned: bool,
    lengths: list[int],
    counts: list[int],
    group: Peers,
) -> tuple[Tensor, list[Tensor]]:
    """The loss where a mask says which keys are positives of which queries, and the log-partitions of each direction.

    Every process receives all queries. It answers with log Z over its keys, and with what its keys add to the mean score of
    each query's positives.
    """
    dtype = working_dtype(query)
    own_count = own_mask.sum(1)
    is_own_unread = contrastive.unread_queries(query, own_mask, symmetric, is_returned)
    # What processes must know of the queries that are not theirs, in one message of integers.
    own_integers = [own_count, is_own_unread.long(), *([fields["row_ids"]] if "row_ids" in fields else [])]
    count, is_unread, *ids = rows.gather_rows(torch.stack(own_integers, -1), lengths, group).unbind(-1)
    if ids:
        fields["row_ids"] = ids[0]
    if "log_weight" in fields:
        fields["log_weight"] = _pair_weights(fields["log_weight"], lengths, group)
    positive = _columns_of_own_keys(own_mask, lengths, counts, group)
    fields = contrastive.seen_pairs(fields, positive)
    query = query.masked_fill(is_own_unread.unsqueeze(1), 0.0)
    keys = key if negatives is None else torch.cat([key, negatives])
    is_unread_key = contrastive.unread_keys(keys, positive, is_unread.bool(), symmetric, fields)
    keys = keys.masked_fill(is_unread_key.unsqueeze(1), 0.0)
    key = keys[: len(key)]
    own_row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
    row = rows.gather_rows(own_row, lengths, group)
    no_target = torch.zeros(len(row), dtype=torch.long, device=row.device)
    level = contrastive.log_partition_of_rows(ScorePlan(row, keys, target=no_target, **fields))
    answers = torch.stack([level, contrastive.positive_scores(row, key, positive, count)], -1)
    received = rows.exchange_answers(answers, lengths, group)
    own_level = only(received[..., 0]).reduce(0).log_partition
    excesses = [contrastive.excess_sum(own_level, received[..., 1].sum(0), own_count > 0)]
    totals = [own_count > 0]
    levels = [own_level.masked_fill(is_own_unread, torch.nan)]
    if symmetric:
        # All queries are here: of this process's keys everything is known.
        column = key.to(dtype)
        no_target = torch.zeros(len(column), dtype=torch.long, device=row.device)
        pairs = contrastive.pairs_of_keys(fields, len(key))
        plan = ScorePlan(column, row, None, target=no_target, log_weight=pairs)
        levels.append(contrastive.log_partition_of_rows(plan))
        score = contrastive.positive_scores(column, row, positive.mT, positive.sum(0))
        excesses.append(contrastive.excess_sum(levels[1], score, positive.any(0)))
        totals.append(positive.any(0))
    numbers = torch.stack([each.sum().to(dtype) for each in totals])
    sums = total(torch.stack([*excesses, *numbers]), group)
    return (sums[: len(excesses)] / sums[len(excesses) :]).mean(), levels


def _columns_of_own_keys(
    own_mask: Bool[Tensor, "B keys"], lengths: list[int], counts: list[int], group: Peers
) -> Bool[Tensor, "queries K"]:
    """The mask of all processes' queries, in the order of `rows.gather_rows`, and this process's keys."""
    # As bytes, since not every backend sends booleans.
    padded_mask = padded(own_mask.to(torch.uint8), 0, max(lengths))
    received = exchange_unequal(padded_mask.split(counts, 1), 1, group)
    parts = [part.narrow(0, 0, length) for part, length in zip(received, lengths, strict=True)]
    return torch.cat([parts.pop(group.rank), *parts]).bool()


def _pair_weights(log_weight: Tensor, lengths: list[int], group: Peers) -> Tensor:
    """The log-weights of pairs, their rows in the order of `rows.gather_rows`."""
    if len(log_weight) != sum(lengths):
        # This number was compared and is the same on all processes, so all raise.
        raise ValueError(f"log_weight must be for the {sum(lengths)} queries of all processes, got {len(log_weight)}")
    return rows.own_first(log_weight, lengths, group)
