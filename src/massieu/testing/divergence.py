"""The oracles of A and KL; KL divergence, entropy and tilting, which compare A at two points."""

import math

import torch
from torch import Tensor

from massieu.measures.base import Measure
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject


def check_log_partition(subject: Subject) -> None:
    oracle = subject.case.log_partition
    assert oracle is not None
    for points in (subject.eta, subject.far):
        values = subject.measure.log_partition(points)
        agree("log-partition = oracle", points, values, oracle(points), EXACT * (1 + values.abs()))


def check_kl_oracle(subject: Subject) -> None:
    oracle = subject.case.kl
    eta = subject.eta
    other = subject.swapped
    assert oracle is not None
    divergence = subject.measure.kl(eta, other)
    agree("KL = oracle", eta, divergence, oracle(eta, other), EXACT * (1 + divergence))


def check_kl(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
    other = subject.swapped
    divergence = measure.kl(eta, other)
    zero = torch.zeros_like(divergence)
    at_most("KL ≥ 0", eta, -divergence, zero, 0.0)
    agree("KL of equal parameters = 0", eta, measure.kl(eta, eta), zero, 0.0)
    bregman, tolerance = _bregman(measure, eta, other)
    agree("KL(p‖q) = A(q) − A(p) − mean(p)·(q − p)", eta, divergence, bregman, 1e5 * tolerance)


def _bregman(measure: Measure, eta_p: Tensor, eta_q: Tensor) -> tuple[Tensor, Tensor]:
    """The Bregman divergence by its definition, and the rounding error of that difference in float64."""
    start = measure.log_partition(eta_p)
    end = measure.log_partition(eta_q)
    slope = measure._dot(measure.mean(eta_p), eta_q - eta_p)
    return end - start - slope, 1e-15 * (1 + start.abs() + end.abs() + slope.abs())


def check_kl_of_close_parameters(subject: Subject) -> None:
    single = subject.measure.to(torch.float32)
    eta_p = subject.eta.float()
    measure = single.to(torch.float64)
    direction = subject.noise(eta_p).float()
    direction = direction * expand((subject.reach / subject.norm(direction)).to(direction), direction)
    for distance in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        eta_q = eta_p + distance * direction
        exact_p = eta_p.double()
        exact_q = eta_q.double()
        delta = exact_q - exact_p
        if distance >= 1e-2:
            expected, rounding = _bregman(measure, exact_p, exact_q)
        else:
            # The difference would cancel, so take the remainder of Taylor's series, ∫₀¹ (1 − t) deltaᵀ F(p + t·delta) delta dt,
            # by Gauss's three points.
            nodes = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 4 / 9), (0.5 + math.sqrt(0.15), 5 / 18))
            terms = [w * (1 - t) * measure._dot(delta, measure.fisher_vp(exact_p + t * delta, delta)) for t, w in nodes]
            expected = sum(terms, torch.zeros_like(terms[0]))
            rounding = torch.zeros_like(terms[0])
        # If p hardly varies along a direction, KL is small, and the rounding of F is a larger part of it.
        rounding = rounding + 4e-7 * measure._dot(delta, delta) * subject.trace(exact_p)
        law = f"KL to 1e-5 relative in float32 at distance {distance:g}"
        agree(law, eta_p, single.kl(eta_p, eta_q), expected, 1e-5 * expected + rounding)


def check_fenchel_young(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
    other = subject.swapped
    mean = measure.mean(eta)
    entropy = measure.entropy(eta)
    tight = measure.log_partition(eta) - measure._dot(eta, mean)
    tolerance = EXACT * (1 + measure.log_partition(eta).abs())
    agree("Fenchel–Young: entropy = A(eta) − eta·mean", eta, entropy, tight, tolerance)
    loose = measure.log_partition(other) - measure._dot(other, mean)
    at_most("Fenchel–Young: entropy ≤ A(other) − other·mean", eta, entropy, loose, tolerance)


def check_tilt(subject: Subject) -> None:
    """All points are convex combinations of the subject's points, so that they lie in the domain."""
    measure = subject.measure
    eta = subject.eta
    queries = subject.queries
    first = eta.select(queries, 0)
    second = eta.select(queries, 1)
    step = (second - first) / 2
    total = (first + step).unsqueeze(queries)
    point = (eta - total) / 2
    tilted = measure.tilt(first + step)
    start = measure.log_partition(total)
    moved = measure.log_partition(point + total)
    tolerance = EXACT * (1 + start.abs() + moved.abs())
    agree("tilt(a): A(a + eta) − A(a)", point, tilted.log_partition(point), moved - start, tolerance)
    mean = measure.mean(point + total)
    agree("tilt(a): mean(a + eta)", point, tilted.mean(point), mean, EXACT * (1 + mean.abs()))
    twice = measure.tilt(first).tilt(step)
    agree("tilt(a).tilt(b) = tilt(a + b)", point, twice.log_partition(point), moved - start, tolerance)
    agree("tilt(a).tilt(b) = tilt(a + b), mean", point, twice.mean(point), mean, EXACT * (1 + mean.abs()))
