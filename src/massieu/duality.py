"""From the mean back to the natural parameter, and the convex conjugate of A (S6, S8, S9).

∇A maps natural parameters onto the relative interior of the convex hull of the support, one-to-one up to directions that
A cannot see. `natural` inverts it, at the eta of least norm; `conjugate` is A*(mu) = sup eta·mu − A(eta), whose gradient
is `natural` and whose Hessian is the inverse of the Fisher information. For atoms, mu is attention's output: its weights
have the largest entropy relative to h among all with that output, and eta is the multiplier of that constraint.

Where the measure has no closed form, the convex φ(eta) = A(eta) − eta·mu is minimised by Newton's method with the shift
of Doikov (2023, arXiv 2308.14742), steps −(F + τ‖∇φ‖)⁻¹∇φ, with τ raised where a trial fails and lowered where it
succeeds: convergent from everywhere and quadratic at the end. Derivatives come from steps of the chord method at the
solution, each of which makes one more order of them right; none passes through the iteration or a decision on rank.
"""

from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures import Measure
from massieu.measures.base import values_are_readable

_STEPS = 100
_ORDERS = 3
_BOUNDARY = 1e-10
_FAR = 1e4


def natural(measure: Measure, mu: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
    """The eta of least norm with ∇A(eta) = mu (S9)."""
    promoted, target = measure._fit(mu=mu)
    exact, wide = _widen(promoted, target)
    closed = exact._natural(wide)
    if closed is not None:
        _report(exact, wide, outside=_lead(exact, closed.isnan()))
        return closed.to(target.dtype)
    problem, state, verdict = _solve(exact, wide, mu.dtype)
    _report(exact, wide, outside=verdict.outside, failed=verdict.failed, residual=state.point.slope)
    eta = problem.shaped(_attach(exact, wide, problem, state, verdict.found))
    infinite = torch.where(_over(verdict.boundary, eta), torch.inf, torch.nan)
    return torch.where(_over(verdict.found, eta), eta, infinite).to(target.dtype)


def conjugate(measure: Measure, mu: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
    """A*(mu) = sup over eta of eta·mu − A(eta), in nats (S8)."""
    promoted, target = measure._fit(mu=mu)
    exact, wide = _widen(promoted, target)
    closed = exact._natural(wide.detach())
    if closed is not None:
        return _closed_conjugate(exact, wide, closed).to(target.dtype)
    problem, state, verdict = _solve(exact, wide, mu.dtype)
    _report(exact, wide, failed=verdict.failed, residual=state.point.slope)
    eta = problem.shaped(_attach(exact, wide, problem, state, verdict.found))
    value = _fenchel(exact, eta, wide)
    limit = _fenchel(problem.measure, problem.shaped(state.point.eta), wide.detach())
    # On the boundary the decrement tends to 0 where the face carries mass, and to a constant where A* = ∞.
    limit = torch.where(state.decrement < 1e-6, limit, torch.inf)
    other = torch.where(verdict.boundary, limit, torch.where(verdict.outside, torch.inf, torch.nan))
    return torch.where(verdict.found, value, other).to(target.dtype)


# The solution, without derivatives.


class _Point(NamedTuple):
    """A point and φ's derivatives there; all fields lead with (*batch, *query)."""

    eta: Tensor  # (*lead, n)
    value: Tensor  # φ
    noise: Tensor  # rounding of φ
    slope: Tensor  # ∇φ = mean − mu, (*lead, n)
    eigenvalues: Tensor  # of the Fisher information, (*lead, n)
    eigenvectors: Tensor  # (*lead, n, n)


class _State(NamedTuple):
    point: _Point
    shift: Tensor  # τ
    scale: Tensor  # a length of the support: the largest spread of p_eta met so far
    decrement: Tensor  # ∇φᵀ F⁺ ∇φ: twice what A* is short of
    ratio: Tensor  # of the last two decrements
    outside: Tensor  # certified by the support function
    done: Tensor


class _Verdict(NamedTuple):
    """What became of each mu: exactly one is true."""

    found: Tensor
    boundary: Tensor
    outside: Tensor
    failed: Tensor


class _Problem:
    """φ on flat vectors, for detached tensors."""

    def __init__(self, measure: Measure, mu: Tensor, given: torch.dtype) -> None:
        self.measure: Measure = pytree.tree_map(lambda leaf: leaf.detach(), measure)
        self.event = tuple(measure.event_shape)
        self.mu = self.flat(mu.detach())
        self.eps = torch.finfo(mu.dtype).eps
        self.size = self.mu.norm(dim=-1)
        self.rounding = 4 * max(torch.finfo(given).eps, self.eps) * self.size

    def shaped(self, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[:-1], *self.event)

    def flat(self, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[: vector.ndim - len(self.event)], -1)

    def start(self) -> Tensor:
        origin = torch.zeros_like(self.mu)
        interior = self.measure._interior()
        if interior is None:
            return origin
        return origin + self.flat(self.measure._align(interior, self.shaped(origin), len(self.event)))

    def at(self, eta: Tensor) -> _Point:
        """φ to second order; its value is NaN where it, or a derivative, is not finite."""
        point = self.shaped(eta)
        log_partition, slope = self.measure._log_partition(point), self.flat(self.measure._mean(point)) - self.mu
        fisher = self.measure._fisher(point).reshape(*eta.shape, eta.shape[-1])
        usable = log_partition.isfinite() & slope.isfinite().all(-1) & fisher.isfinite().flatten(-2).all(-1)
        products = eta * self.mu
        value = torch.where(usable, log_partition - products.sum(-1), torch.nan)
        noise = 16 * self.eps * (log_partition.abs() + products.abs().sum(-1))
        # The eigenvalues of a matrix that is not finite are an error.
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.where(_over(usable, fisher), fisher, 0.0))
        return _Point(eta, value, noise, slope, eigenvalues.clamp_min(0), eigenvectors)

    def visible(self, point: _Point, scale: Tensor) -> Tensor:
        """The slope in the eigenbasis, less what is rounding in directions that A cannot see."""
        slope = _times(point.eigenvectors.mT, point.slope)
        noise = self.rounding + 64 * self.eps * (self.size + scale)
        hidden = ~_kept(point.eigenvalues) & (slope.abs() <= noise.unsqueeze(-1))
        return torch.where(hidden, 0.0, slope)

    def newton(self, point: _Point, scale: Tensor) -> Tensor:
        """The direction of the undamped step."""
        tiny = torch.finfo(scale.dtype).tiny ** 0.5
        step = self.visible(point, scale) / point.eigenvalues.clamp_min(tiny)
        return -_times(point.eigenvectors, _unit(step))

    def beyond(self, directions: Tensor) -> Tensor | None:
        """How far the support reaches beyond mu along unit vectors (*lead, k, n); None where it is not known."""
        support = self.measure._support(self.shaped(directions))
        return None if support is None else support - (directions * self.mu.unsqueeze(-2)).sum(-1)

    def far(self, eta: Tensor, directions: Tensor) -> Tensor:
        """`beyond` as the mean far away says it; +inf where the domain ends before."""
        points = self.shaped(eta.unsqueeze(-2) + _FAR * (1 + eta.norm(dim=-1))[..., None, None] * directions)
        inside = self.measure._in_domain(points)
        means = self.flat(self.measure._mean(points))
        gap = ((means - self.mu.unsqueeze(-2)) * directions).sum(-1)
        gap = torch.where(gap.isnan(), torch.inf, gap)
        return gap if inside is None else torch.where(inside, gap, torch.inf)

    def tolerance(self, scale: Tensor) -> Tensor:
        """How near to the boundary counts as on it."""
        return _BOUNDARY * scale + self.rounding


def _solve(measure: Measure, mu: Tensor, given: torch.dtype) -> tuple[_Problem, _State, _Verdict]:
    """Newton's method, each mu on its own; `given` is the dtype mu had, whose rounding is forgiven."""
    with torch.no_grad():
        problem = _Problem(measure, mu, given)
        point = problem.at(problem.start())
        size = point.slope.norm(dim=-1)
        scale = torch.maximum(size, point.eigenvalues.sum(-1).sqrt())
        never = torch.zeros_like(size, dtype=torch.bool)
        zero = torch.zeros_like(size)
        state = _State(point, size.clamp_min(problem.eps), scale, zero, zero, never, point.value.isnan())
        state = state._replace(done=state.done | _converged(problem, point, scale))
        for _ in range(_STEPS):
            if values_are_readable(state.done) and bool(state.done.all()):
                break
            state = _choose(state.done, state, _step(problem, state))
        return problem, state, _judge(problem, state)


def _step(problem: _Problem, state: _State) -> _State:
    point = state.point
    slope = problem.visible(point, state.scale)
    damped = point.eigenvalues + (state.shift * slope.norm(dim=-1)).unsqueeze(-1)
    step = -_times(point.eigenvectors, slope / damped.clamp_min(torch.finfo(slope.dtype).tiny))
    eta = point.eta + step
    inside = problem.measure._in_domain(problem.shaped(eta))
    trial = problem.at(eta if inside is None else torch.where(inside.unsqueeze(-1), eta, point.eta))

    # Armijo's rule; where φ has lost its digits, the rule on slopes of Hager and Zhang (2005).
    before, after = (point.slope * step).sum(-1), (trial.slope * step).sum(-1)
    change, noise = trial.value - point.value, point.noise + trial.noise
    accepted = (change <= 1e-4 * before) | ((change <= noise) & (after <= 0.5 * before.abs()))
    if inside is not None:
        accepted = accepted & inside
    shift = torch.where(accepted, torch.where(after <= 0.5 * before.abs(), state.shift / 8, state.shift), 4 * state.shift)

    moved = _choose(accepted, trial, point)
    scale = torch.maximum(state.scale, moved.eigenvalues.sum(-1).sqrt())
    slope = problem.visible(moved, scale)
    decrement = (slope.square() / moved.eigenvalues.clamp_min(torch.finfo(slope.dtype).tiny)).sum(-1)
    ratio = torch.where(accepted, decrement / state.decrement, state.ratio)
    stalled = (decrement <= 64 * problem.eps) & (~accepted | (slope.norm(dim=-1) > 0.5 * point.slope.norm(dim=-1)))
    beyond = problem.beyond(torch.stack([_unit(-moved.slope), problem.newton(moved, scale)], -2))
    outside = state.outside if beyond is None else (beyond < -problem.tolerance(scale).unsqueeze(-1)).any(-1)
    done = outside | stalled | _converged(problem, moved, scale)
    return _State(moved, shift, scale, decrement, ratio, outside, done)


def _converged(problem: _Problem, point: _Point, scale: Tensor) -> Tensor:
    residual = problem.visible(point, scale).norm(dim=-1)
    return residual <= 4096 * problem.eps * scale + 16 * problem.eps * problem.size


def _judge(problem: _Problem, state: _State) -> _Verdict:
    """Tell an eta that was found from one that runs to infinity, towards a boundary point or past it.

    Towards the boundary the decrement falls by a constant factor at each step, in the interior faster and faster.
    """
    point, scale = state.point, state.scale
    directions = torch.stack([problem.newton(point, scale), _unit(-point.slope), _unit(point.eta - problem.start())], -2)
    ahead, behind = problem.beyond(directions), problem.beyond(-directions)
    if ahead is None or behind is None:
        ahead, behind = problem.far(point.eta, directions), problem.far(point.eta, -directions)
    tolerance = problem.tolerance(scale).unsqueeze(-1)
    settled = state.done & (state.ratio < 0.25) & ~state.outside
    touching = ((ahead.abs() <= tolerance) & (ahead + behind > 2 * tolerance)).any(-1)
    usable = ~point.value.isnan() & problem.mu.isfinite().all(-1)
    outside = usable & ~settled & (ahead < -tolerance).any(-1)
    boundary = usable & ~settled & touching & ~outside
    found = usable & state.done & ~outside & ~boundary
    return _Verdict(found, boundary, outside, ~(found | boundary | outside))


def _kept(eigenvalues: Tensor) -> Tensor:
    """Which of the ascending eigenvalues are more than rounding."""
    return eigenvalues > 16 * eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., -1:]


