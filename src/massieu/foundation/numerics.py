"""Sums and exponentials that keep their digits, and a quadrature rule."""

import math

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

TAYLOR_RADIUS = 0.5
"""Where `second_phi_series` is right."""
_TAYLOR_TERMS = 14  # 0.5^14·2/16! < 1e-17: exact to float64 inside the radius

GAUSS_LEGENDRE = [(float(0.5 * (x + 1)), float(0.5 * w)) for x, w in zip(*leggauss(8), strict=True)]
"""Nodes t and weights of the eight-point rule on [0, 1]."""


def log_softmax(scores: Tensor) -> Tensor:
    """log softmax over the last dimension; −inf, with gradient 0, all along a row whose scores are all −inf."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.log_softmax(torch.where(empty, 0.0, scores), -1).masked_fill(empty, -torch.inf)


def logsumexp(scores: Tensor) -> Tensor:
    """log Σ exp over the last dimension; −inf, with gradient 0, for a row that is empty or whose scores are all −inf."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - torch.inf
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores)
    # The gradient is made from the result, which next to a large number has lost its logarithm to rounding.
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == torch.inf, 0.0)
    total = peak.squeeze(-1) + torch.logsumexp(scores - peak, -1)
    return total.masked_fill(empty.squeeze(-1), -torch.inf)


LOG2_E = math.log2(math.e)


def exp_(scores: Tensor) -> Tensor:
    """exp in place, for scores up to about 0; 0 where products with it would not be normal numbers. Returns the scores.

    On the CPU exp and products of subnormal numbers are a hundred times slower, and exp of −inf is too.
    """
    lowest = -690.0 if scores.dtype == torch.float64 else -80.0
    # exp2 and a multiplication are three times as fast as exp there.
    return torch.threshold_(scores.clamp_min_(lowest).mul_(LOG2_E).exp2_(), 2 * math.exp(lowest), 0.0)


def second_phi_series(y: Tensor) -> Tensor:
    """φ₂(y) = (eʸ − 1 − y)/y² for |y| < 1/2: 1/2·(1 + y/3·(1 + y/4·(1 + …)))."""
    total = torch.ones_like(y)
    for order in range(_TAYLOR_TERMS + 2, 2, -1):
        total = 1 + y / order * total
    return 0.5 * total
