"""Bayesian linear regression: the latent is a linear map from a token's features to its targets (Z4)."""

import math
from abc import abstractmethod
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_one_device, check_shape, floating, real_tensor
from massieu.foundation.matrices import is_singular
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true, any_true, values_are_readable
from massieu.foundation.values import promoted_dtype
from massieu.posteriors.base import Posterior, numbers

_LOG_2PI = math.log(2 * math.pi)

Pairs = Float[Tensor, "*batch n p_plus_e"] | tuple[Float[Tensor, "*batch n p"], Float[Tensor, "*batch n e"]]
"""Tokens as features and targets side by side, or as a pair (features, targets)."""


class PredictionResult(NamedTuple):
    """The law of the targets at some features."""

    mean: Float[Tensor, "*batch_query e"]
    variance: Float[Tensor, "*batch_query"]
    """Variance of each target, noise included."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class LinearRegression(Posterior):
    """The latent is z of shape (p, e), and tokens are features x and targets x·z + noise.

    `posterior` and `log_predictive` take them side by side in one tensor (*batch, n, p + e), or as a pair (features, targets).

    Attributes:
        mean: E z, shape (*batch, p, e) for p features and e targets.
        precision: Precision of each column of z, shape (*batch, p, p).
    """

    mean: Float[Tensor, "*batch p e"]
    precision: Float[Tensor, "*batch p p"]

    @property
    @abstractmethod
    def covariance(self) -> Float[Tensor, "*batch p p"]:
        """Of each column of z."""

    @abstractmethod
    def predict(self, features: Float[Tensor, "*batch_query p"]) -> PredictionResult:
        """The targets at these features: their mean, features·E z, and their variance (Z4).

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit.
        """

    @classmethod
    def _numbers(cls, mean: Any, precision: Any, **positive: Any) -> list[Tensor]:
        """The checked mean, precision, and further parameters, which are positive numbers of shape (*batch), in one dtype."""
        mean, *scalars = numbers(2, tuple(positive), mean=mean, **positive)
        precision = real_tensor("precision", precision, mean)
        check_shape("precision", precision, (*mean.shape[:-2], mean.shape[-2], mean.shape[-2]))
        check_finite(precision=precision)
        check_one_device(mean=mean, precision=precision)
        dtype = promoted_dtype(mean, precision)
        mean, precision, *scalars = (tensor.to(dtype) for tensor in (mean, precision, *scalars))
        slack = 8 * torch.finfo(precision.dtype).eps * precision.abs().amax((-2, -1), keepdim=True)
        if not all_true((precision - precision.mT).abs() <= slack):
            raise ValueError("precision must be symmetric, got a matrix that is not")
        if values_are_readable(precision) and any_true(is_singular(precision)):
            raise ValueError("precision must be positive definite, got a matrix that is not")
        return [mean, precision, *scalars]

    def _read(self, tokens: Pairs, mask: Tensor | None) -> tuple[Self, Tensor, Tensor]:
        """The law, spread, the tokens in one tensor, 0 where they are masked, and how many are seen."""
        law, joined, seen = self._admit(self._joined(tokens), mask, (sum(self.mean.shape[-2:]),))
        return law, joined, seen.to(joined.dtype).sum(-1)

    def _joined(self, tokens: Pairs) -> Tensor:
        """Features and targets side by side."""
        if not isinstance(tokens, tuple):
            return tokens
        if len(tokens) != 2:
            raise ValueError(f"tokens must be a tensor or a pair (features, targets), got a tuple of {len(tokens)}")
        lead = floating("features", tokens[0]).shape[:-1]
        check_shape("features", tokens[0], (*lead, self.mean.shape[-2]))
        check_shape("targets", floating("targets", tokens[1]), (*lead, self.mean.shape[-1]))
        check_one_device(features=tokens[0], targets=tokens[1])
        dtype = promoted_dtype(*tokens)
        return torch.cat([part.to(dtype) for part in tokens], -1)

    def _at(self, features: Tensor) -> tuple[Self, Tensor, Tensor]:
        """The law spread to the features' batch, features·mean, (*batch, *query, e), and features·precision⁻¹·features."""
        law, features = self._admit_token(features, (self.mean.shape[-2],), "features")
        # Not by the spread law: with one batch item for each law, all its queries share one Cholesky factor.
        unspread = self._promoted(features)[0]
        query = features.shape[len(self.batch_shape) : -1]
        flat = features.reshape(*self.batch_shape, query.numel(), features.shape[-1])
        # With precision = LLᵀ, features·precision⁻¹·features = ‖L⁻¹ features‖².
        white = torch.linalg.solve_triangular(_factor(unspread.precision), flat.mT, upper=False)
        lead = (*self.batch_shape, *query)
        mean = (flat @ unspread.mean).reshape(*lead, unspread.mean.shape[-1])
        return law, mean, white.square().sum(-2).reshape(lead)

    def _split(self, token: Pairs) -> tuple[Tensor, Tensor]:
        """Checked features and targets of queries."""
        sizes = list(self.mean.shape[-2:])
        _, joined = self._admit_token(self._joined(token), (sum(sizes),))
        features, targets = joined.split(sizes, -1)
        return features, targets


