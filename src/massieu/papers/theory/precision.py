"""Gaussian keys and values: the score at which softmax attention is the conditional mean, and the best at finite L (X1, X2)."""

from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import as_tensor, check_finite, check_one_device, check_range, check_shape, floating
from massieu.foundation.doors import door
from massieu.foundation.matrices import is_singular, solve
from massieu.foundation.transforms import all_true, any_true, values_are_readable
from massieu.foundation.values import Value, promoted_dtype

_BISECTIONS = 55
"""As many as halve [0, 1] to below a rounding of float64."""
_ROUNDINGS = 1e4
"""Roundings that a covariance may be off symmetry, or Cov(v | k) below 0, relative to the largest entry or eigenvalue."""


class GaussianTokens(Value):
    """The law of a token's key and value given the sequence's latent: jointly Gaussian, tokens independent.

    Queries are taken in the parameters' dtype.

    Attributes:
        key_mean: μ_k, (d,).
        value_mean: μ_v, (e,).
        key_covariance: Σ_kk, (d, d), positive definite.
        cross_covariance: Σ_vk = Cov(v, k), (e, d).
        value_covariance: Σ_vv, (e, e).

    Example:
        >>> import torch
        >>> from massieu.papers.theory import GaussianTokens
        >>> one, half = torch.eye(1), torch.full((1, 1), 0.5)
        >>> tokens = GaussianTokens.create(torch.zeros(1), torch.zeros(1), one, half, one)
        >>> tokens.residual_covariance.item()  # 1 − ½·½
        0.75
    """

    key_mean: Float[Tensor, "d"]
    value_mean: Float[Tensor, "e"]
    key_covariance: Float[Tensor, "d d"]
    cross_covariance: Float[Tensor, "e d"]
    value_covariance: Float[Tensor, "e e"]

    @classmethod
    def create(
        cls,
        key_mean: Float[Tensor, "d"],
        value_mean: Float[Tensor, "e"],
        key_covariance: Float[Tensor, "d d"],
        cross_covariance: Float[Tensor, "e d"],
        value_covariance: Float[Tensor, "e e"],
    ) -> Self:
        """The law with these parameters, floating-point tensors, in their common dtype, at least float32.

        Raises:
            ValueError: shapes that do not fit; numbers that are not finite; a covariance that is not symmetric, a key
                covariance that is not positive definite, a joint covariance that is not positive semidefinite.
        """
        check_shape("key_mean", floating("key_mean", key_mean), ("d",))
        check_shape("value_mean", floating("value_mean", value_mean), ("e",))
        d = len(key_mean)
        e = len(value_mean)
        parameters = {
            "key_mean": key_mean,
            "value_mean": value_mean,
            "key_covariance": key_covariance,
            "cross_covariance": cross_covariance,
            "value_covariance": value_covariance,
        }
        shapes = {
            "key_mean": (d,),
            "value_mean": (e,),
            "key_covariance": (d, d),
            "cross_covariance": (e, d),
            "value_covariance": (e, e),
        }
        for name, parameter in parameters.items():
            check_shape(name, floating(name, parameter), shapes[name])
            check_finite(**{name: parameter})
        check_one_device(**parameters)
        tokens, *_ = cls(**parameters)._promoted()
        _check_covariance("key_covariance", tokens.key_covariance)
        _check_symmetric("value_covariance", tokens.value_covariance)
        if values_are_readable(value_covariance) and e:
            tokens._check_residual_covariance()
        return tokens

    def _check_residual_covariance(self) -> None:
        """Check that Cov(v | k) is positive semidefinite, which a joint covariance needs."""
        least = torch.linalg.eigvalsh(self.residual_covariance)[..., 0]
        largest = torch.linalg.matrix_norm(self.value_covariance, 2)
        if any_true(least < -_ROUNDINGS * torch.finfo(least.dtype).eps * largest):
            raise ValueError(f"no law has these covariances: Cov(v | k) has the eigenvalue {least.min().item():.3g}")

    @property
    def score(self) -> Float[Tensor, "d d"]:
        """Σ_kk⁻¹: with logits k·M(x − μ_k) and this M, attention over N → ∞ tokens is the conditional mean (X1)."""
        return precision_matching_score(self.key_covariance)

    @property
    def regression(self) -> Float[Tensor, "e d"]:
        """R = Σ_vk Σ_kk⁻¹: the slope of the conditional mean."""
        return solve(self.key_covariance, self.cross_covariance.mT).mT

    @property
    def residual_covariance(self) -> Float[Tensor, "e e"]:
        """Cov(v | k) = Σ_vv − RΣ_kv."""
        return self.value_covariance - self.regression @ self.cross_covariance.mT

    def conditional_mean(self, query: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead e"]:
        """E[v | k = x] = μ_v + R(x − μ_k)."""
        return self.value_mean + self._centred(query) @ self.regression.mT

    def attention(self, query: Float[Tensor, "*lead d"], score: Float[Tensor, "d d"]) -> Float[Tensor, "*lead e"]:
        """μ_v + Σ_vk M(x − μ_k): softmax attention with logits k·M(x − μ_k) over N → ∞ tokens (X1).

        The centring is a query bias −Mμ_k; without it, x in place of x − μ_k, the output is off by Σ_vk Mμ_k.
        """
        self._check_score(score)
        return self.value_mean + self._centred(query) @ (self.cross_covariance @ score.to(self.key_mean.dtype)).mT

    def mismatch(self, score: Float[Tensor, "d d"]) -> Float[Tensor, ""]:
        """‖Σ_vk(M − Σ_kk⁻¹)‖₂: attention's largest distance from the conditional mean a unit of ‖x − μ_k‖ (X1).

        0 if and only if the two are equal for every x; M = Σ_kk⁻¹ is the only such score where Σ_vk has full column rank.
        """
        self._check_score(score)
        return torch.linalg.matrix_norm(self.cross_covariance @ score.to(self.key_mean.dtype) - self.regression, 2)

    def squared_distance(self, query: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
        """‖z‖² = (x − μ_k)ᵀΣ_kk⁻¹(x − μ_k): the logits' variance over keys, at the score sΣ_kk⁻¹ times s²."""
        factor = torch.linalg.cholesky_ex(self.key_covariance).L
        centred = self._centred(query).unsqueeze(-2)
        return torch.linalg.solve_triangular(factor.mT, centred, upper=True, left=False).square().sum((-2, -1))

    def error(
        self,
        query: Float[Tensor, "*lead d"],
        share: Float[Tensor, "*lead"] | float,
        keys: Float[Tensor, "*lead"] | float,
    ) -> Float[Tensor, "*lead"]:
        """E‖attention − E[v | k = x]‖² over L fresh tokens at the score sΣ_kk⁻¹, to order 1/L (X2).

        (1 − s)²b + (e^{s²‖z‖²}/L)[tr RΣRᵀ + tr Cov(v | k) + (2s − s²)b] with b = ‖R(x − μ_k)‖²: s²b of the variance, and
        2s(1 − s)b of the product of the smoothing bias and the self-normalised one (S15). For one query: its average over
        z ~ N(0, I) is finite only for s² < ½. It holds where e^{s²‖z‖²} is far below L.

        Args:
            query, share, keys: x, s and L.
        """
        share = as_tensor("share", share, query, self.key_mean.dtype)
        check_finite(share=share)
        return self._error_terms(query, keys).error(share)

    def optimal_share(
        self, query: Float[Tensor, "*lead d"], keys: Float[Tensor, "*lead"] | float
    ) -> Float[Tensor, "*lead"]:
        """The s in [0, 1] that minimises `error`, where E[v | k = x] is not μ_v (else 0) (X2).

        The error is convex in s there, so it is the only minimum. The logits' variance is then bounded, s²‖z‖² ≤ max(1,
        log L): full precision matching needs L ≫ e^{‖z‖²}. Two derivatives in `query` and `keys` are right.
        """
        terms = self._error_terms(query, keys)
        with torch.no_grad():
            low = torch.zeros_like(terms.squared_distance + terms.log_keys)
            high = torch.ones_like(low)
            for _ in range(_BISECTIONS):
                middle = 0.5 * (low + high)
                is_rising = terms.half_slope(middle) > 0
                low = torch.where(is_rising, low, middle)
                high = torch.where(is_rising, middle, high)
        at_mean = terms.squared_bias == 0
        share = torch.where(at_mean, 0, 0.5 * (low + high))
        # A Newton step at a solution without derivatives gives it one; the second step gives the second derivative.
        for _ in range(2):
            curvature = torch.where(at_mean, 1, terms.half_curvature(share))
            share = share - torch.where(at_mean, 0, terms.half_slope(share) / curvature)
        return share

    def _error_terms(self, query: Tensor, keys: Tensor | float) -> "_ErrorTerms":
        centred = self._centred(query)
        keys = as_tensor("keys", keys, query, self.key_mean.dtype)
        check_range("keys", keys, least=1)
        return _ErrorTerms(
            squared_bias=(centred @ self.regression.mT).square().sum(-1),
            value_variance=self.value_covariance.diagonal().sum(),
            squared_distance=self.squared_distance(query),
            log_keys=keys.log(),
        )

    def _centred(self, query: Tensor) -> Tensor:
        """x − μ_k."""
        floating("query", query)
        check_one_device(key_mean=self.key_mean, query=query)
        if query.shape[-1:] != self.key_mean.shape:
            raise ValueError(f"query must have shape (*lead, {len(self.key_mean)}), got {tuple(query.shape)}")
        return query.to(self.key_mean.dtype) - self.key_mean

    def _check_score(self, score: Tensor) -> None:
        check_shape("score", floating("score", score), self.key_covariance.shape)
        check_one_device(key_covariance=self.key_covariance, score=score)


def precision_matching_score(covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """The score matrix M = Σ⁻¹ with which attention over centred Gaussian keys estimates the conditional mean (X1).

    M is scale·W_QᵀW_K. Differentiable; works under vmap. Half precision is promoted to float32. A ValueError is raised
    for a covariance that is not square, symmetric and positive definite.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import precision_matching_score
        >>> precision_matching_score(torch.diag(torch.tensor([2.0, 4.0]))).diagonal().tolist()
        [0.5, 0.25]
    """
    covariance = _checked_covariance(covariance)
    return torch.linalg.inv_ex(covariance).inverse


@door
def denoising_score(
    covariance: Float[Tensor, "*batch d d"], noise_variance: float | Tensor, *, clean_context: bool = False
) -> Float[Tensor, "*batch d d"]:
    """The score matrix M with which attention denoises Gaussian tokens N(0, Σ) with noise N(0, τ²I) (X1).

    Clean tokens are N(0, Σ), the query has noise added, and keys are the values. The best output is Σ(Σ + τ²)⁻¹x̃. It
    is that of M = (Σ + τ²)⁻¹Σ(Σ + τ²)⁻¹ where keys and values are noisy too, and of M = (Σ + τ²)⁻¹ where the context is
    clean. Errors are those of `precision_matching_score`, and ValueError for a negative noise.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import denoising_score
        >>> denoising_score(torch.eye(1), noise_variance=1.0).item()
        0.25
    """
    covariance = _checked_covariance(covariance)
    variance = as_tensor("noise_variance", noise_variance, covariance)
    check_shape("noise_variance", variance, ())
    check_range("noise_variance", variance, least=0)
    noise = variance * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    inverse = precision_matching_score(covariance + noise)
    return inverse if clean_context else inverse - variance * inverse @ inverse


class _ErrorTerms(NamedTuple):
    """The error of X2 as a function of s: (1 − s)²b + (e^{s²‖z‖²}/L)·[tr Σ_vv + (2s − s²)b]."""

    squared_bias: Float[Tensor, "*lead"]
    """b = ‖R(x − μ_k)‖², the squared error at s = 0 for infinitely many keys."""
    value_variance: Float[Tensor, ""]
    """tr Σ_vv = tr RΣRᵀ + tr Cov(v | k)."""
    squared_distance: Float[Tensor, "*lead"]
    """‖z‖²."""
    log_keys: Float[Tensor, "*lead"]
    """log L."""

    def error(self, share: Tensor) -> Tensor:
        factor = self._factor(share)
        return (1 - share).square() * self.squared_bias + factor * self._variance(share)

    def half_slope(self, share: Tensor) -> Tensor:
        """Half the derivative of `error` in s."""
        factor = self._factor(share)
        variance = self._variance(share)
        bias_slope = -(1 - share) * self.squared_bias
        return bias_slope + factor * self._half_slope_of_sampling(share, variance)

    def half_curvature(self, share: Tensor) -> Tensor:
        """The derivative of `half_slope` in s."""
        b = self.squared_bias
        distance = self.squared_distance
        factor = self._factor(share)
        variance = self._variance(share)
        slope = self._half_slope_of_sampling(share, variance)
        # The product rule, without the factor, whose own derivative is 2s‖z‖² times it.
        slope_change = distance * variance + 2 * share * distance * (1 - share) * b - b
        return b + factor * (2 * share * distance * slope + slope_change)

    def _factor(self, share: Tensor) -> Tensor:
        """e^{s²‖z‖²}/L."""
        return (share.square() * self.squared_distance - self.log_keys).exp()

    def _variance(self, share: Tensor) -> Tensor:
        """tr Σ_vv + (2s − s²)b."""
        return self.value_variance + share * (2 - share) * self.squared_bias

    def _half_slope_of_sampling(self, share: Tensor, variance: Tensor) -> Tensor:
        """Half the derivative of factor·variance in s, over the factor."""
        return share * self.squared_distance * variance + (1 - share) * self.squared_bias


def _checked_covariance(covariance: Tensor) -> Tensor:
    """The covariance in at least float32."""
    covariance = floating("covariance", covariance).to(promoted_dtype(covariance))
    _check_covariance("covariance", covariance)
    return covariance


def _check_covariance(name: str, covariance: Tensor) -> None:
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise ValueError(f"{name} must have shape (*batch, d, d), got {tuple(covariance.shape)}")
    _check_symmetric(name, covariance)
    if values_are_readable(covariance) and any_true(is_singular(covariance)):
        raise ValueError(f"{name} must be positive definite")


def _check_symmetric(name: str, covariance: Tensor) -> None:
    # An asymmetry of rounding is a matrix product's; more is another matrix.
    largest = covariance.abs().amax() if covariance.numel() else covariance.new_zeros(())
    asymmetry = (covariance - covariance.mT).abs().amax() if covariance.numel() else largest
    if not all_true(asymmetry <= _ROUNDINGS * torch.finfo(covariance.dtype).eps * largest):
        raise ValueError(f"{name} must be symmetric and finite")
