"""Discrete laws as lists of their points, by which their sums, powers and images have a density."""

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
"""The longest list, 2¹² points as of twelve signs; laws of more points are not listed."""


def as_atoms(part: Listed) -> Atoms:
    """The listed measure."""
    return Atoms(part.points, part.log_weight)


def grid(values: Tensor, measure: Measure) -> Listed | None:
    """The list of a measure on independent coordinates, each of which has one of the same few values."""
    dimensions = measure.event_shape[0]
    if len(values) ** dimensions > MOST_LISTED:
        return None
    product = torch.cartesian_prod(*[values] * dimensions).reshape(-1, dimensions)
    points = product.expand(*measure.batch_shape, *product.shape)
    return Listed(points, measure._log_density(points), points.abs())


def sums(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every sum of one point from each part: the list of a sum of independent variables."""
    if math.prod([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    # All three add. Log-weights get a last dimension of one, and batches dimensions of one up to the longest's.
    ndim = len(batch) + 2
    points = _outer_sum([align(part.points, ndim, 2) for part in parts])
    log_weight = _outer_sum([align(part.log_weight.unsqueeze(-1), ndim, 2) for part in parts])
    size = _outer_sum([align(part.size, ndim, 2) for part in parts])
    return Listed(points, log_weight.squeeze(-1), size)


def joined(parts: Sequence[Listed], batch: torch.Size) -> Listed | None:
    """Every point that joins one from each part end to end: the list of a product of measures."""
    # They are sums of points that are 0 in the coordinates of the other parts.
    widths = [part.size.shape[-1] for part in parts]
    padded = []
    for index, part in enumerate(parts):
        margins = (sum(widths[:index]), sum(widths[index + 1 :]))
        points = torch.nn.functional.pad(part.points, margins)
        size = torch.nn.functional.pad(part.size, margins)
        padded.append(Listed(points, part.log_weight, size))
    return sums(padded, batch)


def sums_of_draws(part: Listed, num_draws: int) -> Listed | None:
    """Every sum of `num_draws` independent draws: each multiset of points once, weighted by the number of its orders."""
    points, log_weight, size = part
    num_points = points.shape[-2]
    if math.comb(num_points + num_draws - 1, min(num_draws, num_points - 1)) > MOST_LISTED:
        return None
    multisets = _multisets(num_points, num_draws)
    # log of the multinomial coefficient n!/(m_1! m_2! …).
    log_orders = [math.lgamma(num_draws + 1) - sum([math.lgamma(times + 1) for times in row]) for row in multisets]
    # How often each multiset (row) has each point (column).
    times = points.new_tensor(multisets)
    log_weights = times * torch.where(times > 0, log_weight.unsqueeze(-2), 0.0)
    # A sum of many draws accumulates as many roundings; `is_close` allows for ROUNDINGS of them.
    sizes = (1 + num_draws / ROUNDINGS) * (times @ size)
    return Listed(times @ points, log_weights.sum(-1) + points.new_tensor(log_orders), sizes)


def united(parts: Sequence[Listed], log_weight: Tensor, batch: torch.Size) -> Listed | None:
    """The points of all parts in one list, with the parts' log-weights (*batch, part) added: the list of a mixture."""
    if sum([part.size.shape[-2] for part in parts]) > MOST_LISTED:
        return None
    log_weight = spread("mixture", log_weight, batch, 1)
    lists = [spread_over(part, batch) for part in parts]
    log_weights = [part.log_weight + log_weight[..., k : k + 1] for k, part in enumerate(lists)]
    points = torch.cat([part.points for part in lists], -2)
    sizes = torch.cat([part.size for part in lists], -2)
    return Listed(points, torch.cat(log_weights, -1), sizes)


def spread_over(part: Listed, batch: torch.Size) -> Listed:
    """The list, repeated over a longer batch of which its own is a prefix."""
    points = spread("a list of points", part.points, batch, 2)
    log_weight = spread("a list of points", part.log_weight, batch, 1)
    size = spread("a list of points", part.size, batch, 2)
    return Listed(points, log_weight, size)


def log_prob(part: Listed, eta: Tensor, point: Tensor) -> Tensor:
    """The log-probability of `point` under the listed measure tilted by `eta`."""
    law = as_atoms(part)
    atoms = law._align(part.points, point, 2)
    size = law._align(part.size, point, 2)
    is_atom = is_close(point.unsqueeze(-2), atoms, size, point.unsqueeze(-2)).all(-1)
    return logsumexp(torch.where(is_atom, law._log_probability(eta), -torch.inf))


def is_close(point: Tensor, other: Tensor, *sizes: Tensor) -> Tensor:
    """Which entries of `point` equal those of `other` up to the rounding of sums of numbers of these sizes."""
    total = sum([size.abs() for size in sizes[1:]], sizes[0].abs())
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps * total
    return ((point - other).abs() <= rounding) & point.isfinite()


def _outer_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of one row from each tensor (*batch, N, d), for all choices of rows: (*batch, product of all N, d)."""
    total, *others = tensors
    for tensor in others:
        pairs = total.unsqueeze(-2) + tensor.unsqueeze(-3)
        total = pairs.flatten(-3, -2)
    return total


def _multisets(num_kinds: int, size: int) -> list[list[int]]:
    """Every multiset of `size` things of `num_kinds` kinds, as the number of each kind."""
    if num_kinds == 1:
        return [[size]]
    return [[first, *rest] for first in range(size + 1) for rest in _multisets(num_kinds - 1, size - first)]
