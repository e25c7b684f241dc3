"""Moments and cumulants of one real variable, each from the other."""

from math import comb

import torch
from torch import Tensor


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
