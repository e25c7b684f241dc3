"""B5b: where the inverse temperature stands in the Hopfield energy."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.papers.claims.claim import BAL, Check, as_published, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim


@claim(
    "B5b",
    title="The Hopfield energy's inverse temperature",
    statement="The energy whose descent step is attention at the inverse temperature β is ½‖ξ‖² − β⁻¹ log Σ "
    "exp(βxₙ·ξ). Without the β⁻¹ the step is β·attention. At β = 1, as in the paper, the two agree.",
    source=f"a later post by the author of {BAL}, Transformers Are Secretly Collectives of Spin Systems (November 2021)",
    status="reconstructed",
    published="½QQᵀ − lse(QKᵀ/√d). With the β⁻¹ = √d before lse that the author's code has, its gradient step is attention; as "
    "the formula stands, it is not.",
    standing="ambiguous",
    corrected="lse needs its prefactor β⁻¹.",
)
def inverse_temperature(atoms: int = 8, dimensions: int = 5, scale: float = 0.6, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms)
    normal = normal_draws(seed)
    patterns = normal(atoms, dimensions)
    state = normal(20, dimensions)
    attended = _attention(patterns, scale, state)
    energy = HopfieldEnergy.create(patterns, scale=scale)
    yield close("with β⁻¹: ξ − ∇E and attention", state + energy.force(state), attended)
    unit_temperature = HopfieldEnergy.create(patterns, scale=1.0)
    library_step = state + unit_temperature.force(state)
    yield close("β = 1: ξ − ∇E of the paper's energy and attention", _step(patterns, 1.0, state), library_step)
    without = _step(patterns, scale, state)
    yield close("without β⁻¹: ξ − ∇E and β·attention", without, scale * attended)
    yield as_published(close("without β⁻¹: ξ − ∇E and attention", without, attended))


def _attention(patterns: Tensor, scale: float, state: Tensor) -> Tensor:
    return torch.softmax(scale * state @ patterns.T, -1) @ patterns


def _step(patterns: Tensor, scale: float, state: Tensor) -> Tensor:
    """ξ − ∇E of E = ½‖ξ‖² − log Σ exp(βxₙ·ξ), by automatic differentiation."""

    def energy(x: Tensor) -> Tensor:
        return (0.5 * x.square().sum(-1) - torch.logsumexp(scale * x @ patterns.T, -1)).sum()

    return state - torch.func.grad(energy)(state)
