"""B17: log Z by positive random features."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.ops.random_features import RandomFeaturesResult, random_feature_log_partition
from massieu.papers.claims.claim import (
    BAL,
    GRADIENT_BY_DIFFERENCES,
    QUADRATURE,
    Check,
    at_least,
    close,
    mean_of_draws,
    near_in_standard_errors,
)
from massieu.papers.claims.false_alarms import binomial_tail
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences, log_integral, quadrature
from massieu.papers.claims.registry import claim

_BATCHES = 101
"""Batches of draws with heavy tails; an odd number has a median batch."""
_BATCH_SIZE = 5000


@claim(
    "B17",
    title="Random features for log Z",
    statement="Positive random features estimate Z without bias, with the variance (E Ẑ₁² − Z²)/m known in closed form; "
    "log Ẑ is biased down by half the relative variance.",
    source=f"{BAL}, §3.1, which cites Performers; the formulas are derived",
    status="quoted",
    corrected="ReLU features define another normaliser, not an approximation of exp; of the two estimators of attention, "
    "the gradient of log Ẑ is the noisier one.",
)
def random_features(atoms: int = 6, features: int = 64, estimates: int = 2500, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, features=features, estimates=estimates)
    normal = normal_draws(seed)
    # Norms of 0.3 and 0.4: ‖q + k‖ ≤ 0.7, where draws see the variance.
    query = 0.3 * F.normalize(normal(2), dim=-1)
    key = 0.4 * F.normalize(normal(atoms, 2), dim=-1)
    yield from _one_feature(query, key)
    yield from _all_features(query, key, features, seed)
    yield from _draws(query, key, features, estimates, seed)
    yield from _estimators(query, key, features, estimates, seed)
    yield from _heavy_tails(normal, seed)
    yield from _rectified(normal, key)


def _estimate(
    query: Tensor, key: Tensor, features: int, seed: int, standard_error: bool = True
) -> RandomFeaturesResult:
    """The library's estimate of log Z, for one query or several, at scale 1."""
    return random_feature_log_partition(
        query.reshape(1, 1, -1, query.shape[-1]),
        key[None, None],
        generator=torch.Generator().manual_seed(seed),
        features=features,
        scale=1.0,
        standard_error=standard_error,
    )


def _log_estimate(query: Tensor, key: Tensor, features: int, seed: int) -> Tensor:
    """log Ẑ for one query."""
    return _estimate(query, key, features, seed, standard_error=False).log_partition[0, 0, 0]


def _one_feature(query: Tensor, key: Tensor) -> Iterator[Check]:
    """Mean and variance of φ(q)φ(k), by quadrature along q + k."""
    norms = (query.square().sum() + key.square().sum(-1)) / 2
    length = (query + key).norm(dim=-1, keepdim=True)

    def moment(power: int) -> Tensor:
        def log_integrand(x: Tensor) -> Tensor:
            return power * length * x - x * x / 2 - math.log(2 * math.pi) / 2

        return (log_integral(log_integrand, -12, 12) - power * norms).exp()

    dot = key @ query
    yield close("E φ(q)φ(k) and exp(q·k)", moment(1), dot.exp(), QUADRATURE)
    variance = torch.exp(2 * dot) * torch.expm1(length[:, 0].square())
    yield close("Var φ(q)φ(k) and e^{2q·k}(e^{‖q+k‖²} − 1)", moment(2) - moment(1).square(), variance, QUADRATURE)


def _all_features(query: Tensor, key: Tensor, features: int, seed: int) -> Iterator[Check]:
    """E Ẑ₁² by its formula and by an integral over the plane, and the standard error that the library derives from it."""
    z = (key @ query).exp().sum()
    pair_norms = (2 * query + key[:, None] + key).square().sum(-1) / 2
    norms = key.square().sum(-1) / 2
    second_moment = torch.exp(pair_norms - query.square().sum() - norms[:, None] - norms).sum()
    nodes, log_weight = quadrature(-10, 10, 20)
    plane = torch.cartesian_prod(nodes, nodes)
    log_density = (log_weight[:, None] + log_weight).flatten() - plane.square().sum(-1) / 2 - math.log(2 * math.pi)
    log_feature = plane @ query - query.square().sum() / 2 + torch.logsumexp(plane @ key.T - norms, -1)
    integral = torch.exp(log_density + 2 * log_feature).sum()
    yield close("E Ẑ₁² by the double sum and by quadrature", second_moment, integral, QUADRATURE)
    error = _estimate(query, key, features, seed).standard_error
    assert error is not None
    formula = ((second_moment - z * z) / features).sqrt() / z
    yield close("the standard error and ((E Ẑ₁² − Z²)/m)^½ / Z", error[0, 0, 0], formula)


def _draws(query: Tensor, key: Tensor, features: int, estimates: int, seed: int) -> Iterator[Check]:
    """Ẑ has no bias, and log Ẑ is biased down by half of its relative variance; both in standard errors."""
    log_z = torch.logsumexp(key @ query, -1)
    large = _estimate(query, key, features * estimates, seed)
    assert large.standard_error is not None
    ratio = torch.exp(large.log_partition[0, 0, 0] - log_z)
    yield near_in_standard_errors("Ẑ/Z and 1", ratio, 1.0, large.standard_error[0, 0, 0])
    log_estimates = torch.stack([_log_estimate(query, key, features, seed + i) for i in range(estimates)])
    # Ẑ/Z − 1 has mean 0 and carries nearly all of the noise: it is taken away as a control.
    excess = log_estimates - log_z - torch.expm1(log_estimates - log_z)
    bias = -large.standard_error[0, 0, 0].square() * estimates / 2
    yield mean_of_draws("bias of log Ẑ and −(E Ẑ₁² − Z²)/(2mZ²)", excess, bias)


