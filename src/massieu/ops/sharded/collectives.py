"""Communication between processes that autograd can differentiate, any number of times.

A tensor is replicated (every process holds it, with the same numbers, and it is one variable of the objective) or the
process's own. Each operation below is linear, and its backward pass is another of them:

- `replicate`: replicated → own copies, for uses that differ between processes. Backward: `total`.
- `total`: own → replicated, the sum. Backward: `replicate`, which communicates nothing. So the gradient of a replicated
  result is that of the one objective, not multiplied by the number of processes.
- `gather`: own → own, every process's tensor stacked. Backward: each process gets
  the sum over all of what they have for it. Of that sum, the backward is `gather`.
- `exchange`: own → own, slice j goes to process j. Backward: `exchange`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Peers:
    """The processes that share a problem."""

    handle: ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: ProcessGroup | DeviceMesh | None) -> "Peers":
        """From a process group, a mesh of one dimension, or None for all processes.

        Raises:
            TypeError: it is something else.
            ValueError: there is no process group yet, the mesh has several dimensions, or this process is not in it.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("keys are sharded over a process group, and none exists: call init_process_group first")
        if group is None:
            group = dist.group.WORLD
        elif isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a mesh of one dimension, got {group.ndim}; take one by its name")
            group = group.get_group()
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group that shares the keys")
        return Peers(group, rank, dist.get_world_size(group))

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants tensors."""
        served = {device.type for device in self.handle._device_types}
        if "cpu" in served:
            return torch.device("cpu")
        return self.handle.bound_device_id or torch.device(min(served), torch.accelerator.current_device_index())


def replicate(tensor: Tensor, group: Peers) -> Tensor:
    """A replicated tensor, to be used in ways that differ between processes."""
    return _Linear.apply(tensor, None, _replicated, group)  # pyright: ignore[reportReturnType]


def total(tensor: Tensor, group: Peers, known: Tensor | None = None) -> Tensor:
    """The sum over processes, replicated; where its value is `known`, nothing is communicated."""
    return _Linear.apply(tensor, known, _summed, group)  # pyright: ignore[reportReturnType]


def gather(tensor: Tensor, group: Peers) -> Tensor:
    """All processes' tensors, stacked."""
    return _Linear.apply(tensor, None, gathered, group)  # pyright: ignore[reportReturnType]


def exchange(tensor: Tensor, group: Peers) -> Tensor:
    """From a stack of one slice for each process, the stack of those that the processes have for this one."""
    return _Linear.apply(tensor, None, _exchanged, group)  # pyright: ignore[reportReturnType]


def gather_unequal(tensor: Tensor, dim: int, lengths: Sequence[int], group: Peers) -> list[Tensor]:
    """Each process's tensor, of that length along one dimension; what is sent is padded to the longest."""
    stacked = gather(padded(tensor, dim, max(lengths)), group)
    return [part.narrow(dim, 0, length) for part, length in zip(stacked, lengths, strict=True)]


def exchange_unequal(tensors: Sequence[Tensor], dim: int, group: Peers) -> Tensor:
    """Tensor j goes to process j, whatever its length along one dimension; those that came, stacked."""
    longest = max(tensor.shape[dim] for tensor in tensors)
    stacked = exchange(torch.stack([padded(tensor, dim, longest) for tensor in tensors]), group)
    return stacked.narrow(dim + 1, 0, tensors[group.rank].shape[dim])


def padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """With zeros up to a length along one dimension."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, length - tensor.shape[dim]))


def largest(tensor: Tensor, group: Peers) -> Tensor:
    """The largest of all processes, entry by entry; without gradient."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if result.numel():
        dist.all_reduce(result, dist.ReduceOp.MAX, group=group.handle)
    return result


def _widened(tensor: Tensor) -> Tensor:
    """A contiguous copy that sums are not rounded in."""
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.clone(memory_format=torch.contiguous_format)


def _summed(tensor: Tensor, group: Peers) -> Tensor:
    result = _widened(tensor)
    if result.numel():
        dist.all_reduce(result, group=group.handle)
    return result.to(tensor.dtype)


def gathered(tensor: Tensor, group: Peers) -> Tensor:
    """All processes' tensors, stacked, without derivative."""
    result = tensor.new_empty(group.size, *tensor.shape)
    if tensor.numel():
        dist.all_gather_single(result.view(-1), tensor.detach().contiguous().view(-1), group=group.handle)
    return result


def _scattered(tensor: Tensor, group: Peers) -> Tensor:
    wide = _widened(tensor)
    result = torch.empty_like(wide[0])
    if result.numel():
        dist.reduce_scatter_single(result.view(-1), wide.view(-1), group=group.handle)
    return result.to(tensor.dtype)


def _exchanged(tensor: Tensor, group: Peers) -> Tensor:
    source = tensor.detach().contiguous()
    result = torch.empty_like(source)
    if result.numel():
        dist.all_to_all_single(result, source, group=group.handle)
    return result


def _replicated(tensor: Tensor, group: Peers) -> Tensor:
    return tensor.view_as(tensor)


_TRANSPOSED = {
    _replicated: _summed,
    _summed: _replicated,
    gathered: _scattered,
    _scattered: gathered,
    _exchanged: _exchanged,
}
"""Of each linear operation, the one that is its backward pass."""


class _Linear(torch.autograd.Function):
    """(tensor, known result or None, operation, group) ↦ operation(tensor, group)."""

    @staticmethod
    def forward(tensor: Tensor, known: Tensor | None, operation: Callable[..., Tensor], group: Peers) -> Tensor:
        return operation(tensor, group) if known is None else known.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.operation, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return _Linear.apply(cotangents[0], None, _TRANSPOSED[ctx.operation], ctx.group), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Linear.apply(tangents[0], None, ctx.operation, ctx.group)
