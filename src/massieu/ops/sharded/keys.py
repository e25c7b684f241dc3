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
from massieu.ops.attention import AttentionResult, attend_without_sink
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
    OWN_KEYS,
    kind_of_weight,
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
        query: the same on all processes, or this process's own queries, as `queries` says; their number may differ then.
        key, value: those of this process, whose number may differ and be 0.
        log_weight: for this process's keys, on all processes or on none; as in `massieu.ops.attention`. With sharded
            queries it has one number per key for all queries. Or, on all processes, it has one for each of this process's
            queries and each key of all processes, those of process 0 first; each is sent to the process that holds the key.
        scale, sink, sink_value: as in `massieu.ops.attention`, the same on all processes. A tensor with one number (or
            value) per query is replicated or sharded as the queries are. There is one sink in all, not one per process.
        is_causal, window, query_offset: as in `massieu.ops.attention`, with keys numbered over all processes: those of
            process 0 first, then those of process 1, …; sharded queries are numbered so too. Nothing is computed for
            queries that see none of a process's keys.
        softcap: as in `massieu.ops.attention`.
        queries, loss: whether queries are the same on all processes, and what the objective is; see `massieu.ops.sharded`.
            By default `loss` is what `queries` is.
        group: a process group, a mesh of one dimension, or None for all processes.

    Equal to one process with all keys to rounding, derivatives of every order and forward mode included. `torch.compile`
    runs this as it is and compiles what is around it; `torch.func.vmap` raises.

    Raises:
        TypeError: as `massieu.ops.attention`; a group of another type.
        ValueError: the same; an argument that must be equal differs between processes; there is no process group.
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
    problem, result = _run((query, key, value), options, (is_causal, window, query_offset), queries, loss, group)
    return AttentionResult(problem.restore(result.mean).to(query.dtype), problem.restore(result.log_partition))


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
    problem, result = _run((query, key, None), options, (is_causal, window, query_offset), queries, loss, group)
    return problem.restore(result.log_partition)


def only(log_partition: Tensor) -> Partial:
    """A `Partial` of a log-partition alone, with a mean of size 0."""
    return Partial(log_partition, log_partition.new_zeros(*log_partition.shape, 0))


