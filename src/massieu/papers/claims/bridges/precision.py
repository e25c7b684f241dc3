"""X1 and X2: the score at which softmax attention is the conditional mean of Gaussian tokens, and the best at finite L."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.matrices import least_squares
from massieu.papers.claims.claim import Check, at_least, at_most, close, differs, mean_of_draws, near_in_standard_errors
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory import GaussianTokens, denoising_score

_NUMBERS_IN_A_BLOCK = 2_000_000
_QUERY = torch.tensor([0.6, -0.5], dtype=torch.float64)


def _tokens() -> GaussianTokens:
    """Two-dimensional keys off the origin, values that depend on them and have noise."""
    root = torch.tensor(
        [[1.0, 0, 0, 0], [0.4, 0.8, 0, 0], [0.7, -0.5, 0.6, 0], [-0.3, 0.9, 0.2, 0.5]], dtype=torch.float64
    )
    joint = root @ root.T
    means = torch.tensor([0.3, -0.2, 1.0, 0.5], dtype=torch.float64)
    return GaussianTokens.create(means[:2], means[2:], joint[:2, :2], joint[2:, :2], joint[2:, 2:])


@claim(
    "X1",
    title="Precision matching",
    statement="Over many jointly Gaussian tokens, attention with logits k·M(x − μ_k) is μ_v + Σ_vk M(x − μ_k). It "
    "is the conditional mean E[v | k = x] if and only if Σ_vk M = Σ_vk Σ_kk⁻¹. So M = Σ_kk⁻¹, and M = "
    "(Σ+τ²)⁻¹Σ(Σ+τ²)⁻¹ where attention denoises.",
    source="joins Zhang (b) and the hypothesis of Shim §3.2; exponential tilting",
    status="derived",
)
def precision_matching(keys: int = 20_000, repetitions: int = 30, seed: int = 0) -> Iterator[Check]:
    check_at_least(1000, keys=keys)
    check_at_least(20, repetitions=repetitions)
    normal = normal_draws(seed)
    law = _tokens()
    half_score = 0.5 * law.score
    asymmetric = torch.tensor([[0.2, 0.5], [-0.4, 0.3]], dtype=torch.float64)

    def limit(score: Tensor) -> Tensor:
        return law.value_mean + law.cross_covariance @ score @ (_QUERY - law.key_mean)

    best = law.conditional_mean(_QUERY)
    yield from _simulated(normal, "M = Σ⁻¹", law, law.score, best, keys, repetitions)
    yield from _simulated(normal, "M = Σ⁻¹/2", law, half_score, limit(half_score), keys, repetitions)
    yield from _simulated(normal, "an asymmetric M", law, asymmetric, limit(asymmetric), keys, repetitions)
    yield from _by_regression(normal, law)
    yield from _necessity(law, half_score)
    yield from _denoising(normal, keys, repetitions)


@claim(
    "X2",
    title="Best temperature for finitely many keys",
    statement="Over L tokens with the score sΣ⁻¹, the mean squared error is (1 − s)²b + (e^{s²r}/L)(tr Cov(v) + (2s "
    "− s²)b), with b = ‖R(x − μ)‖² and r = (x − μ)ᵀΣ⁻¹(x − μ). The best s is below 1 and grows with L, and the "
    "logits' variance s²r is at most max(1, log L).",
    source="S15 applied to X1; the bracket's (2s − s²)b has the product of both biases in it",
    status="derived",
)
def best_temperature(keys: int = 4000, repetitions: int = 1000, seed: int = 0) -> Iterator[Check]:
    check_at_least(100, keys=keys)
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    law = _tokens()
    for share in (0.5, 1.0):
        yield from _simulated_error(normal, law, share, keys, repetitions)
    yield from _bias_of_few_keys(normal, 20 * repetitions)
    yield from _the_minimum(law)


def _simulated(
    normal: Normal, name: str, law: GaussianTokens, score: Tensor, limit: Tensor, keys: int, repetitions: int
) -> Iterator[Check]:
    """The mean output over repetitions, against the limit: the bias of finitely many keys has the order 1/keys."""
    output = _outputs(normal, law, score @ (_QUERY - law.key_mean), keys, repetitions)
    for coordinate in range(len(limit)):
        yield mean_of_draws(f"{name}: output {coordinate + 1} and its limit", output[:, coordinate], limit[coordinate])


def _by_regression(normal: Normal, law: GaussianTokens, count: int = 100_000) -> Iterator[Check]:
    """The conditional mean's slope by least squares, which needs no formula of this package."""
    key, value = _draws(normal, law, count)
    centred = key - key.mean(0)
    slope = least_squares(centred, value - value.mean(0)).mT
    residual = value - value.mean(0) - centred @ slope.mT
    # Variance of a least-squares slope: residual variance times the inverse Gram matrix.
    inverse_gram = torch.linalg.inv(centred.mT @ centred)
    error = (residual.var(0)[:, None] * inverse_gram.diagonal()).sqrt()
    yield near_in_standard_errors("R = Σ_vk Σ_kk⁻¹ and least squares", slope, law.regression, error)


