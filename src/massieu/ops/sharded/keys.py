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
from massieu.foundation.transforms import in_autocast_dtype, may_be_differentiated, uncompiled
from massieu.ops.attention import AttentionResult, of_problem
from massieu.ops.partial import Partial, around, shares
from massieu.ops.shapes import AttentionProblem, Scale, check_problem
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import (
    Group,
    exchange_unequal,
    gather_unequal,
    largest,
    replicate,
    total,
)

Processes = ProcessGroup | DeviceMesh | None
Placement = Literal["replicated", "sharded"]


@uncompiled
def attention(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "B Hk N D"],
    value: Float[Tensor, "B Hk N E"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
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
        log_weight: for this process's keys, on all processes or on none; as in `massieu.ops.attention`, but with sharded
            queries not one a query.
        scale: as in `massieu.ops.attention`, the same on all processes; but a tensor of one number a query is replicated or
            sharded as the queries are.
        is_causal: query i sees keys 0 … i, numbered over all processes: those of process 0 first, then those of process 1,
            …; sharded queries are numbered so too. Nothing is computed for keys that no query sees, and no mask is made.
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
    problem, found = _run((query, key, value, log_weight, scale, is_causal), True, queries, loss, group)
    return AttentionResult(problem.restore(found.mean).to(query.dtype), problem.restore(found.log_partition))


@uncompiled
def log_partition(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "B Hk N D"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    queries: Placement = "replicated",
    loss: Placement | None = None,
    group: Processes = None,
) -> Float[Tensor, "*query"]:
    """log Z over the keys of all processes, with two numbers a query summed over processes.

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
    problem, found = _run((query, key, None, log_weight, scale, is_causal), False, queries, loss, group)
    return problem.restore(found.log_partition)


def only(log_partition: Tensor) -> Partial:
    """A log-partition without a mean."""
    return Partial(log_partition, log_partition.new_zeros(*log_partition.shape, 0))


def _run(
    arguments: tuple[Any, ...], has_values: bool, queries: Placement, loss: Placement | None, processes: Processes
) -> tuple[AttentionProblem, Partial]:
    """The checked problem, and its results in the common layout."""
    group = Group.of(processes)

    def check() -> tuple[AttentionProblem, Call]:
        choice("queries", queries, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if queries == "sharded" and loss == "replicated":
            raise ValueError("sharded queries have results of their own on each process: loss must be 'sharded'")
        problem = check_problem(*arguments)
        if has_values and problem.value is None:
            raise TypeError("value must be a tensor, got None; massieu.ops.sharded.log_partition needs no value")
        tensors = {name: getattr(problem, name) for name in ("query", "key", "value", "log_weight", "scale")}
        check_sendable(group, **tensors)
        return problem, _call(problem, queries, loss or queries)

    problem, numbers_of = together(group, check)
    eta, scale = problem.query, problem.scale
    if isinstance(scale, Tensor):
        eta, scale = (eta * scale).to(eta.dtype), 1.0
    first = sum(numbers_of["keys"][: group.rank])

    def answer(eta: Tensor) -> Partial:
        asked = replace(problem, query=eta, scale=scale)
        return _causal(asked, first) if problem.is_causal else _local(asked)

    if queries == "sharded":
        return problem, _of_own_queries(eta, answer, numbers_of["queries"], group)
    found = merge(answer(replicate(eta, group)), group)
    return problem, found if loss != "sharded" else _own_copy(found, group)


def _local(problem: AttentionProblem) -> Partial:
    """The results over this process's keys."""
    *output, log_z = of_problem(problem)
    return Partial.of(AttentionResult(output[0], log_z)) if output else only(log_z)


def _causal(problem: AttentionProblem, first: int) -> Partial:
    """Query i over keys up to i, the first of which is number `first`."""
    length, count = problem.query.shape[3], problem.key.shape[2]
    last = first + count
    # Queries before these keys see none of them, but belong to the graph; those within see some, those after all.
    pieces = (
        (slice(0, min(first, length)), slice(0, 0), False),
        (slice(min(first, length), min(last, length)), slice(0, count), True),
        (slice(min(last, length), length), slice(0, count), False),
    )
    parts = [
        _local(replace(problem.narrow(rows, keys), is_causal=is_causal))
        for rows, keys, is_causal in pieces
        if rows.stop > rows.start or length == 0
    ]
    return Partial(*(torch.cat(results, 3) for results in zip(*parts, strict=True)))


def _call(problem: AttentionProblem, queries: Placement, loss: Placement) -> Call:
    """What must be equal on all processes, and what need not be."""
    weight = problem.log_weight
    if queries == "sharded" and weight is not None and weight.shape[3] > 1:
        raise ValueError(
            f"with sharded queries log_weight must be one a key for all queries, got {tuple(weight.shape[-2:])} for "
            f"{problem.query.shape[3]} queries and {problem.key.shape[2]} keys"
        )
    batch, key_heads, group, length, size = problem.query.shape
    query, key, value, scale = problem.query, problem.key, problem.value, problem.scale
    alike = {
        "batch size": batch,
        "number of key heads": key_heads,
        "number of queries a key head": group,
        "head size": size,
        "size of values": None if value is None else value.shape[3],
        "dtype": query.dtype,
        "queries": queries,
        "loss": loss,
        "is_causal": problem.is_causal,
        "presence of a log_weight": weight is not None,
        "scale": "a tensor" if isinstance(scale, Tensor) else scale,
    } | derivatives_wanted("the query", [query, scale], [key, value, weight])
    own, replicated = {"keys": key.shape[2]}, {}
    if queries == "sharded":
        own["queries"] = length
    else:
        alike["number of queries"] = length
        replicated["query"] = query
    # One number for all queries is a parameter, wherever the queries are; one a query goes where it goes.
    if isinstance(scale, Tensor) and (queries == "replicated" or scale.ndim == 0 or scale.shape[3] == 1):
        replicated["scale"] = scale
    return Call("attention" if value is not None else "log_partition", alike, replicated, own)


def merge(part: Partial, group: Group) -> Partial:
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


def _merged(part: Partial, group: Group) -> Partial:
    level, mean = part
    top = largest(level, group)
    weight = (level - top.masked_fill(top == -torch.inf, 0.0)).exp().unsqueeze(-1)
    sums = total(torch.cat([weight, torch.where(weight > 0, weight * mean, 0.0)], -1), group)
    weight = sums[..., 0]
    weight = torch.where(weight == 0, 1.0, weight)
    return Partial(top + weight.log(), sums[..., 1:] / weight.unsqueeze(-1))


def _own_copy(found: Partial, group: Group) -> Partial:
    """A replicated result for losses that differ between processes, in one message back whichever part they use."""
    both = replicate(torch.cat([found.log_partition.unsqueeze(-1), found.mean], -1), group)
    return Partial(both[..., 0], both[..., 1:])


def _of_own_queries(eta: Tensor, answer: Callable[[Tensor], Partial], lengths: list[int], group: Group) -> Partial:
    """All queries come here, and what this process's keys say of each goes back."""
    level, mean = answer(torch.cat(gather_unequal(eta, 3, lengths, group), 3))
    answers = torch.cat([level.unsqueeze(-1), mean], -1)
    answers = exchange_unequal(answers.split(lengths, 3), 3, group)
    return Partial(answers[..., 0], answers[..., 1:]).reduce(0)
