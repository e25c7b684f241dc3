"""B9: samplers of tilted priors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Bernoulli, Categorical, Exponential, Gamma, Gaussian, Laplace, Measure, Poisson, Spin
from massieu.papers.claims.bal.priors import one
from massieu.papers.claims.claim import Check, close, near_in_standard_errors
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim


@dataclass(frozen=True)
class _Tilted:
    """A prior, t, and the law of the tilted unit written out.

    Attributes:
        name: Of the law.
        measure: The prior.
        t: Where it is tilted to.
        cumulants: Mean, variance, and the fourth cumulant.
        log_density: Of the tilted law.
    """

    name: str
    measure: Measure
    t: float
    cumulants: tuple[float, float, float]
    log_density: Callable[[Tensor], Tensor]


@claim(
    "B9",
    title="Samplers for tilted priors",
    statement="Tilted by t, a Bernoulli unit has the probability σ(t + logit p), a spin σ(2t), a Gaussian the mean "
    "μ + σ²t, a Poisson unit the rate λe^t, an exponential λ − t, a gamma the scale θ/(1 − θt), a categorical "
    "softmax(t + log π); a Laplace unit is positive with probability (1 + bt)/2, an exponential of rate 1/b ∓ t on "
    "either side.",
    source="closed forms",
    status="derived",
)
def tilted_priors(samples: int = 1_000_000, seed: int = 0) -> Iterator[Check]:
    # Fewer draws of a skew law have no normal law of their means to speak of.
    check_at_least(10_000, samples=samples)
    normal = normal_draws(seed)
    generator = torch.Generator().manual_seed(seed)
    for law in _laws(normal):
        eta = one(law.t)
        mean, variance, fourth = law.cumulants
        yield close(f"{law.name}: ∇A(t) and the mean", law.measure.mean(eta), mean)
        yield close(f"{law.name}: ∇²A(t) and the variance", law.measure.fisher(eta), variance)
        sample = law.measure.sample(eta, (samples,), generator=generator)
        points = sample[:100]
        yield close(
            f"{law.name}: log_prob and the tilted law",
            law.measure.log_prob(eta, points),
            law.log_density(points.squeeze(-1)),
        )
        error = math.sqrt(variance / samples)
        yield near_in_standard_errors(f"{law.name}: mean of the sample", sample.mean(), mean, error)
        square = (sample - mean).square().mean()
        error = math.sqrt((fourth + 2 * variance**2) / samples)
        yield near_in_standard_errors(f"{law.name}: variance of the sample", square, variance, error)
        if law.name == "Laplace":
            yield from _two_sides(sample.squeeze(-1), law.t)
    yield from _categorical(normal, samples, generator)


_SCALE = 0.8
_TILT = 0.6


def _laws(normal: Normal) -> list[_Tilted]:
    rate, theta, deviation = torch.exp(0.3 * torch.tanh(normal(3))).tolist()
    p = torch.sigmoid(normal(1)).item()
    shape = 0.8 + normal(1).abs().item()
    t, location = normal(2).tolist()
    # Half of the way to the end of the domain at most.
    share = 0.5 * math.tanh(t)
    return [
        _bernoulli(p, t),
        _spin(t),
        _gaussian(location, deviation, t),
        _poisson(rate, math.tanh(t)),
        _gamma("exponential", Exponential.create(one(rate)), 1.0, 1 / rate, rate * share),
        _gamma("gamma", Gamma.create(one(shape), one(theta)), shape, theta, share / theta),
        _laplace(_SCALE, _TILT),
    ]


def _bernoulli(p: float, t: float) -> _Tilted:
    later = 1 / (1 + math.exp(-t - math.log(p / (1 - p))))
    variance = later * (1 - later)
    return _Tilted(
        "Bernoulli",
        Bernoulli.create(one(p)),
        t,
        (later, variance, variance * (1 - 6 * variance)),
        lambda h: math.log(later) * h + math.log1p(-later) * (1 - h),
    )


def _spin(t: float) -> _Tilted:
    up = 1 / (1 + math.exp(-2 * t))
    variance = 4 * up * (1 - up)
    return _Tilted(
        "spin",
        Spin.create(one(0.0)),
        t,
        (2 * up - 1, variance, 4 * variance * (1 - 1.5 * variance)),
        lambda h: 0.5 * (math.log(up) * (1 + h) + math.log1p(-up) * (1 - h)),
    )


def _gaussian(location: float, deviation: float, t: float) -> _Tilted:
    variance = deviation**2
    mean = location + variance * t
    return _Tilted(
        "Gaussian",
        Gaussian.create(one(location), one(variance)),
        t,
        (mean, variance, 0.0),
        lambda h: -0.5 * (h - mean).square() / variance - 0.5 * math.log(2 * math.pi * variance),
    )


def _poisson(rate: float, t: float) -> _Tilted:
    later = rate * math.exp(t)
    return _Tilted(
        "Poisson",
        Poisson.create(one(rate)),
        t,
        (later, later, later),
        lambda h: h * math.log(later) - later - torch.lgamma(h + 1),
    )


def _gamma(name: str, measure: Measure, shape: float, scale: float, t: float) -> _Tilted:
    """An exponential is a gamma of shape 1 and scale 1/λ: tilted, the rate is λ − t."""
    later = scale / (1 - scale * t)
    constant = math.lgamma(shape) + shape * math.log(later)
    return _Tilted(
        name,
        measure,
        t,
        (shape * later, shape * later**2, 6 * shape * later**4),
        lambda h: (shape - 1) * h.log() - h / later - constant,
    )


def _laplace(scale: float, t: float) -> _Tilted:
    product = scale * t
    mean = 2 * scale * product / (1 - product**2)
    variance = 2 * scale**2 * (1 + product**2) / (1 - product**2) ** 2
    right = 1 / scale - t
    left = 1 / scale + t

    def log_density(h: Tensor) -> Tensor:
        positive = math.log((1 + product) / 2 * right) - right * h
        negative = math.log((1 - product) / 2 * left) + left * h
        return torch.where(h > 0, positive, negative)

    # The difference of two exponentials: their fourth cumulants add.
    fourth = 6 * (right**-4 + left**-4)
    return _Tilted("Laplace", Laplace.create(one(scale)), t, (mean, variance, fourth), log_density)


def _two_sides(sample: Float[Tensor, "samples"], t: float) -> Iterator[Check]:
    positive = sample > 0
    share = (1 + _SCALE * t) / 2
    error = math.sqrt(share * (1 - share) / len(sample))
    yield near_in_standard_errors(
        "Laplace: share of positive draws and (1 + bt)/2", positive.double().mean(), share, error
    )
    for name, side, rate in (
        ("positive", sample[positive], 1 / _SCALE - t),
        ("negative", -sample[~positive], 1 / _SCALE + t),
    ):
        error = 1 / (rate * math.sqrt(len(side)))
        sign = "−" if name == "positive" else "+"
        yield near_in_standard_errors(
            f"Laplace: mean size of {name} draws and 1/(1/b {sign} t)", side.mean(), 1 / rate, error
        )


def _categorical(normal: Normal, samples: int, generator: torch.Generator) -> Iterator[Check]:
    logits = torch.log_softmax(normal(5), -1)
    t = normal(5)
    expected = torch.softmax(t + logits, -1)
    measure = Categorical.create(logits=logits)
    yield close("categorical: ∇A(t) and softmax(t + log π)", measure.mean(t), expected)
    share = measure.sample(t, (samples,), generator=generator).mean(0)
    error = (expected * (1 - expected) / samples).sqrt()
    yield near_in_standard_errors("categorical: shares of the sample", share, expected, error)
