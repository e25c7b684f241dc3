"""Log-probabilities of counts and waiting times that keep their digits at any size.

The terms x log λ, λ and log x! of the textbook are of the size of x, but their sum is of the size of log x: digits cancel.
Loader (2000) writes the sum as Stirling's error and the deviance of x from λ, which are no larger than the result.
"""

import math

import torch
from torch import Tensor

_LARGE = 16.0
"""From here on the Stirling series below is exact to float64: its next term is 2e-16."""
_STIRLING_COEFFICIENTS = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
_SERIES_RADIUS = 0.1
"""Ratios |x − λ|/(x + λ) for which the deviance is a series."""
_SERIES_TERMS = 8  # 0.1^16 / 17 < 1e-17


def stirling_error(value: Tensor) -> Tensor:
    """The error of Stirling's formula, log Γ(x + 1) − log(√(2πx) xˣ e⁻ˣ), for x > 0."""
    is_large = value >= _LARGE
    # Each form gets arguments that it is right for, so that the one not chosen cannot spoil the gradient.
    large = torch.where(is_large, value, _LARGE)
    small = torch.where(is_large, 1.0, value)
    # Stirling's series in odd powers of 1/x, by Horner's form in 1/x².
    series = torch.zeros_like(large)
    square = large.reciprocal().square()
    for coefficient in reversed(_STIRLING_COEFFICIENTS):
        series = coefficient + square * series
    direct = torch.lgamma(small + 1) - (small + 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(is_large, series / large, direct)


def deviance(value: Tensor, mean: Tensor, log_mean: Tensor) -> Tensor:
    """The deviance x log(x/λ) + λ − x ≥ 0 for x > 0: the KL divergence of Poisson laws of means x and λ.

    `log_mean` is log λ, a normal number even where λ itself underflows or overflows.
    """
    value, mean, log_mean = torch.broadcast_tensors(value, mean, log_mean)
    # Halves, whose sum does not overflow.
    half_value = 0.5 * value
    half_mean = 0.5 * mean
    near = (half_value - half_mean).abs() < _SERIES_RADIUS * (half_value + half_mean)
    # With v = (x − λ)/(x + λ): log(x/λ) = 2 artanh v, so that the deviance is v·((x − λ) + 2x·(v²/3 + v⁴/5 + …)).
    half_mean = torch.where(near, half_mean, half_value)
    ratio = (half_value - half_mean) / (half_value + half_mean)
    square = ratio.square()
    series = torch.zeros_like(ratio)
    for term in range(_SERIES_TERMS, 0, -1):
        series = 1 / (2 * term + 1) + square * series
    near_deviance = 2 * (ratio * ((half_value - half_mean) + 2 * half_value * square * series))
    # Otherwise the logarithm of the quotient x/λ, which has more digits than the difference of two logarithms; that
    # difference only where λ or the quotient is no normal number.
    tiny = torch.finfo(mean.dtype).tiny
    largest = torch.finfo(mean.dtype).max
    is_normal = ~near & (mean >= tiny) & (mean <= largest)
    quotient = value / torch.where(is_normal, mean, 1.0)
    is_normal = is_normal & (quotient >= tiny) & (quotient <= largest)
    log_quotient = torch.where(is_normal, quotient, 1.0).log()
    log_ratio = torch.where(is_normal, log_quotient, value.log() - torch.where(is_normal, 0.0, log_mean))
    far_deviance = value * torch.where(near, 0.0, log_ratio) + (torch.where(near, value, mean) - value)
    return torch.where(near, near_deviance, far_deviance)


def log_poisson(count: Tensor, mean: Tensor, log_mean: Tensor) -> Tensor:
    """x log λ − λ − log Γ(x + 1) for x ≥ 0, whole or not: relative error of a few roundings of its inputs."""
    count, mean, log_mean = torch.broadcast_tensors(count, mean, log_mean)
    is_large = count >= _LARGE
    # Loader's form: −deviance(x, λ) − Stirling's error − log √(2πx).
    large = torch.where(is_large, count, _LARGE)
    saddle_point = -deviance(
        large, torch.where(is_large, mean, _LARGE), torch.where(is_large, log_mean, math.log(_LARGE))
    )
    saddle_point = saddle_point - stirling_error(large) - 0.5 * large.log() - 0.5 * math.log(2 * math.pi)
    # The textbook's form; 0·log 0 is 0.
    small = torch.where(is_large, 0.0, count)
    power = small * torch.where((small == 0) & log_mean.isinf(), 0.0, log_mean)
    textbook = power - torch.where(is_large, 0.0, mean) - torch.lgamma(small + 1)
    return torch.where(is_large, saddle_point, textbook)


def log_gamma_density(point: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    """The log-density k log r + (k − 1) log x − r x − log Γ(k) of a gamma law, for x ≥ 0; +inf at x = 0 for k < 1."""
    point, shape, rate = torch.broadcast_tensors(point, shape, rate)
    is_positive = point > 0
    log_point = torch.where(is_positive, torch.where(is_positive, point, 1.0).log(), -torch.inf)
    log_rate = rate.log()
    mean = rate * point
    log_mean = log_rate + log_point
    # For k ≥ 1 the density is r times the Poisson probability of k − 1 at mean r·x.
    is_bounded = shape >= 1
    bounded = log_poisson(torch.where(is_bounded, shape - 1, 0.0), mean, log_mean) + log_rate
    # For k < 1, where k − 1 is no count, it is k/x times that of k; at 0 it has a pole.
    has_pole = ~is_bounded & is_positive
    small_shape = torch.where(has_pole, shape, 1.0)
    with_pole = log_poisson(small_shape, torch.where(has_pole, mean, 1.0), torch.where(has_pole, log_mean, 0.0))
    with_pole = with_pole + small_shape.log()
    with_pole = torch.where(has_pole, with_pole - torch.where(has_pole, log_point, 0.0), torch.inf)
    return torch.where(is_bounded, bounded, with_pole)
