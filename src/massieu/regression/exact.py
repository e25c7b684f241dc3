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
        >>> key = torch.tensor([[[[0.0], [1.0]]]])
        >>> value = torch.tensor([[[[3.0], [5.0]]]])
        >>> how = {"kernel": GaussianKernel.create(1.0), "ridge": 0.0, "method": Cholesky()}
        >>> conditional_mean_attention(key, key, value, **how).output.flatten().round(decimals=3).tolist()
        [3.0, 5.0]
    """


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """factor⁻¹ right."""
    return torch.linalg.solve_triangular(factor, right, upper=False)


def exact(tokens: KeyValuePairs, query: Float[Tensor, "B H G L D"], is_causal: bool, need_variance: bool) -> Prediction:
    """By features if the kernel has fewer than there are keys, otherwise by the Gram matrix.

    The variance is included if it was requested, or costs nothing.
    """
    features = tokens.features()
    if features is None:
        if is_causal:
            return by_gram(tokens, query.flatten(2, 3), _causal_mask(query, tokens))
        if need_variance:
            return by_gram(tokens, query.flatten(2, 3), None)
        return Prediction(_mean_by_gram(tokens, query.flatten(2, 3)), None)
    query_features = tokens.kernel.features(query.flatten(2, 3))
    assert query_features is not None
    if is_causal:
        return _causal(tokens, features, query_features.unflatten(2, query.shape[2:4]))
    return Prediction(*by_features(features, tokens.target, tokens.ridge, query_features))


def _causal_mask(query: Tensor, tokens: KeyValuePairs) -> Bool[Tensor, "N Q"]:
    """True if query i sees key n, n ≤ i; for the queries of all heads of a group side by side."""
    group, length = query.shape[2:4]
    keys = torch.arange(tokens.key.shape[2], device=query.device)
    return keys.unsqueeze(-1) <= torch.arange(length, device=query.device).repeat(group)


def _mean_by_gram(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"]) -> Float[Tensor, "B H Q E"]:
    """κᵀ(A⁻¹v): one system for each coordinate of the values, and none for queries."""
    factor = tokens.gram_factor()
    solution = torch.linalg.solve_triangular(factor.mT, solve_lower(factor, tokens.target), upper=True)
    solution = tokens.root.unsqueeze(-1) * solution
    logs = tokens.logarithms
    if logs is None:
        return tokens.kernel(query, tokens.key) @ solution
    pairs, largest = logs.pairs(query, tokens.key)
    return lifted(pairs @ logs.coefficients(solution), largest.unsqueeze(-1))


def by_gram(tokens: KeyValuePairs, query: Float[Tensor, "B H Q D"], seen: Bool[Tensor, "N Q"] | None) -> Prediction:
    """κᵀA⁻¹v = (C⁻¹κ)·(C⁻¹v) for A = CCᵀ. The first i rows of C are the factor of the first i keys, so that forward
    substitution has solved the systems of all prefixes on its way, and a causal mask is one on its result.
    """
    factor = tokens.gram_factor()
    logs = tokens.logarithms
    half_solution = solve_lower(factor, tokens.target)  # C⁻¹v
    if logs is None:
        cross = _half_solved_pairs(factor, tokens, tokens.kernel(tokens.key, query), seen)
        variance = (tokens.kernel.diagonal(query) - cross.square().sum(-2)).clamp(min=0.0)
        return Prediction(cross.mT @ half_solution, variance)
    pairs, largest = logs.pairs(query, tokens.key, None if seen is None else seen.mT)
    # κ(q, k)·exp(−h(k)), the factor of the target, in units of exp(largest + c).
    cross = _half_solved_pairs(factor, tokens, (pairs * logs.relative.exp().unsqueeze(-2)).mT, seen)
    output = lifted(cross.mT @ half_solution, largest.unsqueeze(-1))
    # The variance in units of κ(q, q) = exp(2h(q)), for which cross must be in units of exp(h(q)).
    half = logs.half_at(query)
    unit = (logs.centre + largest - half).exp().unsqueeze(-2)
    share = (1 - (cross * unit).square().sum(-2)).clamp(min=0.0)
    return Prediction(output, lifted(share, 2 * half))


def _half_solved_pairs(
    factor: Tensor, tokens: KeyValuePairs, pairs: Float[Tensor, "B H N Q"], seen: Bool[Tensor, "N Q"] | None
) -> Float[Tensor, "B H N Q"]:
    """C⁻¹W^½κ, with zeros in the rows of keys that a query does not see."""
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

    After each block the map from features to values has a Gaussian law, which is the prior of the next block. There it is a
    regression by the Gram matrix, causal as in `by_gram`. Each block's factor is computed anew, so that errors do not grow.
    """
    group, length = query.shape[2:4]
    num_keys = min(features.shape[2], length)
    block = max(features.shape[-1], 64)
    precision = _times_identity(tokens.ridge, features)
    moment = torch.zeros_like(features.mT @ tokens.target)
    outputs = []
    variances = []
    for start in range(0, num_keys, block):
        rows = slice(start, min(start + block, num_keys))
        block_features = features[:, :, rows]
        target = tokens.target[:, :, rows]
        output, share = _block(precision, moment, block_features, target, query[:, :, :, rows])
        outputs.append(output.unflatten(2, (group, -1)))
        variances.append((tokens.ridge.unsqueeze(-1) * share).unflatten(2, (group, -1)))
        precision = precision + block_features.mT @ block_features
        moment = moment + block_features.mT @ target
    if length > num_keys or not outputs:
        # Queries after the last key see all keys.
        later_queries = query[:, :, :, num_keys:].flatten(2, 3)
        output, variance = by_features(features, tokens.target, tokens.ridge, later_queries)
        outputs.append(output.unflatten(2, (group, -1)))
        variances.append(variance.unflatten(2, (group, -1)))
    return Prediction(torch.cat(outputs, 3).flatten(2, 3), torch.cat(variances, 3).flatten(2, 3))


def _block(precision: Tensor, moment: Tensor, features: Tensor, target: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Output and variance/λ of a block of keys and queries, after all keys before it."""
    # In units of the prior of the block, of precision CCᵀ, the map's coefficients have mean C⁻¹moment and variance 1.
    factor = cholesky(precision, "second moment of the features")
    prior_mean = solve_lower(factor, moment)
    white_keys = solve_lower(factor, features.mT)
    white_queries = solve_lower(factor, query.flatten(2, 3).mT)
    identity = torch.eye(white_keys.shape[-1], dtype=white_keys.dtype, device=white_keys.device)
    inner_factor = cholesky(white_keys.mT @ white_keys + identity, "Gram matrix")
    positions = torch.arange(white_keys.shape[-1], device=white_keys.device)
    seen = positions.unsqueeze(-1) <= positions.repeat(query.shape[2])
    cross = torch.where(seen, solve_lower(inner_factor, white_keys.mT @ white_queries), 0.0)
    # The prior's prediction, corrected by what the block's targets differ from theirs.
    residual = target - white_keys.mT @ prior_mean
    output = white_queries.mT @ prior_mean + cross.mT @ solve_lower(inner_factor, residual)
    return output, (white_queries.square().sum(-2) - cross.square().sum(-2)).clamp(min=0.0)
