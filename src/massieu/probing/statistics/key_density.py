"""Which law do a head's keys follow? (claims S4, B6, experiment E8b)

Half of a window's keys, drawn at random, fit four laws; the other half scores them by log-likelihood. All but the sphere's are
written for keys that are whitened by the Gaussian that was fitted: then each is a law of the keys themselves, with the same
volume. A mixture of Gaussians about every key is what a memory of those keys would be (B6).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.ops.bessel import log_sphere_partition
from massieu.probing.statistics.head_window import HeadWindow, Sums, WindowMeasure, no_numbers
from massieu.probing.statistics.registry import KEY_DENSITY, SHIM, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 256
"""Keys of a window."""
COMPONENTS = 4
VARIANCES = torch.logspace(-2, 0.5, 21, dtype=torch.float64)
"""Of the kernel, in units of the Gaussian's."""
_STEPS = 16
_FEWEST = 16
_LEAST_VARIANCE = 1e-3
REGISTER = Register[WindowMeasure](KEY_DENSITY)
_of_keys = partial(
    REGISTER.statistic,
    paper=SHIM,
    control="shuffled_coordinates",
    signed=True,
    unit="nats per dimension",
    caveat="Measured within a window, on keys as they enter the scores (after rotary embedding). "
    "It does not say how the head uses them.",
)


@dataclass(frozen=True, eq=False)
class Halves:
    """Keys that laws are fitted to, and keys that score them.

    Attributes:
        raw, held: as the head has them.
        white, held_white: with the mean and the covariance of the fitted Gaussian taken out.
        log_volume: logarithm of the volume that this maps to one.
    """

    raw: Float[Tensor, "H T D"]
    held: Float[Tensor, "H U D"]
    white: Float[Tensor, "H T D"]
    held_white: Float[Tensor, "H U D"]
    log_volume: Float[Tensor, " H"]

    def gaussian(self) -> Float[Tensor, "H U"]:
        """Log density of the whitened keys under the Gaussian."""
        return _normal(self.held_white.square().sum(-1), self.held_white.shape[-1])


def _normal(square: Tensor, dimension: int, variance: Tensor | float = 1.0) -> Tensor:
    """Log density of N(0, variance I) at this squared distance."""
    logarithm = variance.log() if isinstance(variance, Tensor) else math.log(variance)
    return -0.5 * (square / variance + dimension * (math.log(2 * math.pi) + logarithm))


def shrunk_covariance(centred: Float[Tensor, "H T D"]) -> Float[Tensor, "H D D"]:
    """The oracle-approximating shrinkage of the sample covariance towards a multiple of the identity.

    Source: Chen, Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation" (IEEE Trans. Signal
    Process. 58, 5016, 2010), equation 23.
    """
    number, dimension = centred.shape[1:]
    sample = centred.mT @ centred / number
    trace, square = sample.diagonal(dim1=1, dim2=2).sum(-1), sample.square().sum((1, 2))
    above = (1 - 2 / dimension) * square + trace.square()
    below = (number + 1 - 2 / dimension) * (square - trace.square() / dimension)
    share = torch.where(below > 0, above / below, 1.0).clamp(0, 1)[:, None, None]
    return (1 - share) * sample + share * (trace / dimension)[:, None, None] * torch.eye(dimension).to(sample)


