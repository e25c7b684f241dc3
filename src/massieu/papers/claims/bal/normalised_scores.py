"""B18: attention without softmax, by normalised scores."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, HESSIAN_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory.normalized import ScoreDeviation

_ROUNDING = 1e-12
_GAP = 4.0
"""First eigenvalue over the second, at least: each step shrinks the other axes' share by it."""


@claim(
    "B18",
    title="Normalised attention without softmax",
    statement="Attention with weights g(zₙ − z̄)/σ + b over keys = values is the gradient of gNσ + bN z̄, with σ "
    "the standard deviation of the logits. For b = 0 the energy ½‖q‖² − cσ falls along its iteration. The fixed "
    "points are the keys' principal axes of length c√λ; the limit is the first of them, with the minimum −½c²λ₁.",
    source="Bal §3.1, where the method of Richter and Wattenhofer is cited; its energy is derived",
    status="quoted",
)
def normalised_scores(
    atoms: int = 20, dimensions: int = 4, draws: int = 20, g: float = 0.7, b: float = 0.2, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, dimensions=dimensions)
    # Fewer keys have no covariance of full rank.
    check_at_least(dimensions + 1, atoms=atoms)
    # The potential is convex for positive g only.
    check_at_least(1e-3, g=g)
    normal = normal_draws(seed)
    keys = normal(atoms, dimensions)
    query = normal(draws, dimensions)
    potential = ScoreDeviation.create(keys, gain=g * atoms, bias=b * atoms)
    weights = potential.weights(query)
    scores = query @ keys.T
    deviation = scores.std(-1, correction=0, keepdim=True)
    centred = scores - scores.mean(-1, keepdim=True)
    formula = g * centred / deviation + b
    yield close("weights and g(zₙ − z̄)/σ + b", weights, formula)
    yield close("the output and Σ weights·kₙ", potential.mean(query), formula @ keys)
    output_scale = 1 + atoms * (g + abs(b))
    slope = differences(potential.log_partition, query)
    yield close(
        "differences of gNσ + bN z̄ and the output", slope, potential.mean(query), output_scale * GRADIENT_BY_DIFFERENCES
    )
    second = differences(potential.mean, query, 1e-4)
    curvature = torch.func.vmap(torch.func.hessian(potential.log_partition))(query)
    yield close(
        "differences of the output and ∇²(gNσ + bN z̄)", second, curvature, output_scale * HESSIAN_BY_DIFFERENCES
    )
    least = torch.linalg.eigvalsh(curvature).amin(-1)
    yield at_least("least eigenvalue of ∇²(gNσ + bN z̄): convex", least, -_ROUNDING * output_scale)
    yield close("sum of the weights and bN", weights.sum(-1), b * atoms)
    # σ = √(qᵀΣ̂q) with the covariance Σ̂ of the keys.
    centred_keys = keys - keys.mean(0)
    product = query @ (centred_keys.T @ centred_keys / atoms)
    update = ScoreDeviation.create(keys, gain=1.0).mean(query)
    root = (query * product).sum(-1, keepdim=True).sqrt()
    yield close("gN = 1, b = 0: output and Σ̂q/√(qᵀΣ̂q)", update, product / root)
    # zₙ − z̄ ≤ σ√(N − 1) (Samuelson), so weights that sum to one put the output outside the hull for gN > √(N − 1).
    output = ScoreDeviation.create(keys, gain=float(atoms), bias=1.0).mean(query)
    beyond = ((output * query).sum(-1) - scores.amax(-1)) / scores.std(-1, correction=0)
    yield at_least("g = 1, b = 1/N: (output·q − max zₙ)/σ", beyond, atoms - math.sqrt(atoms - 1) - _ROUNDING * atoms)
    yield from _principal_axes(normal, atoms, query)


def _principal_axes(normal: Normal, atoms: int, query: Tensor) -> Iterator[Check]:
    """For b = 0 the fixed points are the keys' principal axes of length c√λ, and iteration ends in the first of them."""
    dimensions = query.shape[-1]
    c = 1.5
    # Keys whose covariance has these axes and deviations to rounding: the first deviation is one.
    sample = normal(atoms, dimensions)
    white = torch.linalg.qr(sample - sample.mean(0))[0] * math.sqrt(atoms)
    axes = torch.linalg.qr(normal(dimensions, dimensions))[0]
    deviations = torch.cat([torch.ones(1), torch.linspace(_GAP**-0.5, 0.25, dimensions - 1)]).double()
    memory = ScoreDeviation.create(white * deviations @ axes.T, gain=c)
    hopfield = HopfieldEnergy.create(memory, scale=1.0)

    values, fixed = memory.principal_axes()
    yield close("eigenvalues of Σ̂ and those that the keys were made with", values, deviations.square())
    yield close("principal axes of length c√λ and their image", memory.mean(fixed), fixed)
    path = hopfield.descend(query, steps=60)
    yield at_most("largest rise of ½‖q‖² − cσ in a step", path.energies.diff(dim=0), _ROUNDING)
    # 4^−60 < 1e-36.
    end = path.states[-1]
    sign = torch.sign(end @ axes[:, :1])
    yield close("iterated 60 times: q and ± the first axis of length c√λ₁", end, sign * c * axes[:, 0])
    least = path.energies[-1] - hopfield.constant
    yield close("½‖q‖² − cσ there and −½c²λ₁", least, torch.full_like(least, -0.5 * c**2))
    yield at_least("½‖q‖² − cσ + ½c²λ₁ elsewhere", path.energies - hopfield.constant + 0.5 * c**2, -_ROUNDING)
