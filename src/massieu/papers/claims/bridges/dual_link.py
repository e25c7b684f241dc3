"""X8: scores with link-transformed keys are divergences."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    Gaussian,
    Measure,
    Poisson,
    Spin,
    divergence_kernel,
)
from massieu.papers.claims.claim import CLOSED_FORM, QUADRATURE, Check, at_least, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.claims.shim.catalogue import Member, library

_SUMMED_EXACTLY = ("atoms", "point mass", "Bernoulli", "Rademacher", "Poisson", "categorical")
"""Members that are sums of point masses: sums over their points have no error of quadrature."""


@claim(
    "X8",
    title="Dual-link attention",
    statement="η·∇A(η′) = A(η) − KL(p_η′ ‖ p_η) + A*(∇A(η′)). Softmax over the keys ∇A(η′) is therefore a smoother "
    "with the kernel e^{−KL} and the log-bias A*; with A* subtracted, the kernel alone remains. For a Gaussian that "
    "is Mahalanobis distance.",
    source="makes exact Shim §6, a non-linear activation before the dot product; Bregman divergence and conjugate",
    status="derived",
)
def dual_link_scores(draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, draws=draws)
    normal = normal_draws(seed)
    for member in library(normal, draws):
        yield from _kernel_of_divergence(member)
    yield from _mahalanobis(normal, draws)
    yield from _links(normal, draws)


def _kernel_of_divergence(member: Member) -> Iterator[Check]:
    """Every pair of parameters η and η′; KL and A* are sums over the measure's points."""
    name = member.name
    measure = member.measure
    eta = member.eta
    tolerance = QUADRATURE
    if name in _SUMMED_EXACTLY:
        tolerance = CLOSED_FORM
    log_share = member.log_share(eta)
    share = log_share.exp()
    # Rows are queries η, columns keys η′.
    divergence = (share * log_share).sum(-1) - log_share @ share.T
    conjugate = (share * (log_share - member.log_density - member.log_volume)).sum(-1)
    log_partition = member.log_partition(eta).unsqueeze(-1)
    scores = eta @ measure.mean(eta).T
    expected = log_partition - divergence + conjugate
    yield close(f"{name}: η·∇A(η′) and A(η) − KL + A*", scores, expected, tolerance)

    weights = _weights(Atoms.create(measure.mean(eta)), eta)
    with_bias = torch.softmax(conjugate - divergence, -1)
    yield close(f"{name}: weights of keys ∇A(η′) and those ∝ e^(A* − KL)", weights, with_bias, tolerance)
    kernel = divergence_kernel(measure, eta)
    without_bias = torch.softmax(-divergence, -1)
    weights = _weights(kernel, eta)
    yield close(f"{name}: weights with A* subtracted and those ∝ e^(−KL)", weights, without_bias, tolerance)
    expected = (log_partition - divergence).logsumexp(-1)
    yield close(f"{name}: log-partition and A + log Σ e^(−KL)", kernel.log_partition(eta), expected, tolerance)
    if name == "atoms":
        difference = (with_bias - without_bias).abs().max()
        yield at_least("atoms: weights with and without A*, largest difference", difference, 1e4 * CLOSED_FORM)


def _weights(kernel: Atoms, eta: Tensor) -> Tensor:
    """Attention weights: the expectation of the identity's rows."""
    return kernel.expectation(eta, torch.eye(len(eta), dtype=torch.float64))


def _mahalanobis(normal: Normal, draws: int) -> Iterator[Check]:
    """For a Gaussian the divergence is half of Mahalanobis's squared distance of the keys."""
    location = normal(3)
    root = normal(3, 3)
    covariance = torch.eye(3).double() + root @ root.T
    eta = 0.5 * normal(draws, 3)
    keys = location + eta @ covariance
    difference = keys.unsqueeze(-2) - keys
    squared_distance = (difference * torch.linalg.solve(covariance, difference.mT).mT).sum(-1)
    kernel = divergence_kernel(Gaussian.create(location, covariance), eta)
    yield close("Gaussian: keys ∇A(η′) and μ + Ση′", kernel.points, keys)
    expected = torch.softmax(-0.5 * squared_distance, -1)
    yield close("Gaussian: weights and those ∝ e^(−½ Mahalanobis²)", _weights(kernel, eta), expected)


def _links(normal: Normal, draws: int) -> Iterator[Check]:
    """∇A of each family is the link function that is usual for it."""
    eta = normal(draws, 4)
    ones = torch.ones(4).double()

    def keys(measure: Measure) -> Tensor:
        return divergence_kernel(measure, eta).points

    yield close("Bernoulli: ∇A and σ", keys(Bernoulli.create(0.5 * ones)), eta.sigmoid())
    yield close("Poisson: ∇A and exp", keys(Poisson.create(ones)), eta.exp())
    yield close("spins: ∇A and tanh", keys(Spin.create(0 * ones)), eta.tanh())
    yield close("categorical: ∇A and softmax", keys(Categorical.create(0.25 * ones)), eta.softmax(-1))
