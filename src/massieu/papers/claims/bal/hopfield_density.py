"""B6, B7: the Hopfield memory as a mixture of Gaussians, and its maximum-likelihood patterns."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldDensity, HopfieldEnergy
from massieu.measures import Atoms, Categorical, affine
from massieu.papers.claims.claim import BAL, QUADRATURE, Check, as_published, at_least, close, mean_of_draws
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import quadrature
from massieu.papers.claims.registry import claim


@claim(
    "B6",
    title="The Hopfield density is a mixture",
    statement="p ∝ e^{−βE} is exactly Σ w_μ N(v; W_μ, β⁻¹I) with w_μ ∝ e^{½β‖W_μ‖²} and, for E without constants, "
    "Z = (2π/β)^{d/2} Σ e^{½β‖W_μ‖²}; its responsibilities are the attention weights, and attention is its denoiser, "
    "v + β⁻¹∇log p(v).",
    source=f"{BAL}, §2.4",
    status="quoted",
    published="Z_μ = e^{½‖W_μ‖²}, and the mixture's weights are Z_μ/Z.",
    corrected="Those weights sum to (2π)^{−d/2}: (2π)^{d/2} belongs into Z_μ. With β ≠ 1 the density is e^{−βE}; e^{−E} is no "
    "mixture. The weights are near uniform only where norms differ by much less than 2/β in their squares.",
)
def hopfield_density(patterns: int = 5, draws: int = 20_000, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, patterns=patterns)
    normal = normal_draws(seed)
    scale = 1.6
    stored = normal(patterns, 2)
    energy = HopfieldEnergy.create(stored, scale=scale)
    log_shares = 0.5 * scale * stored.square().sum(-1)
    weights = torch.softmax(log_shares, -1)
    pattern_weights = HopfieldDensity.create(energy).log_pattern_weights.exp()
    yield close("w and softmax(½β‖W‖²)", pattern_weights, weights)
    yield from _normaliser(energy, log_shares, scale)
    yield from _pointwise(energy, 2 * normal(50, 2), stored, weights, scale)

    # The published Z_μ lacks (2π/β)^{d/2}, with d = 2.
    published_shares = log_shares.exp() / (2 * math.pi / scale * log_shares.exp().sum())
    yield as_published(close("Σ Z_μ/Z with Z_μ = e^(½β‖W_μ‖²)", published_shares.sum(), 1.0))
    yield close("Σ Z_μ/Z with (2π/β)^(d/2) in Z_μ", published_shares.sum() * 2 * math.pi / scale, 1.0)
    yield from _distance_from_mixture(energy, stored, weights, scale)
    yield from _samples(energy, stored, weights, scale, draws, seed)
    yield from _categorical_machine(normal, stored)


def _plane(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes of a quadrature of the plane, (nodes, 2), and their log-weights."""
    # The mixture's width is 0.8: beyond 8 from every pattern there is nothing left.
    reach = 8 + float(stored.abs().max())
    nodes, log_weight = quadrature(-reach, reach, panels=12)
    grid = torch.cartesian_prod(nodes, nodes)
    return grid, torch.cartesian_prod(log_weight, log_weight).sum(-1)


def _normaliser(energy: HopfieldEnergy, log_shares: Tensor, scale: float) -> Iterator[Check]:
    """Z = (2π/β)^{d/2} Σ e^{½β‖W_μ‖²}, for E without constants."""
    grid, log_cell = _plane(energy.memory.points)
    log_z = torch.logsumexp(log_cell - scale * energy(grid), -1)
    closed_form = HopfieldDensity.create(energy).log_normaliser
    yield close("log ∫ e^(−βE) by quadrature and in closed form", closed_form, log_z, QUADRATURE)
    log_z_without = log_z + scale * energy.constant
    formula = math.log(2 * math.pi / scale) + torch.logsumexp(log_shares, -1)
    yield close("the same for E without constants, and its formula", log_z_without, formula, QUADRATURE)


def _log_joint(points: Tensor, stored: Tensor, weights: Tensor, scale: float) -> Tensor:
    """log w_μ N(v; W_μ, β⁻¹I) in the plane, (points, patterns)."""
    squared_distance = (points.unsqueeze(-2) - stored).square().sum(-1)
    return weights.log() - 0.5 * scale * squared_distance + math.log(scale / (2 * math.pi))


def _pointwise(
    energy: HopfieldEnergy, points: Tensor, stored: Tensor, weights: Tensor, scale: float
) -> Iterator[Check]:
    """e^{−βE}/Z is the mixture; its responsibilities are attention weights, and its denoiser is attention."""
    density = HopfieldDensity.create(energy)
    log_joint = _log_joint(points, stored, weights, scale)
    log_density = torch.logsumexp(log_joint, -1)
    yield close("log p and −βE − log Z", -scale * energy(points) - density.log_normaliser, log_density)
    attention = torch.softmax(scale * points @ stored.T, -1)
    yield close("P(μ|v) by Bayes and attention weights", torch.softmax(log_joint, -1), attention)
    yield close("responsibilities of the library", density.responsibilities(points), attention)
    slope = torch.func.grad(lambda v: _log_mixture(v, stored, weights, scale).sum())(points)
    yield close("v + β⁻¹∇log p and attention", points + slope / scale, attention @ stored)
    yield close("score of the library and ∇log p", density.score(points), slope)


