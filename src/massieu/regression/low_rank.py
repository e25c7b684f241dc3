"""Few centres in place of all keys: Nyström's features, with a bound of what they leave out."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import whole_number
from massieu.foundation.doors import door
from massieu.foundation.transforms import values_are_readable
from massieu.regression.exact import by_features, features_factor, solve_lower
from massieu.regression.kernels import Kernel
from massieu.regression.logarithms import Logarithms, lifted
from massieu.regression.tokens import KeyValuePairs, Prediction, cholesky, need_positive


@door
@dataclass(frozen=True)
class LowRank:
    """Low-rank solver: the kernel through `rank` keys, those that a pivoted Cholesky decomposition takes first.

    Attributes:
        rank: Centres, at most as many as keys. Fewer are taken where the rest is rounding: in float32 they then miss up to
            about 1e-5 of a key's κ(x, x), which a ridge much below N times that will feel.

    Example:
        >>> import torch
        >>> from massieu.regression import GaussianKernel, LowRank, conditional_mean_attention
        >>> key = torch.tensor([[[[0.0], [1e-4], [1.0]]]])  # two keys that are nearly one
        >>> how = {"kernel": GaussianKernel.create(1.0), "ridge": 0.1, "method": LowRank(2)}
        >>> conditional_mean_attention(key, key, key, **how).error_bound.max().item() < 1e-2
        True
    """

    rank: int = 256

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError unless `rank` is a whole number, at least 1."""
        whole_number("rank", self.rank, least=1)


