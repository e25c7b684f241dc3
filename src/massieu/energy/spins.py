"""Spin models: sites with any measure, pairwise couplings, and what is approximately or exactly known of them.

    p(S) ∝ exp(½ Σ_ij S_iᵀ J_ij S_j) Π ρ_i(dS_i),  J_ii = 0, J_ji = J_ijᵀ,

with fields in the measures ρ_i, which a field tilts: `Spin.create(field)` makes Ising's model, `Categorical` Potts's,
`Sphere` vector spins, `Gaussian` a model that is solved exactly. Every approximation returns the means, the evidence
log Z it stands for, and how its fixed point was found (B13, B14).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import states
from massieu.measures import Gaussian, Measure, Spin
from massieu.measures.base import values_are_readable
from massieu.measures.value import register
from massieu.solve import FixedPoint, fixed_point


class Magnetisation(NamedTuple):
    """What a spin model's sites do."""

    mean: Float[Tensor, "N d"]
    """⟨S_i⟩."""
    covariance: Float[Tensor, "N d N d"]
    """⟨S_i S_jᵀ⟩ − ⟨S_i⟩⟨S_j⟩ᵀ: exact, or by linear response, ∂⟨S_i⟩/∂field_j."""
    log_partition: Float[Tensor, ""]
    """log E exp(½ Σ SᵀJS) over the sites' probabilities: 0 without couplings. Nats."""
    solution: FixedPoint | None
    """Of the equations that were solved: status, residual, steps; None for exact results."""


