"""Modified Bessel functions of the sphere: log E exp(κ x₁) for x uniform on the unit sphere of R^d, and what follows.

With ν = d/2 − 1 and s = κ², E exp(κ x₁) = Λ_ν(s) = Γ(ν+1) (2/κ)^ν I_ν(κ) = ₀F₁(; ν+1; s/4). Everything is made of two
quantities per order, smooth in s (at s = 0 too) and free of cancellation:

    y_ν = κ I_{ν+1}/I_ν = s / D_ν,                      D_ν = 2(ν+1) + y_{ν+1}
    e_ν = κ dy_ν/dκ − y_ν = s (2(ν+1) − e_{ν+1}) / D_ν²
    log Λ_ν = log Λ_{ν+1} + log1p(y_{ν+1} / 2(ν+1))

The recurrences go down from an order μ ≥ 24, where Debye's uniform expansion is exact to rounding for every κ. They add
positive numbers, except in 2(ν+1) − e_{ν+1}, which is at least ν + ½. As a fixed number of torch operations they work under
`torch.func` and `torch.compile`, to any order of derivative. They are computed in float64 whatever the input.

κ is given as `square`, which is (κ/unit)², and a constant `unit`: functions of a vector are then smooth at 0, and κ²
need not be representable. Derivatives with respect to `square` hold `unit` fixed.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.polynomial import Polynomial
from torch import Tensor

from massieu.foundation.arguments import whole_number

_LOWEST_START = 24
"""Least order μ at which the descent begins."""
_DEBYE_TERMS = 12
"""Terms of Debye's expansion. From order 24 on the first omitted term has a relative size of at most 3e-17 in log Λ, 8e-17 in y
and 2e-15 in e (for κ/μ from 1e-4 to 1e3; the worst κ is about μ)."""

_NEGLIGIBLE = 1e-20
"""Coefficients that no longer change a sum of order 1."""


def log_sphere_partition(
    square: Float[Tensor, "*lead"], dimension: int, unit: Float[Tensor, "*lead"] | float = 1.0
) -> Float[Tensor, "*lead"]:
    """log E exp(κ x₁) for x uniform on the unit sphere of R^d, in nats; κ = unit·√square (S2).

    It is log Γ(d/2) + (d/2 − 1) log(2/κ) + log I_{d/2−1}(κ) without the singularity at 0: κ²/(2d) for small κ,
    κ − (d−1)/2·log κ + const for large. Relative error below 1e-13 in float64, d from 2 to 4096, every κ.

    Args:
        square: (κ/unit)² ≥ 0.
        dimension: d ≥ 2.
        unit: Positive; other than 1 only where κ² would overflow.

    Raises:
        ValueError: `dimension` is less than 2.
    """
    orders = _descend(square, dimension, unit)
    return (orders.unit * orders.debye.height + _logarithms(orders)).to(square.dtype)


def sphere_slack(
    square: Float[Tensor, "*lead"], dimension: int, unit: Float[Tensor, "*lead"] | float = 1.0
) -> Float[Tensor, "*lead"]:
    """κ − log E exp(κ x₁) ≥ 0 for x uniform on the unit sphere of R^d, in nats; (d−1)/2·log κ + const for large κ.

    Arguments and errors as `log_sphere_partition`, and κ > 0. It is not made as a difference of two numbers of size κ.
    """
    orders = _descend(square, dimension, unit)
    # √s − height = √s (ρ + root − √s)/(ρ + root) for ρ = μ/unit, root = √(ρ² + s), and root − √s = ρ²/(root + √s).
    length = orders.square.sqrt()
    relative = orders.counts[0] / 2 / orders.unit
    root = (relative.square() + orders.square).sqrt()
    gap = length * (relative + relative.square() / (root + length)) / (relative + root)
    return (orders.unit * gap - _logarithms(orders)).to(square.dtype)


def sphere_entropy(
    square: Float[Tensor, "*lead"], dimension: int, unit: Float[Tensor, "*lead"] | float = 1.0
) -> Float[Tensor, "*lead"]:
    """log E exp(κ x₁) − κ R(κ) ≤ 0, in nats: the von Mises–Fisher law's entropy relative to the uniform law (S8).

    Arguments and errors as `log_sphere_partition`. It is not made as a difference of two numbers of size κ: relative
    error below 1e-12 in float64, every κ.
    """
    orders = _descend(square, dimension, unit)
    # κR = y_ν, and y_ν − y_{ν+1} = (e_{ν+1} + y_{ν+1}) / D_ν by Riccati's equation.
    rise = orders.debye.correction
    for excess, height, denominator in zip(_excesses(orders), orders.heights, orders.denominators, strict=True):
        rise = rise + (excess / orders.unit + height) / denominator
    return (_logarithms(orders) - rise).to(square.dtype)


def sphere_chord(
    square: Float[Tensor, "*lead"], dimension: int, unit: Float[Tensor, "*lead"] | float = 1.0
) -> Float[Tensor, "*lead"]:
    """unit·R(κ)/κ for R of `bessel_ratios`: the sphere's mean is R/κ times the natural parameter (S2).

    Arguments and errors as `log_sphere_partition`. Relative error below 1e-14 in float64, every κ; unit/d at 0.
    """
    return _descend(square, dimension, unit).denominators[-1].reciprocal().to(square.dtype)


class Slopes(NamedTuple):
    """Slopes of R of `bessel_ratios`: the unit sphere's covariance is R'(κ) along the axis and R(κ)/κ across (S2)."""

    chord: Float[Tensor, "*lead"]
    """unit·R/κ; unit/d at 0, unit/κ for large κ."""
    tangent: Float[Tensor, "*lead"]
    """unit·R'(κ); unit/d at 0, unit·(d−1)/(2κ²) for large κ."""
    bend: Float[Tensor, "*lead"]
    """(chord − tangent)/square, smooth at 0."""


