"""Mean, Fisher information and cumulants are the derivatives of the log-partition, which is convex."""

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject

ORDER = 6
"""Of the highest cumulant."""


def check_mean(subject: Subject) -> None:
    measure, eta = subject.measure, subject.eta
    for points in (eta, subject.far):
        leaf = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(measure.log_partition(leaf).sum(), leaf)
        mean = measure.mean(points)
        tolerance = EXACT * (1 + mean.abs()) * (1 + expand(subject.norm(points), mean))
        agree("mean = gradient of the log-partition", points, mean, gradient, tolerance)
    mean = measure.mean(eta)
    for direction in subject.basis():
        difference = subject.slope(measure.log_partition, direction)
        slope = measure._dot(mean, direction)
        agree("mean = finite difference of the log-partition", eta, slope, difference, 1e-6 * (1 + slope.abs()))


def check_fisher(subject: Subject) -> None:
    measure, eta = subject.measure, subject.eta
    fisher = subject.fisher(eta)
    size = 1 + fisher.abs().amax((-2, -1))
    pullback = torch.func.vjp(torch.func.grad(lambda point: measure.log_partition(point).sum()), eta)[1]
    for index, direction in enumerate(subject.basis()):
        column = fisher[..., index].reshape(eta.shape)
        scale = expand(size, column)
        agree("Fisher = second derivative of the log-partition", eta, column, pullback(direction)[0], EXACT * scale)
        difference = subject.slope(measure.mean, direction)
        agree("Fisher = finite difference of the mean", eta, column, difference, 1e-6 * scale)
        agree("fisher_vp = Fisher times vector", eta, measure.fisher_vp(eta, direction), column, EXACT * scale)
    smallest = torch.linalg.eigvalsh(fisher).amin(-1)
    # The measure's own tensors may have been rounded to float32.
    at_most("Fisher is positive semi-definite", eta, -smallest, torch.zeros_like(size), 1e-6 * size)


def check_second_derivatives(subject: Subject) -> None:
    # The first point and the last, by default the origin: the check's cost is quadratic.
    ends = torch.cat([subject.eta.narrow(subject.queries, i, 1) for i in (0, -1)], subject.queries).requires_grad_()
    try:
        torch.autograd.gradgradcheck(subject.measure.log_partition, (ends,), eps=1e-6 * float(subject.reach.min()))
    except GradcheckError as error:
        raise AssertionError(f"gradgradcheck of the log-partition: {error}") from error


def check_convexity(subject: Subject) -> None:
    measure, eta = subject.measure, subject.eta
    middle = measure.log_partition(subject.middle)
    chord = (measure.log_partition(eta) + measure.log_partition(subject.swapped)) / 2
    at_most("midpoint convexity", eta, middle, chord, 1e-12 * (1 + chord.abs()))


def check_cumulants(subject: Subject) -> None:
    """The first two against mean and Fisher information, each further one as the derivative of the one before."""
    measure, eta, direction = subject.measure, subject.eta, subject.direction
    cumulants = measure.cumulants(eta, direction, ORDER)
    if cumulants.shape != (*subject.lead, ORDER):
        raise AssertionError(f"shape of cumulants: got {tuple(cumulants.shape)}")
    mean, image = measure.mean(eta), measure.fisher_vp(eta, direction)
    first, second = measure._dot(mean, direction), measure._dot(image, direction)
    # The sizes of what is summed: of the first, terms of the mean; of the n-th, moments as large as spreadⁿ.
    spread = 1 + second.clamp_min(0).sqrt()
    tolerance = EXACT * (1 + measure._dot(mean.abs(), direction.abs()))
    agree("cumulant 1 = mean·direction", eta, cumulants[..., 0], first, tolerance)
    agree("cumulant 2 = direction·Fisher·direction", eta, cumulants[..., 1], second, EXACT * spread**2)
    for order in range(2, ORDER):
        slope = _slope(subject, order)
        rounding = EXACT * (spread ** (order + 1) + slope.abs())
        law = f"cumulant {order + 1} = derivative of cumulant {order}"
        agree(law, eta, cumulants[..., order], slope, rounding)
    for order in (1, 3):
        fewer = measure.cumulants(eta, direction, order)
        agree(
            "cumulants: of a lower order, the first ones",
            eta,
            fewer,
            cumulants[..., :order],
            1e-12 * spread[..., None] ** order,
        )


def _slope(subject: Subject, order: int) -> Tensor:
    """The derivative of the cumulant of that order along the direction, at each eta."""
    measure, eta, direction = subject.measure, subject.eta, subject.direction

    def total(t: Tensor) -> Tensor:
        return measure.cumulants(eta + expand(t, eta) * direction, direction, order)[..., -1].sum()

    return torch.func.grad(total)(eta.new_zeros(subject.lead))
