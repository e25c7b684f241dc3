"""Which law do a head's keys follow? (claims S4, B6, experiment E8b)

Four laws are fitted to half of a window's keys, drawn at random, and scored by log-likelihood on the other half. All but the
sphere's are written for keys whitened by the fitted Gaussian. Whitening changes all their densities by one volume, which
cancels in a difference. A mixture of Gaussians about every key is what a memory of those keys would be (B6).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.ops.bessel import log_sphere_partition
from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, no_numbers
from massieu.probing.statistics.registry import KEY_DENSITY, SHIM, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 256
"""Keys of a window."""
COMPONENTS = 4
"""Gaussians of the mixture."""
VARIANCES = torch.logspace(-2, 0.5, 21, dtype=torch.float64)
"""Variances of the kernel that are tried, in units of the Gaussian's."""
_STEPS = 16
"""Steps of expectation and maximisation."""
_FEWEST = 16
"""Keys of a window; of fewer there is no number."""
_LEAST_VARIANCE = 1e-3
"""Of a component of the mixture, which else may shrink onto one key."""
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
    """Keys to which laws are fitted, and keys that score them.

    Attributes:
        fitted, scored: the keys of the head.
        white_fitted, white_scored: the same, with the mean and the covariance of the fitted Gaussian taken out.
        log_volume: logarithm of the volume that whitening maps to a volume of 1.
    """

    fitted: Float[Tensor, "H T D"]
    scored: Float[Tensor, "H U D"]
    white_fitted: Float[Tensor, "H T D"]
    white_scored: Float[Tensor, "H U D"]
    log_volume: Float[Tensor, " H"]

    def gaussian(self) -> Float[Tensor, "H U"]:
        """Log density of the scored whitened keys under the Gaussian."""
        return _log_normal(self.white_scored.square().sum(-1), self.white_scored.shape[-1])


def _log_normal(square: Tensor, dimension: int, variance: Tensor | float = 1.0) -> Tensor:
    """Log density of N(0, variance I) at this squared distance from its mean."""
    log_variance = variance.log() if isinstance(variance, Tensor) else math.log(variance)
    return -0.5 * (square / variance + dimension * (math.log(2 * math.pi) + log_variance))


def shrunk_covariance(centred: Float[Tensor, "H T D"]) -> Float[Tensor, "H D D"]:
    """The oracle-approximating shrinkage of the sample covariance towards a multiple of the identity.

    Source: Chen, Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation" (IEEE Trans. Signal
    Process. 58, 5016, 2010), equation 23.
    """
    number, dimension = centred.shape[1:]
    sample = centred.mT @ centred / number
    trace = sample.diagonal(dim1=1, dim2=2).sum(-1)
    trace_of_square = sample.square().sum((1, 2))
    numerator = (1 - 2 / dimension) * trace_of_square + trace.square()
    denominator = (number + 1 - 2 / dimension) * (trace_of_square - trace.square() / dimension)
    # The denominator is 0 for a multiple of the identity, which shrinkage leaves as it is.
    share = torch.where(denominator > 0, numerator / denominator, 1.0).clamp(0, 1)[:, None, None]
    return (1 - share) * sample + share * (trace / dimension)[:, None, None] * torch.eye(dimension).to(sample)


