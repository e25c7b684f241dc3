"""What a site of a spin model is: its states, its law under a quadratic tilt (B13), and block matrices over sites.

A measure's log-partition knows linear tilts alone. Where there are finitely many states a quadratic one,
e^{field·S + ½ SᵀVS} ρ(dS), is a sum over them; a Gaussian stays Gaussian; on the circle and on the sphere in three
dimensions it is a sum over the nodes of a rule that is exact to rounding for all but the sharpest laws.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from massieu.foundation import matrices
from massieu.foundation.values import Value
from massieu.measures import Atoms, Bernoulli, Categorical, Constant, Gaussian, Measure, Sphere, Spin
from massieu.measures.combine import Tilted

MOST = 1 << 20
"""So many states at most are gone through."""
_BLOCK = 1 << 14


def count(measure: Measure) -> int | None:
    """How many states there are; None for infinitely many, or where it is not known."""
    size = measure.event_shape[0]
    if isinstance(measure, Spin | Bernoulli):
        return 2**size
    if isinstance(measure, Categorical):
        return size
    return 1 if isinstance(measure, Constant) else None


def blocks(measure: Measure, like: Tensor) -> Iterator[Float[Tensor, "block d"]]:
    """All states, in blocks, of the dtype and on the device of `like`."""
    number, size = count(measure), measure.event_shape[0]
    if number is None:
        raise ValueError(f"{type(measure).__name__} has no finite list of states")
    if isinstance(measure, Categorical):
        yield torch.eye(size, dtype=like.dtype, device=like.device)
        return
    if isinstance(measure, Constant):
        yield measure.value.to(like).unsqueeze(0)
        return
    powers = 2 ** torch.arange(size - 1, -1, -1, device=like.device)
    for first in range(0, number, _BLOCK):
        index = torch.arange(first, min(first + _BLOCK, number), device=like.device)
        bits = (index.unsqueeze(1) // powers % 2).to(like.dtype)
        yield 2 * bits - 1 if isinstance(measure, Spin) else bits


def count_at(site: Measure) -> int | None:
    """How many states each of N sites has; None as for `count`."""
    return site.points.shape[-2] if isinstance(site, Atoms) else count(site)


def of_sites(site: Measure, like: Tensor) -> tuple[Float[Tensor, "N K d"], Float[Tensor, "N K"]]:
    """The states of each of N sites, and the logarithms of their probabilities."""
    if isinstance(site, Atoms):
        return site.points.to(like), torch.log_softmax(site.log_weight.to(like), -1)
    points = torch.cat(list(blocks(site, like))) if not isinstance(site, Constant) else site.value.to(like).unsqueeze(1)
    points = points.expand(*site.batch_shape, *points.shape[-2:])
    return points, site.log_prob(torch.zeros_like(points), points).to(like)


SHARPEST = 100.0
"""radius·|field| + ½ radius²·|V| up to which the rules on spheres are exact to 1e-12."""
_NODES = {2: 128, 3: 64}
"""Of the rule along a great circle, and along the axis of the sphere in three dimensions, which has twice as many around it."""


class SiteMoments(NamedTuple):
    """Of the tilted one-site laws, each relative to the site's own probability."""

    log_partition: Float[Tensor, "N"]
    mean: Float[Tensor, "N d"]
    covariance: Float[Tensor, "N d d"]


class SiteLaw(Value):
    """What one knows of N sites: the moments of every law that they can be tilted to."""

    @abstractmethod
    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """Of the laws e^{field·S + ½ SᵀVS} ρ(dS), V the curvature."""


class ListedSites(SiteLaw):
    """Sites of finitely many states, or of the nodes of a rule: probabilities exp(log_weight) at points."""

    points: Float[Tensor, "N K d"]
    log_weight: Float[Tensor, "N K"]

    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """By summing over the points."""
        quadratic = 0.5 * torch.einsum("nka,nab,nkb->nk", self.points, curvature, self.points)
        score = self.log_weight + torch.einsum("nka,na->nk", self.points, field) + quadratic
        p = torch.softmax(score, -1)
        mean = torch.einsum("nk,nka->na", p, self.points)
        deviation = self.points - mean.unsqueeze(1)
        return SiteMoments(score.logsumexp(-1), mean, torch.einsum("nk,nka,nkb->nab", p, deviation, deviation))


