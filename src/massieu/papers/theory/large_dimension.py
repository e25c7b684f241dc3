"""Vector spins of many components, solved by a saddle point that is exact as their number grows (B15).

    p(σ) ∝ exp(β Σ_ij J_ij σ_i·σ_j + β Σ_i h_i·σ_i),  σ_i uniform on the sphere ‖σ_i‖² = D of R^D,

a double sum without ½, as in the source: J here is half of `SpinModel`'s coupling at β = 1. With V = diag(t) − J ≻ 0 the
spins are Gaussian of precision 2βV and mean ½V⁻¹h, and t makes ⟨‖σ_i‖²⟩ = D. It is the unique minimum of the convex

    φ(t) = β Σ t_i − ½ log det V + (β/4D) Tr hᵀV⁻¹h.
"""

import math
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import as_tensor, check_finite, check_range, floating
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import unwrapped, values_are_readable
from massieu.foundation.values import Value, promoted_dtype
from massieu.solve import Picard, fixed_point
from massieu.solve.status import FixedPointResult


class SaddlePointResult(NamedTuple):
    """Spins of many components in equilibrium; errors fall as 1/D."""

    multiplier: Float[Tensor, "*batch N"]
    """t, which makes the mean squared lengths D."""
    mean: Float[Tensor, "*batch N D"]
    """⟨σ_i⟩ = ½ Σ_j V⁻¹_ij h_j."""
    transverse: Float[Tensor, "*batch N N"]
    """V⁻¹/2β: the covariance of one component, orthogonal to the means, of two spins."""
    log_partition: Float[Tensor, "*batch"]
    """D⁻¹ log E exp(−βenergy), σ uniform on the spheres: 0 for β = 0. Nats for each component."""
    solution: FixedPointResult
    """The solution for t: status, residual, steps."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    @property
    def correlation(self) -> Float[Tensor, "*batch N N"]:
        """⟨σ_i·σ_j⟩/D, with ones on the diagonal."""
        return self.transverse + self.mean @ self.mean.mT / self.mean.shape[-1]


class SphericalSpins(Value):
    """Vector spins on spheres: their fields, couplings and inverse temperature. Use `create`, which checks.

    Attributes:
        field: h, (*batch, N, D).
        coupling: J, (*batch, N, N).
        scale: β, shaped like the batch or one number.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import SphericalSpins
        >>> spins = SphericalSpins.create(torch.ones(2, 4), torch.zeros(2, 2))
        >>> spins.energy(torch.ones(2, 4)).item()  # −h·S
        -8.0
    """

    field: Float[Tensor, "*batch N D"]
    coupling: Float[Tensor, "*batch N N"]
    scale: Float[Tensor, "*#batch"]

    @classmethod
    def create(
        cls,
        field: Float[Tensor, "*batch N D"],
        coupling: Float[Tensor, "*batch N N"],
        *,
        scale: Float[Tensor, "*#batch"] | float = 1.0,
    ) -> Self:
        """N spins of D ≥ 2 components.

        Raises:
            TypeError: a tensor that is not floating-point.
            ValueError: shapes that do not fit; couplings that are not finite, not symmetric, or of a spin with itself; a
                scale that is not positive and finite.
        """
        floating("coupling", coupling)
        floating("field", field)
        if field.ndim < 2 or field.shape[-1] < 2 or coupling.shape != (*field.shape[:-1], field.shape[-2]):
            raise ValueError(
                f"field must have shape (*batch, N, D), D at least 2, and coupling (*batch, N, N), got "
                f"{tuple(field.shape)} and {tuple(coupling.shape)}"
            )
        scale = as_tensor("scale", scale, field)
        if scale.ndim and scale.shape != field.shape[:-2]:
            raise ValueError(
                f"scale must be one number or have the batch's shape {tuple(field.shape[:-2])}, got {tuple(scale.shape)}"
            )
        check_range("scale", scale, above=0)
        check_finite(field=field, coupling=coupling)
        if values_are_readable(coupling):
            _check_coupling(unwrapped(coupling).detach())
        return cls(field, coupling, scale)

    def energy(self, state: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch"]:
        """−Σ_ij J_ij σ_i·σ_j − Σ_i h_i·σ_i.

        Raises:
            TypeError: a state that is not floating-point.
            ValueError: one that does not end in the field's shape.
        """
        event_shape = tuple(self.field.shape)
        shape = tuple(floating("state", state).shape)
        if shape[len(shape) - len(event_shape) :] != event_shape:
            raise ValueError(f"state must have shape (*items, *{event_shape}), got {shape}")
        self._check_device(state=state)
        state = state.to(torch.promote_types(state.dtype, self.field.dtype))
        return -((self.coupling.to(state) @ state + self.field) * state).sum((-2, -1))

    def saddle_point(self, *, max_steps: int = 200, throw: bool = True) -> SaddlePointResult:
        """Means, correlations and log Z where φ is least, by Newton's method (B15).

        φ's curvature changes slowly in units of itself, so that shortened steps keep V ≻ 0 and converge from everywhere: in
        tens of steps for temperatures from 10⁻⁶ to 10⁶. Everything is computed in float64; derivatives are those of the
        implicit function theorem, of every order.

        Raises:
            ConvergenceError: the steps ran out and `throw`; without it, `solution.status` says so.
        """
        dtype = promoted_dtype(self.field)
        field = self.field.double()
        coupling = self.coupling.double()
        scale = self.scale.double()
        # The minimum without couplings, plus the sum of the row's couplings: V is diagonally dominant, so V ≻ 0.
        uncoupled = (1 + (1 + 4 * scale[..., None].square() * field.square().mean(-1)).sqrt()) / (4 * scale[..., None])
        start = coupling.abs().sum(-1) + uncoupled
        solution = fixed_point(
            _newton_step, start.detach(), (field, coupling, scale), method=Picard(), max_steps=max_steps, throw=throw
        )
        # One more step squares the remaining error.
        multiplier = _newton_step(solution.value, field, coupling, scale)
        precision = torch.diag_embed(multiplier) - coupling  # V
        inverse = _inverse(precision)
        mean = 0.5 * inverse @ field
        num_spins, size = field.shape[-2:]
        # φ at the minimum, less the same without field and couplings; (β/4D) Tr hᵀV⁻¹h = (β/2D) Σ h_i·m_i.
        field_term = 0.5 * scale / size * (field * mean).sum((-2, -1))
        # Not by slogdet, whose second derivatives are wrong within vmap (torch 2.13).
        half_log_determinant = torch.linalg.cholesky_ex(precision).L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_partition = scale * multiplier.sum(-1) - half_log_determinant + field_term
        log_partition = log_partition - 0.5 * num_spins * (1 + math.log(2) + scale.log())
        return SaddlePointResult(
            multiplier.to(dtype),
            mean.to(dtype),
            transverse=(inverse / (2 * scale[..., None, None])).to(dtype),
            log_partition=log_partition.to(dtype),
            solution=solution,
        )

    def covariance(self, point: SaddlePointResult) -> Float[Tensor, "*batch N D N D"]:
        """⟨σ_i σ_jᵀ⟩ − ⟨σ_i⟩⟨σ_j⟩ᵀ = β⁻¹ ∂⟨σ_i⟩/∂h_j at a saddle point of these spins.

        Orthogonal to the means it is `point.transverse`; along them the constraint on the lengths lowers it.
        """
        size = self.field.shape[-1]
        inverse = 2 * self.scale[..., None, None] * point.transverse  # V⁻¹
        # A field changes t, too, by the implicit function theorem: ∇²φ ∂t = −∂∇φ.
        inverse_curvature = _inverse(_curvature(inverse, point.mean, self.scale))
        slope_in_multiplier = torch.einsum("...ik,...ka->...kia", inverse, point.mean)  # −∂⟨σ_i⟩/∂t_k
        constraint = torch.einsum(
            "...kia,...kl,...ljb->...iajb", slope_in_multiplier, inverse_curvature, slope_in_multiplier
        )
        identity = torch.eye(size, dtype=inverse.dtype, device=inverse.device)
        return torch.einsum("...ij,ab->...iajb", point.transverse, identity) - constraint / size


def _newton_step(multiplier: Tensor, field: Tensor, coupling: Tensor, scale: Tensor) -> Tensor:
    """A step of Newton's method on φ, shortened to s = 1/√(1 + 2μ²), μ² = Tr (V⁻¹ diag(move))².

    Along the step φ'' grows at most by (1 − sμ)⁻³, so that every s below 2/(1 + 2μ) makes φ fall and keeps V positive
    definite. This one is smooth at the minimum, where μ = 0.
    """
    inverse = _inverse(torch.diag_embed(multiplier) - coupling)
    mean = 0.5 * inverse @ field
    gradient = scale[..., None] * (1 - mean.square().mean(-1)) - 0.5 * inverse.diagonal(dim1=-2, dim2=-1)
    move = -(_inverse(_curvature(inverse, mean, scale)) @ gradient.unsqueeze(-1)).squeeze(-1)
    squared_length = (move * (inverse.square() @ move.unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)  # μ²
    return multiplier + move / (1 + 2 * squared_length).sqrt()


def _curvature(inverse: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """∇²φ = ½ (V⁻¹)_ij² + (2β/D) V⁻¹_ij m_i·m_j."""
    return inverse * (0.5 * inverse + 2 * scale[..., None, None] * (mean @ mean.mT) / mean.shape[-1])


def _inverse(matrix: Tensor) -> Tensor:
    """The inverse, without the check for singular matrices, which compiled loops cannot make; V is positive definite."""
    return torch.linalg.inv_ex(matrix).inverse


def _check_coupling(coupling: Tensor) -> None:
    largest_on_diagonal = coupling.diagonal(dim1=-2, dim2=-1).abs().amax().item()
    if largest_on_diagonal > 0:
        raise ValueError(f"a spin must not couple to itself, got a diagonal of size {largest_on_diagonal:.4g}")
    difference = (coupling - coupling.mT).abs().amax().item()
    if difference > 1e-6 * max(1.0, coupling.abs().amax().item()):
        raise ValueError(
            f"coupling must be symmetric, got a difference of {difference:.4g}; asymmetric ones are KineticSpins'"
        )
