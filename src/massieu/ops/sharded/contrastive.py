"""Contrastive losses whose keys and negatives are those of all processes."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.ops import contrastive
from massieu.ops.contrastive import ContrastResult, FalseNegatives
from massieu.ops.linear_scores import EVERYTHING, Direction, Seen, check_integers, log_partitions
from massieu.ops.shapes import check_choice, check_flag
from massieu.ops.sharded import rows
from massieu.ops.sharded.agreement import Call, has_tangent, need_values, together, wants_gradient
from massieu.ops.sharded.collectives import Group, replicate, total
from massieu.ops.sharded.keys import Placement, Processes
from massieu.ops.uncompiled import uncompiled

LogWeight = Float[Tensor, "..."] | Bool[Tensor, "..."] | FalseNegatives | None


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
    """
    shard = Group.of(group)

    def check() -> tuple[None, Call]:
        count = _check(query, key, positive, negatives, symmetric, return_log_partition, loss)
        _check_log_weight(log_weight, query, count)
        number = contrastive.checked_temperature(temperature, query, query.dtype)
        weight = log_weight if isinstance(log_weight, Tensor) else None
        tensors = {"query": query, "key": key, "negatives": negatives, "temperature": number, "log_weight": weight}
        need_values(shard, **tensors)
        alike = {
            "size of queries": query.shape[1],
            "dtype": query.dtype,
            "temperature": "a tensor" if isinstance(number, Tensor) else number,
            "symmetric": symmetric,
            "return_log_partition": return_log_partition,
            "loss": loss,
            "presence of positive": positive is not None,
            "kind of log_weight": type(log_weight).__name__ if weight is None else f"of {weight.ndim} dimensions",
            "number of queries in log_weight": len(weight) if weight is not None and weight.ndim == 2 else None,
            "requires_grad of the query": wants_gradient(query, temperature),
            "requires_grad of any tensor": wants_gradient(*tensors.values()),
            "presence of a tangent": has_tangent(*tensors.values()),
        }
        replicated = {"temperature": number} if isinstance(number, Tensor) else {}
        return None, Call("info_nce", alike, replicated, {"queries": len(query), "keys": len(key)})

    _, told = together(shard, check)
    lengths, counts = told["queries"], told["keys"]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        keys = key if negatives is None else torch.cat([key, negatives])
        own = torch.arange(len(query), device=query.device) + sum(counts[: shard.rank])
        own = own if positive is None else positive.long()
        target, ids = _labels(own, log_weight, lengths, counts, shard)
        bias, seen = _weights(log_weight, ids, lengths, dtype, shard)
        row = query.to(dtype) / contrastive.checked_temperature(temperature, query, dtype)
        row = rows.everyone(row, lengths, shard)
        mine, place = rows.places(target, counts, shard)
        first, *second = log_partitions(row, keys, bias, place, seen, both=symmetric)
        numbers = torch.stack([first.log_partition, rows.held(first, row, keys, None, mine, place)], -1)
        found = [rows.settled(rows.answers(numbers, lengths, shard), own, counts)]
        # All queries are here, so the log-partitions of this process's keys over them are whole.
        found += [Direction(*(numbers[: len(key)] for numbers in direction)) for direction in second]
        sums = torch.stack([_sum(direction) for direction in found])
        mean = (total(sums, shard) / sum(lengths)).mean()
        mean = replicate(mean, shard) if loss == "sharded" else mean
    if not return_log_partition:
        return mean
    levels = [direction.log_partition for direction in found]
    return ContrastResult(mean, torch.stack(levels) if symmetric else levels[0])


def _sum(direction: Direction) -> Tensor:
    """A row that sees nothing has nothing to be told apart from."""
    return direction.excess.masked_fill(direction.log_partition.detach() == -torch.inf, 0.0).sum()


