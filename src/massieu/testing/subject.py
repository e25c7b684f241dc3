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
"""Default lengths of eta, from none to far out."""

DERIVED = ("log_partition", "mean", "fisher", "entropy")
"""Functions of one eta."""

FUNCTIONS: dict[str, Callable[[Measure, Tensor, Tensor], Tensor]] = {
    **{name: lambda measure, eta, other, name=name: getattr(measure, name)(eta) for name in DERIVED},
    "fisher_vp": lambda measure, eta, other: measure.fisher_vp(eta, other),
    "kl": lambda measure, eta, other: measure.kl(eta, other),
    "cumulants": lambda measure, eta, other: measure.cumulants(eta, other, 3),
}
"""All deterministic functions of a measure at eta; those that take two arguments get a second point of the domain."""

_HALVINGS = 60
"""Halvings of a step until it must be inside the domain: from 1 down to rounding."""


@dataclass(frozen=True, eq=False)
class MeasureCase:
    """A measure to be checked by `measure_checks`, with independent oracles.

    Attributes:
        measure: Its tensors are converted to each precision that is tried.
        log_partition: Oracle, from eta (*batch, query, *event) in float64 to A(eta): quadrature, enumeration, SciPy.
        kl: Oracle, from eta_p and eta_q of that shape to KL(p_{eta_p} ‖ p_{eta_q}), in nats.
        log_prob: Oracle, from eta and points (sample, *batch, query, *event) to (sample, *batch, query); it is called with
            draws of the measure.
        eta: At least two points in the domain's interior, with one query dimension. By default normal draws about the
            measure's interior point (or the origin), moved towards it until all are well inside. The origin is added if it
            is in the domain.
        scales: Distances from that interior point at which float32 is compared with float64, along a drawn direction and
            its opposite. Points outside the domain, or whose numbers float32 cannot hold, are left out.
        samples: Number of draws for each eta.
        compile_backend: Backend of `torch.compile` for the law "compiled", for instance "inductor" (takes a minute) or
            "aot_eager" (seconds); None leaves that law out.
        seed: Seed of the draws.

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
    """A measure in float64 and the points at which it is checked."""

    case: MeasureCase
    measure: Measure
    eta: Tensor  # (*batch, query, *event)
    far: Tensor  # (*batch, query, *event), at the scales of the case

    @property
    def queries(self) -> int:
        """The dimension of `eta` that counts the queries."""
        return len(self.measure.batch_shape)

    @property
    def lead(self) -> torch.Size:
        """The shape of one number for each eta."""
        return self.eta.shape[: self.queries + 1]

    @cached_property
    def swapped(self) -> Tensor:
        """The points in another order: each in the place of its neighbour."""
        return self.eta.roll(1, self.queries)

    @cached_property
    def middle(self) -> Tensor:
        """The middle between each point and its neighbour: in the domain, which is convex."""
        return (self.eta + self.swapped) / 2

    @cached_property
    def direction(self) -> Tensor:
        """A random direction for each point, with largest entry one."""
        return _of_size_one(self.noise(self.eta), len(self.measure.event_shape))

    @cached_property
    def results(self) -> dict[str, Tensor]:
        """The results of all `FUNCTIONS` at `eta` and `middle`."""
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
            masks = [self.measure._in_domain(self.eta + step) for step in steps]
            # None stands for the whole space.
            inside = [mask for mask in masks if mask is not None]
            if not inside or bool(torch.stack(inside).all()):
                break
            reach = torch.where(torch.stack(inside).all(0), reach, reach / 2)
        return reach

    def draw(self, *shape: int) -> Tensor:
        return self.measure.sample(self.eta, shape, generator=_generator(self.eta.device, self.case.seed))

    def noise(self, like: Tensor) -> Tensor:
        """Normal draws of the shape of `like`, in float64; every call returns the same."""
        drawn = torch.randn(like.shape, dtype=torch.float64, generator=_generator("cpu", self.case.seed + 1))
        return drawn.to(like.device)

    def slope(self, function: Callable[[Tensor], Tensor], direction: Tensor) -> Tensor:
        """Central five-point difference of `function` at `eta` along `direction`; error h⁴."""
        eta = self.eta
        length = 1e-3 * self.reach
        step = expand(length, eta) * direction
        # f' = (8(f(h) − f(−h)) − (f(2h) − f(−2h)))/12h + O(h⁴).
        near = function(eta + step) - function(eta - step)
        far = function(eta + 2 * step) - function(eta - 2 * step)
        return (8 * near - far) / expand(12 * length, near)

    def basis(self) -> list[Tensor]:
        """The unit vector of each coordinate, in the shape of `eta`."""
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
        """The queries that are still in the domain after the rounding of points and measure, for the whole batch."""
        inside = measure._in_domain(eta)
        if inside is None:
            return eta
        all_inside = inside.reshape(-1, inside.shape[-1]).all(0)
        return eta.index_select(self.queries, all_inside.nonzero().squeeze(-1))


def subject_of(case: MeasureCase) -> Subject:
    measure = case.measure.to(torch.float64)
    start = case.start
    eta = case.eta
    generator = _generator("cpu", case.seed)
    event = len(measure.event_shape)
    queries = len(measure.batch_shape)
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
    """The point (one query), or no query if it is outside the domain of some batch item."""
    inside = measure._in_domain(point)
    return point if inside is None or bool(inside.all()) else point.narrow(len(measure.batch_shape), 0, 0)


def _shrunk(measure: Measure, start: Tensor, drawn: Tensor) -> Tensor:
    """Points about `start`, at most halfway from it to the domain's boundary."""
    for _ in range(_HALVINGS):
        inside = measure._in_domain(start + 2 * drawn)
        if inside is None or bool(inside.all()):
            return start + drawn
        drawn = torch.where(expand(inside, drawn), drawn, drawn / 2)
    raise ValueError(
        f"no eta was found inside the domain of {type(measure).__name__}, {measure._domain()}: "
        "give the MeasureCase `eta`, or the measure `_interior`"
    )
