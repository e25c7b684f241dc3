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
    # With one head, or one token, all weights are 1.
    check_at_least(2, heads=heads, tokens=tokens)
    normal = normal_draws(seed)
    log_prior = torch.log_softmax(normal(heads), -1)  # log π
    eta = normal(draws, dimensions)
    projections = normal(heads, dimensions, dimensions) * dimensions**-0.5
    keys = normal(tokens, dimensions) @ projections.mT  # (heads, tokens, dimensions)
    uniform = torch.full((heads, tokens), -math.log(tokens), dtype=torch.float64)
    mixed = mixture(log_prior, Atoms.create(keys, uniform))

    # A and its gradient: one softmax over all pairs of a head and a token.
    joint = torch.einsum("qd,and->qan", eta, keys) + uniform + log_prior.unsqueeze(-1)
    pair_weights = joint.flatten(1).softmax(-1)
    yield close("A and log Σ over (head, token) pairs", mixed.log_partition(eta), joint.logsumexp((1, 2)))
    yield close("∇A and one softmax over the pairs", mixed.mean(eta), pair_weights @ keys.flatten(0, 1))

    # The same head by head: outputs attnₐ, (draws, heads, dimensions), gated by r*; and with the fixed weights π.
    outputs = (joint.softmax(-1).unsqueeze(-1) * keys).sum(-2)
    gate = joint.logsumexp(-1).softmax(-1)
    yield close("shares of the heads and r* ∝ πₐ exp Aₐ", mixed.responsibilities(eta), gate)
    gated_output = (gate.unsqueeze(-1) * outputs).sum(-2)
    gradient = differences(mixed.log_partition, eta)
    yield close("differences of A and Σ r*ₐ attnₐ", gradient, gated_output, GRADIENT_BY_DIFFERENCES)
    fixed_output = log_prior.exp() @ outputs
    gradient = differences(mixed.lower_bound, eta)
    yield close("differences of the bound and Σ πₐ attnₐ", gradient, fixed_output, GRADIENT_BY_DIFFERENCES)
    difference = (fixed_output - gated_output).abs().max()
    yield at_least("Σ πₐ attnₐ less Σ r*ₐ attnₐ, largest", difference, 10 * GRADIENT_BY_DIFFERENCES)

    head_log_partitions = joint.logsumexp(-1) - log_prior
    yield from _gaps(mixed, eta, head_log_partitions, normal)
    identical = mixture(log_prior, Atoms.create(keys[:1].expand(heads, -1, -1), uniform))
    gap = identical.log_partition(eta) - identical.lower_bound(eta)
    yield close("identical heads: the gap and 0", gap, 0.0)
    yield from _gaussians(log_prior, eta, normal)
    yield from _kernel_density(normal(tokens, dimensions), eta, normal)


def _gaps(
    mixed: Mixture, eta: Tensor, head_log_partitions: Float[Tensor, "draws heads"], normal: Normal
) -> Iterator[Check]:
    """A less the bound, for r = π, for other r, and for r = r* of the first query."""
    log_prior = mixed.log_weight
    log_gate = torch.log_softmax(log_prior + head_log_partitions, -1)  # log r*
    log_random = torch.log_softmax(normal(len(log_prior)), -1)
    for name, log_r in {"r = π": log_prior, "any r": log_random, "r = r*(η₁)": log_gate[0]}.items():
        weights = log_r.exp()
        bound = mixed.lower_bound(eta, weights)
        expected = (weights * (head_log_partitions - log_r + log_prior)).sum(-1)
        yield close(f"{name}: the bound and Σ rₐAₐ − KL(r ‖ π)", bound, expected)
        gap = mixed.log_partition(eta) - bound
        divergence = (weights * (log_r - log_gate)).sum(-1)
        yield close(f"{name}: the gap and KL(r ‖ r*)", gap, divergence)
        yield at_least(f"{name}: the gap", gap, -_ROUNDING)
        if name == "r = r*(η₁)":
            yield close(f"{name}: the gap at η₁ and 0", gap[0], 0.0)


def _gaussians(log_prior: Tensor, eta: Tensor, normal: Normal) -> Iterator[Check]:
    """The bound of Gaussian heads is log Z of one Gaussian with their mean location and covariance."""
    heads = len(log_prior)
    dimensions = eta.shape[-1]
    prior = log_prior.exp()
    locations = normal(heads, dimensions)
    roots = normal(heads, dimensions, dimensions) * dimensions**-0.5
    covariances = roots @ roots.mT
    mixed = mixture(log_prior, Gaussian.create(locations, covariances))
    covariance = torch.einsum("a,aij->ij", prior, covariances)
    bound = eta @ (prior @ locations) + 0.5 * ((eta @ covariance) * eta).sum(-1)
    yield close("Gaussian heads: the bound and (Σ πₐμₐ)·η + ½ηᵀ(Σ πₐΣₐ)η", mixed.lower_bound(eta), bound)
    expected = prior @ locations + eta @ covariance
    gradient = differences(mixed.lower_bound, eta)
    # The differences' rounding is in units of the bound.
    tolerance = GRADIENT_BY_DIFFERENCES * (1 + bound.abs().max().item())
    yield close("Gaussian heads: differences of the bound and Σ πₐ(μₐ + Σₐη)", gradient, expected, tolerance)