def halves(window: HeadWindow) -> Halves | None:
    """The window's keys in two halves; None where there are too few."""
    places = window.tokens(MOST)
    if len(places) < _FEWEST:
        return None
    keys = window.of_heads(window.call.key[:, :, places]).double()
    order = torch.randperm(len(places), generator=window.generator()).to(places.device)
    fitted = keys[:, order[: len(places) // 2]]
    scored = keys[:, order[len(places) // 2 :]]
    mean = fitted.mean(1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(shrunk_covariance(fitted - mean))
    factor = torch.where(failed[:, None, None] == 0, factor, torch.nan)
    white_fitted, white_scored = (
        torch.linalg.solve_triangular(factor, (part - mean).mT, upper=False).mT for part in (fitted, scored)
    )
    # log √det Σ, from the diagonal of its Cholesky factor.
    log_volume = factor.diagonal(dim1=1, dim2=2).log().sum(-1)
    return Halves(fitted, scored, white_fitted, white_scored, log_volume)


def _gain(window: HeadWindow, law: Callable[[Halves, HeadWindow], Float[Tensor, "H U"]]) -> HeadSums:
    """Sums over the scored keys of the law's log density less the Gaussian's, per dimension."""
    keys = halves(window)
    if keys is None:
        return no_numbers(window)
    gain = (law(keys, window) - keys.gaussian()) / keys.fitted.shape[-1]
    usable = gain.isfinite().all(-1)
    return torch.where(usable, gain.sum(-1), 0.0), torch.where(usable, float(gain.shape[1]), 0.0)


@_of_keys(
    "Gain of a mixture over one Gaussian",
    formula="held-out log-likelihood of 4 round Gaussians in whitened space − that of one Gaussian",
    claim="S4, E8b",
)
def key_mixture_gain(window: HeadWindow) -> HeadSums:
    """Do the head's keys form a few clusters (above 0) rather than one Gaussian cloud?"""
    return _gain(window, mixture_density)


@_of_keys(
    "Gain of a kernel density over one Gaussian",
    formula="held-out log-likelihood of a Gaussian kernel about every key − that of one Gaussian",
    claim="B6, E8b",
)
def key_kernel_gain(window: HeadWindow) -> HeadSums:
    """Do held-out keys lie near single other keys (above 0), as retrieval needs, rather than in one Gaussian cloud?"""
    return _gain(window, kernel_density)


@_of_keys(
    "Gain of a law on spheres over one Gaussian",
    formula="held-out log-likelihood of von Mises–Fisher directions with log-normal lengths − that of one Gaussian",
    claim="S4, E8b",
    gauge_dependent=True,
    caveat="It depends on the key origin, the centre of the sphere. It does not say how the head uses its keys.",
)
def key_sphere_gain(window: HeadWindow) -> HeadSums:
    """Do the head's keys lie near a sphere around the origin, about one direction (above 0), or in a Gaussian cloud?"""
    return _gain(window, sphere_density)


def mixture_density(keys: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the scored whitened keys under round Gaussians, fitted by expectation and maximisation."""
    white = keys.white_fitted
    dimension = white.shape[-1]
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
        variances = spread.clamp_min(_LEAST_VARIANCE)
        shares = total / total.sum(-1, keepdim=True)
    return torch.logsumexp(_components(keys.white_scored, means, variances, shares), -1)


def _squares(points: Float[Tensor, "H T D"], means: Float[Tensor, "H C D"]) -> Float[Tensor, "H T C"]:
    # Differences are squared one by one: ‖x‖² − 2 x·m + ‖m‖² loses the digits of keys that are near a mean.
    return torch.cdist(points, means, compute_mode="donot_use_mm_for_euclid_dist").square()


def _components(points: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> Float[Tensor, "H T C"]:
    """Log of each component's share times its density at each point."""
    return shares.log()[:, None] + _log_normal(_squares(points, means), points.shape[-1], variances[:, None])


def kernel_density(keys: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the scored whitened keys under a Gaussian kernel about each fitted key.

    The kernel's variance has the largest likelihood of fitted keys when each is left out of its own density.
    """
    white = keys.white_fitted
    dimension = white.shape[-1]
    among_fitted = torch.cdist(white, white).square()
    to_scored = torch.cdist(keys.white_scored, white).square()
    among_fitted.diagonal(dim1=1, dim2=2).fill_(torch.inf)  # leaves each key out of its own density
    scores = [
        torch.logsumexp(_log_normal(among_fitted, dimension, variance), -1).sum(-1) for variance in VARIANCES.tolist()
    ]
    best = VARIANCES.to(white)[torch.stack(scores).argmax(0)][:, None, None]
    return torch.logsumexp(_log_normal(to_scored, dimension, best), -1) - math.log(white.shape[1])


def sphere_density(keys: Halves, window: HeadWindow) -> Float[Tensor, "H U"]:
    """Log density of the scored keys under von Mises–Fisher directions and log-normal lengths.

    It is multiplied by the whitening's volume, so that it is a density of whitened keys, as the others are.
    """
    dimension = keys.fitted.shape[-1]
    lengths = keys.fitted.norm(dim=-1)
    scored_lengths = keys.scored.norm(dim=-1)
    directions = keys.fitted / lengths[..., None]
    scored_directions = keys.scored / scored_lengths[..., None]

    # Directions: log density κ μ·x − log of the normaliser on the sphere.
    mean = directions.mean(1)
    resultant = mean.norm(dim=-1)
    # Banerjee et al., J. Mach. Learn. Res. 6, 1345 (2005), equation 4.4.
    concentration = resultant * (dimension - resultant.square()) / (1 - resultant.square())
    along_mean = (scored_directions * (mean / resultant[:, None])[:, None]).sum(-1)
    log_area = math.log(2) + dimension / 2 * math.log(math.pi) - math.lgamma(dimension / 2)
    log_mean_factor = log_sphere_partition(concentration.square(), dimension)
    direction = concentration[:, None] * along_mean - log_mean_factor[:, None] - log_area

    # Lengths: the density of log r, times d(log r)/dr = 1/r; a volume element is r^(D−1) times direction and length.
    log_lengths = lengths.log()
    scored_log_lengths = scored_lengths.log()
    centre = log_lengths.mean(1, keepdim=True)
    spread = log_lengths.std(1, keepdim=True)
    length = _log_normal((scored_log_lengths - centre).square(), 1, spread.square()) - scored_log_lengths
    return direction + length - (dimension - 1) * scored_log_lengths + keys.log_volume[:, None]


class KeyDensityGroup(HeadWindowGroup):
    """Which law the keys have."""

    name = KEY_DENSITY
    register = REGISTER