def sphere_slopes(square: Float[Tensor, "*lead"], dimension: int, unit: Float[Tensor, "*lead"] | float = 1.0) -> Slopes:
    """R(κ)/κ and R'(κ), times `unit`, for R of `bessel_ratios`, the mean length of the von Mises–Fisher law.

    Arguments and errors as `log_sphere_partition`. R' is not made as 1 − R² − (d−1)R/κ, which cancels: relative errors
    below 1e-12 in float64, every κ.
    """
    orders = _descend(square, dimension, unit)
    *_, above, last = _excesses(orders)
    outer, denominator = orders.denominators[-2:]
    # e + y = κ dy/dκ at the order above the last, divided by s.
    growth = (1 + (orders.counts[-2] - above) / (orders.unit * outer)) / outer
    tangent = (orders.counts[-1] - last) / orders.unit / denominator.square()
    return Slopes(
        chord=denominator.reciprocal().to(square.dtype),
        tangent=tangent.to(square.dtype),
        bend=(growth / denominator.square()).to(square.dtype),
    )


def bessel_ratios(concentration: Float[Tensor, "*lead"], dimension: int, count: int) -> Float[Tensor, "*lead count"]:
    """I_{d/2+j}(κ)/I_{d/2−1+j}(κ) for j = 0 … count − 1: R(κ) in the dimensions d, d + 2, d + 4, …

    R is κ/d for small κ, 1 − (d−1)/(2κ) for large. One recurrence for all of them; relative error below 1e-14 in float64,
    every κ ≥ 0.

    Raises:
        ValueError: `dimension` is less than 2, `count` less than 1.
    """
    whole_number("count", count, least=1)
    unit = concentration.detach().double().clamp_min(1)
    scaled = concentration.double() / unit
    denominators = _descend(scaled.square(), dimension, unit, count).denominators
    # The lowest order is the last of them, and comes first here.
    ratios = torch.stack([scaled / denominator for denominator in denominators[: -count - 1 : -1]], -1)
    return ratios.to(concentration.dtype)


class _Debye(NamedTuple):
    """The expansion at order μ, with t = 1/√(1 + (κ/μ)²)."""

    height: Tensor  # (√(μ² + κ²) − μ)/unit, the leading term of y_μ/unit
    logarithm: Tensor  # log Λ_μ − unit·height
    correction: Tensor  # y_μ − unit·height
    excess: Tensor  # e_μ


class _Orders(NamedTuple):
    """The recurrence for y, in lists from order μ − 1 down to ν."""

    square: Tensor
    unit: Tensor
    debye: _Debye
    counts: list[int]  # 2(ν+1)
    heights: list[Tensor]  # y_{ν+1}/unit
    denominators: list[Tensor]  # D_ν/unit


def _descend(square: Tensor, dimension: int, unit: Tensor | float, least: int = 2) -> _Orders:
    """The recurrence from an order of at least 24 down to ν = dimension/2 − 1, with at least `least` steps."""
    if dimension < 2:
        raise ValueError(f"the sphere's dimension must be at least 2, got {dimension}")
    square = square.double()
    unit = torch.as_tensor(unit, dtype=torch.float64, device=square.device)
    steps = max(least, 2, math.ceil(_LOWEST_START - (dimension / 2 - 1)))
    counts = list(range(dimension + 2 * (steps - 1), dimension - 1, -2))
    debye = _debye(square, unit, counts[0] / 2)
    heights = [debye.height + debye.correction / unit]
    denominators = [counts[0] / unit + heights[0]]
    for count in counts[1:]:
        heights.append(square / denominators[-1])
        denominators.append(count / unit + heights[-1])
    return _Orders(square, unit, debye, counts, heights, denominators)


