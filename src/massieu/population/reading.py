"""What an observable of a cloud of tokens returns, and how processes that share a cloud add up."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.ops.sharded.agreement import Call, need_values, together
from massieu.ops.sharded.collectives import Group, gather, gather_unequal, largest
from massieu.ops.sharded.collectives import total as total_over

Processes = ProcessGroup | DeviceMesh | None
"""Who shares a cloud; None: nobody, this process has all of it. A shared cloud's tokens are numbered process by process."""


class ObservableReading(NamedTuple):
    """One observable of one cloud."""

    value: Float[Tensor, "*index"]
    """A number, or a vector of them such as a spectrum."""
    standard_error: Float[Tensor, "*index"] | None = None
    """Where one is honest: tokens depend on each other after one layer (S20), so most observables have none."""
    null: Float[Tensor, "*index"] | None = None
    """What the value would be for a cloud of as many independent Gaussian tokens."""


class Observable(Protocol):
    """Reads a cloud (n, d); a cloud that processes share is read with their `group` as a keyword."""

    def __call__(self, points: Float[Tensor, "n d"], /) -> Mapping[str, ObservableReading | Tensor | float]: ...


def joined(group: Processes) -> Group | None:
    """The processes, or None for this one alone.

    Raises:
        TypeError, ValueError: it is no group, or this process is not in it.
    """
    return None if group is None else Group.of(group)


def shared(
    function: str,
    points: Tensor,
    group: Processes,
    check: Callable[[], None],
    replicated: Mapping[str, Tensor] | None = None,
    **alike: object,
) -> Group | None:
    """Check the arguments, here and with the processes that share the cloud; who they are, or None for this one alone.

    Args:
        function: Its name, for errors.
        check: Raises what is wrong with them.
        replicated: Tensors that all processes must give alike.
        alike: Options that they must.

    Raises:
        TypeError, ValueError: as `check`; or what must be equal is not.
        RuntimeError: another process refused its arguments.
    """
    processes = joined(group)
    if processes is None:
        check()
        return None

    def checked() -> tuple[None, Call]:
        check()
        need_values(processes, points=points)
        told = {"batch": tuple(points.shape[:-2]), "dimension": points.shape[-1], "dtype": points.dtype}
        return None, Call(function, told | alike, replicated or {})

    together(processes, checked)
    return processes


def summed(tensor: Tensor, group: Group | None) -> Tensor:
    """Added up over the processes."""
    return tensor if group is None else total_over(tensor, group)


def greatest(tensor: Tensor, group: Group | None) -> Tensor:
    """The largest over the processes, entry by entry; without gradient where there are several."""
    return tensor if group is None else largest(tensor, group)


def counts(points: Tensor, group: Group | None) -> list[int]:
    """How many tokens each process has."""
    if group is None:
        return [points.shape[-2]]
    own = torch.tensor([points.shape[-2]], device=group.device)
    return gather(own, group).flatten().tolist()


def collected(tensor: Tensor, dim: int, group: Group | None) -> Tensor:
    """The tensors of all processes, one after the other along one dimension."""
    if group is None:
        return tensor
    lengths = gather(torch.tensor([tensor.shape[dim]], device=group.device), group).flatten().tolist()
    return torch.cat(gather_unequal(tensor, dim % tensor.ndim, lengths, group), dim)


def check_cloud(points: Tensor) -> None:
    """Raise unless `points` are a cloud.

    Raises:
        TypeError: it is no floating-point tensor.
        ValueError: fewer than two dimensions, no token, or tokens of no dimension.
    """
    if not isinstance(points, Tensor) or not points.is_floating_point():
        given = points.dtype if isinstance(points, Tensor) else type(points).__name__
        raise TypeError(f"points must be a floating-point tensor, got {given}")
    if points.ndim < 2 or points.shape[-2] == 0 or points.shape[-1] == 0:
        raise ValueError(f"points must have shape (*batch, n, d) with n, d ≥ 1, got {tuple(points.shape)}")


def check_single_cloud(points: Tensor) -> None:
    """Raise unless `points` are one cloud (n, d); raises as `check_cloud`."""
    check_cloud(points)
    if points.ndim != 2:
        raise ValueError(f"points must be one cloud of shape (n, d), got {tuple(points.shape)}")


def centred(points: Tensor, group: Group | None = None) -> tuple[Tensor, int]:
    """The cloud in float64 with mean zero, exactly zero where all tokens are equal; and how many tokens it has in all."""
    check_cloud(points)
    points = points.double()
    count = sum(counts(points, group))
    # Equal tokens minus one of them are exact zeros; equal tokens minus their rounded mean are not.
    first = points[..., :1, :]
    if group is not None:
        first = total_over(first if group.rank == 0 else torch.zeros_like(first), group)
    relative = points - first
    return relative - summed(relative.sum(-2, keepdim=True), group) / count, count