def _necessity(law: GaussianTokens, half_score: Tensor) -> Iterator[Check]:
    """Another score is as good if Σ_vk maps its difference from Σ⁻¹ to 0, and no other is."""

    def distance(queries: Tensor) -> Tensor:
        """Of attention with half of the score from the conditional mean."""
        return (law.attention(queries, half_score) - law.conditional_mean(queries)).norm(dim=-1)

    queries = torch.eye(2, dtype=torch.float64) + law.key_mean
    yield at_least("M = Σ⁻¹/2: largest distance from the conditional mean", distance(queries), 0.1)
    angle = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    circle = law.key_mean + torch.stack([angle.cos(), angle.sin()], -1)
    largest_distance = distance(circle).max()
    # The grid misses the best direction by at most π/8000, and the norm by the square of that.
    name = "M = Σ⁻¹/2: ‖Σ_vk(M − Σ⁻¹)‖ and the largest distance on a circle"
    yield close(name, law.mismatch(half_score), largest_distance, 1e-6)
    yield close("M = Σ⁻¹: ‖Σ_vk(M − Σ⁻¹)‖", law.mismatch(law.score), 0.0)

    # With the first value alone, Σ_vk is a row and has a null direction.
    one_value = GaussianTokens.create(
        law.key_mean, law.value_mean[:1], law.key_covariance, law.cross_covariance[:1], law.value_covariance[:1, :1]
    )
    row = law.cross_covariance[0]
    null_direction = torch.stack([-row[1], row[0]])
    score = law.score + torch.outer(null_direction, torch.tensor([1.0, 2.0], dtype=torch.float64))
    name = "one value, M = Σ⁻¹ + a null direction of Σ_vk: attention and the conditional mean"
    yield close(name, one_value.attention(queries, score), one_value.conditional_mean(queries))


def _denoising(normal: Normal, keys: int, repetitions: int) -> Iterator[Check]:
    covariance = torch.tensor([[1.0, 0.4], [0.4, 0.6]], dtype=torch.float64)
    noise = 0.5
    origin = torch.zeros(2, dtype=torch.float64)
    identity = torch.eye(2, dtype=torch.float64)
    # E[x | x̃] from the precisions of prior and noise.
    best = torch.linalg.inv(torch.linalg.inv(covariance) + identity / noise) @ _QUERY / noise
    for name, is_clean in (("noisy context", False), ("clean context", True)):
        context_covariance = covariance
        if not is_clean:
            context_covariance = covariance + noise * identity
        law = GaussianTokens.create(origin, origin, context_covariance, context_covariance, context_covariance)
        score = denoising_score(covariance, noise, clean_context=is_clean)
        yield close(f"denoising, {name}: limit and the best output", law.attention(_QUERY, score), best)
        output = _key_outputs(normal, context_covariance, score @ _QUERY, keys, repetitions)
        yield mean_of_draws(f"denoising, {name}: simulated and the best output", output, best)


def _simulated_error(normal: Normal, law: GaussianTokens, share: float, keys: int, repetitions: int) -> Iterator[Check]:
    eta = share * law.score @ (_QUERY - law.key_mean)
    output = _outputs(normal, law, eta, keys, repetitions)
    error = (output - law.conditional_mean(_QUERY)).square().sum(-1)
    expected = law.error(_QUERY, share, keys)
    yield mean_of_draws(f"s = {share:g}: mean squared error over {keys} keys and the formula", error, expected)