def _excesses(orders: _Orders) -> list[Tensor]:
    """e_{ν+1} for each order of the descent."""
    excesses = [orders.debye.excess]
    for count, denominator in zip(orders.counts[:-1], orders.denominators[:-1], strict=True):
        excesses.append(orders.square * (count - excesses[-1]) / denominator.square())
    return excesses


def _logarithms(orders: _Orders) -> Tensor:
    """log Λ_ν − unit·height: the terms that grow like log κ."""
    total = orders.debye.logarithm
    for count, height in zip(orders.counts, orders.heights, strict=True):
        total = total + torch.log1p(orders.unit / count * height)
    return total


def _debye(square: Tensor, unit: Tensor, order: float) -> _Debye:
    """Debye's uniform expansion (DLMF 10.41) of log Λ_μ and of its derivatives in log κ, for μ = `order`.

    Each term has the factor 1 − t, which is of the order of κ² at 0; at t = 1 the terms are those of Stirling's series
    and cancel against Γ(μ+1)'s.
    """
    relative = order / unit
    root = (relative.square() + square).sqrt()
    # √(μ² + κ²) − μ in units of `unit`, without a difference.
    height = square / (relative + root)
    w = height * (unit / order)
    t = 1 / (1 + w)
    gap = height / root  # 1 − t
    factor = gap * (1 + t)  # 1 − t²
    logarithm = -order * torch.log1p(w / 2) - 0.5 * torch.log1p(w) + factor * _sum(_LOGARITHM, order, t)
    logarithm = logarithm - gap * sum(c * order**-k for k, c in _STIRLING)
    correction = factor * _sum(_CORRECTION, order, t)
    return _Debye(height, logarithm, correction, gap * order + factor * _sum(_EXCESS, order, t))


_Table = tuple[tuple[tuple[int, float], ...], ...]
"""For each power of t, pairs of k and the coefficient to be divided by μ^k."""


def _sum(table: _Table, order: float, t: Tensor) -> Tensor:
    """Σ_k (polynomial k in t) / order^k."""
    coefficients = [sum(c * order**-k for k, c in entries) for entries in table]
    while abs(coefficients[-1]) < _NEGLIGIBLE:
        coefficients.pop()
    total = torch.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * t + coefficient
    return total


def _debye_tables() -> tuple[_Table, _Table, _Table, tuple[tuple[int, float], ...]]:
    """y_μ = √(μ² + κ²) − μ + Σ P_k(t)/μ^k, its integral D and its derivative in log κ.

    The P_k follow from Riccati's equation κ dY/dκ = μ² + κ² − Y² for Y = y + μ, power by power of μ. They are even or
    odd as k is, and so are the tables' polynomials: P_k/(1−t²), ((κ d/dκ − 1) P_k)/(1−t²) and (D_k − D_k(1) t)/(1−t²).
    P_0 integrates to −½ log1p(w) and is not in the first table. Coefficients of P_k are halves of halves: nothing is rounded
    but where they are so large that their terms do not count.
    """
    t = Polynomial([0.0, 1.0])
    sides = Polynomial([1.0, 0.0, -1.0])  # 1 − t²

    def slope(series: Polynomial) -> Polynomial:
        """κ d/dκ = −t (1 − t²) d/dt."""
        return -t * sides * series.deriv()

    terms = [Polynomial([-0.5, 0.0, 0.5])]
    for k in range(_DEBYE_TERMS):
        squares = sum((left * right for left, right in zip(terms, reversed(terms), strict=True)), slope(terms[k]))
        terms.append(-t * squares / 2)
    reduced = [term // sides for term in terms]
    logarithm = [Polynomial([0.0])]
    stirling = []
    for k, term in enumerate(reduced[1:], 1):
        integral = (-term // t).integ()  # dD/dt = −P/(t (1−t²))
        end = integral(1.0) if k % 2 else 0.0
        stirling.append((k, float(end)))
        logarithm.append((integral - end * t) // sides)
    excess = [(slope(term) - term) // sides for term in terms]
    return _table(logarithm), _table(reduced), _table(excess), tuple(stirling)


def _table(series: Sequence[Polynomial]) -> _Table:
    """The coefficients of a series of polynomials, by powers of t; those that are 0 are left out."""
    powers = itertools.zip_longest(*(polynomial.coef for polynomial in series), fillvalue=0.0)
    return tuple(tuple((k, float(x)) for k, x in enumerate(power) if x) for power in powers)


_LOGARITHM, _CORRECTION, _EXCESS, _STIRLING = _debye_tables()