class BayesianLinearRegression(LinearRegression):
    """Bayesian linear regression with known noise variance: targets features·z + noise, z's columns N(mean, precision⁻¹).

    Its predictive mean is that of kernel ridge regression over the tokens, not of softmax attention (Z4). The evidence is
    the log-density of the targets given their features, and the predictive variance noise + features·precision⁻¹·features.

    Attributes:
        noise: Variance of a target given z, shape (*batch).

    Example:
        >>> import torch
        >>> from massieu.posteriors import BayesianLinearRegression
        >>> prior = BayesianLinearRegression.create([[0.0]], [[1.0]], noise=1.0)
        >>> law = prior.posterior((torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [3.0]])))
        >>> round(law.mean.item(), 3)
        2.0
    """

    noise: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        mean: Float[Tensor, "*batch p e"],
        precision: Float[Tensor, "*batch p p"],
        noise: Float[Tensor, "*batch"] | float,
    ) -> Self:
        """The prior N(mean, precision⁻¹) of each column; the precision is symmetric positive definite, the noise positive."""
        mean, precision, noise = cls._numbers(mean, precision, noise=noise)
        return cls(mean, precision, noise, log_evidence=torch.zeros_like(noise))

    @property
    def covariance(self) -> Float[Tensor, "*batch p p"]:
        return torch.cholesky_inverse(_factor(self.precision))

    def posterior(self, tokens: Pairs, mask: Bool[Tensor, "*batch n"] | None = None) -> "BayesianLinearRegression":
        law, joined, count = self._read(tokens, mask)
        noise = law.noise[..., None, None]
        step = _regress(law.mean, noise * law.precision, joined)
        constant = law.mean.shape[-1] * (count * (law.noise.log() + _LOG_2PI) + step.log_ratio)
        evidence = law.log_evidence - 0.5 * (constant + step.square / law.noise)
        return BayesianLinearRegression(step.mean, step.precision / noise, law.noise, log_evidence=evidence)

    def predict(self, features: Float[Tensor, "*batch_query p"]) -> PredictionResult:
        law, mean, leverage = self._at(features)
        return PredictionResult(mean, law.noise + leverage)

    def log_predictive(self, token: Pairs) -> Float[Tensor, "*batch_query"]:
        features, targets = self._split(token)
        mean, variance = self.predict(features)
        square = (targets - mean).square().sum(-1)
        return -0.5 * (targets.shape[-1] * (variance.log() + _LOG_2PI) + square / variance)


