"""Conditional mean attention by Cholesky factors: of the Gram matrix, or of the features' second moments."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.regression.logarithms import lifted
from massieu.regression.tokens import KeyValuePairs, Prediction, cholesky


@dataclass(frozen=True)
class Cholesky:
    """Exact solver: by the kernel's features where there are fewer of them than keys, else by the Gram matrix.

    Features (F of them, D for `LinearKernel`) take time N·F² and memory N·F, causal or not. The Gram matrix takes N³
    and N·(N + L); the variance and `is_causal` N²·L more. Right under `torch.func` transforms and `torch.compile`;
    compiled, a singular matrix gives NaN.

    Example:
        >>> import torch
        >>> from massieu.regression import Cholesky, GaussianKernel, conditional_mean_attention
        >>> key, value = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[3.0], [5.0]]]])
        >>> how = {"kernel": GaussianKernel.create(1.0), "ridge": 0.0, "method": Cholesky()}
        >>> conditional_mean_attention(key, key, value, **how).output.flatten().round(decimals=3).tolist()
        [3.0, 5.0]
    """


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """factor⁻¹ right."""
    return torch.linalg.solve_triangular(factor, right, upper=False)


def exact(tokens: KeyValuePairs, query: Float[Tensor, "B H G L D"], is_causal: bool, need_variance: bool) -> Prediction:
    """By features where the kernel has fewer than there are keys, else by the Gram matrix.

    The variance comes where it was asked for, or costs nothing.
    """
    features = tokens.features()
    if features is None:
        if is_causal or need_variance:
            return by_gram(tokens, query.flatten(2, 3), _seen(query, tokens) if is_causal else None)
        return Prediction(_mean_by_gram(tokens, query.flatten(2, 3)), None)
    described = tokens.kernel.features(query.flatten(2, 3))
    assert described is not None
    if is_causal:
        return _causal(tokens, features, described.unflatten(2, query.shape[2:4]))
    return Prediction(*by_features(features, tokens.target, tokens.ridge, described))


def _seen(query: Tensor, tokens: KeyValuePairs) -> Bool[Tensor, "N Q"]:
    """Key n is seen by query i: n ≤ i."""
    group, length = query.shape[2:4]
    keys = torch.arange(tokens.key.shape[2], device=query.device)
    return keys.unsqueeze(-1) <= torch.arange(length, device=query.device).repeat(group)


def _mean_by_gram(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"]) -> Float[Tensor, "B H Q E"]:
    """κᵀ(A⁻¹v): a system for each coordinate of the values, and none for each query."""
    factor = tokens.gram_factor()
    solved = torch.linalg.solve_triangular(factor.mT, solve_lower(factor, tokens.target), upper=True)
    solved, logs = tokens.root.unsqueeze(-1) * solved, tokens.logarithms
    if logs is None:
        return tokens.kernel(query, tokens.key) @ solved
    pairs, largest = logs.pairs(query, tokens.key)
    return lifted(pairs @ logs.coefficients(solved), largest.unsqueeze(-1))


def by_gram(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"], seen: Bool[Tensor, "N Q"] | None) -> Prediction:
    """κᵀA⁻¹v = (C⁻¹κ)·(C⁻¹v) for A = CCᵀ. The first i rows of C are the factor of the first i keys, so that forward
    substitution has solved the systems of all prefixes on its way, and a causal mask is one on its result.
    """
    factor, logs = tokens.gram_factor(), tokens.logarithms
    solved = solve_lower(factor, tokens.target)
    if logs is None:
        cross = _substituted(factor, tokens, tokens.kernel(tokens.key, query), seen)
        return Prediction(cross.mT @ solved, (tokens.kernel.diagonal(query) - cross.square().sum(-2)).clamp(min=0.0))
    pairs, largest = logs.pairs(query, tokens.key, None if seen is None else seen.mT)
    # κ(q, k)·exp(−h(k)), which the target is multiplied by, in units of exp(largest + c).
    cross = _substituted(factor, tokens, (pairs * logs.relative.exp().unsqueeze(-2)).mT, seen)
    output = lifted(cross.mT @ solved, largest.unsqueeze(-1))
    half = logs.half_at(query)
    # The same in units of exp(h(q)).
    unit = (logs.centre + largest - half).exp().unsqueeze(-2)
    share = (1 - (cross * unit).square().sum(-2)).clamp(min=0.0)
    return Prediction(output, lifted(share, 2 * half))


def _substituted(
    factor: Tensor, tokens: KeyValuePairs, pairs: Float[Tensor, "B H N Q"], seen: Bool[Tensor, "N Q"] | None
) -> Float[Tensor, "B H N Q"]:
    """C⁻¹W^½κ, of which a query gets the rows that it sees."""
    cross = solve_lower(factor, tokens.root.unsqueeze(-1) * pairs)
    return cross if seen is None else torch.where(seen, cross, 0.0)


def by_features(
    features: Float[Tensor, "B H N F"],
    target: Float[Tensor, "B H N E"],
    ridge: Float[Tensor, "B H"],
    query: Float[Tensor, "B H Q F"],
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q"]]:
    """vᵀΦ(ΦᵀΦ + λI)⁻¹φ, and the variance λφᵀ(ΦᵀΦ + λI)⁻¹φ."""
    factor = features_factor(features, ridge)
    cross = solve_lower(factor, query.mT)
    output = cross.mT @ solve_lower(factor, features.mT @ target)
    return output, ridge.unsqueeze(-1) * cross.square().sum(-2)


def features_factor(features: Float[Tensor, "B H N F"], ridge: Float[Tensor, "B H"]) -> Float[Tensor, "B H F F"]:
    """The Cholesky factor of ΦᵀΦ + λI."""
    return cholesky(features.mT @ features + _times_identity(ridge, features), "second moment of the features")


def _times_identity(ridge: Tensor, features: Tensor) -> Tensor:
    size = features.shape[-1]
    return ridge[..., None, None] * torch.eye(size, dtype=features.dtype, device=features.device)


def _causal(tokens: KeyValuePairs, features: Float[Tensor, "B H N F"], query: Float[Tensor, "B H G L F"]) -> Prediction:
    """Recursive least squares, a block of keys at a time: O(N·F²), and no N×N.

    What earlier blocks say is a Gaussian law of the map from features to values; within a block it is the prior of a
    regression by the Gram matrix, causal as in `by_gram`. Each block's factor is made anew, so that nothing drifts.
    """
    group, length = query.shape[2:4]
    keys = min(features.shape[2], length)
    block = max(features.shape[-1], 64)
    precision = _times_identity(tokens.ridge, features)
    moment = torch.zeros_like(features.mT @ tokens.target)
    outputs, variances = [], []
    for start in range(0, keys, block):
        rows = slice(start, min(start + block, keys))
        own, target = features[:, :, rows], tokens.target[:, :, rows]
        output, share = _block(precision, moment, own, target, query[:, :, :, rows])
        outputs.append(output.unflatten(2, (group, -1)))
        variances.append((tokens.ridge.unsqueeze(-1) * share).unflatten(2, (group, -1)))
        precision, moment = precision + own.mT @ own, moment + own.mT @ target
    if length > keys or not outputs:
        output, variance = by_features(features, tokens.target, tokens.ridge, query[:, :, :, keys:].flatten(2, 3))
        outputs.append(output.unflatten(2, (group, -1)))
        variances.append(variance.unflatten(2, (group, -1)))
    return Prediction(torch.cat(outputs, 3).flatten(2, 3), torch.cat(variances, 3).flatten(2, 3))


def _block(precision: Tensor, moment: Tensor, features: Tensor, target: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Output and variance/λ of a block of keys and queries, after all keys before it."""
    factor = cholesky(precision, "second moment of the features")
    before = solve_lower(factor, moment)
    own, asked = solve_lower(factor, features.mT), solve_lower(factor, query.flatten(2, 3).mT)
    one = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
    inner = cholesky(own.mT @ own + one, "Gram matrix")
    places = torch.arange(own.shape[-1], device=own.device)
    seen = places.unsqueeze(-1) <= places.repeat(query.shape[2])
    cross = torch.where(seen, solve_lower(inner, own.mT @ asked), 0.0)
    output = asked.mT @ before + cross.mT @ solve_lower(inner, target - own.mT @ before)
    return output, (asked.square().sum(-2) - cross.square().sum(-2)).clamp(min=0.0)
