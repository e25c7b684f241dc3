"""N2: Hopfield–Fenchel–Young networks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.energy.activations import LayerNorm, SphereProjection
from massieu.energy.entmax import entmax, entmax_conjugate, tsallis_entropy
from massieu.energy.fenchel_young import SparseAtoms, fenchel_young_loss
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim

_ROUNDING = 1e-12
_ALPHAS = (1.25, 1.5, 2.0)


@claim(
    "N2",
    title="Hopfield–Fenchel–Young networks",
    statement="With Ω* of Tsallis' entropy in place of log Σ exp, the Hopfield energy ½‖q‖² − Ω*(βXq)/β falls by at "
    "least ½‖q⁺ − q‖² in each step q⁺ = Xᵀ entmax(βXq). If one score leads by the margin 1/(α − 1), one step is "
    "that pattern exactly.",
    source="Santos, Niculae, McNamee and Martins, Hopfield–Fenchel–Young Networks (arXiv 2411.08590)",
    status="quoted",
)
def fenchel_young_networks(
    patterns: int = 12, dimensions: int = 6, draws: int = 200, beta: float = 2.0, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, patterns=patterns, dimensions=dimensions)
    check_at_least(1e-3, beta=beta)
    normal = normal_draws(seed)
    points = normal(patterns, dimensions)
    query = 2 * normal(draws, dimensions)
    for alpha in _ALPHAS:
        yield from _potential(alpha, normal(draws, patterns))
        yield from _descent(alpha, points, query, beta)
        yield from _retrieval(alpha, patterns)
    yield from _normalised(points, query)


def _potential(alpha: float, scores: Tensor) -> Iterator[Check]:
    """entmax is the gradient of Ω*, the conjugate of Tsallis' negative entropy."""
    weights = entmax(scores, alpha)
    name = f"α = {alpha:g}"
    yield close(f"{name}: Σ weights and 1", weights.sum(-1), 1.0)
    smooth = _without_kinks(alpha, scores, weights)
    slope = differences(lambda z: entmax_conjugate(z, alpha), scores[smooth])
    yield close(f"{name}: differences of Ω* and the weights", slope, weights[smooth], GRADIENT_BY_DIFFERENCES)
    product = (weights * scores).sum(-1) + tsallis_entropy(weights, alpha)
    yield close(f"{name}: Ω* and p·z + H(p) at the weights", entmax_conjugate(scores, alpha), product)
    # At any other point of the simplex that is less.
    other = torch.softmax(scores.roll(1, 0), -1)
    loss = fenchel_young_loss(scores, other, alpha)
    yield at_least(f"{name}: Ω*(z) + Ω(y) − y·z", loss, 0.0)
    yield close(f"{name}: the same at y = entmax(z), and 0", fenchel_young_loss(scores, weights, alpha), 0.0)


def _without_kinks(alpha: float, scores: Tensor, weights: Tensor) -> Tensor:
    """Rows in which no weight begins or ends within the step of a difference: Ω* has no second derivative there."""
    # p = [(α − 1)z − τ]₊^{1/(α − 1)}
    levels = (alpha - 1) * scores
    threshold = (levels - weights.pow(alpha - 1)).gather(-1, weights.argmax(-1, keepdim=True))
    return (levels - threshold).abs().amin(-1) > 1e-3


def _descent(alpha: float, points: Tensor, query: Tensor, beta: float) -> Iterator[Check]:
    """A step q⁺ = Xᵀ entmax(βXq) lowers the energy by at least ½‖q⁺ − q‖²."""
    hopfield = HopfieldEnergy.create(SparseAtoms.create(points, alpha), scale=beta)
    later = hopfield.step(query)
    drop = hopfield(query) - hopfield(later) - 0.5 * (later - query).square().sum(-1)
    energy_scale = 1 + hopfield(query).abs().max().item()
    yield at_least(f"α = {alpha:g}: E(q) − E(q⁺) − ½‖q⁺ − q‖²", drop, -_ROUNDING * energy_scale)
    formula = torch.func.vmap(lambda q: entmax(beta * points @ q, alpha) @ points)(query)
    yield close(f"α = {alpha:g}: the step and Xᵀ entmax(βXq)", later, formula)


def _retrieval(alpha: float, patterns: int) -> Iterator[Check]:
    """One step is the pattern exactly from the margin 1/(α − 1) on, and not before it.

    Unit vectors are the patterns, so that scores are the query's coordinates.
    """
    margin = 1 / (alpha - 1)
    points = torch.eye(patterns, dtype=torch.float64)
    memory = SparseAtoms.create(points, alpha)

    def error(lead: float) -> Tensor:
        return (memory.mean(lead * points[:1]) - points[0]).abs().sum()

    lead = 1.0 * margin
    yield at_most(f"α = {alpha:g}: one step at a lead of {lead:g}, and the pattern: error", error(lead), 0.0)
    # Below the margin, weights of others begin at (1 − share)^{margin} of the largest.
    lead = 0.95 * margin
    name = f"α = {alpha:g}: one step at a lead of {lead:g}, and the pattern: error"
    yield at_least(name, error(lead), 0.05**margin / 2)
    label = torch.zeros(1, dtype=torch.int64)
    loss = fenchel_young_loss(margin * points[:1], F.one_hot(label, patterns).double(), alpha)
    yield at_most(f"α = {alpha:g}: Fenchel–Young loss of the pattern at the margin", loss, _ROUNDING)


def _normalised(points: Tensor, query: Tensor) -> Iterator[Check]:
    """Post-normalisation: another reference, on whose range the energy falls as well."""
    references = {"ℓ₂": SphereProjection.create(1.0), "LayerNorm": LayerNorm.create(eps=1e-2)}
    for name, reference in references.items():
        hopfield = HopfieldEnergy.create(SparseAtoms.create(points, 1.5), reference=reference, scale=2.0)
        path = hopfield.descend(hopfield.step(query), steps=5)
        energy_scale = 1 + path.energies.abs().max().item()
        yield at_most(
            f"post-normalisation by {name}: largest rise in a step", path.energies.diff(dim=0), _ROUNDING * energy_scale
        )
