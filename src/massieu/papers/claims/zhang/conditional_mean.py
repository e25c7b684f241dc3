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
from massieu.regression.tokens import Ridge


def _quadratic(points: Tensor) -> Tensor:
    """All products of up to two coordinates: (1 + a·b)² = φ(a)·φ(b)."""
    extended = torch.cat([torch.ones_like(points[..., :1]), points], -1)
    return (extended.unsqueeze(-1) * extended.unsqueeze(-2)).flatten(-2)


def _identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


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
    key_features = _quadratic(key[0, 0])
    coefficients = math.sqrt(prior_variance) * normal(key_features.shape[-1], 2)
    value = (key_features @ coefficients + noise * normal(keys, 2))[None, None]
    attended = conditional_mean_attention(
        query, key, value, kernel=FeatureKernel.create(_quadratic), ridge=ridge, need_variance=True
    )

    # Values and predictions are jointly Gaussian: conditioning, by an inverse.
    gram = (1 + key[0, 0] @ key[0, 0].T).square()
    cross = (1 + key[0, 0] @ query[0, 0].T).square()
    query_norm = (1 + query[0, 0].square().sum(-1)).square()
    inverse = torch.linalg.inv(prior_variance * gram + variance * _identity(keys))
    mean = prior_variance * cross.T @ inverse @ value[0, 0]
    exact_variance = variance + prior_variance * query_norm - prior_variance**2 * (cross * (inverse @ cross)).sum(0)
    predictive = attended.predictive_variance(noise_variance=variance, prior_variance=prior_variance)
    yield close("output and the Gaussian posterior mean", attended.output[0, 0], mean)
    yield close("predictive variance and the Gaussian's", predictive[0, 0], exact_variance)
    yield from _feature_form(key, query, value, mean, ridge)

    line = conditional_mean_attention(query[..., :1], key[..., :1], value, kernel=LinearKernel.create(), ridge=ridge)
    slope = (key[..., :1] * value).sum(2) / (key[..., :1].square().sum(2) + ridge)
    yield close("one dimension: q·Σkv/(Σk² + λ)", line.output, query[..., :1] * slope.unsqueeze(2))
    yield from _coverage(normal, keys, dimensions, noise, prior_variance)


def _feature_form(key: Tensor, query: Tensor, value: Tensor, mean: Tensor, ridge: Ridge) -> Iterator[Check]:
    """φ(q)(ΦᵀΦ + λI)⁻¹ΦᵀV is the same, also for fewer keys than features, where the library takes the Gram form."""
    key_features = _quadratic(key[0, 0])
    query_features = _quadratic(query[0, 0])

    def inverse_moment(features: Tensor) -> Tensor:
        return torch.linalg.inv(features.T @ features + ridge * _identity(features.shape[-1]))

    feature_form = query_features @ inverse_moment(key_features) @ key_features.T @ value[0, 0]
    yield close("feature form and posterior mean", feature_form, mean)
    few = conditional_mean_attention(
        query, key[:, :, :4], value[:, :, :4], kernel=FeatureKernel.create(_quadratic), ridge=ridge, need_variance=True
    )
    few_features = key_features[:4]
    few_inverse = inverse_moment(few_features)
    feature_form = query_features @ few_inverse @ few_features.T @ value[0, 0, :4]
    yield close("4 keys: Gram form and feature form", few.output[0, 0], feature_form)
    assert few.variance is not None
    feature_variance = ridge * ((query_features @ few_inverse) * query_features).sum(-1)
    yield close("4 keys: variances", few.variance[0, 0], feature_variance)


