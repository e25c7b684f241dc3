"""The uniform law on a sphere; tilted, it is von Mises–Fisher's."""

import math
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_range, real_tensor, whole_number
from massieu.foundation.numerics import GAUSS_LEGENDRE
from massieu.foundation.values import static_field
from massieu.measures.base import Measure
from massieu.measures.continuous import standard_gammas
from massieu.measures.hooks import Reference
from massieu.ops import bessel

_NEWTON_STEPS = 8
"""Newton's method starts between bounds a factor 2 apart, and after five steps has all digits of float64."""

_MOST_PROPOSALS = 128
"""Rounds of rejection. A proposal is accepted with probability 0.65 or more: 128 fail with probability 1e-58."""

_ROUNDINGS = 8
"""How far a point may lie off the sphere, in roundings of its dtype."""


class Sphere(Measure):
    """The uniform probability on the sphere of the given radius in R^d, d ≥ 2 (S2, N13).

    With κ = radius·‖eta‖ and R = I_{d/2}/I_{d/2−1}: A(eta) = log Γ(d/2) + (d/2−1) log(2/κ) + log I_{d/2−1}(κ) and
    ∇A = radius·R(κ)·eta/‖eta‖. Tilted, it is the von Mises–Fisher law of concentration κ.

    Everything is computed in float64 and returned in eta's dtype. A and the closed forms (mean, Fisher information,
    entropy) have relative errors of roundings for every d and finite κ, 0 included. Derivatives by `torch.func` are
    right everywhere too; A's second one along eta, and KL, have the relative error κ·eps/(d−1).

    Attributes:
        radius: Shape (*batch), positive.
        dim: d.

    Example:
        >>> from massieu.measures import Sphere
        >>> round(Sphere.create(dim=3).mean([0.0, 0.0, 1.0])[2].item(), 4)  # coth 1 − 1
        0.313
    """

    radius: Float[Tensor, "*batch"]
    dim: int = static_field()

    @classmethod
    def create(cls, radius: Float[Tensor, "*batch"] | float = 1.0, *, dim: int) -> Self:
        """Spheres in R^dim, dim ≥ 2 (in one dimension use `Spin`); see `Measure` for what is taken and raised."""
        if whole_number("dim", dim) < 2:
            hint = "; the sphere in one dimension is Spin" if dim == 1 else ""
            raise ValueError(f"Sphere needs dim of at least 2, got {dim}{hint}")
        radius = real_tensor("radius", radius)
        check_range("radius", radius, above=0)
        return cls(radius, dim)

    @property
    def batch_shape(self) -> torch.Size:
        return self.radius.shape

    @property
    def event_shape(self) -> torch.Size:
        return torch.Size([self.dim])

    def _log_partition(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        return bessel.log_sphere_partition(point.square, self.dim, point.unit).to(eta.dtype)

    def _mean(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        chord = bessel.sphere_chord(point.square, self.dim, point.unit)
        return ((point.radius * chord).unsqueeze(-1) * point.vector).to(eta.dtype)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        point = self._scaled(eta)
        size, across, along, projection = (part.unsqueeze(-1) for part in self._curvature(point))
        exact = vector.double()
        inner = (point.vector * exact).sum(-1, keepdim=True) * point.vector  # vvᵀ·vector
        return (size * (across * (exact - projection * inner) + along * inner)).to(vector.dtype)

    def _fisher(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        size, across, along, projection = (part[..., None, None] for part in self._curvature(point))
        outer = point.vector.unsqueeze(-1) * point.vector.unsqueeze(-2)  # vvᵀ
        identity = torch.eye(self.dim, dtype=outer.dtype, device=outer.device)
        return (size * (across * (identity - projection * outer) + along * outer)).to(eta.dtype)

    def _entropy(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        return bessel.sphere_entropy(point.square, self.dim, point.unit).to(eta.dtype)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """The two forms of the default, chosen between by the distance of F's nearest singularity.

        F is analytic in κ² off the negative axis. So for moves of up to half of 1 + κ the integral's eight nodes are exact to
        1e-12, whatever the size of A. For longer moves the difference keeps its digits: KL is of the size of the moves of A,
        or of (d−1)/2.
        """
        dtype = eta.dtype
        eta = eta.double()
        delta = delta.double()
        difference = self._log_partition(eta + delta) - self._log_partition(eta) - self._dot(self._mean(eta), delta)
        integral = torch.zeros_like(difference)
        for t, weight in GAUSS_LEGENDRE:
            integral = integral + weight * (1 - t) * self._dot(delta, self._fisher_vp(eta + t * delta, delta))
        close = self._support(delta.detach()) <= 0.5 * (1 + self._support(eta.detach()))
        return torch.where(close, integral, difference).to(dtype)

    def _support(self, direction: Tensor) -> Tensor:
        # In units of the largest coordinate, whose square might overflow.
        largest = direction.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(direction.dtype).tiny)
        length = torch.linalg.vector_norm(direction / largest, dim=-1) * largest.squeeze(-1)
        return self._align(self.radius, direction, 0) * length

    @property
    def _reference(self) -> Reference:
        return "surface"

    def _log_density(self, point: Tensor) -> Tensor:
        radius = self._align(self.radius, point, 0).double()
        exact = point.double()
        # The unit sphere's area is 2π^(d/2)/Γ(d/2); that of radius r is r^(d−1) times it.
        log_unit_area = math.log(2) + self.dim / 2 * math.log(math.pi) - math.lgamma(self.dim / 2)
        relative_distance = (torch.linalg.vector_norm(exact.detach(), dim=-1) / radius - 1).abs()
        is_on_sphere = relative_distance <= _ROUNDINGS * torch.finfo(point.dtype).eps
        return torch.where(is_on_sphere, -log_unit_area - (self.dim - 1) * radius.log(), -torch.inf).to(point.dtype)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """x·eta − A by itself for κ ≤ 1, and for κ > 1 as −κ‖x/radius − axis‖²/2 + (κ − A): no term is of the size of κ."""
        scaled = self._scaled(eta)
        unit_point = point.double() / scaled.radius.unsqueeze(-1)
        dot_product = (unit_point * scaled.vector).sum(-1) * scaled.unit
        diffuse = dot_product - bessel.log_sphere_partition(scaled.square, self.dim, scaled.unit)
        is_concentrated = scaled.square * scaled.unit.square() > 1
        square = torch.where(is_concentrated, scaled.square, 1.0)
        axis = scaled.vector / square.sqrt().unsqueeze(-1)
        # A point lies on the sphere within rounding; here its length has to be exactly that of the sphere.
        gap = 0.5 * (torch.nn.functional.normalize(unit_point, dim=-1) - axis).square().sum(-1)
        concentrated = bessel.sphere_slack(square, self.dim, scaled.unit) - gap * scaled.unit * square.sqrt()
        density = self._log_density(point)
        is_off_sphere = density == -torch.inf
        tilt = torch.where(is_concentrated, concentrated, diffuse).to(point.dtype)
        return torch.where(is_off_sphere, density, density + tilt)

    def _nearest(self, point: Tensor) -> Tensor:
        unit_point = torch.nn.functional.normalize(point.double(), dim=-1)
        return (self._align(self.radius, point, 0).double().unsqueeze(-1) * unit_point).to(point.dtype)

    def _conjugate(self, mu: Tensor) -> Tensor:
        """A*(mu) inside the sphere; +inf on it and beyond, since no point has mass."""
        eta = self._natural(mu)
        inside = eta.isfinite().all(-1)
        eta = torch.where(inside.unsqueeze(-1), eta, 0.0)
        value = self._fenchel(eta, torch.where(inside.unsqueeze(-1), mu, 0.0))
        return torch.where(inside, value, torch.inf)

    def _natural(self, mu: Tensor) -> Tensor:
        """eta = mu·D/radius² by Newton's method for D = κ/R(κ), which is smooth in mu, at 0 too.

        On the sphere, within roundings, ±inf; beyond it NaN.
        """
        radius = self._align(self.radius, mu, 0).double()
        exact = mu.double()
        square = (exact / radius.unsqueeze(-1)).square().sum(-1)  # R²
        is_inside = square < 1
        safe = torch.where(is_inside, square, 0.5)
        with torch.no_grad():
            gap = 1 - safe
            half_freedom = (self.dim - 1) / 2
            # Amos 1974: κ/(ν+½+√((ν+3/2)²+κ²)) ≤ R ≤ κ/(ν+½+√((ν+½)²+κ²)) with ν = d/2 − 1, solved for D.
            low = 2 * half_freedom / gap
            high = (half_freedom + (half_freedom**2 + self.dim * gap).sqrt()) / gap
            stretch = (self.dim - safe) / gap
            for _ in range(_NEWTON_STEPS):
                stretch = self._newton_step(stretch, safe).clamp(low, high)
        # Each step from an exact solution doubles the order up to which derivatives are correct, plus one: two give three.
        stretch = self._newton_step(self._newton_step(stretch.detach(), safe), safe)
        eta = exact * (stretch / radius.square()).unsqueeze(-1)
        rounding = 1 + _ROUNDINGS * torch.finfo(mu.dtype).eps
        boundary = torch.where(exact == 0, exact, exact.sign() * torch.inf)
        not_inside = torch.where((square <= rounding).unsqueeze(-1), boundary, torch.nan)
        return torch.where(is_inside.unsqueeze(-1), eta, not_inside).to(mu.dtype)

    def _newton_step(self, stretch: Tensor, square: Tensor) -> Tensor:
        """One step of Newton's method for D = κ/R(κ), where R² = square and κ² = square·D²."""
        slopes = bessel.sphere_slopes(square * stretch.square(), self.dim)
        # The root of D − 1/chord. At the root its derivative is tangent/chord, which is close enough near it.
        return stretch - (stretch - 1 / slopes.chord) * slopes.chord / slopes.tangent

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """x/radius = W·axis + √(1−W²)·tangent, with W by Wood's rejection (1994)."""
        point = self._scaled(eta)
        # At eta = 0 any axis will do: the first.
        first_axis = torch.zeros_like(point.vector)
        first_axis[..., 0] = 1
        length = point.square.sqrt().unsqueeze(-1)
        axis = torch.where(length > 0, point.vector / length, first_axis)
        concentration = (point.unit * length.squeeze(-1)).expand((*shape, *eta.shape[:-1]))
        drop = self._sample_drop(concentration, generator).unsqueeze(-1)
        noise = torch.randn(*shape, *eta.shape, dtype=torch.float64, device=eta.device, generator=generator)
        noise = noise - axis * (axis * noise).sum(-1, keepdim=True)
        tangent = torch.nn.functional.normalize(noise, dim=-1)
        # With drop = 1 − W, 1 − W² is drop·(2 − drop), which keeps its digits for W near 1.
        draw = (1 - drop) * axis + (drop * (2 - drop)).sqrt() * tangent
        draw = torch.nn.functional.normalize(draw, dim=-1)
        return (point.radius.unsqueeze(-1) * draw).to(eta.dtype)

    def _sample_drop(self, concentration: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws of 1 − x·axis/radius by Wood's rejection, in a form without cancellation for large κ.

        With Z = G₁/(G₁+G₂) ~ Beta((d−1)/2, (d−1)/2), b = (d−1)/(2κ + √(4κ² + (d−1)²)) and H = 1 − (1−b)Z, Wood's
        W has 1 − W = 2bZ/H, and 1 − x₀W = 2b/((1+b)H).
        """
        freedom = self.dim - 1
        kappas = concentration.reshape(-1).clamp_max(1e300)
        drop = torch.full_like(kappas, torch.nan)
        # Only draws that were rejected are proposed again.
        pending = torch.arange(len(kappas), device=kappas.device)
        for _ in range(_MOST_PROPOSALS):
            kappa = kappas[pending]
            b = freedom / (2 * kappa + torch.hypot(2 * kappa, kappa.new_tensor(freedom)))
            shape = torch.full_like(kappa, freedom / 2)
            first, second = standard_gammas(torch.stack([shape, shape]), generator)
            ratio = first / (second + b * first)  # Z/H
            # The logarithm of the probability of acceptance, κ(W − x₀) + (d−1)·log((1 − x₀W)/(1 − x₀²)).
            log_acceptance = 2 * kappa * b * (1 / (1 + b) - ratio)
            log_acceptance = log_acceptance + freedom * torch.log(
                (1 + b) * (first + second) / (2 * (second + b * first))
            )
            uniform = torch.rand(kappa.shape, dtype=kappa.dtype, device=kappa.device, generator=generator)
            accepted = log_acceptance >= torch.log(uniform)
            drop[pending[accepted]] = (2 * b * ratio)[accepted]
            pending = pending[~accepted]
            if len(pending) == 0:
                break
        return drop.reshape(concentration.shape)

    def _scaled(self, eta: Tensor) -> "_ScaledEta":
        """radius·eta as unit·vector; entries of the vector are at most 16, unless the unit is the largest there is."""
        radius = self._align(self.radius, eta, 0).double()
        eta = eta.double()
        # A sixteenth of the largest coordinate: derivatives multiply the unit by small numbers, which must not overflow.
        # It is a constant, as the results do not depend on the unit.
        unit = (radius * (eta.abs().amax(-1) / 16)).detach()
        unit = unit.clamp(1, torch.finfo(torch.float64).max / 16)
        vector = eta * (radius / unit).unsqueeze(-1)
        return _ScaledEta(radius, unit, vector, vector.square().sum(-1))

    def _curvature(self, point: "_ScaledEta") -> "_Curvature":
        slopes = bessel.sphere_slopes(point.square, self.dim, point.unit)
        is_far = point.unit > 1
        projection = torch.where(is_far, 1 / torch.where(is_far, point.square, 1.0), 0.0)
        along = torch.where(is_far, slopes.tangent * projection, -slopes.bend)
        return _Curvature(point.radius.square() / point.unit, slopes.chord, along, projection)


class _ScaledEta(NamedTuple):
    """radius·eta in float64, in units in which it neither overflows nor vanishes."""

    radius: Tensor
    """Broadcasts to lead, the shape of eta without its event."""
    unit: Tensor
    """Shape lead; a constant without derivatives."""
    vector: Tensor
    """radius·eta/unit, shape (*lead, d)."""
    square: Tensor
    """The vector's squared length, shape lead."""


class _Curvature(NamedTuple):
    """The Fisher information as size·(across·(1 − projection·vvᵀ) + along·vvᵀ), v = `_ScaledEta.vector`; shapes lead.

    Far from 0 projection is 1/‖v‖², so that vvᵀ is projected out: the curvature along eta, which is much smaller than that
    across, keeps its digits. Near 0, where v has no direction, projection is 0.
    """

    size: Tensor
    across: Tensor
    along: Tensor
    projection: Tensor
