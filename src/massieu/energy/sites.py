"""One-site laws with a quadratic tilt, e^{field·S + ½ SᵀVS} ρ(dS), of the measures for which they can be had (B13).

A measure's log-partition knows linear tilts alone. Where there are finitely many states a quadratic one is a sum over
them; a Gaussian stays Gaussian; on the circle and on the sphere in three dimensions it is a sum over the nodes of a rule
that is exact to rounding for all but the sharpest laws.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import matrices, states
from massieu.energy.magnetisation import identity_like
from massieu.measures import Gaussian, Measure, Sphere
from massieu.measures.combine import Tilted
from massieu.measures.value import register

SHARPEST = 100.0
"""radius·|field| + ½ radius²·|V| up to which the rules on spheres are exact to 1e-12."""
_NODES = {2: 128, 3: 64}
"""Of the rule along a great circle, and along the axis of the sphere in three dimensions, which has twice as many around it."""


class SiteMoments(NamedTuple):
    """Of the tilted one-site laws, each relative to the site's own probability."""

    log_partition: Float[Tensor, "N"]
    mean: Float[Tensor, "N d"]
    covariance: Float[Tensor, "N d d"]


@dataclasses.dataclass(frozen=True, eq=False)
class Listed:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Normal:
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


register(Listed)
register(Normal)


def law(site: Measure, like: Tensor) -> Listed | Normal:
    """Sites of batch shape (N,) and event shape (d,), of the dtype and on the device of `like`.

    Raises:
        ValueError: of these sites there are no quadratically tilted laws here, or they have too many states.
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
        return Listed(points, torch.log_softmax(log_weight, -1))
    kind = f"{type(sphere).__name__} in {sphere.dim} dimensions" if isinstance(sphere, Sphere) else type(site).__name__
    levels = states.count_at(site)
    if levels is None:
        raise ValueError(
            "adaptive TAP needs sites of finitely many states (Spin, Bernoulli, Categorical, Atoms), Gaussian ones, or "
            f"a Sphere in 2 or 3 dimensions, got {kind}"
        )
    if levels * site.batch_shape[0] > states.MOST:
        raise ValueError(f"adaptive TAP goes through at most 2^20 states of sites, got {site.batch_shape[0]}·{levels}")
    return Listed(*states.of_sites(site, like))


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
    # Golub and Welsch: Gauss–Legendre nodes are eigenvalues of the recurrence's matrix.
    order = torch.arange(1, count, dtype=torch.float64)
    beside = order / (4 * order.square() - 1).sqrt()
    height, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    weight = vectors[0].square()
    ring = (1 - height.square()).sqrt()[:, None, None] * circle
    nodes = torch.cat([ring, height[:, None, None].expand(count, around, 1)], -1).reshape(-1, 3)
    return nodes.to(like), (weight / around).repeat_interleave(around).to(like)
