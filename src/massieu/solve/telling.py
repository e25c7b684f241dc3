"""What is said of iterations that may not raise: those of modules in training, and of fixed numbers of steps."""

import warnings

from torch import Tensor

from massieu.errors import ConvergenceWarning
from massieu.solve.loops import readable, unwrapped
from massieu.solve.status import CONVERGED, Status


def tell(status: Tensor, residual: Tensor, owner: str, only: Status | None = None) -> bool:
    """Warn if an item has not converged, or has the status `only`; whether one has not. Compiled code says nothing."""
    if not readable() or status.is_meta:
        return False
    numbers, sizes = unwrapped(status).flatten(), unwrapped(residual).detach()
    wrong = numbers != CONVERGED if only is None else numbers == only
    if not bool(wrong.any()):
        return False
    kinds = ", ".join(sorted({Status(kind).name for kind in numbers[wrong].tolist()}))
    largest = float(sizes.expand(unwrapped(status).shape).flatten()[wrong].amax())
    warnings.warn(
        f"{owner}: {int(wrong.sum())} of {wrong.numel()} items have not converged ({kinds}, largest residual "
        f"{largest:.3g}), and go on with their last state",
        ConvergenceWarning,
        stacklevel=3,
    )
    return True
