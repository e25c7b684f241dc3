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
    half = 0.5 * law.score
    skew = torch.tensor([[0.2, 0.5], [-0.4, 0.3]], dtype=torch.float64)
    limits = {"M = Σ⁻¹": (law.score, law.conditional_mean(_QUERY))}
    for name, score in (("M = Σ⁻¹/2", half), ("an asymmetric M", skew)):
        limits[name] = (score, law.value_mean + law.cross_covariance @ score @ (_QUERY - law.key_mean))
    for name, (score, limit) in limits.items():
        yield from _simulated(normal, name, law, score, _QUERY, limit, keys, repetitions)
    yield from _by_regression(normal, law)
    yield from _necessity(law, half)
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
    normal: Normal,
    name: str,
    law: GaussianTokens,
    score: Tensor,
    query: Tensor,
    limit: Tensor,
    keys: int,
    repetitions: int,
) -> Iterator[Check]:
    """The mean over repetitions, beside the limit: what finitely many keys add has the order 1/keys."""
    output = torch.cat(list(_outputs(normal, law, score @ (query - law.key_mean), keys, repetitions)))
    for coordinate in range(len(limit)):
        yield mean_of_draws(f"{name}: output {coordinate + 1} and its limit", output[:, coordinate], limit[coordinate])


def _by_regression(normal: Normal, law: GaussianTokens, count: int = 100_000) -> Iterator[Check]:
    """The conditional mean is what least squares finds: no formula of ours in it."""
    key, value = _draws(normal, law, count)
    centred = key - key.mean(0)
    slope = least_squares(centred, value - value.mean(0)).mT
    residual = value - value.mean(0) - centred @ slope.mT
    # Var of a least-squares slope: residual variance times the inverse Gram matrix.
    inverse = torch.linalg.inv(centred.mT @ centred)
    error = (residual.var(0)[:, None] * inverse.diagonal()).sqrt()
    yield near_in_standard_errors("R = Σ_vk Σ_kk⁻¹ and least squares", slope, law.regression, error)


def _necessity(law: GaussianTokens, other: Tensor) -> Iterator[Check]:
    """Other scores are as good where Σ_vk does not see the difference, and nowhere else."""
    directions = torch.eye(2, dtype=torch.float64) + law.key_mean
    gap = law.attention(directions, other) - law.conditional_mean(directions)
    yield at_least("M = Σ⁻¹/2: largest distance from the conditional mean", gap.norm(dim=-1), 0.1)
    angle = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    around = law.key_mean + torch.stack([angle.cos(), angle.sin()], -1)
    farthest = (law.attention(around, other) - law.conditional_mean(around)).norm(dim=-1).max()
    # A direction is missed by at most π/8000, the norm by the square of that.
    yield close("M = Σ⁻¹/2: ‖Σ_vk(M − Σ⁻¹)‖ and the largest distance on a circle", law.mismatch(other), farthest, 1e-6)
    yield close("M = Σ⁻¹: ‖Σ_vk(M − Σ⁻¹)‖", law.mismatch(law.score), 0.0)
    narrow = GaussianTokens.create(
        law.key_mean, law.value_mean[:1], law.key_covariance, law.cross_covariance[:1], law.value_covariance[:1, :1]
    )
    row = law.cross_covariance[0]
    null = torch.stack([-row[1], row[0]])
    equal = law.score + torch.outer(null, torch.tensor([1.0, 2.0], dtype=torch.float64))
    yield close(
        "one value, M = Σ⁻¹ + a null direction of Σ_vk: attention and the conditional mean",
        narrow.attention(directions, equal),
        narrow.conditional_mean(directions),
    )


def _denoising(normal: Normal, keys: int, repetitions: int) -> Iterator[Check]:
    covariance = torch.tensor([[1.0, 0.4], [0.4, 0.6]], dtype=torch.float64)
    noise = 0.5
    origin = torch.zeros(2, dtype=torch.float64)
    identity = torch.eye(2, dtype=torch.float64)
    # E[x | x̃] from the precisions of prior and noise.
    best = torch.linalg.inv(torch.linalg.inv(covariance) + identity / noise) @ _QUERY / noise
    for name, context in (("noisy context", covariance + noise * identity), ("clean context", covariance)):
        law = GaussianTokens.create(origin, origin, context, context, context)
        score = denoising_score(covariance, noise, clean_context=context is covariance)
        yield close(f"denoising, {name}: limit and the best output", law.attention(_QUERY, score), best)
        output = torch.cat(list(_key_outputs(normal, context, score @ _QUERY, keys, repetitions)))
        yield mean_of_draws(f"denoising, {name}: simulated and the best output", output, best)