def _bias_of_few_keys(normal: Normal, repetitions: int, keys: int = 150, share: float = 0.5) -> Iterator[Check]:
    """Values equal to keys, both N(0, 1): with s²b in place of (2s − s²)b the formula is off."""
    one = torch.ones(1, 1, dtype=torch.float64)
    origin = torch.zeros(1, dtype=torch.float64)
    law = GaussianTokens.create(origin, origin, one, one, one)
    query = torch.tensor([1.4], dtype=torch.float64)
    x = query.item()
    eta = share * query.item()
    smoothing_error = (x - eta) ** 2  # for infinitely many keys
    second_moment = math.exp(eta**2)  # E w² of the weights w
    expected = second_moment * (1 + (2 * share - share**2) * x**2)
    coefficient = keys * (law.error(query, share, keys) - smoothing_error)
    yield close("values = keys: the 1/L part of the formula, times L", coefficient, expected)

    key = normal(repetitions, keys)
    error = ((key * eta).softmax(-1) * key).sum(-1) - x
    # The part of the error that is linear in the weights has mean 0, and most of the variance.
    linear = ((key * eta - 0.5 * eta**2).exp() * (key - eta)).mean(-1)
    simulated = keys * (error.square() - smoothing_error - 2 * (eta - x) * linear)
    # The next order is smaller by E w²/L, times a number of the order of 1 to 5.
    bias = 5 * second_moment / keys * expected
    name = f"values = keys: simulated over {keys} keys"
    yield mean_of_draws(f"{name} and the formula", simulated, expected, bias)
    without_product = expected - second_moment * 2 * share * (1 - share) * x**2
    name = f"{name} less the formula without the biases' product, in standard errors"
    yield differs(name, simulated, without_product, expected)


def _the_minimum(law: GaussianTokens) -> Iterator[Check]:
    """The best share s: the error has no slope there, and s grows with L within its bounds."""
    query = law.key_mean + torch.tensor([[0.5, 0.2], [1.5, -1.0], [4.0, 3.0]], dtype=torch.float64)
    squared_distance = law.squared_distance(query)
    previous_share = torch.zeros(3, dtype=torch.float64)
    for keys in (3, 100, 10_000, 1_000_000):
        share = law.optimal_share(query, keys)
        slope = differences(lambda s, keys=keys: law.error(query, s[..., 0], keys), share[:, None])
        yield at_most(f"{keys} keys: |slope| of the error at the best s", slope.diagonal().abs(), 1e-7)
        yield at_least(f"{keys} keys: growth of the best s", share - previous_share, 0.0)
        yield at_most(f"{keys} keys: best s", share, 1.0)
        ratio = share.square() * squared_distance / max(1, math.log(keys))
        yield at_most(f"{keys} keys: the logits' variance over max(1, log L)", ratio, 1.0)
        previous_share = share


def _outputs(
    normal: Normal, law: GaussianTokens, eta: Tensor, keys: int, repetitions: int
) -> Float[Tensor, "repetitions e"]:
    """Attention with the logits k·η over fresh tokens of the law in each repetition, computed in blocks of them."""
    outputs = []
    block = max(1, _NUMBERS_IN_A_BLOCK // (4 * keys))
    for start in range(0, repetitions, block):
        key, value = _draws(normal, law, min(block, repetitions - start), keys)
        outputs.append(_attend(eta, key, value))
    return torch.cat(outputs)


def _key_outputs(
    normal: Normal, covariance: Tensor, eta: Tensor, keys: int, repetitions: int
) -> Float[Tensor, "repetitions d"]:
    """The same for keys of the law N(0, covariance) that are their own values."""
    root = torch.linalg.cholesky(covariance)
    outputs = []
    block = max(1, _NUMBERS_IN_A_BLOCK // (2 * keys))
    for start in range(0, repetitions, block):
        key = normal(min(block, repetitions - start), keys, len(root)) @ root.mT
        outputs.append(_attend(eta, key, key))
    return torch.cat(outputs)


def _attend(eta: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = eta.expand(len(key), 1, 1, -1)
    return ops.attention(query, key.unsqueeze(1), value.unsqueeze(1), scale=1.0).output[:, 0, 0]


def _draws(normal: Normal, law: GaussianTokens, *shape: int) -> tuple[Tensor, Tensor]:
    """Keys, and values by their conditional law given the key."""
    key = law.key_mean + normal(*shape, len(law.key_mean)) @ torch.linalg.cholesky(law.key_covariance).mT
    slope = law.cross_covariance @ torch.linalg.inv(law.key_covariance)
    residual = law.value_covariance - slope @ law.cross_covariance.mT
    noise = normal(*shape, len(law.value_mean)) @ torch.linalg.cholesky(residual).mT
    value = law.value_mean + (key - law.key_mean) @ slope.mT + noise
    return key, value