def halves(window: HeadWindow) -> Halves | None:
    """The window's keys in two halves; None where there are too few."""
    places = window.tokens(MOST)
    if len(places) < _FEWEST:
        return None
    keys = window.of_heads(window.call.key[:, :, places]).double()
    order = torch.randperm(len(places), generator=window.generator()).to(places.device)
    raw, held = keys[:, order[: len(places) // 2]], keys[:, order[len(places) // 2 :]]
    mean = raw.mean(1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(shrunk_covariance(raw - mean))
    factor = torch.where(failed[:, None, None] == 0, factor, torch.nan)
    white, held_white = (
        torch.linalg.solve_triangular(factor, (part - mean).mT, upper=False).mT for part in (raw, held)
    )
    return Halves(raw, held, white, held_white, factor.diagonal(dim1=1, dim2=2).log().sum(-1))


def _gain(window: HeadWindow, law: Callable[[Halves, HeadWindow], Float[Tensor, "H U"]]) -> Sums:
    given = halves(window)
    if given is None:
        return no_numbers(window)
    gain = (law(given, window) - given.gaussian()) / given.raw.shape[-1]
    usable = gain.isfinite().all(-1)
    return torch.where(usable, gain.sum(-1), 0.0), torch.where(usable, float(gain.shape[1]), 0.0)


@_of_keys(
    "Gain of a mixture over one Gaussian",
    formula="held-out log-likelihood of 4 round Gaussians in whitened space − that of one Gaussian",
    claim="S4, E8b",
)
def key_mixture_gain(window: HeadWindow) -> Sums:
    """Do the head's keys form a few clusters (above 0) rather than one Gaussian cloud?"""
    return _gain(window, mixture_density)


@_of_keys(
    "Gain of a kernel density over one Gaussian",
    formula="held-out log-likelihood of a Gaussian kernel about every key − that of one Gaussian",
    claim="B6, E8b",
)
def key_kernel_gain(window: HeadWindow) -> Sums:
    """Do held-out keys lie near single other keys (above 0), as retrieval needs, rather than in one Gaussian cloud?"""
    return _gain(window, kernel_density)


@_of_keys(
    "Gain of a law on spheres over one Gaussian",
    formula="held-out log-likelihood of von Mises–Fisher directions with log-normal lengths − that of one Gaussian",
    claim="S4, E8b",
    gauge_dependent=True,
    caveat="It depends on the key origin, the centre of the sphere. It does not say how the head uses its keys.",
)
def key_sphere_gain(window: HeadWindow) -> Sums:
    """Do the head's keys lie near a sphere around the origin, about one direction (above 0), or in a Gaussian cloud?"""
    return _gain(window, sphere_density)


def mixture_density(given: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the held-out whitened keys under round Gaussians, by expectation and maximisation."""
    white, dimension = given.white, given.white.shape[-1]
    start = torch.randperm(white.shape[1], generator=window.generator())[:COMPONENTS].to(white.device)
    means = white[:, start]
    variances = torch.ones(means.shape[:2]).to(white)
    shares = torch.full_like(variances, 1 / means.shape[1])
    for _ in range(_STEPS):
        logits = _components(white, means, variances, shares)
        weight = torch.softmax(logits, -1)
        total = weight.sum(1).clamp_min(1e-12)
        means = weight.mT @ white / total[..., None]
        spread = (weight * _squares(white, means)).sum(1) / (total * dimension)
        variances, shares = spread.clamp_min(_LEAST_VARIANCE), total / total.sum(-1, keepdim=True)
    return torch.logsumexp(_components(given.held_white, means, variances, shares), -1)


def _squares(points: Float[Tensor, "H T D"], means: Float[Tensor, "H C D"]) -> Float[Tensor, "H T C"]:
    return torch.cdist(points, means, compute_mode="donot_use_mm_for_euclid_dist").square()


def _components(points: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> Float[Tensor, "H T C"]:
    return shares.log()[:, None] + _normal(_squares(points, means), points.shape[-1], variances[:, None])


def kernel_density(given: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the held-out whitened keys under a kernel about each fitted key; its variance by leaving one out."""
    white, dimension = given.white, given.white.shape[-1]
    inside, across = torch.cdist(white, white).square(), torch.cdist(given.held_white, white).square()
    inside.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    number = white.shape[1]
    scores = [torch.logsumexp(_normal(inside, dimension, v), -1).sum(-1) for v in VARIANCES.tolist()]
    best = VARIANCES.to(white)[torch.stack(scores).argmax(0)][:, None, None]
    return torch.logsumexp(_normal(across, dimension, best), -1) - math.log(number)


def sphere_density(given: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the held-out keys, whitened in volume alone, under directions about a mean one and log-normal lengths."""
    dimension = given.raw.shape[-1]
    lengths, held_lengths = (part.norm(dim=-1) for part in (given.raw, given.held))
    directions, held = given.raw / lengths[..., None], given.held / held_lengths[..., None]
    mean = directions.mean(1)
    resultant = mean.norm(dim=-1)
    # Banerjee et al., J. Mach. Learn. Res. 6, 1345 (2005), equation 4.4.
    concentration = resultant * (dimension - resultant.square()) / (1 - resultant.square())
    along = (held * (mean / resultant[:, None])[:, None]).sum(-1)
    area = math.log(2) + dimension / 2 * math.log(math.pi) - math.lgamma(dimension / 2)
    direction = concentration[:, None] * along - log_sphere_partition(concentration.square(), dimension)[:, None] - area
    logs, held_logs = lengths.log(), held_lengths.log()
    middle, spread = logs.mean(1, keepdim=True), logs.std(1, keepdim=True)
    length = _normal((held_logs - middle).square(), 1, spread.square()) - held_logs
    return direction + length - (dimension - 1) * held_logs + given.log_volume[:, None]


class KeyDensityGroup(HeadWindowGroup):
    """Which law the keys have."""

    name = KEY_DENSITY
    register = REGISTER
