"""Attention calls of one forward pass that are read as one, with the heads of all of them in a row.

On an accelerator the statistics of one call are some hundred small operations, each of which takes the host as long to begin
as the device to do. Of the calls of all layers together they take the host hardly longer than of one. Queries and keys are
copied into common memory when a call is made, so that nothing which the model does to them later is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.statistics.group import CallTokens

DEVICES = frozenset({"cuda"})
"""Types of devices on which calls are joined."""
SHARE = 64
"""Queries and keys that wait take at most one in so many bytes of the device's memory."""


@dataclass(frozen=True, eq=False)
class JoinedCalls:
    """Calls that were made one after the other and differ in their queries and keys alone.

    Attributes:
        call: the heads of all of them, without values and outputs.
        tokens: of the first one; those of the others are equal.
        sites: where each was made.
    """

    call: AttentionCall
    tokens: CallTokens
    sites: tuple[SiteInfo, ...]


class WaitingCalls:
    """Calls that wait to be read together.

    Args:
        sites: those of the model, of which a pass has no more calls than these that are joined.
    """

    def __init__(self, sites: Sequence[SiteInfo]) -> None:
        self._sites = len(sites)
        self._kind: tuple[Any, ...] | None = None
        self._waiting: list[SiteInfo] = []

    @staticmethod
    def are_alike(call: AttentionCall) -> bool:
        """Whether this call could be joined with others: nothing but its queries and keys is its own."""
        tensors = (call.query, call.key)
        device = call.query.device.type
        shared = call.log_weight is None or call.log_weight.dim() < 3 or call.log_weight.shape[-3] == 1
        return (
            device in DEVICES
            and all(type(tensor) is Tensor and tensor.is_floating_point() for tensor in tensors)
            and not torch.is_autocast_enabled(device)
            and call.grade == "full"
            and call.sink is None
            and call.seen is None
            and call.weights is None
            and call.query.numel() > 0
            and call.key.numel() > 0
            and shared
        )

    def fits(self, call: AttentionCall, tokens: CallTokens) -> bool:
        """Whether there is room for this call beside those that wait, and it is of their kind."""
        return not self._waiting or (_same(self._kind, _kind_of(call, tokens)) and len(self._waiting) < self._room)

    def add(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Copy a call's queries and keys behind those that wait."""
        if not self._waiting:
            self._kind = _kind_of(call, tokens)
            self._first = call
            self._tokens = tokens
            self._room = max(1, min(self._sites, _room(call)))
            # Not memory of inference mode, into which nothing may be copied outside of it.
            with torch.inference_mode(False):
                self._query, self._key = (_memory(part, self._room) for part in (call.query, call.key))
        place = len(self._waiting)
        with torch.no_grad():
            self._query[:, place].copy_(call.query)
            self._key[:, place].copy_(call.key)
        self._waiting.append(tokens.info)

    def take(self) -> JoinedCalls | None:
        """The calls that wait, which wait no longer; None if there are none."""
        if not self._waiting:
            return None
        sites = tuple(self._waiting)
        # Room that was not used stands behind each sequence's heads, and is left out without a copy.
        query, key = (part[:, : len(sites)].flatten(1, 2) for part in (self._query, self._key))
        empty = {
            "value": key.new_empty(*key.shape[:3], 0),
            "output": query.new_empty(query.shape[0], query.shape[2], query.shape[1], 0),
        }
        joined = JoinedCalls(replace(self._first, query=query, key=key, **empty), self._tokens, sites)
        self.clear()
        return joined

    def clear(self) -> None:
        """Nothing waits."""
        self._waiting = []
        self._kind = None
        for name in ("_first", "_tokens", "_query", "_key"):
            vars(self).pop(name, None)


def _memory(part: Tensor, room: int) -> Tensor:
    batch, *shape = part.shape
    return part.new_empty(batch, room, *shape)


def _room(call: AttentionCall) -> int:
    """How many calls like this one may wait."""
    taken = call.query.nbytes + call.key.nbytes
    device = call.query.device
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**33
    return memory // SHARE // taken


def _kind_of(call: AttentionCall, tokens: CallTokens) -> tuple[Any, ...]:
    """What calls that are joined have in common."""
    info = tokens.info
    parts = ((part.shape, part.dtype, part.device) for part in (call.query, call.key))
    options = call.log_weight, call.is_causal, call.scale, call.softcap
    return info.kind, info.in_decoder, info.itself, *parts, *options


def _same(kind: tuple[Any, ...] | None, other: tuple[Any, ...]) -> bool:
    """Whether both are equal, log-weights being the same tensor."""
    return kind is not None and all(
        one is another if isinstance(one, Tensor) or isinstance(another, Tensor) else one == another
        for one, another in zip(kind, other, strict=True)
    )
