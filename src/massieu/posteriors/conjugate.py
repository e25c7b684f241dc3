"""Conjugate posteriors, which are attention with a sink: Gaussian means and any exponential family (Z3.1–3, S16)."""

import math
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.foundation.arguments import check_one_device, check_range, check_shape, floating, instance
from massieu.foundation.transforms import all_true, unwrapped, values_are_readable
from massieu.measures import ConjugatePrior, Measure
from massieu.posteriors.base import AttentionForm, Posterior, numbers, with_sink

_LOG_2PI = math.log(2 * math.pi)


class GaussianMean(Posterior):
    """Unknown mean z ~ N(mean, (variance/strength)·I) of Gaussian tokens x ~ N(z, (variance/τ)·I) (Z3.1, Z3.2).

    Each token has a relative precision τ. The posterior mean is attention over the tokens and a sink of value m₀ and
    logit log κ₀; the tokens' logits are log τ, 0 by default. log κ, the new strength, is that attention's
    log-partition.

    Attributes:
        mean: m, shape (*batch, d).
        strength: κ, how many tokens of relative precision 1 the mean is worth, shape (*batch).
        variance: σ² of a token's coordinate given z, shape (*batch).

    Example:
        >>> import torch
        >>> from massieu.posteriors import GaussianMean
        >>> prior = GaussianMean.create([0.0], strength=1.0, variance=1.0)
        >>> law = prior.posterior(torch.tensor([[2.0], [4.0]]))
        >>> law.mean.item(), law.strength.item()
        (2.0, 3.0)
    """

    mean: Float[Tensor, "*batch d"]
    strength: Float[Tensor, "*batch"]
    variance: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        mean: Float[Tensor, "*batch d"],
        strength: Float[Tensor, "*batch"] | float,
        variance: Float[Tensor, "*batch"] | float,
    ) -> Self:
        """The prior N(mean, (variance/strength)·I), of positive strength and variance."""
        mean, strength, variance = numbers(1, ("strength", "variance"), mean=mean, strength=strength, variance=variance)
        return cls(mean, strength, variance, log_evidence=torch.zeros_like(strength))

    @property
    def covariance(self) -> Float[Tensor, "*batch d d"]:
        """The posterior covariance, (variance/strength)·I."""
        identity = torch.eye(self.mean.shape[-1], dtype=self.mean.dtype, device=self.mean.device)
        return (self.variance / self.strength)[..., None, None] * identity

    def posterior(
        self,
        tokens: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "*batch n"] | None = None,
        *,
        precision: Float[Tensor, "*batch n"] | None = None,
    ) -> "GaussianMean":
        """The law after these tokens, of relative precisions `precision` (1 by default), finite and positive.

        Raises:
            ValueError, TypeError: as `Posterior.posterior`, and for such precisions.
        """
        law, tokens, seen, log_precision = self._read(tokens, mask, precision)
        weight = torch.where(seen, log_precision, -torch.inf).exp()
        total = weight.sum(-1)
        # About the tokens' own mean, so that tokens far from the origin keep their digits. Without tokens the shares are 0.
        share = weight / torch.where(total > 0, total, 1.0).unsqueeze(-1)
        centre = (share.unsqueeze(-1) * tokens).sum(-2)
        strength = law.strength + total
        shift = centre - law.mean
        # The exponent of the evidence splits into the tokens about their mean, and their mean about the prior's.
        within_tokens = (weight * (tokens - centre.unsqueeze(-2)).square().sum(-1)).sum(-1)
        from_prior = law.strength * total / strength * shift.square().sum(-1)
        # For each coordinate, log 2π·variance/τ of every token and log of the new strength over the old.
        constant = torch.where(seen, (law.variance.log() + _LOG_2PI).unsqueeze(-1) - log_precision, 0.0).sum(-1)
        constant = constant + (total / law.strength).log1p()
        gain = -0.5 * (tokens.shape[-1] * constant + (within_tokens + from_prior) / law.variance)
        mean = law.mean + (total / strength).unsqueeze(-1) * shift
        return GaussianMean(mean, strength, law.variance, log_evidence=law.log_evidence + gain)

    def log_predictive(
        self, token: Float[Tensor, "*batch_query d"], *, precision: Float[Tensor, "*batch_query"] | None = None
    ) -> Float[Tensor, "*batch_query"]:
        """log N(token; mean, variance·(1/τ + 1/strength)·I), τ the token's relative precision (1 by default)."""
        law, token = self._admit_token(token, self.mean.shape[-1:])
        noise = torch.exp(-_log_precision(precision, token.shape[:-1], token))
        variance = law.variance * (noise + 1 / law.strength)
        square = (token - law.mean).square().sum(-1)
        return -0.5 * (token.shape[-1] * (variance.log() + _LOG_2PI) + square / variance)

    def as_attention(
        self,
        tokens: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "*batch n"] | None = None,
        *,
        precision: Float[Tensor, "*batch n"] | None = None,
    ) -> AttentionForm:
        """The attention whose output is the posterior's mean and whose log-partition is log strength (Z3.1, Z3.2)."""
        law, tokens, seen, log_precision = self._read(tokens, mask, precision)
        return with_sink(law.mean, law.strength, tokens, torch.where(seen, log_precision, -torch.inf))

    def _read(
        self, tokens: Tensor, mask: Tensor | None, precision: Tensor | None
    ) -> tuple["GaussianMean", Tensor, Tensor, Tensor]:
        """The law, spread, the tokens, 0 where they are masked, which are seen, and log τ of each, 0 where masked."""
        law, tokens, seen = self._admit(tokens, mask, tuple(self.mean.shape[-1:]))
        if isinstance(precision, Tensor) and precision.shape == seen.shape:
            precision = torch.where(seen, floating("precision", precision), 1.0)
        return law, tokens, seen, _log_precision(precision, seen.shape, tokens)


