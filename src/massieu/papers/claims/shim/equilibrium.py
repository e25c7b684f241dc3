"""S13: the equilibrium theorem, item by item, and where it ends."""

import math
from collections.abc import Iterator

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from massieu.energy import activations
from massieu.measures import Atoms, Gaussian, Sphere
from massieu.papers.claims.claim import SHIM, Check, as_published, at_least, at_most, close, mean_of_draws
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.papers.theory import (
    after_layer,
    entropy_gain,
    equilibrium,
    harmonic_growth,
    key_law,
    sample_error,
    whitened_map,
)
from massieu.population import Renormalisation, TraceRenormalisation, pairwise_distance

_ROUNDING = 1e-12
_STEPS = (0.0, 0.5, 30.0)
_SIZES = [64, 128, 256, 512, 1024, 2048]


@claim(
    "S13",
    title="Theorem 1: a Gaussian equilibrium",
    statement="N(Σ⁻¹μ, Σ⁻¹) with keys Ση is an equilibrium, point by point, of residual attention followed by the "
    "renormalisation of the whole population to its own mean and covariance. So is every Gaussian with Gaussian "
    "keys, up to a rotation if the covariances do not commute. A renormalisation by one number ends in rank one. "
    "Under LayerNorm the Gaussian is an equilibrium only up to order d^(−1/2), and unstable; the exact equilibrium "
    "is uniform on a sphere, and clusters.",
    source=f"{SHIM}, Theorem 1, stated informally; its formal statement and its limits are derived",
    status="derived",
    published="“Assuming layer normalization should induce an equilibrium distribution of a Gaussian distribution” (§6).",
    standing="assumption",
    corrected="The theorem renormalises by the full mean and covariance. LayerNorm moves N(0, 1) by W₂ = √(3/2 + O(1/d)), "
    "which is √(3/2d) of its size: a good approximation in many dimensions, exact in none.",
)
def gaussian_equilibrium(
    dimensions: int = 4, repetitions: int = 800, layers: int = 60, seed: int = 0
) -> Iterator[Check]:
    # In one dimension all matrices commute.
    check_at_least(2, dimensions=dimensions)
    # With fewer repetitions the interval of the rate is wider than a tenth.
    check_at_least(200, repetitions=repetitions)
    check_at_least(20, layers=layers)
    normal = normal_draws(seed)
    sigma = _covariance(normal, dimensions)
    location = normal(dimensions)
    yield from _items(location, sigma)
    yield from _any_gaussian(normal, location, sigma)
    yield from _finitely_many_keys(normal, repetitions)
    yield from _one_number(layers)
    yield from _layer_norm(normal)
    yield from _each_token(normal, dimensions, layers)
    yield from _harmonics()


def _covariance(normal: Normal, width: int) -> Tensor:
    mixing = normal(width, width)
    return mixing @ mixing.T / width + 0.5 * torch.eye(width, dtype=torch.float64)


def _items(location: Tensor, sigma: Tensor) -> Iterator[Check]:
    """The theorem's items by their numbers, for the population N(Σ⁻¹μ, Σ⁻¹) with keys Ση."""
    identity = torch.eye(len(sigma), dtype=torch.float64)
    precision = torch.linalg.inv(sigma)
    hidden = equilibrium(location, sigma)
    keys = key_law(hidden, sigma)
    yield close("1: mean of the keys and μ", keys.location, location, _ROUNDING)
    yield close("1: covariance of the keys and Σ", keys.covariance, sigma, _ROUNDING)
    renormalise = Renormalisation.create(hidden.location, hidden.covariance)
    particles = hidden.sample(torch.zeros_like(location), (50,), generator=torch.Generator().manual_seed(0))
    # Now the particles' mean and covariance are exactly the law's.
    particles = renormalise(particles)
    for step in _STEPS:
        name = f"γ = {step:g}"
        after = after_layer(hidden, keys, step)
        mean = precision @ location + 2 * step * location
        covariance = precision + 2 * step * identity + step**2 * sigma
        yield close(f"{name}, 2: mean and Σ⁻¹μ + 2γμ", after.location, mean)
        yield close(f"{name}, 2: covariance and Σ⁻¹ + 2γ + γ²Σ", after.covariance, covariance)
        gain = torch.linalg.slogdet(identity + step * sigma).logabsdet
        yield close(f"{name}, 3: entropy gain and log det(1 + γΣ)", entropy_gain(keys, step), gain, _ROUNDING)
        renormalised = renormalise.gaussian(after)
        yield close(f"{name}: mean after RN", renormalised.location, hidden.location, _ROUNDING)
        yield close(f"{name}: covariance after RN", renormalised.covariance, hidden.covariance, _ROUNDING)
        yield close(f"{name}, 4: whitened map and 1", whitened_map(hidden, keys, step), identity, _ROUNDING)
        moved = renormalise(particles + step * keys.mean(particles))
        yield close(f"{name}, 4: particles after RN and before", moved, particles, 1e-11)


