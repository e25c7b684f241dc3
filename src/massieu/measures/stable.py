"""Sums of exponentials that keep their digits."""

import torch
from torch import Tensor

_TAYLOR_RADIUS = 0.5
_TAYLOR_TERMS = 14  # 0.5^14·2/16! < 1e-17: exact to float64 inside the radius
_LARGE = 20.0


def log_softmax(scores: Tensor) -> Tensor:
    """log softmax over the last dimension; −inf, with gradient 0, all along a row whose scores are all −inf."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.log_softmax(torch.where(empty, 0.0, scores), -1).masked_fill(empty, -torch.inf)


def logsumexp(scores: Tensor) -> Tensor:
    """log Σ exp over the last dimension; −inf, with gradient 0, for a row whose scores are all −inf."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores)
    # The gradient is made from the result, which next to a large number has lost its logarithm to rounding.
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == torch.inf, 0.0)
    total = peak.squeeze(-1) + torch.logsumexp(scores - peak, -1)
    return total.masked_fill(empty.squeeze(-1), -torch.inf)


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
    small, large = centred.abs() < _TAYLOR_RADIUS, centred > _LARGE
    moderate = torch.where(small | large, 0.0, centred)
    terms = torch.where(small, weight * phi_series(torch.where(small, centred, 0.0)), 0.0)
    terms = terms + weight * (torch.expm1(moderate) - moderate)
    # φ(c) alone may overflow where its weight makes p·φ(c) small.
    product = torch.where(large, log_weight + centred, -torch.inf).exp() - weight * (1 + centred)
    terms = terms + torch.where(large, product, 0.0)
    return torch.where(overflowing.squeeze(-1), direct, torch.log1p(terms.sum(-1)))


def phi_series(centred: Tensor) -> Tensor:
    """eᶜ − 1 − c for |c| < 1/2: c²/2·(1 + c/3·(1 + c/4·(1 + …)))."""
    total = torch.ones_like(centred)
    for order in range(_TAYLOR_TERMS + 2, 2, -1):
        total = 1 + centred / order * total
    return 0.5 * centred.square() * total
