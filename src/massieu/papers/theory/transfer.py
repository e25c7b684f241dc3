"""The best prediction of masked tokens, and how well another target can be read off it (Z12, Z13).

Given the latent z tokens are independent, so the best prediction of a masked token is Gs: linear in the posterior s of z, with
one row of G for each coordinate of the masked token. Another target's is Ds. Where D's rows lie in the span of G's (up to
constants), Ds is a linear probe on Gs, and the condition number bounds the error of Ds by that of Gs.

For finitely many latents s is their posterior, a point of the simplex. Latents of infinite number enter through finitely many
features φ(z), G φ(z) being the target's mean given z, and s = E[φ(z) | tokens]: for Dirichlet–multinomial tokens φ(z) = z, on
the simplex again; for Gaussian ones φ(z) = z, in a space without that constraint.

Shapes that do not fit each other, numbers that are not finite or out of their range raise a ValueError, and what is neither
a tensor nor numbers a TypeError.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import (
    as_tensor,
    check_finite,
    check_log_probabilities,
    check_one_device,
    check_range,
    check_shape,
    check_values,
    described,
    doubles,
    number,
    real,
    real_tensor,
)
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true


def masked_mean(
    targets: Float[Tensor, "p k"], log_likelihood: Float[Tensor, "*lead k"], log_prior: Float[Tensor, "k"]
) -> Float[Tensor, "*lead p"]:
    """Best prediction of a masked token with k latents: Gs, s ∝ prior·likelihood, minimises E‖x_m − f(X_obs)‖² (Z12).

    With the probabilities p(x_m = j | z) as G's rows it minimises the cross-entropy too.

    Args:
        targets: G, E[x_m | z] in column z.
        log_likelihood: log p(X_obs | z), nats; −inf for what z excludes, but not for every z.
        log_prior: log π(z), up to a constant.

    Raises:
        ValueError: tokens that every latent excludes, NaN, +inf, shapes that do not fit.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import masked_mean
        >>> even = torch.tensor([0.5, 0.5]).log()
        >>> [round(x, 3) for x in masked_mean(torch.eye(2), torch.tensor([0.9, 0.1]).log(), even).tolist()]
        [0.9, 0.1]
    """
    targets = real_tensor("targets", targets)
    log_likelihood = real_tensor("log_likelihood", log_likelihood)
    log_prior = real_tensor("log_prior", log_prior)
    if targets.ndim != 2 or log_prior.shape != targets.shape[1:] or log_likelihood.shape[-1:] != log_prior.shape:
        raise ValueError(
            "targets, log_likelihood and log_prior must have shapes (p, k), (*lead, k), (k,), got "
            f"{tuple(targets.shape)}, {tuple(log_likelihood.shape)} and {tuple(log_prior.shape)}"
        )
    check_one_device(targets=targets, log_likelihood=log_likelihood, log_prior=log_prior)
    check_finite(targets=targets)
    check_log_probabilities(log_likelihood=log_likelihood, log_prior=log_prior)
    joint = log_likelihood + log_prior
    if not all_true((joint > -math.inf).any(-1)):
        raise ValueError("every latent excludes the tokens: log_likelihood + log_prior must have an entry above −inf")
    dtype = torch.promote_types(joint.dtype, targets.dtype)
    return torch.softmax(joint.to(dtype), -1) @ targets.mT.to(dtype)


def masked_gaussian_mean(
    observed: Float[Tensor, "*lead L d"], prior_mean: Float[Tensor, "d"], prior_weight: float | Tensor
) -> Float[Tensor, "*lead d"]:
    """Best prediction of a masked Gaussian token, (κ₀m₀ + Σ x_ℓ)/(κ₀ + L), for tokens N(z, σ²), z ~ N(m₀, σ²/κ₀) (Z12, Z3).

    As functionals of E[z | X_obs] the targets are G = I.

    Args:
        observed: The L tokens that are not masked.
        prior_mean: m₀.
        prior_weight: κ₀ > 0, in tokens.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import masked_gaussian_mean
        >>> masked_gaussian_mean(torch.tensor([[2.0], [4.0]]), torch.tensor([0.0]), 1.0).tolist()
        [2.0]
    """
    observed = real_tensor("observed", observed)
    prior_mean = real_tensor("prior_mean", prior_mean)
    if observed.ndim < 2:
        raise ValueError(f"observed must have shape (*lead, L, d), got {tuple(observed.shape)}")
    check_shape("prior_mean", prior_mean, observed.shape[-1:])
    weight = as_tensor("prior_weight", prior_weight, prior_mean)
    check_shape("prior_weight", weight, ())
    check_range("prior_weight", weight, above=0)
    check_one_device(observed=observed, prior_mean=prior_mean)
    check_finite(observed=observed, prior_mean=prior_mean)
    return (weight * prior_mean + observed.sum(-2)) / (weight + observed.shape[-2])


def masked_token_probabilities(
    counts: Float[Tensor, "*lead k"], concentration: Float[Tensor, "k"]
) -> Float[Tensor, "*lead k"]:
    """Probabilities (α_j + n_j)/(α₀ + L) of a masked categorical token under a Dirichlet(α) prior (Z12).

    As functionals of E[z | X_obs] the targets are G = I, on the simplex.

    Args:
        counts: n_j, how often token j was observed; L is their sum.
        concentration: α > 0.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import masked_token_probabilities
        >>> masked_token_probabilities(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])).tolist()
        [0.75, 0.25]
    """
    counts = real_tensor("counts", counts)
    concentration = real_tensor("concentration", concentration)
    check_shape("concentration", concentration, ("k",))
    if counts.shape[-1:] != concentration.shape:
        raise ValueError(f"counts must have shape (*lead, {len(concentration)}), got {tuple(counts.shape)}")
    check_one_device(counts=counts, concentration=concentration)
    check_range("concentration", concentration, above=0)
    check_range("counts", counts, least=0)
    posterior = counts + concentration
    return posterior / posterior.sum(-1, keepdim=True)


class TransferResult(NamedTuple):
    """How a downstream target depends on a self-supervised one; on the simplex, along tangent directions t, Σt = 0."""

    condition_number: float
    """κ = ‖Λ‖₂, the largest ‖Dt‖/‖Gt‖; ∞ where the target is not identifiable."""
    ratio_bound: float
    """σ_max(D)/σ_min⁺(G) on the tangent space: κ's bound by singular values; ∞ as κ is."""
    probe: Float[Tensor, "c p"]
    """Λ = DΠ(GΠ)⁺."""
    offset: Float[Tensor, "c"]
    """Λ·(prediction) + offset is the downstream optimum, where it is identifiable."""
    rank: int
    """The rank of GΠ: the number of directions of the posterior that self-supervision fixes."""
    lost: Float[Tensor, "k r"]
    """Orthonormal directions of the posterior on which D depends and G does not; no column for an identifiable target."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    @property
    def identifiable(self) -> bool:
        """Whether the downstream optimum is a function of the self-supervised one."""
        return self.lost.shape[-1] == 0

    def predict(self, prediction: Float[Tensor, "*lead p"]) -> Float[Tensor, "*lead c"]:
        """Λ·prediction + offset; of a target that is not identifiable, the identifiable part, with the rest at the centre."""
        return prediction.to(self.probe.dtype) @ self.probe.mT + self.offset


@door
def transfer(
    self_supervised: Float[Tensor, "p k"],
    downstream: Float[Tensor, "c k"],
    *,
    simplex: bool = True,
    tolerance: float | None = None,
) -> TransferResult:
    """The condition number of reading Ds off Gs, the linear probe that does it, and what cannot be read (Z13).

    With Π = I − 11ᵀ/k (the identity without `simplex`): if the null space of GΠ lies in that of DΠ, then for any two
    posteriors D(s − s') = ΛG(s − s'), ‖D(s − s')‖ ≤ κ‖G(s − s')‖, Λ = DΠ(GΠ)⁺. If not, posteriors with one Gs have
    several Ds: no amount of data of the self-supervised kind determines the target. Leaving Π out on the simplex gives a
    larger number than needed. The paper names a condition number; its definition was not recovered, this one is derived.

    In float64; not differentiable where a rank changes.

    Args:
        self_supervised: G, the masked tokens' means, a latent (or feature) a column.
        downstream: D, the target's means.
        simplex: Whether s has the sum 1.
        tolerance: Singular values at most this share of the matrix's largest (of G or D) count as 0; by default machine
            precision times the larger of the matrix's sides, times 10. For D the default is also multiplied by ‖G‖ over
            the least singular value of G that is kept, since rounding turns G's null space by that much. Estimated
            matrices need a tolerance of the size of their error.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import transfer
        >>> found = transfer(torch.eye(2), 2 * torch.eye(2), simplex=False)
        >>> found.condition_number, found.probe.tolist()
        (2.0, [[2.0, 0.0], [0.0, 2.0]])
    """
    g = _checked_matrix("self_supervised", self_supervised)
    d = _checked_matrix("downstream", downstream)
    if g.shape[1] != d.shape[1]:
        raise ValueError(
            f"self_supervised and downstream must have one number of latents, got shapes {tuple(g.shape)} and {tuple(d.shape)}"
        )
    estimated = tolerance is not None
    if tolerance is None:
        tolerance = 10 * max(*g.shape, *d.shape) * torch.finfo(torch.float64).eps
    else:
        tolerance = number("tolerance", tolerance, least=0, below=1)
    g_tangent = _centred_rows(g) if simplex else g
    d_tangent = _centred_rows(d) if simplex else d
    # Centring rounds relative to the matrix before it, so the floors are shares of that one's norm.
    g_norm = torch.linalg.matrix_norm(g, 2)
    g_floor = tolerance * g_norm
    d_floor = tolerance * torch.linalg.matrix_norm(d, 2)

    left, values, right = torch.linalg.svd(g_tangent, full_matrices=False)
    rank = int((values > g_floor).sum())
    left = left[:, :rank]
    values = values[:rank]
    right = right[:rank]
    if rank and not estimated:
        # Rounding turns the null space of G by up to tolerance·‖G‖/σ, σ the least singular value that is kept (Wedin).
        d_floor = d_floor * (g_norm / values[-1]).clamp_min(1.0)
    probe = (d_tangent @ right.mT / values) @ left.mT
    # The part of D that acts on G's null space.
    _, lost_values, lost = torch.linalg.svd(d_tangent - d_tangent @ right.mT @ right, full_matrices=False)
    lost = lost[lost_values > d_floor].mT
    offset = (d - probe @ g).mean(1) if simplex else torch.zeros_like(d[:, 0])
    if lost.shape[1]:
        condition_number = ratio_bound = math.inf
    elif rank:
        condition_number = torch.linalg.matrix_norm(probe, 2).item()
        ratio_bound = torch.linalg.matrix_norm(d_tangent, 2).item() / values[-1].item()
    else:
        condition_number = ratio_bound = 0.0
    return TransferResult(condition_number, ratio_bound, probe, offset, rank, lost)


@door(condition_number=real, self_supervised_excess=real, density_ratio=real)
def excess_risk_bound(condition_number: float, self_supervised_excess: float, density_ratio: float = 1.0) -> float:
    """Upper bound on a probe's downstream excess risk: κ²·r times the self-supervised excess L2 risk (Z13).

    Args:
        condition_number: κ of `transfer`; ∞ gives ∞.
        self_supervised_excess: E‖ĝ(X) − Gs(X)‖², above the optimum's own risk.
        density_ratio: r, the largest ratio of the downstream inputs' density to the self-supervised ones'; at least 1.

    Example:
        >>> from massieu.papers.theory import excess_risk_bound
        >>> excess_risk_bound(condition_number=2.0, self_supervised_excess=0.1)
        0.4
    """
    _check_at_least("condition_number", condition_number, 0)
    _check_at_least("density_ratio", density_ratio, 1)
    number("self_supervised_excess", self_supervised_excess, least=0)
    if math.inf in (condition_number, density_ratio):
        return math.inf
    return condition_number**2 * density_ratio * self_supervised_excess


def _check_at_least(name: str, value: float, least: int) -> None:
    """Unlike `number` this takes infinity."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _centred_rows(matrix: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
    """The matrix times Π = I − 11ᵀ/k."""
    return matrix - matrix.mean(1, keepdim=True)


def _checked_matrix(name: str, matrix: Tensor) -> Float[Tensor, "m k"]:
    """The matrix in float64, without its gradient."""
    matrix = doubles(name, matrix)
    check_values(**{name: matrix})
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"{name} must have shape (rows, latents) with at least one of each, got {tuple(matrix.shape)}")
    check_finite(**{name: matrix})
    return matrix.detach()
