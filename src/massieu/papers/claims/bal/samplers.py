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
        mean: Of the tilted law.
        variance: Of the tilted law.
        fourth_cumulant: Of the tilted law.
        log_density: Of the tilted law.
    """

    name: str
    measure: Measure
    t: float
    mean: float
    variance: float
    fourth_cumulant: float
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
        yield close(f"{law.name}: ∇A(t) and the mean", law.measure.mean(eta), law.mean)
        yield close(f"{law.name}: ∇²A(t) and the variance", law.measure.fisher(eta), law.variance)
        sample = law.measure.sample(eta, (samples,), generator=generator)
        points = sample[:100]
        yield close(
            f"{law.name}: log_prob and the tilted law",
            law.measure.log_prob(eta, points),
            law.log_density(points.squeeze(-1)),
        )
        error = math.sqrt(law.variance / samples)
        yield near_in_standard_errors(f"{law.name}: mean of the sample", sample.mean(), law.mean, error)
        mean_square = (sample - law.mean).square().mean()
        # (x − m)² has the variance κ₄ + 2κ₂².
        error = math.sqrt((law.fourth_cumulant + 2 * law.variance**2) / samples)
        yield near_in_standard_errors(f"{law.name}: variance of the sample", mean_square, law.variance, error)
        if law.name == "Laplace":
            yield from _two_sides(sample.squeeze(-1), law.t)
    yield from _categorical(normal, samples, generator)


_SCALE = 0.8
"""b of the Laplace law."""
_TILT = 0.6
"""t of the Laplace law."""


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
    tilted_p = 1 / (1 + math.exp(-t - math.log(p / (1 - p))))
    variance = tilted_p * (1 - tilted_p)
    return _Tilted(
        name="Bernoulli",
        measure=Bernoulli.create(one(p)),
        t=t,
        mean=tilted_p,
        variance=variance,
        fourth_cumulant=variance * (1 - 6 * variance),
        log_density=lambda h: math.log(tilted_p) * h + math.log1p(-tilted_p) * (1 - h),
    )


def _spin(t: float) -> _Tilted:
    up = 1 / (1 + math.exp(-2 * t))
    variance = 4 * up * (1 - up)
    return _Tilted(
        name="spin",
        measure=Spin.create(one(0.0)),
        t=t,
        mean=2 * up - 1,
        variance=variance,
        fourth_cumulant=4 * variance * (1 - 1.5 * variance),
        log_density=lambda h: 0.5 * (math.log(up) * (1 + h) + math.log1p(-up) * (1 - h)),
    )


def _gaussian(location: float, deviation: float, t: float) -> _Tilted:
    variance = deviation**2
    mean = location + variance * t
    return _Tilted(
        name="Gaussian",
        measure=Gaussian.create(one(location), one(variance)),
        t=t,
        mean=mean,
        variance=variance,
        fourth_cumulant=0.0,
        log_density=lambda h: -0.5 * (h - mean).square() / variance - 0.5 * math.log(2 * math.pi * variance),
    )


def _poisson(rate: float, t: float) -> _Tilted:
    tilted_rate = rate * math.exp(t)
    return _Tilted(
        name="Poisson",
        measure=Poisson.create(one(rate)),
        t=t,
        mean=tilted_rate,
        variance=tilted_rate,
        fourth_cumulant=tilted_rate,
        log_density=lambda h: h * math.log(tilted_rate) - tilted_rate - torch.lgamma(h + 1),
    )


def _gamma(name: str, measure: Measure, shape: float, scale: float, t: float) -> _Tilted:
    """An exponential is a gamma of shape 1 and scale 1/λ: tilted, the rate is λ − t."""
    tilted_scale = scale / (1 - scale * t)
    constant = math.lgamma(shape) + shape * math.log(tilted_scale)
    return _Tilted(
        name=name,
        measure=measure,
        t=t,
        mean=shape * tilted_scale,
        variance=shape * tilted_scale**2,
        fourth_cumulant=6 * shape * tilted_scale**4,
        log_density=lambda h: (shape - 1) * h.log() - h / tilted_scale - constant,
    )


def _laplace(scale: float, t: float) -> _Tilted:
    product = scale * t
    mean = 2 * scale * product / (1 - product**2)
    variance = 2 * scale**2 * (1 + product**2) / (1 - product**2) ** 2
    right_rate = 1 / scale - t
    left_rate = 1 / scale + t

    def log_density(h: Tensor) -> Tensor:
        positive = math.log((1 + product) / 2 * right_rate) - right_rate * h
        negative = math.log((1 - product) / 2 * left_rate) + left_rate * h
        return torch.where(h > 0, positive, negative)

    return _Tilted(
        name="Laplace",
        measure=Laplace.create(one(scale)),
        t=t,
        mean=mean,
        variance=variance,
        # The difference of two exponentials: their fourth cumulants add.
        fourth_cumulant=6 * (right_rate**-4 + left_rate**-4),
        log_density=log_density,
    )


def _two_sides(sample: Float[Tensor, "samples"], t: float) -> Iterator[Check]:
    """A Laplace unit is positive with probability (1 + bt)/2, and exponential on either side."""
    positive = sample > 0
    share = (1 + _SCALE * t) / 2
    error = math.sqrt(share * (1 - share) / len(sample))
    yield near_in_standard_errors(
        "Laplace: share of positive draws and (1 + bt)/2", positive.double().mean(), share, error
    )
    yield _exponential_side(
        "Laplace: mean size of positive draws and 1/(1/b − t)", sample[positive], rate=1 / _SCALE - t
    )
    yield _exponential_side(
        "Laplace: mean size of negative draws and 1/(1/b + t)", -sample[~positive], rate=1 / _SCALE + t
    )


def _exponential_side(name: str, sizes: Float[Tensor, "samples"], rate: float) -> Check:
    error = 1 / (rate * math.sqrt(len(sizes)))
    return near_in_standard_errors(name, sizes.mean(), 1 / rate, error)


def _categorical(normal: Normal, samples: int, generator: torch.Generator) -> Iterator[Check]:
    logits = torch.log_softmax(normal(5), -1)
    t = normal(5)
    expected = torch.softmax(t + logits, -1)
    measure = Categorical.create(logits=logits)
    yield close("categorical: ∇A(t) and softmax(t + log π)", measure.mean(t), expected)
    share = measure.sample(t, (samples,), generator=generator).mean(0)
    error = (expected * (1 - expected) / samples).sqrt()
    yield near_in_standard_errors("categorical: shares of the sample", share, expected, error)