def _coverage(normal: Normal, keys: int, dimensions: int, noise: float, prior_variance: float) -> Iterator[Check]:
    """New values lie about the mean with the predictive variance: standardised errors have variance one."""
    draws = 2000
    key = normal(draws, 1, keys, dimensions)
    query = normal(draws, 1, 1, dimensions)
    weights = math.sqrt(prior_variance) * normal(draws, 1, dimensions, 1)
    value = key @ weights + noise * normal(draws, 1, keys, 1)
    new_value = query @ weights + noise * normal(draws, 1, 1, 1)
    ridge = ridge_from(noise_variance=noise**2, prior_variance=prior_variance)
    attended = conditional_mean_attention(
        query, key, value, kernel=LinearKernel.create(), ridge=ridge, need_variance=True
    )
    predictive = attended.predictive_variance(noise_variance=noise**2, prior_variance=prior_variance)
    squares = (new_value - attended.output).square().squeeze(-1) / predictive
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
    key_features = _quadratic(key[0, 0])
    query_features = _quadratic(query[0, 0])
    cross_covariance = value[0, 0].T @ key_features / tokens
    covariance = key_features.T @ key_features / tokens
    gram = (1 + key[0, 0] @ key[0, 0].T).square()
    cross = (1 + query[0, 0] @ key[0, 0].T).square()
    kernel = FeatureKernel.create(_quadratic)
    for ridge in (1e-2, 1.0):
        inverse = torch.linalg.inv(covariance + ridge * _identity(len(covariance)))
        operator = query_features @ inverse @ cross_covariance.T
        gram_form = cross @ torch.linalg.inv(gram + tokens * ridge * _identity(tokens)) @ value[0, 0]
        yield close(f"ε = {ridge:g}: operator and Gram form of λ = εL", gram_form, operator)
        attended = conditional_mean_attention(query, key, value, kernel=kernel, operator_ridge=ridge)
        yield close(f"ε = {ridge:g}: attention and operator", attended.output[0, 0], operator)
        mistaken = conditional_mean_attention(query, key, value, kernel=kernel, ridge=ridge)
        # Shrunk less by up to the factor L in each direction; the difference is no rounding.
        yield at_least(
            f"ε = {ridge:g}: what λ = ε would change", (mistaken.output[0, 0] - operator).abs().max(), 1e-3 * ridge
        )

    # One-hot keys of a finite alphabet.
    alphabet = _identity(letters)
    letter_of_token = torch.arange(tokens) % letters
    means = torch.stack([value[0, 0, letter_of_token == letter].mean(0) for letter in range(letters)])
    attended = conditional_mean_attention(
        alphabet[None, None],
        alphabet[letter_of_token][None, None],
        value,
        kernel=LinearKernel.create(),
        operator_ridge=1e-13,
    )
    yield close("finite alphabet, ε = 1e-13: attention and means of the letters", attended.output[0, 0], means)


# --- Z6 --------------------------------------------------------------------------------------------------------------

_SIZES = [64, 128, 256, 512, 1024, 2048, 4096]


def _harmonics(points: Tensor) -> Tensor:
    """Spherical harmonics of degree 0, 1 and 2 on S³, orthonormal under the uniform law: 1 + 4 + 9 of them."""
    x, y, z, w = points.unbind(-1)
    pairs = [x * y, x * z, x * w, y * z, y * w, z * w]
    # E x² = 1/4, E x⁴ = 1/8, E x²y² = 1/24.
    squares = [x**2 - y**2, z**2 - w**2, (x**2 + y**2 - z**2 - w**2) / math.sqrt(2)]
    constant = torch.ones_like(x).unsqueeze(-1)
    pairs_and_squares = [math.sqrt(24) * torch.stack(pairs, -1), math.sqrt(6) * torch.stack(squares, -1)]
    return torch.cat([constant, 2 * points, *pairs_and_squares], -1)


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
    samples = _harmonics(torch.nn.functional.normalize(normal(200_000, 4), dim=-1))
    second_moments = samples.T @ samples / len(samples)
    error = (second_moments - _identity(14)).abs().max()
    yield at_most("second moments of the harmonics and the identity", error, 0.05)

    def root_mean_square_error(key: Tensor, value: Tensor, ridge: float) -> Tensor:
        queries = query.expand(repetitions, -1, -1, -1)
        output = conditional_mean_attention(queries, key, value, kernel=kernel, ridge=ridge).output
        return (output - target).square().mean((1, 2, 3)).sqrt()

    growing_ridge_errors = []
    constant_ridge_errors = []
    for length in _SIZES:
        key = torch.nn.functional.normalize(normal(repetitions, 1, length, 4), dim=-1)
        value = _harmonics(key)[..., 1:] @ coefficients + noise * normal(repetitions, 1, length, 1)
        growing_ridge_errors.append(root_mean_square_error(key, value, length**0.75))
        constant_ridge_errors.append(root_mean_square_error(key, value, noise**2 / 0.25))
    # (lengths, repetitions)
    growing = torch.stack(growing_ridge_errors)
    constant = torch.stack(constant_ridge_errors)
    yield has_rate("λ = σ²/λ₀: slope of log error", rate(_SIZES, constant), -0.5)
    yield has_rate("λ = L^{3/4}: slope of log error", rate(_SIZES, growing), -0.25)
    yield _falls_with_length("σ²/λ₀", constant)
    yield _falls_with_length("L^{3/4}", growing)
    # The bias at ε = λ/L = L^{−1/4}, where all eigenvalues are one: ε/(1 + ε) of the target.
    ridge = torch.tensor(_SIZES, dtype=torch.float64) ** -0.25
    bias = ridge / (1 + ridge) * target.square().mean().sqrt()
    yield close("λ = L^{3/4}, L = 4096: error by its bias", growing[-1].mean() / bias[-1], 1.0, 0.05)
    ratio = constant.mean(-1) / growing.mean(-1)
    yield at_most("error with λ = σ²/λ₀ by that with L^{3/4}, at each length", ratio, 1.0)


