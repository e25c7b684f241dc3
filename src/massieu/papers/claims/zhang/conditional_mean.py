"""Z4–Z6, Z8: conditional mean attention is Bayesian regression, its ridges, its rates, and what its error consists of."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.papers.claims.claim import (
    FOLLOW_UP,
    ZHANG,
    Check,
    at_least,
    at_most,
    close,
    mean_of_draws,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.regression import FeatureKernel, GaussianKernel, LinearKernel, conditional_mean_attention, ridge_from


def _quadratic(points: Tensor) -> Tensor:
    """All products of up to two coordinates: (1 + a·b)² = φ(a)·φ(b)."""
    wide = torch.cat([torch.ones_like(points[..., :1]), points], -1)
    return (wide.unsqueeze(-1) * wide.unsqueeze(-2)).flatten(-2)


# --- Z4 --------------------------------------------------------------------------------------------------------------


@claim(
    "Z4",
    title="Latent linear model as attention",
    statement="If values are zφ(k) + ξ, with ξ of variance σ² and z of prior variance λ₀, the posterior mean of "
    "zφ(q) is Vᵀ(G + λI)⁻¹κ(K, q) with λ = σ²/λ₀, from features and from the Gram matrix alike. The predictive "
    "variance is σ² + λ₀[κ(q, q) − κ(K, q)ᵀ(G + λI)⁻¹κ(K, q)].",
    source=f"{ZHANG}, abstract (b); the model by the follow-up {FOLLOW_UP}, §4.1; the two λ and the variance are derived",
    status="abstract only",
    corrected="The follow-up calls two quantities λ: the ridge of attention and the prior variance. The ridge is "
    "σ²/λ₀, with λ₀ the prior variance.",
)
def posterior_mean(
    keys: int = 40, dimensions: int = 3, noise: float = 0.5, prior_variance: float = 2.0, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, keys=keys)
    normal = normal_draws(seed)
    variance = noise**2
    ridge = ridge_from(noise_variance=variance, prior_variance=prior_variance)
    key = normal(1, 1, keys, dimensions)
    query = normal(1, 1, 9, dimensions)
    phi = _quadratic(key[0, 0])
    asked = _quadratic(query[0, 0])
    coefficients = math.sqrt(prior_variance) * normal(phi.shape[-1], 2)
    value = (phi @ coefficients + noise * normal(keys, 2))[None, None]
    found = conditional_mean_attention(
        query, key, value, kernel=FeatureKernel.create(_quadratic), ridge=ridge, need_variance=True
    )
    assert found.variance is not None
    gram = (1 + key[0, 0] @ key[0, 0].T).square()
    cross = (1 + key[0, 0] @ query[0, 0].T).square()
    own = (1 + query[0, 0].square().sum(-1)).square()
    # Values and predictions are jointly Gaussian: conditioning, by an inverse.
    inverse = torch.linalg.inv(prior_variance * gram + variance * torch.eye(keys, dtype=torch.float64))
    mean = prior_variance * cross.T @ inverse @ value[0, 0]
    spread = variance + prior_variance * own - prior_variance**2 * (cross * (inverse @ cross)).sum(0)
    predictive = found.predictive_variance(noise_variance=variance, prior_variance=prior_variance)
    yield close("output and the Gaussian posterior mean", found.output[0, 0], mean)
    yield close("predictive variance and the Gaussian's", predictive[0, 0], spread)
    moment = torch.linalg.inv(phi.T @ phi + ridge * torch.eye(phi.shape[-1], dtype=torch.float64))
    feature_form = asked @ moment @ phi.T @ value[0, 0]
    few = conditional_mean_attention(
        query, key[:, :, :4], value[:, :, :4], kernel=FeatureKernel.create(_quadratic), ridge=ridge, need_variance=True
    )
    few_moment = torch.linalg.inv(phi[:4].T @ phi[:4] + ridge * torch.eye(phi.shape[-1], dtype=torch.float64))
    yield close("feature form and posterior mean", feature_form, mean)
    yield close(
        "4 keys: Gram form and feature form",
        few.output[0, 0],
        asked @ few_moment @ phi[:4].T @ value[0, 0, :4],
    )
    assert few.variance is not None
    yield close("4 keys: variances", few.variance[0, 0], ridge * ((asked @ few_moment) * asked).sum(-1))
    line = conditional_mean_attention(query[..., :1], key[..., :1], value, kernel=LinearKernel.create(), ridge=ridge)
    slope = (key[..., :1] * value).sum(2) / (key[..., :1].square().sum(2) + ridge)
    yield close("one dimension: q·Σkv/(Σk² + λ)", line.output, query[..., :1] * slope.unsqueeze(2))
    yield from _coverage(normal, keys, dimensions, noise, prior_variance)


def _coverage(normal: Normal, keys: int, dimensions: int, noise: float, prior_variance: float) -> Iterator[Check]:
    """New values lie about the mean with the predictive variance: standardised errors have variance one."""
    draws = 2000
    key = normal(draws, 1, keys, dimensions)
    query = normal(draws, 1, 1, dimensions)
    weights = math.sqrt(prior_variance) * normal(draws, 1, dimensions, 1)
    value, new = (points @ weights + noise * normal(*points.shape[:-1], 1) for points in (key, query))
    ridge = ridge_from(noise_variance=noise**2, prior_variance=prior_variance)
    found = conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=ridge, need_variance=True)
    predictive = found.predictive_variance(noise_variance=noise**2, prior_variance=prior_variance)
    squares = (new - found.output).square().squeeze(-1) / predictive
    yield near_in_standard_errors(
        "squared error of a new value by its predictive variance", squares.mean(), 1.0, math.sqrt(2 / draws)
    )


# --- Z5 --------------------------------------------------------------------------------------------------------------


@claim(
    "Z5",
    title="Conditional mean embedding",
    statement="The empirical conditional mean operator Ĉ_vk(Ĉ_kk + εI)⁻¹ of L tokens, at φ(q), is conditional mean "
    "attention with the matrix's ridge λ = εL; for keys of a finite alphabet and ε → 0 it is the mean of the values of "
    "each letter.",
    source=f"{FOLLOW_UP}, §4.1",
    status="reconstructed",
)
def conditional_mean_operator(
    tokens: int = 60, dimensions: int = 3, letters: int = 5, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, dimensions=dimensions, letters=letters)
    check_at_least(letters + 1, tokens=tokens)
    normal = normal_draws(seed)
    key = normal(1, 1, tokens, dimensions)
    query = normal(1, 1, 7, dimensions)
    value = normal(1, 1, tokens, 2)
    phi = _quadratic(key[0, 0])
    asked = _quadratic(query[0, 0])
    cross_covariance = value[0, 0].T @ phi / tokens
    covariance = phi.T @ phi / tokens
    one = torch.eye(phi.shape[-1], dtype=torch.float64)
    gram = (1 + key[0, 0] @ key[0, 0].T).square()
    cross = (1 + query[0, 0] @ key[0, 0].T).square()
    for ridge in (1e-2, 1.0):
        operator = asked @ torch.linalg.inv(covariance + ridge * one) @ cross_covariance.T
        shifted = gram + tokens * ridge * torch.eye(tokens, dtype=torch.float64)
        yield close(
            f"ε = {ridge:g}: operator and Gram form of λ = εL",
            cross @ torch.linalg.inv(shifted) @ value[0, 0],
            operator,
        )
        found = conditional_mean_attention(
            query, key, value, kernel=FeatureKernel.create(_quadratic), operator_ridge=ridge
        )
        yield close(f"ε = {ridge:g}: attention and operator", found.output[0, 0], operator)
        mistaken = conditional_mean_attention(query, key, value, kernel=FeatureKernel.create(_quadratic), ridge=ridge)
        # Shrunk less by up to the factor L in each direction; the difference is no rounding.
        yield at_least(
            f"ε = {ridge:g}: what λ = ε would change", (mistaken.output[0, 0] - operator).abs().max(), 1e-3 * ridge
        )
    letter = torch.arange(tokens) % letters
    alphabet = torch.eye(letters, dtype=torch.float64)
    means = torch.stack([value[0, 0, letter == each].mean(0) for each in range(letters)])
    found = conditional_mean_attention(
        alphabet[None, None], alphabet[letter][None, None], value, kernel=LinearKernel.create(), operator_ridge=1e-13
    )
    yield close("finite alphabet, ε = 1e-13: attention and means of the letters", found.output[0, 0], means)


# --- Z6 --------------------------------------------------------------------------------------------------------------

_SIZES = [64, 128, 256, 512, 1024, 2048, 4096]


def _harmonics(points: Tensor) -> Tensor:
    """Spherical harmonics of degree 0, 1 and 2 on S³, orthonormal under the uniform law: 1 + 4 + 9 of them."""
    x, y, z, w = points.unbind(-1)
    pairs = [x * y, x * z, x * w, y * z, y * w, z * w]
    # E x² = 1/4, E x⁴ = 1/8, E x²y² = 1/24.
    squares = [x**2 - y**2, z**2 - w**2, (x**2 + y**2 - z**2 - w**2) / math.sqrt(2)]
    scaled = [
        torch.ones_like(x),
        *(2 * each for each in (x, y, z, w)),
        *(math.sqrt(24) * each for each in pairs),
        *(math.sqrt(6) * each for each in squares),
    ]
    return torch.stack(scaled, -1)


@claim(
    "Z6",
    title="Error of conditional mean attention",
    statement="On a finite-rank target, the error of conditional mean attention falls like L^{−1/4} with λ = "
    "L^{3/4}, and all of it is bias. With λ = σ²/λ₀ it falls like L^{−1/2}, and is smaller at every length that was "
    "tried.",
    source=f"{FOLLOW_UP}, §4.1 and appendices; the better rate: Grünewälder et al. 2012, Li et al. (arXiv 2208.01711)",
    status="reconstructed",
)
def rates_of_the_ridge(repetitions: int = 40, noise: float = 0.3, seed: int = 0) -> Iterator[Check]:
    check_at_least(20, repetitions=repetitions)
    normal = normal_draws(seed)
    query = torch.nn.functional.normalize(normal(1, 1, 200, 4), dim=-1)
    kernel = FeatureKernel.create(_harmonics)
    # Every coefficient of degrees 1 and 2 is ±½: prior variance ¼, and of degree 0 none.
    coefficients = 0.5 * normal(13, 1).sign()
    target = _harmonics(query)[..., 1:] @ coefficients
    moments = _harmonics(torch.nn.functional.normalize(normal(200_000, 4), dim=-1))
    gram = moments.T @ moments / len(moments)
    yield at_most(
        "second moments of the harmonics and the identity",
        (gram - torch.eye(14, dtype=torch.float64)).abs().max(),
        0.05,
    )
    slow = []
    fast = []
    for length in _SIZES:
        key = torch.nn.functional.normalize(normal(repetitions, 1, length, 4), dim=-1)
        value = _harmonics(key)[..., 1:] @ coefficients + noise * normal(repetitions, 1, length, 1)
        for errors, ridge in ((slow, length**0.75), (fast, noise**2 / 0.25)):
            found = conditional_mean_attention(
                query.expand(repetitions, -1, -1, -1), key, value, kernel=kernel, ridge=ridge
            )
            errors.append((found.output - target).square().mean((1, 2, 3)).sqrt())
    found = torch.stack(fast)
    bound = torch.stack(slow)
    yield has_rate("λ = σ²/λ₀: slope of log error", rate(_SIZES, found), -0.5)
    yield has_rate("λ = L^{3/4}: slope of log error", rate(_SIZES, bound), -0.25)
    for name, errors in (("σ²/λ₀", found), ("L^{3/4}", bound)):
        level = errors.square().mean(-1).sqrt()
        detail = ", ".join(f"{each:.3f}" for each in level.tolist())
        yield at_most(
            f"λ = {name}: largest ratio of an error to that at half the length", level[1:] / level[:-1], 1.0, detail
        )
    # The bias at ε = λ/L = L^{−1/4}, where all eigenvalues are one: ε/(1 + ε) of the target.
    ridge = torch.tensor(_SIZES, dtype=torch.float64) ** -0.25
    bias = ridge / (1 + ridge) * target.square().mean().sqrt()
    yield close("λ = L^{3/4}, L = 4096: error by its bias", bound[-1].mean() / bias[-1], 1.0, 0.05)
    yield at_most("error with λ = σ²/λ₀ by that with L^{3/4}, at each length", found.mean(-1) / bound.mean(-1), 1.0)


# --- Z8 --------------------------------------------------------------------------------------------------------------


def _circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _target(angle: Tensor) -> Tensor:
    """Degree 1 and degree 2."""
    return angle.cos() + 2 * (2 * angle).cos()


@claim(
    "Z8",
    title="Conditional mean of the value given the key",
    statement="Attention estimates E[v | k = q] from a head's own keys and values. Its error splits into a "
    "smoothing bias, a parameter error and a statistical part of variance O(1/L). Softmax at a fixed temperature "
    "has all three; conditional mean attention has no smoothing bias if its features contain the target.",
    source=f"{ZHANG}, abstract (b); the split is derived",
    status="abstract only",
)
def parts_of_the_error(
    repetitions: int = 400, scale: float = 2.0, turn: float = 0.3, noise: float = 0.3, seed: int = 0
) -> Iterator[Check]:
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    angle = torch.tensor([0.0, 0.7, 2.0, 4.0], dtype=torch.float64)
    # Keys uniform on the circle; integrals over it by the trapezoidal rule, exact to rounding.
    grid = torch.arange(256, dtype=torch.float64) * (2 * math.pi / 256)

    def tilted(at: Tensor, power: float) -> Tensor:
        return (power * scale * (grid - at.unsqueeze(-1)).cos()).exp()

    def smoothed(at: Tensor) -> Tensor:
        weights = tilted(at, 1.0)
        return (weights * _target(grid)).sum(-1) / weights.sum(-1)

    turned = angle + turn
    smoothing = smoothed(angle) - _target(angle)
    parameter = smoothed(turned) - smoothed(angle)
    # The delta method for a ratio of means (S15).
    squares = noise**2 + (_target(grid) - smoothed(turned).unsqueeze(-1)).square()
    variance = (tilted(turned, 2.0) * squares).mean(-1) / tilted(turned, 1.0).mean(-1).square()
    query = _circle(turned).expand(repetitions, 1, -1, -1)

    def attended(length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Angles of the keys, values, and softmax attention's outputs."""
        place = 2 * math.pi * torch.special.ndtr(normal(repetitions, 1, length))
        value = (_target(place) + noise * normal(repetitions, 1, length)).unsqueeze(-1)
        output = ops.attention(query, _circle(place), value, scale=scale).output
        return place, value, output[:, 0, :, 0]

    sizes = [32, 64, 128, 256, 512]
    length = 1024
    statistical = [(attended(size)[2] - smoothed(turned)).norm(dim=-1) for size in sizes]
    place, value, output = attended(length)
    statistical.append((output - smoothed(turned)).norm(dim=-1))
    slope = rate([*sizes, length], torch.stack(statistical))
    yield has_rate("statistical part: slope of log error", slope, -0.5)
    # At the last length.
    error = output - _target(angle)
    # A ratio of means is biased by O(1/L): less than a standard error here, and allowed one.
    bias = output.std(0) / math.sqrt(repetitions)
    yield mean_of_draws("mean error and smoothing bias + parameter error", error, smoothing + parameter, bias)
    yield near_in_standard_errors(
        "L·variance and the delta method's",
        length * output.var(0),
        variance,
        variance * math.sqrt(2 / (repetitions - 1)) * 1.2,
    )
    parts = variance / length + (smoothing + parameter).square()
    yield mean_of_draws("mean square and the parts' sum", error.square(), parts)
    yield at_least("smoothing bias, the largest", smoothing.abs().max(), 0.1)
    yield at_least("parameter error, the largest", parameter.abs().max(), 0.1)
    yield from _without_smoothing(query, place, value, turned, noise)


