"""A check that all processes make the same call: one small message before they begin, and one error on all if they do not.

Each process sends eight integers: whether it refuses its arguments, a digest of the arguments that must be equal on all, a
digest of the replicated tensors, and the few numbers that may differ. Only if the digests disagree are the arguments sent,
for the error that all processes raise.
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
    """The arguments of one process's call."""

    function: str
    alike: Mapping[str, object]
    """Settings that must be equal on all processes, by their names in errors; compared as `repr` prints them."""
    replicated: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that must be equal; floating-point ones to rounding, as every process may have computed its own."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Numbers that may differ; every process receives those of all."""

    @property
    def table(self) -> dict[str, str]:
        """All that must be equal except the tensors' values, in the order in which errors name it."""
        table = {"function": self.function}
        for name, setting in self.alike.items():
            table[name] = repr(setting)
        for name, tensor in self.replicated.items():
            table[f"shape of {name}"] = repr(tuple(tensor.shape))
            table[f"dtype of {name}"] = repr(tensor.dtype)
        table["kind of arguments"] = repr((sorted(self.replicated), sorted(self.numbers)))
        return table


def together(group: Peers, check: Callable[[], tuple[Checked, Call]]) -> tuple[Checked, dict[str, list[int]]]:
    """Check this process's arguments, and that the processes agree.

    A process that refuses its arguments takes part in the message all the same: so all stop, and none waits for it.

    Args:
        check: checks the arguments, and returns them with the call; what it raises is raised here.

    Returns:
        The checked arguments, and for each name in `Call.numbers` the numbers of all processes.

    Raises:
        RuntimeError: another process refused its arguments; the message gives its reason.
        ValueError: an argument that must be equal differs between processes.
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
    return checked, {name: [row[3 + place] for row in rows] for place, name in enumerate(call.numbers)}


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
    """Which derivatives a process needs, for `Call.alike`: computing them communicates, so all processes must need the same.

    Args:
        name: of the first group of tensors, in errors.
        own: that group; entries that are no tensors are left out.
        others: all other tensors.
    """
    own_tensors = [tensor for tensor in own if isinstance(tensor, Tensor)]
    tensors = own_tensors + [tensor for tensor in others if isinstance(tensor, Tensor)]
    is_enabled = torch.is_grad_enabled()
    in_forward_mode = forward_ad._current_level >= 0
    return {
        f"requires_grad of {name}": is_enabled and any(tensor.requires_grad for tensor in own_tensors),
        "requires_grad of any tensor": is_enabled and any(tensor.requires_grad for tensor in tensors),
        "presence of a tangent": in_forward_mode
        and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors),
    }


def digest(tensor: Tensor) -> Tensor:
    """An integer that depends on all bits of a tensor, the same on every device.

    Σ word·factor(place) modulo 2⁶⁴ with odd, pseudo-random factors. A change of a single word always changes it, as an odd
    factor has an inverse; changes of several words leave it with a probability of 2⁻³² at most.
    """
    values = unwrapped(tensor.detach()).detach().reshape(-1)
    words = values.view({1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    block = _BLOCK if words.device.type == "cpu" else 128 * _BLOCK
    for first in range(0, len(words), block):
        part = words[first : first + block].long()
        total += (part * _factors(first, len(part), words.device)).sum()
    return total


_BLOCK = 1 << 15
"""Words at a time on the CPU: their factors stay in a second-level cache. Other devices take more, as calls cost more there."""


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit integers, one for each place, by the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = torch.arange(first + 1, first + count + 1, device=device) * -7046029254386353131
    state = (state ^ (state >> 30)) * -4658895280553007687
    state = (state ^ (state >> 27)) * -7723592293110705685
    return (state ^ (state >> 31)) | 1


def _header(call: Call, group: Peers) -> Tensor:
    """The message of a process that accepts its arguments: 0, two digests, and the numbers that may differ."""
    digests = [digest(tensor) for tensor in call.replicated.values()]
    # Stacked, so that the device is waited for once.
    contents = torch.stack(digests).tolist() if digests else []
    numbers = [0, _hashed(call.table), _hashed(contents), *call.numbers.values()]
    return torch.tensor(numbers + [0] * (MESSAGE_LENGTH - len(numbers)), device=group.device)


def _hashed(value: object) -> int:
    """A hash of what `repr` prints, the same in all processes, as `hash` is not."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


def _raise_for_others(rows: list[list[int]], group: Peers) -> None:
    """Raise a RuntimeError if the messages, a row for each process, say that a process refused its arguments."""
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        reason = _texts("", group)[refused[0]]
        raise RuntimeError(f"process {refused[0]} refused its arguments: {reason}")


def _texts(text: object, group: Peers) -> list:
    """The texts, or tables, of all processes. It takes several messages, and is called before an error only."""
    texts: list = [None] * group.size
    dist.all_gather_object(texts, text, group=group.handle)
    return texts


def _difference(table: dict[str, str], group: Peers) -> str:
    """The error's sentence: the first setting that differs, and between which processes."""
    tables: list[dict[str, str]] = _texts(table, group)
    for name, setting in tables[0].items():
        for rank, other in enumerate(tables):
            if other.get(name) != setting:
                values = f"got {setting} on process 0 and {other.get(name, 'none')} on process {rank}"
                return f"all processes must give the same {name}, {values}"
    return "all processes must call the same function in the same way"


def _check_close(name: str, tensor: Tensor, group: Peers) -> None:
    """Raise on all processes unless a tensor is that of process 0; a floating-point one, to rounding.

    Two processes that compute the same numbers may round differently, if only because memory is aligned differently. So
    entries may differ by eps^⅔ of the largest of their row, 2·10⁻⁵ in float32. Some layers make that much of a rounding
    error; another batch, step or seed makes far more.

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