class NoisyLinearRegression(LinearRegression):
    """`BayesianLinearRegression` whose noise is a latent too, with the precision in units of 1/variance.

    variance ~ inverse gamma(shape, rate), z ~ N(mean, variance·precision⁻¹). Predictive laws are Student's t with 2·shape
    degrees of freedom, of variance `noise`·(1 + features·precision⁻¹·features), infinite where shape ≤ 1.

    Attributes:
        shape: a > 0 of the noise variance's law, shape (*batch).
        rate: b > 0 of it, shape (*batch).

    Example:
        >>> import torch
        >>> from massieu.posteriors import NoisyLinearRegression
        >>> prior = NoisyLinearRegression.create([[0.0]], [[1.0]], shape=2.0, rate=1.0)
        >>> law = prior.posterior((torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [3.0]])))
        >>> round(law.mean.item(), 3), round(law.noise.item(), 3)
        (2.0, 2.0)
    """

    shape: Float[Tensor, "*batch"]
    rate: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        mean: Float[Tensor, "*batch p e"],
        precision: Float[Tensor, "*batch p p"],
        shape: Float[Tensor, "*batch"] | float,
        rate: Float[Tensor, "*batch"] | float,
    ) -> Self:
        """The normal-inverse-gamma prior; the precision is symmetric positive definite, shape and rate are positive."""
        mean, precision, shape, rate = cls._numbers(mean, precision, shape=shape, rate=rate)
        return cls(mean, precision, shape, rate, log_evidence=torch.zeros_like(shape))

    @property
    def noise(self) -> Float[Tensor, "*batch"]:
        """E of the noise variance, rate/(shape − 1); infinite where shape ≤ 1."""
        return torch.where(self.shape <= 1, torch.inf, self.rate / (self.shape - 1))

    @property
    def covariance(self) -> Float[Tensor, "*batch p p"]:
        """Of each column of z: E variance · precision⁻¹; infinite where shape ≤ 1."""
        return self.noise[..., None, None] * torch.cholesky_inverse(_factor(self.precision))

    def posterior(self, tokens: Pairs, mask: Bool[Tensor, "*batch n"] | None = None) -> "NoisyLinearRegression":
        law, joined, count = self._read(tokens, mask)
        step = _regress(law.mean, law.precision, joined)
        outputs = law.mean.shape[-1]
        shape = law.shape + 0.5 * outputs * count
        rate = law.rate + 0.5 * step.square
        gain = shape.lgamma() - law.shape.lgamma() + law.shape * law.rate.log() - shape * rate.log()
        evidence = law.log_evidence + gain - 0.5 * outputs * (count * _LOG_2PI + step.log_ratio)
        return NoisyLinearRegression(step.mean, step.precision, shape, rate, log_evidence=evidence)

    def predict(self, features: Float[Tensor, "*batch_query p"]) -> PredictionResult:
        law, mean, leverage = self._at(features)
        return PredictionResult(mean, law.noise * (1 + leverage))

    def log_predictive(self, token: Pairs) -> Float[Tensor, "*batch_query"]:
        features, targets = self._split(token)
        law, mean, leverage = self._at(features)
        # Student's t of e targets, a = shape: its kernel is (1 + ‖residual‖²/spread)^−(a + e/2).
        half_targets = 0.5 * targets.shape[-1]
        spread = 2 * law.rate * (1 + leverage)
        log_kernel = ((targets - mean).square().sum(-1) / spread).log1p()
        normaliser = (law.shape + half_targets).lgamma() - law.shape.lgamma() - half_targets * (math.pi * spread).log()
        return normaliser - (law.shape + half_targets) * log_kernel


class _Step(NamedTuple):
    """The update of the regression by some tokens, in units of the noise."""

    mean: Tensor
    precision: Tensor
    log_ratio: Tensor
    """log det of the new precision less that of the old."""
    square: Tensor
    """−2 × the exponent of the evidence: squared residuals, and the square of the mean's shift under the prior."""


def _regress(mean: Tensor, precision: Tensor, tokens: Tensor) -> _Step:
    """One update in units of the noise; masked tokens are zero and count for nothing."""
    features, targets = tokens.split(list(mean.shape[-2:]), -1)
    new_precision = precision + features.mT @ features
    factor = _factor(new_precision)
    # The residual's regression, not the targets': the mean's digits are kept where the prior is already sharp.
    right_side = features.mT @ (targets - features @ mean)
    # By both triangular systems of LLᵀ shift = right_side.
    forward = torch.linalg.solve_triangular(factor, right_side, upper=False)
    shift = torch.linalg.solve_triangular(factor.mT, forward, upper=True)
    residual = targets - features @ (mean + shift)
    square = residual.square().sum((-2, -1)) + (shift * (precision @ shift)).sum((-2, -1))
    log_ratio = _log_det(factor) - _log_det(_factor(precision))
    return _Step(mean + shift, new_precision, log_ratio, square)


def _factor(precision: Tensor) -> Tensor:
    """The lower Cholesky factor."""
    if values_are_readable(precision) and any_true(is_singular(precision)):
        raise ValueError(
            f"the precision is singular to rounding in {precision.dtype}: a larger precision of the prior is needed, smaller "
            "features, or float64"
        )
    return torch.linalg.cholesky(precision)


def _log_det(factor: Tensor) -> Tensor:
    """log det LLᵀ of a Cholesky factor L."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
