"""What processes that share a cloud read of it, and the same by one process that has all of it."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from massieu.ops.sharded.collectives import Peers, total
from massieu.population import CloudMoments, CloudShape, Clusters, Flow, SelfAttention, covariance_spectrum

SIZES = (7, 12)
OBSERVABLES = (CloudMoments(), CloudShape(projections=5), Clusters(limit=9), SelfAttention(scale=0.3))
STOPPED = False


def cloud():
    """The tokens of all processes."""
    drawn = torch.randn(sum(SIZES), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn[5:9] = drawn[5]  # a cluster of both processes
    return drawn + 2


def towards_the_mean(points, shared=False):
    """A layer that needs a sum over the whole cloud."""
    sums = points.sum(0)
    count = torch.tensor(float(len(points)))
    if shared:
        processes = Peers.of(dist.group.WORLD)
        sums = total(sums, processes)
        count = total(count, processes)
    return points + 0.3 * (sums / count - points)


def shared_layer(points):
    """`towards_the_mean`, of a cloud that processes share."""
    return towards_the_mean(points, shared=True)


def stopping_layer(points):
    """Stops the flow once."""
    global STOPPED
    if not STOPPED and float(points.var()) < 0.9 * float(cloud().split(SIZES)[dist.get_rank()].var()):
        STOPPED = True
        raise KeyboardInterrupt
    return shared_layer(points)


def everything(rank, size):
    """What one process reads of the cloud."""
    group = dist.group.WORLD
    points = cloud().split(SIZES)[rank]
    flow = Flow(shared_layer, depth=3, observables=OBSERVABLES, group=group)
    stopping = Flow(stopping_layer, depth=3, observables=OBSERVABLES, group=group)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        interrupted = stopping.run(points, checkpoint=folder[0])
        dist.barrier()
        files = sorted(path.name for path in Path(folder[0]).iterdir())
        dist.barrier()
        resumed = stopping.resume(folder[0])
        dist.barrier()
    spectrum = covariance_spectrum(points, group=group)
    result = flow.run(points)
    dist.barrier()  # none leaves while another still listens
    return {
        "spectrum": spectrum,
        "flow": result,
        "interrupted": interrupted.layers,
        "files": files,
        "resumed": resumed,
    }