def _any_gaussian(normal: Normal, location: Tensor, sigma: Tensor) -> Iterator[Check]:
    """Covariances that do not commute: the law returns to itself, its particles do not."""
    identity = torch.eye(len(sigma), dtype=torch.float64)
    hidden = Gaussian.create(normal(len(sigma)), _covariance(normal, len(sigma)))
    keys = Gaussian.create(location, sigma)
    renormalise = Renormalisation.create(hidden.location, hidden.covariance)
    renormalised = renormalise.gaussian(after_layer(hidden, keys, 0.5))
    yield close("any Gaussian: covariance after RN", renormalised.covariance, hidden.covariance, _ROUNDING)
    rotation = whitened_map(hidden, keys, 0.5)
    yield close("any Gaussian: W Wᵀ and 1, W the whitened map", rotation @ rotation.T, identity, _ROUNDING)
    yield at_least("any Gaussian: largest entry of W − 1", (rotation - identity).abs().max(), 1e6 * _ROUNDING)


def _finitely_many_keys(normal: Normal, repetitions: int) -> Iterator[Check]:
    """Keys that are a sample of N(0, 1): root-mean-square errors at points of ‖η‖² = ½."""
    eta = math.sqrt(0.5) * torch.nn.functional.normalize(normal(4, 2), dim=-1)
    law = Gaussian.create(torch.zeros(2, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    errors_by_size = []
    for size in _SIZES:
        keys = Atoms.create(normal(repetitions, size, 2))
        deviation = keys.mean(eta.expand(repetitions, 4, 2)) - law.mean(eta)
        errors_by_size.append(deviation.square().sum(-1).mean(-1).sqrt())
    errors = torch.stack(errors_by_size)  # (sizes, repetitions)
    yield has_rate("N keys: size of the error of ∇A, in N", rate(_SIZES, errors), -0.5)
    expected = sample_error(law, eta, _SIZES[-1]).square().mean()
    yield mean_of_draws("2048 keys: mean square error and its limit", errors[-1].square(), expected)


def _one_number(layers: int) -> Iterator[Check]:
    """C ← c(1 + γC)C(1 + γC) with tr C held: from diag(1.2, 1, .8) to diag(3, 0, 0)."""
    zero = torch.zeros(3, dtype=torch.float64)
    start = torch.tensor([1.2, 1.0, 0.8], dtype=torch.float64)
    law = Gaussian.create(zero, torch.diag(start))
    eigenvalues = start
    renormalise = TraceRenormalisation.create(3.0)
    for _ in range(layers):
        law = renormalise.gaussian(after_layer(law, law, 0.5))
        grown = eigenvalues * (1 + 0.5 * eigenvalues).square()
        eigenvalues = 3 * grown / grown.sum()
    yield close("trace held: covariance and its recursion", law.covariance.diagonal(), eigenvalues, _ROUNDING)
    rank_one = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    yield close(f"trace held, {layers} layers: covariance and diag(3, 0, 0)", law.covariance.diagonal(), rank_one, 1e-8)
    projector = Gaussian.create(zero, torch.diag(1.5 * (start >= 1).double()))
    after = renormalise.gaussian(after_layer(projector, projector, 0.5))
    yield close("trace held: a multiple of a projector stays", after.covariance, projector.covariance, _ROUNDING)


def _layer_norm(normal: Normal) -> Iterator[Check]:
    """N(0, 1) in d dimensions under LayerNorm∘T, keys its own law: Wasserstein's distance between before and after.

    T stretches every point by 1 + γ, and LayerNorm takes x to √d Px/‖Px‖, P the projection on vectors of mean 0. That is
    the gradient of the convex √d‖Px‖, so no other coupling moves less (Brenier): W₂² = 2d − 2√d E χ_{d−1} = 3/2 + O(1/d).
    """
    draws = 2000
    for width in (4, 64, 768):
        norm = activations.LayerNorm.create(eps=0.0)
        law = Gaussian.create(torch.zeros(width, dtype=torch.float64), torch.ones((), dtype=torch.float64))
        points = normal(draws, width)
        squared_distance = (norm(points + 0.5 * law.mean(points)) - points).square().sum(-1)
        half = torch.tensor(width / 2, dtype=torch.float64)
        mean_of_chi = math.sqrt(2) * (torch.lgamma(half) - torch.lgamma(half - 0.5)).exp()
        expected = 2 * width - 2 * math.sqrt(width) * mean_of_chi
        name = f"N(0, 1) under LayerNorm∘T, d = {width}"
        yield mean_of_draws(f"{name}: W₂² and its closed form", squared_distance, expected)
        yield close(f"{name}: W₂² and 3/2 up to 1/d", expected, 1.5, 1 / width)
        # The size of N(0, 1) is √d.
        relative_distance = (expected / width).sqrt()
        detail = f"{relative_distance.item():.3f} of its size"
        yield at_most(f"{name}: W₂ by √(2/d) of its size", relative_distance / math.sqrt(2 / width), 1.0, detail)
        yield as_published(at_most(f"{name}: W₂ by its size, of an exact equilibrium", relative_distance, _ROUNDING))


def _each_token(normal: Normal, width: int, layers: int) -> Iterator[Check]:
    """RMSNorm keeps the uniform law on the sphere, and gathers finitely many points in clusters."""
    norm = activations.RMSNorm.create(eps=0.0)
    keys = Sphere.create(torch.tensor(math.sqrt(width), dtype=torch.float64), dim=width)
    points = norm(normal(50, width))
    for step in (0.5, 30.0):
        for beta in (0.2, 3.0):
            after = norm(points + step * keys.mean(beta * points))
            name = f"uniform on the sphere, β = {beta}, γ = {step:g}: points after RMSNorm∘T"
            yield close(name, after, points, _ROUNDING)
    cloud = torch.nn.functional.normalize(normal(32, 3), dim=-1)
    distance_at_start = pairwise_distance(cloud)
    for _ in range(3 * layers):
        cloud = torch.nn.functional.normalize(cloud + Atoms.create(cloud).mean(2.0 * cloud), dim=-1)
    ratio = pairwise_distance(cloud) / distance_at_start
    yield at_most(f"32 uniform points, {3 * layers} layers: pairwise distance by its start", ratio, 0.05)


def _harmonics() -> Iterator[Check]:
    """A layer multiplies the harmonic P_n of a nearly uniform density on the sphere in R³."""
    for degree in (1, 2, 3):
        for beta in (0.5, 4.0):
            growth = _measured_growth(degree, beta)
            expected = harmonic_growth(degree, 0.5, beta, 3)
            # Odd orders of ε alone are left, and sums are rounded at 1e-16/ε.
            yield close(f"sphere, β = {beta}: growth of the harmonic of degree {degree}", growth, expected, 1e-8)
            yield at_least(f"sphere, β = {beta}: it exceeds 1", growth, 1 + 1e-3)


def _measured_growth(degree: int, beta: float) -> Tensor:
    """Growth of the mean of P_n over the densities 1 ± εP_n, by quadrature over heights and angles."""
    epsilon = 1e-5
    heights, weights = map(torch.from_numpy, leggauss(24))
    angle = 2 * math.pi * torch.arange(48, dtype=torch.float64) / 48
    radius = (1 - heights.square()).sqrt()
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    grid = torch.cat([radius[:, None, None] * circle, heights[:, None, None].expand(24, 48, 1)], -1)
    # The density does not depend on the angle: one particle stands for all of its height.
    meridian = grid[:, 0]
    harmonic = torch.special.legendre_polynomial_p(heights, degree)
    before = []
    after = []
    for sign in (1, -1):
        density = weights * (1 + sign * epsilon * harmonic)
        keys = Atoms.create(grid.flatten(0, 1), density.log()[:, None].expand(24, 48).flatten())
        moved = torch.nn.functional.normalize(meridian + 0.5 * keys.mean(beta * meridian), dim=-1)
        moved_harmonic = torch.special.legendre_polynomial_p(moved[:, 2], degree)
        share = density / density.sum()
        before.append((share * harmonic).sum())
        after.append((share * moved_harmonic).sum())
    return (after[0] - after[1]) / (before[0] - before[1])