def _run(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    options: dict[str, Any],
    by_position: tuple[bool, Window, int],
    queries: Placement,
    loss: Placement | None,
    processes: Processes,
) -> tuple[AttentionProblem, Partial]:
    """The checked problem of this process, and its results in the common layout.

    Args:
        tensors: query, key and value.
        options: by their names, all others but `by_position`.
        by_position: is_causal, window and query_offset.
    """
    group = Peers.of(processes)

    def check() -> tuple[tuple[AttentionProblem, Band, Tensor | None], Call]:
        choice("queries", queries, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if queries == "sharded" and loss == "replicated":
            raise ValueError("sharded queries have results of their own on each process: loss must be 'sharded'")
        log_weight = options["log_weight"]
        kind = kind_of_weight(log_weight, *tensors[:2]) if queries == "sharded" else OWN_KEYS
        # A log-weight for all keys does not fit this process's, and is checked by itself below.
        checked_options: dict[str, Any] = options | {"log_weight": None} if kind == ALL_KEYS else options
        problem = check_problem(*tensors, **checked_options, is_causal=False)
        # Attention has this option, and needs values; `log_partition` has neither.
        if "sink_value" in options and problem.value is None:
            raise TypeError("value must be a tensor, got None; massieu.ops.sharded.log_partition needs no value")
        all_key_weight = None if kind == OWN_KEYS else layout_for_all_keys(log_weight, *tensors[:2])
        band = check_band(*by_position)
        check_sendable(
            group,
            query=problem.query,
            key=problem.key,
            value=problem.value,
            log_weight=log_weight,
            scale=problem.scale,
            sink=problem.sink,
            sink_value=problem.sink_value,
        )
        call = _call(problem, options, by_position, queries, loss or queries)
        if queries == "sharded" and log_weight is not None:
            call = with_weights(call, problem.log_weight if kind == OWN_KEYS else all_key_weight, kind)
        return (problem, band, all_key_weight), call

    (problem, band, all_key_weight), numbers_of = together(group, check)
    if "kind" in numbers_of:
        weight = weights_for_own_keys(problem.log_weight, all_key_weight, numbers_of, group)
        problem = replace(problem, log_weight=weight)
    eta = problem.query
    scale = problem.scale
    if isinstance(scale, Tensor):
        # Each query is sent with its scale in it.
        eta = (eta * scale).to(eta.dtype)
        scale = 1.0
    first = sum(numbers_of["keys"][: group.rank])

    def answer(eta: Tensor) -> Partial:
        """The results of queries over this process's keys."""
        return _visible_results(replace(problem, query=eta, scale=scale), band, first)

    if queries == "sharded":
        return problem, _with_sink(_of_own_queries(eta, answer, numbers_of["queries"], group), problem)
    result = _with_sink(merge(answer(replicate(eta, group)), group), problem)
    if loss == "sharded":
        result = _own_copy(result, group)
    return problem, result


def _local_results(problem: AttentionProblem) -> Partial:
    """The results over this process's keys, whatever their numbers."""
    *output, log_z = attend_without_sink(problem)
    return Partial.of(AttentionResult(output[0], log_z)) if output else only(log_z)


def _visible_results(problem: AttentionProblem, band: Band, first: int) -> Partial:
    """The results over this process's keys, the first of which is number `first`, for queries that see a band of all keys."""
    if band is None:
        return _local_results(problem)
    low, high = band
    length = problem.query.shape[3]
    count = problem.key.shape[2]
    # Queries start … stop − 1 see one of these keys.
    start = min(length, max(0, first - high))
    stop = length if low is None else min(length, max(start, first + count - low))
    parts = []
    for begin, end, num_keys in ((0, start, 0), (start, stop, count), (stop, length, 0)):
        if end > begin:
            # Queries without a key are computed too, so that they stay in the graph of derivatives on every process.
            part = problem.narrow(slice(begin, end), slice(0, num_keys))
            if num_keys:
                # The band from the first of these queries to the first of these keys.
                part_band = (None if low is None else low + begin - first, high + begin - first)
                part = replace(part, **band_fields(part_band, end - begin, num_keys))
            parts.append(_local_results(part))
    if not parts:
        return _local_results(problem)
    return Partial(*(torch.cat(results, 3) for results in zip(*parts, strict=True)))


def _with_sink(result: Partial, problem: AttentionProblem) -> Partial:
    """The results over all keys and the sink, which is added once, after all processes' keys."""
    if problem.sink is None:
        return result
    if problem.value is None:
        return only(with_sink.shares(result.log_partition, problem)[0])
    mean, log_z = with_sink.attention(result.mean, result.log_partition, problem)
    return Partial(log_z, mean)


def _call(
    problem: AttentionProblem,
    options: dict[str, Any],
    by_position: tuple[bool, Window, int],
    queries: Placement,
    loss: Placement,
) -> Call:
    """The parts of a call that must be equal on all processes, and the numbers that may differ."""
    batch, key_heads, group, length, size = problem.query.shape
    value = problem.value
    is_causal, window, offset = by_position
    # Each is None, a number or a tensor.
    parameters = {"scale": problem.scale, "sink": options.get("sink"), "sink_value": options.get("sink_value")}
    alike = {
        "batch size": batch,
        "number of key heads": key_heads,
        "number of queries a key head": group,
        "head size": size,
        "size of values": None if value is None else value.shape[3],
        "dtype": problem.query.dtype,
        "queries": queries,
        "loss": loss,
        "is_causal": is_causal,
        "window": window,
        "query_offset": offset,
        "softcap": problem.softcap,
        "presence of a log_weight": options["log_weight"] is not None,
    }
    for name, parameter in parameters.items():
        if isinstance(parameter, Tensor):
            alike[name] = "a tensor"
        else:
            alike[name] = None if parameter is None else float(parameter)
    alike |= derivatives_wanted(
        "the query", [problem.query, *parameters.values()], [problem.key, value, options["log_weight"]]
    )
    numbers = {"keys": problem.key.shape[2]}
    replicated = {}
    if queries == "sharded":
        numbers["queries"] = length
    else:
        alike["number of queries"] = length
        replicated["query"] = problem.query
    # A parameter for all queries is replicated; one per query, which has the query's dimensions, is where its query is.
    query_ndim = len(problem.lead) + 1
    for name, parameter in parameters.items():
        if isinstance(parameter, Tensor) and (queries == "replicated" or parameter.ndim < query_ndim):
            replicated[name] = getattr(problem, name)
    return Call("attention" if value is not None else "log_partition", alike, replicated, numbers)


def merge(part: Partial, group: Peers) -> Partial:
    """The result over all processes' keys, replicated."""
    with torch.no_grad():
        anchor = _merged(Partial(part.log_partition.detach(), part.mean.detach()), group)
    if not may_be_differentiated(*part):
        return anchor
    # The processes' shares of Z sum to 1, and their deviations from the mean to 0: the values are known, and nothing is sent.
    # The derivatives of these sums are what each process contributes.
    weight, moment = shares(anchor, part)
    weight_sum = (anchor.log_partition > -torch.inf).to(weight.dtype)
    weight = total(weight, group, weight_sum)
    moment = total(moment, group, torch.zeros_like(anchor.mean))
    return around(anchor, weight, moment)


def _merged(part: Partial, group: Peers) -> Partial:
    """The merged values alone, without derivatives."""
    log_z, mean = part
    top = largest(log_z, group)
    weight = (log_z - top.masked_fill(top == -torch.inf, 0.0)).exp().unsqueeze(-1)
    # One message: Σ weight and Σ weight·mean. The mean of a process without a visible key may be anything, NaN too.
    sums = total(torch.cat([weight, torch.where(weight > 0, weight * mean, 0.0)], -1), group)
    weight_sum = sums[..., 0]
    weight_sum = torch.where(weight_sum == 0, 1.0, weight_sum)
    return Partial(top + weight_sum.log(), sums[..., 1:] / weight_sum.unsqueeze(-1))


def _own_copy(result: Partial, group: Peers) -> Partial:
    """A replicated result for losses that differ between processes.

    Both parts are one tensor, so that the backward pass sends one message, whichever of them a process uses.
    """
    both = replicate(torch.cat([result.log_partition.unsqueeze(-1), result.mean], -1), group)
    return Partial(both[..., 0], both[..., 1:])


def _of_own_queries(eta: Tensor, answer: Callable[[Tensor], Partial], lengths: list[int], group: Peers) -> Partial:
    """The results of this process's queries over all keys.

    This process receives all queries, answers each over its own keys, and sends the answers back.
    """
    log_z, mean = answer(torch.cat(gather_unequal(eta, 3, lengths, group), 3))
    answers = torch.cat([log_z.unsqueeze(-1), mean], -1)
    answers = exchange_unequal(answers.split(lengths, 3), 3, group)
    return Partial(answers[..., 0], answers[..., 1:]).reduce(0)
