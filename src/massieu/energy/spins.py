"""Spin models: sites with any measure, pairwise couplings, and what is approximately or exactly known of them.

    p(S) ∝ exp(½ Σ_ij S_iᵀ J_ij S_j) Π ρ_i(dS_i),  J_ii = 0, J_ji = J_ijᵀ,

with fields in the measures ρ_i, which a field tilts: `Spin.create(field)` makes Ising's model, `Categorical` Potts's,
`Sphere` vector spins, `Gaussian` a model that is solved exactly. Every approximation returns the means, the evidence
log Z it stands for, and how its fixed point was found (B13, B14).
"""

from collections.abc import Callable
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import sites
from massieu.energy.adaptive import MagnetisationResult, adaptive_tap
from massieu.energy.sites import as_matrix, block_diagonal, identity_like
from massieu.foundation import matrices
from massieu.foundation.arguments import check_finite, floating, instance
from massieu.foundation.transforms import all_true, unwrapped, values_are_readable
from massieu.foundation.values import Value, need_batch
from massieu.measures import Gaussian, Measure, Spin
from massieu.solve import Auto, fixed_point
from massieu.solve.status import FixedPointResult


class SpinModel(Value):
    """A mean-field model of coupled spins: its sites (single-spin measures) and couplings. Use `create`, which checks.

    Attributes:
        site: N independent probabilities on R^d: batch shape (N,), event shape (d,).
        coupling: J, (N, N, d, d).

    Example:
        >>> import torch
        >>> from massieu.energy import SpinModel
        >>> from massieu.measures import Spin
        >>> pair = SpinModel.create(Spin.create(torch.zeros(2, 1)), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> round(pair.exact().log_partition.exp().item(), 3)  # cosh 1
        1.543
    """

    site: Measure
    coupling: Float[Tensor, "N N d d"]

    @classmethod
    def create(cls, site: Measure, coupling: Float[Tensor, "N N"] | Float[Tensor, "N N d d"]) -> Self:
        """A model; couplings (N, N) couple equal components. Computed in the wider of both dtypes, at least float32.

        A measure without batch whose coordinates are independent, such as `Spin.create(field)` with a field (N,), stands
        for N sites of one component.

        Raises:
            TypeError: no measure, or a coupling that is not floating-point.
            ValueError: shapes that do not fit; couplings that are not finite, not symmetric, or of a site with itself;
                Gaussian sites for which Z is infinite.
        """
        instance("site", site, Measure, "a measure")
        floating("coupling", coupling)
        if isinstance(site, Spin) and site.batch_shape == ():
            site = Spin(site.field.unsqueeze(-1))
        if len(site.batch_shape) != 1 or len(site.event_shape) != 1:
            shapes = f"{tuple(site.batch_shape)} and {tuple(site.event_shape)}"
            raise ValueError(f"site must have batch shape (N,) and event shape (d,), got {shapes}")
        number = site.batch_shape[0]
        size = site.event_shape[0]
        of_sites = (number, number)
        of_components = (number, number, size, size)
        shape = tuple(coupling.shape)
        if shape not in (of_sites, of_components):
            raise ValueError(f"coupling must have shape {of_sites} or {of_components}, got {shape}")
        if coupling.ndim == 2:
            coupling = coupling[:, :, None, None] * torch.eye(size, dtype=coupling.dtype, device=coupling.device)
        coupling = coupling.to(site.mean(coupling.new_zeros(number, size)).dtype)
        _check_coupling(coupling.detach())
        if isinstance(site, Gaussian) and values_are_readable(coupling):
            _check_gaussian_normaliser(site, coupling.detach())
        return cls(site, coupling)

    def interaction(self, state: Float[Tensor, "*items N d"]) -> Float[Tensor, "*items"]:
        """½ Σ_ij S_iᵀ J_ij S_j, nats: minus the energy, the sites' measures apart."""
        return 0.5 * (self.field(state) * state).sum((-2, -1))

    def field(self, state: Float[Tensor, "*items N d"]) -> Float[Tensor, "*items N d"]:
        """Σ_j J_ij S_j: what tilts the measure of site i, given the others.

        Raises:
            TypeError: a state that is not floating-point.
            ValueError: one that is not of shape (*items, N, d).
        """
        need_batch("SpinModel", "a state", floating("state", state).shape, (), self.coupling.shape[1::2])
        self._check_device(state=state)
        dtype = torch.promote_types(state.dtype, self.coupling.dtype)
        return torch.einsum("ijab,...jb->...ia", self.coupling.to(dtype), state.to(dtype))

    # Exact results.

    def exact(self) -> MagnetisationResult:
        """Means, covariances and log Z by going through all states, or in closed form for Gaussian sites (B14).

        Raises:
            ValueError: sites with infinitely many states, or more than 2^20 states in all.
        """
        if isinstance(self.site, Gaussian):
            return self._exact_gaussian()
        number = self.site.batch_shape[0]
        levels = sites.num_states_per_site(self.site)
        if levels is None or levels**number > sites.MAX_STATES:
            raise ValueError(
                f"exact results need at most 2^20 states, or Gaussian sites, got {number} sites of "
                f"{'infinitely many' if levels is None else levels} states"
            )
        points, log_weight = sites.states_per_site(self.site, self.coupling)
        # All combinations of the sites' states: their numbers (S, N), the vectors themselves (S, N, d).
        site_index = torch.arange(number, device=self.coupling.device)
        level_index = torch.arange(levels, device=self.coupling.device)
        combination = torch.cartesian_prod(*[level_index] * number).reshape(-1, number)
        state = points[site_index, combination]
        log_p = self.interaction(state) + log_weight[site_index, combination].sum(-1)
        log_z = torch.logsumexp(log_p, 0)
        p = (log_p - log_z).exp()
        mean = torch.einsum("s,sia->ia", p, state)
        # The covariance as one matrix over sites and components, (N·d, N·d).
        deviation = (state - mean).flatten(1)
        return _result(mean, (p.unsqueeze(-1) * deviation).mT @ deviation, log_z)

    def _exact_gaussian(self) -> MagnetisationResult:
        """Means (I − ΣJ)⁻¹ location and covariances (I − ΣJ)⁻¹Σ; I − ΣJ is invertible for singular Σ too."""
        assert isinstance(self.site, Gaussian)
        location = self.site.location
        covariance = block_diagonal(self.site.fisher(torch.zeros_like(location)))
        system = identity_like(covariance) - covariance @ as_matrix(self.coupling)
        mean = matrices.solve(system, location.flatten().unsqueeze(-1)).reshape(location.shape)
        log_z = 0.5 * (location * self.field(mean)).sum() - 0.5 * matrices.log_determinant(system)
        return _result(mean, matrices.solve(system, covariance), log_z)

    # Approximations.

    def mean_field(
        self, *, damping: float = 0.5, rtol: float | None = None, max_steps: int = 1000, throw: bool = True
    ) -> MagnetisationResult:
        """m_i = ∇A_i(Σ_j J_ij m_j), each site in the mean field of the others; log Z is a lower bound (B13).

        Its error in the means falls as the square of the couplings' strength. Exact means for Gaussian sites (B14).

        Args:
            damping, rtol, max_steps, throw: As for `massieu.solve.fixed_point`. Sites that repel each other in large
                numbers need a damping of 2/(1 + λ) or less, −λ the least eigenvalue of the couplings times variances.

        Raises:
            ConvergenceError: no fixed point was found, as in a glassy model, and `throw`; otherwise
                `solution.status` tells.
        """
        solution = self._solve(_mean_field, damping, rtol, max_steps, throw)
        eta = solution.value
        mean = self.site.mean(eta)
        log_partition = self._minus_divergence(eta) + self.interaction(mean)
        # Linear response: the covariance R solves (C⁻¹ − J)R = I, here multiplied by C, which may be singular.
        block = block_diagonal(self.site.fisher(eta))
        response = matrices.solve(identity_like(block) - block @ as_matrix(self.coupling), block)
        return _result(mean, response, log_partition, solution)

    def tap(
        self, *, damping: float = 0.5, rtol: float | None = None, max_steps: int = 1000, throw: bool = True
    ) -> MagnetisationResult:
        """The mean field less each site's own echo: the second order in the couplings (Thouless, Anderson, Palmer; B13).

        The field of site i is Σ_j J_ij m_j + ½ C_i⁻¹ ∇ Σ_j tr(J_ij C_j J_ji C_i), C the sites' covariances, which is
        −m_i Σ_j J_ij² (1 − m_j²) for spins and 0 for Gaussian sites (trap 31). Errors fall as the cube of the couplings.
        Arguments and errors are those of `mean_field`.
        """
        solution = self._solve(_tap, damping, rtol, max_steps, throw)
        eta = solution.value
        mean = self.site.mean(eta)
        covariance = self.site.fisher(eta)
        # ¼ Σ_ij tr(J_ij C_j J_ji C_i): the term of second order in Plefka's expansion of log Z.
        echo = 0.25 * torch.einsum("ijab,jbc,ijdc,ida->", self.coupling, covariance, self.coupling, covariance)
        log_partition = self._minus_divergence(eta) + self.interaction(mean) + echo
        # A field adds to eta as the map does: ∂mean/∂field = C (I − ∂map/∂eta)⁻¹.
        jacobian = torch.func.jacrev(lambda eta: eta - _tap(eta, self))(eta).reshape(eta.numel(), -1)
        response = block_diagonal(covariance) @ torch.linalg.inv(jacobian)
        return _result(mean, response, log_partition, solution)

    def adaptive_tap(
        self, *, damping: float = 0.5, rtol: float | None = None, max_steps: int = 1000, throw: bool = True
    ) -> MagnetisationResult:
        """Each site's reaction to itself solved for, not expanded (Opper and Winther 2001; B13).

        The law of site i is tilted by Σ_j J_ij m_j − V_i m_i and by ½ SᵀV_iS; Λ_i = V_i + C_i⁻¹, and the V_i are those at
        which the blocks of (Λ − J)⁻¹ on the diagonal are the sites' covariances C_i. The covariance returned is this
        (Λ − J)⁻¹. log Z, the free energy of these equations, is stationary in means and V: its gradients are ⟨S_i⟩ in the
        field of a site and (Λ − J)⁻¹_ij + ⟨S_i⟩⟨S_j⟩ᵀ in J_ij. Errors of means and log Z fall as the cube of the couplings,
        that of the covariance as the square, since V is held there. Exact for Gaussian sites, where V_i drops out of
        the means (B14). Arguments as for `mean_field`.

        `solution.value` holds the means and V side by side, (N, d, 1 + d).

        Raises:
            ValueError: sites that are neither Gaussian nor of finitely many states nor spheres in two or three dimensions;
                spheres in fields so strong that the rule for them is not exact.
            ConvergenceError: as `mean_field`; also at a saddle, where (Λ − J)⁻¹ is no covariance. With
                ``throw=False`` the status is then NOT_ATTRACTING and log Z is NaN.
        """
        return adaptive_tap(self.site, self.coupling, damping=damping, rtol=rtol, max_steps=max_steps, throw=throw)

    def _minus_divergence(self, eta: Tensor) -> Tensor:
        """Minus the KL divergence of the sites' laws from their measures: Σ_i A_i(eta_i) − A_i(0) − eta_i·mean_i.

        Computed as a divergence, which keeps its digits where it is small, as under weak couplings. The difference would not.
        """
        return -self.site.kl(eta, torch.zeros_like(eta)).sum()

    def _solve(
        self,
        equations: Callable[[Tensor, "SpinModel"], Tensor],
        damping: float,
        rtol: float | None,
        max_steps: int,
        throw: bool,
    ) -> FixedPointResult:
        start = torch.zeros_like(self.coupling[0, :, 0])
        return fixed_point(
            equations,
            start,
            (self,),
            method=Auto(damping=damping),
            item_dims=2,
            rtol=rtol,
            max_steps=max_steps,
            throw=throw,
        )


