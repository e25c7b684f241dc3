"""Mean, Fisher information and cumulants are the derivatives of the log-partition, which is convex."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils import _pytree as pytree

from massieu.measures.base import Measure
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import FUNCTIONS, Subject

ORDER = 6
"""Order of the highest cumulant."""
_OF_PARAMETERS = 1e-6
"""Relative tolerance of a derivative in the measure's tensors."""


def check_mean(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
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
    measure = subject.measure
    eta = subject.eta
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
    # Only the first point and the last (by default the origin), as the cost is quadratic in the number of entries.
    ends = torch.cat([subject.eta.narrow(subject.queries, i, 1) for i in (0, -1)], subject.queries).requires_grad_()
    try:
        torch.autograd.gradgradcheck(subject.measure.log_partition, (ends,), eps=1e-6 * float(subject.reach.min()))
    except GradcheckError as error:
        raise AssertionError(f"gradgradcheck of the log-partition: {error}") from error


def check_parameters(subject: Subject) -> None:
    """Gradients reach the measure's tensors: they equal finite differences along a random change of all of them."""
    leaves, structure = pytree.tree_flatten(subject.measure)
    changes = [_change(subject, leaf) for leaf in leaves]

    def measure_at(t: Tensor) -> Measure:
        changed = [leaf if change is None else leaf + t * change for leaf, change in zip(leaves, changes, strict=True)]
        return pytree.tree_unflatten(changed, structure)

    for name, function in FUNCTIONS.items():
        weight = subject.noise(subject.results[name])

        def total(t: Tensor, function: Any = function, weight: Tensor = weight) -> Tensor:
            result = function(measure_at(t), subject.eta, subject.middle)
            return torch.where(result.isfinite(), weight * result, 0.0).sum()

        step = torch.tensor(1e-3, dtype=torch.float64, device=subject.eta.device)
        near = total(step) - total(-step)
        far = total(2 * step) - total(-2 * step)
        expected = (8 * near - far) / (12 * step)
        start = torch.zeros_like(step, requires_grad=True)
        value = total(start)
        actual = torch.autograd.grad(value, start)[0] if value.requires_grad else torch.zeros_like(step)
        size = 1 + (weight * subject.results[name]).nan_to_num(posinf=0.0).abs().sum() + expected.abs()
        law = f"parameters: the derivative of {name} in what the measure holds = finite difference"
        agree(law, actual[None], actual[None], expected[None], _OF_PARAMETERS * size)


def _change(subject: Subject, leaf: Any) -> Tensor | None:
    """A small random change of the finite entries of a floating-point tensor; None for anything else."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    finite = leaf.isfinite()
    change = subject.noise(leaf) * torch.where(finite, leaf.abs(), 0.0).clamp_min(0.1)
    if leaf.ndim > 1 and leaf.shape[-1] == leaf.shape[-2]:
        # A square matrix may be a covariance, which must stay symmetric.
        change = (change + change.mT) / 2
    return torch.where(finite, 0.1 * change, 0.0)


def check_convexity(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
    middle = measure.log_partition(subject.middle)
    chord = (measure.log_partition(eta) + measure.log_partition(subject.swapped)) / 2
    at_most("midpoint convexity", eta, middle, chord, 1e-12 * (1 + chord.abs()))


def check_cumulants(subject: Subject) -> None:
    """The first two follow from mean and Fisher information; each further one is the derivative of the one before."""
    measure = subject.measure
    eta = subject.eta
    direction = subject.direction
    cumulants = measure.cumulants(eta, direction, ORDER)
    if cumulants.shape != (*subject.lead, ORDER):
        raise AssertionError(f"shape of cumulants: got {tuple(cumulants.shape)}")
    mean = measure.mean(eta)
    image = measure.fisher_vp(eta, direction)
    first = measure._dot(mean, direction)
    second = measure._dot(image, direction)
    # Rounding is relative to the largest terms: for the mean its own terms, for the n-th cumulant moments of size spreadⁿ.
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
    """The derivative of the cumulant of this order along the subject's direction, at each eta."""
    measure = subject.measure
    eta = subject.eta
    direction = subject.direction

    def total(t: Tensor) -> Tensor:
        return measure.cumulants(eta + expand(t, eta) * direction, direction, order)[..., -1].sum()

    return torch.func.grad(total)(eta.new_zeros(subject.lead))
