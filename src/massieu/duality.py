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

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

from massieu.measures import Measure
from massieu.measures.base import values_are_readable

_STEPS = 100
_UNROLLED = 48
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
    signal: Tensor  # ∇φ in the eigenbasis, less what is rounding in directions that A cannot see, (*lead, n)
    scale: Tensor  # a length of the support: the largest spread of p_eta met so far


class _State(NamedTuple):
    point: _Point
    shift: Tensor  # τ
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

    def at(self, eta: Tensor, scale: Tensor) -> _Point:
        """φ to second order; its value is NaN where it, or a derivative, is not finite."""
        point = self.shaped(eta)
        log_partition, slope = self.measure._log_partition(point), self.flat(self.measure._mean(point)) - self.mu
        fisher = self.measure._fisher(point).reshape(*eta.shape, eta.shape[-1])
        usable = log_partition.isfinite() & slope.isfinite().all(-1) & fisher.isfinite().flatten(-2).all(-1)
        products = eta * self.mu
        value = torch.where(usable, log_partition - products.sum(-1), torch.nan)
        noise = 16 * self.eps * (log_partition.abs() + products.abs().sum(-1))
        # A matrix that is not finite has no eigenvalues, but an error.
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.where(_over(usable, fisher), fisher, 0.0))
        eigenvalues = eigenvalues.clamp_min(torch.finfo(eta.dtype).tiny ** 0.5)
        scale = torch.maximum(scale, eigenvalues.sum(-1).sqrt())
        signal = _times(eigenvectors.mT, slope)
        rounding = self.rounding + 64 * self.eps * (self.size + scale)
        signal = torch.where(~_kept(eigenvalues) & (signal.abs() <= rounding.unsqueeze(-1)), 0.0, signal)
        return _Point(eta, value, noise, slope, eigenvalues, eigenvectors, signal, scale)

    def newton(self, point: _Point) -> Tensor:
        """The direction of the undamped step."""
        return -_times(point.eigenvectors, _unit(point.signal / point.eigenvalues))

    def converged(self, point: _Point) -> Tensor:
        return point.signal.norm(dim=-1) <= 4096 * self.eps * point.scale + 16 * self.eps * self.size

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
        point = problem.at(problem.start(), torch.zeros_like(problem.size))
        size, zero = point.slope.norm(dim=-1), torch.zeros_like(problem.size)
        point = point._replace(scale=torch.maximum(point.scale, size))
        done = point.value.isnan() | problem.converged(point)
        state = _State(point, size.clamp_min(problem.eps), zero, zero, torch.zeros_like(done), done)
        state = _repeat(partial(_step, problem), state)
        return problem, state, _judge(problem, state)


def _repeat(step: Callable[[_State], _State], state: _State) -> _State:
    """Steps until all is done; as many as are ever needed where that cannot be read."""
    if torch.compiler.is_compiling() and not torch._C._functorch.get_dynamic_layer_stack_depth():  # pyright: ignore[reportAttributeAccessIssue]
        # A loop in the compiled graph, which takes tensors of their own memory: unrolled, it takes a minute to compile.
        structure = pytree.tree_structure(state)

        def leaves(state: _State) -> list[Tensor]:
            return [leaf.clone(memory_format=torch.contiguous_format) for leaf in pytree.tree_leaves(state)]

        def body(count: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            return count + 1, *leaves(step(pytree.tree_unflatten(parts, structure)))

        def unfinished(count: Tensor, *parts: Tensor) -> Tensor:
            return (count < _STEPS) & ~parts[-1].all()

        _, *parts = while_loop(unfinished, body, (torch.zeros((), dtype=torch.int64), *leaves(state)))
        return pytree.tree_unflatten(parts, structure)
    readable = values_are_readable(state.done)
    for _ in range(_STEPS if readable else _UNROLLED):
        if readable and bool(state.done.all()):
            break
        state = step(state)
    return state


def _step(problem: _Problem, state: _State) -> _State:
    """One trial of each item that is not done; the others keep their point."""
    point = state.point
    damped = point.eigenvalues + (state.shift * point.signal.norm(dim=-1)).unsqueeze(-1)
    step = -_times(point.eigenvectors, point.signal / damped)
    eta = point.eta + step
    inside = problem.measure._in_domain(problem.shaped(eta))
    inside = torch.ones_like(state.done) if inside is None else inside
    trial = problem.at(torch.where(inside.unsqueeze(-1), eta, point.eta), point.scale)

    # Armijo's rule; where φ has lost its digits, the rule on slopes of Hager and Zhang (2005).
    before, after = (point.slope * step).sum(-1), (trial.slope * step).sum(-1)
    change, noise = trial.value - point.value, point.noise + trial.noise
    short = after <= -0.5 * before
    accepted = inside & ~state.done & ((change <= 1e-4 * before) | ((change <= noise) & short))
    shift = state.shift * torch.where(accepted, torch.where(short, 0.125, 1.0), 4.0)

    moved = _choose(accepted, trial, point)
    decrement = (moved.signal.square() / moved.eigenvalues).sum(-1)
    ratio = torch.where(accepted, decrement / state.decrement, state.ratio)
    # As near as rounding lets it come: A* is exact.
    stalled = (decrement <= 64 * problem.eps) & (moved.slope.norm(dim=-1) > 0.5 * point.slope.norm(dim=-1))
    beyond = problem.beyond(torch.stack([_unit(-moved.slope), problem.newton(moved)], -2))
    outside = state.outside
    if beyond is not None:
        outside = outside | (beyond < -problem.tolerance(moved.scale).unsqueeze(-1)).any(-1)
    done = state.done | outside | stalled | problem.converged(moved)
    return _State(moved, shift, decrement, ratio, outside, done)


def _judge(problem: _Problem, state: _State) -> _Verdict:
    """Tell an eta that was found from one that runs to infinity, towards a boundary point or past it.

    Towards the boundary the decrement falls by a constant factor at each step, in the interior faster and faster.
    """
    point = state.point
    directions = torch.stack([problem.newton(point), _unit(-point.slope), _unit(point.eta - problem.start())], -2)
    ahead, behind = problem.beyond(directions), problem.beyond(-directions)
    if ahead is None or behind is None:
        ahead, behind = problem.far(point.eta, directions), problem.far(point.eta, -directions)
    tolerance = problem.tolerance(point.scale).unsqueeze(-1)
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


def _choose(mask: Tensor, yes: _Point, no: _Point) -> _Point:
    return pytree.tree_map(lambda a, b: torch.where(_over(mask, a), a, b), yes, no)
