"""That all processes were called alike: one small message before they begin, and one error on all where they were not.

Each process says in eight integers whether it refuses its arguments, a digest of what must be equal on all, one of the
replicated tensors, and the few numbers that may differ. Only where these disagree is more sent: what was given, for the
error that all of them raise.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from massieu.foundation.transforms import layers, unwrapped
from massieu.ops.sharded.collectives import Peers, gathered

Checked = TypeVar("Checked")

MESSAGE_LENGTH = 8
"""Integers of the message."""


@dataclass(frozen=True)
class Call:
    """What a process was called with."""

    function: str
    alike: Mapping[str, object]
    """By its name in the error, each thing that must be equal on all processes; compared as `repr` prints it."""
    replicated: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that must be equal; floating-point ones to rounding, as every process may have computed its own."""
    own: Mapping[str, int] = field(default_factory=dict)
    """Numbers that may differ, of which every process gets all."""

    @property
    def table(self) -> dict[str, str]:
        """All that must be equal but the tensors' numbers, in the order in which errors name it."""
        shapes = {
            f"{part} of {name}": repr(thing)
            for name, tensor in self.replicated.items()
            for part, thing in (("shape", tuple(tensor.shape)), ("dtype", tensor.dtype))
        }
        numbers = {name: repr(thing) for name, thing in self.alike.items()}
        names = repr((sorted(self.replicated), sorted(self.own)))
        return {"function": self.function} | numbers | shapes | {"kind of arguments": names}


def together(group: Peers, check: Callable[[], tuple[Checked, Call]]) -> tuple[Checked, dict[str, list[int]]]:
    """Check this process's arguments, and that the processes agree; also each process's own numbers, by their names.

    Every process takes part, also one that refuses its arguments: so that all stop, and none waits for it.

    Args:
        check: what was checked, and what the process was called with.

    Raises:
        RuntimeError: another process refused its arguments, for a reason that the message has.
        ValueError: what must be equal differs between processes.
        What `check` raises is raised here.
    """
    try:
        checked, call = check()
        header = _header(call, group)
    except Exception as error:
        gathered(torch.tensor([1, *[0] * (MESSAGE_LENGTH - 1)], device=group.device), group)
        _texts(f"{type(error).__name__}: {error}", group)
        raise
    rows = gathered(header, group).tolist()
    _raise_for_others(rows, group)
    if len({row[1] for row in rows}) > 1:
        raise ValueError(_difference(call.table, group))
    if len({row[2] for row in rows}) > 1:
        for name, tensor in call.replicated.items():
            _check_close(name, tensor, group)
    return checked, {name: [row[3 + place] for row in rows] for place, name in enumerate(call.own)}


def check_sendable(group: Peers, **tensors: object) -> None:
    """Raise unless the group can send what is computed from these tensors.

    Raises:
        ValueError: one is on a device that the group's backend does not serve, or has no values.
        RuntimeError: one is of a `torch.func.vmap`.
    """
    served = {device.type for device in group.handle._device_types}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type not in served:
            raise ValueError(
                f"{name} must be on a device that the group's backend {dist.get_backend(group.handle)} serves "
                f"({', '.join(sorted(served))}), got {tensor.device}"
            )
        if any(map(torch._C._functorch.is_batchedtensor, layers(tensor))):  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(
                f"sharded functions cannot be inside torch.func.vmap, which has {name}: give them a batch instead"
            )


def derivatives_wanted(name: str, own: Sequence[object], others: Sequence[object]) -> dict[str, object]:
    """For `Call.alike`: whether `own`, or any tensor, has a gradient, or a tangent of forward mode: both communicate."""
    given = [tensor for tensor in (*own, *others) if isinstance(tensor, Tensor)]
    enabled, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    tangent = forward and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)
    of_own = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in own)
    return {
        f"requires_grad of {name}": enabled and of_own,
        "requires_grad of any tensor": enabled and any(tensor.requires_grad for tensor in given),
        "presence of a tangent": tangent,
    }