@dataclasses.dataclass(frozen=True, eq=False)
class SpinModel:
    """Sites and couplings. Use `create`, which checks.

    Attributes:
        site: N independent probabilities on R^d: batch shape (N,), event shape (d,).
        coupling: J, (N, N, d, d).
    """

    site: Measure
    coupling: Float[Tensor, "N N d d"]

    @classmethod
    def create(cls, site: Measure, coupling: Float[Tensor, "N N"] | Float[Tensor, "N N d d"]) -> Self:
        """A model; couplings (N, N) couple equal components.

        A measure without batch whose coordinates are independent, such as `Spin.create(field)` with a field (N,), stands
        for N sites of one component.

        Raises:
            TypeError: no measure, or a coupling that is not floating-point.
            ValueError: shapes that do not fit; couplings that are not finite, not symmetric, or of a site with itself;
                Gaussian sites for which Z is infinite.
        """
        if not isinstance(site, Measure):
            raise TypeError(f"site must be a measure, got {type(site).__name__}")
        if not isinstance(coupling, Tensor) or not coupling.is_floating_point():
            raise TypeError(
                f"coupling must be a floating-point tensor, got {getattr(coupling, 'dtype', type(coupling))}"
            )
        if isinstance(site, Spin) and site.batch_shape == ():
            site = Spin(site.field.unsqueeze(-1))
        if len(site.batch_shape) != 1 or len(site.event_shape) != 1:
            raise ValueError(
                f"site must have batch shape (N,) and event shape (d,), got {tuple(site.batch_shape)} and "
                f"{tuple(site.event_shape)}"
            )
        number, size = site.batch_shape[0], site.event_shape[0]
        if tuple(coupling.shape) not in ((number, number), (number, number, size, size)):
            raise ValueError(
                f"coupling must have shape {(number, number)} or {(number, number, size, size)}, got "
                f"{tuple(coupling.shape)}"
            )
        if coupling.ndim == 2:
            coupling = coupling[:, :, None, None] * torch.eye(size, dtype=coupling.dtype, device=coupling.device)
        if values_are_readable(coupling):
            _check_coupling(coupling.detach())
        model = cls(site, coupling)
        if isinstance(site, Gaussian) and values_are_readable(coupling):
            smallest = torch.linalg.eigvalsh(model._precision().detach()).amin().item()
            if smallest <= 0:
                raise ValueError(
                    f"Gaussian sites have a normaliser where Σ⁻¹ − J is positive definite; its smallest eigenvalue is "
                    f"{smallest:.4g}"
                )
        return model

    def interaction(self, state: Float[Tensor, "*items N d"]) -> Float[Tensor, "*items"]:
        """½ Σ_ij S_iᵀ J_ij S_j, nats: minus the energy, the sites' measures apart."""
        return 0.5 * (self.field(state) * state).sum((-2, -1))

    def field(self, state: Float[Tensor, "*items N d"]) -> Float[Tensor, "*items N d"]:
        """Σ_j J_ij S_j: what tilts the measure of site i, given the others."""
        return torch.einsum("ijab,...jb->...ia", self.coupling, state)

    # Exact results.

    def exact(self) -> Magnetisation:
        """Means, covariances and log Z by going through all states, or in closed form for Gaussian sites (B14).

        Raises:
            ValueError: sites with infinitely many states, or more than 2^20 states in all.
        """
        if isinstance(self.site, Gaussian):
            return self._exact_gaussian()
        number, size = self.site.batch_shape[0], self.site.event_shape[0]
        levels = states.count(self.site)
        if levels is None or levels**number > states.MOST:
            raise ValueError(
                f"exact results need at most 2^20 states, or Gaussian sites, got {number} sites of "
                f"{'infinitely many' if levels is None else levels} states"
            )
        one_site = torch.cat(list(states.blocks(self.site, self.coupling)))
        index = torch.cartesian_prod(*[torch.arange(levels, device=self.coupling.device)] * number).reshape(-1, number)
        state = one_site[index]
        zero = torch.zeros_like(state).movedim(0, 1)
        log_p = self.interaction(state) + self.site.log_prob(zero, state.movedim(0, 1)).sum(0)
        log_z = torch.logsumexp(log_p, 0)
        p = (log_p - log_z).exp()
        mean = torch.einsum("s,sia->ia", p, state)
        deviation = (state - mean).flatten(1)
        covariance = (p.unsqueeze(-1) * deviation).mT @ deviation
        return Magnetisation(mean, covariance.reshape(number, size, number, size), log_z, None)

    def _precision(self) -> Tensor:
        """Σ⁻¹ − J of Gaussian sites, (N·d, N·d)."""
        covariance = self.site.fisher(torch.zeros_like(self.coupling[0, :, 0]))
        return torch.block_diag(*torch.linalg.inv(covariance)) - _as_matrix(self.coupling)

    def _exact_gaussian(self) -> Magnetisation:
        assert isinstance(self.site, Gaussian)
        number, size = self.site.location.shape
        location = self.site.location
        covariance = self.site.fisher(torch.zeros_like(location))
        joint = self._precision()
        pull = torch.linalg.solve(covariance, location.unsqueeze(-1)).flatten()
        mean = torch.linalg.solve(joint, pull)
        log_z = 0.5 * (pull @ mean - pull @ location.flatten())
        log_z = log_z - 0.5 * (torch.linalg.slogdet(joint)[1] + torch.linalg.slogdet(covariance)[1].sum())
        response = torch.linalg.inv(joint).reshape(number, size, number, size)
        return Magnetisation(mean.reshape(number, size), response, log_z, None)

    # Approximations.

    def mean_field(self, *, max_steps: int = 1000, throw: bool = True) -> Magnetisation:
        """m_i = ∇A_i(Σ_j J_ij m_j), each site in the mean field of the others; log Z is a lower bound (B13).

        Its error in the means falls as the square of the couplings' strength. Exact means for Gaussian sites (B14).

        Raises:
            ConvergenceError: no fixed point was found, as in a glassy model, and `throw`; otherwise
                `solution.status` tells.
        """
        found = self._solve(_mean_field, max_steps, throw)
        mean, covariance = self.site.mean(found.value), self.site.fisher(found.value)
        level = self._free(found.value, mean) + self.interaction(mean)
        block = _blocks(covariance)
        identity = torch.eye(len(block), dtype=block.dtype, device=block.device)
        response = torch.linalg.solve(identity - block @ _as_matrix(self.coupling), block)
        return Magnetisation(mean, response.reshape(*mean.shape, *mean.shape), level, found)

    def tap(self, *, max_steps: int = 1000, throw: bool = True) -> Magnetisation:
        """The mean field less each site's own echo: the second order in the couplings (Thouless, Anderson, Palmer; B13).

        The field of site i is Σ_j J_ij m_j + ½ C_i⁻¹ ∇ Σ_j tr(J_ij C_j J_ji C_i), C the sites' covariances, which is
        −m_i Σ_j J_ij² (1 − m_j²) for spins and 0 for Gaussian sites (trap 31). Errors fall as the cube of the couplings.

        Raises:
            ConvergenceError: as `mean_field`.
        """
        found = self._solve(_tap, max_steps, throw)
        eta = found.value
        mean, covariance = self.site.mean(eta), self.site.fisher(eta)
        echo = 0.25 * torch.einsum("ijab,jbc,ijdc,ida->", self.coupling, covariance, self.coupling, covariance)
        level = self._free(eta, mean) + self.interaction(mean) + echo
        # A field adds to eta as the map does: ∂mean/∂field = C (I − ∂map/∂eta)⁻¹.
        jacobian = torch.func.jacrev(lambda eta: eta - _tap(eta, self))(eta).reshape(eta.numel(), -1)
        response = _blocks(covariance) @ torch.linalg.inv(jacobian)
        return Magnetisation(mean, response.reshape(*mean.shape, *mean.shape), level, found)

    def _free(self, eta: Tensor, mean: Tensor) -> Tensor:
        """Σ_i A_i(eta_i) − A_i(0) − eta_i·mean_i: minus the divergence of the sites' laws from their measures."""
        rise = self.site.log_partition(eta) - self.site.log_partition(torch.zeros_like(eta))
        return (rise - (eta * mean).sum(-1)).sum()

    def _solve(self, equations: Callable[[Tensor, "SpinModel"], Tensor], max_steps: int, throw: bool) -> FixedPoint:
        start = torch.zeros_like(self.coupling[0, :, 0])
        return fixed_point(equations, start, (self,), item_dims=2, max_steps=max_steps, throw=throw)