def _result(
    mean: Tensor, response: Tensor, log_partition: Tensor, solution: FixedPointResult | None = None
) -> MagnetisationResult:
    """The result, with the response (N·d, N·d) as blocks (N, d, N, d)."""
    return MagnetisationResult(mean, response.reshape(*mean.shape, *mean.shape), log_partition, solution)


def _mean_field(eta: Tensor, model: SpinModel) -> Tensor:
    """The fields Σ_j J_ij m_j that follow from the fields eta, (N, d)."""
    return model.field(model.site.mean(eta))


def _tap(eta: Tensor, model: SpinModel) -> Tensor:
    """The mean field and the echo ½ C_i⁻¹ ∇ tr(Σ_j J_ij C_j J_ji C_i), which follow from the fields eta."""
    covariance = model.site.fisher(eta)
    # Σ_j J_ij C_j J_ji is held while the gradient in the site's own field is taken: only C_i moves with it.
    echo = torch.einsum("ijab,jbc,ijdc->iad", model.coupling, covariance, model.coupling)
    slope = torch.func.grad(lambda point: 0.5 * (echo * model.site.fisher(point)).sum())(eta)
    return _mean_field(eta, model) + (_inverse(covariance) @ slope.unsqueeze(-1)).squeeze(-1)


def _inverse(covariance: Tensor) -> Tensor:
    """The pseudo-inverse of each site's covariance: 0 in directions in which a site cannot move."""
    if covariance.shape[-1] > 1:
        return torch.linalg.pinv(covariance, hermitian=True)
    # The inner `where` keeps the gradient of the unused branch finite.
    fixed = covariance == 0
    return torch.where(fixed, 0.0, 1 / torch.where(fixed, 1.0, covariance))


