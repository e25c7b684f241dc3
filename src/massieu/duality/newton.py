"""Newton's method for the eta of a given mean, and what is wrong with a mean that has none.

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

from massieu.foundation.transforms import any_true, in_functorch, repeat, values_are_readable
from massieu.measures import Measure

STEPS = 100
"""Newton steps before giving up. Most problems take 10, log-weights of ±50 up to 80."""
_UNROLLED = 48
"""Newton steps in a compiled transform, which holds a copy of each."""
_BOUNDARY = 1e-10
"""A distance from the boundary below this part of the spread counts as none."""
_VANISHING = 1e-6
"""A variance below this part of the spread's square counts as none."""
_FARTHEST_MASS = 1e10
"""How many units an eta whose mean has come to rounding of a face of mass is away at most."""
_FAR = 1e12
"""The mean at an eta so many units away stands for the end of the support."""
_TINY = 1e-36
"""The least eigenvalue: in the coordinates' units eigenvalues are of order one, down to the square of rounding."""


class _Point(NamedTuple):
    """A point and φ's derivatives there; all fields lead with (*batch, *query)."""

    vector: Tensor  # eta, (*lead, n)
    value: Tensor  # φ
    value_rounding: Tensor  # how far rounding may have moved φ
    gradient: Tensor  # ∇φ = mean − mu, (*lead, n)
    eigenvalues: Tensor  # of the Fisher information, (*lead, n)
    eigenvectors: Tensor  # (*lead, n, n)
    is_seen: Tensor  # whether an eigenvalue is more than rounding: A sees its direction, (*lead, n)
    seen_gradient: Tensor  # ∇φ in the eigenbasis, 0 where it is rounding in a direction that A cannot see, (*lead, n)
    scale: Tensor  # a length of the support: the largest spread of p_eta met so far


class _State(NamedTuple):
    """The iteration of each item."""

    point: _Point
    shift: Tensor  # τ
    done: Tensor


class Solution(NamedTuple):
    """How the iteration of each mu ended: exactly one of the first four is true."""

    found: Tensor  # an eta was found
    boundary: Tensor  # the iterates run to infinity, and mu is on the boundary of the support's convex hull
    outside: Tensor  # mu is outside of it
    failed: Tensor  # none of these is known
    eta: Tensor  # of least norm where found; elsewhere the start, (*lead, n)
    inverse: Tensor  # the Fisher information's pseudo-inverse where found, 0 elsewhere, (*lead, n, n)
    null: Tensor | None  # the projector on what A cannot see; None where it is known to be nothing
    last: Tensor  # the last iterate, shaped like eta
    halfway: Tensor  # half of the way back along the directions in which the variance vanishes, shaped like eta
    face_has_mass: Tensor  # whether A* is known to be finite at mu, if it is on the boundary
    residual: Tensor  # ‖∇A − mu‖ at the last iterate; NaN where A is not finite at the start


