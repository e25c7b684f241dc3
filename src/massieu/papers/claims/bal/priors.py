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
        poles: Places and residues of the poles of K′ nearest to 0; empty where K′ has none. Their distance from 0 is the
            radius of the cumulant series.
        top: The right end of the domain.
        two_sided: Whether the domain also ends on the left, at −top.
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
        """The radius of convergence of Σ κₙtⁿ/n!."""
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


def _factorial_powers(scale: float) -> list[float]:
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
        name="Bernoulli",
        measure=Bernoulli.create(one(p)),
        points=_numbers(0.0, 1.0),
        log_weight=_numbers(0.0, math.log(odds)),
        log_constant=math.log(1 + odds),
        log_mean_exp=lambda t: torch.log(1 - p + p * t.exp()),
        slope=lambda t: p * t.exp() / (1 - p + p * t.exp()),
        cumulants=cumulants,
        poles=((place, 1.0), (place.conjugate(), 1.0)),
    )


def _spin() -> Prior:
    # κ₂ₙ = 2²ⁿ(2²ⁿ − 1)B₂ₙ/(2n) with the Bernoulli numbers 1/6, −1/30, 1/42.
    even = [4**n * (4**n - 1) * number / (2 * n) for n, number in ((1, 1 / 6), (2, -1 / 30), (3, 1 / 42))]
    return Prior(
        name="spin",
        measure=Spin.create(one(0.0)),
        points=_numbers(-1.0, 1.0),
        log_weight=_numbers(0.0, 0.0),
        log_constant=math.log(2),
        log_mean_exp=lambda t: t.cosh().log(),
        slope=torch.tanh,
        cumulants=_numbers(0.0, even[0], 0.0, even[1], 0.0, even[2]),
        poles=((0.5j * math.pi, 1.0), (-0.5j * math.pi, 1.0)),
    )


def _gaussian(location: float, deviation: float) -> Prior:
    variance = deviation**2
    points, volume = quadrature(-60.0, 60.0)
    return Prior(
        name="Gaussian",
        measure=Gaussian.create(one(location), one(variance)),
        points=points,
        log_weight=location * points / variance - 0.5 * points.square() / variance + volume,
        log_constant=0.5 * math.log(2 * math.pi * variance) + 0.5 * location**2 / variance,
        log_mean_exp=lambda t: location * t + 0.5 * variance * t.square(),
        slope=lambda t: location + variance * t,
        cumulants=_numbers(location, variance, 0.0, 0.0, 0.0, 0.0),
    )


def _poisson(rate: float) -> Prior:
    # Tilted, the mean stays below 4/3·e² < 10.
    count = torch.arange(200, dtype=torch.float64)
    return Prior(
        name="Poisson",
        measure=Poisson.create(one(rate)),
        points=count,
        log_weight=count * math.log(rate) - torch.lgamma(count + 1),
        log_constant=rate,
        log_mean_exp=lambda t: rate * torch.expm1(t),
        slope=lambda t: rate * t.exp(),
        cumulants=_numbers(*[rate] * 6),
    )


def _exponential(rate: float) -> Prior:
    points, volume = quadrature(0.0, _TAIL / rate)
    return Prior(
        name="exponential",
        measure=Exponential.create(one(rate)),
        points=points,
        log_weight=-rate * points + volume,
        log_constant=-math.log(rate),
        log_mean_exp=lambda t: -torch.log(1 - t / rate),
        slope=lambda t: 1 / (rate - t),
        cumulants=_numbers(*_factorial_powers(1 / rate)),
        poles=((rate, -1.0),),
        top=rate,
    )


def _laplace(scale: float) -> Prior:
    points, volume = quadrature(-_TAIL * scale, _TAIL * scale, panels=400)
    # 2(n − 1)! bⁿ for even n, 0 for odd n.
    cumulants = [(1 + (-1) ** n) * value for n, value in enumerate(_factorial_powers(scale), 1)]
    return Prior(
        name="Laplace",
        measure=Laplace.create(one(scale)),
        points=points,
        log_weight=-points.abs() / scale + volume,
        log_constant=math.log(2 * scale),
        log_mean_exp=lambda t: -torch.log(1 - (scale * t).square()),
        slope=lambda t: 2 * scale**2 * t / (1 - (scale * t) ** 2),
        cumulants=_numbers(*cumulants),
        poles=((1 / scale, -1.0), (-1 / scale, -1.0)),
        top=1 / scale,
        two_sided=True,
    )


def _gamma(shape: float, scale: float) -> Prior:
    # In log h the integrand is smooth; it falls like h^shape to the left.
    logarithm, volume = quadrature(-60.0, math.log(2 * _TAIL))
    points = scale * logarithm.exp()
    return Prior(
        name="gamma",
        measure=Gamma.create(one(shape), one(scale)),
        points=points,
        log_weight=shape * points.log() - points / scale + volume,
        log_constant=math.lgamma(shape) + shape * math.log(scale),
        log_mean_exp=lambda t: -shape * torch.log(1 - scale * t),
        slope=lambda t: shape * scale / (1 - scale * t),
        cumulants=shape * _numbers(*_factorial_powers(scale)),
        poles=((1 / scale, -shape),),
        top=1 / scale,
    )


def _constant(value: float) -> Prior:
    return Prior(
        name="constant",
        measure=Constant.create(one(value)),
        points=_numbers(value),
        log_weight=_numbers(0.0),
        log_constant=0.0,
        log_mean_exp=lambda t: value * t,
        slope=lambda t: value + 0 * t,
        cumulants=_numbers(value, *[0.0] * 5),
    )