def _without_smoothing(query: Tensor, place: Tensor, value: Tensor, turned: Tensor, noise: float) -> Iterator[Check]:
    """Heads with values of their own, of which each is the mean of its own; the bias of a small ridge is far below noise."""
    heads = torch.cat([value, 3 - value], 1)

    def harmonics(points: Tensor) -> Tensor:
        x, y = points.unbind(-1)
        return torch.stack([torch.ones_like(x), x, y, x * x - y * y, 2 * x * y], -1)

    key = _circle(place).expand(-1, 2, -1, -1)
    found = conditional_mean_attention(
        query.expand(-1, 2, -1, -1), key, heads, kernel=FeatureKernel.create(harmonics), ridge=noise**2
    )
    mean = found.output.squeeze(-1)
    expected = torch.stack([_target(turned), 3 - _target(turned)])
    # ‖bias‖ ≤ λ/L·‖f‖/(least eigenvalue ½), the eigenvalues 1, ½, ½, ½, ½ of uniform angles.
    bias = 2 * noise**2 / value.shape[2] * (1 + 2 + 3)
    yield mean_of_draws("conditional mean attention, two heads: mean output and the target", mean, expected, bias)
    # A kernel of any features, of a few repetitions and keys.
    few = slice(0, 20)
    first = slice(0, 256)
    smooth = conditional_mean_attention(
        query[few],
        _circle(place[few, :, first]),
        value[few, :, first],
        kernel=GaussianKernel.create(1.0),
        ridge=noise**2,
    ).output.squeeze(-1)
    yield at_most(
        "with a Gaussian kernel: root mean square error", (smooth[:, 0] - _target(turned)).square().mean().sqrt(), noise
    )