class _Problem:
    """φ on flat vectors, for detached tensors, each coordinate of the points in a unit of its own.

    The unit is the coordinate's spread under the start or how far mu is from the start's mean, so that points of very
    different scales along the axes are no harder than others. Vectors below are in these units.
    """

    def __init__(self, measure: Measure, mu: Tensor, mu_dtype: torch.dtype) -> None:
        self.measure: Measure = pytree.tree_map(lambda leaf: leaf.detach(), measure)
        self.event = tuple(measure.event_shape)
        self.eps = torch.finfo(mu.dtype).eps
        self.mu = self.flat(mu.detach())
        self.unit = torch.ones_like(self.mu)
        start = torch.zeros_like(self.mu)
        interior = self.measure._interior()
        if interior is not None:
            start = start + self.flat(self.measure._align(interior, self.shaped(start), len(self.event)))
        _, gradient, fisher = self._derivatives(start)
        spread = fisher.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        unit = torch.maximum(spread, gradient.abs())
        unit = torch.maximum(unit, 1e-10 * unit.amax(-1, keepdim=True))
        self.unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
        # From here on in units: means are divided by them, and etas multiplied.
        self.start = start * self.unit
        self.mu = self.mu / self.unit
        self.size = self.mu.norm(dim=-1)
        self.rounding = 4 * max(torch.finfo(mu_dtype).eps, self.eps) * self.size

    def shaped(self, vector: Tensor) -> Tensor:
        """A flat vector in the shape of the measure's events."""
        return vector.reshape(*vector.shape[:-1], *self.event)

    def flat(self, vector: Tensor) -> Tensor:
        """An event as a vector of n numbers."""
        return vector.reshape(*vector.shape[: vector.ndim - len(self.event)], math.prod(self.event))

    def eta(self, vector: Tensor) -> Tensor:
        """The natural parameter in the measure's own units and shape, of a vector (*lead, n) or of several (*lead, k, n)."""
        unit = self.unit if vector.ndim == self.unit.ndim else self.unit.unsqueeze(-2)
        return self.shaped(vector / unit)

    def _derivatives(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, ∇φ and the Fisher information."""
        eta = self.eta(vector)
        fisher = self.measure._fisher(eta).reshape(*vector.shape, vector.shape[-1])
        fisher = fisher / (self.unit.unsqueeze(-1) * self.unit.unsqueeze(-2))
        gradient = self.flat(self.measure._mean(eta)) / self.unit - self.mu
        return self.measure._log_partition(eta), gradient, fisher

    def at(self, vector: Tensor, scale: Tensor) -> _Point:
        """φ to second order; its value is NaN where it, or a derivative, is not finite."""
        log_partition, gradient, fisher = self._derivatives(vector)
        usable = log_partition.isfinite() & gradient.isfinite().all(-1) & fisher.isfinite().flatten(-2).all(-1)
        products = vector * self.mu
        value = torch.where(usable, log_partition - products.sum(-1), torch.nan)
        # A is the logarithm of a sum: where it is near 0, its rounding is still that of the sum, of order one.
        value_rounding = 16 * self.eps * (1 + log_partition.abs() + products.abs().sum(-1))
        # The eigenvalue routine raises at a matrix that is not finite.
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.where(lead_mask(usable, fisher), fisher, 0.0))
        eigenvalues = eigenvalues.clamp_min(_TINY)
        least = torch.maximum(16 * vector.shape[-1] * self.eps * eigenvalues[..., -1], (16 * self.eps * self.size) ** 2)
        is_seen = (eigenvalues > least.unsqueeze(-1)) & (eigenvalues > 2 * _TINY)
        scale = torch.maximum(scale, eigenvalues.sum(-1).sqrt())
        seen_gradient = times(eigenvectors.mT, gradient)
        rounding = self.rounding + 64 * self.eps * (self.size + scale)
        seen_gradient = torch.where(~is_seen & (seen_gradient.abs() <= rounding.unsqueeze(-1)), 0.0, seen_gradient)
        return _Point(
            vector=vector,
            value=value,
            value_rounding=value_rounding,
            gradient=gradient,
            eigenvalues=eigenvalues,
            eigenvectors=eigenvectors,
            is_seen=is_seen,
            seen_gradient=seen_gradient,
            scale=scale,
        )

    def newton(self, point: _Point) -> Tensor:
        """The direction of the undamped step."""
        return -times(point.eigenvectors, _unit(point.seen_gradient / point.eigenvalues))

    def converged(self, point: _Point) -> Tensor:
        """Whether ∇φ is small enough."""
        return point.seen_gradient.norm(dim=-1) <= self.target(point)

    def target(self, point: _Point) -> Tensor:
        """How small ∇φ has to become."""
        return 64 * self.eps * point.scale + 16 * self.eps * self.size

    def beyond(self, directions: Tensor) -> Tensor | None:
        """How far the support reaches beyond mu along unit vectors (*lead, k, n); None where it is not known."""
        support = self.measure._support(self.eta(directions))
        return None if support is None else support - (directions * self.mu.unsqueeze(-2)).sum(-1)

    def far(self, start: Tensor, directions: Tensor) -> Tensor:
        """The same as `beyond`, as the mean far away along the directions shows it; +inf where the domain ends before."""
        distance = _FAR * (1 + start.norm(dim=-1))
        points = self.eta(start.unsqueeze(-2) + distance[..., None, None] * directions)
        inside = self.measure._in_domain(points)
        means = self.flat(self.measure._mean(points)) / self.unit.unsqueeze(-2)
        gap = ((means - self.mu.unsqueeze(-2)) * directions).sum(-1)
        gap = torch.where(gap.isnan(), torch.inf, gap)
        return gap if inside is None else torch.where(inside, gap, torch.inf)

    def tolerance(self, scale: Tensor) -> Tensor:
        """How near to the boundary counts as on it; for a mu that was not reached, its own rounding is added."""
        return _BOUNDARY * scale + 64 * self.eps * self.size


def solve(measure: Measure, mu: Tensor, mu_dtype: torch.dtype) -> Solution:
    """Newton's method, each mu by itself.

    Args:
        measure: In the precision in which it is solved.
        mu: In the same precision.
        mu_dtype: The dtype in which mu was given: its rounding may have moved mu off the hull, which is forgiven.
    """
    with torch.no_grad():
        problem = _Problem(measure, mu, mu_dtype)
        point = problem.at(problem.start, torch.zeros_like(problem.size))
        distance = point.gradient.norm(dim=-1)
        # The support is at least as long as mu is far from the first mean.
        point = point._replace(scale=torch.maximum(point.scale, distance))
        done = point.value.isnan() | problem.converged(point)
        state = _State(point, shift=distance.clamp_min(problem.eps), done=done)
        # Around a transform the compiler copies the steps.
        limit = _UNROLLED if torch.compiler.is_compiling() and in_functorch() else STEPS
        state = repeat(partial(_step, problem), state, lambda state: ~state.done, limit)
        return _solution(problem, state)


def _step(problem: _Problem, state: _State) -> _State:
    """One trial of each item that is not done; the others keep their point."""
    point = state.point
    damped = point.eigenvalues + (state.shift * point.seen_gradient.norm(dim=-1)).unsqueeze(-1)
    step = -times(point.eigenvectors, point.seen_gradient / damped)
    vector = point.vector + step
    inside = problem.measure._in_domain(problem.eta(vector))
    inside = torch.ones_like(state.done) if inside is None else inside
    trial = problem.at(torch.where(inside.unsqueeze(-1), vector, point.vector), point.scale)

    # Armijo's rule; where φ has lost its digits, the rule on slopes of Hager and Zhang (2005).
    before = (point.gradient * step).sum(-1)
    after = (trial.gradient * step).sum(-1)
    change = trial.value - point.value
    rounding = point.value_rounding + trial.value_rounding
    is_flat_enough = after <= -0.5 * before
    falls = (change <= 1e-4 * before) | ((change <= rounding) & is_flat_enough)
    accepted = inside & ~state.done & falls
    shift = state.shift * torch.where(accepted, torch.where(is_flat_enough, 0.125, 1.0), 4.0)

    moved = _choose(accepted, trial, point)
    # As near as rounding lets it come: the Newton decrement, twice what A* is short of, is rounding too.
    decrement = (moved.seen_gradient.square() / moved.eigenvalues).sum(-1)
    stalled = (decrement <= 64 * problem.eps) & (moved.gradient.norm(dim=-1) > 0.5 * point.gradient.norm(dim=-1))
    done = state.done | stalled | problem.converged(moved)
    # A support that ends before mu, in a direction in which the iterates run, has mu outside: they would run for ever.
    beyond = problem.beyond(torch.stack([_unit(-moved.gradient), problem.newton(moved)], -2))
    if beyond is not None:
        done = done | (beyond < -(problem.tolerance(moved.scale) + problem.rounding).unsqueeze(-1)).any(-1)
    return _State(moved, shift, done)


def _solution(problem: _Problem, state: _State) -> Solution:
    """The solution in the measure's own units, from the last state."""
    point = state.point
    unit = problem.unit
    end = _ends(problem, state)
    inverse_eigenvalues = torch.where(point.is_seen & end.found.unsqueeze(-1), 1 / point.eigenvalues, 0.0)
    inverse = (point.eigenvectors * inverse_eigenvalues.unsqueeze(-2)) @ point.eigenvectors.mT
    inverse = inverse / (unit.unsqueeze(-1) * unit.unsqueeze(-2))
    eta = torch.where(end.found.unsqueeze(-1), point.vector, problem.start) / unit
    null = None
    if not values_are_readable(end.found) or any_true(end.found.unsqueeze(-1) & ~point.is_seen):
        # Eta is to be of least norm in the measure's units, in which unseen and seen directions are not orthogonal yet.
        null = _null(problem, point)
        seen = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device) - null
        inverse = seen @ inverse @ seen
        eta = times(seen, eta)
    return Solution(
        found=end.found,
        boundary=end.boundary,
        outside=end.outside,
        failed=~(end.found | end.boundary | end.outside),
        eta=eta,
        inverse=inverse,
        null=null,
        last=problem.eta(point.vector),
        halfway=problem.eta(point.vector - 0.5 * end.vanishing_part),
        # The mean comes near a face of mass exponentially in ‖eta‖, near any other as 1/‖eta‖ or slower.
        face_has_mass=(point.vector - problem.start).norm(dim=-1) < _FARTHEST_MASS,
        residual=torch.where(point.value.isnan(), torch.nan, (point.gradient * unit).norm(dim=-1)),
    )