register(SpinModel)


def _mean_field(eta: Tensor, model: SpinModel) -> Tensor:
    return model.field(model.site.mean(eta))


def _tap(eta: Tensor, model: SpinModel) -> Tensor:
    covariance = model.site.fisher(eta)
    echo = torch.einsum("ijab,jbc,ijdc->iad", model.coupling, covariance, model.coupling)
    slope = torch.func.grad(lambda point: 0.5 * (echo * model.site.fisher(point)).sum())(eta)
    return _mean_field(eta, model) + (_inverse(covariance) @ slope.unsqueeze(-1)).squeeze(-1)


def _inverse(covariance: Tensor) -> Tensor:
    """Of each site's covariance; 0 in directions in which a site cannot move."""
    if covariance.shape[-1] > 1:
        return torch.linalg.pinv(covariance, hermitian=True)
    stuck = covariance == 0
    return torch.where(stuck, 0.0, 1 / torch.where(stuck, 1.0, covariance))


def _blocks(covariance: Tensor) -> Tensor:
    """(N, d, d) as the block-diagonal matrix (N·d, N·d)."""
    number, size, _ = covariance.shape
    same = torch.eye(number, dtype=covariance.dtype, device=covariance.device)
    return torch.einsum("ij,iab->iajb", same, covariance).reshape(number * size, number * size)


def _as_matrix(coupling: Tensor) -> Tensor:
    """(N, N, d, d) as (N·d, N·d)."""
    number, _, size, _ = coupling.shape
    return coupling.transpose(1, 2).reshape(number * size, number * size)


def _check_coupling(coupling: Tensor) -> None:
    if not bool(coupling.isfinite().all()):
        raise ValueError("coupling must be finite")
    own = coupling.diagonal(dim1=0, dim2=1).abs().amax().item()
    if own > 0:
        raise ValueError(f"a site must not couple to itself, got a coupling[i, i] of size {own:.4g}")
    difference = (coupling - coupling.permute(1, 0, 3, 2)).abs().amax().item()
    if difference > 1e-6 * max(1.0, coupling.abs().amax().item()):
        raise ValueError(
            f"coupling[i, j] must be the transpose of coupling[j, i], got a difference of {difference:.4g}"
        )