def _check(
    query: Tensor,
    key: Tensor,
    positive: Tensor | None,
    negatives: Tensor | None,
    symmetric: bool,
    return_log_partition: bool,
    loss: str,
) -> int:
    """The number of this process's keys, negatives included."""
    contrastive.check_keys(query, key, negatives)
    check_flag("symmetric", symmetric)
    check_flag("return_log_partition", return_log_partition)
    check_choice("loss", loss, "replicated", "sharded")
    if positive is None and len(query) != len(key):
        raise ValueError(
            f"query and key must be as many, or positive must say which key is whose: got {len(query)} and {len(key)}"
        )
    if positive is not None:
        if symmetric:
            raise ValueError("a symmetric loss has its positives on the diagonal: give no positive")
        check_integers("positive", positive, (len(query),), f"for query {tuple(query.shape)}", query.device)
    return len(key) + (0 if negatives is None else len(negatives))


def _check_log_weight(log_weight: LogWeight, query: Tensor, count: int) -> None:
    if log_weight is None:
        return
    if isinstance(log_weight, FalseNegatives):
        own, others = log_weight.query_ids, log_weight.key_ids
        check_integers("query_ids", own, (len(query),), f"for query {tuple(query.shape)}", query.device)
        others = own if others is None else others
        check_integers("key_ids", others, (count,), f"for {count} keys, negatives included", query.device)
        return
    if not isinstance(log_weight, Tensor):
        raise TypeError(f"log_weight must be a tensor or FalseNegatives, got {type(log_weight).__name__}")
    if log_weight.dtype != torch.bool and not log_weight.is_floating_point():
        raise TypeError(f"log_weight must be boolean (True keeps) or floating-point, got {log_weight.dtype}")
    if log_weight.device != query.device:
        raise ValueError(f"query and log_weight must be on one device, got {query.device} and {log_weight.device}")
    if log_weight.ndim not in (1, 2) or log_weight.shape[-1] != count:
        raise ValueError(
            f"log_weight must have shape {(count,)}, or (queries of all processes, {count}), got {tuple(log_weight.shape)}"
        )


def _labels(
    target: Tensor, log_weight: LogWeight, lengths: list[int], counts: list[int], group: Group
) -> tuple[Tensor, Tensor | None]:
    """Everyone's positives, and everyone's ids where there are any."""
    labels = [target]
    if isinstance(log_weight, FalseNegatives):
        labels.append(log_weight.query_ids.long())
    everyone = rows.everyone(torch.stack(labels, -1), lengths, group)
    # Each process looks at all positives, so each raises.
    wrong = everyone[(everyone[:, 0] < 0) | (everyone[:, 0] >= sum(counts)), 0]
    if len(wrong):
        raise ValueError(f"positive must be in 0 … {sum(counts) - 1}, got {wrong[0].item()}")
    return everyone[:, 0], everyone[:, 1] if everyone.shape[1] > 1 else None


def _weights(
    log_weight: LogWeight, ids: Tensor | None, lengths: list[int], dtype: torch.dtype, group: Group
) -> tuple[Tensor | None, Seen]:
    """Log-weights of single keys, and those of pairs, of which everyone's rows have the order of `rows.everyone`."""
    if log_weight is None:
        return None, EVERYTHING
    if isinstance(log_weight, FalseNegatives):
        others = log_weight.query_ids if log_weight.key_ids is None else log_weight.key_ids
        return None, Seen("no equals", ids, others.long())
    if log_weight.ndim == 2:
        # Alike on all processes, so all raise.
        if len(log_weight) != sum(lengths):
            raise ValueError(
                f"log_weight must be for the {sum(lengths)} queries of all processes, got {len(log_weight)}"
            )
        return None, Seen(log_weight=rows.own_first(log_weight, lengths, group))
    if log_weight.dtype == torch.bool:
        log_weight = torch.zeros_like(log_weight, dtype=dtype).masked_fill(~log_weight, -torch.inf)
    return log_weight, EVERYTHING
