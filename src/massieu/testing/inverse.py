"""The way back from the mean, and the convex conjugate of A."""

import torch

from massieu.duality import conjugate, natural
from massieu.errors import ConvergenceError
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject


def check_natural(subject: Subject) -> None:
    """An eta of the same mean, no longer than the first; −entropy as the conjugate; an error for what is no mean."""
    measure, eta = subject.measure, subject.eta
    mean, entropy = measure.mean(eta), measure.entropy(eta)
    try:
        found, value = natural(measure, mean), conjugate(measure, mean)
    except (ValueError, ConvergenceError) as error:
        raise AssertionError(f"natural of a mean: {error}") from error
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
    _check_outside(subject, mean)


def _check_outside(subject: Subject, mean: torch.Tensor) -> None:
    """Half as far again as the support reaches, where it ends."""
    measure, direction = subject.measure, subject.direction
    bound = measure._support(direction)
    if bound is None:
        return
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
