"""The inverse of the mean map, and the convex conjugate of A: inside the support, on its boundary and outside."""

from collections.abc import Callable

import torch
from torch import Tensor

from massieu.duality import conjugate, natural
from massieu.errors import ConvergenceError
from massieu.measures.base import Measure
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject

_FAR = 1e3
"""A mean farther out than this, relative to a nearby one, has run away and not saturated."""
_POINTS = 4
"""Number of draws whose conjugate is compared with their probability."""


def check_natural(subject: Subject) -> None:
    """`natural` returns an eta of the same mean and of no greater length; the conjugate is −entropy."""
    measure = subject.measure
    eta = subject.eta
    mean = measure.mean(eta)
    entropy = measure.entropy(eta)
    recovered = _dual(natural, measure, mean)
    value = _dual(conjugate, measure, mean)
    spread = subject.trace(eta).sqrt()
    tolerance = 10 * EXACT * (1 + subject.size(mean) + spread)
    agree("mean(natural(mu)) = mu", eta, measure.mean(recovered), mean, expand(tolerance, mean))
    length = subject.norm(eta)
    # What the mean's own rounding does to eta is not known where the Fisher information is nearly singular.
    at_most("natural(mean(eta)) is no longer than eta", eta, subject.norm(recovered), length, 1e-5 * (1 + length))
    agree("conjugate(mean(eta)) = −entropy(eta)", eta, value, -entropy, 10 * EXACT * (1 + entropy.abs()))
    other = subject.swapped
    lower = measure._dot(other, mean) - measure.log_partition(other)
    at_most("conjugate(mu) ≥ other·mu − A(other)", eta, lower, value, 10 * EXACT * (1 + lower.abs()))


def check_outside(subject: Subject) -> None:
    """`natural` refuses a mean half as far again from the mean as the end of the support."""
    measure = subject.measure
    direction = subject.direction
    mean = subject.measure.mean(subject.eta)
    bound = measure._support(direction)
    assert bound is not None
    beyond = 1.5 * (bound - measure._dot(mean, direction)) / measure._dot(direction, direction)
    usable = beyond.isfinite() & (beyond > 1e-3 * (1 + subject.size(mean)))
    if not bool(usable.any()):
        return
    points = mean + expand(torch.where(usable, beyond, 0.0), mean) * direction
    try:
        natural(measure, points)
    except ValueError:
        return
    raise AssertionError(f"natural of a mu outside the support did not raise ValueError: {points[usable][0].tolist()}")


def check_saturated(subject: Subject) -> None:
    """The conjugate where means saturate is −entropy.

    Means at a distant eta lie on the boundary of the support's hull up to rounding, in single precision even more often.
    """
    for dtype in (torch.float64, torch.float32):
        measure = subject.measure.to(dtype)
        points = subject.kept(measure, subject.far.to(dtype))
        mean = measure.mean(points)
        entropy = measure.entropy(points)
        # A mean that has run away has not reached a bound; such points are replaced by a nearby one and left out.
        nearby = measure.mean(points.narrow(subject.queries, 0, 1))
        is_saturated = (subject.norm(mean) <= _FAR * (1 + subject.norm(nearby))) & entropy.isfinite()
        value = _dual(conjugate, measure, torch.where(expand(is_saturated, mean), mean, nearby))
        value, expected = (torch.where(is_saturated, number, 0.0) for number in (value, -entropy))
        # The derivative of the conjugate is eta, which a rounding of the mean is multiplied by. Near a bound, where eta grows
        # without limit, the conjugate changes by up to the root of that rounding.
        rounding = 64 * torch.finfo(dtype).eps * (1 + subject.norm(points)) * (1 + subject.norm(mean))
        law = f"conjugate of a saturated mean = −entropy, in {dtype}"
        agree(law, points, value, expected, rounding + torch.finfo(dtype).eps ** 0.5 * (1 + expected.abs()))


def check_atoms(subject: Subject) -> None:
    """At a discrete law's own points, many of them on the boundary, the conjugate is at most −log h."""
    measure = subject.measure
    eta = subject.eta
    for point in subject.draws[:_POINTS]:
        value = _dual(conjugate, measure, point)
        mass = measure.log_prob(eta, point) + measure.log_partition(eta) - measure._dot(eta, point)
        at_most("conjugate(x) ≤ −log h({x}) at a drawn x", eta, value, -mass, 1e-6 * (1 + mass.abs()))
        below = measure._dot(eta, point) - measure.log_partition(eta)
        at_most("conjugate(x) ≥ eta·x − A(eta) at a drawn x", eta, below, value, 1e-6 * (1 + below.abs()))


def _dual(function: Callable[[Measure, Tensor], Tensor], measure: Measure, mu: Tensor) -> Tensor:
    try:
        return function(measure, mu)
    except (ValueError, ConvergenceError) as error:
        raise AssertionError(f"duality at a mean: {error}") from error