def digest(tensor: Tensor) -> Tensor:
    """An integer of a tensor's bits, of all places and values: the same wherever it is computed.

    Σ word·factor(place) modulo 2⁶⁴ with odd factors as good as random: no change of a single word goes unnoticed, and of
    several with a probability of 2⁻³² at most.
    """
    plain = unwrapped(tensor.detach()).detach().reshape(-1)
    words = plain.view({1: torch.uint8, 2: torch.int16}.get(plain.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    block = _BLOCK if words.device.type == "cpu" else 128 * _BLOCK
    for first in range(0, len(words), block):
        part = words[first : first + block].long()
        total += (part * _factors(first, len(part), words.device)).sum()
    return total


_BLOCK = 1 << 15
"""Words at once: their factors stay in a second-level cache; where calls cost more than memory, more of them."""


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit integers, one a place: the multiplications and shifts of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = torch.arange(first + 1, first + count + 1, device=device) * -7046029254386353131
    state = (state ^ (state >> 30)) * -4658895280553007687
    state = (state ^ (state >> 27)) * -7723592293110705685
    return (state ^ (state >> 31)) | 1


def _header(call: Call, group: Peers) -> Tensor:
    digests = [digest(tensor) for tensor in call.replicated.values()]
    # One wait for the device.
    contents = torch.stack(digests).tolist() if digests else []
    numbers = [0, _hashed(call.table), _hashed(contents), *call.own.values()]
    return torch.tensor(numbers + [0] * (MESSAGE_LENGTH - len(numbers)), device=group.device)


def _hashed(thing: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(thing).encode(), digest_size=8).digest(), signed=True)


def _raise_for_others(rows: list[list[int]], group: Peers) -> None:
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        reason = _texts("", group)[refused[0]]
        raise RuntimeError(f"process {refused[0]} refused its arguments: {reason}")


def _texts(text: object, group: Peers) -> list:
    """What every process has to say; only before an error, as it costs several messages."""
    found: list = [None] * group.size
    dist.all_gather_object(found, text, group=group.handle)
    return found


def _difference(table: dict[str, str], group: Peers) -> str:
    """What differs first, and between which processes."""
    tables: list[dict[str, str]] = _texts(table, group)
    for name, thing in tables[0].items():
        for rank, other in enumerate(tables):
            if other.get(name) != thing:
                given = f"got {thing} on process 0 and {other.get(name, 'none')} on process {rank}"
                return f"all processes must give the same {name}, {given}"
    return "all processes must call the same function in the same way"


def _check_close(name: str, tensor: Tensor, group: Peers) -> None:
    """Raise on all processes unless a tensor is that of process 0; a floating-point one, to rounding.

    Two processes that compute the same numbers seldom round alike: memory that is aligned differently is enough. So
    entries may differ by eps^⅔ of the largest of their row, 2·10⁻⁵ in float32: what some layers may make of rounding,
    and far less than what another batch, another step or another seed would.

    Raises:
        ValueError: they differ.
    """
    own = unwrapped(tensor.detach()).detach().clone(memory_format=torch.contiguous_format)
    first = own.clone()
    dist.broadcast(first, group=group.handle, group_src=0)
    same = own == first
    if tensor.is_floating_point():
        size = first.abs().nan_to_num(0.0, 0.0)
        size = size.amax(-1, keepdim=True) if size.ndim else size
        near = (own - first).abs() <= torch.finfo(own.dtype).eps ** (2 / 3) * size
        same = same | near | (own.isnan() & first.isnan())
    wrong = gathered((~same).any().to(device=group.device, dtype=torch.uint8), group).tolist()
    if any(wrong):
        place = f"that of process {wrong.index(1)} is not that of process 0"
        raise ValueError(f"all processes must give the same {name}, and {place}")
