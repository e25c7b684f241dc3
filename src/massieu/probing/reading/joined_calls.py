"""Attention calls that are read as one: those of all layers, and of several batches.

On an accelerator the statistics of a call are some hundred small operations, each of which takes the host as long to begin as
the device to do. Of many calls together they take the host hardly longer than of one. What is kept of a call is copied when
it is made, so that nothing which the model does to it later is seen.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics.group import CallTokens

DEVICES = frozenset({"cuda"})
"""Types of devices on which calls are joined."""
SHARE = 32
"""What waits takes at most one in so many bytes of the memory that the device has left. To read it takes six times as much."""


@dataclass(frozen=True, eq=False)
class JoinedCalls:
    """Calls that differ in their sites, their rows, and their queries and keys alone.

    Attributes:
        call: the rows of all batches, with the heads of all sites in a row; it has no values and no outputs.
        tokens: of all rows.
        sites: whose heads these are.
    """

    call: AttentionCall
    tokens: CallTokens
    sites: tuple[SiteInfo, ...]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A call with queries and keys of its own, and without values and outputs."""

    call: AttentionCall
    tokens: CallTokens


class WaitingCalls:
    """Calls that wait to be read together."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], list[_Waiting]] = defaultdict(list)  # by what those that are joined share
        self._bytes = 0
        self._limit = 0
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def can_take(self, call: AttentionCall, tokens: CallTokens) -> bool:
        """Whether this call could be joined with others: nothing but its queries and keys is its own, and there is room."""
        device = call.query.device
        weight = call.log_weight
        is_for_all_heads = weight is None or (weight.dim() == 4 and weight.shape[1] == 1)
        is_alike = (
            device.type in DEVICES
            and all(type(tensor) is Tensor and tensor.is_floating_point() for tensor in (call.query, call.key))
            and not torch.is_autocast_enabled(device.type)
            and call.grade == "full"
            and call.sink is None
            and call.seen is None
            and call.weights is None
            and call.query.numel() > 0
            and call.key.numel() > 0
            and len(call.query) % tokens.rows == 0
            and is_for_all_heads
            # Else another call of the same shape may be told what is padding.
            and tokens.queries.told
            and tokens.keys.told
        )
        if is_alike and not self._bytes:
            self._limit = _memory_left(device) // SHARE
        return is_alike and _bytes_of(call) <= self._limit

    def add(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Copy what is kept of a call."""
        # Not memory of inference mode, which can be used nowhere else.
        with torch.inference_mode(False), torch.no_grad():
            query, key = (torch.empty_like(part).copy_(part) for part in (call.query, call.key))
            kept = replace(
                call,
                query=query,
                key=key,
                value=key.new_empty(*key.shape[:3], 0),
                output=query.new_empty(query.shape[0], query.shape[2], query.shape[1], 0),
                log_weight=self._copy(call.log_weight),
            )
        self._calls[_kind_of(kept, tokens)].append(_Waiting(kept, tokens))
        self._bytes += _bytes_of(kept)

    def _copy(self, mask: Tensor | None) -> Tensor | None:
        """A mask's copy: one for all layers that are given the mask, as long as nobody changes it."""
        if mask is None:
            return None
        version = 0 if mask.is_inference() else mask._version
        known = self._copies.get(id(mask))
        if known is not None and known[1] == version and not mask.is_inference():
            return known[2]
        copy = torch.empty_like(mask).copy_(mask)
        self._bytes += copy.nbytes
        self._copies[id(mask)] = (mask, version, copy)  # the mask itself, so that its number is given to no other
        return copy

    def is_full(self) -> bool:
        """Whether what waits is to be read now."""
        return self._bytes > self._limit

    def end_pass(self) -> None:
        """The pass has ended: of its masks the copies alone are held."""
        self._copies.clear()

    def take(self) -> Iterator[JoinedCalls]:
        """The calls, joined; they wait no longer."""
        kinds = list(self._calls.values())
        self._calls.clear()
        self._copies.clear()
        self._bytes = 0
        kinds.reverse()
        while kinds:  # none is held here once it is joined
            by_site: dict[int, list[_Waiting]] = defaultdict(list)
            for each in kinds.pop():
                by_site[each.tokens.info.index].append(each)
            # Sites that were called in the same batches: all of them, unless the model takes other ways.
            by_batches: dict[tuple[Any, ...], list[list[_Waiting]]] = defaultdict(list)
            for calls in by_site.values():
                by_batches[tuple(_batch_of(each) for each in calls)].append(calls)
            del by_site
            yield from (_joined(sites) for sites in by_batches.values())


def _joined(sites: Sequence[Sequence[_Waiting]]) -> JoinedCalls:
    """The calls of some sites, each of which was called in the same batches."""
    first = sites[0]
    query, key = (
        torch.cat([torch.stack(parts, 1).flatten(1, 2) for parts in zip(*calls_of_sites, strict=True)])
        for calls_of_sites in (
            [[each.call.query for each in calls] for calls in sites],
            [[each.call.key for each in calls] for calls in sites],
        )
    )
    call = replace(
        first[0].call,
        query=query,
        key=key,
        log_weight=_log_weight_of([each.call for each in first]),
        value=key.new_empty(*key.shape[:3], 0),
        output=query.new_empty(query.shape[0], query.shape[2], query.shape[1], 0),
    )
    return JoinedCalls(
        call, _tokens_of([each.tokens for each in first]), tuple(calls[0].tokens.info for calls in sites)
    )


def _tokens_of(batches: Sequence[CallTokens]) -> CallTokens:
    """The tokens of several batches, one below the other."""
    first = batches[0]
    numbers = None if first.numbers is None else [number for each in batches for number in each.numbers or ()]
    return replace(
        first,
        queries=_one_below_other([each.queries for each in batches]),
        keys=_one_below_other([each.keys for each in batches]),
        rows=sum(each.rows for each in batches),
        numbers=numbers,
        windows=list(chain.from_iterable(each.windows for each in batches)),
    )


def _one_below_other(batches: Sequence[Tokens]) -> Tokens:
    def all_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.cat(given) if given else None

    real, special, ids, restarts = (
        all_rows([getattr(each, name) for each in batches]) for name in ("real", "special", "ids", "restarts")
    )
    assert real is not None
    return Tokens(real, special, ids, restarts)


def _log_weight_of(batches: Sequence[AttentionCall]) -> Tensor | None:
    """The log-weights of several batches, one below the other."""
    given = [each.log_weight.expand(len(each.query), -1, -1, -1) for each in batches if each.log_weight is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else torch.cat(given)


def _bytes_of(call: AttentionCall) -> int:
    """Of its queries and keys."""
    return call.query.nbytes + call.key.nbytes


def _batch_of(waiting: _Waiting) -> tuple[Any, ...]:
    """Equal for sites of one batch whose log-weights are one tensor."""
    return *waiting.tokens.windows, id(waiting.call.log_weight)


def _kind_of(call: AttentionCall, tokens: CallTokens) -> tuple[Any, ...]:
    info = tokens.info
    tensors = call.query, call.key, *(() if call.log_weight is None else (call.log_weight,))
    parts = ((part.shape, part.dtype, part.device) for part in tensors)
    known = (
        tuple(getattr(side, name) is None for name in ("special", "ids", "restarts"))
        for side in (tokens.queries, tokens.keys)
    )
    options = call.is_causal, call.scale, call.softcap, tokens.rows
    return info.kind, info.in_decoder, info.itself, *parts, *known, *options


def _memory_left(device: torch.device) -> int:
    """Bytes that the device has left, those among them that PyTorch holds and does not use."""
    if device.type != "cuda":
        return 2**33
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
