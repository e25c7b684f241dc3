"""The measure that is checked, its oracles, and the points it is checked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures.base import Measure
from massieu.testing.checks import expand

SCALES = (0.0, 1e-4, 1.0, 15.0, 100.0)
"""Lengths of eta that are tried."""

DERIVED = ("log_partition", "mean", "fisher", "entropy")
"""Functions of one eta."""

FUNCTIONS: dict[str, Callable[[Measure, Tensor, Tensor], Tensor]] = {
    **{name: lambda measure, eta, other, name=name: getattr(measure, name)(eta) for name in DERIVED},
    "fisher_vp": lambda measure, eta, other: measure.fisher_vp(eta, other),
    "kl": lambda measure, eta, other: measure.kl(eta, other),
    "cumulants": lambda measure, eta, other: measure.cumulants(eta, other, 3),
}
"""All deterministic functions of a measure at eta, with a second point of the domain for those that take two."""

_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class MeasureCase:
    """A measure to be checked by `measure_checks`, with what is known of it from elsewhere.

    Attributes:
        measure: Its tensors are converted to each precision that is tried.
        log_partition: Oracle, from eta (*batch, query, *event) in float64 to A(eta): quadrature, enumeration, SciPy.
        kl: Oracle, from eta_p and eta_q of that shape to KL(p_{eta_p} ‖ p_{eta_q}), in nats.
        log_prob: Oracle, from eta and points (sample, *batch, query, *event) to (sample, *batch, query); it is asked at
            the measure's own draws.
        eta: At least two points in the domain's interior, one query dimension. By default normal draws about the
            measure's interior point (the origin, where it names none), moved towards it until all are well inside; the
            origin is added where it is in the domain.
        scales: Distances from that interior point at which float32 is held against float64, along a drawn direction and
            its opposite; points outside the domain, or whose numbers float32 cannot hold, are left out.
        samples: Draws for each eta.
        compile_backend: Backend of `torch.compile` for compiled = eager, for instance "inductor" (takes a minute) or
            "aot_eager" (seconds); None leaves that law out.
        seed: Of the draws.

    Example:
        >>> from massieu.measures import Spin
        >>> from massieu.testing import MeasureCase, measure_checks
        >>> case = MeasureCase(Spin.create(dim=2), log_partition=lambda eta: eta.cosh().log().sum(-1))
        >>> measure_checks(case)["log_partition"]()
    """

    measure: Measure
    log_partition: Callable[[Tensor], Tensor] | None = None
    kl: Callable[[Tensor, Tensor], Tensor] | None = None
    log_prob: Callable[[Tensor, Tensor], Tensor] | None = None
    eta: Float[Tensor, "*batch_query_event"] | None = None
    scales: Sequence[float] = SCALES
    samples: int = 20_000
    compile_backend: str | None = None
    seed: int = 0

    @property
    def start(self) -> Tensor:
        """One query at the measure's interior point, in float64."""
        measure = self.measure
        shape = (*measure.batch_shape, 1, *measure.event_shape)
        origin = torch.zeros(shape, dtype=torch.float64, device=pytree.tree_leaves(measure)[0].device)
        interior = measure._interior()
        return origin if interior is None else origin + interior.unsqueeze(len(measure.batch_shape))


@dataclass(frozen=True, eq=False)
class Subject:
    """A measure in float64 and the points it is checked at."""

    case: MeasureCase
    measure: Measure
    eta: Tensor  # (*batch, query, *event)
    far: Tensor  # the same, at the scales asked for

    @property
    def queries(self) -> int:
        """Which dimension of `eta` counts the queries."""
        return len(self.measure.batch_shape)

    @property
    def lead(self) -> torch.Size:
        """The shape of one number for each eta."""
        return self.eta.shape[: self.queries + 1]

    @cached_property
    def swapped(self) -> Tensor:
        """Each point's neighbour."""
        return self.eta.roll(1, self.queries)

    @cached_property
    def middle(self) -> Tensor:
        """Between each point and its neighbour: in the domain, which is convex."""
        return (self.eta + self.swapped) / 2

    @cached_property
    def direction(self) -> Tensor:
        """A drawn direction for each point, of largest entry one."""
        return _of_size_one(self.noise(self.eta), len(self.measure.event_shape))

    @cached_property
    def results(self) -> dict[str, Tensor]:
        """What each of `FUNCTIONS` gives at `eta` and `middle`."""
        return {name: function(self.measure, self.eta, self.middle) for name, function in FUNCTIONS.items()}

    @cached_property
    def draws(self) -> Tensor:
        """Draws (count, *batch, query, *event)."""
        return self.draw(self.case.samples)

    @cached_property
    def log_probs(self) -> Tensor:
        """Their log-probabilities or log-densities, (count, *batch, query)."""
        return self.measure.log_prob(self.eta, self.draws)

    @cached_property
    def reach(self) -> Tensor:
        """How far the domain extends about each point along every axis, within a factor of two; 1 if it is further."""
        reach = torch.ones(self.lead, dtype=torch.float64, device=self.eta.device)
        for _ in range(_HALVINGS):
            steps = [sign * expand(reach, self.eta) * axis for axis in self.basis() for sign in (1, -1)]
            found = [self.measure._in_domain(self.eta + step) for step in steps]
            inside = [part for part in found if part is not None]
            if not inside or bool(torch.stack(inside).all()):
                break
            reach = torch.where(torch.stack(inside).all(0), reach, reach / 2)
        return reach

    def draw(self, *shape: int) -> Tensor:
        return self.measure.sample(self.eta, shape, generator=_generator(self.eta.device, self.case.seed))

    def noise(self, like: Tensor) -> Tensor:
        """Normal draws of that shape, in float64: the same at each call."""
        drawn = torch.randn(like.shape, dtype=torch.float64, generator=_generator("cpu", self.case.seed + 1))
        return drawn.to(like.device)

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

    def kept(self, measure: Measure, eta: Tensor) -> Tensor:
        """The points that rounding, of them and of the measure, has left inside the domain."""
        inside = measure._in_domain(eta)
        if inside is None:
            return eta
        held = inside.reshape(-1, inside.shape[-1]).all(0)
        return eta.index_select(self.queries, held.nonzero().squeeze(-1))


def subject_of(case: MeasureCase) -> Subject:
    measure, start, eta = case.measure.to(torch.float64), case.start, case.eta
    generator, event, queries = _generator("cpu", case.seed), len(measure.event_shape), len(measure.batch_shape)
    if eta is None:
        size = (*start.shape[:queries], 4, *start.shape[queries + 1 :])
        eta = _shrunk(measure, start, torch.randn(size, dtype=torch.float64, generator=generator).to(start.device))
    eta = torch.cat([eta.to(start.device, torch.float64), _inside(measure, torch.zeros_like(start))], queries)
    directions = torch.randn(start.shape, dtype=torch.float64, generator=generator).to(start.device)
    directions = _of_size_one(directions, event)
    far = [_inside(measure, start + sign * scale * directions) for scale in case.scales for sign in (1, -1)]
    return Subject(case, measure, eta, torch.cat(far, queries))


def _generator(device: torch.device | str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


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
        if inside is None or bool(inside.all()):
            return start + drawn
        drawn = torch.where(expand(inside, drawn), drawn, drawn / 2)
    raise ValueError(
        f"no eta was found inside the domain of {type(measure).__name__}, {measure._domain()}: "
        "give the MeasureCase `eta`, or the measure `_interior`"
    )