def _distance_from_mixture(energy: HopfieldEnergy, stored: Tensor, weights: Tensor, scale: float) -> Iterator[Check]:
    """With β ≠ 1, e^{−E} is not the mixture."""
    grid, log_cell = _plane(stored)
    log_density = -energy(grid) - torch.logsumexp(log_cell - energy(grid), -1)
    log_mixture = torch.logsumexp(_log_joint(grid, stored, weights, scale), -1)
    distance = 0.5 * (log_cell.exp() * (log_density.exp() - log_mixture.exp()).abs()).sum()
    yield close("∫ e^(−E)/Z, β = 1.6", (log_cell + log_density).exp().sum(), 1.0, QUADRATURE)
    yield at_least("total variation between e^(−E)/Z and the mixture, β = 1.6", distance, 1e-2)


def _log_mixture(v: Tensor, stored: Tensor, weights: Tensor, scale: float) -> Tensor:
    return torch.logsumexp(weights.log() - 0.5 * scale * (v.unsqueeze(-2) - stored).square().sum(-1), -1)


def _samples(
    energy: HopfieldEnergy, stored: Tensor, weights: Tensor, scale: float, draws: int, seed: int
) -> Iterator[Check]:
    """Samples have the mixture's first and second moments."""
    samples = HopfieldDensity.create(energy).sample((draws,), generator=torch.Generator().manual_seed(seed))
    yield mean_of_draws("samples: mean", samples, weights @ stored)
    second_moments = weights @ stored.square() + 1 / scale
    yield mean_of_draws("samples: second moments", samples.square(), second_moments)


def _categorical_machine(normal: Normal, stored: Tensor) -> Iterator[Check]:
    """One categorical hidden unit with a uniform prior: E(v) = ½‖v‖² − log mean e^{W_μ·v}."""
    count = len(stored)
    unit = affine(Categorical.create(torch.full((count,), 1 / count, dtype=torch.float64)), stored.T)
    state = normal(20, 2)
    machine = 0.5 * state.square().sum(-1) - unit.log_partition(state)
    energy = HopfieldEnergy.create(stored, scale=1.0)
    norm = 0.5 * stored.square().sum(-1).max()
    yield close("one categorical hidden unit, β = 1, and E − ½M²", machine, energy(state) - norm)


@claim(
    "B7",
    title="Maximum-likelihood learning of patterns",
    statement="The negative log-likelihood of data ξ under the Hopfield density of patterns X, "
    "E[½‖ξ‖² − lse(Xᵀξ)] + lse(½ diag XᵀX) + (d/2) log 2π, has the gradient "
    "−E[ξ softmax(Xᵀξ)ᵀ] + X diag(softmax(½ diag XᵀX)).",
    source=f"the post on the same energy of November 2020 by the author of {BAL}",
    status="reconstructed",
    published="… + X softmax(½ diag XᵀX), a matrix–vector product.",
    standing="ambiguous",
    corrected="That has the shape of one pattern, not of all: each pattern is multiplied by its own weight.",
)
def maximum_likelihood_patterns(
    patterns: int = 6, dimensions: int = 4, draws: int = 50, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, patterns=patterns, dimensions=dimensions)
    normal = normal_draws(seed)
    columns = normal(dimensions, patterns)
    data = normal(draws, dimensions)

    def loss(columns: Tensor) -> Tensor:
        """The claim's formula."""
        fit = 0.5 * data.square().sum(-1) - torch.logsumexp(data @ columns, -1)
        norms = 0.5 * columns.square().sum(0)
        return fit.mean() + torch.logsumexp(norms, -1) + 0.5 * dimensions * math.log(2 * math.pi)

    def library_loss(columns: Tensor) -> Tensor:
        return -HopfieldDensity.create(HopfieldEnergy.create(columns.T, scale=1.0)).log_prob(data).mean()

    yield close("loss of the library and the formula", library_loss(columns), loss(columns))
    slope = torch.func.grad(loss)(columns)
    library_slope = torch.func.grad(library_loss)(columns)
    yield close("gradient of the library and of the formula", library_slope, slope)
    attended = data.T @ torch.softmax(data @ columns, -1) / draws
    prior = torch.softmax(0.5 * columns.square().sum(0), -1)
    yield close("gradient and its closed form", slope, columns * prior - attended)
    published = (columns @ prior).unsqueeze(-1).expand_as(columns)
    yield as_published(close("gradient with a matrix–vector product for every pattern", slope, published - attended))
    yield from _other_temperature(normal, dimensions)


def _other_temperature(normal: Normal, dimensions: int) -> Iterator[Check]:
    """β and weights: −log of the mixture, by hand."""
    stored = normal(4, dimensions)
    log_weight = normal(4)
    data = normal(20, dimensions)
    scale = 0.4
    energy = HopfieldEnergy.create(Atoms.create(stored, log_weight), scale=scale)
    weights = torch.softmax(log_weight + 0.5 * scale * stored.square().sum(-1), -1)
    expected = -_log_mixture(data, stored, weights, scale) - 0.5 * dimensions * math.log(scale / (2 * math.pi))
    yield close("β = 0.4, weighted patterns: −log p", -HopfieldDensity.create(energy).log_prob(data), expected)