def _check_gaussian_normaliser(site: Gaussian, coupling: Tensor) -> None:
    smallest = unwrapped(torch.linalg.eigvalsh(_gaussian_margin(site, coupling))).amin().item()
    if smallest <= 0:
        raise ValueError(
            f"Gaussian sites have a normaliser where I − Σ^½ J Σ^½ is positive definite; its smallest eigenvalue "
            f"is {smallest:.4g}"
        )


def _gaussian_margin(site: Gaussian, coupling: Tensor) -> Tensor:
    """I − Σ^½ J Σ^½, (N·d, N·d): positive definite where there is a normaliser."""
    covariance = site.fisher(torch.zeros_like(site.location)).detach().to(coupling.dtype)
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    root = block_diagonal(vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2))
    margin = root.mT @ as_matrix(coupling) @ root
    return identity_like(margin) - 0.5 * (margin + margin.mT)


def _check_coupling(coupling: Tensor) -> None:
    check_finite(coupling=coupling)
    self_coupling = coupling.diagonal(dim1=0, dim2=1).abs()
    if not all_true(self_coupling == 0):
        size = unwrapped(self_coupling).amax().item()
        raise ValueError(f"a site must not couple to itself, got a coupling[i, i] of size {size:.4g}")
    difference = (coupling - coupling.permute(1, 0, 3, 2)).abs()
    if not all_true(difference <= 1e-6 * coupling.abs().amax().clamp_min(1.0)):
        size = unwrapped(difference).amax().item()
        raise ValueError(f"coupling[i, j] must be the transpose of coupling[j, i], got a difference of {size:.4g}")
