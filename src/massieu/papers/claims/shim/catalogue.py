"""The measures of S2, each with weighted points: its atoms, or a quadrature's nodes with its density there."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    Constant,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Measure,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    mixture,
)
from massieu.papers.claims.inputs import Normal
from massieu.papers.claims.oracles import quadrature, spin_states

_TAIL = 45.0
"""Exponent beyond which tails are cut off: e^−45 < 1e-19."""

_LEAST_SLACK = 0.25
"""Least distance of the drawn parameters from the end of a domain, as a share of its length."""


@dataclass(frozen=True)
class Member:
    """A measure of the library, parameters in its domain, and h written out.

    Attributes:
        name: Of the measure.
        measure: The measure.
        eta: Parameters inside the domain, shape (draws, d).
        points: Points x of the support, shape (nodes, d).
        log_density: log h at the points, as probability or density, shape (nodes,).
        log_volume: Log of the volume for which a point stands: 0 for an atom, else the quadrature's log-weight.
    """

    name: str
    measure: Measure
    eta: Float[Tensor, "draws d"]
    points: Float[Tensor, "nodes d"]
    log_density: Float[Tensor, "nodes"]
    log_volume: Float[Tensor, "nodes"] | float = 0.0

    def log_partition(self, eta: Float[Tensor, "draws d"]) -> Float[Tensor, "draws"]:
        """log ∫ e^{x·η} h(dx), by summation."""
        return self._exponents(eta).logsumexp(-1)

    def log_share(self, eta: Float[Tensor, "draws d"]) -> Float[Tensor, "draws nodes"]:
        """The log-probabilities of the points under p_η."""
        return self._exponents(eta).log_softmax(-1)

    def mean(self, eta: Float[Tensor, "draws d"]) -> Float[Tensor, "draws d"]:
        """The mean of p_η, by summation."""
        return self.log_share(eta).exp() @ self.points

    def covariance(self, eta: Float[Tensor, "draws d"]) -> Float[Tensor, "draws d d"]:
        """The covariance of p_η, by summation."""
        deviation = self.points - self.mean(eta).unsqueeze(-2)
        return (self.log_share(eta).exp().unsqueeze(-1) * deviation).mT @ deviation

    def least_curvature(self, start: Float[Tensor, "draws d"], end: Float[Tensor, "draws d"]) -> Float[Tensor, "draws"]:
        """A lower bound, for N atoms, of δᵀ∇²A δ on the whole way from `start` to `end`, with δ their difference.

        Var_p(y) = ½ΣΣ pᵢpⱼ(yᵢ − yⱼ)² ≥ (N min p)² Var_uniform(y), and log pᵢ is concave in η: least at an end.
        """
        least_at_start = self.log_share(start).amin(-1)
        least_at_end = self.log_share(end).amin(-1)
        least_probability = torch.minimum(least_at_start, least_at_end).exp()
        uniform_variance = ((end - start) @ self.points.T).var(-1, correction=0)
        return (len(self.points) * least_probability).square() * uniform_variance

    def _exponents(self, eta: Tensor) -> Tensor:
        return eta @ self.points.T + self.log_density + self.log_volume


def library(normal: Normal, draws: int) -> list[Member]:
    """Every measure of S2, with random parameters."""
    makers = (
        _atoms,
        _constant,
        _gaussian,
        _mixture,
        _circle,
        _sphere,
        _uniform,
        _bernoulli,
        _spin,
        _poisson,
        _exponential,
        _laplace,
        _gamma,
        _categorical,
    )
    return [make(normal, draws) for make in makers]


def _positive(normal: Normal, count: int) -> Tensor:
    """Between ¾ and 4/3, so that the ends of domains are as far from the parameters as the differences' step needs."""
    return torch.exp(0.3 * torch.tanh(normal(count)))


def _atoms(normal: Normal, draws: int) -> Member:
    points = normal(12, 3)
    log_weight = normal(12)
    return Member("atoms", Atoms.create(points, log_weight), normal(draws, 3), points, log_weight)


def _constant(normal: Normal, draws: int) -> Member:
    value = normal(3)
    return Member("point mass", Constant.create(value), normal(draws, 3), value[None], torch.zeros(1).double())


def _gaussian(normal: Normal, draws: int) -> Member:
    location = normal(2)
    root = torch.diag(_positive(normal, 2))
    root[1, 0] = 0.5 * normal(1)
    # Whitened, the trapezoid rule of step ½ has an error of e^(−2π²/0.25); the ends leave room for the tilt.
    line = torch.arange(-20.0, 20.0, 0.5, dtype=torch.float64)
    whitened = torch.cartesian_prod(line, line)
    log_determinant = root.det().abs().log()
    log_density = -0.5 * whitened.square().sum(-1) - math.log(2 * math.pi) - log_determinant
    log_volume = log_determinant + 2 * math.log(0.5)
    measure = Gaussian.create(location, root @ root.T)
    points = location + whitened @ root.T
    return Member("Gaussian", measure, normal(draws, 2), points, log_density, log_volume)


