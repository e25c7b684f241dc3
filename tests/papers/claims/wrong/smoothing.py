"""Wrong smoothing, precision matching, transfer and generalisation."""

import torch
from torch import Tensor

from massieu.papers.claims.bridges import precision as precision_claims
from massieu.papers.claims.bridges import sphere_spectrum as spectrum_claims
from massieu.papers.claims.zhang import attention_rates as rates_claims
from massieu.papers.claims.zhang import generalisation as generalisation_claims
from massieu.papers.claims.zhang import smoothing as smoothing_claims
from massieu.papers.claims.zhang import transfer as transfer_claims
from massieu.papers.theory import (
    GaussianTokens,
    attention_lipschitz,
    denoising_score,
    excess_risk_bound,
    generalisation_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    smoothing_floor,
    sphere_multipliers,
    transfer,
)

_ERROR = GaussianTokens.error


def _without_the_biases_product(self: GaussianTokens, query: Tensor, share: float, keys: int) -> Tensor:
    slope = ((query - self.key_mean) @ self.regression.mT).square().sum(-1)
    growth = (share**2 * self.squared_distance(query)).exp() / keys
    return _ERROR(self, query, share, keys) - growth * 2 * share * (1 - share) * slope


def _on_all_of_space(g: Tensor, d: Tensor, simplex: bool = True):
    return transfer(g, d, simplex=False)


WRONG = {
    "Z7: the ratio of the next dimension": (
        "Z7",
        smoothing_claims,
        "sphere_multipliers",
        lambda degree, dimension, scale: sphere_multipliers(degree, dimension + 1, scale),
    ),
    "Z7: one temperature for all lengths": (
        "Z7",
        smoothing_claims,
        "optimal_scale",
        lambda keys, *arguments: 0 * keys + 30.0,
    ),
    "Z7: a floor a tenth too low": (
        "Z7",
        smoothing_claims,
        "smoothing_floor",
        lambda *arguments: smoothing_floor(*arguments)._replace(error=0.9 * smoothing_floor(*arguments).error),
    ),
    "Z9: one temperature for all lengths": ("Z9", rates_claims, "optimal_scale", lambda keys, *_: 0 * keys + 10.0),
    "Z9: a prior that grows with the length": (
        "Z9",
        rates_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: masked_gaussian_mean(observed, mean, 0.1 * observed.shape[-2]),
    ),
    "Z10: half the Lipschitz constant": (
        "Z10",
        generalisation_claims,
        "attention_lipschitz",
        lambda *arguments: type(attention_lipschitz(*arguments))(*(x / 2 for x in attention_lipschitz(*arguments))),
    ),
    "Z10: a third of the bound": (
        "Z10",
        generalisation_claims,
        "generalisation_bound",
        lambda *arguments, **named: generalisation_bound(*arguments, **named) / 3,
    ),
    "Z12: a sink a tenth too heavy": (
        "Z12",
        transfer_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: masked_gaussian_mean(observed, mean, 1.1 * weight),
    ),
    "Z12: latents without their prior": (
        "Z12",
        transfer_claims,
        "masked_mean",
        lambda targets, likelihood, prior: masked_mean(targets, likelihood, 0 * prior),
    ),
    "Z12: no sink": (
        "Z12",
        transfer_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: observed.mean(-2),
    ),
    "Z12: counts without pseudo-counts": (
        "Z12",
        transfer_claims,
        "masked_token_probabilities",
        lambda counts, alpha: masked_token_probabilities(counts, 1e-3 * alpha),
    ),
    "Z13: without the tangent space": ("Z13", transfer_claims, "transfer", _on_all_of_space),
    "Z13: a risk bound with κ in place of κ²": (
        "Z13",
        transfer_claims,
        "excess_risk_bound",
        lambda kappa, excess, ratio=1.0: 0.3 * kappa * ratio * excess,
    ),
    "Z13: a risk bound without the density ratio": (
        "Z13",
        transfer_claims,
        "excess_risk_bound",
        lambda kappa, excess, ratio=1.0: excess_risk_bound(kappa, excess),
    ),
    "X1: a mismatch in another norm": (
        "X1",
        GaussianTokens,
        "mismatch",
        lambda self, score: torch.linalg.matrix_norm(self.cross_covariance @ score - self.regression),
    ),
    "X1: the covariance for the precision": (
        "X1",
        GaussianTokens,
        "score",
        property(lambda self: self.key_covariance),
    ),
    "X1: the clean context's score for the noisy one": (
        "X1",
        precision_claims,
        "denoising_score",
        lambda covariance, noise, clean_context: denoising_score(covariance, noise, clean_context=True),
    ),
    "X2: without the product of both biases": ("X2", GaussianTokens, "error", _without_the_biases_product),
    "X2: full precision at every length": (
        "X2",
        GaussianTokens,
        "optimal_share",
        lambda self, query, keys: torch.ones_like(query[..., 0]),
    ),
    "X9: the degree off by one": (
        "X9",
        spectrum_claims,
        "sphere_multipliers",
        lambda degree, *arguments: sphere_multipliers(degree + 1, *arguments)[..., 1:],
    ),
}
