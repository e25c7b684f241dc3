"""Bayesian linear regression: the latent is a linear map from a token's features to its targets (Z4)."""

import math
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.measures.definite import is_singular
from massieu.measures.value import values_are_readable
from massieu.posteriors.arguments import check_finite, told
from massieu.posteriors.base import Posterior, check_numbers

_LOG_2PI = math.log(2 * math.pi)


class PredictionResult(NamedTuple):
    """The law of the targets at some features."""

    mean: Float[Tensor, "*batch_query e"]
    variance: Float[Tensor, "*batch_query"]
    """Of each target, noise included."""


class BayesianLinearRegression(Posterior):
    """Tokens (features, targets) with targets = features·z + noise of known variance, z's columns N(mean, precision⁻¹).

    Its predictive mean is that of kernel ridge regression over the tokens, not of softmax attention (Z4).

    Attributes:
        mean: E z, shape (*batch, p, e) for p features and e targets.
        precision: Of each column of z, shape (*batch, p, p).
        noise: Variance of a target given z, shape (*batch).
        log_evidence: log-density of the targets seen given their features, shape (*batch).
    """

    mean: Float[Tensor, "*batch p e"]
    precision: Float[Tensor, "*batch p p"]
    noise: Float[Tensor, "*batch"]
    log_evidence: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls, mean: Float[Tensor, "*batch p e"], precision: Float[Tensor, "*batch p p"], noise: Float[Tensor, "*batch"]
    ) -> Self:
        """The prior N(mean, precision⁻¹) of each column.

        Raises:
            ValueError: shapes that do not fit, numbers that are not finite, a noise that is not positive, a precision that
                is not symmetric positive definite.
            TypeError: not floating-point tensors.
        """
        shapes = _shapes(mean)
        mean, precision, noise = check_numbers(
            {**shapes, "noise": shapes["batch"]}, positive=("noise",), mean=mean, precision=precision, noise=noise
        )
        _check_precision(precision)
        return cls(mean, precision, noise, torch.zeros_like(noise))

    @property
    def covariance(self) -> Float[Tensor, "*batch p p"]:
        """Of each column of z."""
        return torch.cholesky_inverse(_factor(self.precision))

    def posterior(
        self, tokens: Float[Tensor, "*batch n p_plus_e"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "BayesianLinearRegression":
        law, tokens, seen = self._admit(tokens, mask, (sum(self.mean.shape[-2:]),))
        noise = law.noise[..., None, None]
        step = _regress(law.mean, noise * law.precision, tokens)
        outputs = law.mean.shape[-1]
        constant = outputs * (seen.to(tokens.dtype).sum(-1) * (law.noise.log() + _LOG_2PI) + step.log_ratio)
        gain = -0.5 * (constant + step.square / law.noise)
        return BayesianLinearRegression(step.mean, step.precision / noise, law.noise, law.log_evidence + gain)

    def predict(self, features: Float[Tensor, "*batch_query p"]) -> PredictionResult:
        """The targets at these features: mean features·E z, variance noise + features·precision⁻¹·features (Z4).

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit.
        """
        mean, leverage = _predict(*_admit_features(self, features))
        noise = _behind(self.noise, leverage).to(leverage.dtype)
        return PredictionResult(mean, noise + leverage)

    def log_predictive(self, token: Float[Tensor, "*batch_query p_plus_e"]) -> Float[Tensor, "*batch_query"]:
        features, targets = _split(self, token)
        mean, variance = self.predict(features)
        square = (targets - mean).square().sum(-1)
        return -0.5 * (targets.shape[-1] * (variance.log() + _LOG_2PI) + square / variance)


class NoisyLinearRegression(Posterior):
    """`BayesianLinearRegression` whose noise is a latent too.

    variance ~ inverse gamma(shape, rate), z ~ N(mean, variance·precision⁻¹). Predictive laws are Student's t with 2·shape
    degrees of freedom.

    Attributes:
        mean: E z, shape (*batch, p, e).
        precision: Of each column of z, in units of 1/variance, shape (*batch, p, p).
        shape: a > 0 of the noise variance's law, shape (*batch).
        rate: b > 0 of it, shape (*batch).
        log_evidence: log-density of the targets seen given their features, shape (*batch).
    """

    mean: Float[Tensor, "*batch p e"]
    precision: Float[Tensor, "*batch p p"]
    shape: Float[Tensor, "*batch"]
    rate: Float[Tensor, "*batch"]
    log_evidence: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        mean: Float[Tensor, "*batch p e"],
        precision: Float[Tensor, "*batch p p"],
        shape: Float[Tensor, "*batch"],
        rate: Float[Tensor, "*batch"],
    ) -> Self:
        """The normal-inverse-gamma prior.

        Raises:
            ValueError: shapes that do not fit, numbers that are not finite, a shape or rate that is not positive, a
                precision that is not symmetric positive definite.
            TypeError: not floating-point tensors.
        """
        shapes = _shapes(mean)
        mean, precision, shape, rate = check_numbers(
            {**shapes, "shape": shapes["batch"], "rate": shapes["batch"]},
            positive=("shape", "rate"),
            mean=mean,
            precision=precision,
            shape=shape,
            rate=rate,
        )
        _check_precision(precision)
        return cls(mean, precision, shape, rate, torch.zeros_like(shape))

    @property
    def noise(self) -> Float[Tensor, "*batch"]:
        """E of the noise variance, rate/(shape − 1); infinite where shape ≤ 1."""
        return torch.where(self.shape > 1, self.rate / (self.shape - 1), torch.inf)

    @property
    def covariance(self) -> Float[Tensor, "*batch p p"]:
        """Of each column of z: E variance · precision⁻¹; infinite where shape ≤ 1."""
        return self.noise[..., None, None] * torch.cholesky_inverse(_factor(self.precision))

    def posterior(
        self, tokens: Float[Tensor, "*batch n p_plus_e"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "NoisyLinearRegression":
        law, tokens, seen = self._admit(tokens, mask, (sum(self.mean.shape[-2:]),))
        step = _regress(law.mean, law.precision, tokens)
        outputs = law.mean.shape[-1]
        count = seen.to(tokens.dtype).sum(-1)
        shape = law.shape + 0.5 * outputs * count
        rate = law.rate + 0.5 * step.square
        gain = shape.lgamma() - law.shape.lgamma() + law.shape * law.rate.log() - shape * rate.log()
        gain = gain - 0.5 * outputs * (count * _LOG_2PI + step.log_ratio)
        return NoisyLinearRegression(step.mean, step.precision, shape, rate, law.log_evidence + gain)

    def predict(self, features: Float[Tensor, "*batch_query p"]) -> PredictionResult:
        """The targets at these features: mean features·E z, variance `noise`·(1 + features·precision⁻¹·features), infinite
        where shape ≤ 1.

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit.
        """
        mean, leverage = _predict(*_admit_features(self, features))
        return PredictionResult(mean, _behind(self.noise, leverage).to(leverage.dtype) * (1 + leverage))

    def log_predictive(self, token: Float[Tensor, "*batch_query p_plus_e"]) -> Float[Tensor, "*batch_query"]:
        features, targets = _split(self, token)
        mean, leverage = _predict(*_admit_features(self, features))
        shape, rate = (_behind(part, leverage).to(leverage.dtype) for part in (self.shape, self.rate))
        half, spread = 0.5 * targets.shape[-1], 2 * rate * (1 + leverage)
        ratio = ((targets - mean).square().sum(-1) / spread).log1p()
        log_mass = (shape + half).lgamma() - shape.lgamma() - half * (math.pi * spread).log()
        return log_mass - (shape + half) * ratio


class _Step(NamedTuple):
    mean: Tensor
    precision: Tensor
    log_ratio: Tensor
    """log det of the new precision over the old."""
    square: Tensor
    """What the likelihood's exponent has: squared residuals, and what the shift of the mean costs under the prior."""


def _regress(mean: Tensor, precision: Tensor, tokens: Tensor) -> _Step:
    """One update in units of the noise; masked tokens are zero and count for nothing."""
    features, targets = tokens.split(list(mean.shape[-2:]), -1)
    later = precision + features.mT @ features
    factor = _factor(later)
    # The residual's regression, not the targets': the mean's digits are kept where the prior is already sharp.
    shift = _solve(factor, features.mT @ (targets - features @ mean))
    residual = targets - features @ (mean + shift)
    square = residual.square().sum((-2, -1)) + (shift * (precision @ shift)).sum((-2, -1))
    return _Step(mean + shift, later, _log_det(factor) - _log_det(_factor(precision)), square)


def _predict(mean: Tensor, precision: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Features·mean (*batch, *query, e) and features·precision⁻¹·features (*batch, *query)."""
    query = features.shape[precision.ndim - 2 : -1]
    flat = features.reshape(*precision.shape[:-2], query.numel(), features.shape[-1])
    white = torch.linalg.solve_triangular(_factor(precision), flat.mT, upper=False)
    lead = (*precision.shape[:-2], *query)
    return (flat @ mean).reshape(*lead, mean.shape[-1]), white.square().sum(-2).reshape(lead)


def _factor(precision: Tensor) -> Tensor:
    """The lower Cholesky factor."""
    if not values_are_readable(precision):
        return torch.linalg.cholesky(precision)
    if bool(is_singular(precision).any()):
        raise ValueError(
            f"the precision is singular to rounding in {precision.dtype}: a larger precision of the prior is needed, smaller "
            "features, or float64"
        )
    return torch.linalg.cholesky(precision)


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _log_det(factor: Tensor) -> Tensor:
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _behind(number: Tensor, like: Tensor) -> Tensor:
    """A number a batch item, with query dimensions of one behind."""
    return number.reshape((*number.shape, *[1] * (like.ndim - number.ndim)))


def _admit_features(
    law: BayesianLinearRegression | NoisyLinearRegression, features: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    fitted, features, lead = law._fit(features, (law.mean.shape[-2],), "features")
    batch = law.batch_shape
    if lead[: len(batch)] != batch:
        raise ValueError(
            f"features must have shape {(*batch, '*query', law.mean.shape[-2])}, got {tuple(features.shape)}"
        )
    check_finite(features=features)
    return fitted.mean, fitted.precision, features


def _split(law: BayesianLinearRegression | NoisyLinearRegression, token: Tensor) -> tuple[Tensor, Tensor]:
    sizes = list(law.mean.shape[-2:])
    if not isinstance(token, Tensor) or token.ndim == 0 or token.shape[-1] != sum(sizes):
        given = tuple(token.shape) if isinstance(token, Tensor) else told(token)
        raise ValueError(f"{type(law).__name__} needs a token of shape (*batch, *query, {sum(sizes)}), got {given}")
    features, targets = token.split(sizes, -1)
    check_finite(token=targets)
    return features, targets


def _shapes(mean: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(mean, Tensor):
        raise TypeError(f"mean must be a floating-point tensor, got {told(mean)}")
    if mean.ndim < 2:
        raise ValueError(f"mean must have shape (*batch, features, targets), got {tuple(mean.shape)}")
    batch = tuple(mean.shape[:-2])
    return {"batch": batch, "mean": tuple(mean.shape), "precision": (*batch, mean.shape[-2], mean.shape[-2])}


def _check_precision(precision: Tensor) -> None:
    if not values_are_readable(precision):
        return
    slack = 8 * torch.finfo(precision.dtype).eps * precision.abs().amax((-2, -1), keepdim=True)
    if not bool(((precision - precision.mT).abs() <= slack).all()):
        raise ValueError("precision must be symmetric, got a matrix that is not")
    if bool(is_singular(precision).any()):
        raise ValueError("precision must be positive definite, got a matrix that is not")
