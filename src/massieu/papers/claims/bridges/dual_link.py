"""X8: scores with link-transformed keys are divergences."""

from collections.abc import Callable, Iterator

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
"""Members whose weighted points are the measure itself."""


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
    """Every pair of parameters: the divergence and A* are summed over points."""
    name = member.name
    measure = member.measure
    eta = member.eta
    tolerance = CLOSED_FORM if name in _SUMMED_EXACTLY else QUADRATURE
    log_share = member.log_share(eta)
    share = log_share.exp()
    # Rows are queries, columns keys.
    divergence = (share * log_share).sum(-1) - log_share @ share.T
    conjugate = (share * (log_share - member.log_density - member.log_volume)).sum(-1)
    log_partition = member.log_partition(eta).unsqueeze(-1)
    scores = eta @ measure.mean(eta).T
    expected = log_partition - divergence + conjugate
    yield close(f"{name}: η·∇A(η′) and A(η) − KL + A*", scores, expected, tolerance)
    biased = torch.softmax(conjugate - divergence, -1)
    yield close(
        f"{name}: weights of keys ∇A(η′) and those ∝ e^(A* − KL)",
        _weights(Atoms.create(measure.mean(eta)), eta),
        biased,
        tolerance,
    )
    kernel = divergence_kernel(measure, eta)
    smoothed = torch.softmax(-divergence, -1)
    yield close(f"{name}: weights with A* subtracted and those ∝ e^(−KL)", _weights(kernel, eta), smoothed, tolerance)
    evidence = (log_partition - divergence).logsumexp(-1)
    yield close(f"{name}: log-partition and A + log Σ e^(−KL)", kernel.log_partition(eta), evidence, tolerance)
    if name == "atoms":
        yield at_least(
            "atoms: weights with and without A*, largest difference", (biased - smoothed).abs().max(), 1e4 * CLOSED_FORM
        )


def _weights(kernel: Atoms, eta: Tensor) -> Tensor:
    return kernel.expectation(eta, torch.eye(len(eta), dtype=torch.float64))


def _mahalanobis(normal: Normal, draws: int) -> Iterator[Check]:
    location = normal(3)
    root = normal(3, 3)
    covariance = torch.eye(3).double() + root @ root.T
    eta = 0.5 * normal(draws, 3)
    keys = location + eta @ covariance
    apart = keys.unsqueeze(-2) - keys
    distance = (apart * torch.linalg.solve(covariance, apart.mT).mT).sum(-1)
    kernel = divergence_kernel(Gaussian.create(location, covariance), eta)
    yield close("Gaussian: keys ∇A(η′) and μ + Ση′", kernel.points, keys)
    expected = torch.softmax(-0.5 * distance, -1)
    yield close("Gaussian: weights and those ∝ e^(−½ Mahalanobis²)", _weights(kernel, eta), expected)


def _links(normal: Normal, draws: int) -> Iterator[Check]:
    eta = normal(draws, 4)
    half = torch.full((4,), 0.5).double()
    one = torch.ones(4).double()
    links: dict[str, tuple[Measure, Callable[[Tensor], Tensor]]] = {
        "Bernoulli: ∇A and σ": (Bernoulli.create(half), torch.sigmoid),
        "Poisson: ∇A and exp": (Poisson.create(one), torch.exp),
        "spins: ∇A and tanh": (Spin.create(0 * one), torch.tanh),
        "categorical: ∇A and softmax": (Categorical.create(half / 2), lambda eta: eta.softmax(-1)),
    }
    for name, (measure, link) in links.items():
        yield close(name, divergence_kernel(measure, eta).points, link(eta))