def _simulated_error(normal: Normal, law: GaussianTokens, share: float, keys: int, repetitions: int) -> Iterator[Check]:
    logit = share * law.score @ (_QUERY - law.key_mean)
    truth = law.conditional_mean(_QUERY)
    output = torch.cat(list(_outputs(normal, law, logit, keys, repetitions)))
    error = (output - truth).square().sum(-1)
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
    smoothing = (x - eta) ** 2
    growth = math.exp(eta**2)
    full = growth * (1 + (2 * share - share**2) * x**2)
    found = keys * (law.error(query, share, keys) - smoothing)
    yield close("values = keys: the 1/L part of the formula, times L", found, full)

    key = normal(repetitions, keys)
    error = ((key * eta).softmax(-1) * key).sum(-1) - x
    # What is linear in the weights has mean 0, and most of the variance.
    linear = ((key * eta - 0.5 * eta**2).exp() * (key - eta)).mean(-1)
    part = keys * (error.square() - smoothing - 2 * (eta - x) * linear)
    name = f"simulated over {keys} keys"
    # The next order is smaller by E w²/L, times a number of the order of 1 to 5.
    yield mean_of_draws(f"values = keys: {name} and the formula", part, full, 5 * growth / keys * full)
    without = full - growth * 2 * share * (1 - share) * x**2
    apart = f"values = keys: {name} less the formula without the biases' product, in standard errors"
    yield differs(apart, part, without, full)


def _the_minimum(law: GaussianTokens) -> Iterator[Check]:
    query = law.key_mean + torch.tensor([[0.5, 0.2], [1.5, -1.0], [4.0, 3.0]], dtype=torch.float64)
    distance = law.squared_distance(query)
    previous = torch.zeros(3, dtype=torch.float64)
    for keys in (3, 100, 10_000, 1_000_000):
        share = law.optimal_share(query, keys)
        slope = differences(lambda s, keys=keys: law.error(query, s[..., 0], keys), share[:, None])
        yield at_most(f"{keys} keys: |slope| of the error at the best s", slope.diagonal().abs(), 1e-7)
        yield at_least(f"{keys} keys: growth of the best s", share - previous, 0.0)
        yield at_most(f"{keys} keys: best s", share, 1.0)
        yield at_most(
            f"{keys} keys: the logits' variance over max(1, log L)",
            share.square() * distance / max(1, math.log(keys)),
            1.0,
        )
        previous = share


def _outputs(
    normal: Normal, law: GaussianTokens, logit: Tensor, keys: int, repetitions: int
) -> Iterator[Float[Tensor, "block e"]]:
    """Attention over fresh tokens of the law, blocks of repetitions at a time."""
    block = max(1, _NUMBERS_IN_A_BLOCK // (4 * keys))
    for start in range(0, repetitions, block):
        key, value = _draws(normal, law, min(block, repetitions - start), keys)
        yield _attend(logit, key, value)


def _key_outputs(
    normal: Normal, covariance: Tensor, logit: Tensor, keys: int, repetitions: int
) -> Iterator[Float[Tensor, "block d"]]:
    """The same for values that are the keys, N(0, covariance)."""
    root = torch.linalg.cholesky(covariance)
    block = max(1, _NUMBERS_IN_A_BLOCK // (2 * keys))
    for start in range(0, repetitions, block):
        key = normal(min(block, repetitions - start), keys, len(root)) @ root.mT
        yield _attend(logit, key, key)


def _attend(logit: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = logit.expand(len(key), 1, 1, -1)
    return ops.attention(query, key.unsqueeze(1), value.unsqueeze(1), scale=1.0).output[:, 0, 0]


def _draws(normal: Normal, law: GaussianTokens, *shape: int) -> tuple[Tensor, Tensor]:
    """Keys, and values by their conditional law given the key."""
    key = law.key_mean + normal(*shape, len(law.key_mean)) @ torch.linalg.cholesky(law.key_covariance).mT
    slope = law.cross_covariance @ torch.linalg.inv(law.key_covariance)
    residual = law.value_covariance - slope @ law.cross_covariance.mT
    noise = normal(*shape, len(law.value_mean)) @ torch.linalg.cholesky(residual).mT
    return key, law.value_mean + (key - law.key_mean) @ slope.mT + noise