def _mixture(normal: Normal, draws: int) -> Member:
    log_weight = torch.log_softmax(normal(3), -1)
    location = normal(3)
    deviation = _positive(normal, 3)
    measure = mixture(log_weight, Gaussian.create(location[:, None], deviation.square()[:, None]))
    points, log_volume = quadrature(-60.0, 60.0)
    whitened = (points[:, None] - location) / deviation  # (nodes, components)
    log_parts = log_weight - 0.5 * whitened.square() - 0.5 * math.log(2 * math.pi) - deviation.log()
    log_density = log_parts.logsumexp(-1)
    return Member("Gaussian mixture", measure, normal(draws, 1), points[:, None], log_density, log_volume)


def _circle(normal: Normal, draws: int) -> Member:
    radius = _positive(normal, 1)[0]
    # The trapezoid rule of n points integrates the first n − 1 harmonics without error.
    angle = torch.arange(100, dtype=torch.float64) * (2 * math.pi / 100)
    points = radius * torch.stack([angle.cos(), angle.sin()], -1)
    log_density = -torch.log(2 * math.pi * radius).expand(100)
    log_volume = (radius * 2 * math.pi / 100).log()
    return Member("circle", Sphere.create(radius, dim=2), normal(draws, 2), points, log_density, log_volume)


def _sphere(normal: Normal, draws: int) -> Member:
    radius = _positive(normal, 1)[0]
    height, log_height = quadrature(-1.0, 1.0, panels=4)
    angle = torch.arange(60, dtype=torch.float64) * (2 * math.pi / 60)
    ring_radius = (1 - height.square()).sqrt()[:, None]
    x = ring_radius * angle.cos()
    y = ring_radius * angle.sin()
    z = height[:, None].expand(-1, 60)
    points = radius * torch.stack([x, y, z], -1).reshape(-1, 3)
    # Archimedes: the surface between two heights is proportional to their difference.
    log_volume = (log_height + (radius.square() * 2 * math.pi / 60).log()).repeat_interleave(60)
    log_density = -torch.log(4 * math.pi * radius.square()).expand(len(points))
    return Member("sphere", Sphere.create(radius, dim=3), normal(draws, 3), points, log_density, log_volume)


def _uniform(normal: Normal, draws: int) -> Member:
    low = normal(1)
    width = _positive(normal, 1)
    points, log_volume = quadrature(low.item(), (low + width).item(), panels=10)
    log_density = -width.log().expand(len(points))
    measure = Uniform.create(low, low + width)
    return Member("uniform", measure, 3 * normal(draws, 1), points[:, None], log_density, log_volume)


def _bernoulli(normal: Normal, draws: int) -> Member:
    probability = torch.sigmoid(normal(3))
    bits = (1 + spin_states(3)) / 2
    log_density = torch.where(bits == 1, probability, 1 - probability).log().sum(-1)
    return Member("Bernoulli", Bernoulli.create(probability), 2 * normal(draws, 3), bits, log_density)


def _spin(normal: Normal, draws: int) -> Member:
    measure = Spin.create(torch.zeros(3).double())
    log_density = torch.full((8,), -3 * math.log(2), dtype=torch.float64)
    return Member("Rademacher", measure, normal(draws, 3), spin_states(3), log_density)


def _poisson(normal: Normal, draws: int) -> Member:
    rate = _positive(normal, 1)
    # Means stay below rate·e² < 40.
    eta = 2 * torch.tanh(normal(draws, 1))
    count = torch.arange(300, dtype=torch.float64)
    log_density = count * rate.log() - rate - torch.lgamma(count + 1)
    return Member("Poisson", Poisson.create(rate), eta, count[:, None], log_density)


def _slack(normal: Normal, draws: int) -> Tensor:
    """Distances from the end of a domain of length 1."""
    return _LEAST_SLACK + normal(draws, 1).abs()


def _exponential(normal: Normal, draws: int) -> Member:
    rate = _positive(normal, 1)
    points, log_volume = quadrature(0.0, (_TAIL / (_LEAST_SLACK * rate)).item())
    log_density = rate.log() - rate * points
    eta = rate * (1 - _slack(normal, draws))
    return Member("exponential", Exponential.create(rate), eta, points[:, None], log_density, log_volume)


def _laplace(normal: Normal, draws: int) -> Member:
    scale = _positive(normal, 1)
    end = (_TAIL / _LEAST_SLACK * scale).item()
    points, log_volume = quadrature(-end, end, panels=400)
    log_density = -points.abs() / scale - (2 * scale).log()
    eta = (1 - _LEAST_SLACK) * torch.tanh(normal(draws, 1)) / scale
    return Member("Laplace", Laplace.create(scale), eta, points[:, None], log_density, log_volume)


def _gamma(normal: Normal, draws: int) -> Member:
    shape = 0.8 + normal(1).abs()
    scale = _positive(normal, 1)
    # In log x the integrand is smooth; it falls like x^shape to the left.
    logarithm, log_step = quadrature(-_TAIL / 0.8, math.log(8 * _TAIL / _LEAST_SLACK))
    points = scale * logarithm.exp()
    log_density = (shape - 1) * points.log() - points / scale - torch.lgamma(shape) - shape * scale.log()
    log_volume = log_step + points.log()  # dx = x d(log x)
    eta = (1 - _slack(normal, draws)) / scale
    return Member("gamma", Gamma.create(shape, scale), eta, points[:, None], log_density, log_volume)


def _categorical(normal: Normal, draws: int) -> Member:
    probability = torch.softmax(normal(5), -1)
    points = torch.eye(5, dtype=torch.float64)
    return Member("categorical", Categorical.create(probability), normal(draws, 5), points, probability.log())
