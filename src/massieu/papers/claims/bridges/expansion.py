"""X6, X7: the exact gain of a step, and how fast the Gaussian equilibrium is left."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from numpy.polynomial.hermite_e import HermiteE, hermegauss
from torch import Tensor

from massieu.measures import Atoms, Bernoulli, Gaussian, Laplace, Measure, Poisson, Sphere, Spin, mixture
from massieu.papers.claims.claim import Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import cumulant_growth, expansion, measured_cumulant_growth

_ROUNDING = 1e-12
_STEP = 0.5


@claim(
    "X6",
    title="Expansion for any measure",
    statement="For any measure and any step, A(T(η)) − A(η) = γ‖∇A(η)‖² + B_A(T(η), η), T = id + γ∇A. The gain of a "
    "layer is its first order plus a Bregman divergence, and points part by exactly 2γ(x − y)·(∇A(x) − ∇A(y)).",
    source="S12 (a) to (c), with the remainder as a Bregman divergence",
    status="derived",
)
def exact_gain(draws: int = 200, dimensions: int = 3, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, draws=draws, dimensions=dimensions)
    normal = normal_draws(seed)
    for name, case in _cases(normal, dimensions).items():
        points = case.size * normal(draws, dimensions)
        for step in case.steps:
            result = expansion(case.measure, points, step)
            yield from _equalities(f"{name}, γ = {step:g}", case.measure, points, step, result.gain, result.margin)
            yield at_least(f"{name}, γ = {step:g}: the divergence", result.bregman, -_ROUNDING)
            difference = (result.gain - result.first_order - result.bregman).abs()
            relative = difference / (1 + result.gain.abs())
            yield at_most(f"{name}, γ = {step:g}: gain − γ‖∇A‖² − KL, relative", relative, _ROUNDING)


class _Case(NamedTuple):
    """A measure, with the size of the points and the steps after which A is still finite."""

    measure: Measure
    size: float = 1.0
    steps: tuple[float, ...] = (0.1, 1.0, 20.0)


def _cases(normal: Normal, width: int) -> dict[str, _Case]:
    zeros = torch.zeros(width, dtype=torch.float64)
    parts = [Gaussian.create(zeros + sign, torch.full_like(zeros, 0.2)) for sign in (-1, 1)]
    return {
        "keys": _Case(Atoms.create(normal(9, width), normal(9))),
        "Gaussian": _Case(Gaussian.create(normal(width), normal(width).square())),
        "sphere": _Case(Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=width)),
        "spins": _Case(Spin.create(dim=width)),
        "bits": _Case(Bernoulli.create(torch.sigmoid(normal(width)))),
        "two Gaussians": _Case(mixture(normal(2), parts)),
        "Poisson": _Case(Poisson.create(torch.ones_like(zeros)), size=0.5, steps=(0.1, 1.0)),
        "Laplace": _Case(Laplace.create(0.5 + zeros), size=0.1, steps=(0.1, 0.5)),
    }


def _equalities(
    name: str, measure: Measure, points: Tensor, step: float, gain: Tensor, margin: Tensor
) -> Iterator[Check]:
    """The gain and the margin of `expansion`, computed from A and ∇A alone."""
    mean = measure.mean(points)
    after = points + step * mean
    rise = measure.log_partition(after) - measure.log_partition(points)
    bregman = rise - (mean * (after - points)).sum(-1)
    yield close(f"{name}: gain and γ‖∇A‖² + B_A", gain, step * mean.square().sum(-1) + bregman, _ROUNDING)
    distance_after = _squared_distances(after)
    difference = distance_after - _squared_distances(points) - step**2 * _squared_distances(mean) - margin
    relative = difference.abs() / (1 + distance_after)
    yield at_most(f"{name}: ‖T(x) − T(y)‖² and its three terms, relative", relative, _ROUNDING)


def _squared_distances(points: Tensor) -> Tensor:
    """Of all pairs of points (n, d): shape (n, n)."""
    return (points.unsqueeze(1) - points.unsqueeze(0)).square().sum(-1)


@claim(
    "X7",
    title="The Gaussian equilibrium is unstable",
    statement="Residual attention of a population to itself, followed by full whitening, multiplies a small "
    "whitened cumulant of order n ≥ 3 by 1 + nγb^(n−1)/(1 + γb) > 1, with b = β·(variance per coordinate). The "
    "Gaussian equilibrium is unstable to every perturbation that is not Gaussian.",
    source="S13, its instability",
    status="derived",
    corrected="Even under full whitening, a population moves away from the Gaussian; if something drives it there, "
    "it is another mechanism. What Shim assumes of layer normalisation is S13.",
)
def instability_of_the_equilibrium(seed: int = 0) -> Iterator[Check]:
    for variance, orders in {0.5: (3, 4, 5), 1.0: (3, 4, 5), 1.5: (3, 4)}.items():
        for order in orders:
            name = f"b = {variance}, n = {order}"
            predicted = cumulant_growth(order, _STEP, variance)
            by_hand = 1 + order * _STEP * variance ** (order - 1) / (1 + _STEP * variance)
            yield close(f"{name}: cumulant_growth and its formula", predicted, by_hand)
            measured = measured_cumulant_growth(order, _STEP, variance)
            yield close(f"{name}: growth measured through a layer", measured, predicted, 1e-6)
            # At ε = 0 from the closed form A = t²/2 + log(1 + εtⁿ/n!) of the density φ(1 + εHe_n/n!).
            yield close(f"{name}: growth by Gauss–Hermite", _by_moments(order, variance), predicted)
            yield at_least(f"{name}: growth", measured, 1.0)
    yield from _iterated(seed)


def _by_moments(order: int, variance: float) -> Tensor:
    """d/dε of κ_n of whitened T(z) = (1 + γb)z + γεb^(n−1)z^(n−1)/(n − 1)!, by exact Gauss–Hermite sums."""
    nodes, weights = map(torch.from_numpy, hermegauss(20))
    polynomial = HermiteE.basis(order)
    hermite = torch.from_numpy(polynomial(nodes.numpy()))
    derivative = torch.from_numpy(polynomial.deriv()(nodes.numpy()))
    factorial = torch.arange(1, order + 1, dtype=torch.float64).prod()
    stretch = 1 + _STEP * variance
    # He_n is orthogonal to polynomials of lower degree, so κ_n's derivative is that of E He_n(T/stretch): one part from
    # the density φ(1 + εHe_n/n!), one from the map.
    by_density = (weights * hermite**2).sum() / factorial
    by_map = order / factorial * (weights * derivative * nodes ** (order - 1)).sum()
    return (by_density + _STEP * variance ** (order - 1) / stretch * by_map) / by_density


def _iterated(seed: int) -> Iterator[Check]:
    """A cloud of near-Gaussian quantiles under five layers and whitening: its skewness only grows."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    quantiles = normal.icdf((torch.arange(400, dtype=torch.float64) + 0.5) / 400)
    generator = torch.Generator().manual_seed(seed)
    # A small multiple of He_2(z) = z² − 1 makes the cloud a little skewed.
    coefficient = 0.001 + 0.001 * torch.rand((), dtype=torch.float64, generator=generator)
    cloud = quantiles + coefficient * (quantiles.square() - 1)
    skewness = []
    for _ in range(6):
        cloud = (cloud - cloud.mean()) / cloud.std(correction=0)
        skewness.append((cloud**3).mean())
        points = cloud.unsqueeze(-1)
        cloud = cloud + _STEP * Atoms.create(points).mean(0.5 * points).squeeze(-1)
    ratio = torch.stack(skewness[1:]) / torch.stack(skewness[:-1])
    detail = " → ".join(f"{value:.4f}" for value in skewness)
    yield at_least("400 quantiles, b = ½: ratio of skewness from layer to layer", ratio, 1.0, detail)
