"""What the processes of `test_sharded` do, and the same by one process."""

import torch
import torch.distributed as dist
from tests.population.cases import draw, layer, weights
from torch.utils import _pytree as pytree

from massieu.energy.activations import LayerNorm, RMSNorm
from massieu.population import (
    AttentionLayer,
    CloudMoments,
    Composition,
    FeedForward,
    Flow,
    Normalisation,
    Operator,
    Renormalisation,
    TraceRenormalisation,
)

SIZES = {2: (5, 3), 3: (4, 0, 3)}
"""Particles of each process; one of three has none."""


class Halved(Operator):
    """A map of the population that says how it is spread: every token by itself, here."""

    def _moved(self, particles, group):
        return particles / 2


def stack():
    """Layers of every kind that can be sharded."""
    norm = Normalisation.create(LayerNorm.create(), draw(4, seed=70), draw(4, seed=71))
    return Composition.create(
        [
            layer(normalisation=norm, activation=RMSNorm.create(), step_size=0.7),
            FeedForward.create(torch.tanh, normalisation=norm),
            layer(seed=3, activation=Halved()),
            AttentionLayer.create(**weights(seed=5), population=draw(6, 4, seed=72)),
        ]
    )


def results(call, particles):
    """What comes out, and gradients of a loss with respect to particles and weights."""
    leaves, structure = pytree.tree_flatten(stack())
    moving = [leaf.clone().requires_grad_() for leaf in leaves]
    x = particles.clone().requires_grad_()
    after = call(pytree.tree_unflatten(moving, structure), x)
    result = torch.autograd.grad(after.sin().sum(), [x, *moving], allow_unused=True)
    return (
        after.detach(),
        result[0],
        [torch.zeros_like(m) if g is None else g for g, m in zip(result[1:], moving, strict=True)],
    )


def population():
    """The particles of all processes."""
    return draw(2, sum(SIZES[2]), 4, seed=80)


def alone(size):
    """What one process finds that has the particles of so many."""
    return results(lambda operator, x: operator(x), population()[:, : sum(SIZES[size])])


def everything(rank, size):
    """What one of several processes finds: results of the layers, and a flow."""
    return results(lambda operator, x: operator.sharded(x), share(rank, size)), flowing(rank, size)


def share(rank, size):
    """The particles of one process."""
    first = sum(SIZES[size][:rank])
    return population()[:, first : first + SIZES[size][rank]]


def renormalised():
    """Attention, and behind it, or before it, what only the whole population can do."""
    whole = Renormalisation.create(draw(4, seed=73), 2 * torch.eye(4, dtype=torch.float64), eps=0.1)
    return [
        layer(activation=whole),
        layer(seed=3, normalisation=whole, activation=TraceRenormalisation.create(3.0)),
        TraceRenormalisation.create(1.0),
        lambda x: x + 1,
    ]


def flow(group=None):
    """A flow through `renormalised`, alone or over the processes of a group."""
    return Flow(renormalised(), observables=[CloudMoments()], group=group)


def flowing(rank, size):
    """The result of the flow, where there are two processes."""
    if size != 2:
        return None  # a flow's process has particles
    group = dist.group.WORLD
    result = flow(group).run(share(rank, size)[0], progress=False)
    dist.barrier()  # none leaves while another still listens
    return result
