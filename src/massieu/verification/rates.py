"""Rates: the slope of log error against log size, with a bootstrap interval over repetitions."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.verification.claim import Check

_RESAMPLES = 1000
_LEAST_REPETITIONS = 20
_LEAST_OCTAVES = 5

RATE = 0.1
"""How far the interval of a slope may lie from the predicted exponent, and how wide to either side it may be."""


class Rate(NamedTuple):
    """A power law's exponent."""

    slope: float
    low: float
    high: float
    """Ends of the 95 % interval."""


def rate(sizes: list[int], errors: Float[Tensor, "sizes repetitions"], *, seed: int = 0) -> Rate:
    """Least-squares slope of log root-mean-square error against log size, and its bootstrap interval.

    Args:
        sizes: At least five octaves apart in all.
        errors: One of each repetition (for vectors, their norm); at least 20 a size, independent. Each resample draws them
            anew at every size.
        seed: Of the resampling.

    Raises:
        ValueError: fewer octaves or repetitions, or shapes that do not fit.
    """
    if errors.ndim != 2 or errors.shape[0] != len(sizes) or errors.shape[1] < _LEAST_REPETITIONS:
        needed = f"({len(sizes)}, {_LEAST_REPETITIONS} or more)"
        raise ValueError(f"errors must have shape {needed} for {len(sizes)} sizes, got {tuple(errors.shape)}")
    if max(sizes) < 2**_LEAST_OCTAVES * min(sizes):
        raise ValueError(f"sizes must span {_LEAST_OCTAVES} octaves, got {min(sizes)} to {max(sizes)}")
    position = torch.tensor(sizes, dtype=torch.float64).log()
    position = (position - position.mean()) / (position - position.mean()).square().sum()
    squares = errors.double().square()
    count = errors.shape[1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (_RESAMPLES, *errors.shape), generator=generator)
    resampled = squares.expand(_RESAMPLES, -1, -1).gather(-1, drawn).mean(-1)
    slopes = 0.5 * resampled.log() @ position
    low, high = slopes.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Rate((0.5 * squares.mean(-1).log() @ position).item(), low, high)


def has_rate(name: str, found: Rate, exponent: float) -> Check:
    """The slope's interval comes within `RATE` of the predicted exponent, and is no wider than that to either side.

    Measured is the larger of the two: an interval that would agree with anything does not hold.
    """
    distance = max(found.low - exponent, exponent - found.high, 0.0)
    width = (found.high - found.low) / 2
    detail = f"slope {found.slope:.3f} in [{found.low:.3f}, {found.high:.3f}] against {exponent:g}"
    return Check(name, max(distance, width), "≤", RATE, detail)
