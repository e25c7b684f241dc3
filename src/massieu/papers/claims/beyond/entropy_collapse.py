"""N11: how far attention may collapse."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.energy import least_entropy
from massieu.nn import SigmaReparametrization
from massieu.papers.claims.claim import CLOSED_FORM, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim

_NORMS = (0.1, 1.0, 4.0, 15.0)
_SEARCH_STEPS = 1000
"""Of the descent that looks for an entropy below the bound."""


@claim(
    "N11",
    title="Entropy collapse",
    statement="T scores whose vector has norm at most σ have an attention entropy H ≥ log(1 + (T−1)b) + "
    "σ√(T(T−1))b/(1 + (T−1)b), b = exp(−σ√(T/(T−1))), and one vector attains the bound. The scores may be taken "
    "about their mean, ‖W_KᵀW_Q‖₂‖X‖₂² bounds σ, and Ŵ = (γ/‖W‖₂)W has the norm γ.",
    source="Zhai et al., arXiv 2303.06296, Theorem 3.1",
    status="quoted",
)
def entropy_collapse(keys: int = 16, dimensions: int = 8, draws: int = 200, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, keys=keys, dimensions=dimensions, draws=draws)
    normal = normal_draws(seed)
    for sigma in _NORMS:
        yield from _attained(normal, sigma, keys, draws)
    yield from _searched(normal, min(keys, 16))
    yield from _of_heads(normal, keys, dimensions, draws)
    yield from _reparametrised(normal, keys, dimensions, draws)


def _entropy(scores: Tensor) -> Tensor:
    logarithms = torch.log_softmax(scores, -1)
    return -(logarithms.exp() * logarithms).sum(-1)


def _attained(normal: Normal, sigma: float, keys: int, draws: int) -> Iterator[Check]:
    """The bound and its formula; one vector of norm σ attains it, and random ones stay above."""
    b = math.exp(-sigma * math.sqrt(keys / (keys - 1)))
    formula = math.log(1 + (keys - 1) * b) + sigma * math.sqrt(keys * (keys - 1)) * b / (1 + (keys - 1) * b)
    bound = least_entropy(torch.tensor(sigma, dtype=torch.float64), keys)
    yield close(f"σ = {sigma}: least entropy and its formula", bound, formula)
    attaining = torch.full((keys,), -sigma / math.sqrt(keys * (keys - 1)), dtype=torch.float64)
    attaining[0] = sigma * math.sqrt((keys - 1) / keys)
    yield close(f"σ = {sigma}: norm of the vector that attains it", attaining.norm(), sigma)
    yield close(f"σ = {sigma}: its entropy and the bound", _entropy(attaining), bound)
    # From no preference to one key in front, and inside of the ball too.
    scores = normal(draws, keys)
    scores[:, 0] += torch.linspace(0, 10, draws, dtype=torch.float64)
    scores = sigma * torch.nn.functional.normalize(scores, dim=-1)
    yield at_least(f"σ = {sigma}: entropy of random scores less the bound", _entropy(scores) - bound, -CLOSED_FORM)
    yield at_least(f"σ = {sigma}: the same at half the norm", _entropy(scores / 2) - bound, -CLOSED_FORM)


def _searched(normal: Normal, keys: int) -> Iterator[Check]:
    """Descent of the entropy on the sphere from 20 starts: no end lies below the bound, and the lowest at it."""
    for sigma in (1.0, 3.0):
        direction = torch.nn.functional.normalize(normal(20, keys), dim=-1)
        for _ in range(_SEARCH_STEPS):
            slope = torch.func.grad(lambda scores: _entropy(scores).sum())(sigma * direction)
            slope = slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            direction = torch.nn.functional.normalize(direction - 0.05 * slope, dim=-1)
        entropy = _entropy(sigma * direction)
        bound = least_entropy(torch.tensor(sigma, dtype=torch.float64), keys)
        yield at_least(f"σ = {sigma}: least entropy of a search less the bound", entropy - bound, -CLOSED_FORM)
        yield at_most(f"σ = {sigma}: the same, of the lowest", (entropy - bound).min(), 1e-3)


def _of_heads(normal: Normal, keys: int, dimensions: int, draws: int) -> Iterator[Check]:
    """A head's entropy is above the bound by its scores' norm, and above the tighter one by their norm about the mean."""
    for scale in (0.1, 1.0, 5.0):
        query = normal(1, 1, draws, dimensions)
        key = normal(1, 1, keys, dimensions)
        moments = ops.attention_moments(query, key, scale=scale)
        scores = scale * query @ key.mT
        by_norm = least_entropy(scores.norm(dim=-1), keys)
        by_centred_norm = least_entropy((keys * moments.prior_score_variance).sqrt(), keys)
        yield at_least(f"β = {scale}: entropy of a head less the bound by ‖s‖", moments.entropy - by_norm, -CLOSED_FORM)
        yield at_least(f"β = {scale}: the same by ‖s − s̄‖", moments.entropy - by_centred_norm, -CLOSED_FORM)
        yield at_least(f"β = {scale}: how much tighter the second is", by_centred_norm - by_norm, -CLOSED_FORM)


def _reparametrised(normal: Normal, keys: int, dimensions: int, draws: int) -> Iterator[Check]:
    """Weights grown a thousandfold in a few directions: the norm stays γ, and attention does not collapse."""
    gain = 0.75
    module = SigmaReparametrization(gain).double()
    raw = 1e3 * normal(2, dimensions, dimensions) * torch.linspace(0, 1, dimensions, dtype=torch.float64)
    weights = module(raw).detach()
    yield close("‖Ŵ‖₂ and γ", torch.linalg.matrix_norm(weights, 2), gain)
    ratio = weights * torch.linalg.matrix_norm(raw, 2)[:, None, None] / gain
    yield close("Ŵ·‖W‖₂/γ and W", ratio / 1e3, raw / 1e3)
    x = normal(draws, keys, dimensions)
    scores = x @ weights[0].mT @ weights[1] @ x.mT
    token_norm = torch.linalg.matrix_norm(x, 2)
    weight_norm = torch.linalg.matrix_norm(weights[0].mT @ weights[1], 2)
    sigma = (weight_norm * token_norm.square()).unsqueeze(-1)
    yield at_most("‖row of scores‖ by ‖W_KᵀW_Q‖₂‖X‖₂²", scores.norm(dim=-1) / sigma, 1 + CLOSED_FORM)
    # ‖W_KᵀW_Q‖₂ ≤ γ², which is known before the weights are.
    bound_by_gain = least_entropy(sigma * gain**2 / weight_norm, keys)
    yield at_least("entropy less what γ alone makes certain", _entropy(scores) - bound_by_gain, -CLOSED_FORM)
