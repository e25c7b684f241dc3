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
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true, unwrapped, values_are_readable
from massieu.measures import Measure
from massieu.solve import Auto, Status, fixed_point
from massieu.solve.status import FixedPointResult


class MagnetisationResult(NamedTuple):
    """Means, covariances and log-partition of the N sites of a spin model."""

    mean: Float[Tensor, "N d"]
    """⟨S_i⟩."""
    covariance: Float[Tensor, "N d N d"]
    """⟨S_i S_jᵀ⟩ − ⟨S_i⟩⟨S_j⟩ᵀ: exact, or by linear response, ∂⟨S_i⟩/∂field_j."""
    log_partition: Float[Tensor, ""]
    """log E exp(½ Σ SᵀJS) over the sites' probabilities: 0 without couplings. Nats."""
    solution: FixedPointResult | None
    """Status, residual and steps of the equations that were solved; None for exact results."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


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
    law = sites.site_law(site, coupling)
    solution = fixed_point(
        _equations,
        _start(law, coupling),
        (law, coupling),
        item_dims=3,
        method=Auto(damping=damping),
        rtol=rtol,
        max_steps=max_steps,
        throw=throw,
    )
    mean = solution.value[..., 0]
    curvature = solution.value[..., 1:]
    # The field of the other sites, and what the site's own reaction adds to it.
    neighbour_field = torch.einsum("ijab,jb->ia", coupling, mean)
    reaction = torch.einsum("iab,ib->ia", curvature, mean)
    cavity_field = neighbour_field - reaction
    if values_are_readable(mean):
        _check_sharpness(site, cavity_field, curvature)
    moments = law.tilted(cavity_field, curvature)
    system = _system(moments.covariance, curvature, coupling)
    response = matrices.solve(system, block_diagonal(moments.covariance))
    sites_part = moments.log_partition.sum()
    fields_part = 0.5 * (mean * (reaction - neighbour_field)).sum()
    log_partition = sites_part + fields_part - 0.5 * matrices.log_determinant(system)
    solution, stable = _with_stability(solution, response, throw)
    # The logarithm of the determinant has no meaning where the matrix is not positive definite.
    log_partition = torch.where(stable, log_partition, torch.nan)
    return MagnetisationResult(mean, response.reshape(*mean.shape, *mean.shape), log_partition, solution)


def _check_sharpness(site: Measure, field: Tensor, curvature: Tensor) -> None:
    sharpness = sites.too_sharp(site, field, curvature)
    if sharpness is not None:
        raise ValueError(
            f"adaptive TAP on spheres needs radius·|field| of at most {sites.MAX_SHARPNESS:g}, got {sharpness:.4g}"
        )


@torch.no_grad()
def _start(law: sites.SiteLaw, coupling: Tensor) -> Tensor:
    """Means of the sites alone, and the V that follow from V to second order: for Gaussian sites the solution."""
    uncoupled = law.tilted(torch.zeros_like(coupling[0, :, 0]), torch.zeros_like(coupling[0]))
    second_order = torch.einsum("ijab,jbc,ijdc->iad", coupling, uncoupled.covariance, coupling)
    mean = uncoupled.mean.unsqueeze(-1)
    curvature = _equations(torch.cat([mean, second_order], -1), law, coupling)[..., 1:]
    return torch.cat([mean, curvature], -1)


def _equations(point: Tensor, law: sites.SiteLaw, coupling: Tensor) -> Tensor:
    """Means and V, (N, d, 1 + d), that follow from means and V: those of the Gaussian of precision Λ − J."""
    mean = point[..., 0]
    curvature = point[..., 1:]
    field = torch.einsum("ijab,jb->ia", coupling, mean) - torch.einsum("iab,ib->ia", curvature, mean)
    moments = law.tilted(field, curvature)
    matrix = as_matrix(coupling)
    block = block_diagonal(moments.covariance)
    # Each site's law seen as e^{b·S − ½ SᵀΛ_iS} in the others' company, b = C⁻¹⟨S⟩ − field: with C⁻¹ multiplied out.
    shifted = moments.mean.flatten() - block @ field.flatten()
    # One solve for the means and for G, the response of all sites: columns (1 + N·d).
    system = _system(moments.covariance, curvature, coupling)
    solved = matrices.solve(system, torch.cat([shifted.unsqueeze(-1), block], -1))
    new_mean = solved[:, 0].reshape(*mean.shape, 1)
    response = solved[:, 1:]
    # [GJ]_ii = G_ii V_i and [JGJ]_ii = (I + V_i G_ii) V_i, V_i that of the cavity: both blocks give V_i without G_ii⁻¹.
    response_coupling = response @ matrix
    once = diagonal_blocks(response_coupling, len(mean))
    twice = diagonal_blocks(matrix @ response_coupling, len(mean))
    cavity = matrices.solve(identity_like(once) + once.mT, twice)
    return torch.cat([new_mean, 0.5 * (cavity + cavity.mT)], -1)


def _system(covariance: Tensor, curvature: Tensor, coupling: Tensor) -> Float[Tensor, "Nd Nd"]:
    """I + C(V − J) = C(Λ − J), which needs no inverse of C."""
    inner = block_diagonal(covariance) @ (block_diagonal(curvature) - as_matrix(coupling))
    return identity_like(inner) + inner


def _with_stability(solution: FixedPointResult, response: Tensor, throw: bool) -> tuple[FixedPointResult, Tensor]:
    """The solution, of status NOT_ATTRACTING if the response is not a covariance, and whether the response is one."""
    values = response.detach()
    finite = values.isfinite().all()
    # Eigenvalues of a matrix with a NaN would raise.
    symmetric = torch.where(finite, 0.5 * (values + values.mT), torch.zeros_like(values))
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    least = eigenvalues[0]
    stable = finite & (least >= -(torch.finfo(values.dtype).eps ** 0.5) * eigenvalues[-1])
    if throw and not all_true(stable):
        lowest = unwrapped(least).min().item()
        raise ConvergenceError(
            f"adaptive TAP came to a saddle: (Λ − J)⁻¹ has the eigenvalue {lowest:.3g} and is no covariance; the "
            "couplings are too strong for one state, as in a glass: make them weaker, or pass throw=False"
        )
    status = torch.where(solution.converged & ~stable, int(Status.NOT_ATTRACTING), solution.status)
    return solution._replace(status=status), stable