def _kernel_density(keys: Tensor, eta: Tensor, normal: Normal) -> Iterator[Check]:
    """Keys with Gaussian noise of covariance S add ½ηᵀSη to A, in two ways to make such a measure."""
    count, dimensions = keys.shape
    root = normal(dimensions, dimensions) * dimensions**-0.5
    covariance = root @ root.T
    uniform = torch.full((count,), -math.log(count), dtype=torch.float64)
    scores = eta @ keys.T
    log_partition = scores.logsumexp(-1) - math.log(count) + 0.5 * ((eta @ covariance) * eta).sum(-1)
    mean = scores.softmax(-1) @ keys + eta @ covariance
    noise = Gaussian.create(torch.zeros(dimensions, dtype=torch.float64), covariance)
    measures = {
        "mixture": mixture(uniform, Gaussian.create(keys, covariance.expand(count, -1, -1))),
        "convolution": convolve(Atoms.create(keys, uniform), noise),
    }
    for kind, measure in measures.items():
        name = f"kernel density, as a {kind}"
        yield close(f"{name}: A and lse(Xη) − log N + ½ηᵀSη", measure.log_partition(eta), log_partition)
        yield close(f"{name}: ∇A and attention + Sη", measure.mean(eta), mean)
    identity = torch.eye(dimensions, dtype=torch.float64)
    name = "S = −I, as in the Hopfield energy: no measure"
    yield all_raise(name, ValueError, lambda: Gaussian.create(keys[0], -identity))


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
    output = scores.softmax(-1) @ keys
    background_mean = location + eta @ covariance
    log_background = math.log(concentration) + eta @ location + 0.5 * ((eta @ covariance) * eta).sum(-1)
    log_parts = torch.stack([scores.logsumexp(-1), log_background], -1)
    log_partition = log_parts.logsumexp(-1)
    share = log_parts.softmax(-1)[:, 1:]
    expected = (1 - share) * output + share * background_mean
    yield close("A and log(Σ wₙe^(xₙ·η) + c e^(μ·η + ½ηᵀΣη))", mixed.log_partition(eta), log_partition)
    yield close("∇A and (1 − s)·attention + s·(μ + Ση)", mixed.mean(eta), expected)
    yield close("the Gaussian's responsibility and s", mixed.responsibilities(eta)[:, 1:], share)
    # The differences' rounding is in units of A.
    tolerance = GRADIENT_BY_DIFFERENCES * (1 + log_partition.abs().max().item())
    yield close("differences of A and ∇A", differences(mixed.log_partition, eta), expected, tolerance)
    log_mass = (log_weight.exp().sum() + concentration).log()
    yield close("A(0) and log(Σ wₙ + c)", mixed.log_partition(torch.zeros_like(eta[0])), log_mass)

    # c = 10^±200 is e^±460, while the rest of A is less than e^50: the smaller part is below rounding.
    only_keys = hybrid(measure, background, 1e-200)
    yield close("c = 10⁻²⁰⁰: ∇A and attention", only_keys.mean(eta), output)
    only_background = hybrid(measure, background, 1e200)
    yield close("c = 10²⁰⁰: ∇A and μ + Ση", only_background.mean(eta), background_mean)
    far = 50 * math.sqrt(dimensions) * torch.nn.functional.normalize(eta)
    yield at_most("‖η‖ = 50√d: share of the keys", mixed.responsibilities(far)[:, 0], _ROUNDING)
    yield from _sink(measure, eta, concentration)


def _sink(measure: Atoms, eta: Tensor, weight: float) -> Iterator[Check]:
    """A point mass at 0 of weight e^b: attention times Z/(Z + e^b)."""
    scores = eta @ measure.points.T + measure.log_weight
    sink = Constant.create(torch.zeros_like(measure.points[0]))
    mixed = mixture(torch.tensor([0.0, math.log(weight)], dtype=torch.float64), [measure, sink])
    partition = scores.exp().sum(-1, keepdim=True)
    expected = partition / (partition + weight) * (scores.softmax(-1) @ measure.points)
    yield close("point mass at 0: ∇A and attention·Z/(Z + e^b)", mixed.mean(eta), expected)
