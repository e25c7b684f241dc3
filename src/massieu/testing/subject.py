"""The measure that is checked, the points it is checked at, and the comparison that every law ends in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures.base import Measure
from massieu.testing.checks import expand

SCALES = (0.0, 1e-4, 1.0, 15.0, 100.0)
"""Lengths of eta that are tried."""

_HALVINGS = 60


@dataclass(frozen=True)
class Subject:
    """A measure in float64 and the points it is checked at."""

    measure: Measure
    eta: Tensor  # (*batch, query, *event)
    far: Tensor  # the same, at the scales asked for
    generator: torch.Generator

    @property
    def queries(self) -> int:
        """Which dimension of `eta` counts the queries."""
        return len(self.measure.batch_shape)

    @cached_property
    def middle(self) -> Tensor:
        """Between each point and its neighbour: in the domain, which is convex."""
        return (self.eta + self.swapped) / 2

    @cached_property
    def swapped(self) -> Tensor:
        """Each point's neighbour."""
        return self.eta.roll(1, self.queries)

    @cached_property
    def direction(self) -> Tensor:
        """A drawn direction for each point, of largest entry one."""
        drawn = torch.randn(self.eta.shape, dtype=torch.float64, generator=self.generator).to(self.eta.device)
        return _of_size_one(drawn, len(self.measure.event_shape))

    @cached_property
    def reach(self) -> Tensor:
        """How far the domain extends about each point along every axis, within a factor of two; 1 if it is further."""
        reach = torch.ones(self.eta.shape[: self.queries + 1], dtype=torch.float64, device=self.eta.device)
        for _ in range(_HALVINGS):
            steps = [sign * expand(reach, self.eta) * axis for axis in self.basis() for sign in (1, -1)]
            found = [self.measure._in_domain(self.eta + step) for step in steps]
            inside = [part for part in found if part is not None]
            if not inside or bool(torch.stack(inside).all()):
                break
            reach = torch.where(torch.stack(inside).all(0), reach, reach / 2)
        return reach

    def slope(self, function: Callable[[Tensor], Tensor], direction: Tensor) -> Tensor:
        """Central five-point difference of `function` at `eta` along `direction`; error h⁴."""
        eta, length = self.eta, 1e-3 * self.reach
        step = expand(length, eta) * direction
        near, far = function(eta + step) - function(eta - step), function(eta + 2 * step) - function(eta - 2 * step)
        return (8 * near - far) / expand(12 * length, near)

    def basis(self) -> list[Tensor]:
        """Each coordinate's direction, in the shape of `eta`."""
        event = self.measure.event_shape
        identity = torch.eye(event.numel(), dtype=torch.float64, device=self.eta.device)
        return [row.reshape(event).expand(self.eta.shape) for row in identity]

    def fisher(self, eta: Tensor) -> Tensor:
        """The Fisher information as matrices, (*batch, query, n, n)."""
        size = self.measure.event_shape.numel()
        return self.measure.fisher(eta).reshape(*eta.shape[: self.queries + 1], size, size)

    def trace(self, eta: Tensor) -> Tensor:
        return self.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)

    def norm(self, vector: Tensor) -> Tensor:
        return self.measure._dot(vector, vector).sqrt()

    def size(self, vector: Tensor) -> Tensor:
        """The largest entry of each event."""
        return vector.abs().flatten(vector.ndim - len(self.measure.event_shape)).amax(-1)


def subject_of(measure: Measure, eta: Tensor | None, scales: Sequence[float], seed: int) -> Subject:
    measure = measure.to(torch.float64)
    device = pytree.tree_leaves(measure)[0].device
    generator = torch.Generator().manual_seed(seed)
    batch, event, queries = measure.batch_shape, measure.event_shape, len(measure.batch_shape)
    origin = torch.zeros((*batch, 1, *event), dtype=torch.float64, device=device)
    interior = measure._interior()
    start = origin if interior is None else origin + interior.unsqueeze(queries)
    if eta is None:
        drawn = torch.randn(*batch, 4, *event, dtype=torch.float64, generator=generator).to(device)
        eta = _shrunk(measure, start, drawn)
    eta = eta.to(device, torch.float64)
    eta = torch.cat([eta, _inside(measure, origin)], queries)

    directions = torch.randn(*batch, 1, *event, dtype=torch.float64, generator=generator).to(device)
    directions = _of_size_one(directions, len(event))
    far = [_inside(measure, start + sign * scale * directions) for scale in scales for sign in (1, -1)]
    return Subject(measure, eta, torch.cat(far, queries), generator)


def _of_size_one(drawn: Tensor, event: int) -> Tensor:
    return drawn / drawn.abs().amax(tuple(range(-event, 0)), keepdim=True)


def _inside(measure: Measure, point: Tensor) -> Tensor:
    """The one-query `point`, or no query where some batch member does not have it in its domain."""
    inside = measure._in_domain(point)
    return point if inside is None or bool(inside.all()) else point.narrow(len(measure.batch_shape), 0, 0)


def _shrunk(measure: Measure, start: Tensor, drawn: Tensor) -> Tensor:
    """Points about `start`, halfway or less from it to the domain's boundary."""
    for _ in range(_HALVINGS):
        inside = measure._in_domain(start + 2 * drawn)
        if inside is None:
            return start + drawn
        if bool(inside.all()):
            return start + drawn
        drawn = torch.where(expand(inside, drawn), drawn, drawn / 2)
    raise ValueError(
        f"check_measure found no eta inside the domain of {type(measure).__name__}, {measure._domain()}: "
        "give it `eta`, or the measure `_interior`"
    )
