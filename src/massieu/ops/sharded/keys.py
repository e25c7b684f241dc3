"""Attention and log Z over the keys of all processes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.foundation.arguments import choice
from massieu.foundation.listening import unreadable
from massieu.foundation.transforms import in_autocast_dtype, may_be_differentiated, uncompiled
from massieu.ops import sink as with_sink
from massieu.ops.attention import AttentionResult, of_problem
from massieu.ops.partial import Partial, around, shares
from massieu.ops.shapes import AttentionProblem, Band, Scale, Sink, Window, band_fields, check_band, check_problem
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import (
    Peers,
    exchange_unequal,
    gather_unequal,
    largest,
    replicate,
    total,
)
from massieu.ops.sharded.weights import (
    ALL_KEYS,
    for_own_queries,
    layout_for_all_keys,
    weights_for_own_keys,
    with_weights,
)

Processes = ProcessGroup | DeviceMesh | None
Placement = Literal["replicated", "sharded"]


@uncompiled
@unreadable("it attends by massieu.ops.sharded, whose keys are on several processes", attends=True)
def attention(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Float[Tensor, "... E"] | None = None,
    queries: Placement = "replicated",
    loss: Placement | None = None,
    group: Processes = None,
) -> AttentionResult:
    """`massieu.ops.attention` over the keys of all processes.

    Replicated queries are answered by two sums over processes of E + 2 numbers a query; sharded ones by sending each query
    to all processes and a log-partition and a mean back from each.

    Args:
        query: the same on all processes, or this process's own, of any number; see `queries`.
        key, value: this process's, of any number, 0 included.
        log_weight: for this process's keys, on all processes or on none; as in `massieu.ops.attention`. With sharded
            queries it is one a key for all queries; or, on all processes, one for each of this process's queries and each
            key of all processes, those of process 0 first, which is sent to whoever holds the key.
        scale, sink, sink_value: as in `massieu.ops.attention`, the same on all processes; but a tensor of one number (or
            value) a query is replicated or sharded as the queries are. The sink is one key in all, not one a process.
        is_causal, window, query_offset: as in `massieu.ops.attention`, with keys numbered over all processes: those of
            process 0 first, then those of process 1, …; sharded queries are numbered so too. Nothing is computed for
            queries that see none of a process's keys.
        softcap: as in `massieu.ops.attention`.
        queries, loss: what is replicated, and what the objective is; see `massieu.ops.sharded`. `loss` is by default what
            `queries` is.
        group: a process group, a mesh of one dimension, or None for all processes.

    Equal to one process with all keys to rounding, derivatives of every order and forward mode included. `torch.compile`
    runs this as it is and compiles what is around it; `torch.func.vmap` raises.

    Raises:
        TypeError: as `massieu.ops.attention`; a group of another type.
        ValueError: the same; what must be alike differs between processes; there is no process group.
        RuntimeError: another process refused its arguments, or it died; a call inside `torch.func.vmap`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> output, log_z = sharded.attention(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2), torch.ones(1, 1, 4, 2))
        >>> round(output.mean().item(), 3), round(log_z.exp().item(), 3)
        (1.0, 4.0)
        >>> dist.destroy_process_group()
    """
    query, key, value = in_autocast_dtype(query, key, value)
    options = {"log_weight": log_weight, "scale": scale, "softcap": softcap, "sink": sink, "sink_value": sink_value}
    problem, found = _run((query, key, value), options, (is_causal, window, query_offset), queries, loss, group)
    return AttentionResult(problem.restore(found.mean).to(query.dtype), problem.restore(found.log_partition))


@uncompiled
def log_partition(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    softcap: float | None = None,
    sink: Sink = None,
    queries: Placement = "replicated",
    loss: Placement | None = None,
    group: Processes = None,
) -> Float[Tensor, "*query"]:
    """log Z over the keys of all processes; two numbers per query are summed over processes.

    Arguments, guarantees and errors are those of `attention`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> round(sharded.log_partition(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 8, 2)).exp().item(), 3)
        8.0
        >>> dist.destroy_process_group()
    """
    query, key = in_autocast_dtype(query, key)
    options = {"log_weight": log_weight, "scale": scale, "softcap": softcap, "sink": sink}
    problem, found = _run((query, key, None), options, (is_causal, window, query_offset), queries, loss, group)
    return problem.restore(found.log_partition)


def only(log_partition: Tensor) -> Partial:
    """A log-partition without a mean."""
    return Partial(log_partition, log_partition.new_zeros(*log_partition.shape, 0))


def _run(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    options: dict[str, Any],
    by_position: tuple[bool, Window, int],
    queries: Placement,
    loss: Placement | None,
    processes: Processes,
) -> tuple[AttentionProblem, Partial]:
    """The checked problem, and its results in the common layout."""
    group = Peers.of(processes)

    def check() -> tuple[tuple[AttentionProblem, Band, Tensor | None], Call]:
        choice("queries", queries, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if queries == "sharded" and loss == "replicated":
            raise ValueError("sharded queries have results of their own on each process: loss must be 'sharded'")
        own = queries == "sharded" and for_own_queries(options["log_weight"], *tensors[:2])
        of_keys: dict[str, Any] = options | {"log_weight": None} if own == ALL_KEYS else options
        problem = check_problem(*tensors, **of_keys, is_causal=False)
        # Of attention, which has this option.
        if "sink_value" in options and problem.value is None:
            raise TypeError("value must be a tensor, got None; massieu.ops.sharded.log_partition needs no value")
        pairs = layout_for_all_keys(options["log_weight"], *tensors[:2]) if own else None
        band = check_band(*by_position)
        names = "query", "key", "value", "log_weight", "scale", "sink", "sink_value"
        check_sendable(
            group, **{name: getattr(problem, name) for name in names} | {"log_weight": options["log_weight"]}
        )
        call = _call(problem, options, by_position, queries, loss or queries)
        if queries == "sharded" and options["log_weight"] is not None:
            call = with_weights(call, pairs if own else problem.log_weight, own)
        return (problem, band, pairs), call

    (problem, band, pairs), numbers_of = together(group, check)
    if "kind" in numbers_of:
        problem = replace(problem, log_weight=weights_for_own_keys(problem.log_weight, pairs, numbers_of, group))
    eta, scale = problem.query, problem.scale
    if isinstance(scale, Tensor):
        eta, scale = (eta * scale).to(eta.dtype), 1.0
    first = sum(numbers_of["keys"][: group.rank])

    def answer(eta: Tensor) -> Partial:
        return _seen(replace(problem, query=eta, scale=scale), band, first)

    if queries == "sharded":
        return problem, _with_sink(_of_own_queries(eta, answer, numbers_of["queries"], group), problem)
    found = _with_sink(merge(answer(replicate(eta, group)), group), problem)
    return problem, found if loss != "sharded" else _own_copy(found, group)


def _local(problem: AttentionProblem) -> Partial:
    """The results over this process's keys."""
    *output, log_z = of_problem(problem)
    return Partial.of(AttentionResult(output[0], log_z)) if output else only(log_z)


