"""What an observable of a cloud of tokens returns, and how processes that share a cloud add up."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.foundation.arguments import check_shape, floating
from massieu.ops.sharded.agreement import Call, check_sendable, together
from massieu.ops.sharded.collectives import Peers, gather, gather_unequal, largest
from massieu.ops.sharded.collectives import total as total_over

Checked = TypeVar("Checked")
Processes = ProcessGroup | DeviceMesh | None
"""Who shares a cloud; None: nobody, this process has all of it. A shared cloud's tokens are numbered process by process."""


class ObservableReading(NamedTuple):
    """One observable of one cloud.

    Example:
        >>> import torch
        >>> from massieu.population import ObservableReading
        >>> ObservableReading(torch.tensor(2.0), null=torch.tensor(0.0)).standard_error is None
        True
    """

    value: Float[Tensor, "*index"]
    """A number, or a vector of them such as a spectrum."""
    standard_error: Float[Tensor, "*index"] | None = None
    """None for most observables: tokens depend on each other after one layer (S20), so that no error would be honest."""
    null: Float[Tensor, "*index"] | None = None
    """What the value would be for a cloud of as many independent Gaussian tokens."""


class Observable(Protocol):
    """Reads a cloud (n, d); a cloud that processes share is read with their `group` as a keyword."""

    def __call__(self, points: Float[Tensor, "n d"], /) -> Mapping[str, ObservableReading | Tensor | float]: ...


def peers_of(group: Processes) -> Peers | None:
    """The processes that share a cloud, or None for this one alone; raises as `Peers.of`."""
    return None if group is None else Peers.of(group)


def check_agreement(
    group: Peers,
    function: str,
    points: Tensor,
    check: Callable[[], Checked],
    replicated: Mapping[str, Tensor],
    alike: Mapping[str, object],
) -> Checked:
    """What `check` returns, after all processes that share a cloud have checked that they were called alike.

    Args:
        group: The processes.
        function: Name of the function that was called, for errors.
        points: The tokens of this process.
        check: Raises an error if the arguments are wrong.
        replicated: Tensors that must be equal on all processes.
        alike: Options that must be equal on all processes.

    Raises:
        TypeError, ValueError: as `check`; or tensors or options that must be equal are not.
        RuntimeError: another process refused its arguments.
    """

    def checked() -> tuple[Checked, Call]:
        value = check()
        check_sendable(group, points=points)
        layout = {"batch": tuple(points.shape[:-2]), "dimension": points.shape[-1], "dtype": points.dtype}
        return value, Call(function, layout | dict(alike), replicated)

    return together(group, checked)[0]


def check_call(
    function: str,
    points: Tensor,
    group: Processes,
    check: Callable[[], object],
    replicated: Mapping[str, Tensor] | None = None,
    **alike: object,
) -> Peers | None:
    """Check the arguments, also against those of the processes that share the cloud, and return these processes."""
    processes = peers_of(group)
    if processes is None:
        check()
    else:
        check_agreement(processes, function, points, check, replicated or {}, alike)
    return processes


def summed(tensor: Tensor, group: Peers | None) -> Tensor:
    """The sum over the processes, entry by entry."""
    return tensor if group is None else total_over(tensor, group)


def greatest(tensor: Tensor, group: Peers | None) -> Tensor:
    """The largest over the processes, entry by entry; without gradient where there are several."""
    return tensor if group is None else largest(tensor, group)


def token_counts(points: Tensor, group: Peers | None) -> list[int]:
    """How many tokens (*batch, n, d) each process has."""
    if group is None:
        return [points.shape[-2]]
    return gather(torch.tensor([points.shape[-2]], device=group.device), group).flatten().tolist()


def gather_tokens(tensor: Tensor, group: Peers | None) -> Tensor:
    """The tokens (*batch, n, d) of all processes, one after the other."""
    if group is None:
        return tensor
    return torch.cat(gather_unequal(tensor, tensor.ndim - 2, token_counts(tensor, group), group), -2)


def check_cloud(points: Tensor, name: str = "points") -> None:
    """Raise a TypeError or ValueError unless it is a cloud (*batch, n, d) with at least one token and dimension."""
    shape = floating(name, points).shape
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"{name} must have shape (*batch, n, d) with n, d ≥ 1, got {tuple(shape)}")


def check_single_cloud(points: Tensor, name: str = "points") -> None:
    """Raise unless it is one cloud (n, d), as `check_cloud`."""
    check_cloud(points, name)
    check_shape(name, points, ("n", "d"))


def centred(points: Tensor, group: Peers | None = None) -> tuple[Tensor, int]:
    """The cloud in float64 with mean zero (exactly zero if all tokens are equal), and how many tokens all processes have."""
    check_cloud(points)
    points = points.double()
    count = sum(token_counts(points, group))
    # Equal tokens minus one of them are exact zeros; equal tokens minus their rounded mean are not.
    first = points[..., :1, :]
    if group is not None:
        first = total_over(first if group.rank == 0 else torch.zeros_like(first), group)
    relative = points - first
    return relative - summed(relative.sum(-2, keepdim=True), group) / count, count
