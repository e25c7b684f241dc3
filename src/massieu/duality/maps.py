"""From the mean back to the natural parameter, and the convex conjugate of A."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.duality.newton import STEPS, Solution, over, solve, times
from massieu.measures import Measure
from massieu.measures.base import values_are_readable

_ORDERS = 3
"""Orders of derivatives that are right."""
_OUTSIDE = "mu lies outside the convex hull of the support"


def natural(measure: Measure, mu: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
    """The eta of least norm with ∇A(eta) = mu: the inverse of `Measure.mean` (S6, S9).

    In closed form where the measure knows it, else by at most 100 damped Newton steps in float64, each of which
    diagonalises the Fisher information (n × n for n coordinates; up to about a thousand). The mean of the result differs
    from mu by rounding, 1e-13 of the spread. Where values cannot be read (under `torch.func` transforms) the steps are a
    fixed 48, with NaN where that was not enough; `torch.compile` loops until all is done, but unrolls that loop around a
    transform, which then takes about a minute to compile.

    Derivatives in mu and in the measure's tensors are right to third order. If the family is not minimal (points within
    an affine subspace), they are those of the eta of least norm, along the subspace.

    On the boundary of the support's convex hull eta is not finite: +inf in every entry, or, in closed forms, ±inf in those
    that diverge. No gradient flows from there. Newton's method counts as boundary what is within 1e-10 of the spread of
    it, and what it cannot reach within mu's own rounding; a boundary mean that a finite eta reaches to rounding, since
    what lies beyond its face is that faint, gets that eta. How far the support extends is asked of the measure
    (`_support`) or, where it does not know, of its mean far away.

    Args:
        measure: Any measure; half precision is promoted.
        mu: A mean, shaped like eta.

    Raises:
        ValueError: `mu` has another shape, is not finite, lies outside the convex hull of the support (NaN where values
            cannot be read), or was not reached; or the measure is zero.
    """
    promoted, target = measure._fit(mu=mu)
    _refuse(_some(promoted, ~target.isfinite()), promoted, target, "mu must be finite")
    given = _given(mu, target)
    closed = _closed_form(promoted, target, given)
    if closed is not None:
        _refuse(_some(promoted, closed.isnan()), promoted, target, _OUTSIDE)
        return closed
    exact, wide = _widen(promoted, target)
    solution = solve(exact, wide, given)
    _refuse_failures(exact, wide, solution)
    _refuse(solution.outside, exact, wide, _OUTSIDE)
    eta = _attach(exact, wide, solution)
    other = torch.where(solution.boundary, torch.inf, torch.nan)
    return torch.where(over(solution.found, eta), eta, over(other, eta)).to(target.dtype)


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
    given = _given(mu, target)
    closed = _closed_form(promoted, target.detach(), given)
    if closed is not None:
        known = promoted._conjugate(target)
        value = _closed_conjugate(promoted, target, closed) if known is None else known
        return torch.where(_every(promoted, target.isfinite()), value, torch.nan)
    exact, wide = _widen(promoted, target)
    solution = solve(exact, wide, given)
    _refuse_failures(exact, wide, solution)
    value = _fenchel(exact, _attach(exact, wide, solution), wide)
    limit = torch.where(solution.massive, _fenchel(exact, solution.last, wide).detach(), torch.inf)
    other = torch.where(solution.boundary, limit, torch.where(solution.outside, torch.inf, torch.nan))
    return torch.where(solution.found, value, other).to(target.dtype)


def _given(mu: Any, target: Tensor) -> torch.dtype:
    """The dtype whose rounding mu has: its own, where it is a floating-point tensor."""
    return mu.dtype if isinstance(mu, Tensor) and mu.is_floating_point() else target.dtype


def _closed_form(measure: Measure, mu: Tensor, given: torch.dtype) -> Tensor | None:
    """`Measure._natural`; None where it refuses what only the rounding of half precision put beside the support."""
    closed = measure._natural(mu)
    if closed is None or torch.finfo(given).bits >= 32 or not values_are_readable(closed):
        return closed
    return None if bool(closed.isnan().any()) else closed


def _attach(measure: Measure, mu: Tensor, solution: Solution) -> Tensor:
    """The solution with its derivatives in mu and in the measure's tensors; a constant where it was not found.

    It solves ∇A(eta) = mu and, to be of least norm, eta = F y for some y. Each step of the chord method, with the
    linearisation's inverse held constant, makes one more order of derivatives right; none passes through the iteration,
    an inverse or a decision on rank.
    """
    inverse, null = solution.inverse, solution.null
    base, eta, dual = solution.eta.reshape(mu.shape), solution.eta, times(inverse, solution.eta)

    def missing(eta: Tensor) -> Tensor:
        return (mu - measure._mean(eta.reshape(mu.shape))).reshape(eta.shape)

    # What rounding left of either equation stays: an inverse of large entries would make it large.
    left, unmatched = missing(eta).detach(), (eta - _image(measure, base, dual)).detach()
    for _ in range(_ORDERS):
        eta = eta + times(inverse, missing(eta) - left)
        if null is not None:
            dual = dual + times(inverse, eta - _image(measure, base, dual) - unmatched)
            eta = eta + times(null, _image(measure, base, dual) + unmatched - eta)
    return eta.reshape(mu.shape)


def _image(measure: Measure, eta: Tensor, vector: Tensor) -> Tensor:
    """F(eta) times a flat vector."""
    return measure._fisher_vp(eta, vector.reshape(eta.shape)).reshape(vector.shape)


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
    return torch.where(found, value(torch.where(over(found, mu), mu, centre)), limit)


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


def _refuse_failures(measure: Measure, mu: Tensor, solution: Solution) -> None:
    start = "A is not finite where Newton's method starts (no mass, or `_interior` is not inside)"
    _refuse(solution.residual.isnan(), measure, mu, start)
    if values_are_readable(solution.failed) and bool(solution.failed.any()):
        residual = float(solution.residual[solution.failed].amax())
        advice = f"; residual {residual:.3g}. Use float64, move mu off the boundary, or give the measure `_natural`"
        _refuse(solution.failed, measure, mu, f"no convergence in {STEPS} Newton steps", advice)


def _every(measure: Measure, mask: Tensor) -> Tensor:
    """Whether it holds for all entries of an event."""
    return mask.flatten(mask.ndim - len(measure.event_shape)).all(-1)


def _some(measure: Measure, mask: Tensor) -> Tensor:
    return ~_every(measure, ~mask)
