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
from massieu.measures.sums import Product

MAX_STATES = 1 << 20
"""The most states that a sum goes through."""
_STATES_PER_BLOCK = 1 << 14


def num_states(measure: Measure) -> int | None:
    """Number of states of a measure; None if there are infinitely many or the number is not known."""
    size = measure.event_shape[0]
    if isinstance(measure, Spin | Bernoulli):
        return 2**size
    if isinstance(measure, Categorical):
        return size
    if isinstance(measure, Constant):
        return 1
    if isinstance(measure, Product):
        numbers = [num_states(part) for part in measure.measures]
        if None not in numbers:
            return math.prod(number for number in numbers if number is not None)
    return None


def state_blocks(measure: Measure, like: Tensor) -> Iterator[Float[Tensor, "block d"]]:
    """All states, in blocks, of the dtype and on the device of `like`."""
    number = num_states(measure)
    size = measure.event_shape[0]
    if number is None:
        raise ValueError(f"{type(measure).__name__} has no finite list of states")
    if isinstance(measure, Categorical):
        yield torch.eye(size, dtype=like.dtype, device=like.device)
        return
    if isinstance(measure, Constant):
        yield measure.value.to(like).unsqueeze(0)
        return
    if isinstance(measure, Product):
        yield from _states_of_parts(measure, number, like)
        return
    # State number k is the binary expansion of k, the first unit its highest bit.
    powers = 2 ** torch.arange(size - 1, -1, -1, device=like.device)
    for first in range(0, number, _STATES_PER_BLOCK):
        index = torch.arange(first, min(first + _STATES_PER_BLOCK, number), device=like.device)
        bits = (index.unsqueeze(1) // powers % 2).to(like.dtype)
        if isinstance(measure, Spin):
            yield 2 * bits - 1
        else:
            yield bits


def _states_of_parts(measure: Product, number: int, like: Tensor) -> Iterator[Float[Tensor, "block d"]]:
    """All combinations of the states of independent parts, the last part changing first."""
    parts = [torch.cat(list(state_blocks(part, like))) for part in measure.measures]
    for first in range(0, number, _STATES_PER_BLOCK):
        index = torch.arange(first, min(first + _STATES_PER_BLOCK, number), device=like.device)
        joined = []
        for states in reversed(parts):
            joined.insert(0, states[index % len(states)])
            index = index // len(states)
        yield torch.cat(joined, -1)


def num_states_per_site(site: Measure) -> int | None:
    """Number of states of each of N sites; None as for `num_states`."""
    if isinstance(site, Atoms):
        return site.points.shape[-2]
    return num_states(site)


def states_per_site(site: Measure, like: Tensor) -> tuple[Float[Tensor, "N K d"], Float[Tensor, "N K"]]:
    """The K states of each of N sites, and the logarithms of their probabilities."""
    if isinstance(site, Atoms):
        return site.points.to(like), torch.log_softmax(site.log_weight.to(like), -1)
    if isinstance(site, Constant):
        # Sites of one state each, which may differ from site to site: (N, 1, d).
        points = site.value.to(like).unsqueeze(1)
    else:
        points = torch.cat(list(state_blocks(site, like)))
    points = points.expand(*site.batch_shape, *points.shape[-2:])
    return points, site.log_prob(torch.zeros_like(points), points).to(like)


MAX_SHARPNESS = 100.0
"""The largest radius·|field| + ½ radius²·|V| at which the quadrature on spheres is exact to 1e-12."""
_NUM_NODES = {2: 128, 3: 64}
"""Nodes by dimension: around the circle; along the axis of the sphere, which has twice as many around the axis."""


class SiteMoments(NamedTuple):
    """Moments of the tilted laws of N sites; log-partitions are relative to the site's own probability."""

    log_partition: Float[Tensor, "N"]
    mean: Float[Tensor, "N d"]
    covariance: Float[Tensor, "N d d"]


class SiteLaw(Value):
    """The laws of N sites, which give the moments of their linear and quadratic tilts."""

    @abstractmethod
    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """Moments of the laws e^{field·S + ½ SᵀVS} ρ(dS), V the curvature."""


class ListedSites(SiteLaw):
    """Sites with a finite list of states or of quadrature nodes: probabilities exp(log_weight) at points."""

    points: Float[Tensor, "N K d"]
    log_weight: Float[Tensor, "N K"]

    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """Moments by sums over the points."""
        quadratic = 0.5 * torch.einsum("nka,nab,nkb->nk", self.points, curvature, self.points)
        score = self.log_weight + torch.einsum("nka,na->nk", self.points, field) + quadratic
        p = torch.softmax(score, -1)
        mean = torch.einsum("nk,nka->na", p, self.points)
        deviation = self.points - mean.unsqueeze(1)
        covariance = torch.einsum("nk,nka,nkb->nab", p, deviation, deviation)
        return SiteMoments(score.logsumexp(-1), mean, covariance)


class GaussianSites(SiteLaw):
    """Gaussian sites; covariances may be singular."""

    location: Float[Tensor, "N d"]
    covariance: Float[Tensor, "N d d"]

    def tilted(self, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> SiteMoments:
        """N((I − ΣV)⁻¹(location + Σ·field), (I − ΣV)⁻¹Σ), in closed form; NaN for a V beyond Σ⁻¹."""
        # Precisions would add as Σ⁻¹ − V; multiplied by Σ, nothing singular is inverted.
        system = identity_like(curvature) - self.covariance @ curvature
        covariance = matrices.solve(system, self.covariance)
        # The exponent is expanded about the location, where its gradient is field + V·location.
        slope = field + (curvature @ self.location.unsqueeze(-1)).squeeze(-1)
        shift = (covariance @ slope.unsqueeze(-1)).squeeze(-1)
        exponent = 0.5 * ((field + slope) * self.location + slope * shift).sum(-1)
        log_partition = exponent - 0.5 * matrices.log_determinant(system)
        return SiteMoments(log_partition, self.location + shift, covariance)


def site_law(site: Measure, like: Tensor) -> SiteLaw:
    """The law of sites of batch shape (N,) and event shape (d,), of the dtype and on the device of `like`.

    Raises a ValueError if the sites are of another kind than those in the module's docstring, or have too many states.
    """
    if isinstance(site, Gaussian):
        zero = like.new_zeros(site.location.shape)
        return GaussianSites(site.mean(zero), site.fisher(zero))
    base = _base_measure(site)
    if isinstance(base, Sphere) and base.dim in _NUM_NODES:
        return _sphere_sites(site, base, like)
    states = num_states_per_site(site)
    if states is None:
        kind = f"{type(base).__name__} in {base.dim} dimensions" if isinstance(base, Sphere) else type(site).__name__
        raise ValueError(
            "adaptive TAP needs sites of finitely many states (Spin, Bernoulli, Categorical, Atoms), Gaussian ones, or "
            f"a Sphere in 2 or 3 dimensions, got {kind}"
        )
    if states * site.batch_shape[0] > MAX_STATES:
        raise ValueError(f"adaptive TAP goes through at most 2^20 states of sites, got {site.batch_shape[0]}·{states}")
    return ListedSites(*states_per_site(site, like))


def _base_measure(site: Measure) -> Measure:
    """The measure that a `Tilted` tilts; any other measure as it is."""
    if isinstance(site, Tilted):
        return site.measure
    return site


def _sphere_sites(site: Measure, sphere: Sphere, like: Tensor) -> ListedSites:
    """Quadrature nodes (N, K, d) on the spheres of the sites, with the tilt of the sites in their weights."""
    nodes, weight = _sphere_rule(sphere.dim, like)
    points = sphere.radius.to(like)[:, None, None] * nodes
    log_weight = weight.log().expand(points.shape[:2])
    if isinstance(site, Tilted):
        log_weight = log_weight + torch.einsum("nka,na->nk", points, site.eta.to(like))
    return ListedSites(points, torch.log_softmax(log_weight, -1))


def too_sharp(site: Measure, field: Float[Tensor, "N d"], curvature: Float[Tensor, "N d d"]) -> float | None:
    """The largest sharpness of the laws on spheres if it is above `MAX_SHARPNESS`; None if it is not, or without spheres."""
    sphere = _base_measure(site)
    if not isinstance(sphere, Sphere):
        return None
    if isinstance(site, Tilted):
        field = field + site.eta
    radius = sphere.radius
    sharpness = radius * field.norm(dim=-1) + 0.5 * radius.square() * torch.linalg.matrix_norm(curvature)
    largest = sharpness.detach().amax().item()
    # A NaN is reported too.
    if largest <= MAX_SHARPNESS:
        return None
    return largest


def _sphere_rule(dim: int, like: Tensor) -> tuple[Float[Tensor, "K dim"], Float[Tensor, "K"]]:
    """Quadrature nodes on the unit sphere and their weights, of sum 1: equal angles, and Gauss's rule along the axis."""
    if dim == 2:
        num_angles = _NUM_NODES[2]
        circle = _unit_circle(num_angles)
        return circle.to(like), like.new_full((num_angles,), 1 / num_angles)
    num_heights = _NUM_NODES[3]
    num_angles = 2 * num_heights
    # The area of the sphere between two heights is proportional to their difference (Archimedes), so Gauss–Legendre in
    # the height and equal weights around the axis integrate over the area; Legendre weights sum to 2.
    legendre_nodes, legendre_weights = leggauss(num_heights)
    height = torch.from_numpy(legendre_nodes)
    ring = (1 - height.square()).sqrt()[:, None, None] * _unit_circle(num_angles)
    axis = height[:, None, None].expand(num_heights, num_angles, 1)
    nodes = torch.cat([ring, axis], -1).reshape(-1, 3)
    weight = (torch.from_numpy(legendre_weights) / (2 * num_angles)).repeat_interleave(num_angles)
    return nodes.to(like), weight.to(like)


def _unit_circle(num_angles: int) -> Float[Tensor, "num_angles 2"]:
    """Points at equal angles on the unit circle, in float64."""
    angle = 2 * math.pi / num_angles * torch.arange(num_angles, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], -1)


def block_diagonal(blocks: Float[Tensor, "N d d"]) -> Float[Tensor, "Nd Nd"]:
    """The matrix with these blocks on its diagonal."""
    number, size, _ = blocks.shape
    same_site = torch.eye(number, dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("ij,iab->iajb", same_site, blocks).reshape(number * size, number * size)


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
