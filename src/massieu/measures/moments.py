"""Cumulants of a real variable from its moments and back, and the logarithm of an exponential moment."""

from math import comb

import torch
from torch import Tensor

from massieu.foundation.numerics import TAYLOR_RADIUS, logsumexp, second_phi_series

_LARGE = 20.0
"""Exponents above it are handled by logarithms: e²⁰ is far from overflow, also after a sum of many terms."""


def cumulants_of_moments(moments: Tensor) -> Tensor:
    """κ_1 … κ_n from the moments E x, E x² … E xⁿ, stacked last. Moments about another point give κ_1 about that point."""
    return torch.stack(_converted(moments.unbind(-1), to_cumulants=True), -1)


def moments_of_cumulants(cumulants: Tensor) -> Tensor:
    """E x, E x² … E xⁿ from κ_1 … κ_n, stacked last."""
    return torch.stack(_converted(cumulants.unbind(-1), to_cumulants=False), -1)


def _converted(inputs: tuple[Tensor, ...], *, to_cumulants: bool) -> list[Tensor]:
    """Cumulants from moments, or moments from cumulants, by m_n = κ_n + Σ_{k<n} (n−1 choose k−1) κ_k m_{n−k}."""
    cumulants: list[Tensor] = []
    moments: list[Tensor] = []
    for n, value in enumerate(inputs, start=1):
        products = [comb(n - 1, k - 1) * cumulants[k - 1] * moments[n - k - 1] for k in range(1, n)]
        lower_orders = sum(products, torch.zeros_like(value))
        if to_cumulants:
            cumulants.append(value - lower_orders)
            moments.append(value)
        else:
            cumulants.append(value)
            moments.append(value + lower_orders)
    return cumulants if to_cumulants else moments


def centred_log_mean_exp(log_weight: Tensor, centred: Tensor) -> Tensor:
    """log Σ p exp(c) over the last dimension, for c with Σ p c = 0 and p = exp(log_weight) with Σ p = 1.

    Computed as log1p(Σ p φ(c)), φ(c) = eᶜ − 1 − c ≥ 0, so that a result of 1e-12 has the relative accuracy of the c.
    If a term p·eᶜ exceeds e²⁰ it is a log-sum-exp. A term of weight zero does not count, whatever its c.
    """
    centred = torch.where(log_weight == -torch.inf, 0.0, centred)
    exponent = log_weight + centred
    is_large_row = (exponent > _LARGE).any(-1, keepdim=True)
    direct = logsumexp(torch.where(is_large_row, exponent, log_weight))

    # Σ p eᶜ = 1 + Σ p φ(c), as Σ p c = 0. Each c goes to one of three forms of φ; the others see 0, where φ is 0.
    centred = torch.where(is_large_row, 0.0, centred)
    weight = log_weight.exp()
    is_small = centred.abs() < TAYLOR_RADIUS
    is_large = centred > _LARGE
    small = torch.where(is_small, centred, 0.0)
    moderate = torch.where(is_small | is_large, 0.0, centred)
    terms = torch.where(is_small, weight * (small.square() * second_phi_series(small)), 0.0)
    terms = terms + weight * (torch.expm1(moderate) - moderate)
    # φ(c) alone may overflow although p·φ(c) is small: the weight is multiplied as a logarithm.
    large_product = torch.where(is_large, log_weight + centred, -torch.inf).exp() - weight * (1 + centred)
    terms = terms + torch.where(is_large, large_product, 0.0)
    return torch.where(is_large_row.squeeze(-1), direct, torch.log1p(terms.sum(-1)))
