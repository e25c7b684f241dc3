"""Second ways to a number, for claims to hold the first against: differences, quadrature, enumeration. In float64."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from numpy.polynomial.legendre import leggauss
from torch import Tensor


def differences(
    function: Callable[[Tensor], Tensor], point: Float[Tensor, "*lead d"], step: float = 1e-5
) -> Float[Tensor, "*lead_out d"]:
    """Jacobian by central differences of step·(1 + |x|); `function` maps (*lead, d) to (*lead, *out).

    With the default step the error of a smooth function's gradient is 1e-9 to 1e-8. Applied twice with step 1e-4 it is a
    Hessian to about 1e-6.
    """
    columns = []
    for coordinate in range(point.shape[-1]):
        size = step * (1 + point[..., coordinate].abs())
        shift = torch.zeros_like(point)
        shift[..., coordinate] = size
        change = function(point + shift) - function(point - shift)  # (*lead, *out)
        out_dims = (1,) * (change.ndim - size.ndim)
        width = (2 * size).reshape(size.shape + out_dims)
        columns.append(change / width)
    return torch.stack(columns, -1)


def quadrature(low: float, high: float, panels: int = 200) -> tuple[Float[Tensor, "nodes"], Float[Tensor, "nodes"]]:
    """Points and log-weights of a 16-point Gauss–Legendre rule on each of equal panels of [low, high].

    Exact to rounding where the integrand is smooth on the scale of a panel; put a kink on the edge of a panel.
    """
    nodes, weights = map(torch.from_numpy, leggauss(16))  # on [−1, 1]
    width = (high - low) / panels
    starts = low + width * torch.arange(panels, dtype=torch.float64)
    points = (starts[:, None] + width * (nodes + 1) / 2).flatten()
    log_weights = (width / 2 * weights).log().repeat(panels)
    return points, log_weights


def log_integral(
    log_integrand: Callable[[Float[Tensor, "nodes"]], Float[Tensor, "*out nodes"]],
    low: float,
    high: float,
    panels: int = 200,
) -> Float[Tensor, "*out"]:
    """log ∫ exp(log_integrand(x)) dx over [low, high] by `quadrature`; the ends are finite, with nothing beyond them."""
    points, log_weight = quadrature(low, high, panels)
    return torch.logsumexp(log_integrand(points) + log_weight, -1)


def spin_states(dimension: int) -> Float[Tensor, "states dimension"]:
    """All 2^dimension vectors of ±1."""
    # Row by row the binary digits of 0, 1, 2, …; a digit of 1 is the spin −1.
    digits = torch.arange(2**dimension)[:, None] >> torch.arange(dimension) & 1
    return 1.0 - 2.0 * digits.double()
