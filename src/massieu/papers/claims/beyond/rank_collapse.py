"""N12: tokens that collapse onto one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.papers.claims.claim import Check, at_least, at_most
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_exact_rate
from massieu.papers.claims.registry import claim
from massieu.population import AttentionLayer


@claim(
    "N12",
    title="Rank collapse",
    statement="Without a skip connection, attention X ← PX makes all tokens equal. With ‖xᵢ‖ ≤ R and scores βxᵢ·xⱼ, "
    "each layer multiplies the diameter by at most 1 − e^(−2βR²). Near the end each layer cubes the distance to "
    "rank one, so that it falls doubly exponentially in depth. With a skip connection no two tokens come nearer to "
    "each other.",
    source="Dong, Cordonnier, Loukas, arXiv 2103.03404; the bound by Dobrushin's coefficient is derived (S12)",
    status="quoted",
)
def rank_collapse(
    tokens: int = 12, dimensions: int = 4, draws: int = 24, layers: int = 6, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, dimensions=dimensions, layers=layers)
    check_at_least(20, draws=draws)
    normal = normal_draws(seed)
    for scale in (0.05, 0.3, 1.0):
        state = normal(draws, tokens, dimensions)
        yield _without_skip(state, scale, layers)
        yield _with_skip(state, scale, layers)
    yield from _cubes(normal, tokens, dimensions, draws)


def _without_skip(state: Tensor, scale: float, layers: int) -> Check:
    """Each layer multiplies the diameter by at most 1 − e^(−2βR²)."""
    identity = torch.eye(state.shape[-1]).double()
    layer = AttentionLayer.from_score(identity, identity, scale=scale, residual=False)
    excesses = []
    for _ in range(layers):
        radius = state.norm(dim=-1).amax(-1)
        factor = -torch.expm1(-2 * scale * radius.square())
        after = layer(state)
        excesses.append(_diameter(after) - factor * _diameter(state))
        state = after
    return at_most(f"β = {scale}: diameter beyond (1 − e^(−2βR²)) of the last", torch.stack(excesses), 1e-12)


def _with_skip(state: Tensor, scale: float, layers: int) -> Check:
    """With a skip connection no two tokens come nearer to each other."""
    identity = torch.eye(state.shape[-1]).double()
    layer = AttentionLayer.from_score(identity, identity, scale=scale, residual=True)
    changes = []
    for _ in range(layers):
        after = layer(state)
        change = _pair_distances(after) - _pair_distances(state)
        changes.append(change / _diameter(state)[:, None, None])
        state = after
    return at_least(f"β = {scale}, with skip: change of two tokens' distance, relative", torch.stack(changes), -1e-12)


def _cubes(normal: Normal, tokens: int, dimensions: int, draws: int) -> Iterator[Check]:
    """Any weights, tokens within ε of a common one: the distance to rank one behind a layer is of the order ε³."""
    sizes = [32, 64, 128, 256, 512, 1024]
    score = normal(dimensions, dimensions) / dimensions**0.5
    value = normal(dimensions, dimensions) / dimensions**0.5
    layer = AttentionLayer.from_score(score, value, residual=False)
    common = normal(draws, 1, dimensions)
    deviation = normal(draws, tokens, dimensions)
    distances = torch.stack([_distance_to_rank_one(layer(common + deviation / size)) for size in sizes])
    yield has_exact_rate("distance to rank one after a layer: rate in 1/ε", sizes, distances, -3.0)


def _diameter(state: Tensor) -> Tensor:
    return _pair_distances(state).amax((-2, -1))


def _pair_distances(state: Tensor) -> Tensor:
    """Distances of all pairs of tokens."""
    return (state.unsqueeze(-2) - state.unsqueeze(-3)).norm(dim=-1)


def _distance_to_rank_one(state: Tensor) -> Tensor:
    """min over x of ‖X − 1xᵀ‖."""
    return (state - state.mean(-2, keepdim=True)).flatten(1).norm(dim=1)
