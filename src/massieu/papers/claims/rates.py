"""Rates: the slope of mean log error against log size, with the interval that its repetitions leave."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import InputError
from massieu.papers.claims.claim import Check, at_most
from massieu.papers.claims.false_alarms import allowed_distance

_LEAST_REPETITIONS = 20
_LEAST_OCTAVES = 5

RATE = 0.1
"""How far the interval of a slope may lie from the predicted exponent, and how wide to either side it may be."""


class Rate(NamedTuple):
    """A power law's exponent, with an interval.

    Attributes:
        slope: The exponent.
        half_width: Half the width of the interval about the slope.
        false_alarm: Probability that the interval misses the slope of the expected log errors.
        degrees_of_freedom: Of Student's law, from which the interval comes.
    """

    slope: float
    half_width: float
    false_alarm: float
    degrees_of_freedom: float


def rate(sizes: list[int], errors: Float[Tensor, "sizes repetitions"]) -> Rate:
    """Least-squares slope of mean log error against log size, and Student's interval about it.

    Why logarithms: where tails are heavy, a few draws make the mean of squares, which then has no interval. The slope is
    a contrast: a bias that is the same at every size cancels. Degrees of freedom are those of Welch and Satterthwaite.

    Args:
        sizes: At least five octaves apart in all.
        errors: One of each repetition (for vectors, their norm); at least 20 a size, independent.

    Raises:
        ValueError: fewer octaves or repetitions, or shapes that do not fit.
    """
    if errors.ndim != 2 or errors.shape[0] != len(sizes) or errors.shape[1] < _LEAST_REPETITIONS:
        needed = f"({len(sizes)}, {_LEAST_REPETITIONS} or more)"
        raise ValueError(f"errors must have shape {needed} for {len(sizes)} sizes, got {tuple(errors.shape)}")
    weight = _contrast(sizes)
    log_error = errors.double().log()
    repetitions = errors.shape[1]
    slope = (weight @ log_error.mean(-1)).item()
    # The slope is a sum over independent sizes: so is its variance.
    variances = weight.square() * log_error.var(-1) / repetitions
    variance = variances.sum().item()
    degrees_of_freedom = (repetitions - 1) * variance**2 / variances.square().sum().item()
    allowed = allowed_distance(1, degrees_of_freedom)
    half_width = allowed.distance * math.sqrt(variance)
    return Rate(slope, half_width, allowed.false_alarm, degrees_of_freedom)


def has_rate(name: str, estimate: Rate, exponent: float) -> Check:
    """The slope's interval comes within `RATE` of the predicted exponent.

    Raises:
        InputError: the interval is wider than that to either side, and would agree with anything.
    """
    slope = estimate.slope
    half_width = estimate.half_width
    if half_width > RATE:
        raise InputError(
            f"the repetitions tell the slope of {name!r} to ±{half_width:.2g} only, and ±{RATE} is needed; take more"
        )
    distance = max(abs(slope - exponent) - half_width, 0.0)
    detail = f"slope {slope:.3f} ± {half_width:.3f} against {exponent:g}"
    basis = f"slope, Student's law, {estimate.degrees_of_freedom:.0f} degrees of freedom"
    return Check(name, distance, "≤", RATE, detail, false_alarm=estimate.false_alarm, basis=basis)


def has_exact_rate(name: str, sizes: list[int], errors: Float[Tensor, "sizes *cases"], exponent: float) -> Check:
    """The slope of every case comes within `RATE` of the exponent; for errors in which no chance is left.

    Raises:
        ValueError: the sizes span fewer than five octaves.
    """
    slopes = torch.tensordot(_contrast(sizes), errors.double().log(), dims=1)
    detail = f"slopes {slopes.min():.3f} to {slopes.max():.3f} against {exponent:g}"
    return at_most(name, (slopes - exponent).abs(), RATE, detail)


def _contrast(sizes: list[int]) -> Float[Tensor, "sizes"]:
    """The weights whose sum with log errors is the least-squares slope."""
    if max(sizes) < 2**_LEAST_OCTAVES * min(sizes):
        raise ValueError(f"sizes must span {_LEAST_OCTAVES} octaves, got {min(sizes)} to {max(sizes)}")
    log_size = torch.tensor(sizes, dtype=torch.float64).log()
    deviation = log_size - log_size.mean()
    return deviation / deviation.square().sum()