def _seen(problem: AttentionProblem, band: Band, first: int) -> Partial:
    """The results over this process's keys, the first of which is number `first`: of the queries that see one."""
    if band is None:
        return _local(problem)
    (low, high), length, count = band, problem.query.shape[3], problem.key.shape[2]
    start = min(length, max(0, first - high))
    stop = length if low is None else min(length, max(start, first + count - low))
    parts = []
    for begin, end, seen in ((0, start, 0), (start, stop, count), (stop, length, 0)):
        if end > begin:
            # Queries that see none of these keys belong to the graph too.
            near = None if low is None else low + begin - first, high + begin - first
            place = band_fields(near, end - begin, seen) if seen else {}
            parts.append(_local(replace(problem.narrow(slice(begin, end), slice(0, seen)), **place)))
    return Partial(*(torch.cat(results, 3) for results in zip(*parts, strict=True))) if parts else _local(problem)


def _with_sink(found: Partial, problem: AttentionProblem) -> Partial:
    """The results over all keys and the sink, which is no process's own."""
    if problem.sink is None:
        return found
    if problem.value is None:
        return only(with_sink.shares(found.log_partition, problem)[0])
    mean, level = with_sink.attention(found.mean, found.log_partition, problem)
    return Partial(level, mean)


def _call(
    problem: AttentionProblem,
    options: dict[str, Any],
    by_position: tuple[bool, Window, int],
    queries: Placement,
    loss: Placement,
) -> Call:
    """What must be equal on all processes, and what need not be."""
    batch, key_heads, group, length, size = problem.query.shape
    query, key, value = problem.query, problem.key, problem.value
    is_causal, window, offset = by_position
    given = {"scale": problem.scale} | {name: options.get(name) for name in ("sink", "sink_value")}
    alike = {
        "batch size": batch,
        "number of key heads": key_heads,
        "number of queries a key head": group,
        "head size": size,
        "size of values": None if value is None else value.shape[3],
        "dtype": query.dtype,
        "queries": queries,
        "loss": loss,
        "is_causal": is_causal,
        "window": window,
        "query_offset": offset,
        "softcap": problem.softcap,
        "presence of a log_weight": options["log_weight"] is not None,
    }
    for name, thing in given.items():
        alike[name] = "a tensor" if isinstance(thing, Tensor) else thing if thing is None else float(thing)
    alike |= derivatives_wanted("the query", [query, *given.values()], [key, value, options["log_weight"]])
    own, replicated = {"keys": key.shape[2]}, {}
    if queries == "sharded":
        own["queries"] = length
    else:
        alike["number of queries"] = length
        replicated["query"] = query
    # One number for all queries is a parameter, wherever the queries are; one a query goes where it goes.
    whole = len(problem.lead) + 1
    for name, thing in given.items():
        if isinstance(thing, Tensor) and (queries == "replicated" or thing.ndim < whole):
            replicated[name] = getattr(problem, name)
    return Call("attention" if value is not None else "log_partition", alike, replicated, own)


