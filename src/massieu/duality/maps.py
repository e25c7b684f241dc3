"""From the mean back to the natural parameter, and the convex conjugate of A."""

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.duality.newton import STEPS, Solution, lead_mask, solve, times
from massieu.errors import ConvergenceError
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import any_true, derivative_orders, unwrapped, values_are_readable
from massieu.measures import Measure
from massieu.solve import Status

_GROWTH = 0.25 * math.log(2)
"""A* has a limit if it grows by less than this on the second half of the way: half of the least growth without one."""
_OUTSIDE = "mu lies outside the convex hull of the support"


class DualResult(NamedTuple):
    """The result of `natural` and `conjugate` with ``throw=False``, item by item.

    Attributes:
        value: eta, or A*; NaN where the status says that there is none.
        status: Of `massieu.solve.Status`: CONVERGED, also where mu is on the boundary and eta infinite; DIVERGED where mu
            lies outside the convex hull of the support, so that no eta has it (A* is +inf there, and right); MAX_STEPS
            where Newton's method did not get there; NOT_FINITE where mu, or A where the method starts, is not finite.
        residual: ‖∇A(eta) − mu‖ of the last iterate; 0 where a closed form was used.
    """

    value: Tensor
    status: Int[Tensor, "*batch_query"]
    residual: Float[Tensor, "*batch_query"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


@overload
def natural(
    measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: Literal[True] = True
) -> Float[Tensor, "*batch_query_event"]: ...


@overload
def natural(measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: bool) -> Tensor | DualResult: ...


@door(measure=MEASURE)
def natural(
    measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: bool = True
) -> Float[Tensor, "*batch_query_event"] | DualResult:
    """Solve ∇A(eta) = mu for the natural parameter eta of least norm: the inverse of `Measure.mean` (S6, S9).

    In closed form where the measure knows it, else by at most 100 damped Newton steps in float64, each of which
    diagonalises the Fisher information (n × n for n coordinates; up to about a thousand). The mean of the result differs
    from mu by rounding, 1e-13 of the spread. `torch.compile` loops until all is done; around a `torch.func` transform it
    copies the steps, a fixed 48, with NaN where that was not enough, which takes about a minute to compile.

    Derivatives in mu and in the measure's tensors are right to third order, and by nested `torch.func` transforms to any.
    If the family is not minimal (points within an affine subspace), they are those of the eta of least norm, along the
    subspace.

    On the boundary of the support's convex hull eta is not finite: +inf in every entry, or, in closed forms, ±inf in those
    that diverge. No gradient flows from there. Newton's method counts as boundary what is within 1e-10 of the spread of
    it, and what it cannot reach within mu's own rounding; a boundary mean that a finite eta reaches to rounding, since
    what lies beyond its face is that faint, gets that eta. How far the support extends is asked of the measure
    (`_support`) or, where it does not know, of its mean far away.

    Args:
        measure: Any measure; half precision is promoted.
        mu: A mean, shaped like eta.
        throw: Raise if there is an item without an eta. If not, the result is a `DualResult`, whose status says why each
            item has none. Nothing is raised where values cannot be read, as while compiling: eta is NaN there.

    Raises:
        ValueError: `mu` has another shape, is not finite, or lies outside the convex hull of the support; or the measure
            is zero.
        ConvergenceError: `mu` was not reached.

    Example:
        >>> import torch
        >>> from massieu.duality import natural
        >>> from massieu.measures import Atoms
        >>> coin = Atoms.create(torch.tensor([[-1.0], [1.0]]))
        >>> round(natural(coin, torch.tensor([0.5])).item(), 4), round(float(torch.atanh(torch.tensor(0.5))), 4)
        (0.5493, 0.5493)
    """
    promoted, target = measure._fit(mu=mu)
    mu_dtype = _mu_dtype(mu, target)
    finite = _every(promoted, target.isfinite())
    _refuse(throw, ~finite, promoted, target, "mu must be finite")
    closed = _closed_form(promoted, target, mu_dtype)
    if closed is not None:
        outside = ~finite | _some(promoted, closed.isnan())
        _refuse(throw, outside, promoted, target, _OUTSIDE)
        if throw:
            return closed
        eta = torch.where(lead_mask(outside, closed), torch.nan, closed)
        return _result(eta, finite, outside, failed=torch.zeros_like(outside))
    if target.is_meta:
        eta = torch.empty_like(target)
        unknown = torch.zeros_like(finite)
        return eta if throw else _result(eta, finite, outside=unknown, failed=unknown)
    exact, wide = _widen(promoted, target)
    solution = solve(exact, wide, mu_dtype)
    _refuse_failures(throw, exact, wide, solution)
    _refuse(throw, solution.outside, exact, wide, _OUTSIDE)
    eta = _attach(exact, wide, solution)
    without_eta = torch.where(solution.boundary, torch.inf, torch.nan)
    eta = torch.where(lead_mask(solution.found, eta), eta, lead_mask(without_eta, eta)).to(target.dtype)
    return eta if throw else _result(eta, finite, solution.outside, solution.failed, solution.residual)


@overload
def conjugate(
    measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: Literal[True] = True
) -> Float[Tensor, "*batch_query"]: ...


@overload
def conjugate(measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: bool) -> Tensor | DualResult: ...


@door(measure=MEASURE)
def conjugate(
    measure: Measure, mu: Float[Tensor, "*batch_query_event"], *, throw: bool = True
) -> Float[Tensor, "*batch_query"] | DualResult:
    """The convex conjugate A*(mu) = sup over eta of eta·mu − A(eta), in nats: minus the entropy at the mean mu (S8).

    For a probability h it is KL(p_eta ‖ h), the least of all laws of mean mu. Its gradient is `natural`, its Hessian the
    (pseudo-)inverse of the Fisher information at eta. On the boundary it is the limit from inside: −log w_n at an atom
    that is a vertex, the value of the sub-family on a larger face, +inf where the face carries no mass. That is exact for
    measures of closed form, and for others accurate to 1e-9 (1e-4 in float32). Outside it is +inf. No gradient flows from
    the boundary and from outside.

    Args:
        measure: Any measure; half precision is promoted.
        mu: A mean, shaped like eta.
        throw: As for `natural`; a mu outside is no failure here.

    Raises:
        ValueError: `mu` has another shape or is not finite; or the measure is zero.
        ConvergenceError: `mu` was not reached, or it is on the boundary of a user's measure whose limit cannot be taken.

    Example:
        >>> import torch
        >>> from massieu.duality import conjugate
        >>> from massieu.measures import Atoms
        >>> coin = Atoms.create(torch.tensor([[-1.0], [1.0]]))
        >>> [round(conjugate(coin, torch.tensor([mu])).item(), 4) for mu in (0.0, 2.0)]  # −log 2; outside
        [-0.6931, inf]
    """
    promoted, target = measure._fit(mu=mu)
    mu_dtype = _mu_dtype(mu, target)
    finite = _every(promoted, target.isfinite())
    _refuse(throw, ~finite, promoted, target, "mu must be finite")
    closed = _closed_form(promoted, target.detach(), mu_dtype)
    if closed is not None:
        value = promoted._conjugate(target)
        if value is None:
            value = _extrapolated(promoted, target, closed)
        failed = finite & value.isnan()
        advice = ". Give the measure `_conjugate`, its value there in closed form"
        _refuse(throw, failed, promoted, target, "A* was not found", advice, ConvergenceError)
        value = torch.where(finite, value, torch.nan)
        return value if throw else _result(value, finite, _some(promoted, closed.isnan()), failed)
    if target.is_meta:
        value = torch.empty_like(finite, dtype=target.dtype)
        unknown = torch.zeros_like(finite)
        return value if throw else _result(value, finite, outside=unknown, failed=unknown)
    exact, wide = _widen(promoted, target)
    solution = solve(exact, wide, mu_dtype)
    _refuse_failures(throw, exact, wide, solution)
    eta = _attach(exact, wide, solution)
    value = _value_at(exact, wide, eta, mu_dtype)
    limit = torch.where(_has_limit(exact, solution), -exact._entropy(solution.last).detach(), torch.inf)
    without_eta = torch.where(solution.boundary, limit, torch.where(solution.outside, torch.inf, torch.nan))
    value = torch.where(solution.found, value, without_eta).to(target.dtype)
    return value if throw else _result(value, finite, solution.outside, solution.failed, solution.residual)


def _value_at(measure: Measure, mu: Tensor, eta: Tensor, mu_dtype: torch.dtype) -> Tensor:
    """A*(mu) = eta·mu − A(eta), as eta·(mu − mean) less the entropy at eta, which keeps digits where both terms are large."""
    missing = mu - measure._mean(eta)
    product = measure._dot(eta, missing)
    # Where rounding has carried mu off the hull, eta is large: what it is off is no part of the value, but of derivatives.
    rounding = 4 * max(torch.finfo(mu_dtype).eps, torch.finfo(mu.dtype).eps) * measure._dot(mu, mu).sqrt()
    is_rounding = measure._dot(missing, missing).detach().sqrt() <= rounding.detach()
    return product - torch.where(is_rounding, product, 0.0).detach() - measure._entropy(eta)


def _result(
    value: Tensor, finite: Tensor, outside: Tensor, failed: Tensor, residual: Tensor | None = None
) -> DualResult:
    """The value with the status of each item.

    Args:
        finite: Whether mu is.
        outside, failed: As in `Solution`.
        residual: NaN if A is not finite where the method starts; None for closed forms.
    """
    if residual is None:
        residual = torch.zeros_like(finite, dtype=value.dtype)
    of_failed = torch.where(residual.isnan(), int(Status.NOT_FINITE), int(Status.MAX_STEPS))
    status = torch.where(failed, of_failed, int(Status.CONVERGED))
    status = torch.where(outside, int(Status.DIVERGED), status)
    status = torch.where(finite, status, int(Status.NOT_FINITE))
    return DualResult(value, status, residual)


def _has_limit(measure: Measure, solution: Solution) -> Tensor:
    """Whether A* has a limit where the iterates run: on the second half of the way it grows by (k/2)·log 2 otherwise."""
    growth = measure._entropy(solution.halfway) - measure._entropy(solution.last)
    return solution.face_has_mass | (growth.detach().abs() < _GROWTH)


def _mu_dtype(mu: Any, target: Tensor) -> torch.dtype:
    """The dtype whose rounding mu has: its own if it is a floating-point tensor, else that of the computation."""
    if isinstance(mu, Tensor) and mu.is_floating_point():
        return mu.dtype
    return target.dtype


def _closed_form(measure: Measure, mu: Tensor, mu_dtype: torch.dtype) -> Tensor | None:
    """`Measure._natural`; None if there is none, or if half precision may have rounded a mu off the support.

    Newton's method forgives that rounding, and a closed form does not.
    """
    closed = measure._natural(mu)
    if closed is None or torch.finfo(mu_dtype).bits >= 32 or not values_are_readable(closed):
        return closed
    return None if any_true(closed.isnan()) else closed


def _attach(measure: Measure, mu: Tensor, solution: Solution) -> Tensor:
    """The solution with its derivatives in mu and in the measure's tensors.

    With F = ∇²A(eta), it solves two equations: (1) ∇A(eta) = mu, and (2) eta = F y for some y, which makes its norm least.
    Each step of the chord method, with the inverse of F held constant, makes one more order of derivatives right; none
    passes through the iteration, an inverse or a decision on rank. Where the solver failed the inverse is zero, so that
    eta is a constant.
    """
    inverse, null_projector = solution.inverse, solution.null
    base = solution.eta.reshape(mu.shape)
    eta = solution.eta
    # The y of equation (2), at the solution.
    dual = times(inverse, solution.eta)

    def mean_residual(eta: Tensor) -> Tensor:
        return (mu - measure._mean(eta.reshape(mu.shape))).reshape(eta.shape)

    # What rounding left of either equation is taken out: an inverse of large entries would make it large.
    rounding_of_mean = mean_residual(eta).detach()
    rounding_of_image = (eta - _fisher_times(measure, base, dual)).detach()
    for _ in range(derivative_orders()):
        eta = eta + times(inverse, mean_residual(eta) - rounding_of_mean)
        if null_projector is not None:
            # Along the null directions of F equation (1) says nothing: there eta follows F y.
            dual = dual + times(inverse, eta - _fisher_times(measure, base, dual) - rounding_of_image)
            eta = eta + times(null_projector, _fisher_times(measure, base, dual) + rounding_of_image - eta)
    return eta.reshape(mu.shape)


def _fisher_times(measure: Measure, eta: Tensor, vector: Tensor) -> Tensor:
    """F(eta) times a flat vector."""
    return measure._fisher_vp(eta, vector.reshape(eta.shape)).reshape(vector.shape)


def _extrapolated(measure: Measure, mu: Tensor, natural: Tensor) -> Tensor:
    """A* of a measure that knows `natural` in closed form and not A*: on the boundary its limit from inside.

    A* is a closed convex function, so that along a segment from inside it tends to its value at the end.
    """
    inside = _every(measure, natural.isfinite())
    exact, edge = _widen(measure, mu)
    edge = edge.detach()
    interior = exact._interior()
    start = torch.zeros_like(edge)
    if interior is not None:
        start = start + exact._align(interior, edge, len(measure.event_shape))
    centre = exact._mean(start).detach()

    def value(point: Tensor) -> Tensor:
        eta = exact._natural(point)
        assert eta is not None
        return exact._fenchel(eta, point)

    # Three points of the way to the edge, the nearest so far from it that rounding of the edge does not take the step back.
    way = centre - edge
    eps = torch.finfo(edge.dtype).eps
    rounding = torch.where(way == 0, 0.0, 8 * eps * edge.abs() / way.abs())
    least_share = rounding.flatten(mu.ndim - len(measure.event_shape)).amax(-1).clamp(eps, 1.0)
    share = lead_mask(least_share, way)
    far = value(edge + share**0.5 * way)
    near = value(edge + share**0.7 * way)
    limit = value(edge + share**0.9 * way)
    # Towards a face that carries mass A* settles, towards any other it grows as a logarithm.
    grows = (limit - near > 0.1 * (near - far)) & (limit - near > 1e3 * eps**0.75 * (1 + limit.abs()))
    limit = torch.where(grows | _some(measure, natural.isnan()), torch.inf, limit).detach().to(mu.dtype)
    # The centre stands in for items without an eta, so that no derivative meets an infinity.
    inner = torch.where(lead_mask(inside, mu), mu, centre.to(mu.dtype))
    eta = measure._natural(inner)
    assert eta is not None
    return torch.where(inside, measure._fenchel(eta, inner), limit)


def _widen(measure: Measure, mu: Tensor) -> tuple[Measure, Tensor]:
    """The measure and mu in float64, where the device has it."""
    wide = mu.dtype if mu.device.type == "mps" else torch.float64
    return measure.to(wide), mu.to(wide)


def _refuse(
    throw: bool,
    mask: Tensor,
    measure: Measure,
    mu: Tensor,
    reason: str,
    advice: str = "",
    kind: type[Exception] = ValueError,
) -> None:
    """Raise for the first item of the mask, if `throw` is set and values can be read."""
    if not throw or not any_true(mask):
        return
    wrong = unwrapped(mask)
    points = unwrapped(mu.detach())
    # Within `vmap` either may lack the mapped dimension; then the item has no place to tell.
    is_alike = points.shape[: wrong.ndim] == wrong.shape
    index = tuple(wrong.nonzero()[0].tolist()) if is_alike else ()
    numbers = points[index].flatten()
    shown = ", ".join(f"{float(x):.6g}" for x in numbers[:6]) + (", …" if len(numbers) > 6 else "")
    place = f" at index {index}" if index else ""
    raise kind(f"{reason}: {type(measure).__name__}, mu = [{shown}]{place}{advice}")


def _refuse_failures(throw: bool, measure: Measure, mu: Tensor, solution: Solution) -> None:
    """Raise for the first item of which Newton's method has found nothing, with what to try."""
    start = "A is not finite where Newton's method starts (no mass, or `_interior` is not inside)"
    _refuse(throw, solution.residual.isnan(), measure, mu, start)
    if throw and any_true(solution.failed):
        residual = float(unwrapped(solution.residual)[unwrapped(solution.failed)].amax())
        advice = f"; residual {residual:.3g}. Use float64, move mu off the boundary, or give the measure `_natural`"
        reason = f"no convergence in {STEPS} Newton steps"
        _refuse(throw, solution.failed, measure, mu, reason, advice, ConvergenceError)


def _every(measure: Measure, mask: Tensor) -> Tensor:
    """Whether it holds for all entries of an event."""
    return mask.flatten(mask.ndim - len(measure.event_shape)).all(-1)


def _some(measure: Measure, mask: Tensor) -> Tensor:
    """Whether it holds for an entry of an event."""
    return ~_every(measure, ~mask)
