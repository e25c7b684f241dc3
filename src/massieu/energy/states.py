"""All the states of a measure that has finitely many."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Atoms, Bernoulli, Categorical, Constant, Measure, Spin

MOST = 1 << 20
"""So many states at most are gone through."""
_BLOCK = 1 << 14


def count(measure: Measure) -> int | None:
    """How many states there are; None for infinitely many, or where it is not known."""
    size = measure.event_shape[0]
    if isinstance(measure, Spin | Bernoulli):
        return 2**size
    if isinstance(measure, Categorical):
        return size
    return 1 if isinstance(measure, Constant) else None


def blocks(measure: Measure, like: Tensor) -> Iterator[Float[Tensor, "block d"]]:
    """All states, in blocks, of the dtype and on the device of `like`."""
    number, size = count(measure), measure.event_shape[0]
    if number is None:
        raise ValueError(f"{type(measure).__name__} has no finite list of states")
    if isinstance(measure, Categorical):
        yield torch.eye(size, dtype=like.dtype, device=like.device)
        return
    if isinstance(measure, Constant):
        yield measure.value.to(like).unsqueeze(0)
        return
    powers = 2 ** torch.arange(size - 1, -1, -1, device=like.device)
    for first in range(0, number, _BLOCK):
        index = torch.arange(first, min(first + _BLOCK, number), device=like.device)
        bits = (index.unsqueeze(1) // powers % 2).to(like.dtype)
        yield 2 * bits - 1 if isinstance(measure, Spin) else bits


def count_at(site: Measure) -> int | None:
    """How many states each of N sites has; None as for `count`."""
    return site.points.shape[-2] if isinstance(site, Atoms) else count(site)


def of_sites(site: Measure, like: Tensor) -> tuple[Float[Tensor, "N K d"], Float[Tensor, "N K"]]:
    """The states of each of N sites, and the logarithms of their probabilities."""
    if isinstance(site, Atoms):
        return site.points.to(like), torch.log_softmax(site.log_weight.to(like), -1)
    points = torch.cat(list(blocks(site, like))) if not isinstance(site, Constant) else site.value.to(like).unsqueeze(1)
    points = points.expand(*site.batch_shape, *points.shape[-2:])
    return points, site.log_prob(torch.zeros_like(points), points).to(like)