class _Ends(NamedTuple):
    """How iterations ended; at most one of the first three is true."""

    found: Tensor
    boundary: Tensor  # the iterates run to infinity, towards a point of the boundary
    outside: Tensor  # they run past it
    vanishing_part: Tensor  # the part of the way in directions in which the variance vanishes, (*lead, n)


def _ends(problem: _Problem, state: _State) -> _Ends:
    """Whether each item has its eta, and if not, whether mu is on the boundary or outside.

    There iterates run along a direction in which the support ends at mu, or before it, and in which the variance vanishes.
    """
    point = state.point
    moved = point.vector - problem.start
    vanishing = point.eigenvalues < _VANISHING * point.scale.square().unsqueeze(-1)
    vanishing_part = times(point.eigenvectors, torch.where(vanishing, times(point.eigenvectors.mT, moved), 0.0))
    candidates = [problem.newton(point), -point.gradient, moved, vanishing_part]
    directions = torch.stack([_unit(candidate) for candidate in candidates], -2)
    # The mean far away, since the support of an unbounded measure may be infinite a rounding beside the direction.
    ahead = problem.far(point.vector, directions)
    behind = problem.far(point.vector, -directions)
    beyond = problem.beyond(directions)
    if beyond is None:
        beyond = ahead
    tolerance = problem.tolerance(point.scale).unsqueeze(-1)
    with_rounding = tolerance + problem.rounding.unsqueeze(-1)
    near = torch.where(state.done.unsqueeze(-1), tolerance, with_rounding)
    usable = ~point.value.isnan() & problem.mu.isfinite().all(-1)
    outside = usable & (beyond < -with_rounding).any(-1)
    # The support ends at mu, and has a width along the direction; in one without width it ends at every mu.
    touches = ((ahead.abs() <= near) & (ahead + behind > 2 * with_rounding)).any(-1)
    boundary = usable & ~outside & touches
    found = usable & state.done & ~outside & ~boundary
    return _Ends(found, boundary, outside, vanishing_part)


