"""What process 1 gives differently, or wrong, where processes share a population; for `test_disagreements`."""

import torch
from tests.population.cases import draw, layer

from massieu.population import CloudMoments, Clusters, Flow, Renormalisation, TraceRenormalisation, covariance_spectrum
from massieu.population.cloud_shape import projected_cumulants, squared_gaussian_distance
from massieu.population.clusters import cluster_count
from massieu.population.self_attention import self_attention_levels

POINTS = draw(6, 4, seed=1)
DIRECTIONS = draw(3, 4, seed=2)
EYE = torch.eye(4, dtype=torch.float64)


def flow(layers, observables=None):
    """A function that takes a process's points through these layers, over a cloud that processes share."""
    observables = (CloudMoments(),) if observables is None else observables
    return lambda points: Flow(layers, observables=observables, group=torch.distributed.group.WORLD).run(
        points, progress=False
    )


def spectrum(points):
    """The spectrum of the whole cloud, of which each process has a part."""
    return covariance_spectrum(points, group=torch.distributed.group.WORLD)


# (what process 0 does with its points, what process 1 does, words of the error of all)
ROWS = {
    "a layer's step size": (layer(step_size=0.7).sharded, layer(step_size=0.6).sharded, "the same parameter 7, "),
    "a layer's residual": (layer().sharded, layer(residual=False).sharded, "the same residual, got True"),
    "a layer's weights": (layer().sharded, layer(seed=3).sharded, "the same parameter 0, "),
    "a layer's width": (layer().sharded, lambda x: layer().sharded(x[:, :3]), "refused its arguments: ValueError"),
    "moments to hold": (
        Renormalisation.create(torch.zeros(4), EYE).sharded,
        Renormalisation.create(torch.ones(4), EYE).sharded,
        "the same parameter 0, ",
    ),
    "eps": (
        Renormalisation.create(torch.zeros(4), EYE).sharded,
        Renormalisation.create(torch.zeros(4), EYE, eps=0.1).sharded,
        "the same eps, got 0.0",
    ),
    "trace": (TraceRenormalisation.create(1.0).sharded, TraceRenormalisation.create(2.0).sharded, "the same parameter 0, "),
    "radius": (
        lambda x: cluster_count(x, radius=0.5, group=torch.distributed.group.WORLD),
        lambda x: cluster_count(x, radius=0.6, group=torch.distributed.group.WORLD),
        "the same radius, got 0.5",
    ),
    "one radius is wrong": (
        lambda x: cluster_count(x, radius=0.5, group=torch.distributed.group.WORLD),
        lambda x: cluster_count(x, radius=-1.0, group=torch.distributed.group.WORLD),
        "radius must be finite and at least 0, got -1.0",
    ),
    "directions": (
        lambda x: projected_cumulants(x, DIRECTIONS, group=torch.distributed.group.WORLD),
        lambda x: projected_cumulants(x, DIRECTIONS.flip(0), group=torch.distributed.group.WORLD),
        "the same directions, ",
    ),
    "directions of distances": (
        lambda x: squared_gaussian_distance(x, DIRECTIONS, group=torch.distributed.group.WORLD),
        lambda x: squared_gaussian_distance(x, DIRECTIONS[:2], group=torch.distributed.group.WORLD),
        "the same shape of directions, got (3, 4)",
    ),
    "scale": (
        lambda x: self_attention_levels(x, scale=1.0, group=torch.distributed.group.WORLD),
        lambda x: self_attention_levels(x, scale=2.0, group=torch.distributed.group.WORLD),
        "the same scale, got 1.0",
    ),
    "dimension": (spectrum, lambda x: spectrum(x[:, :2]), "the same dimension, got 4"),
    "no token": (spectrum, lambda x: spectrum(x[:0]), "refused its arguments: ValueError: points must have shape"),
    "function": (
        spectrum, lambda x: self_attention_levels(x, group=torch.distributed.group.WORLD), "the same function, got cov"
    ),
    "a flow's depth": (flow([layer()] * 2), flow([layer()]), "the same depth, got 2"),
    "a flow's layers": (flow([layer()]), flow([layer(seed=3)]), "the same layers, got "),
    "a flow's observables": (
        flow([layer()], (Clusters(0.5),)), flow([layer()], (Clusters(0.6),)), "the same observables, got "
    ),
    "a flow's dtype": (flow([layer()]), lambda x: flow([layer()])(x.float()), "the same dtype, got 'float64'"),
}  # fmt: skip


def everything(rank, size):
    """What each process says of every call in which they disagree."""
    points = POINTS.split(3)[rank]
    outcomes = {}
    for name, (first, other, _) in ROWS.items():
        try:
            (other if rank == 1 else first)(points)
        except Exception as error:
            outcomes[name] = str(error)
        # Nothing of the refused call is left under way.
        outcomes[name, "next"] = spectrum(points)
    return outcomes
