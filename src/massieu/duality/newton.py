"""Newton's method for the eta of a given mean, and the telling apart of those that have none.

The convex φ(eta) = A(eta) − eta·mu is minimised with the shift of Doikov (2023, arXiv 2308.14742), steps
−(F + τ‖∇φ‖)⁻¹∇φ, with τ raised where a trial fails and lowered where it succeeds: convergent from everywhere and
quadratic at the end. Nothing here is differentiated.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.foundation.transforms import in_functorch, repeat, some, values_are_readable
from massieu.measures import Measure

STEPS = 100
"""Newton steps before giving up. Most problems take 10, log-weights of ±50 up to 80."""
_UNROLLED = 48
"""Those that are copied into a compiled transform."""
_BOUNDARY = 1e-10
"""What part of the spread counts as no distance from the boundary."""
_VANISHING = 1e-6
"""What part of the spread's square is a vanishing variance."""
_MASSIVE = 1e10
"""How many units an eta whose mean has come to rounding of a face of mass is away at most."""
_FAR = 1e12
"""How many units away a mean stands for the end of the support."""
_TINY = 1e-36
"""Where eigenvalues end: those of coordinates in their units are of order one, down to the square of rounding."""


class _Point(NamedTuple):
    """A point and φ's derivatives there; all fields lead with (*batch, *query)."""

    vector: Tensor  # eta, (*lead, n)
    value: Tensor  # φ
    noise: Tensor  # rounding of φ
    slope: Tensor  # ∇φ = mean − mu, (*lead, n)
    eigenvalues: Tensor  # of the Fisher information, (*lead, n)
    eigenvectors: Tensor  # (*lead, n, n)
    kept: Tensor  # which eigenvalues are more than rounding, (*lead, n)
    signal: Tensor  # ∇φ in the eigenbasis, less what is rounding in directions that A cannot see, (*lead, n)
    scale: Tensor  # a length of the support: the largest spread of p_eta met so far


class _State(NamedTuple):
    point: _Point
    shift: Tensor  # τ
    done: Tensor


class Solution(NamedTuple):
    """What became of each mu: exactly one of the first four is true."""

    found: Tensor
    boundary: Tensor  # the iterates run to infinity, and mu is on the boundary of the support's convex hull
    outside: Tensor
    failed: Tensor
    eta: Tensor  # of least norm where found; elsewhere the start, (*lead, n)
    inverse: Tensor  # the Fisher information's pseudo-inverse where found, 0 elsewhere, (*lead, n, n)
    null: Tensor | None  # the projector on what A cannot see; None where it is known to be nothing
    last: Tensor  # the last iterate, shaped like eta
    halfway: Tensor  # as far again from where the variance vanishes, shaped like eta
    massive: Tensor  # whether A* is known to be finite there, if on the boundary
    residual: Tensor  # ‖∇A − mu‖ there; NaN where A is not finite at the start


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
        return vector.reshape(*vector.shape[: vector.ndim - len(self.event)], math.prod(self.event))

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
        # A is the logarithm of a sum: where it is near 0, its rounding is still that of the sum, of order one.
        noise = 16 * self.eps * (1 + log_partition.abs() + products.abs().sum(-1))
        # A matrix that is not finite has no eigenvalues, but an error.
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.where(over(usable, fisher), fisher, 0.0))
        eigenvalues = eigenvalues.clamp_min(_TINY)
        least = torch.maximum(16 * vector.shape[-1] * self.eps * eigenvalues[..., -1], (16 * self.eps * self.size) ** 2)
        kept = (eigenvalues > least.unsqueeze(-1)) & (eigenvalues > 2 * _TINY)
        scale = torch.maximum(scale, eigenvalues.sum(-1).sqrt())
        signal = times(eigenvectors.mT, slope)
        rounding = self.rounding + 64 * self.eps * (self.size + scale)
        signal = torch.where(~kept & (signal.abs() <= rounding.unsqueeze(-1)), 0.0, signal)
        return _Point(vector, value, noise, slope, eigenvalues, eigenvectors, kept, signal, scale)

    def newton(self, point: _Point) -> Tensor:
        """The direction of the undamped step."""
        return -times(point.eigenvectors, _unit(point.signal / point.eigenvalues))

    def converged(self, point: _Point) -> Tensor:
        return point.signal.norm(dim=-1) <= self.target(point)

    def target(self, point: _Point) -> Tensor:
        """How small ∇φ has to become."""
        return 64 * self.eps * point.scale + 16 * self.eps * self.size

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
        """How near to the boundary counts as on it; for a mu that was not reached, its own rounding is added."""
        return _BOUNDARY * scale + 64 * self.eps * self.size


def solve(measure: Measure, mu: Tensor, given: torch.dtype) -> Solution:
    """Newton's method, each mu on its own; `given` is the dtype mu had, whose rounding is forgiven."""
    with torch.no_grad():
        problem = _Problem(measure, mu, given)
        point = problem.at(problem.start, torch.zeros_like(problem.size))
        size = point.slope.norm(dim=-1)
        point = point._replace(scale=torch.maximum(point.scale, size))
        done = point.value.isnan() | problem.converged(point)
        state = _State(point, size.clamp_min(problem.eps), done)
        # Around a transform the compiler copies the steps.
        limit = _UNROLLED if torch.compiler.is_compiling() and in_functorch() else STEPS
        state = repeat(partial(_step, problem), state, lambda state: ~state.done, limit)
        return _conclude(problem, state)