class Normal(SiteLaw):
    """Gaussian sites; degenerate covariances are allowed."""

    location: Float[Tensor, "N d"]
    covariance: Float[Tensor, "N d d"]

    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """N((I − ΣV)⁻¹(location + Σ·field), (I − ΣV)⁻¹Σ), in closed form; NaN for a V beyond Σ⁻¹."""
        system = identity_like(curvature) - self.covariance @ curvature
        covariance = matrices.solve(system, self.covariance)
        slope = field + (curvature @ self.location.unsqueeze(-1)).squeeze(-1)
        move = (covariance @ slope.unsqueeze(-1)).squeeze(-1)
        level = 0.5 * ((field + slope) * self.location + slope * move).sum(-1) - 0.5 * matrices.log_determinant(system)
        return SiteMoments(level, self.location + move, covariance)


def law(site: Measure, like: Tensor) -> SiteLaw:
    """Sites of batch shape (N,) and event shape (d,), of the dtype and on the device of `like`.

    Raises a ValueError at sites of other kinds than those of the module's docstring, and at too many states.
    """
    if isinstance(site, Gaussian):
        zero = like.new_zeros(site.location.shape)
        return Normal(site.mean(zero), site.fisher(zero))
    sphere = site.measure if isinstance(site, Tilted) else site
    if isinstance(sphere, Sphere) and sphere.dim in _NODES:
        nodes, weight = _sphere_rule(sphere.dim, like)
        points = sphere.radius.to(like)[:, None, None] * nodes
        log_weight = weight.log().expand(points.shape[:2])
        if isinstance(site, Tilted):
            log_weight = log_weight + torch.einsum("nka,na->nk", points, site.eta.to(like))
        return ListedSites(points, torch.log_softmax(log_weight, -1))
    kind = f"{type(sphere).__name__} in {sphere.dim} dimensions" if isinstance(sphere, Sphere) else type(site).__name__
    levels = count_at(site)
    if levels is None:
        raise ValueError(
            "adaptive TAP needs sites of finitely many states (Spin, Bernoulli, Categorical, Atoms), Gaussian ones, or "
            f"a Sphere in 2 or 3 dimensions, got {kind}"
        )
    if levels * site.batch_shape[0] > MOST:
        raise ValueError(f"adaptive TAP goes through at most 2^20 states of sites, got {site.batch_shape[0]}·{levels}")
    return ListedSites(*of_sites(site, like))


def too_sharp(site: Measure, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> float | None:
    """How sharp the laws on spheres are, where that is beyond `SHARPEST`."""
    sphere = site.measure if isinstance(site, Tilted) else site
    if not isinstance(sphere, Sphere):
        return None
    field = field + site.eta if isinstance(site, Tilted) else field
    radius = sphere.radius
    sharpness = radius * field.norm(dim=-1) + 0.5 * radius.square() * torch.linalg.matrix_norm(curvature)
    largest = sharpness.detach().amax().item()
    return None if largest <= SHARPEST else largest


def _sphere_rule(dim: int, like: Tensor) -> tuple[Float[Tensor, "K dim"], Float[Tensor, "K"]]:
    """Nodes on the unit sphere and their weights, of sum 1: equal angles, and Gauss's rule along the axis."""
    count = _NODES[dim]
    around = count if dim == 2 else 2 * count
    angle = 2 * math.pi / around * torch.arange(around, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    if dim == 2:
        return circle.to(like), like.new_full((around,), 1 / around)
    height, weight = (torch.from_numpy(each) for each in leggauss(count))
    ring = (1 - height.square()).sqrt()[:, None, None] * circle
    nodes = torch.cat([ring, height[:, None, None].expand(count, around, 1)], -1).reshape(-1, 3)
    return nodes.to(like), (weight / (2 * around)).repeat_interleave(around).to(like)


def block_diagonal(blocks: Float[Tensor, "N d d"]) -> Float[Tensor, "Nd Nd"]:
    """The matrix with these blocks on its diagonal."""
    number, size, _ = blocks.shape
    same = torch.eye(number, dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("ij,iab->iajb", same, blocks).reshape(number * size, number * size)


def diagonal_blocks(matrix: Float[Tensor, "Nd Nd"], number: int) -> Float[Tensor, "N d d"]:
    """The blocks on the diagonal of a matrix."""
    size = len(matrix) // number
    return matrix.reshape(number, size, number, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def as_matrix(coupling: Float[Tensor, "N N d d"]) -> Float[Tensor, "Nd Nd"]:
    """Blocks laid out as one matrix."""
    number, _, size, _ = coupling.shape
    return coupling.transpose(1, 2).reshape(number * size, number * size)


def identity_like(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "n n"]:
    """The unit matrix of this size, dtype and device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