def _estimators(query: Tensor, key: Tensor, features: int, estimates: int, seed: int) -> Iterator[Check]:
    """Two estimators of attention: the gradient of log Ẑ, and the ratio of features, which has the smaller error."""

    def scores(omega: Tensor) -> Tensor:
        """log φ of each key at each feature, but for their common factor."""
        return omega @ key.T - key.square().sum(-1) / 2

    def feature_weights(omega: Tensor) -> Tensor:
        """r_ω, the share of each feature in Ẑ."""
        return torch.softmax(omega @ query + torch.logsumexp(scores(omega), -1), -1)

    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(features, 2, dtype=torch.float64, generator=generator)
    formula = feature_weights(omega) @ omega - query
    slope = differences(lambda q: _log_estimate(q, key, features, seed), query)
    yield close("∂ log Ẑ/∂q and Σ r_ω ω − q", slope, formula, GRADIENT_BY_DIFFERENCES)

    # (estimates, features, 2)
    omega = torch.randn(estimates, features, 2, dtype=torch.float64, generator=generator)
    weights = feature_weights(omega).unsqueeze(-1)
    mean_keys = torch.softmax(scores(omega), -1) @ key
    exact = torch.softmax(key @ query, -1) @ key
    ratio_error = _root_mean_square((weights * mean_keys).sum(1) - exact)
    gradient_error = _root_mean_square((weights * omega).sum(1) - query - exact)
    detail = f"{gradient_error:.3g} against {ratio_error:.3g} at m = {features}"
    yield at_least("error of ∂ log Ẑ/∂q over that of the ratio of features", gradient_error / ratio_error, 1.0, detail)


def _root_mean_square(errors: Tensor) -> Tensor:
    return errors.square().sum(-1).mean().sqrt()


def _heavy_tails(normal: Normal, seed: int) -> Iterator[Check]:
    """The formula has the variance where draws do not show it (trap 32): features beyond most draws make it."""
    half = F.normalize(normal(2), dim=-1) * math.sqrt(4.86) / 2
    error = _estimate(half, half[None], 1, seed).standard_error
    assert error is not None
    reported = error[0, 0, 0].square()
    yield close("‖q+k‖² = 4.86: reported variance and e^{‖q+k‖²} − 1", reported, math.expm1(4.86))
    # φ(q)φ(k)/e^{q·k} is w = e^{s·x − s²/2} of a standard normal x, s = ‖q + k‖; half of E w² lies beyond x = 2s.
    norm = math.sqrt(4.86)
    draws = (norm * normal(_BATCHES, _BATCH_SIZE) - 4.86 / 2).exp()
    ratio = draws.var(-1).median() / reported
    name = "‖q+k‖² = 4.86: median variance drawn over that reported"
    detail = f"of {_BATCHES} batches of {_BATCH_SIZE} draws"
    false_alarm = binomial_tail(_BATCHES, _probability_of_whole_variance(norm), _BATCHES // 2 + 1)
    basis = "binomial law of the batches, by Cantelli's inequality"
    yield Check(name, ratio.item(), "≤", 1.0, detail, false_alarm=false_alarm, basis=basis)


def _probability_of_whole_variance(size: float) -> float:
    """An upper bound of the probability that a batch's variance reaches that of the law.

    Either a draw lies beyond x = √(2 log n), or the mean of w² over the draws within reaches E w². That mean has the
    expectation E[w²; within] and at most the variance E[w⁴; within]/n: Cantelli's inequality.
    """
    end = math.sqrt(2 * math.log(_BATCH_SIZE))
    # In units of E w² = e^{s²}: E[wᵖ; x < c] = e^{p(p − 1)s²/2}·Φ(c − ps).
    expectation = _normal_below(end - 2 * size)
    variance = math.exp(4 * size**2) * _normal_below(end - 4 * size) / _BATCH_SIZE
    # The variance drawn is below n/(n − 1) of the mean square, and reported is e^{s²} − 1.
    excess = (1 - 1 / _BATCH_SIZE) * -math.expm1(-(size**2)) - expectation
    return _BATCH_SIZE * _normal_below(-end) + variance / (variance + excess**2)


def _normal_below(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _rectified(normal: Normal, key: Tensor) -> Iterator[Check]:
    """Features max(0, ω·x) sum to another function of the query: the log-ratio to Z is not constant."""
    queries = F.normalize(normal(20, 2), dim=-1)
    cosine = (queries @ F.normalize(key, dim=-1).T).clamp(-1, 1)
    angle = torch.acos(cosine)
    kernel = (torch.sin(angle) + (math.pi - angle) * cosine) * key.norm(dim=-1) / (2 * math.pi)
    ratio = kernel.sum(-1).log() - torch.logsumexp(queries @ key.T, -1)
    yield at_least("ReLU features: largest less smallest log Ẑ − log Z", ratio.max() - ratio.min(), 0.01)
