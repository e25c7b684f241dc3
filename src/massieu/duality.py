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
"""Newton steps before giving up. Most problems take 10, log-weights of ±50 up to 80."""
_UNROLLED = 48
"""Those of the fixed-length loop."""
_ORDERS = 3
"""Orders of derivatives that are right."""
_BOUNDARY = 1e-10
"""What part of the spread counts as no distance from the boundary."""
_FAR = 1e12
"""How many units away a mean stands for the end of the support."""
_OUTSIDE = "mu lies outside the convex hull of the support"


def natural(measure: Measure, mu: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
    """The eta of least norm with ∇A(eta) = mu: the inverse of `Measure.mean` (S6, S9).

    In closed form where the measure knows it, else by at most 100 damped Newton steps in float64, each of which
    diagonalises the Fisher information (n × n for n coordinates; up to about a thousand). The mean of the result differs
    from mu by about 1e-12 of the spread of p_eta. Where values cannot be read (under `torch.func` transforms) the steps
    are a fixed 48; `torch.compile` loops until all is done, but unrolls that loop around a transform, which then takes
    about a minute to compile.

    Derivatives in mu and in the measure's tensors are right to third order. If the family is not minimal (points within
    an affine subspace), they are those of the eta of least norm, along the subspace.

    On the boundary of the support's convex hull eta is not finite: +inf in every entry, or, in closed forms, ±inf in those
    that diverge. A mu within rounding of its dtype (at least 1e-10 of the spread) of the boundary, towards which the
    iteration diverges, is on it; so are means whose own eta lost that much. No gradient flows from there. How far the
    support reaches is asked of the measure (`_support`) or, where it does not know, of its mean far away.

    Args:
        measure: Any measure; half precision is promoted.
        mu: A mean, shaped like eta.

    Raises:
        ValueError: `mu` has another shape, is not finite, lies outside the convex hull of the support (NaN where values
            cannot be read), or was not reached; or the measure is zero.
    """
    promoted, target = measure._fit(mu=mu)
    _refuse(_some(promoted, ~target.isfinite()), promoted, target, "mu must be finite")
    closed = promoted._natural(target)
    if closed is not None:
        _refuse(_some(promoted, closed.isnan()), promoted, target, _OUTSIDE)
        return closed
    exact, wide = _widen(promoted, target)
    problem, state, verdict = _solve(exact, wide, mu.dtype)
    _refuse_failures(problem, exact, wide, state.point, verdict.failed)
    _refuse(verdict.outside, exact, wide, _OUTSIDE)
    eta = _attach(exact, wide, problem, state, verdict.found)
    other = torch.where(verdict.boundary, torch.inf, torch.nan)
    return torch.where(_over(verdict.found, eta), eta, _over(other, eta)).to(target.dtype)


def conjugate(measure: Measure, mu: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
    """A*(mu) = sup over eta of eta·mu − A(eta), in nats: −entropy(eta) at the eta of mean mu (S8).

    For a probability h it is KL(p_eta ‖ h), the least of all laws of mean mu. Its gradient is `natural`, its Hessian the
    (pseudo-)inverse of the Fisher information at eta. On the boundary it is the limit from inside: −log w_n at an atom
    that is a vertex, the value of the sub-family on a larger face, +inf where the face carries no mass; accurate to 1e-9
    (1e-4 in float32). Outside it is +inf. No gradient flows from the boundary and from outside.

    Args:
        measure: Any measure; half precision is promoted.
        mu: A mean, shaped like eta.

    Raises:
        ValueError: `mu` has another shape, is not finite, or was not reached; or the measure is zero.
    """
    promoted, target = measure._fit(mu=mu)
    _refuse(_some(promoted, ~target.isfinite()), promoted, target, "mu must be finite")
    closed = promoted._natural(target.detach())
    if closed is not None:
        value = _closed_conjugate(promoted, target, closed)
        return torch.where(_every(promoted, target.isfinite()), value, torch.nan)
    exact, wide = _widen(promoted, target)
    problem, state, verdict = _solve(exact, wide, mu.dtype)
    _refuse_failures(problem, exact, wide, state.point, verdict.failed)
    value = _fenchel(exact, _attach(exact, wide, problem, state, verdict.found), wide)
    limit = _fenchel(problem.measure, problem.eta(state.point.vector), wide.detach())
    # Towards a face that carries mass the decrement vanishes, towards any other it stays.
    limit = torch.where(state.decrement < 1e-6, limit, torch.inf)
    other = torch.where(verdict.boundary, limit, torch.where(verdict.outside, torch.inf, torch.nan))
    return torch.where(verdict.found, value, other).to(target.dtype)


# The solution, without derivatives.


class _Point(NamedTuple):
    """A point and φ's derivatives there; all fields lead with (*batch, *query)."""

    vector: Tensor  # eta, (*lead, n)
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
    done: Tensor


class _Verdict(NamedTuple):
    """What became of each mu: exactly one is true."""

    found: Tensor
    boundary: Tensor
    outside: Tensor
    failed: Tensor


class _Problem:
    """φ on flat vectors, for detached tensors, each coordinate of the points in a unit of its own.

    The unit is the coordinate's spread under the start or how far mu is from the start's mean, so that points of very
    different scales along the axes are no harder than others. Vectors below are in these units.
    """

    def __init__(self, measure: Measure, mu: Tensor, given: torch.dtype) -> None:
        self.measure: Measure = pytree.tree_map(lambda leaf: leaf.detach(), measure)
        self.event = tuple(measure.event_shape)
        self.eps = torch.finfo(mu.dtype).eps
        self.mu, self.unit = self.flat(mu.detach()), torch.ones_like(self.flat(mu.detach()))
        origin, interior = torch.zeros_like(self.mu), self.measure._interior()
        if interior is not None:
            origin = origin + self.flat(self.measure._align(interior, self.shaped(origin), len(self.event)))
        _, slope, fisher = self._derivatives(origin)
        unit = torch.maximum(fisher.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt(), slope.abs())
        unit = torch.maximum(unit, 1e-10 * unit.amax(-1, keepdim=True))
        self.unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
        self.start, self.mu = origin * self.unit, self.mu / self.unit
        self.size = self.mu.norm(dim=-1)
        self.rounding = 4 * max(torch.finfo(given).eps, self.eps) * self.size

    def shaped(self, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[:-1], *self.event)

    def flat(self, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[: vector.ndim - len(self.event)], -1)

    def eta(self, vector: Tensor) -> Tensor:
        """In the measure's own units and shape."""
        return self.shaped(vector / (self.unit if vector.ndim == self.unit.ndim else self.unit.unsqueeze(-2)))

    def _derivatives(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, ∇φ and the Fisher information."""
        eta = self.eta(vector)
        fisher = self.measure._fisher(eta).reshape(*vector.shape, vector.shape[-1])
        fisher = fisher / (self.unit.unsqueeze(-1) * self.unit.unsqueeze(-2))
        return self.measure._log_partition(eta), self.flat(self.measure._mean(eta)) / self.unit - self.mu, fisher

    def at(self, vector: Tensor, scale: Tensor) -> _Point:
        """φ to second order; its value is NaN where it, or a derivative, is not finite."""
        log_partition, slope, fisher = self._derivatives(vector)
        usable = log_partition.isfinite() & slope.isfinite().all(-1) & fisher.isfinite().flatten(-2).all(-1)
        products = vector * self.mu
        value = torch.where(usable, log_partition - products.sum(-1), torch.nan)
        noise = 16 * self.eps * (log_partition.abs() + products.abs().sum(-1))
        # A matrix that is not finite has no eigenvalues, but an error.
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.where(_over(usable, fisher), fisher, 0.0))
        eigenvalues = eigenvalues.clamp_min(torch.finfo(vector.dtype).tiny ** 0.5)
        scale = torch.maximum(scale, eigenvalues.sum(-1).sqrt())
        signal = _times(eigenvectors.mT, slope)
        rounding = self.rounding + 64 * self.eps * (self.size + scale)
        signal = torch.where(~_kept(eigenvalues) & (signal.abs() <= rounding.unsqueeze(-1)), 0.0, signal)
        return _Point(vector, value, noise, slope, eigenvalues, eigenvectors, signal, scale)

    def newton(self, point: _Point) -> Tensor:
        """The direction of the undamped step."""
        return -_times(point.eigenvectors, _unit(point.signal / point.eigenvalues))

    def converged(self, point: _Point) -> Tensor:
        return point.signal.norm(dim=-1) <= self.target(point)

    def target(self, point: _Point) -> Tensor:
        """How small ∇φ has to become."""
        return 4096 * self.eps * point.scale + 16 * self.eps * self.size

    def beyond(self, directions: Tensor) -> Tensor | None:
        """How far the support reaches beyond mu along unit vectors (*lead, k, n); None where it is not known."""
        support = self.measure._support(self.eta(directions))
        return None if support is None else support - (directions * self.mu.unsqueeze(-2)).sum(-1)

    def far(self, start: Tensor, directions: Tensor) -> Tensor:
        """`beyond` as the mean far away says it; +inf where the domain ends before."""
        points = self.eta(start.unsqueeze(-2) + _FAR * (1 + start.norm(dim=-1))[..., None, None] * directions)
        inside = self.measure._in_domain(points)
        means = self.flat(self.measure._mean(points)) / self.unit.unsqueeze(-2)
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
        point = problem.at(problem.start, torch.zeros_like(problem.size))
        size, zero = point.slope.norm(dim=-1), torch.zeros_like(problem.size)
        point = point._replace(scale=torch.maximum(point.scale, size))
        done = point.value.isnan() | problem.converged(point)
        state = _State(point, size.clamp_min(problem.eps), zero, zero, done)
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
    vector = point.vector + step
    inside = problem.measure._in_domain(problem.eta(vector))
    inside = torch.ones_like(state.done) if inside is None else inside
    trial = problem.at(torch.where(inside.unsqueeze(-1), vector, point.vector), point.scale)

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
    done = state.done | stalled | problem.converged(moved)
    if beyond is not None:
        done = done | (beyond < -problem.tolerance(moved.scale).unsqueeze(-1)).any(-1)
    return _State(moved, shift, decrement, ratio, done)


def _judge(problem: _Problem, state: _State) -> _Verdict:
    """Tell an eta that was found from one that runs to infinity, towards a boundary point or past it.

    Towards the boundary the decrement falls by a constant factor at each step, in the interior faster and faster.
    """
    point = state.point
    directions = torch.stack([problem.newton(point), _unit(-point.slope), _unit(point.vector - problem.start)], -2)
    ahead, behind = problem.beyond(directions), problem.beyond(-directions)
    if ahead is None or behind is None:
        ahead, behind = problem.far(point.vector, directions), problem.far(point.vector, -directions)
    tolerance = problem.tolerance(point.scale).unsqueeze(-1)
    settled = state.done & (state.ratio < 0.25)
    touching = ((ahead.abs() <= tolerance) & (ahead + behind > 2 * tolerance)).any(-1)
    usable = ~point.value.isnan() & problem.mu.isfinite().all(-1)
    outside = usable & (ahead < -tolerance).any(-1)
    boundary = usable & ~settled & touching & ~outside
    found = usable & state.done & ~outside & ~boundary
    return _Verdict(found, boundary, outside, ~(found | boundary | outside))


def _kept(eigenvalues: Tensor) -> Tensor:
    """Which of the ascending eigenvalues are more than rounding."""
    return eigenvalues > 16 * eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., -1:]


def _null(problem: _Problem, point: _Point) -> Tensor:
    """The projector, in the measure's units, on what A cannot see; 0 where that turns out to be seen after all."""
    # Of an orthogonal basis whose first vectors span the null space, those.
    basis = torch.linalg.qr(point.eigenvectors / problem.unit.unsqueeze(-1)).Q
    basis = basis * (~_kept(point.eigenvalues)).to(basis.dtype).unsqueeze(-2)
    null = basis @ basis.mT
    least = point.vector - problem.unit * _times(null, point.vector / problem.unit)
    inside = problem.measure._in_domain(problem.eta(least))
    slope = problem.flat(problem.measure._mean(problem.eta(least))) / problem.unit - problem.mu
    blind = slope.norm(dim=-1) <= 2 * point.slope.norm(dim=-1) + problem.target(point)
    return torch.where(_over(blind if inside is None else blind & inside, null), null, 0.0)


# Its derivatives.


def _attach(measure: Measure, mu: Tensor, problem: _Problem, state: _State, found: Tensor) -> Tensor:
    """The solution with its derivatives in mu and in the measure's tensors; a constant where it was not found.

    Two equations hold it: ∇A(eta) = mu, and eta = F y for some y, which is to be of least norm. F's pseudo-inverse G and
    the projector on its null space solve their linearisation, and stay constant.
    """
    with torch.no_grad():
        point, unit = state.point, problem.unit
        kept = _kept(point.eigenvalues)
        share = torch.where(kept & found.unsqueeze(-1), 1 / point.eigenvalues, 0.0)
        inverse = (point.eigenvectors * share.unsqueeze(-2)) @ point.eigenvectors.mT
        inverse = inverse / (unit.unsqueeze(-1) * unit.unsqueeze(-2))
        start = torch.where(found.unsqueeze(-1), point.vector, problem.start) / unit
        minimal = values_are_readable(kept) and bool(kept[found].all())
        null = torch.zeros_like(inverse) if minimal else _null(problem, point)
        seen = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device) - null
        inverse, start = seen @ inverse @ seen, _times(seen, start)
    base, eta, dual = problem.shaped(start), start, _times(inverse, start)
    target = problem.flat(mu)
    for _ in range(_ORDERS):
        eta = eta + _times(inverse, target - problem.flat(measure._mean(problem.shaped(eta))))
        if not minimal:
            dual = dual + _times(inverse, eta - _image(measure, problem, base, dual))
            eta = eta + _times(null, _image(measure, problem, base, dual) - eta)
    return problem.shaped(eta)


def _image(measure: Measure, problem: _Problem, eta: Tensor, vector: Tensor) -> Tensor:
    return problem.flat(measure._fisher_vp(eta, problem.shaped(vector)))


def _fenchel(measure: Measure, eta: Tensor, mu: Tensor) -> Tensor:
    """eta·mu − A(eta), by the entropy, which keeps more digits."""
    return measure._dot(eta, mu - measure._mean(eta)) - measure._entropy(eta)


def _closed_conjugate(measure: Measure, mu: Tensor, natural: Tensor) -> Tensor:
    """A* where `natural` is known; on the boundary its limit from inside, which is that of a closed convex function."""
    found = _every(measure, natural.isfinite())
    interior = measure._interior()
    start = torch.zeros_like(mu)
    start = start if interior is None else start + measure._align(interior, mu, len(measure.event_shape))
    centre = measure._mean(start).detach()

    def value(point: Tensor) -> Tensor:
        eta = measure._natural(point)
        assert eta is not None
        return _fenchel(measure, eta, point)

    eps, edge = torch.finfo(mu.dtype).eps, mu.detach()
    far, near, limit = (value(edge + eps**power * (centre - edge)) for power in (0.5, 0.7, 0.9))
    # Towards a face that carries mass A* settles, towards any other it grows as a logarithm.
    growing = (limit - near > 0.1 * (near - far)) & (limit - near > 1e3 * eps**0.75 * (1 + limit.abs()))
    limit = torch.where(growing | _some(measure, natural.isnan()), torch.inf, limit).detach()
    return torch.where(found, value(torch.where(_over(found, mu), mu, centre)), limit)


# Small helpers.


def _widen(measure: Measure, mu: Tensor) -> tuple[Measure, Tensor]:
    """Both in float64, where the device has it."""
    wide = mu.dtype if mu.device.type == "mps" else torch.float64
    return measure._to(wide), mu.to(wide)


def _refuse(mask: Tensor, measure: Measure, mu: Tensor, reason: str, advice: str = "") -> None:
    """Raise for the first item of the mask, where values are readable."""
    if not values_are_readable(mask) or not bool(mask.any()):
        return
    index = tuple(int(i) for i in mask.nonzero()[0])
    numbers = mu.detach()[index].flatten()
    shown = ", ".join(f"{float(x):.6g}" for x in numbers[:6]) + (", …" if len(numbers) > 6 else "")
    place = f" at index {index}" if index else ""
    raise ValueError(f"{reason}: {type(measure).__name__}, mu = [{shown}]{place}{advice}")


def _refuse_failures(problem: _Problem, measure: Measure, mu: Tensor, point: _Point, failed: Tensor) -> None:
    empty = point.value.isnan()
    _refuse(empty, measure, mu, "A is not finite where Newton's method starts (no mass, or `_interior` is not inside)")
    if values_are_readable(failed) and bool(failed.any()):
        residual = float((point.slope * problem.unit).norm(dim=-1)[failed].amax())
        advice = f"; residual {residual:.3g}. Use float64, move mu off the boundary, or give the measure `_natural`"
        _refuse(failed, measure, mu, f"no convergence in {_STEPS} Newton steps", advice)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _unit(vector: Tensor) -> Tensor:
    tiny = torch.finfo(vector.dtype).tiny
    vector = vector / vector.abs().amax(-1, keepdim=True).clamp_min(tiny)
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)


def _over(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over the leading dimensions of `like`."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim)))


def _every(measure: Measure, mask: Tensor) -> Tensor:
    """Whether it holds for all entries of an event."""
    return mask.flatten(mask.ndim - len(measure.event_shape)).all(-1)


def _some(measure: Measure, mask: Tensor) -> Tensor:
    return ~_every(measure, ~mask)


def _choose(mask: Tensor, yes: _Point, no: _Point) -> _Point:
    return pytree.tree_map(lambda a, b: torch.where(_over(mask, a), a, b), yes, no)
