"""How fast a population leaves its equilibrium: what one layer multiplies a small perturbation by (X7, S13, N5)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_broadcastable, check_finite, doubles, number, real, whole_number
from massieu.foundation.doors import count, door
from massieu.measures import Atoms
from massieu.measures.moments import cumulants_of_moments
from massieu.ops.bessel import bessel_ratios

_LEAST_SIZE = 1e-10
_LARGEST_SIZE = 1e-3
"""Between these sizes a perturbation is more than rounding, and its density can be normalised on the grid."""


@door(order=count)
def cumulant_growth(
    order: int, step: float | Float[Tensor, "*lead"], variance: float | Float[Tensor, "*lead"]
) -> Float[Tensor, "*lead"]:
    """The factor by which a layer and full whitening multiply a small cumulant: 1 + n·step·b^(n−1)/(1 + step·b) (X7).

    To first order in the cumulant, for keys that are the tokens themselves. It exceeds 1 for every order n ≥ 3 and step > 0:
    the Gaussian equilibrium is unstable to every perturbation that is not Gaussian.

    Args:
        order: n, at least 3; whitening resets the first two cumulants.
        step: The layer's step.
        variance: b, the population's variance per coordinate times attention's scale; below 0 where the score matrix has that
            sign.

    Raises:
        ValueError: `order` is less than 3, or a number is not finite.
        TypeError: `order` is no integer, or the others are no numbers.

    Example:
        >>> from massieu.papers.theory import cumulant_growth
        >>> round(cumulant_growth(3, 0.1, 1.0).item(), 4)  # 1 + 0.3/1.1
        1.2727
    """
    whole_number("order", order, least=3)
    step = doubles("step", step)
    variance = doubles("variance", variance)
    check_broadcastable(step=step, variance=variance)
    check_finite(step=step, variance=variance)
    return 1 + order * step * variance ** (order - 1) / (1 + step * variance)


@door(order=count, step=real, variance=real, size=real)
def measured_cumulant_growth(order: int, step: float, variance: float, *, size: float = 1e-5) -> Float[Tensor, ""]:
    """`cumulant_growth` as measured: a perturbed normal law goes through the layer; quadrature gives its whitened cumulants.

    The densities are φ(z)·exp(±size·He_n(z)/n!), up to normalisation; half the difference of the two cumulants is linear in
    `size` up to size³. The layer is `Atoms` on a grid of the trapezoidal rule, exact to rounding for such densities.

    Raises:
        ValueError: `order` is not in 3 … 6, where the perturbed density falls off on the grid; a number is not finite; `size`
            is not in 1e-10 … 1e-3: below, the difference is rounding, above, the density of order 6 does not fall off.
        TypeError: `order` is no integer, or the others are no numbers.

    Example:
        >>> from massieu.papers.theory import cumulant_growth
        >>> from massieu.papers.theory import measured_cumulant_growth
        >>> measured, growth = measured_cumulant_growth(3, 0.1, 1.0), cumulant_growth(3, 0.1, 1.0)
        >>> bool(abs(measured - growth) < 1e-3)
        True
    """
    whole_number("order", order, least=3, most=6)
    number("step", step)
    number("variance", variance)
    number("size", size, least=_LEAST_SIZE, most=_LARGEST_SIZE)
    grid = torch.arange(-14.0, 14.0, 0.1, dtype=torch.float64)
    hermite = _hermite(grid, order)

    def cumulants(signed_size: float) -> _BeforeAndAfter:
        log_weight = -0.5 * grid.square() + signed_size / math.factorial(order) * hermite
        keys = Atoms.create(grid.unsqueeze(-1), log_weight)
        after_layer = grid + step * keys.mean(variance * grid.unsqueeze(-1)).squeeze(-1)
        probabilities = torch.softmax(log_weight, 0)
        return _BeforeAndAfter(
            before=_whitened_cumulant(probabilities, grid, order),
            after=_whitened_cumulant(probabilities, after_layer, order),
        )

    positive = cumulants(size)
    negative = cumulants(-size)
    return (positive.after - negative.after) / (positive.before - negative.before)


@door(order=count, step=real, scale=real)
def harmonic_growth(order: int, step: float, scale: float, dim: int) -> Float[Tensor, ""]:
    """The factor by which a layer and RMSNorm multiply a small harmonic of degree n of a nearly uniform law on the sphere.

    1 + step·n(n + dim − 2)ρ_n/(scale·(1 + step·R)), ρ_n = I_{n+dim/2−1}/I_{dim/2−1} and R = ρ_1, all at `scale`, for keys
    that are the tokens themselves. The uniform law is a fixed point of it, point by point, and the factor exceeds 1 for every
    n ≥ 1: clusters grow from it (S13, N5).

    Derived from the Funk–Hecke formula: a density 1 + εY_n adds ε·ρ_n·Y_n to log Z, tokens move along the gradient of Y_n on
    the sphere, and the divergence of that is −n(n + dim − 2)Y_n.

    Raises:
        ValueError: `order` is less than 1, `dim` less than 2, `scale` not positive, or a number is not finite.
        TypeError: `order` or `dim` is no integer, or the others are no numbers.

    Example:
        >>> from massieu.papers.theory import harmonic_growth
        >>> round(harmonic_growth(1, 0.0, 1.0, dim=3).item(), 3)  # without a step nothing grows
        1.0
    """
    whole_number("order", order, least=1)
    whole_number("dim", dim, least=2)
    number("step", step)
    number("scale", scale, above=0)
    # I_{ν+1}/I_ν for ν = dim/2 − 1, dim/2, …: lengths of means on spheres of dim, dim + 2, … dimensions.
    ratios = bessel_ratios(torch.tensor(scale, dtype=torch.float64), dim, order)
    return 1 + step * order * (order + dim - 2) * ratios.prod() / (scale * (1 + step * ratios[0]))


class _BeforeAndAfter(NamedTuple):
    """A whitened cumulant before and after a layer."""

    before: Float[Tensor, ""]
    after: Float[Tensor, ""]


def _hermite(z: Float[Tensor, " n"], order: int) -> Float[Tensor, " n"]:
    """He_n by He_{k+1} = z He_k − k He_{k−1}."""
    polynomials = [torch.ones_like(z), z]
    for k in range(1, order):
        polynomials.append(z * polynomials[k] - k * polynomials[k - 1])
    return polynomials[order]


def _whitened_cumulant(
    probabilities: Float[Tensor, " n"], values: Float[Tensor, " n"], order: int
) -> Float[Tensor, ""]:
    """κ_n/κ_2^(n/2)."""
    centred = values - (probabilities * values).sum()
    moments = torch.stack([(probabilities * centred**power).sum() for power in range(1, order + 1)])
    cumulants = cumulants_of_moments(moments)
    return cumulants[order - 1] / cumulants[1] ** (order / 2)