# Its derivatives.


def _attach(measure: Measure, mu: Tensor, problem: _Problem, state: _State, found: Tensor) -> Tensor:
    """The solution with its derivatives in mu and in the measure's tensors; a constant where it was not found.

    Two equations hold it: ∇A(eta) = mu, and eta = F y for some y, which is to be of least norm. F's pseudo-inverse G and
    the projector on its null space solve their linearisation, and stay constant.
    """
    point = state.point
    kept = _kept(point.eigenvalues)
    vectors = point.eigenvectors
    inverse = (vectors * torch.where(kept & found.unsqueeze(-1), 1 / point.eigenvalues, 0.0).unsqueeze(-2)) @ vectors.mT
    null = (vectors * (~kept).to(vectors.dtype).unsqueeze(-2)) @ vectors.mT
    start = torch.where(found.unsqueeze(-1), point.eta, problem.start())
    minimal = values_are_readable(kept) and bool(kept[found].all())
    start = start if minimal else start - _times(null, start)
    base, eta, dual = problem.shaped(start), start, _times(inverse, start)
    target = problem.flat(mu)
    for _ in range(_ORDERS):
        eta = eta + _times(inverse, target - problem.flat(measure._mean(problem.shaped(eta))))
        if not minimal:
            dual = dual + _times(inverse, eta - _image(measure, problem, base, dual))
            eta = eta + _times(null, _image(measure, problem, base, dual) - eta)
    return eta


