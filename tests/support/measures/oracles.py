"""Log-partition, KL divergence and log-density by enumeration and quadrature in NumPy; densities from SciPy.

Nothing here calls the package. Every oracle takes eta (*batch, query, d) and points (sample, *batch, query, d).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy import stats
from scipy.special import gammaln, ive, logsumexp
from torch import Tensor


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


class Oracle(Protocol):
    def log_partition(self, eta: Tensor) -> Tensor: ...
    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor: ...
    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Enumerated:
    """A measure given by all its points and log-weights, batch by batch."""

    points: np.ndarray  # (*batch, N, d)
    log_weight: np.ndarray  # (*batch, N)

    def scores(self, eta: Tensor) -> np.ndarray:
        return np.einsum("...qd,...nd->...qn", numpy(eta), self.points) + self.log_weight[..., None, :]

    def log_partition(self, eta: Tensor) -> Tensor:
        return torch.from_numpy(logsumexp(self.scores(eta), -1))

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        p, q = self.scores(eta_p), self.scores(eta_q)
        log_p, log_q = (s - logsumexp(s, -1, keepdims=True) for s in (p, q))
        gap = np.subtract(log_p, log_q, out=np.zeros_like(p), where=np.isfinite(log_p))
        return torch.from_numpy((np.exp(log_p) * gap).sum(-1))

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        scores = self.scores(eta)
        log_p = scores - logsumexp(scores, -1, keepdims=True)
        hit = np.abs(numpy(point)[..., None, :] - self.points[..., None, :, :]).max(-1) < 1e-9
        return torch.from_numpy(logsumexp(np.where(hit, log_p, -np.inf), -1))

    def pushed(self, weight: np.ndarray, bias: np.ndarray) -> "Enumerated":
        return Enumerated(self.points @ np.swapaxes(weight, -1, -2) + bias, self.log_weight)

    def tilted(self, eta: np.ndarray) -> "Enumerated":
        """One batch member: the tilt adds its scores to the log-weights and normalises."""
        score = self.points @ eta + self.log_weight
        return Enumerated(self.points, score - logsumexp(score))


def joined(*parts: Enumerated) -> Enumerated:
    """The sum of measures without batch."""
    return Enumerated(np.concatenate([p.points for p in parts], -2), np.concatenate([p.log_weight for p in parts], -1))


def product_of_values(values: Sequence[float], log_weight: np.ndarray) -> Enumerated:
    """Independent coordinates (*batch, d) on the same few values, with log-weights (*batch, d, value)."""
    dim, count = log_weight.shape[-2:]
    chosen = np.stack(np.meshgrid(*[np.arange(count)] * dim, indexing="ij"), -1).reshape(-1, dim)
    weights = log_weight[..., np.arange(dim), chosen].sum(-1)
    points = np.asarray(values)[chosen]
    return Enumerated(np.broadcast_to(points, (*log_weight.shape[:-2], *points.shape)), weights)


@dataclass(frozen=True)
class Normal:
    """N(location, covariance)."""

    location: np.ndarray
    covariance: np.ndarray

    def log_partition(self, eta: Tensor) -> Tensor:
        point = numpy(eta)
        quadratic = np.einsum("...qi,...ij,...qj->...q", point, self.covariance, point)
        return torch.from_numpy(np.einsum("...qi,...i->...q", point, self.location) + quadratic / 2)

    def tilted(self, eta: Tensor) -> torch.distributions.MultivariateNormal:
        covariance = torch.from_numpy(self.covariance).unsqueeze(-3)
        mean = torch.from_numpy(self.location).unsqueeze(-2) + (covariance @ eta.unsqueeze(-1)).squeeze(-1)
        return torch.distributions.MultivariateNormal(mean, covariance)

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """Between the two normal densities, by torch's general formula."""
        return torch.distributions.kl_divergence(self.tilted(eta_p), self.tilted(eta_q))

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return self.tilted(eta).log_prob(point)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_PANELS = 60


