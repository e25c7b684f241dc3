"""The way back from the mean, and the convex conjugate of A: inside, on the boundary and beyond."""

from collections.abc import Callable

import torch
from torch import Tensor

from massieu.duality import conjugate, natural
from massieu.errors import ConvergenceError
from massieu.measures.base import Measure
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject

_FAR = 1e3
_POINTS = 4
"""Draws whose conjugate is held against their probability."""


def check_natural(subject: Subject) -> None:
    """An eta of the same mean, no longer than the first; −entropy as the conjugate."""
    measure, eta = subject.measure, subject.eta
    mean, entropy = measure.mean(eta), measure.entropy(eta)
    found, value = _dual(natural, measure, mean), _dual(conjugate, measure, mean)
    spread = subject.trace(eta).sqrt()
    tolerance = 10 * EXACT * (1 + subject.size(mean) + spread)
    agree("mean(natural(mu)) = mu", eta, measure.mean(found), mean, expand(tolerance, mean))
    length = subject.norm(eta)
    # What the mean's own rounding does to eta is not known where the Fisher information is nearly singular.
    at_most("natural(mean(eta)) is no longer than eta", eta, subject.norm(found), length, 1e-5 * (1 + length))
    agree("conjugate(mean(eta)) = −entropy(eta)", eta, value, -entropy, 10 * EXACT * (1 + entropy.abs()))
    other = subject.swapped
    lower = measure._dot(other, mean) - measure.log_partition(other)
    at_most("conjugate(mu) ≥ other·mu − A(other)", eta, lower, value, 10 * EXACT * (1 + lower.abs()))


def check_outside(subject: Subject) -> None:
    """No mean lies half as far again as the support reaches, where it ends."""
    measure, direction, mean = subject.measure, subject.direction, subject.measure.mean(subject.eta)
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

    The means of the far eta lie on the boundary of the support's hull to rounding, in single precision still more.
    """
    for dtype in (torch.float64, torch.float32):
        measure = subject.measure.to(dtype)
        points = subject.kept(measure, subject.far.to(dtype))
        mean, entropy = measure.mean(points), measure.entropy(points)
        # Means a long way out are not those that have come to a bound.
        nearby = measure.mean(points.narrow(subject.queries, 0, 1))
        held = (subject.norm(mean) <= _FAR * (1 + subject.norm(nearby))) & entropy.isfinite()
        value = _dual(conjugate, measure, torch.where(expand(held, mean), mean, nearby))
        value, expected = (torch.where(held, number, 0.0) for number in (value, -entropy))
        # A rounding of the mean moves the conjugate by eta times that; far out, by all that it still gains.
        rounding = 64 * torch.finfo(dtype).eps * (1 + subject.norm(points)) * (1 + subject.norm(mean))
        law = f"conjugate of a saturated mean = −entropy, in {dtype}"
        agree(law, points, value, expected, rounding + torch.finfo(dtype).eps ** 0.5 * (1 + expected.abs()))


def check_atoms(subject: Subject) -> None:
    """At a discrete law's own points, many of them on the boundary, the conjugate is at most −log h."""
    measure, eta = subject.measure, subject.eta
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