def _image(measure: Measure, problem: _Problem, eta: Tensor, vector: Tensor) -> Tensor:
    return problem.flat(measure._fisher_vp(eta, problem.shaped(vector)))


def _fenchel(measure: Measure, eta: Tensor, mu: Tensor) -> Tensor:
    """eta·mu − A(eta), by the entropy, which keeps more digits."""
    return measure._dot(eta, mu - measure._mean(eta)) - measure._entropy(eta)


def _closed_conjugate(measure: Measure, mu: Tensor, closed: Tensor) -> Tensor:
    """A* from a closed form of `natural`; on the boundary the limit from inside, along the line to a mean."""
    finite = _lead(measure, closed.isfinite())
    interior = measure._interior()
    inner = torch.zeros_like(mu) if interior is None else torch.zeros_like(mu) + measure._align(interior, mu, len(measure.event_shape))
    centre = measure._mean(inner).detach()

    def value(point: Tensor) -> Tensor:
        eta = measure._natural(point)
        assert eta is not None
        return _fenchel(measure, eta, point)

    eps = torch.finfo(mu.dtype).eps
    edge = torch.where(_over(finite, mu), centre, mu).detach()
    near, nearer = (value(edge + share * (centre - edge)) for share in (eps**0.5, 64 * eps))
    # Towards a face of mass A* has a limit, towards one without it grows as a logarithm.
    limit = torch.where(nearer - near > 0.1, torch.inf, nearer)
    limit = torch.where(_lead(measure, closed.isnan()), torch.inf, limit)
    limit = torch.where(_lead(measure, mu.isnan()), torch.nan, limit)
    return torch.where(finite, value(torch.where(_over(finite, mu), mu, centre)), limit.detach())