def _falls_with_length(ridge: str, errors: Tensor) -> Check:
    """The error, pooled over repetitions, is smaller at each length than at half of it."""
    pooled = errors.square().mean(-1).sqrt()
    detail = ", ".join(f"{error:.3f}" for error in pooled.tolist())
    name = f"λ = {ridge}: largest ratio of an error to that at half the length"
    return at_most(name, pooled[1:] / pooled[:-1], 1.0, detail)


# --- Z8 --------------------------------------------------------------------------------------------------------------


# Keys uniform on the circle; integrals over it by the trapezoidal rule, exact to rounding.
_GRID = torch.arange(256, dtype=torch.float64) * (2 * math.pi / 256)


def _circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _target(angle: Tensor) -> Tensor:
    """f of the circle, with parts of degree 1 and degree 2."""
    return angle.cos() + 2 * (2 * angle).cos()


def _tilted(centre: Tensor, scale: float) -> Tensor:
    """e^{βq·k} for keys k on the grid, and a query of this angle."""
    return (scale * (_GRID - centre.unsqueeze(-1)).cos()).exp()


def _smoothed(centre: Tensor, scale: float) -> Tensor:
    """The limit of softmax attention for a query of this angle."""
    weights = _tilted(centre, scale)
    return (weights * _target(_GRID)).sum(-1) / weights.sum(-1)


def _limit_variance(centre: Tensor, scale: float, noise: float) -> Tensor:
    """L times the variance of softmax attention over L keys, by the delta method for a ratio of means (S15)."""
    squares = noise**2 + (_target(_GRID) - _smoothed(centre, scale).unsqueeze(-1)).square()
    return (_tilted(centre, 2.0 * scale) * squares).mean(-1) / _tilted(centre, scale).mean(-1).square()


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
    # A head whose parameters turn its queries: its limit is that of the angles turned.
    turned = angle + turn
    limit = _smoothed(turned, scale)
    smoothing = _smoothed(angle, scale) - _target(angle)
    parameter = limit - _smoothed(angle, scale)
    variance = _limit_variance(turned, scale, noise)
    query = _circle(turned).expand(repetitions, 1, -1, -1)

    def drawn(length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, by uniform angles from normal draws, their values, and the output."""
        key_angle = 2 * math.pi * torch.special.ndtr(normal(repetitions, 1, length))
        value = (_target(key_angle) + noise * normal(repetitions, 1, length)).unsqueeze(-1)
        output = ops.attention(query, _circle(key_angle), value, scale=scale).output[:, 0, :, 0]
        return key_angle, value, output

    lengths = [32, 64, 128, 256, 512, 1024]
    draws = [drawn(length) for length in lengths]
    statistical = torch.stack([(output - limit).norm(dim=-1) for _, _, output in draws])
    yield has_rate("statistical part: slope of log error", rate(lengths, statistical), -0.5)
    length = lengths[-1]
    key_angle, value, output = draws[-1]
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
    yield from _without_smoothing(query, key_angle, value, turned, noise)


def _without_smoothing(
    query: Tensor, key_angle: Tensor, value: Tensor, turned: Tensor, noise: float
) -> Iterator[Check]:
    """Conditional mean attention has no smoothing bias; that of a small ridge is far below the noise.

    Two heads have different values: each estimates the conditional mean of its own.
    """
    head_values = torch.cat([value, 3 - value], 1)

    def harmonics(points: Tensor) -> Tensor:
        x, y = points.unbind(-1)
        return torch.stack([torch.ones_like(x), x, y, x * x - y * y, 2 * x * y], -1)

    key = _circle(key_angle).expand(-1, 2, -1, -1)
    attended = conditional_mean_attention(
        query.expand(-1, 2, -1, -1), key, head_values, kernel=FeatureKernel.create(harmonics), ridge=noise**2
    )
    mean = attended.output.squeeze(-1)
    expected = torch.stack([_target(turned), 3 - _target(turned)])
    # ‖bias‖ ≤ λ/L·‖f‖/(least eigenvalue ½), the eigenvalues 1, ½, ½, ½, ½ of uniform angles.
    bias = 2 * noise**2 / value.shape[2] * (1 + 2 + 3)
    yield mean_of_draws("conditional mean attention, two heads: mean output and the target", mean, expected, bias)
    # A kernel whose features do not name the target, on a few repetitions and keys.
    few = slice(0, 20)
    first = slice(0, 256)
    output = conditional_mean_attention(
        query[few],
        _circle(key_angle[few, :, first]),
        value[few, :, first],
        kernel=GaussianKernel.create(1.0),
        ridge=noise**2,
    ).output.squeeze(-1)
    error = (output[:, 0] - _target(turned)).square().mean().sqrt()
    yield at_most("with a Gaussian kernel: root mean square error", error, noise)
