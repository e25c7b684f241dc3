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
    positions, used, _ = pivoted_cholesky(tokens, rank)
    points = tokens.key.gather(2, positions.unsqueeze(-1).expand(*positions.shape, tokens.key.shape[-1]))
    # Rows and columns of unused centres are those of the identity.
    both_used = used.unsqueeze(-1) & used.unsqueeze(-2)
    identity = torch.eye(used.shape[-1], dtype=points.dtype, device=points.device)
    gram = torch.where(both_used, tokens.kernel(points, points), identity)
    return Centres(points, used, cholesky(gram, "centres' Gram matrix"))


@torch.no_grad()
def pivoted_cholesky(tokens: KeyValuePairs, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the centres (B, H, R), whether each is used, and F (B, H, N, R) with FFᵀ near W^½GW^½."""
    rank = min(rank, tokens.key.shape[2])
    weight = tokens.root.square()
    # The diagonal of W^½GW^½ − FFᵀ: of each key, what the centres so far do not explain.
    unexplained = weight * tokens.kernel.diagonal(tokens.key)
    # Below this it is rounding. It is twice the bound at which `cholesky` would refuse the centres' Gram matrix.
    rounding = 8 * math.sqrt(rank) * torch.finfo(unexplained.dtype).eps * unexplained.amax(-1, keepdim=True)
    columns = unexplained.new_zeros(*unexplained.shape, rank)
    positions = []
    used = []
    for step in range(rank):
        pivot, position = unexplained.max(-1, keepdim=True)
        is_used = pivot > rounding
        point = tokens.key.gather(2, position.unsqueeze(-1).expand(*position.shape, tokens.key.shape[-1]))
        column = tokens.root * tokens.kernel(tokens.key, point).squeeze(-1) * tokens.root.gather(-1, position)
        # The new column of the factor: that of the matrix, less the part in the columns before.
        pivot_row = columns.gather(2, position.unsqueeze(-1).expand(*position.shape, rank))
        column = column - (columns @ pivot_row.mT).squeeze(-1)
        column = torch.where(is_used, column / torch.where(is_used, pivot, 1.0).sqrt(), 0.0)
        columns[..., step] = column
        unexplained = (unexplained - column.square()).clamp(min=0.0).scatter(-1, position, 0.0)
        positions.append(position)
        used.append(is_used)
    return torch.cat(positions, -1), torch.cat(used, -1), columns


def low_rank(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"], rank: int) -> Prediction:
    """Regression on Nyström's features (subset of regressors), with the part of κ(q, q) that the centres do not explain."""
    need_positive(tokens.ridge, "LowRank")
    logs = tokens.logarithms
    if logs is not None:
        tokens = _with_one_ridge(tokens, logs)
    chosen = centres(tokens, rank)
    key_features = chosen.features(tokens.kernel, tokens.key)
    features = tokens.root.unsqueeze(-1) * key_features
    query_features = chosen.features(tokens.kernel, query)
    output, variance = by_features(features, tokens.target, tokens.ridge, query_features)
    prior = tokens.kernel.diagonal(query)
    unexplained = (prior - query_features.square().sum(-1)).clamp(min=0.0)
    with torch.no_grad():
        unexplained_keys = (tokens.kernel.diagonal(tokens.key) - key_features.square().sum(-1)).clamp(min=0.0)
        trace = (tokens.root.square() * unexplained_keys).sum(-1)
        bound = _bound(tokens, features, trace, unexplained, prior)
    if logs is None:
        return Prediction(output, variance + unexplained, bound)
    half = logs.half_at(query)
    # In units of exp(h(q)), the kernel values of a distant query at the centres underflow. So the output is computed again
    # in units of the largest of them.
    centre_logs = Logarithms.of(logs.kernel, chosen.points)
    pairs, largest = centre_logs.pairs(query, chosen.points)
    pairs = torch.where(chosen.used.unsqueeze(-2), pairs * centre_logs.relative.exp().unsqueeze(-2), 0.0)
    output, _ = by_features(features, tokens.target, tokens.ridge, solve_lower(chosen.factor, pairs.mT).mT)
    output = lifted(output, (largest + centre_logs.centre - logs.centre).unsqueeze(-1))
    return Prediction(output, lifted(variance + unexplained, 2 * half), lifted(bound, half - logs.centre))


def _with_one_ridge(tokens: KeyValuePairs, logs: Logarithms) -> KeyValuePairs:
    """The same problem with κ(key, key), in units of exp(2c), in the weights, so that all keys have one ridge."""
    relative = logs.relative.exp()
    ridge = tokens.ridge * (-2 * logs.centre.squeeze(-1)).exp()
    limits = torch.finfo(ridge.dtype)
    if values_are_readable(ridge):
        largest_weight = relative.max().item() ** 2 if relative.numel() else 1.0
        largest_inverse_ridge = 1 / max(ridge.min().item(), limits.tiny)
        if max(largest_weight, largest_inverse_ridge) > math.sqrt(limits.max):
            raise ValueError(
                f"LowRank has kernel values κ(key, key) up to exp({2 * logs.half.max().item():.4g}) beside a ridge "
                f"of {tokens.ridge.min().item():.3g}, farther apart than {ridge.dtype} holds: use method=Cholesky(), or float64"
            )
    target = relative.unsqueeze(-1) * tokens.target
    return KeyValuePairs(tokens.kernel, tokens.key, target, tokens.root * relative, ridge)


def _bound(
    tokens: KeyValuePairs, features: Tensor, trace: Tensor, unexplained: Tensor, prior: Tensor
) -> Float[Tensor, "B H Q"]:
    """Bound of ‖output − exact output‖: ‖Ã⁻¹v‖·(√(tr E·e) + tr E·√κ(q, q)/(2√λ)).

    E = G − G̃ and e = κ(q, q) − κ̃(q, q) are the parts that the centres do not explain, positive semidefinite. The error is
    vᵀÃ⁻¹[(κ − κ̃) − E A⁻¹κ]; the first part has norm at most √(tr E·e) by Cauchy and Schwarz, and ‖A⁻¹κ‖ is at most
    √κ(q, q)/(2√λ), since κ = G^½b with ‖b‖² ≤ κ(q, q) and s/(s² + λ) ≤ 1/(2√λ).
    """
    factor = features_factor(features, tokens.ridge)
    coefficients = torch.cholesky_solve(features.mT @ tokens.target, factor)
    ridge = tokens.ridge[..., None, None]
    dual = (tokens.target - features @ coefficients) / ridge  # Ã⁻¹v
    trace = trace.unsqueeze(-1)
    ridge = tokens.ridge.unsqueeze(-1)
    kernel_error = (trace * unexplained).sqrt() + trace * (prior / ridge).sqrt() / 2
    return dual.flatten(2).norm(dim=-1).unsqueeze(-1) * kernel_error
