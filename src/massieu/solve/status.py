"""How the iteration of each item ended, and the warning of modules and loops that do not raise for it."""

import warnings
from enum import IntEnum
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import ConvergenceWarning
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import unwrapped, values_are_readable


class Status(IntEnum):
    """Why the iteration of an item stopped: the numbers in the `status` of results.

    In compiled code compare with ``int(Status.CONVERGED)`` or use `FixedPointResult.converged`: `torch.compile` takes a
    tensor and a member of an enumeration for unequal.

    Example:
        >>> import torch
        >>> from massieu.solve import Status, fixed_point
        >>> found = fixed_point(lambda z: 3 * z + 1, torch.zeros(1), throw=False)
        >>> Status(found.status.item()).name
        'DIVERGED'
    """

    CONVERGED = 0
    MAX_STEPS = 1
    """The steps ran out before the residual was small."""
    DIVERGED = 2
    """The residual grew a millionfold: the map expands."""
    NOT_FINITE = 3
    """The function returned an infinite or undefined number."""
    NOT_ATTRACTING = 4
    """A fixed point at which the Jacobian has spectral radius ≥ 1: a saddle, from which iterates move away."""
    SINGULAR = 5
    """A linear system without a solution; for conjugate gradients, a direction of no or negative curvature."""


# The same as integers: in compiled code a comparison of a tensor with a member of an enumeration is silently always false.
CONVERGED, MAX_STEPS, DIVERGED, NOT_FINITE, NOT_ATTRACTING, SINGULAR = (int(status) for status in Status)
RUNNING = -1
"""The status of an item that has not stopped."""


class FixedPointResult(NamedTuple):
    """A fixed point, or the last iterate, and how the iteration ended. All but `value` have one number for each item.

    Attributes:
        value: z, shaped like the start; at least float32.
        status: Of `Status`.
        steps: How often the item moved.
        evaluations: Of the function, until the item stopped; those of the check for attraction are among them.
        residual: ‖function(value) − value‖₂ of the very tensor returned.
        lipschitz_estimate: The largest ‖Δfunction‖/‖Δz‖ of the last five moves: at most the map's Lipschitz constant.
            NaN where nothing moved.
    """

    value: Float[Tensor, "*items_item"]
    status: Int[Tensor, "*items"]
    steps: Int[Tensor, "*items"]
    evaluations: Int[Tensor, "*items"]
    residual: Float[Tensor, "*items"]
    lipschitz_estimate: Float[Tensor, "*items"]

    __repr__ = fields_repr
    _repr_html_ = fields_html

    @property
    def converged(self) -> Tensor:
        """Which items have converged."""
        return self.status == CONVERGED

    @property
    def error_bound(self) -> Float[Tensor, "*items"]:
        """residual/(1 − L) ≥ ‖value − z*‖ with L = `lipschitz_estimate`, if that is the map's; inf where L ≥ 1 (B12).

        One more application of the function comes within L times this of z*.
        """
        return torch.where(self.lipschitz_estimate >= 1, torch.inf, self.residual / (1 - self.lipschitz_estimate))


def warn_unconverged(status: Tensor, residual: Tensor, owner: str, only: Status | None = None) -> bool:
    """Warn if an item has not converged, or, with `only`, if one has that status.

    Args:
        status: One number for each item.
        residual: Of each item; broadcasts to `status`.
        owner: Whose items they are, for the warning.
        only: The one status to warn of; None: all but CONVERGED.

    Returns:
        Whether it warned. Compiled code, where values cannot be read, never does.
    """
    if not values_are_readable(status):
        return False
    shape = unwrapped(status).shape
    numbers = unwrapped(status).flatten()
    residuals = unwrapped(residual).detach().expand(shape).flatten()
    unconverged = numbers != CONVERGED if only is None else numbers == only
    if not bool(unconverged.any()):
        return False
    largest = float(residuals[unconverged].amax())
    warnings.warn(
        f"{owner}: {int(unconverged.sum())} of {unconverged.numel()} items have not converged "
        f"({names(numbers[unconverged])}, largest residual {largest:.3g}), and go on with their last state",
        ConvergenceWarning,
        stacklevel=3,
    )
    return True


def names(status: Tensor) -> str:
    """The names of the statuses that occur, for a message."""
    return ", ".join(sorted({Status(kind).name for kind in status.tolist()}))
