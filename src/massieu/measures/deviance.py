"""Log-probabilities of counts and waiting times that keep their digits at any size.

The textbook's terms x log λ, λ and log x! are of the size of x, their sum of the size of log x. Loader (2000) writes the
sum as Stirling's error and the deviance of x from λ, which are no larger than the result.
"""

import math

import torch
from torch import Tensor

_LARGE = 16.0
"""From here on Stirling's series below is exact to float64: its next term is 2e-16."""
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
_NEAR = 0.1
_TERMS = 8  # 0.1^16 / 17 < 1e-17


def stirling_error(value: Tensor) -> Tensor:
    """log Γ(x + 1) − log(√(2πx) xˣ e⁻ˣ) for x > 0."""
    large = value >= _LARGE
    far, near = torch.where(large, value, _LARGE), torch.where(large, 1.0, value)
    series, square = torch.zeros_like(far), far.reciprocal().square()
    for coefficient in reversed(_STIRLING):
        series = coefficient + square * series
    direct = torch.lgamma(near + 1) - (near + 0.5) * near.log() + near - 0.5 * math.log(2 * math.pi)
    return torch.where(large, series / far, direct)


def deviance(value: Tensor, mean: Tensor, log_mean: Tensor) -> Tensor:
    """x log(x/λ) + λ − x ≥ 0 for x > 0: the KL divergence of Poisson laws of means x and λ.

    `log_mean` is log λ, which may be held where λ itself is too small or too large.
    """
    value, mean, log_mean = torch.broadcast_tensors(value, mean, log_mean)
    # By halves, whose sum does not overflow.
    half, other = 0.5 * value, 0.5 * mean
    near = (half - other).abs() < _NEAR * (half + other)
    other = torch.where(near, other, half)
    ratio = (half - other) / (half + other)
    square, series = ratio.square(), torch.zeros_like(ratio)
    for term in range(_TERMS, 0, -1):
        series = 1 / (2 * term + 1) + square * series
    close = 2 * (ratio * ((half - other) + 2 * half * square * series))
    tiny, largest = torch.finfo(mean.dtype).tiny, torch.finfo(mean.dtype).max
    held = ~near & (mean >= tiny) & (mean <= largest)
    quotient = value / torch.where(held, mean, 1.0)
    held = held & (quotient >= tiny) & (quotient <= largest)
    # One logarithm of a quotient has more digits than the difference of two.
    by_quotient = torch.where(held, quotient, 1.0).log()
    logarithm = torch.where(held, by_quotient, value.log() - torch.where(held, 0.0, log_mean))
    apart = value * torch.where(near, 0.0, logarithm) + (torch.where(near, value, mean) - value)
    return torch.where(near, close, apart)


def log_poisson(count: Tensor, mean: Tensor, log_mean: Tensor) -> Tensor:
    """x log λ − λ − log Γ(x + 1) for x ≥ 0, whole or not: relative error of a few roundings of its inputs."""
    count, mean, log_mean = torch.broadcast_tensors(count, mean, log_mean)
    large = count >= _LARGE
    far = torch.where(large, count, _LARGE)
    saddle = -deviance(far, torch.where(large, mean, _LARGE), torch.where(large, log_mean, math.log(_LARGE)))
    saddle = saddle - stirling_error(far) - 0.5 * far.log() - 0.5 * math.log(2 * math.pi)
    near = torch.where(large, 0.0, count)
    power = near * torch.where((near == 0) & log_mean.isinf(), 0.0, log_mean)
    return torch.where(large, saddle, power - torch.where(large, 0.0, mean) - torch.lgamma(near + 1))


def log_gamma_density(point: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    """k log r + (k − 1) log x − r x − log Γ(k) for x ≥ 0: +inf at x = 0 for k < 1."""
    point, shape, rate = torch.broadcast_tensors(point, shape, rate)
    log_point, log_rate = torch.where(point > 0, point, 1.0).log(), rate.log()
    log_point = torch.where(point > 0, log_point, -torch.inf)
    mean, log_mean = rate * point, log_rate + log_point
    steep = shape >= 1
    bounded = log_poisson(torch.where(steep, shape - 1, 0.0), mean, log_mean) + log_rate
    inside = ~steep & (point > 0)
    flat = torch.where(inside, shape, 1.0)
    pole = log_poisson(flat, torch.where(inside, mean, 1.0), torch.where(inside, log_mean, 0.0)) + flat.log()
    pole = torch.where(inside, pole - torch.where(inside, log_point, 0.0), torch.inf)
    return torch.where(steep, bounded, pole)
