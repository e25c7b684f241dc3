"""Contrastive losses whose keys and negatives are those of all processes."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import choice
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops import contrastive
from massieu.ops.contrastive import ContrastResult, LogWeight
from massieu.ops.linear_scores import Direction, check_places, log_partitions, one_number
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import working_dtype
from massieu.ops.sharded import rows
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import Peers, replicate, total
from massieu.ops.sharded.keys import Placement, Processes


@uncompiled
def info_nce(
    query: Float[Tensor, "B D"],
    key: Float[Tensor, "K D"],
    *,
    positive: Int[Tensor, "B"] | None = None,
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
        query, key: this process's, of any number; query i's positive is key i of this process, unless
        positive: (B,) integers says which key is, numbered over all processes: the keys of process 0 first, then those of
            process 1, …, without their negatives.
        negatives: this process's further keys, of any number, for the queries of all processes.
        log_weight: for this process's keys, negatives last: (N,), one a key, or (all processes' queries, N), those of
            process 0 first, one a query and key; floats or booleans. Or `FalseNegatives` with the ids of this process's
            queries and keys: keys of any process with a query's id are hidden, but for its positive.
        temperature, symmetric, return_log_partition: as in `massieu.ops.info_nce`, the same on all processes. The gradient
            of a temperature that is a tensor is of this process's queries: that of one parameter is the sum over processes.
        loss: "replicated": the loss, once, is the objective. "sharded": the sum of what processes make of it is, which
            `DistributedDataParallel` divides by their number again; see `massieu.ops.sharded`.
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

    def check() -> tuple[tuple[Tensor, dict[str, Any]], Call]:
        count = contrastive.check_arguments(query, key, negatives, symmetric, return_log_partition)
        choice("loss", loss, "replicated", "sharded")
        own = contrastive.targets(query, key, positive, symmetric)
        weight = log_weight if isinstance(log_weight, Tensor) else None
        pairs = None if weight is None or weight.ndim != 2 else len(weight)
        fields = contrastive.weights(log_weight, query, count, pairs)
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
            "kind of log_weight": type(log_weight).__name__ if weight is None else f"of {weight.ndim} dimensions",
            "number of queries in log_weight": pairs,
        } | derivatives_wanted("the query", [query, temperature], list(tensors.values()))
        replicated = {"temperature": number} if isinstance(number, Tensor) else {}
        return (own, fields), Call("info_nce", alike, replicated, {"queries": len(query), "keys": len(key)})

    (own, fields), numbers_of = together(shard, check)
    lengths, counts = numbers_of["queries"], numbers_of["keys"]
    dtype = working_dtype(query)
    with without_autocast(query.device):
        keys = key if negatives is None else torch.cat([key, negatives])
        own = own if positive is not None else own + sum(counts[: shard.rank])
        given = [own, fields["row_ids"]] if "row_ids" in fields else [own]
        # Everyone's positives, and everyone's ids where there are any; each process looks at all, so each raises.
        target, *ids = rows.everyone(torch.stack(given, -1), lengths, shard).unbind(-1)
        check_places("positive", target, sum(counts))
        if ids:
            fields["row_ids"] = ids[0]
        if "log_weight" in fields:
            fields["log_weight"] = _of_everyone(fields["log_weight"], lengths, shard)
        row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
        row = rows.everyone(row, lengths, shard)
        mine, place = rows.places(target, counts, shard)
        first, *second = log_partitions(ScorePlan(row, keys, target=place, both=symmetric, **fields))
        numbers = torch.stack([first.log_partition, rows.held(first, row, keys, None, mine, place)], -1)
        found = [rows.settled(rows.answers(numbers, lengths, shard), own, counts)]
        # All queries are here, so the log-partitions of this process's keys over them are whole.
        found += [Direction(*(numbers[: len(key)] for numbers in direction)) for direction in second]
        sums = torch.stack([direction.seen_excess().sum() for direction in found])
        mean = (total(sums, shard) / sum(lengths)).mean()
        mean = replicate(mean, shard) if loss == "sharded" else mean
    levels = [direction.log_partition for direction in found]
    return contrastive.contrast(mean, levels) if return_log_partition else mean


def _of_everyone(log_weight: Tensor, lengths: list[int], group: Peers) -> Tensor:
    """The log-weights of pairs, their rows in the order of `rows.everyone`."""
    if len(log_weight) != sum(lengths):
        # Alike on all processes, so all raise.
        raise ValueError(f"log_weight must be for the {sum(lengths)} queries of all processes, got {len(log_weight)}")
    return rows.own_first(log_weight, lengths, group)