class ExponentialFamily(Posterior):
    """Tokens from a likelihood e^{η·x − A₀(η)}, and the conjugate prior e^{χ·η − νA₀(η)} on its natural parameter (Z3.3, S16).

    `mean` is E ∇A₀(η) = χ/ν, the mean of the next token: attention over the tokens and a sink of value χ/ν and logit log ν.
    The count, log ν, is its log-partition.

    Attributes:
        likelihood: The law of one token: Bernoulli, Spin, Poisson, Exponential, Gamma, or Gaussian with independent
            coordinates; batch (*batch), event (d,).
        chi: χ, the pseudo-sum of tokens, shape (*batch, d).
        strength: ν, the pseudo-count, shape (*batch).

    Example:
        >>> import torch
        >>> from massieu.measures import Poisson
        >>> from massieu.posteriors import ExponentialFamily
        >>> prior = ExponentialFamily.create(Poisson.create([1.0]), chi=torch.tensor([2.0]), strength=1.0)
        >>> prior.posterior(torch.tensor([[3.0], [0.0], [3.0]])).mean.item()
        2.0
    """

    likelihood: Measure
    chi: Float[Tensor, "*batch d"]
    strength: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls, likelihood: Measure, chi: Float[Tensor, "*batch d"], strength: Float[Tensor, "*batch"] | float
    ) -> "ExponentialFamily":
        """The prior worth `strength` > 0 tokens whose sum is `chi`.

        Raises:
            DomainError: χ/ν is outside the range of the likelihood's means.
            TypeError, ValueError: as for `Posterior`, and another likelihood, or one that
                `massieu.measures.ConjugatePrior` refuses.
        """
        instance("likelihood", likelihood, Measure, "a measure")
        chi, strength = numbers(1, ("strength",), chi=chi, strength=strength)
        check_shape("chi", chi, (*likelihood.batch_shape, *likelihood.event_shape))
        likelihood_tensor = next((leaf for leaf in pytree.tree_leaves(likelihood) if isinstance(leaf, Tensor)), chi)
        check_one_device(likelihood=likelihood_tensor, chi=chi, strength=strength)
        law = cls(likelihood, chi, strength, log_evidence=torch.zeros_like(strength))
        # Its log-partition raises where χ/ν is outside the range of the means.
        ConjugatePrior.create(likelihood, law._per_coordinate()).log_partition(chi)
        return law

    @property
    def mean(self) -> Float[Tensor, "*batch d"]:
        """E ∇A₀(η) = χ/ν (Diaconis and Ylvisaker)."""
        return self.chi / self.strength.unsqueeze(-1)

    @property
    def prior(self) -> ConjugatePrior:
        """The law of η as a measure, whose natural parameter is `chi`."""
        return ConjugatePrior(self.likelihood, self._per_coordinate())

    @property
    def natural_mean(self) -> Float[Tensor, "*batch d"]:
        """E η, the posterior mean of the natural parameter."""
        return self.prior.mean(self.chi)

    def posterior(
        self, tokens: Float[Tensor, "*batch n d"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "ExponentialFamily":
        law, tokens, seen = self._admit(tokens, mask, tuple(self.chi.shape[-1:]))
        # In float64: a gain of the order of one is the difference of masses of the order of the count.
        wide = law.to(torch.float64)
        log_base = wide._log_base(_in_support(tokens, seen).double())
        after = wide._after(tokens.double().sum(-2), seen.sum(-1))
        gain = after._log_mass() - wide._log_mass() + torch.where(seen, log_base, 0.0).sum(-1)
        log_evidence = wide.log_evidence + gain
        posterior = ExponentialFamily(wide.likelihood, after.chi, after.strength, log_evidence=log_evidence)
        return posterior.to(tokens.dtype)

    def log_predictive(self, token: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        law, token = self._admit_token(token, tuple(self.chi.shape[-1:]))
        # In float64 for the reason that `posterior` gives.
        wide = law.to(torch.float64)
        wide_token = token.double()
        gain = wide._after(wide_token, 1)._log_mass() - wide._log_mass()
        return (gain + wide._log_base(wide_token.unsqueeze(-2)).squeeze(-1)).to(token.dtype)

    def as_attention(
        self, tokens: Float[Tensor, "*batch n d"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> AttentionForm:
        """The attention whose output is the posterior's mean and whose log-partition is log strength (Z3.3)."""
        law, tokens, seen = self._admit(tokens, mask, tuple(self.chi.shape[-1:]))
        if values_are_readable(tokens):
            law._check_support(_in_support(tokens, seen).movedim(-2, 0))
        logits = torch.where(seen, torch.zeros_like(tokens[..., 0]), -torch.inf)
        return with_sink(law.mean, law.strength, tokens, logits)

    def _after(self, total: Tensor, count: Tensor | int) -> "ExponentialFamily":
        """The law after `count` tokens of sum `total`, with the evidence of the law before them."""
        return ExponentialFamily(
            self.likelihood, self.chi + total, self.strength + count, log_evidence=self.log_evidence
        )

    def _per_coordinate(self) -> Tensor:
        """ν for every coordinate, (*batch, d)."""
        return self.strength.unsqueeze(-1).expand(self.chi.shape)

    def _log_mass(self) -> Tensor:
        """log ∫ e^{χ·η − νA₀(η)} dη."""
        return self.prior.log_partition(self.chi)

    def _log_base(self, tokens: Tensor) -> Tensor:
        """The likelihood's log-density at η = 0 without its normalisation, (*batch, n) of (*batch, n, d)."""
        points = tokens.movedim(-2, 0)
        if values_are_readable(points):
            self._check_support(points)
        if not len(points):
            return tokens[..., 0]
        origin = torch.zeros_like(self.chi)
        return (self.likelihood.log_prob(origin, points) + self.likelihood.log_partition(origin)).movedim(0, -1)

    def _check_support(self, points: Tensor) -> None:
        """Raise unless the likelihood gives all points a positive density."""
        if not len(points):
            return
        inside = points.isfinite().all(-1) & (self.likelihood.log_prob(torch.zeros_like(self.chi), points) > -torch.inf)
        if not all_true(inside):
            outside = unwrapped(torch.where(inside.unsqueeze(-1), torch.nan, points)).reshape(-1, points.shape[-1])
            wrong = ", ".join(f"{number:g}" for number in outside[~outside.isnan().any(-1)][0].tolist())
            raise ValueError(f"tokens must lie in the support of {type(self.likelihood).__name__}, got ({wrong})")


def _in_support(tokens: Tensor, seen: Tensor) -> Tensor:
    """The tokens with 1 in place of masked ones, which lies in the support of every likelihood."""
    return torch.where(seen.unsqueeze(-1), tokens, 1.0)


def _log_precision(precision: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """log τ, zeros by default; or an error unless the precisions have this shape and are positive."""
    if precision is None:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    check_shape("precision", floating("precision", precision), shape)
    check_one_device(tokens=like, precision=precision)
    check_range("precision", precision, above=0)
    return precision.to(like.dtype).log()