class Centres(NamedTuple):
    """Some of the keys, and the Cholesky factor of their Gram matrix."""

    points: Float[Tensor, "B H R D"]
    used: Bool[Tensor, "B H R"]
    """False where the keys before have explained all keys to rounding."""
    factor: Float[Tensor, "B H R R"]

    def features(self, kernel: Kernel, points: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N R"]:
        """φ̃ with φ̃(a)·φ̃(b) = κ(a, C) κ(C, C)⁻¹ κ(C, b)."""
        cross = torch.where(self.used.unsqueeze(-1), kernel(self.points, points), 0.0)
        return solve_lower(self.factor, cross).mT


def centres(tokens: KeyValuePairs, rank: int) -> Centres:
    """The keys that a pivoted Cholesky decomposition takes first: each the one that those before explain least."""
    chosen, used, _ = pivoted_cholesky(tokens, rank)
    points = tokens.key.gather(2, chosen.unsqueeze(-1).expand(*chosen.shape, tokens.key.shape[-1]))
    both = used.unsqueeze(-1) & used.unsqueeze(-2)
    one = torch.eye(used.shape[-1], dtype=points.dtype, device=points.device)
    gram = torch.where(both, tokens.kernel(points, points), one)
    return Centres(points, used, cholesky(gram, "centres' Gram matrix"))


@torch.no_grad()
def pivoted_cholesky(tokens: KeyValuePairs, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the centres (B, H, R), which of them count, and F (B, H, N, R) with FFᵀ near W^½GW^½."""
    rank = min(rank, tokens.key.shape[2])
    weight = tokens.root.square()
    left = weight * tokens.kernel.diagonal(tokens.key)
    # Below it, what is left of a key's diagonal is rounding; twice where `cholesky` would refuse the centres' matrix.
    least = 8 * math.sqrt(rank) * torch.finfo(left.dtype).eps * left.amax(-1, keepdim=True)
    columns = left.new_zeros(*left.shape, rank)
    chosen, used = [], []
    for turn in range(rank):
        pivot, place = left.max(-1, keepdim=True)
        counts = pivot > least
        point = tokens.key.gather(2, place.unsqueeze(-1).expand(*place.shape, tokens.key.shape[-1]))
        column = tokens.root * tokens.kernel(tokens.key, point).squeeze(-1) * tokens.root.gather(-1, place)
        before = columns.gather(2, place.unsqueeze(-1).expand(*place.shape, rank))
        column = column - (columns @ before.mT).squeeze(-1)
        column = torch.where(counts, column / torch.where(counts, pivot, 1.0).sqrt(), 0.0)
        columns[..., turn] = column
        left = (left - column.square()).clamp(min=0.0).scatter(-1, place, 0.0)
        chosen.append(place)
        used.append(counts)
    return torch.cat(chosen, -1), torch.cat(used, -1), columns


def low_rank(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"], rank: int) -> Prediction:
    """The features' regression (subset of regressors), with the variance that the centres leave of κ(q, q)."""
    need_positive(tokens.ridge, "LowRank")
    logs = tokens.logarithms
    tokens = tokens if logs is None else _with_one_ridge(tokens, logs)
    chosen = centres(tokens, rank)
    plain = chosen.features(tokens.kernel, tokens.key)
    features, asked = tokens.root.unsqueeze(-1) * plain, chosen.features(tokens.kernel, query)
    output, variance = by_features(features, tokens.target, tokens.ridge, asked)
    prior = tokens.kernel.diagonal(query)
    missed = (prior - asked.square().sum(-1)).clamp(min=0.0)
    with torch.no_grad():
        residual = (tokens.kernel.diagonal(tokens.key) - plain.square().sum(-1)).clamp(min=0.0)
        trace = (tokens.root.square() * residual).sum(-1)
        bound = _bound(tokens, features, trace, missed, prior)
    if logs is None:
        return Prediction(output, variance + missed, bound)
    half, own = logs.half_at(query), Logarithms.of(logs.kernel, chosen.points)
    # What a distant query has in common with the centres underflows in units of exp(h(q)): they are the largest's.
    pairs, largest = own.pairs(query, chosen.points)
    pairs = torch.where(chosen.used.unsqueeze(-2), pairs * own.relative.exp().unsqueeze(-2), 0.0)
    output, _ = by_features(features, tokens.target, tokens.ridge, solve_lower(chosen.factor, pairs.mT).mT)
    output = lifted(output, (largest + own.centre - logs.centre).unsqueeze(-1))
    return Prediction(output, lifted(variance + missed, 2 * half), lifted(bound, half - logs.centre))


def _with_one_ridge(tokens: KeyValuePairs, logs: Logarithms) -> KeyValuePairs:
    """The same with κ(key, key) in the weights, in units of exp(2c): features have one ridge for all keys."""
    relative = logs.relative.exp()
    ridge = tokens.ridge * (-2 * logs.centre.squeeze(-1)).exp()
    numbers = torch.finfo(ridge.dtype)
    if values_are_readable(ridge):
        widest = max(relative.max().item() ** 2 if relative.numel() else 1.0, 1 / max(ridge.min().item(), numbers.tiny))
        if widest > math.sqrt(numbers.max):
            raise ValueError(
                f"LowRank has kernel values κ(key, key) up to exp({2 * logs.half.max().item():.4g}) beside a ridge "
                f"of {tokens.ridge.min().item():.3g}, farther apart than {ridge.dtype} holds: use method=Cholesky(), or float64"
            )
    target = relative.unsqueeze(-1) * tokens.target
    return KeyValuePairs(tokens.kernel, tokens.key, target, tokens.root * relative, ridge)


def _bound(
    tokens: KeyValuePairs, features: Tensor, trace: Tensor, missed: Tensor, prior: Tensor
) -> Float[Tensor, "B H Q"]:
    """Of ‖output − exact output‖: ‖Ã⁻¹v‖·(√(tr E·e) + tr E·√κ(q, q)/(2√λ)).

    E = G − G̃ and e = κ(q, q) − κ̃(q, q) are what the centres leave out, both positive semidefinite. The difference is
    vᵀÃ⁻¹[(κ − κ̃) − E A⁻¹κ]; the first part has norm at most √(tr E·e) by Cauchy and Schwarz, and ‖A⁻¹κ‖ is at most
    √κ(q, q)/(2√λ), since κ = G^½b with ‖b‖² ≤ κ(q, q) and s/(s² + λ) ≤ 1/(2√λ).
    """
    factor = features_factor(features, tokens.ridge)
    coefficients = torch.cholesky_solve(features.mT @ tokens.target, factor)
    ridge = tokens.ridge[..., None, None]
    dual = (tokens.target - features @ coefficients) / ridge
    trace, ridge = trace.unsqueeze(-1), tokens.ridge.unsqueeze(-1)
    reach = (trace * missed).sqrt() + trace * (prior / ridge).sqrt() / 2
    return dual.flatten(2).norm(dim=-1).unsqueeze(-1) * reach
