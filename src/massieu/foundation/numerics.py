"""Sums and exponentials without loss of digits, and a quadrature rule."""

import math

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

TAYLOR_RADIUS = 0.5
"""`second_phi_series` is exact to rounding for arguments up to this size."""
_TAYLOR_TERMS = 14  # 0.5^14·2/16! < 1e-17: exact to float64 inside the radius

GAUSS_LEGENDRE = [(float(0.5 * (x + 1)), float(0.5 * w)) for x, w in zip(*leggauss(8), strict=True)]
"""Nodes t and weights of the eight-point rule on [0, 1]."""


def log_softmax(scores: Tensor) -> Tensor:
    """log softmax over the last dimension; a row whose scores are all −inf is −inf, with gradient 0."""
    # torch's own has NaN for such a row: it gets zeros before, and −inf after.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.log_softmax(torch.where(empty, 0.0, scores), -1).masked_fill(empty, -torch.inf)


def logsumexp(scores: Tensor) -> Tensor:
    """log Σ exp over the last dimension; −inf, with gradient 0, for a row that is empty or whose scores are all −inf."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - torch.inf
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores)
    # torch computes the gradient as exp(score − result), and a large result has lost log Σ exp(score − peak) to rounding.
    # So the peak is subtracted before and added after, outside of torch's function.
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == torch.inf, 0.0)
    total = peak.squeeze(-1) + torch.logsumexp(scores - peak, -1)
    return total.masked_fill(empty.squeeze(-1), -torch.inf)


LOG2_E = math.log2(math.e)


def exp_(scores: Tensor) -> Tensor:
    """exp in place, for scores up to about 0, and the tensor itself; exponentials near the subnormal numbers become 0.

    On the CPU exp and products of subnormal numbers are a hundred times slower, and so is exp of −inf.
    """
    # e⁻⁸⁰ and e⁻⁶⁹⁰ are far enough above the least normal numbers of float32 and float64 for products to stay normal.
    lowest = -690.0 if scores.dtype == torch.float64 else -80.0
    # On the CPU 2^(s·log₂e), a multiplication and exp2, is three times as fast as exp.
    exponentials = scores.clamp_min_(lowest).mul_(LOG2_E).exp2_()
    # What the clamp has raised to e^lowest is below twice that, with rounding too: it is set to 0.
    return torch.threshold_(exponentials, 2 * math.exp(lowest), 0.0)


def second_phi_series(y: Tensor) -> Tensor:
    """φ₂(y) = (eʸ − 1 − y)/y² for |y| < 1/2, by its Taylor series."""
    # Horner's form, from the inside: 1/2·(1 + y/3·(1 + y/4·(1 + …))).
    total = torch.ones_like(y)
    for order in range(_TAYLOR_TERMS + 2, 2, -1):
        total = 1 + y / order * total
    return 0.5 * total
