"""How many clusters a cloud of tokens has (N5)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_values, number, real, whole_number
from massieu.foundation.doors import count, door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import promoted_dtype
from massieu.ops.sharded.collectives import Peers
from massieu.population.reading import ObservableReading, Processes, check_call, check_cloud, greatest, summed

_SHARE_OF_LENGTH = 0.1
"""The default radius, as a share of the root mean squared length of the tokens."""


class ClusterCountResult(NamedTuple):
    """The clusters of a cloud."""

    clusters: Float[Tensor, "*batch"]
    """Number of leaders, a whole number in float64; `limit` if that many were not enough."""
    covered: Float[Tensor, "*batch"]
    """Share of the tokens that are near a leader: 1 unless the limit was reached."""
    largest: Float[Tensor, "*batch"]
    """Share of the tokens in the largest cluster."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@torch.no_grad()
def cluster_count(
    points: Float[Tensor, "*batch n d"], *, radius: float | None = None, limit: int = 128, group: Processes = None
) -> ClusterCountResult:
    """Clusters by leaders: the first token that is near no leader becomes one, with all free tokens near it as its cluster.

    If the tokens lie in groups of diameter at most `radius` with gaps larger than `radius`, these groups are the clusters. For
    other clouds the leaders are a set of tokens farther than `radius` apart to which none can be added. Their number lies
    between the numbers of balls of radius `radius` and of `radius`/2 that cover the cloud, and may depend on the order of
    the tokens. Memory is linear in n·d, time in n·d·clusters. A cloud that holds a NaN or an infinity gives NaN, as with the
    other observables, and leaves the other clouds of its batch untouched.

    Args:
        points: The tokens.
        radius: The distance at which a token is near a leader; None: a tenth of the root mean squared length of the tokens,
            on the unit sphere about 6°.
        limit: The largest number of leaders.
        group: Processes that share the tokens.

    Raises:
        ValueError: the points are no cloud, the radius is negative or not finite, or the limit is below 1.
        TypeError: the points are no floating-point tensor, the radius is no number, or the limit is no integer.
    """

    def check() -> None:
        check_cloud(points)
        check_values(points=points)
        whole_number("limit", limit, least=1)
        if radius is not None:
            number("radius", radius, least=0)

    processes = check_call("cluster_count", points, group, check, radius=radius, limit=limit)
    *batch, tokens, width = points.shape
    cloud = points.reshape(-1, tokens, width).to(promoted_dtype(points))
    is_finite = cloud.isfinite().all(-1).all(-1)
    is_broken = greatest((~is_finite).double(), processes) > 0
    cloud = torch.where(is_broken[:, None, None], 0.0, cloud)
    num_tokens = summed(torch.full((len(cloud),), tokens, device=cloud.device), processes)
    cloud, unit = _in_units(cloud, processes)
    near = _radius(cloud, None if radius is None else radius / unit, processes)
    item = torch.arange(len(cloud), device=cloud.device)
    rank = 0 if processes is None else processes.rank
    is_free = torch.ones_like(cloud[..., 0], dtype=torch.bool)
    clusters = torch.zeros_like(near)
    covered = torch.zeros_like(near)
    largest = torch.zeros_like(near)
    for _ in range(limit):
        has_free = is_free.any(-1)
        # The next leader is the first free token of the process with the lowest rank that has one.
        leader_rank = -greatest(torch.where(has_free, -float(rank), -torch.inf), processes)
        if not bool(leader_rank.isfinite().any()):
            break
        is_here = has_free & (leader_rank == rank)
        # The sum over the processes sends the leader to all, since the others add zeros.
        leader = torch.where(is_here.unsqueeze(-1), cloud[item, is_free.int().argmax(-1)], 0.0)
        leader = summed(leader, processes)
        is_near = (cloud - leader.unsqueeze(1)).norm(dim=-1) <= near.to(cloud.dtype).unsqueeze(-1)
        is_taken = is_free & is_near
        is_free = is_free & ~is_taken
        # 0 for clouds of the batch that have no free token left.
        share = summed(is_taken.sum(-1).double(), processes) / num_tokens
        clusters = clusters + (share > 0)
        covered = covered + share
        largest = torch.maximum(largest, share)
    return ClusterCountResult(
        *(torch.where(is_broken, torch.nan, number).reshape(batch) for number in (clusters, covered, largest))
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
        count = cluster_count(points, radius=self.radius, limit=self.limit, group=group)
        return {"clusters": ObservableReading(count.clusters), "largest_cluster": ObservableReading(count.largest)}


def _in_units(cloud: Tensor, processes: Peers | None) -> tuple[Tensor, Tensor]:
    """Each cloud divided by a power of two, so that squares neither overflow nor vanish, and that power; rounds nothing."""
    size = greatest(cloud.abs().amax((-2, -1)).double(), processes)
    exponent = torch.where(size == 0, 0, torch.frexp(size).exponent)
    scaled = torch.ldexp(cloud.double(), -exponent[:, None, None]).to(cloud.dtype)
    return scaled, torch.ldexp(torch.ones_like(size), exponent)


def _radius(cloud: Tensor, radius: Tensor | None, processes: Peers | None) -> Tensor:
    if radius is not None:
        return radius
    squares = cloud.square().sum(-1).double().sum(-1)
    sums = summed(torch.stack([squares, torch.full_like(squares, cloud.shape[1])]), processes)
    return _SHARE_OF_LENGTH * (sums[0] / sums[1]).sqrt()