def gauss(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and log-weights of 60 panels of 24 points between bounds of any shape, last."""
    low, high = np.broadcast_arrays(np.asarray(low, float), np.asarray(high, float))
    step = ((high - low) / _PANELS)[..., None]
    starts = low[..., None] + step * np.arange(_PANELS)
    nodes = starts[..., None] + step[..., None] * (0.5 * (_NODES + 1))
    weights = np.broadcast_to(0.5 * step[..., None] * _WEIGHTS, nodes.shape)
    flat = (*low.shape, -1)
    return nodes.reshape(flat), np.log(np.maximum(weights, 1e-300)).reshape(flat)


@dataclass(frozen=True)
class Line:
    """Independent coordinates, each with log-density `log_density(x, *parameters)` with respect to dx or counting.

    `pieces(eta, *parameters)` are intervals that carry all but 1e-15 of exp(x·eta) h(dx); `substitution` integrates over
    t = log(x − low) instead, for a density that diverges at the bound `low`. Parameters have shape (*batch, d).
    """

    log_density: Callable[..., np.ndarray]
    parameters: tuple[np.ndarray, ...]
    pieces: Callable[..., list[tuple[np.ndarray, np.ndarray]]] | None = None
    values: np.ndarray | None = None
    logarithmic: bool = False

    @property
    def spread(self) -> list[np.ndarray]:
        """Parameters with a dimension for the queries."""
        return [parameter[..., None, :] for parameter in self.parameters]

    def nodes(self, eta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Points (*batch, query, d, node), and x·eta + log h + log-weight there."""
        if self.values is not None:
            x, weight = np.broadcast_to(self.values, (*eta.shape, len(self.values))), 0.0
        else:
            assert self.pieces is not None
            parts = [gauss(low, high) for low, high in self.pieces(eta, *self.spread)]
            x, weight = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
        if self.logarithmic:
            weight, x = weight + x, np.exp(x)
        density = self.log_density(x, *[parameter[..., None] for parameter in self.spread])
        return x, x * eta[..., None] + density + weight

    def log_partition(self, eta: Tensor) -> Tensor:
        return torch.from_numpy(logsumexp(self.nodes(numpy(eta))[1], -1).sum(-1))

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """E_p[x·(p − q)] − A(p) + A(q), by the quadrature of p."""
        p, q = numpy(eta_p), numpy(eta_q)
        x, terms = self.nodes(p)
        mean = (np.exp(terms - logsumexp(terms, -1, keepdims=True)) * x).sum(-1)
        slope = torch.from_numpy(((p - q) * mean).sum(-1))
        return slope - self.log_partition(eta_p) + self.log_partition(eta_q)

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        x = numpy(point)
        density = (x * numpy(eta) + self.log_density(x, *self.spread)).sum(-1)
        return torch.from_numpy(density) - self.log_partition(eta)


@dataclass(frozen=True)
class UniformSphere:
    """The uniform law on a sphere: SciPy's scaled Bessel function, and its series near 0, where that cancels."""

    dim: int
    radius: np.ndarray

    def log_partition(self, eta: Tensor) -> Tensor:
        kappa, order = self.radius[..., None] * np.linalg.norm(numpy(eta), axis=-1), self.dim / 2 - 1
        large = np.maximum(kappa, 0.1)
        value = gammaln(order + 1) + order * np.log(2 / large) + np.log(ive(order, large)) + large
        square = kappa**2 / 4
        terms = [np.ones_like(square)]
        for n in range(1, 12):
            terms.append(terms[-1] * square / (n * (order + n)))
        return torch.from_numpy(np.where(kappa < 0.1, np.log1p(sum(terms[1:])), value))

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """The mean by quadrature over the angle between x and eta, of density exp(κ cos θ) sin^{d−2} θ."""
        p, size = numpy(eta_p), np.linalg.norm(numpy(eta_p), axis=-1)
        kappa = self.radius[..., None] * size
        angle, weight = gauss(np.zeros_like(kappa), np.full_like(kappa, np.pi))
        terms = kappa[..., None] * np.cos(angle) + (self.dim - 2) * np.log(np.sin(angle)) + weight
        cosine = (np.exp(terms - logsumexp(terms, -1, keepdims=True)) * np.cos(angle)).sum(-1)
        length = np.where(size > 0, self.radius[..., None] * cosine / np.where(size > 0, size, 1), 0.0)
        slope = length * (p * (p - numpy(eta_q))).sum(-1)
        return torch.from_numpy(slope) - self.log_partition(eta_p) + self.log_partition(eta_q)

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        area = np.log(2) + self.dim / 2 * np.log(np.pi) - gammaln(self.dim / 2) + (self.dim - 1) * np.log(self.radius)
        scores = torch.from_numpy((numpy(point) * numpy(eta)).sum(-1) - area[..., None])
        return scores - self.log_partition(eta)


@dataclass(frozen=True)
class Joint:
    """Independent parts side by side: (how many coordinates, their oracle)."""

    parts: Sequence[tuple[int, Oracle]]

    def each(self, name: str, *tensors: Tensor) -> Tensor:
        pieces = [tensor.split([size for size, _ in self.parts], -1) for tensor in tensors]
        values = [getattr(oracle, name)(*args) for (_, oracle), *args in zip(self.parts, *pieces, strict=True)]
        return torch.stack(values).sum(0)

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.each("log_partition", eta)

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        return self.each("kl", eta_p, eta_q)

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return self.each("log_prob", eta, point)


@dataclass(frozen=True)
class AtomsAndDensity:
    """The sum of atoms and a density on the line: an atom has its mass, any other point its density."""

    atoms: Enumerated
    density: Line

    def shares(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        atoms, density = self.atoms.log_partition(eta), self.density.log_partition(eta)
        total = torch.logaddexp(atoms, density)
        return total, atoms - total, density - total

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.shares(eta)[0]

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """The divergence of the shares, and that within each part."""
        _, *p = self.shares(eta_p)
        _, *q = self.shares(eta_q)
        parts = (self.atoms.kl(eta_p, eta_q), self.density.kl(eta_p, eta_q))
        return sum((a.exp() * (a - b + part) for a, b, part in zip(p, q, parts, strict=True)), torch.zeros_like(p[0]))

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        _, discrete, continuous = self.shares(eta)
        mass = self.atoms.log_prob(eta, point) + discrete
        return torch.where(mass > -torch.inf, mass, self.density.log_prob(eta, point) + continuous)


@dataclass(frozen=True)
class Image:
    """The image x ↦ weight x + bias of an oracle under an invertible matrix, in one batch."""

    source: Oracle
    weight: Tensor
    bias: Tensor

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.source.log_partition(eta @ self.weight) + eta @ self.bias

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        return self.source.kl(eta_p @ self.weight, eta_q @ self.weight)

    def log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        volume = torch.linalg.slogdet(self.weight).logabsdet
        return self.source.log_prob(eta @ self.weight, (point - self.bias) @ torch.linalg.inv(self.weight).mT) - volume


TAIL = 45.0
"""e^−45 = 3e-20 of the mass is left out on either side."""

# Pieces that carry the mass of exp(x·eta) h(dx), from how fast that decays.


def above_zero(decay):
    return [(np.zeros_like(decay), TAIL / decay)]


def about_zero(left, right):
    return [(-TAIL / left, np.zeros_like(left)), (np.zeros_like(right), TAIL / right)]


def in_box(eta, low, high):
    reach = np.minimum(high - low, TAIL / np.maximum(np.abs(eta), 1e-9))
    return [(np.where(eta > 0, high - reach, low), np.where(eta > 0, high, low + reach))]


def gamma_pieces(decay, shape):
    """In t = log x: e^{shape·t} to the left, e^{−decay·eᵗ} to the right."""
    centre = np.log(shape / decay)
    return [(centre - TAIL / shape - 2, centre), (centre, np.log((TAIL + 4 * shape) / decay) + 1)]


def exponential(rate: Tensor) -> Line:
    return Line(lambda x, r: stats.expon.logpdf(x, scale=1 / r), (numpy(rate),), lambda eta, r: above_zero(r - eta))


def laplace(scale: Tensor) -> Line:
    pieces = lambda eta, s: about_zero(1 / s + eta, 1 / s - eta)  # noqa: E731
    return Line(lambda x, s: stats.laplace.logpdf(x, scale=s), (numpy(scale),), pieces)


def uniform(low: Tensor, high: Tensor) -> Line:
    return Line(lambda x, a, b: -np.log(b - a) + 0 * x, (numpy(low), numpy(high)), in_box)


def normal(location: Tensor, variance: Tensor, mass: float = 1.0) -> Line:
    def pieces(eta, m, v):
        return [(m + v * eta - 12 * np.sqrt(v), m + v * eta + 12 * np.sqrt(v))]

    def density(x, m, v):
        return stats.norm.logpdf(x, m, np.sqrt(v)) + np.log(mass)

    return Line(density, (numpy(location), numpy(variance)), pieces)


def mixed_normals(points: Tensor, log_weight: Tensor, variance: float) -> Line:
    """Σ w_n N(x_n, variance) on the line, as one density."""
    x_n, w_n, spread = numpy(points), numpy(log_weight), np.sqrt(variance)

    def density(x, _):
        return logsumexp(stats.norm.logpdf(x[..., None], x_n, spread) + w_n, -1)

    def pieces(eta, _):
        return [(x_n.min() + variance * eta - 12 * spread, x_n.max() + variance * eta + 12 * spread)]

    return Line(density, (np.zeros(1),), pieces)
