"""S7: KL divergence as Bregman divergence."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Measure,
    Poisson,
    Spin,
)
from massieu.measures.sphere import Sphere
from massieu.measures.uniform import Uniform
from massieu.verification.claim import CLOSED_FORM, QUADRATURE, SHIM, Check, as_published, close
from massieu.verification.oracles import quadrature, spin_states
from massieu.verification.registry import claim


@claim(
    "S7",
    statement="KL is the Bregman divergence with its arguments swapped: B_A(η₁, η₂) = KL(p_{η₂} ‖ p_{η₁}) "
    "and B_{A*}(ū₁, ū₂) = KL(p_{η₁} ‖ p_{η₂}).",
    source=f"{SHIM}, §3.2, text before eq. (6)",
    status="quoted",
    published="B_G(η₁, η₂) = KL(p(x|η₁) ‖ p(x|η₂)).",
    corrected="The arguments of the KL divergence change places.",
)
def bregman_is_kl(atoms: int = 12, dimensions: int = 4, draws: int = 100, seed: int = 0) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    keys, log_weight = normal(atoms, dimensions), normal(atoms)
    weighted = _Family("atoms", Atoms.create(keys, log_weight), keys, log_weight, -2.0, 2.0, CLOSED_FORM)
    for family in (weighted, *_families()):
        uniform = torch.rand(3, draws, family.points.shape[-1], dtype=torch.float64, generator=generator)
        first, second, third = family.low + (family.high - family.low) * uniform
        measure, name = family.measure, family.name
        bregman, forward = _bregman(measure, first, second), family.kl(first, second)
        yield close(f"{name}: B_A(η₁, η₂) and KL(p₂ ‖ p₁)", bregman, family.kl(second, first), family.tolerance)
        yield close(f"{name}: B_A*(ū₁, ū₂) and KL(p₁ ‖ p₂)", _dual(measure, first, second), forward, family.tolerance)
        if family is weighted:
            yield as_published(close(f"{name}: B_A(η₁, η₂) and KL(p₁ ‖ p₂)", bregman, forward))
            slope = measure.mean(third) - measure.mean(second)
            parts = bregman + _bregman(measure, second, third) - (slope * (first - second)).sum(-1)
            yield close(
                f"{name}: B(a, c) and B(a, b) + B(b, c) − (∇A(c) − ∇A(b))·(a − b)",
                _bregman(measure, first, third),
                parts,
            )

    # A Gaussian has no masses to sum: KL between Gaussians of one covariance, from the textbook.
    location, factor, first, second = normal(dimensions), normal(dimensions, dimensions), *normal(2, draws, dimensions)
    covariance = torch.eye(dimensions).double() + factor @ factor.T / dimensions
    gap = (first - second) @ covariance  # of the means
    expected = (gap * torch.linalg.solve(covariance, gap.T).T).sum(-1) / 2
    gaussian = Gaussian.create(location, covariance)
    yield close("Gaussian: B_A(η₁, η₂) and KL(p₂ ‖ p₁)", _bregman(gaussian, first, second), expected)


class _Family(NamedTuple):
    """A measure beside its masses on points: its atoms, or the nodes of a quadrature of its density."""

    name: str
    measure: Measure
    points: Float[Tensor, "nodes d"]
    log_weight: Float[Tensor, "nodes"]
    low: float
    high: float
    tolerance: float

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """Σ p log(p/q), from the masses alone."""
        log_p, log_q = (torch.log_softmax(eta @ self.points.T + self.log_weight, -1) for eta in (eta_p, eta_q))
        return (log_p.exp() * (log_p - log_q)).sum(-1)


def _families() -> Iterator[_Family]:
    def number(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    two = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    yield _Family("spin", Spin.create(number(0.0)), spin_states(1), torch.zeros(2).double(), -3.0, 3.0, CLOSED_FORM)
    odds = torch.tensor([0.7, 0.3], dtype=torch.float64)
    yield _Family("Bernoulli", Bernoulli.create(number(0.3)), two, odds.log(), -3.0, 3.0, CLOSED_FORM)
    share = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    yield _Family("categorical", Categorical.create(share), torch.eye(4).double(), share.log(), -3.0, 3.0, CLOSED_FORM)
    counts = torch.arange(100, dtype=torch.float64)
    log_mass = counts * math.log(1.5) - torch.lgamma(counts + 1)
    yield _Family("Poisson", Poisson.create(number(1.5)), counts[:, None], log_mass, -2.0, 1.5, CLOSED_FORM)

    def nodes(low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
        points, log_weight = quadrature(low, high)
        return points, points[:, None], log_weight

    x, points, weight = nodes(0.0, 60.0)
    yield _Family("exponential", Exponential.create(number(2.0)), points, weight - 2 * x, -2.0, 1.0, QUADRATURE)
    log_density = weight + 2 * x.log() - 2 * x
    yield _Family("gamma", Gamma.create(number(3.0), number(0.5)), points, log_density, -2.0, 1.0, QUADRATURE)
    x, points, weight = nodes(-50.0, 50.0)
    yield _Family("Laplace", Laplace.create(number(0.5)), points, weight - 2 * x.abs(), -1.0, 1.0, QUADRATURE)
    x, points, weight = nodes(-1.0, 2.0)
    yield _Family("uniform", Uniform.create(number(-1.0), number(2.0)), points, weight, -5.0, 5.0, QUADRATURE)
    points, weight = _sphere(2.0)
    yield _Family("sphere", Sphere.create(3, 2.0), points, weight, -2.0, 2.0, QUADRATURE)


def _sphere(radius: float) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights on the sphere in R³: Gauss–Legendre in height, equal steps around."""
    height, weight = (torch.from_numpy(part) for part in leggauss(40))
    angle = torch.arange(80, dtype=torch.float64) * (2 * math.pi / 80)
    across = (1 - height**2).sqrt()[:, None]
    points = torch.stack([across * angle.cos(), across * angle.sin(), height[:, None].expand(-1, 80)], -1)
    return radius * points.reshape(-1, 3), weight.log().repeat_interleave(80)


def _bregman(measure: Measure, first: Tensor, second: Tensor) -> Tensor:
    """A(η₁) − A(η₂) − ∇A(η₂)·(η₁ − η₂)."""
    slope = (measure.mean(second) * (first - second)).sum(-1)
    return measure.log_partition(first) - measure.log_partition(second) - slope


def _dual(measure: Measure, first: Tensor, second: Tensor) -> Tensor:
    """A*(ū₁) − A*(ū₂) − η₂·(ū₁ − ū₂), A* minus the entropy."""
    slope = (second * (measure.mean(first) - measure.mean(second))).sum(-1)
    return measure.entropy(second) - measure.entropy(first) - slope
