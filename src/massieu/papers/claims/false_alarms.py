"""How far draws may lie from what they estimate, and how often they lie farther though the claim is true.

A check of draws fails by chance alone with the probability `FALSE_ALARM`. All claims together have fewer than 400 such
checks, so a run of all of them is wrong by chance less than once in 10,000 runs.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.papers.claims.oracles import quadrature

FALSE_ALARM = 2e-7
"""Probability that a check of draws fails though what it checks is true."""

_FARTHEST = 40.0
_STEP = 0.01


class Allowed(NamedTuple):
    """A distance in standard errors, and the probability of a larger one."""

    distance: float
    false_alarm: float


def allowed_distance(numbers: int = 1, degrees_of_freedom: float = math.inf, skewness: float = 0.0) -> Allowed:
    """Distance in standard errors that the largest of several estimates exceeds with the probability `FALSE_ALARM`.

    Student's law for a standard error that comes from the draws, the normal law for one that is known; Bonferroni's
    inequality for several numbers; and Cramér's factor exp(|γ|z³/3) for the tail of a mean of skewed draws that is divided
    by its own standard error. If no distance is that improbable, the most improbable one is returned.

    Args:
        numbers: How many estimates there are.
        degrees_of_freedom: Of the standard error: infinite where it is known.
        skewness: γ of the mean of the draws: their own over √n.
    """
    distance = torch.arange(1, round(_FARTHEST / _STEP) + 1, dtype=torch.float64) * _STEP
    log_tail = _log_tail(distance, degrees_of_freedom) + math.log(numbers) + abs(skewness) * distance**3 / 3
    improbable = (log_tail <= math.log(FALSE_ALARM)).nonzero()
    if len(improbable):
        index = int(improbable[0])
    else:
        # Cramér's factor grows faster than the tail falls: it is too large for such a distance.
        index = int(log_tail.argmin())
    return Allowed(distance[index].item(), math.exp(log_tail[index].item()))


def skewness_of_mean(draws: Float[Tensor, "draws *event"]) -> float:
    """The largest |γ|/√n of the columns, less what as many normal draws would show.

    Of fewer than a hundred draws it is noise; claims that draw so few average over many tokens in each.
    """
    count = len(draws)
    if count < 100:
        return 0.0
    deviation = draws - draws.mean(0)
    skewness = deviation.pow(3).mean(0) / deviation.square().mean(0).pow(1.5)
    beyond_noise = (skewness.abs().max().item() - math.sqrt(6 / count)) / math.sqrt(count)
    return max(0.0, beyond_noise)


def binomial_tail(trials: int, probability: float, least: int) -> float:
    """P(X ≥ `least`) of a binomial count."""
    return sum(
        math.comb(trials, count) * probability**count * (1 - probability) ** (trials - count)
        for count in range(least, trials + 1)
    )


def _log_tail(distance: Tensor, degrees_of_freedom: float) -> Tensor:
    """log P(|T| > t) of Student's or the normal law at an ascending row of distances."""
    if math.isinf(degrees_of_freedom):
        return math.log(2) + torch.special.log_ndtr(-distance)
    # With T = √ν·tan a the density of the angle a is proportional to cos^(ν − 1) a.
    angle = torch.cat([(distance / math.sqrt(degrees_of_freedom)).atan(), distance.new_tensor([math.pi / 2])])
    # One panel of nodes between each angle and the next, shape (distances, nodes).
    node, log_weight = quadrature(0.0, 1.0, panels=1)
    width = angle.diff().unsqueeze(-1)
    log_cosine = (angle[:-1, None] + width * node).cos().log()
    log_panel = ((degrees_of_freedom - 1) * log_cosine + width.log() + log_weight).logsumexp(-1)
    # ∫ cos^(ν − 1) a da from 0 to π/2 is half of the normaliser: the panels cover one of two equal tails.
    half = degrees_of_freedom / 2
    log_half_integral = math.log(math.pi) / 2 - math.log(2) + math.lgamma(half) - math.lgamma(half + 0.5)
    # Tails are sums of the panels from a distance outwards.
    return log_panel.flip(0).logcumsumexp(0).flip(0) - log_half_integral
