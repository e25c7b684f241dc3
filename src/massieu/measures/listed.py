"""Discrete laws as lists of their points: what gives sums, powers and images of them a density."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.foundation.numerics import logsumexp
from massieu.foundation.values import align, spread
from massieu.measures.atoms import ROUNDINGS, Atoms
from massieu.measures.base import Measure
from massieu.measures.hooks import Listed

MOST_LISTED = 4096
"""Laws of more points are not listed: 2¹² signs."""


def atoms(part: Listed) -> Atoms:
    """The measure that the list is of."""
    return Atoms(part.points, part.log_weight)


def independent(values: Tensor, measure: Measure) -> Listed | None:
    """Independent coordinates, each of which has one of the same few values."""
    dimensions = measure.event_shape[0]
    if len(values) ** dimensions > MOST_LISTED:
        return None
    grid = torch.cartesian_prod(*[values] * dimensions).reshape(-1, dimensions)
    points = grid.expand(*measure.batch_shape, *grid.shape)
    return Listed(points, measure._log_density(points), points.abs())


def added(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every sum of one point from each."""
    if math.prod([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    # Log-weights with a last dimension of one, and all of as many dimensions.
    rows = [(part.points, part.log_weight.unsqueeze(-1), part.size) for part in parts]
    rows = [[align(tensor, len(batch) + 2, 2) for tensor in row] for row in rows]
    points, log_weight, size = (_outer_sum(tensors) for tensors in zip(*rows, strict=True))
    return Listed(points, log_weight.squeeze(-1), size)


def joined(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every point made of one from each, end to end: sums of points that are 0 in the others' coordinates."""
    widths = [part.size.shape[-1] for part in parts]
    padded = []
    for index, part in enumerate(parts):
        margins = (sum(widths[:index]), sum(widths[index + 1 :]))
        points, size = (torch.nn.functional.pad(tensor, margins) for tensor in (part.points, part.size))
        padded.append(Listed(points, part.log_weight, size))
    return added(padded, batch)


def repeated(part: Listed, count: int) -> Listed | None:
    """Sums of `count` independent draws: each multiset of points once, with the number of its orders as a weight."""
    points, log_weight, size = part
    number = points.shape[-2]
    if math.comb(number + count - 1, min(count, number - 1)) > MOST_LISTED:
        return None
    chosen = _counts(number, count)
    orders = [math.lgamma(count + 1) - sum([math.lgamma(times + 1) for times in row]) for row in chosen]
    times = points.new_tensor(chosen)
    terms = times * torch.where(times > 0, log_weight.unsqueeze(-2), 0.0)
    # A sum of many draws gathers as many roundings.
    sizes = (1 + count / ROUNDINGS) * (times @ size)
    return Listed(times @ points, terms.sum(-1) + points.new_tensor(orders), sizes)


def together(parts: Sequence[Listed], log_weight: Tensor, batch: torch.Size) -> Listed | None:
    """The points of all parts in one list, each part's with its log-weight (*batch, part) added."""
    if sum([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    log_weight = spread("mixture", log_weight, batch, 1)
    full = [spread_over(part, batch) for part in parts]
    weights = [part.log_weight + log_weight[..., k : k + 1] for k, part in enumerate(full)]
    points, sizes = torch.cat([part.points for part in full], -2), torch.cat([part.size for part in full], -2)
    return Listed(points, torch.cat(weights, -1), sizes)


def spread_over(part: Listed, batch: torch.Size) -> Listed:
    """The list for a longer batch."""
    return Listed(*(spread("a list of points", t, batch, n) for t, n in zip(part, (2, 1, 2), strict=True)))


def log_prob(part: Listed, eta: Tensor, point: Tensor) -> Tensor:
    """The log-probability of `point` under the listed measure tilted by `eta`."""
    law = atoms(part)
    aligned, size = law._align(part.points, point, 2), law._align(part.size, point, 2)
    hit = is_close(point.unsqueeze(-2), aligned, size, point.unsqueeze(-2)).all(-1)
    return logsumexp(torch.where(hit, law._log_probability(eta), -torch.inf))


def is_close(point: Tensor, other: Tensor, *sizes: Tensor) -> Tensor:
    """Which entries of `point` are those of `other` within rounding, being added up from numbers of these sizes."""
    total = sum([size.abs() for size in sizes[1:]], sizes[0].abs())
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps * total
    return ((point - other).abs() <= rounding) & point.isfinite()


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
