"""How many clusters a cloud of tokens has (N5)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_values, number, real, whole_number
from massieu.foundation.doors import count, door
from massieu.foundation.values import promoted_dtype
from massieu.ops.sharded.collectives import Peers
from massieu.population.reading import ObservableReading, Processes, check_cloud, greatest, shared, summed

_SHARE_OF_LENGTH = 0.1


class ClusterCountResult(NamedTuple):
    """What `cluster_count` found."""

    clusters: Float[Tensor, "*batch"]
    """How many leaders were needed, a whole number in float64; `limit` where that many did not suffice."""
    covered: Float[Tensor, "*batch"]
    """The share of the tokens near a leader: 1 unless the limit was met."""
    largest: Float[Tensor, "*batch"]
    """The share of the tokens that the largest cluster has."""


@torch.no_grad()
def cluster_count(
    points: Float[Tensor, "*batch n d"], *, radius: float | None = None, limit: int = 128, group: Processes = None
) -> ClusterCountResult:
    """Clusters by leaders: the first token that is near no leader becomes one, and takes all that are near it and free.

    Where the tokens lie in groups of diameter at most `radius` that are farther than it apart, these are found exactly. For
    other clouds the leaders are a largest set of tokens farther than `radius` apart (none can be added): their number is
    between the numbers of balls of radius `radius` and of `radius`/2 that the cloud needs. It may depend on the order of
    the tokens. Memory is linear in n·d, time in n·d·clusters. A cloud that holds a NaN or an infinity gives NaN, as with the
    other observables, and leaves the other clouds of its batch untouched.

    Args:
        points: The tokens.
        radius: How near; None: a tenth of the root of the mean squared length of the tokens, on the unit sphere about 6°.
        limit: Of leaders.
        group: Processes that share the tokens.

    Raises:
        ValueError: no cloud, a radius that is not finite or below 0, a limit below 1.
        TypeError: no floating-point tensor, a radius that is no number, a limit that is no integer.
    """

    def check() -> None:
        check_cloud(points)
        check_values(points=points)
        whole_number("limit", limit, least=1)
        if radius is not None:
            number("radius", radius, least=0)

    processes = shared("cluster_count", points, group, check, radius=radius, limit=limit)
    batch, (tokens, width) = points.shape[:-2], points.shape[-2:]
    cloud = points.reshape(-1, tokens, width).to(promoted_dtype(points))
    finite = cloud.isfinite().all(-1).all(-1)
    broken = greatest((~finite).double(), processes) > 0
    cloud = torch.where(broken[:, None, None], 0.0, cloud)
    free = torch.ones_like(cloud[..., 0], dtype=torch.bool)
    size = summed(torch.full((len(cloud),), tokens, device=cloud.device), processes)
    cloud, unit = _in_units(cloud, processes)
    near = _radius(cloud, None if radius is None else radius / unit, processes)
    count, largest, covered = (torch.zeros_like(near) for _ in range(3))
    item, rank = torch.arange(len(cloud), device=cloud.device), 0 if processes is None else processes.rank
    for _ in range(limit):
        own = free.any(-1)
        # The first free token, that of the process of the lowest rank that has one.
        first = -greatest(torch.where(own, -float(rank), -torch.inf), processes)
        if not bool(first.isfinite().any()):
            break
        mine = own & (first == rank)
        leader = torch.where(mine.unsqueeze(-1), cloud[item, free.int().argmax(-1)], 0.0)
        leader = summed(leader, processes)
        taken = free & ((cloud - leader.unsqueeze(1)).norm(dim=-1) <= near.to(cloud.dtype).unsqueeze(-1))
        free = free & ~taken
        share = summed(taken.sum(-1).double(), processes) / size
        count, covered, largest = count + (share > 0), covered + share, torch.maximum(largest, share)
    return ClusterCountResult(
        *(torch.where(broken, torch.nan, each).reshape(batch) for each in (count, covered, largest))
    )


@door(limit=count, radius=real)
@dataclass(frozen=True)
class Clusters:
    """Observable: the number of clusters of tokens, and the largest cluster's share of them.

    Example:
        >>> import torch
        >>> from massieu.population import Clusters
        >>> readings = Clusters()(torch.tensor([[0.0], [0.1], [9.0]]))
        >>> readings["clusters"].value.item()
        2.0
    """

    radius: float | None = None
    limit: int = 128

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        found = cluster_count(points, radius=self.radius, limit=self.limit, group=group)
        return {"clusters": ObservableReading(found.clusters), "largest_cluster": ObservableReading(found.largest)}


def _in_units(cloud: Tensor, processes: Peers | None) -> tuple[Tensor, Tensor]:
    """Each cloud by a power of two, so that squares neither overflow nor vanish, and that power; this rounds nothing."""
    size = greatest(cloud.abs().amax((-2, -1)).double(), processes)
    exponent = torch.where(size == 0, 0, torch.frexp(size).exponent)
    return torch.ldexp(cloud.double(), -exponent[:, None, None]).to(cloud.dtype), torch.ldexp(
        torch.ones_like(size), exponent
    )


def _radius(cloud: Tensor, radius: Tensor | None, processes: Peers | None) -> Tensor:
    if radius is not None:
        return radius
    squares = cloud.square().sum(-1).double().sum(-1)
    sums = summed(torch.stack([squares, torch.full_like(squares, cloud.shape[1])]), processes)
    return _SHARE_OF_LENGTH * (sums[0] / sums[1]).sqrt()
