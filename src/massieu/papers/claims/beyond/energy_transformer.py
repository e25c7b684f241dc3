"""N1: the Energy Transformer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import TransformerEnergy, activations, is_conservative
from massieu.papers.claims.claim import CLOSED_FORM, GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim

_GAIN = 0.8
"""Of the LayerNorm."""
_EPS = 1e-2
"""Of the LayerNorm."""


@claim(
    "N1",
    title="Energy Transformer",
    statement="The energy E = −β⁻¹ Σ_h Σ_C log Σ_{B≠C} exp(βK_B·Q_C) − ½ Σ_B Σ_μ relu(ξ_μ·g_B)² of g = LayerNorm(x) "
    "falls along τẋ = −∂E/∂g at the rate (∂E/∂g)ᵀ∇²L(∂E/∂g)/τ. Its force has a term for tokens as queries, one for "
    "tokens as keys, and a feed-forward layer with tied weights. A step x − α∂E/∂g lowers E for certain up to α = "
    "√(var x + eps)/(2·gain·√(n − 1)·Σ_h‖W_K‖‖W_Q‖).",
    source="Hoover et al., Energy Transformer, NeurIPS 2023, arXiv 2302.07253; the bound on α is derived",
    status="quoted",
)
def energy_transformer(
    tokens: int = 7, dimensions: int = 6, heads: int = 3, memories: int = 10, draws: int = 20, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, draws=draws)
    check_at_least(3, dimensions=dimensions)
    normal = normal_draws(seed)
    for scale in (0.2, 1.0, 20.0):
        energy = _energy(normal, heads, dimensions, memories, scale)
        x = 2 * normal(draws, tokens, dimensions)
        yield from _energy_and_force(energy, x, scale)
        yield from _descent(energy, x, scale)
    energy = _energy(normal, heads, dimensions, memories, 1.0)
    yield from _padding(energy, normal(draws, tokens, dimensions))
    yield from _parallel_attention(energy, normal(tokens, dimensions))


def _energy(normal: Normal, heads: int, dimensions: int, memories: int, scale: float) -> TransformerEnergy:
    key = normal(heads, 4, dimensions)
    query = normal(heads, 4, dimensions)
    gain = torch.tensor(_GAIN, dtype=torch.float64)
    normalisation = activations.LayerNorm.create(gain, normal(dimensions), eps=_EPS)
    return TransformerEnergy.create(key, query, normal(memories, dimensions), normalisation=normalisation, scale=scale)


def _projected(g: Tensor, weight: Tensor) -> Tensor:
    """Keys or queries of all heads, (…, H, tokens, z)."""
    return torch.einsum("...nd,hzd->...hnz", g, weight)


def _scores(energy: TransformerEnergy, g: Tensor) -> Tensor:
    """β K_B·Q_C, (…, H, B, C), −∞ for B = C."""
    keys = _projected(g, energy.key_weight)
    queries = _projected(g, energy.query_weight)
    scores = energy.scale[:, None, None] * keys @ queries.mT
    return scores.masked_fill(torch.eye(g.shape[-2], dtype=torch.bool), -torch.inf)


def _formula(energy: TransformerEnergy, g: Tensor) -> Tensor:
    """E as it stands in the claim."""
    attention = torch.logsumexp(_scores(energy, g), -2).sum(-1) / energy.scale
    return -attention.sum(-1) - 0.5 * torch.relu(g @ energy.memories.T).square().sum((-2, -1))


def _energy_and_force(energy: TransformerEnergy, x: Tensor, scale: float) -> Iterator[Check]:
    """E and its formula; the force is a term for tokens as queries, one for tokens as keys, and a feed-forward layer."""
    g = energy.normalise(x)
    yield close(f"β = {scale}: E and its formula", energy(g), _formula(energy, g), 1e-12)
    force = energy.force(g)
    weights = torch.softmax(_scores(energy, g), -2)
    keys = _projected(g, energy.key_weight)
    queries = _projected(g, energy.query_weight)
    as_queries = torch.einsum("...hnz,hzd->...nd", weights.mT @ keys, energy.query_weight)
    as_keys = torch.einsum("...hnz,hzd->...nd", weights @ queries, energy.key_weight)
    layer = torch.relu(g @ energy.memories.T) @ energy.memories
    yield close(f"β = {scale}: −∂E/∂g and its three terms", force, as_queries + as_keys + layer)
    slope = differences(lambda flat: _formula(energy, flat.reshape(g[0].shape)), g[0].flatten())
    force_scale = force[0].abs().max().item()
    yield close(
        f"β = {scale}: differences of E and −∂E/∂g, by its size",
        slope / force_scale,
        -force[0].flatten() / force_scale,
        # Differences of a function carry its third derivative, β² times that of scores of size one.
        GRADIENT_BY_DIFFERENCES * (1 + scale) ** 2,
    )


def _descent(energy: TransformerEnergy, x: Tensor, scale: float) -> Iterator[Check]:
    """E falls along the flow at its rate, in steps up to the certain size, and in steps of g by its curvature."""
    force = energy.force(energy.normalise(x))
    time = 1e-6
    ahead = _formula(energy, energy.normalise(x + time * force))
    behind = _formula(energy, energy.normalise(x - time * force))
    # ∇²L is the Jacobian of the normalisation.
    velocity = torch.func.jvp(energy.normalise, (x,), (force,))[1]
    rate = (force * velocity).sum((-2, -1))
    yield close(f"β = {scale}: dE/dt along the flow and −Fᵀ∇²L F", (ahead - behind) / (2 * time * rate), -1.0, 1e-5)
    yield at_least(f"β = {scale}: Fᵀ∇²L F", rate, 0.0)

    path = energy.flow(x, steps=10)
    rise = path.energies.diff(dim=0) / (1 + path.energies[:-1].abs())
    yield at_most(f"β = {scale}: rise of E in steps of the certain size, relative", rise, 1e-13)
    key_norms = torch.linalg.matrix_norm(energy.key_weight, 2)
    query_norms = torch.linalg.matrix_norm(energy.query_weight, 2)
    curvature = 2 * (x.shape[-2] - 1) ** 0.5 * (key_norms * query_norms).sum()
    step_size = (x.var(-1, correction=0) + _EPS).sqrt() / (_GAIN * curvature)
    yield close(f"β = {scale}: certain step size and its formula", energy.safe_step_size(x), step_size)

    hessian = torch.func.hessian(lambda flat: _formula(energy, flat.reshape(x[0].shape)))
    largest = torch.stack([torch.linalg.eigvalsh(hessian(energy.normalise(item).flatten()))[-1] for item in x[:5]])
    yield at_most(f"β = {scale}: largest eigenvalue of ∂²E/∂g² by its bound", largest / curvature, 1.0)
    state = energy.normalise(x)
    after = energy.step(state)
    least_drop = 0.5 * curvature * (after - state).square().sum((-2, -1))
    drop = (energy(state) - energy(after) - least_drop) / (1 + energy(state).abs())
    yield at_least(f"β = {scale}: fall of E in a step of g, less ½·curvature·‖step‖²", drop, -1e-13)


def _padding(energy: TransformerEnergy, x: Tensor) -> Iterator[Check]:
    """Tokens that are not kept contribute nothing, whatever is in them."""
    keep = torch.arange(x.shape[-2]) < x.shape[-2] - 1
    masked = TransformerEnergy.create(
        energy.key_weight,
        energy.query_weight,
        energy.memories,
        normalisation=energy.normalisation,
        scale=energy.scale,
        keep=keep.expand(x.shape[:-1]),
    )
    padded = torch.where(keep.unsqueeze(-1), x, torch.nan)
    padded_path = masked.flow(padded, steps=2, step_size=0.1)
    path = energy.flow(x[:, :-1], steps=2, step_size=0.1)
    yield close("E with padding of NaN, and of the tokens alone", padded_path.energies, path.energies)
    yield close("tokens with padding of NaN, and alone", padded_path.states[:, :, :-1], path.states)


def _parallel_attention(energy: TransformerEnergy, x: Tensor) -> Iterator[Check]:
    """The first of the force's terms, which is self-attention, is no gradient (trap 13); the whole is."""
    g = energy.normalise(x)

    def attention(flat: Tensor) -> Tensor:
        tokens = flat.reshape(g.shape)
        keys = _projected(tokens, energy.key_weight)
        weights = torch.softmax(_scores(energy, tokens), -2)
        return torch.einsum("hnz,hzd->nd", weights.mT @ keys, energy.query_weight).flatten()

    def force(flat: Tensor) -> Tensor:
        return energy.force(flat.reshape(g.shape)).flatten()

    force_is_symmetric = is_conservative(force, g.flatten(), tolerance=CLOSED_FORM)
    attention_is_symmetric = is_conservative(attention, g.flatten(), tolerance=1e-2)
    yield at_least("the force has a symmetric Jacobian", force_is_symmetric.double(), 1.0)
    yield at_most("the term of the queries alone has one, to 1 in 100", attention_is_symmetric.double(), 0.0)
