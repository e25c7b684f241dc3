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
"""From bounds a factor 2 apart, Newton's method has all digits of float64 after five."""

_PROPOSALS = 128
"""Rounds of rejection. A proposal is accepted with probability 0.65 or more: failing them all has probability 1e-58."""

_ROUNDINGS = 8
"""How many roundings of its dtype a point may lie off the sphere."""


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
        inner = (point.vector * exact).sum(-1, keepdim=True) * point.vector
        return (size * (across * (exact - projection * inner) + along * inner)).to(vector.dtype)

    def _fisher(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        size, across, along, projection = (part[..., None, None] for part in self._curvature(point))
        outer = point.vector.unsqueeze(-1) * point.vector.unsqueeze(-2)
        identity = torch.eye(self.dim, dtype=outer.dtype, device=outer.device)
        return (size * (across * (identity - projection * outer) + along * outer)).to(eta.dtype)

    def _entropy(self, eta: Tensor) -> Tensor:
        point = self._scaled(eta)
        return bessel.sphere_entropy(point.square, self.dim, point.unit).to(eta.dtype)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """As the default; but what decides between its two forms is how far F's nearest singularity is.

        F is analytic in κ² off the negative axis, so that eight nodes are exact to 1e-12 for moves of up to half of
        1 + κ, whatever the size of A; longer moves have a KL of the size of the moves of A, or of (d−1)/2.
        """
        dtype, eta, delta = eta.dtype, eta.double(), delta.double()
        difference = self._log_partition(eta + delta) - self._log_partition(eta) - self._dot(self._mean(eta), delta)
        integral = torch.zeros_like(difference)
        for t, weight in GAUSS_LEGENDRE:
            integral = integral + weight * (1 - t) * self._dot(delta, self._fisher_vp(eta + t * delta, delta))
        close = self._support(delta.detach()) <= 0.5 * (1 + self._support(eta.detach()))
        return torch.where(close, integral, difference).to(dtype)

    def _support(self, direction: Tensor) -> Tensor:
        largest = direction.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(direction.dtype).tiny)
        length = torch.linalg.vector_norm(direction / largest, dim=-1) * largest.squeeze(-1)
        return self._align(self.radius, direction, 0) * length

    @property
    def _reference(self) -> Reference:
        return "surface"

    def _log_density(self, point: Tensor) -> Tensor:
        radius, exact = self._align(self.radius, point, 0).double(), point.double()
        log_area = math.log(2) + self.dim / 2 * math.log(math.pi) - math.lgamma(self.dim / 2)
        off = (torch.linalg.vector_norm(exact.detach(), dim=-1) / radius - 1).abs()
        on = off <= _ROUNDINGS * torch.finfo(point.dtype).eps
        return torch.where(on, -log_area - (self.dim - 1) * radius.log(), -torch.inf).to(point.dtype)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """For κ > 1 by −κ‖x/radius − axis‖²/2 + (κ − A), of which neither is of the size of κ."""
        scaled = self._scaled(eta)
        unit_point = point.double() / scaled.radius.unsqueeze(-1)
        height = (unit_point * scaled.vector).sum(-1) * scaled.unit
        near = height - bessel.log_sphere_partition(scaled.square, self.dim, scaled.unit)
        concentrated = scaled.square * scaled.unit.square() > 1
        square = torch.where(concentrated, scaled.square, 1.0)
        axis = scaled.vector / square.sqrt().unsqueeze(-1)
        # A point is on the sphere within rounding; its length is that of the sphere.
        gap = 0.5 * (torch.nn.functional.normalize(unit_point, dim=-1) - axis).square().sum(-1)
        far = bessel.sphere_slack(square, self.dim, scaled.unit) - gap * scaled.unit * square.sqrt()
        density = self._log_density(point)
        off = density == -torch.inf
        return torch.where(off, density, density + torch.where(concentrated, far, near).to(point.dtype))

    def _nearest(self, point: Tensor) -> Tensor:
        exact = torch.nn.functional.normalize(point.double(), dim=-1)
        return (self._align(self.radius, point, 0).double().unsqueeze(-1) * exact).to(point.dtype)

    def _conjugate(self, mu: Tensor) -> Tensor:
        """On the sphere itself and beyond it +inf: no point has mass."""
        eta = self._natural(mu)
        inside = eta.isfinite().all(-1)
        eta = torch.where(inside.unsqueeze(-1), eta, 0.0)
        value = self._fenchel(eta, torch.where(inside.unsqueeze(-1), mu, 0.0))
        return torch.where(inside, value, torch.inf)

    def _natural(self, mu: Tensor) -> Tensor:
        """Newton's method for D = κ/R(κ), with which eta = mu·D/radius²: smooth in mu, at 0 too.

        At the boundary, within roundings, ±inf; beyond it NaN.
        """
        radius, exact = self._align(self.radius, mu, 0).double(), mu.double()
        share = (exact / radius.unsqueeze(-1)).square().sum(-1)  # R²
        inside = share < 1
        safe = torch.where(inside, share, 0.5)
        with torch.no_grad():
            gap, half = 1 - safe, (self.dim - 1) / 2
            # Amos 1974: κ/(ν+½+√((ν+3/2)²+κ²)) ≤ R ≤ κ/(ν+½+√((ν+½)²+κ²)), solved for D.
            low, high = 2 * half / gap, (half + (half**2 + self.dim * gap).sqrt()) / gap
            stretch = (self.dim - safe) / gap
            for _ in range(_NEWTON_STEPS):
                stretch = self._newton(stretch, safe).clamp(low, high)
        # Each step from an exact solution doubles the order up to which its derivatives are right, here to three.
        stretch = self._newton(self._newton(stretch.detach(), safe), safe)
        eta = exact * (stretch / radius.square()).unsqueeze(-1)
        rounding = 1 + _ROUNDINGS * torch.finfo(mu.dtype).eps
        boundary = torch.where(exact == 0, exact, exact.sign() * torch.inf)
        outside = torch.where((share <= rounding).unsqueeze(-1), boundary, torch.nan)
        return torch.where(inside.unsqueeze(-1), eta, outside).to(mu.dtype)

    def _newton(self, stretch: Tensor, share: Tensor) -> Tensor:
        """One step of Newton's method for D = κ/R(κ) at κ² = share·D²."""
        slopes = bessel.sphere_slopes(share * stretch.square(), self.dim)
        # At the solution the derivative of D − 1/chord is tangent/chord, which is near enough beside it.
        return stretch - (stretch - 1 / slopes.chord) * slopes.chord / slopes.tangent

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """x = W·axis + √(1−W²)·tangent, with W by Wood's rejection (1994)."""
        point = self._scaled(eta)
        first = torch.zeros_like(point.vector)
        first[..., 0] = 1
        length = point.square.sqrt().unsqueeze(-1)
        axis = torch.where(length > 0, point.vector / length, first)
        concentration = (point.unit * length.squeeze(-1)).expand((*shape, *eta.shape[:-1]))
        drop = self._drop(concentration, generator).unsqueeze(-1)
        noise = torch.randn(*shape, *eta.shape, dtype=torch.float64, device=eta.device, generator=generator)
        noise = noise - axis * (axis * noise).sum(-1, keepdim=True)
        draw = (1 - drop) * axis + (drop * (2 - drop)).sqrt() * torch.nn.functional.normalize(noise, dim=-1)
        draw = torch.nn.functional.normalize(draw, dim=-1)
        return (point.radius.unsqueeze(-1) * draw).to(eta.dtype)

    def _drop(self, concentration: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws of 1 − x·axis/radius by Wood's rejection, in a form without cancellation for large κ.

        With Z = G₁/(G₁+G₂) ~ Beta((d−1)/2, (d−1)/2), b = (d−1)/(2κ + √(4κ² + (d−1)²)) and H = 1 − (1−b)Z, Wood's
        W has 1 − W = 2bZ/H, and 1 − x₀W = 2b/((1+b)H).
        """
        freedom = self.dim - 1
        flat = concentration.reshape(-1).clamp_max(1e300)
        drop = torch.full_like(flat, torch.nan)
        left = torch.arange(len(flat), device=flat.device)
        for _ in range(_PROPOSALS):
            kappa = flat[left]
            b = freedom / (2 * kappa + torch.hypot(2 * kappa, kappa.new_tensor(freedom)))
            shape = torch.full_like(kappa, freedom / 2)
            one, two = standard_gammas(torch.stack([shape, shape]), generator)
            ratio = one / (two + b * one)  # Z/H
            excess = 2 * kappa * b * (1 / (1 + b) - ratio)
            excess = excess + freedom * torch.log((1 + b) * (one + two) / (2 * (two + b * one)))
            accepted = excess >= torch.log(
                torch.rand(kappa.shape, dtype=kappa.dtype, device=kappa.device, generator=generator)
            )
            drop[left[accepted]] = (2 * b * ratio)[accepted]
            left = left[~accepted]
            if len(left) == 0:
                break
        return drop.reshape(concentration.shape)

    def _scaled(self, eta: Tensor) -> "_Scaled":
        radius, exact = self._align(self.radius, eta, 0).double(), eta.double()
        # A sixteenth of the largest coordinate leaves room for the factors of a gradient, at the largest eta too.
        largest = (radius * (exact.abs().amax(-1) / 16)).detach()
        unit = largest.clamp(1, torch.finfo(torch.float64).max / 16)
        vector = exact * (radius / unit).unsqueeze(-1)
        return _Scaled(radius, unit, vector, vector.square().sum(-1))

    def _curvature(self, point: "_Scaled") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(size, across, along, projection): F = size·(across·(1 − projection·vvᵀ) + along·vvᵀ), v = point.vector.

        Far from 0 vvᵀ is projected out, so that the curvature along eta, which is much smaller than that across, keeps
        its digits; near 0 the direction of v is not defined.
        """
        slopes = bessel.sphere_slopes(point.square, self.dim, point.unit)
        far = point.unit > 1
        projection = torch.where(far, 1 / torch.where(far, point.square, 1.0), 0.0)
        along = torch.where(far, slopes.tangent * projection, -slopes.bend)
        return point.radius.square() / point.unit, slopes.chord, along, projection


class _Scaled(NamedTuple):
    """radius·eta in units in which it neither overflows nor is all 0, in float64."""

    radius: Tensor  # broadcasts to lead
    unit: Tensor  # lead; constant
    vector: Tensor  # radius·eta/unit
    square: Tensor  # its squared length
