"""S14, S18: several heads as one mixture, and attention with a continuous background."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Atoms, Constant, Gaussian, convolve, hybrid, mixture
from massieu.measures.mixture import Mixture
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, all_raise, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim

_ROUNDING = 1e-12


# --- S14 -------------------------------------------------------------------------------------------------------------


@claim(
    "S14",
    title="Many heads as a mixture's lower bound",
    statement="For a mixture Σ πₐhₐ of heads, A ≥ Σ rₐAₐ − KL(r ‖ π) for all weights r. The gap is KL(r ‖ r*) with "
    "r* ∝ πₐ exp Aₐ. Heads added with fixed weights π are the gradient of this bound at r = π; the gradient of A "
    "itself is one softmax over all pairs of a head and a token.",
    source="Jensen's inequality; Shim §5 announces a bound for Gaussians in an appendix that was not available",
    status="derived",
)
def heads_as_a_mixture(
    heads: int = 4, tokens: int = 8, dimensions: int = 4, draws: int = 20, seed: int = 0
) -> Iterator[Check]:
    # One head, or one token, leaves nothing to weigh.
    check_at_least(2, heads=heads, tokens=tokens)
    normal = normal_draws(seed)
    log_share = torch.log_softmax(normal(heads), -1)
    eta = normal(draws, dimensions)
    projections = normal(heads, dimensions, dimensions) * dimensions**-0.5
    keys = normal(tokens, dimensions) @ projections.mT
    own = torch.full((heads, tokens), -math.log(tokens), dtype=torch.float64)
    mixed = mixture(log_share, Atoms.create(keys, own))

    joint = torch.einsum("qd,and->qan", eta, keys) + own + log_share.unsqueeze(-1)
    pairs = joint.flatten(1).softmax(-1)
    attended = (joint.softmax(-1).unsqueeze(-1) * keys).sum(-2)
    gate = joint.logsumexp(-1).softmax(-1)
    yield close("A and log Σ over (head, token) pairs", mixed.log_partition(eta), joint.logsumexp((1, 2)))
    yield close("∇A and one softmax over the pairs", mixed.mean(eta), pairs @ keys.flatten(0, 1))
    yield close("shares of the heads and r* ∝ πₐ exp Aₐ", mixed.responsibilities(eta), gate)
    gated = (gate.unsqueeze(-1) * attended).sum(-2)
    by_differences = differences(mixed.log_partition, eta)
    yield close("differences of A and Σ r*ₐ attnₐ", by_differences, gated, GRADIENT_BY_DIFFERENCES)
    fixed = log_share.exp() @ attended
    by_differences = differences(mixed.lower_bound, eta)
    yield close("differences of the bound and Σ πₐ attnₐ", by_differences, fixed, GRADIENT_BY_DIFFERENCES)
    yield at_least("Σ πₐ attnₐ less Σ r*ₐ attnₐ, largest", (fixed - gated).abs().max(), 10 * GRADIENT_BY_DIFFERENCES)

    parts = joint.logsumexp(-1) - log_share
    yield from _gaps(mixed, eta, parts, normal)
    same = mixture(log_share, Atoms.create(keys[:1].expand(heads, -1, -1), own))
    gap = same.log_partition(eta) - same.lower_bound(eta)
    yield close("identical heads: the gap and 0", gap, 0.0)
    yield from _gaussians(log_share, eta, normal)
    yield from _kernel_density(normal(tokens, dimensions), eta, normal)


def _gaps(mixed: Mixture, eta: Tensor, parts: Float[Tensor, "draws heads"], normal: Normal) -> Iterator[Check]:
    """A less the bound, for r = π, for other r, and for r = r* of the first query."""
    log_share = mixed.log_weight
    log_gate = torch.log_softmax(log_share + parts, -1)
    log_other = torch.log_softmax(normal(len(log_share)), -1)
    for name, log_r in {"r = π": log_share, "any r": log_other, "r = r*(η₁)": log_gate[0]}.items():
        weights = log_r.exp()
        bound = mixed.lower_bound(eta, weights)
        written = (weights * (parts - log_r + log_share)).sum(-1)
        yield close(f"{name}: the bound and Σ rₐAₐ − KL(r ‖ π)", bound, written)
        gap = mixed.log_partition(eta) - bound
        divergence = (weights * (log_r - log_gate)).sum(-1)
        yield close(f"{name}: the gap and KL(r ‖ r*)", gap, divergence)
        yield at_least(f"{name}: the gap", gap, -_ROUNDING)
        if name == "r = r*(η₁)":
            yield close(f"{name}: the gap at η₁ and 0", gap[0], 0.0)


def _gaussians(log_share: Tensor, eta: Tensor, normal: Normal) -> Iterator[Check]:
    heads = len(log_share)
    dimensions = eta.shape[-1]
    share = log_share.exp()
    location = normal(heads, dimensions)
    root = normal(heads, dimensions, dimensions) * dimensions**-0.5
    mixed = mixture(log_share, Gaussian.create(location, root @ root.mT))
    covariance = torch.einsum("a,aij->ij", share, root @ root.mT)
    bound = eta @ (share @ location) + 0.5 * ((eta @ covariance) * eta).sum(-1)
    yield close("Gaussian heads: the bound and (Σ πₐμₐ)·η + ½ηᵀ(Σ πₐΣₐ)η", mixed.lower_bound(eta), bound)
    gradient = share @ location + eta @ covariance
    by_differences = differences(mixed.lower_bound, eta)
    # The differences' rounding is in units of the bound.
    tolerance = GRADIENT_BY_DIFFERENCES * (1 + bound.abs().max().item())
    yield close("Gaussian heads: differences of the bound and Σ πₐ(μₐ + Σₐη)", by_differences, gradient, tolerance)


def _kernel_density(keys: Tensor, eta: Tensor, normal: Normal) -> Iterator[Check]:
    count, dimensions = keys.shape
    root = normal(dimensions, dimensions) * dimensions**-0.5
    width = root @ root.T
    equal = torch.full((count,), -math.log(count), dtype=torch.float64)
    scores = eta @ keys.T
    log_partition = scores.logsumexp(-1) - math.log(count) + 0.5 * ((eta @ width) * eta).sum(-1)
    smoothed = scores.softmax(-1) @ keys + eta @ width
    mixed = mixture(equal, Gaussian.create(keys, width.expand(count, -1, -1)))
    noise = Gaussian.create(torch.zeros(dimensions, dtype=torch.float64), width)
    for name, measure in {"mixture": mixed, "convolution": convolve(Atoms.create(keys, equal), noise)}.items():
        expected = "lse(Xη) − log N + ½ηᵀSη"
        yield close(f"kernel density, as a {name}: A and {expected}", measure.log_partition(eta), log_partition)
        yield close(f"kernel density, as a {name}: ∇A and attention + Sη", measure.mean(eta), smoothed)
    energy = torch.eye(dimensions, dtype=torch.float64)
    yield all_raise(
        "S = −I, as in the Hopfield energy: no measure", ValueError, lambda: Gaussian.create(keys[0], -energy)
    )


# --- S18 -------------------------------------------------------------------------------------------------------------


@claim(
    "S18",
    title="Atoms plus a continuous background",
    statement="Σ wₙδ(xₙ) + c·N(μ, Σ) gives ∇A = (1 − s)·attention + s·(μ + Ση), where s is the Gaussian's share of "
    "Z, which tends to 1 far from the origin. If a point mass takes the Gaussian's place, the background is an "
    "attention sink.",
    source="gradient of log Z; Shim §6 names hybrid distributions as future work",
    status="derived",
)
def attention_with_a_background(
    atoms: int = 8, dimensions: int = 4, draws: int = 20, concentration: float = 1.5, seed: int = 0
) -> Iterator[Check]:
    normal = normal_draws(seed)
    log_weight = 0.5 * normal(atoms)
    eta = normal(draws, dimensions)
    keys = normal(atoms, dimensions)
    location = normal(dimensions)
    factor = normal(dimensions, dimensions) * dimensions**-0.5
    covariance = torch.eye(dimensions).double() + factor @ factor.T
    measure = Atoms.create(keys, log_weight)
    background = Gaussian.create(location, covariance)
    mixed = hybrid(measure, background, concentration)

    scores = eta @ keys.T + log_weight
    attended = scores.softmax(-1) @ keys
    moved = location + eta @ covariance
    exponent = math.log(concentration) + eta @ location + 0.5 * ((eta @ covariance) * eta).sum(-1)
    both = torch.stack([scores.logsumexp(-1), exponent], -1)
    share = both.softmax(-1)[:, 1:]
    expected = (1 - share) * attended + share * moved
    yield close("A and log(Σ wₙe^(xₙ·η) + c e^(μ·η + ½ηᵀΣη))", mixed.log_partition(eta), both.logsumexp(-1))
    yield close("∇A and (1 − s)·attention + s·(μ + Ση)", mixed.mean(eta), expected)
    yield close("the Gaussian's responsibility and s", mixed.responsibilities(eta)[:, 1:], share)
    # The differences' rounding is in units of A.
    tolerance = GRADIENT_BY_DIFFERENCES * (1 + both.logsumexp(-1).abs().max().item())
    yield close("differences of A and ∇A", differences(mixed.log_partition, eta), expected, tolerance)
    mass = (log_weight.exp().sum() + concentration).log()
    yield close("A(0) and log(Σ wₙ + c)", mixed.log_partition(torch.zeros_like(eta[0])), mass)

    # Shares of e^±460 and less than e^50 of A: what is left out is below rounding.
    for name, c, limit in (
        ("c = 10⁻²⁰⁰: ∇A and attention", 1e-200, attended),
        ("c = 10²⁰⁰: ∇A and μ + Ση", 1e200, moved),
    ):
        yield close(name, hybrid(measure, background, c).mean(eta), limit)
    far = 50 * math.sqrt(dimensions) * torch.nn.functional.normalize(eta)
    yield at_most("‖η‖ = 50√d: share of the keys", mixed.responsibilities(far)[:, 0], _ROUNDING)
    yield from _sink(measure, eta, concentration)


def _sink(measure: Atoms, eta: Tensor, weight: float) -> Iterator[Check]:
    """A point mass at 0 of weight e^b: attention times Z/(Z + e^b)."""
    scores = eta @ measure.points.T + measure.log_weight
    sink = Constant.create(torch.zeros_like(measure.points[0]))
    mixed = mixture(torch.tensor([0.0, math.log(weight)], dtype=torch.float64), [measure, sink])
    mass = scores.exp().sum(-1, keepdim=True)
    expected = mass / (mass + weight) * (scores.softmax(-1) @ measure.points)
    yield close("point mass at 0: ∇A and attention·Z/(Z + e^b)", mixed.mean(eta), expected)
