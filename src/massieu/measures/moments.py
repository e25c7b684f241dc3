"""Moments and cumulants of one real variable, each from the other, and the logarithm of an exponential moment."""

from math import comb

import torch
from torch import Tensor

from massieu.foundation.numerics import TAYLOR_RADIUS, logsumexp, second_phi_series

_LARGE = 20.0


def cumulants_of_moments(moments: Tensor) -> Tensor:
    """κ_1 … κ_n from the moments E x, E x² … E xⁿ about any one point, stacked last: κ_1 is about that point too."""
    return torch.stack(_converted(moments.unbind(-1), to_cumulants=True), -1)


def moments_of_cumulants(cumulants: Tensor) -> Tensor:
    """E x, E x² … E xⁿ from κ_1 … κ_n, stacked last."""
    return torch.stack(_converted(cumulants.unbind(-1), to_cumulants=False), -1)


def _converted(given: tuple[Tensor, ...], *, to_cumulants: bool) -> list[Tensor]:
    """By m_n = κ_n + Σ_{k<n} (n−1 choose k−1) κ_k m_{n−k}."""
    cumulants: list[Tensor] = []
    moments: list[Tensor] = []
    for n, number in enumerate(given, start=1):
        products = [comb(n - 1, k - 1) * cumulants[k - 1] * moments[n - k - 1] for k in range(1, n)]
        rest = sum(products, torch.zeros_like(number))
        cumulants.append(number - rest if to_cumulants else number)
        moments.append(number if to_cumulants else number + rest)
    return cumulants if to_cumulants else moments


def centred_log_mean_exp(log_weight: Tensor, centred: Tensor) -> Tensor:
    """log Σ p exp(c) over the last dimension, for c with Σ p c = 0 and p = exp(log_weight) with Σ p = 1.

    Computed as log1p(Σ p φ(c)), φ(c) = eᶜ − 1 − c ≥ 0, so that a result of 1e-12 has the relative accuracy of the
    c; where a term p·eᶜ exceeds e²⁰, as a log-sum-exp. Weights of zero take no part whatever their c.
    """
    centred = torch.where(log_weight == -torch.inf, 0.0, centred)
    exponent = log_weight + centred
    overflowing = (exponent > _LARGE).any(-1, keepdim=True)
    direct = logsumexp(torch.where(overflowing, exponent, log_weight))

    centred = torch.where(overflowing, 0.0, centred)
    weight = log_weight.exp()
    small, large = centred.abs() < TAYLOR_RADIUS, centred > _LARGE
    moderate = torch.where(small | large, 0.0, centred)
    near = torch.where(small, centred, 0.0)
    terms = torch.where(small, weight * (near.square() * second_phi_series(near)), 0.0)
    terms = terms + weight * (torch.expm1(moderate) - moderate)
    # φ(c) alone may overflow where its weight makes p·φ(c) small.
    product = torch.where(large, log_weight + centred, -torch.inf).exp() - weight * (1 + centred)
    terms = terms + torch.where(large, product, 0.0)
    return torch.where(overflowing.squeeze(-1), direct, torch.log1p(terms.sum(-1)))