def _step(problem: _Problem, state: _State) -> _State:
    """One trial of each item that is not done; the others keep their point."""
    point = state.point
    damped = point.eigenvalues + (state.shift * point.signal.norm(dim=-1)).unsqueeze(-1)
    step = -times(point.eigenvectors, point.signal / damped)
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
    # As near as rounding lets it come: the decrement, twice what A* is short of, is rounding too.
    decrement = (moved.signal.square() / moved.eigenvalues).sum(-1)
    stalled = (decrement <= 64 * problem.eps) & (moved.slope.norm(dim=-1) > 0.5 * point.slope.norm(dim=-1))
    beyond = problem.beyond(torch.stack([_unit(-moved.slope), problem.newton(moved)], -2))
    done = state.done | stalled | problem.converged(moved)
    if beyond is not None:
        done = done | (beyond < -(problem.tolerance(moved.scale) + problem.rounding).unsqueeze(-1)).any(-1)
    return _State(moved, shift, done)


def _conclude(problem: _Problem, state: _State) -> Solution:
    point, unit = state.point, problem.unit
    found, boundary, outside, along = _judge(problem, state)
    share = torch.where(point.kept & found.unsqueeze(-1), 1 / point.eigenvalues, 0.0)
    inverse = (point.eigenvectors * share.unsqueeze(-2)) @ point.eigenvectors.mT
    inverse = inverse / (unit.unsqueeze(-1) * unit.unsqueeze(-2))
    eta = torch.where(found.unsqueeze(-1), point.vector, problem.start) / unit
    null = None
    if not values_are_readable(found) or some(found.unsqueeze(-1) & ~point.kept):
        null = _null(problem, point)
        seen = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device) - null
        inverse, eta = seen @ inverse @ seen, times(seen, eta)
    residual = torch.where(point.value.isnan(), torch.nan, (point.slope * unit).norm(dim=-1))
    failed = ~(found | boundary | outside)
    last = problem.eta(point.vector)
    # The mean comes near a face of mass exponentially in ‖eta‖, near any other as 1/‖eta‖ or slower.
    massive = (point.vector - problem.start).norm(dim=-1) < _MASSIVE
    halfway = problem.eta(point.vector - 0.5 * along)
    return Solution(found, boundary, outside, failed, eta, inverse, null, last, halfway, massive, residual)


def _judge(problem: _Problem, state: _State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether an eta was found, or the iterates run to infinity, towards a boundary point or past it; and the way there.

    They run along a direction in which the support ends at mu, or before it, and in which the variance vanishes.
    """
    point = state.point
    moved = point.vector - problem.start
    vanishing = point.eigenvalues < _VANISHING * point.scale.square().unsqueeze(-1)
    along = times(point.eigenvectors, torch.where(vanishing, times(point.eigenvectors.mT, moved), 0.0))
    candidates = problem.newton(point), -point.slope, moved, along
    directions = torch.stack([_unit(candidate) for candidate in candidates], -2)
    # The mean far away, since the support of an unbounded measure may be infinite a rounding beside the direction.
    ahead, behind = problem.far(point.vector, directions), problem.far(point.vector, -directions)
    end = problem.beyond(directions)
    near = problem.tolerance(point.scale)
    forgiven = (near + problem.rounding).unsqueeze(-1)
    near = torch.where(state.done.unsqueeze(-1), near.unsqueeze(-1), forgiven)
    usable = ~point.value.isnan() & problem.mu.isfinite().all(-1)
    outside = usable & ((ahead if end is None else end) < -forgiven).any(-1)
    touching = ((ahead.abs() <= near) & (ahead + behind > 2 * forgiven)).any(-1)
    boundary = usable & ~outside & touching
    return usable & state.done & ~outside & ~boundary, boundary, outside, along


def _null(problem: _Problem, point: _Point) -> Tensor:
    """The projector, in the measure's units, on what A cannot see; 0 where that turns out to be seen after all."""
    # Of an orthogonal basis whose first vectors span the null space, those.
    basis = torch.linalg.qr(point.eigenvectors / problem.unit.unsqueeze(-1)).Q
    basis = basis * (~point.kept).to(basis.dtype).unsqueeze(-2)
    null = basis @ basis.mT
    least = point.vector - problem.unit * times(null, point.vector / problem.unit)
    inside = problem.measure._in_domain(problem.eta(least))
    slope = problem.flat(problem.measure._mean(problem.eta(least))) / problem.unit - problem.mu
    blind = slope.norm(dim=-1) <= 2 * point.slope.norm(dim=-1) + problem.target(point)
    return torch.where(over(blind if inside is None else blind & inside, null), null, 0.0)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def over(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over the leading dimensions of `like`."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim)))


def _unit(vector: Tensor) -> Tensor:
    tiny = torch.finfo(vector.dtype).tiny
    vector = vector / vector.abs().amax(-1, keepdim=True).clamp_min(tiny)
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)


def _choose(mask: Tensor, yes: _Point, no: _Point) -> _Point:
    return pytree.tree_map(lambda a, b: torch.where(over(mask, a), a, b), yes, no)