def _null(problem: _Problem, point: _Point) -> Tensor:
    """The projector, in the measure's units, on what A cannot see; 0 where that turns out to be seen after all."""
    # QR makes the eigenvectors orthogonal in the measure's units, too: the unseen come first, and keep their span.
    basis = torch.linalg.qr(point.eigenvectors / problem.unit.unsqueeze(-1)).Q
    basis = basis * (~point.is_seen).to(basis.dtype).unsqueeze(-2)
    null = basis @ basis.mT
    projected = point.vector - problem.unit * times(null, point.vector / problem.unit)
    inside = problem.measure._in_domain(problem.eta(projected))
    gradient = problem.flat(problem.measure._mean(problem.eta(projected))) / problem.unit - problem.mu
    # The mean must not move along what A cannot see.
    is_unseen = gradient.norm(dim=-1) <= 2 * point.gradient.norm(dim=-1) + problem.target(point)
    if inside is not None:
        is_unseen = is_unseen & inside
    return torch.where(lead_mask(is_unseen, null), null, 0.0)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix times a vector, of each item."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def lead_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of the leading dimensions, with dimensions of size 1 behind them so that it broadcasts to `like`."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim)))


def _unit(vector: Tensor) -> Tensor:
    """The vector at length 1, or 0; first divided by its largest entry, whose square may be beyond the dtype's range."""
    tiny = torch.finfo(vector.dtype).tiny
    vector = vector / vector.abs().amax(-1, keepdim=True).clamp_min(tiny)
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)


def _choose(mask: Tensor, yes: _Point, no: _Point) -> _Point:
    """`yes` for the items of the mask, `no` for the others."""
    return pytree.tree_map(lambda a, b: torch.where(lead_mask(mask, a), a, b), yes, no)
