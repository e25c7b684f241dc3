"""Adaptive TAP: each site's reaction to itself is solved for, not expanded (Opper and Winther; B13, B14).

Site i has the law ρ_i(dS) exp(S·Σ_j J_ij m_j + ½ (S − m_i)ᵀV_i(S − m_i)), of mean m_i and covariance C_i, and the
matrices V_i make the Gaussian of precision Λ − J, Λ_i = V_i + C_i⁻¹, have these covariances too. That condition is
V_i = Σ_jk J_ij G⁽ⁱ⁾_jk J_ki, G⁽ⁱ⁾ the response of the other sites in the absence of i. In this form no C_i is inverted:
sites that cannot move in some direction, such as Potts's along (1, …, 1), or at all, need no special care.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import sites
from massieu.energy.sites import as_matrix, block_diagonal, diagonal_blocks, identity_like
from massieu.errors import ConvergenceError
from massieu.foundation import matrices
from massieu.foundation.transforms import every, unwrapped, values_are_readable
from massieu.measures import Measure
from massieu.solve import Auto, Status, fixed_point
from massieu.solve.status import FixedPointResult


class MagnetisationResult(NamedTuple):
    """What a spin model's sites do."""

    mean: Float[Tensor, "N d"]
    """⟨S_i⟩."""
    covariance: Float[Tensor, "N d N d"]
    """⟨S_i S_jᵀ⟩ − ⟨S_i⟩⟨S_j⟩ᵀ: exact, or by linear response, ∂⟨S_i⟩/∂field_j."""
    log_partition: Float[Tensor, ""]
    """log E exp(½ Σ SᵀJS) over the sites' probabilities: 0 without couplings. Nats."""
    solution: FixedPointResult | None
    """Of the equations that were solved: status, residual, steps; None for exact results."""


def adaptive_tap(
    site: Measure,
    coupling: Float[Tensor, "N N d d"],
    *,
    damping: float,
    rtol: float | None,
    max_steps: int,
    throw: bool,
) -> MagnetisationResult:
    """See `massieu.energy.SpinModel.adaptive_tap`."""
    law = sites.law(site, coupling)
    found = fixed_point(
        _equations,
        _start(law, coupling),
        (law, coupling),
        item_dims=3,
        method=Auto(damping=damping),
        rtol=rtol,
        max_steps=max_steps,
        throw=throw,
    )
    mean, curvature = found.value[..., 0], found.value[..., 1:]
    pull = torch.einsum("ijab,jb->ia", coupling, mean)
    own = torch.einsum("iab,ib->ia", curvature, mean)
    if values_are_readable(mean) and (sharpness := sites.too_sharp(site, pull - own, curvature)) is not None:
        raise ValueError(
            f"adaptive TAP on spheres needs radius·|field| of at most {sites.SHARPEST:g}, got {sharpness:.4g}"
        )
    moments = law.tilted(pull - own, curvature)
    system = _system(moments.covariance, curvature, coupling)
    response = matrices.solve(system, block_diagonal(moments.covariance))
    level = moments.log_partition.sum() + 0.5 * (mean * (own - pull)).sum() - 0.5 * matrices.log_determinant(system)
    found, stable = _judged(found, response, throw)
    # Of a matrix that is not positive definite, log det has no meaning.
    level = torch.where(stable, level, torch.nan)
    return MagnetisationResult(mean, response.reshape(*mean.shape, *mean.shape), level, found)


@torch.no_grad()
def _start(law: sites.SiteLaw, coupling: Tensor) -> Tensor:
    """Means of the sites alone, and the V that follow from V to second order: for Gaussian sites the solution."""
    alone = law.tilted(torch.zeros_like(coupling[0, :, 0]), torch.zeros_like(coupling[0]))
    echo = torch.einsum("ijab,jbc,ijdc->iad", coupling, alone.covariance, coupling)
    mean = alone.mean.unsqueeze(-1)
    return torch.cat([mean, _equations(torch.cat([mean, echo], -1), law, coupling)[..., 1:]], -1)


def _equations(point: Tensor, law: sites.SiteLaw, coupling: Tensor) -> Tensor:
    """Means and V, (N, d, 1 + d), that follow from means and V: those of the Gaussian of precision Λ − J."""
    mean, curvature = point[..., 0], point[..., 1:]
    field = torch.einsum("ijab,jb->ia", coupling, mean) - torch.einsum("iab,ib->ia", curvature, mean)
    moments = law.tilted(field, curvature)
    matrix, block = as_matrix(coupling), block_diagonal(moments.covariance)
    # Each site's law seen as e^{b·S − ½ SᵀΛ_iS} in the others' company, b = C⁻¹⟨S⟩ − field: with C⁻¹ multiplied out.
    shifted = moments.mean.flatten() - block @ field.flatten()
    solved = matrices.solve(
        _system(moments.covariance, curvature, coupling), torch.cat([shifted.unsqueeze(-1), block], -1)
    )
    # With G the response of all sites, [GJ]_ii = G_ii V_i and [JGJ]_ii = (I + V_i G_ii) V_i, V_i that of the cavity.
    toward = solved[:, 1:] @ matrix
    own, around = diagonal_blocks(toward, len(mean)), diagonal_blocks(matrix @ toward, len(mean))
    cavity = matrices.solve(identity_like(own) + own.mT, around)
    return torch.cat([solved[:, 0].reshape(*mean.shape, 1), 0.5 * (cavity + cavity.mT)], -1)


def _system(covariance: Tensor, curvature: Tensor, coupling: Tensor) -> Float[Tensor, "Nd Nd"]:
    """I + C(V − J) = C(Λ − J)."""
    inner = block_diagonal(covariance) @ (block_diagonal(curvature) - as_matrix(coupling))
    return identity_like(inner) + inner


def _judged(found: FixedPointResult, response: Tensor, throw: bool) -> tuple[FixedPointResult, Tensor]:
    """The solution with the status NOT_ATTRACTING where the response is no covariance; whether it is one."""
    values = response.detach()
    usable = values.isfinite().all()
    symmetric = torch.where(usable, 0.5 * (values + values.mT), torch.zeros_like(values))
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    least = eigenvalues[0]
    stable = usable & (least >= -(torch.finfo(values.dtype).eps ** 0.5) * eigenvalues[-1])
    if throw and not every(stable):
        lowest = unwrapped(least).min().item()
        raise ConvergenceError(
            f"adaptive TAP came to a saddle: (Λ − J)⁻¹ has the eigenvalue {lowest:.3g} and is no covariance; the "
            "couplings are too strong for one state, as in a glass: make them weaker, or pass throw=False"
        )
    status = torch.where(found.converged & ~stable, int(Status.NOT_ATTRACTING), found.status)
    return found._replace(status=status), stable
