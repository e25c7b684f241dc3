"""The priors of B3's table in one dimension: the measure, its density before normalisation, and closed forms."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from massieu.measures import Bernoulli, Constant, Exponential, Gamma, Gaussian, Laplace, Measure, Poisson, Spin
from massieu.papers.claims.inputs import Normal
from massieu.papers.claims.oracles import quadrature

WITHIN = 0.75
"""How much of the way to the end of the domain the drawn t may go."""

_TAIL = 45.0 / (1 - WITHIN)
"""Nothing is left of e^{−(1 − WITHIN)·x} at x = 180."""


@dataclass(frozen=True)
class Prior:
    """A law q(dh) = e^{b(h)} ν(dh)/c of one hidden unit.

    Attributes:
        name: Of the law.
        measure: q, event shape (1,).
        points: h, atoms or nodes of a quadrature.
        log_weight: b(h) at the points, and ν's share of each.
        log_constant: log c in closed form.
        log_mean_exp: K(t) = log E e^{th} in closed form.
        slope: K′(t), for complex t.
        cumulants: κ₁ … κ₆ in closed form.
        poles: Of K′, those nearest to 0: where and the residue. Their distance is the radius of the cumulant series.
        top: The end of the domain on the right; −top is that on the left where `two_sided`.
        two_sided: Whether there is one.
    """

    name: str
    measure: Measure
    points: Float[Tensor, "nodes"]
    log_weight: Float[Tensor, "nodes"]
    log_constant: float
    log_mean_exp: Callable[[Tensor], Tensor]
    slope: Callable[[Complex[Tensor, "n"]], Tensor]
    cumulants: Float[Tensor, "6"]
    poles: tuple[tuple[complex, float], ...] = ()
    top: float = math.inf
    two_sided: bool = False

    @property
    def radius(self) -> float:
        """Of convergence of Σ κₙtⁿ/n!."""
        return min((abs(place) for place, _ in self.poles), default=math.inf)

    @property
    def reach(self) -> float:
        """|t| up to which the law is tried, inside the domain."""
        return min(WITHIN * self.top, 2.0)

    def log_integral(self, t: Float[Tensor, "draws"]) -> Float[Tensor, "draws"]:
        """log ∫ e^{b(h) + th} ν(dh), by summation."""
        return (self.log_weight + t.unsqueeze(-1) * self.points).logsumexp(-1)


def priors(normal: Normal) -> list[Prior]:
    """Every scalar row of the table, with random parameters."""
    p = torch.sigmoid(1.5 * torch.tanh(normal(1))).item()
    rate, scale, deviation = torch.exp(0.3 * torch.tanh(normal(3))).tolist()
    shape = 0.8 + normal(1).abs().item()
    location, value = normal(2).tolist()
    return [
        _bernoulli(p),
        _spin(),
        _gaussian(location, deviation),
        _poisson(rate),
        _exponential(rate),
        _laplace(scale),
        _gamma(shape, scale),
        _constant(value),
    ]


def one(value: float) -> Float[Tensor, "1"]:
    """A parameter of one coordinate."""
    return torch.tensor([value], dtype=torch.float64)


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _growing(scale: float) -> list[float]:
    """(n − 1)! scaleⁿ, n = 1 … 6."""
    return [math.factorial(n - 1) * scale**n for n in range(1, 7)]


def _bernoulli(p: float) -> Prior:
    odds = p / (1 - p)
    variance = p * (1 - p)
    skew = 1 - 2 * p
    cumulants = _numbers(
        p,
        variance,
        variance * skew,
        variance * (1 - 6 * p + 6 * p**2),
        variance * skew * (1 - 12 * variance),
        variance * (1 - 30 * variance + 120 * variance**2),
    )
    place = complex(-math.log(odds), math.pi)
    return Prior(
        "Bernoulli",
        Bernoulli.create(one(p)),
        _numbers(0.0, 1.0),
        _numbers(0.0, math.log(odds)),
        math.log(1 + odds),
        lambda t: torch.log(1 - p + p * t.exp()),
        lambda t: p * t.exp() / (1 - p + p * t.exp()),
        cumulants,
        ((place, 1.0), (place.conjugate(), 1.0)),
    )


def _spin() -> Prior:
    # κ₂ₙ = 2²ⁿ(2²ⁿ − 1)B₂ₙ/(2n) with the Bernoulli numbers 1/6, −1/30, 1/42.
    even = [4**n * (4**n - 1) * number / (2 * n) for n, number in ((1, 1 / 6), (2, -1 / 30), (3, 1 / 42))]
    return Prior(
        "spin",
        Spin.create(one(0.0)),
        _numbers(-1.0, 1.0),
        _numbers(0.0, 0.0),
        math.log(2),
        lambda t: t.cosh().log(),
        torch.tanh,
        _numbers(0.0, even[0], 0.0, even[1], 0.0, even[2]),
        ((0.5j * math.pi, 1.0), (-0.5j * math.pi, 1.0)),
    )


def _gaussian(location: float, deviation: float) -> Prior:
    variance = deviation**2
    points, volume = quadrature(-60.0, 60.0)
    return Prior(
        "Gaussian",
        Gaussian.create(one(location), one(variance)),
        points,
        location * points / variance - 0.5 * points.square() / variance + volume,
        0.5 * math.log(2 * math.pi * variance) + 0.5 * location**2 / variance,
        lambda t: location * t + 0.5 * variance * t.square(),
        lambda t: location + variance * t,
        _numbers(location, variance, 0.0, 0.0, 0.0, 0.0),
    )


def _poisson(rate: float) -> Prior:
    # Tilted, the mean stays below 4/3·e² < 10.
    count = torch.arange(200, dtype=torch.float64)
    return Prior(
        "Poisson",
        Poisson.create(one(rate)),
        count,
        count * math.log(rate) - torch.lgamma(count + 1),
        rate,
        lambda t: rate * torch.expm1(t),
        lambda t: rate * t.exp(),
        _numbers(*[rate] * 6),
    )


def _exponential(rate: float) -> Prior:
    points, volume = quadrature(0.0, _TAIL / rate)
    return Prior(
        "exponential",
        Exponential.create(one(rate)),
        points,
        -rate * points + volume,
        -math.log(rate),
        lambda t: -torch.log(1 - t / rate),
        lambda t: 1 / (rate - t),
        _numbers(*_growing(1 / rate)),
        ((rate, -1.0),),
        top=rate,
    )


def _laplace(scale: float) -> Prior:
    points, volume = quadrature(-_TAIL * scale, _TAIL * scale, panels=400)
    even = [2 * value if n % 2 == 0 else 0.0 for n, value in enumerate(_growing(scale), 1)]
    return Prior(
        "Laplace",
        Laplace.create(one(scale)),
        points,
        -points.abs() / scale + volume,
        math.log(2 * scale),
        lambda t: -torch.log(1 - (scale * t).square()),
        lambda t: 2 * scale**2 * t / (1 - (scale * t) ** 2),
        _numbers(*even),
        ((1 / scale, -1.0), (-1 / scale, -1.0)),
        top=1 / scale,
        two_sided=True,
    )


def _gamma(shape: float, scale: float) -> Prior:
    # In log h the integrand is smooth; it falls like h^shape to the left.
    logarithm, volume = quadrature(-60.0, math.log(2 * _TAIL))
    points = scale * logarithm.exp()
    return Prior(
        "gamma",
        Gamma.create(one(shape), one(scale)),
        points,
        shape * points.log() - points / scale + volume,
        math.lgamma(shape) + shape * math.log(scale),
        lambda t: -shape * torch.log(1 - scale * t),
        lambda t: shape * scale / (1 - scale * t),
        shape * _numbers(*_growing(scale)),
        ((1 / scale, -shape),),
        top=1 / scale,
    )


def _constant(value: float) -> Prior:
    return Prior(
        "constant",
        Constant.create(one(value)),
        _numbers(value),
        _numbers(0.0),
        0.0,
        lambda t: value * t,
        lambda t: value + 0 * t,
        _numbers(value, *[0.0] * 5),
    )
