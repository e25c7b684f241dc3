"""Discrete laws as lists of their points: what gives sums, powers and images of them a density."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from massieu.measures import stable

if TYPE_CHECKING:
    from massieu.measures.atoms import Atoms
    from massieu.measures.base import Measure

MOST_LISTED = 4096
"""Laws of more points are not listed: 2¹² signs."""

ROUNDINGS = 8
"""How many roundings of the numbers that went in a point may be off, which was computed in another order."""


class Listed(NamedTuple):
    """A measure's points, and how large the numbers are that each was added up from, in the same shape."""

    atoms: "Atoms"
    size: Tensor


def independent(values: Tensor, measure: "Measure") -> Listed | None:
    """Independent coordinates, each of which has one of the same few values."""
    from massieu.measures.atoms import Atoms

    dimensions = measure.event_shape[0]
    if len(values) ** dimensions > MOST_LISTED:
        return None
    grid = torch.cartesian_prod(*[values] * dimensions).reshape(-1, dimensions)
    points = grid.expand(*measure.batch_shape, *grid.shape)
    return Listed(Atoms(points, measure._log_density(points)), points.abs())


def added(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every sum of one point from each."""
    from massieu.measures.atoms import Atoms

    if math.prod([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    points, sizes, log_weight = (_outer_sum(tensors) for tensors in zip(*_in_one_batch(parts, batch), strict=True))
    return Listed(Atoms(points, log_weight.squeeze(-1)), sizes)


def joined(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every point made of one from each, end to end: sums of points that are 0 in the others' coordinates."""
    from massieu.measures.atoms import Atoms

    widths = [part.size.shape[-1] for part in parts]
    padded = []
    for index, part in enumerate(parts):
        margins = (sum(widths[:index]), sum(widths[index + 1 :]))
        points, size = (torch.nn.functional.pad(tensor, margins) for tensor in (part.atoms.points, part.size))
        padded.append(Listed(Atoms(points, part.atoms.log_weight), size))
    return added(padded, batch)


def repeated(part: Listed, count: int) -> Listed | None:
    """Sums of `count` independent draws: each multiset of points once, with the number of its orders as a weight."""
    from massieu.measures.atoms import Atoms

    points, size, log_weight = part.atoms.points, part.size, part.atoms.log_weight
    number = points.shape[-2]
    if math.comb(number + count - 1, min(count, number - 1)) > MOST_LISTED:
        return None
    chosen = _counts(number, count)
    orders = [math.lgamma(count + 1) - sum([math.lgamma(times + 1) for times in row]) for row in chosen]
    times = points.new_tensor(chosen)
    terms = times * torch.where(times > 0, log_weight.unsqueeze(-2), 0.0)
    # A sum of many draws gathers as many roundings.
    sizes = (1 + count / ROUNDINGS) * (times @ size)
    return Listed(Atoms(times @ points, terms.sum(-1) + points.new_tensor(orders)), sizes)


def together(parts: Sequence[Listed], log_weight: Sequence[Tensor], batch: torch.Size) -> Listed | None:
    """The points of all parts in one list, each part's with a log-weight (*batch) added."""
    from massieu.measures.atoms import Atoms

    if sum([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    spread = _in_one_batch(parts, batch)
    full = [
        (points.expand(*batch, *points.shape[-2:]), size.expand(*batch, *size.shape[-2:]), weight.expand(*batch, -1, 1))
        for points, size, weight in spread
    ]
    points, sizes = torch.cat([part[0] for part in full], -2), torch.cat([part[1] for part in full], -2)
    weights = [
        part[2].squeeze(-1) + in_batch(own, batch, 0).unsqueeze(-1) for part, own in zip(full, log_weight, strict=True)
    ]
    return Listed(Atoms(points, torch.cat(weights, -1)), sizes)


def log_prob(part: Listed, eta: Tensor, point: Tensor) -> Tensor:
    """The log-probability of `point` under the listed measure tilted by `eta`."""
    atoms = part.atoms
    aligned, size = atoms._align(atoms.points, point, 2), atoms._align(part.size, point, 2)
    hit = is_close(point.unsqueeze(-2), aligned, size, point.unsqueeze(-2)).all(-1)
    return stable.logsumexp(torch.where(hit, atoms._log_probability(eta), -torch.inf))


def is_close(point: Tensor, other: Tensor, *sizes: Tensor) -> Tensor:
    """Which entries of `point` are those of `other` within rounding, being added up from numbers of these sizes."""
    first, *others = [size.abs() for size in sizes]
    total = first
    for size in others:
        total = total + size
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps * total
    return ((point - other).abs() <= rounding) & point.isfinite()


def in_batch(tensor: Tensor, batch: torch.Size, rest: int) -> Tensor:
    """`tensor` (*prefix of batch, *rest) with singleton dimensions for the remaining batch."""
    own = tensor.ndim - rest
    return tensor.reshape((*tensor.shape[:own], *[1] * (len(batch) - own), *tensor.shape[own:]))


def _in_one_batch(parts: Sequence[Listed], batch: torch.Size) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Points, sizes and log-weights (with a last dimension of one), of as many dimensions each."""
    return [
        (
            in_batch(part.atoms.points, batch, 2),
            in_batch(part.size, batch, 2),
            in_batch(part.atoms.log_weight.unsqueeze(-1), batch, 2),
        )
        for part in parts
    ]


def _outer_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Σ of one row from each (*batch, N, d), for all choices of rows."""
    total, *others = tensors
    for tensor in others:
        pairs = total.unsqueeze(-2) + tensor.unsqueeze(-3)
        total = pairs.flatten(-3, -2)
    return total


def _counts(kinds: int, total: int) -> list[list[int]]:
    """Every way to have `total` things of so many kinds."""
    if kinds == 1:
        return [[total]]
    return [[first, *rest] for first in range(total + 1) for rest in _counts(kinds - 1, total - first)]