# Small helpers.


def _widen(measure: Measure, mu: Tensor) -> tuple[Measure, Tensor]:
    """Both in float64, where the device has it."""
    wide = mu.dtype if mu.device.type == "mps" else torch.float64
    return measure._to(wide), mu.to(wide)


def _report(measure: Measure, mu: Tensor, *, outside: Tensor | None = None, failed: Tensor | None = None, residual: Tensor | None = None) -> None:
    """Raise for the first mu without an eta, where values are readable."""
    for mask, reason in ((outside, "outside"), (failed, "failed")):
        if mask is None or not values_are_readable(mask) or not bool(mask.any()):
            continue
        index = tuple(int(i) for i in mask.nonzero()[0])
        name, value = type(measure).__name__, [round(float(x), 6) for x in mu.detach()[index].flatten()[:8]]
        if reason == "outside":
            raise ValueError(f"mu lies outside the convex hull of the support: {name}, mu = {value} at index {index}")
        assert residual is not None
        raise ValueError(
            f"natural did not converge in {_STEPS} Newton steps: {name}, mu = {value} at index {index}, residual "
            f"{float(residual[index].norm()):.3g}; use float64, bring the points to one scale, or give the measure `_natural`"
        )


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _unit(vector: Tensor) -> Tensor:
    tiny = torch.finfo(vector.dtype).tiny
    vector = vector / vector.abs().amax(-1, keepdim=True).clamp_min(tiny)
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)


def _over(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over the leading dimensions of `like`."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim)))


def _lead(measure: Measure, mask: Tensor) -> Tensor:
    """Whether all, of a mask over events."""
    return mask.flatten(mask.ndim - len(measure.event_shape)).all(-1)


_Fields = TypeVar("_Fields", _Point, _State)


def _choose(mask: Tensor, yes: _Fields, no: _Fields) -> _Fields:
    return pytree.tree_map(lambda a, b: torch.where(_over(mask, a), a, b), yes, no)