def merge(part: Partial, group: Peers) -> Partial:
    """The result over all processes' keys, replicated."""
    with torch.no_grad():
        anchor = _merged(Partial(part.log_partition.detach(), part.mean.detach()), group)
    if not may_be_differentiated(*part):
        return anchor
    # The sums of the shares are 1 and 0, so nothing is sent; their derivatives need what each process has.
    weight, moment = shares(anchor, part)
    seen = (anchor.log_partition > -torch.inf).to(weight.dtype)
    weight, moment = total(weight, group, seen), total(moment, group, torch.zeros_like(anchor.mean))
    return around(anchor, weight, moment)


def _merged(part: Partial, group: Peers) -> Partial:
    level, mean = part
    top = largest(level, group)
    weight = (level - top.masked_fill(top == -torch.inf, 0.0)).exp().unsqueeze(-1)
    sums = total(torch.cat([weight, torch.where(weight > 0, weight * mean, 0.0)], -1), group)
    weight = sums[..., 0]
    weight = torch.where(weight == 0, 1.0, weight)
    return Partial(top + weight.log(), sums[..., 1:] / weight.unsqueeze(-1))


def _own_copy(found: Partial, group: Peers) -> Partial:
    """A replicated result for losses that differ between processes, in one message back whichever part they use."""
    both = replicate(torch.cat([found.log_partition.unsqueeze(-1), found.mean], -1), group)
    return Partial(both[..., 0], both[..., 1:])


def _of_own_queries(eta: Tensor, answer: Callable[[Tensor], Partial], lengths: list[int], group: Peers) -> Partial:
    """All queries come here, and what this process's keys say of each goes back."""
    level, mean = answer(torch.cat(gather_unequal(eta, 3, lengths, group), 3))
    answers = torch.cat([level.unsqueeze(-1), mean], -1)
    answers = exchange_unequal(answers.split(lengths, 3), 3, group)
    return Partial(answers[..., 0], answers[..., 1:]).reduce(0)
