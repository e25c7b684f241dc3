"""Where A is finite, and what is raised elsewhere."""

import torch

from massieu.measures.base import DomainError
from massieu.testing.checks import expand
from massieu.testing.subject import Subject


def check_domain(subject: Subject) -> bool:
    """Finite inside, `DomainError` in the measure's own words outside. False where the measure names no domain."""
    measure, eta = subject.measure, subject.eta
    inside = measure._in_domain(eta)
    if inside is None:
        return False
    if inside.shape != eta.shape[: subject.queries + 1] or inside.dtype != torch.bool:
        raise AssertionError(
            f"domain: _in_domain is {inside.dtype} of shape {tuple(inside.shape)}, not bool for each eta"
        )
    for points in (eta, subject.far):
        values = measure.log_partition(points)
        if not bool(values.isfinite().all()):
            worst = points[~values.isfinite()][0]
            raise AssertionError(f"domain: A is not finite at eta = {worst.tolist()}, which is said to be inside")
    for distance in (1.0, 1e2, 1e4, 1e8):
        for sign in (1, -1):
            points = eta + sign * distance * subject.direction
            found = measure._in_domain(points)
            assert found is not None
            if not bool(found.all()):
                _must_raise(subject, torch.where(expand(found, points), eta, points))
                return True
    return True


def _must_raise(subject: Subject, points: torch.Tensor) -> None:
    measure = subject.measure
    for name in ("log_partition", "mean", "fisher", "entropy"):
        try:
            getattr(measure, name)(points)
        except DomainError as error:
            if measure._domain() not in str(error):
                raise AssertionError(f"domain: the error does not say {measure._domain()!r}: {error}") from error
            continue
        raise AssertionError(f"domain: {name} outside the domain ({measure._domain()}) did not raise DomainError")
