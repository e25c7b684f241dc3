"""How far a cloud of tokens is from a Gaussian: cumulants and transport distances of its projections (S13, E1).

A cloud is a tensor ``(*batch, n, d)`` of equally weighted tokens; everything is computed in float64. If all tokens project to
one point of a line, up to the rounding of inner products, cumulants and distance along it are 0. A cloud with a NaN or an
infinity gives NaN, and leaves the others of its batch untouched. Memory is linear in n·d.
"""

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_values, floating, instance, whole_number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.ops.sharded.collectives import Peers
from massieu.population.reading import (
    ObservableReading,
    Processes,
    centred,
    check_call,
    check_cloud,
    check_single_cloud,
    gather_tokens,
    greatest,
    summed,
    token_counts,
)

_BLOCK = 32
"""Directions per block: the projections on to a block take the memory of a cloud with d = 32."""
_NULL_DRAWS = 2**22
"""Tokens that the simulation of a null draws in all, unless that takes too few or too many repetitions."""
_MIN_NULL_REPETITIONS = 32
_MAX_NULL_REPETITIONS = 1024
_CHANCE = 0.05
"""How often the largest of the cumulants of a Gaussian cloud exceeds its null."""
_LEAST_FOR_CUMULANTS = 4


class ProjectedCumulantsResult(NamedTuple):
    """Standardised cumulants of each projection; 0 in expectation for independent Gaussian tokens."""

    third: Float[Tensor, "*batch m"]
    """k₃/k₂^{3/2}: skewness."""
    fourth: Float[Tensor, "*batch m"]
    """k₄/k₂²: excess kurtosis."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


def random_directions(
    dimension: int, count: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "m d"]:
    """Unit vectors, independent and uniform on the sphere, on the generator's device.

    Raises:
        ValueError: fewer than one direction or dimension.
        TypeError: a number that is no integer, no generator, or a dtype that is not floating-point.
    """
    whole_number("dimension", dimension, least=1)
    whole_number("count", count, least=1)
    instance("generator", generator, torch.Generator, "a torch.Generator")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating-point, got {dtype}")
    drawn = torch.randn(count, dimension, generator=generator, device=generator.device, dtype=dtype)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def projected_cumulants(
    points: Float[Tensor, "*batch n d"], directions: Float[Tensor, "m d"], *, group: Processes = None
) -> ProjectedCumulantsResult:
    """Third and fourth cumulant of the tokens along each direction, divided by a power of their variance.

    The cumulants are Fisher's k-statistics, which are unbiased for every law. For independent Gaussian tokens the ratios have
    mean 0 and the standard deviations of `gaussian_cumulant_spread`.

    Args:
        points: At least 4 tokens.
        directions: Vectors of any length; see `random_directions`.
        group: Processes that share the cloud, each with its own tokens; the result is the same on all.

    Raises:
        ValueError: there are fewer than 4 tokens, or the directions are of another dimension.
        TypeError: points or directions are no floating-point tensors.
    """
    check = partial(_check_directions, points, directions)
    processes = check_call("projected_cumulants", points, group, check, {"directions": directions})
    relative, n = centred(points, processes)
    _check_count("the fourth cumulant", n)
    third = []
    fourth = []
    for block in directions.to(relative).split(_BLOCK):
        along = _projected(relative, block, processes)
        square = along.square()
        powers = torch.stack([square.sum(-2), (square * along).sum(-2), square.square().sum(-2)])
        # Central moments of the n tokens, since projections of centred tokens have mean 0.
        m2, m3, m4 = summed(powers, processes) / n
        # Fisher's k-statistics, the unbiased estimates of the second, third and fourth cumulant.
        k2 = n * m2 / (n - 1)
        k3 = n**2 * m3 / ((n - 1) * (n - 2))
        k4 = n**2 * ((n + 1) * m4 - 3 * (n - 1) * m2.square()) / ((n - 1) * (n - 2) * (n - 3))
        variance = torch.where(k2 == 0, 1.0, k2)
        third.append(k3 / variance**1.5)
        fourth.append(k4 / variance.square())
    return ProjectedCumulantsResult(torch.cat(third, -1), torch.cat(fourth, -1))


def gaussian_cumulant_spread(tokens: int) -> tuple[float, float]:
    """Exact standard deviations of `projected_cumulants`, third and fourth, for n independent Gaussian tokens.

    Source: Fisher, "The moments of the distribution for normal samples of measures of departure from normality" (1930).

    Raises:
        ValueError: fewer than 4 tokens.
    """
    n = whole_number("tokens", tokens, least=_LEAST_FOR_CUMULANTS)
    third = 6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3))
    fourth = 24 * n * (n - 1) ** 2 / ((n - 3) * (n - 2) * (n + 3) * (n + 5))
    return math.sqrt(third), math.sqrt(fourth)


def squared_gaussian_distance(
    points: Float[Tensor, "*batch n d"], directions: Float[Tensor, "m d"], *, group: Processes = None
) -> Float[Tensor, "*batch m"]:
    """W₂² along each direction between the tokens and the Gaussian of their mean and variance, divided by that variance.

    W₂² = ∫₀¹ (F⁻¹(t) − mean − σΦ⁻¹(t))² dt, with Φ⁻¹ integrated exactly over the share 1/n of each token, and σ² the biased
    variance. It lies in [0, 2), and is 0 only in the limit of infinitely many tokens. Its mean over directions is called the
    sliced distance; `gaussian_distance_null` is what to expect of Gaussian tokens. The tokens of a group are gathered, one
    block of directions at a time.

    Raises:
        ValueError: the directions are of another dimension.
        TypeError: points or directions are no floating-point tensors.
    """
    check = partial(_check_directions, points, directions)
    processes = check_call("squared_gaussian_distance", points, group, check, {"directions": directions})
    relative, _ = centred(points, processes)
    distances = []
    for block in directions.to(relative).split(_BLOCK):
        along = gather_tokens(_projected(relative, block, processes), processes)
        distances.append(_distance(along.mT))
    return torch.cat(distances, -1)


def gaussian_distance_null(tokens: int) -> tuple[float, float]:
    """Mean of `squared_gaussian_distance` for n independent Gaussian tokens, and its standard error (about 1 to 7 %).

    The distance does not depend on location and scale, so that it has one law for each n. This law is simulated once for
    each n, always with the same seed.

    Raises:
        ValueError: fewer than 1 token.
    """
    return _simulated_null(whole_number("tokens", tokens, least=1))


@door(seed=whole_number)
@dataclass(frozen=True)
class CloudShape:
    """Observable: how far the tokens are from a Gaussian, along the same random directions in every layer.

    Records the root mean square over the directions of the standardised cumulants (`third_cumulant`, `fourth_cumulant`), and
    their largest absolute value (`third_cumulant_largest`, `fourth_cumulant_largest`). `gaussian_distance` is the sliced W₂
    to the Gaussian of the same two moments, in standard deviations along each direction.

    Standard errors are those over directions, for the tokens as they are. Nulls are for as many independent Gaussian tokens:
    the exact root of the expected mean square, for the distance by simulation. The null of a largest value is exceeded by at
    most 5 % of such clouds, if the cumulant along each direction is taken as normal.

    Attributes:
        projections: Number of directions.
        seed: Seed of the directions.

    Example:
        >>> import torch
        >>> from massieu.population import CloudShape
        >>> readings = CloudShape()(torch.tensor([[-1.0], [1.0]] * 2))  # the fourth cumulant of a sign is −2
        >>> round(readings["fourth_cumulant"].value.mean().item(), 3)
        6.0
    """

    projections: int = 256
    seed: int = 0

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        processes = check_call(
            "CloudShape",
            points,
            group,
            partial(check_single_cloud, points),
            projections=self.projections,
            seed=self.seed,
        )
        count = sum(token_counts(points, processes))
        _check_count("CloudShape", count)
        generator = torch.Generator().manual_seed(self.seed)
        directions = random_directions(points.shape[-1], self.projections, generator=generator).to(points.device)
        readings: dict[str, ObservableReading] = {}
        cumulants = projected_cumulants(points, directions, group=group)
        # Bonferroni over the directions and both signs: none of them exceeds this many standard deviations by chance.
        quantile = -torch.special.ndtri(_number(_CHANCE / (2 * self.projections))).item()
        spreads = gaussian_cumulant_spread(count)
        for name, cumulant, spread in zip(("third_cumulant", "fourth_cumulant"), cumulants, spreads, strict=True):
            readings[name] = _root(cumulant.square(), spread)
            readings[f"{name}_largest"] = ObservableReading(cumulant.abs().amax(), null=_number(quantile * spread))
        distance = squared_gaussian_distance(points, directions, group=group)
        readings["gaussian_distance"] = _root(distance, math.sqrt(gaussian_distance_null(count)[0]))
        return readings


@functools.cache
def _simulated_null(tokens: int) -> tuple[float, float]:
    """Mean and its standard error over clouds of this many Gaussian tokens on a line."""
    repetitions = min(_MAX_NULL_REPETITIONS, max(_MIN_NULL_REPETITIONS, _NULL_DRAWS // tokens))
    generator = torch.Generator().manual_seed(0)
    distances = torch.cat(
        [_distance(torch.randn(1, tokens, generator=generator, dtype=torch.float64)) for _ in range(repetitions)]
    )
    return distances.mean().item(), distances.std().item() / repetitions**0.5


def _projected(relative: Tensor, directions: Tensor, group: Peers | None) -> Tensor:
    """Projections (*batch, n, m) of centred tokens, each direction scaled so that the largest has absolute value 1.

    Powers of them then neither overflow nor vanish. Directions along which there is nothing but rounding are exactly 0.
    """
    along = relative @ directions.T
    size = greatest(along.detach().abs().amax(-2, keepdim=True), group)
    length = greatest(relative.detach().abs().amax((-2, -1), keepdim=True), group) * directions.abs().sum(-1)
    rounding = 2 * relative.shape[-1] * torch.finfo(along.dtype).eps * length
    return along * torch.where(size <= rounding, 0.0, 1 / torch.where(size == 0, 1.0, size))


def _distance(along: Tensor) -> Tensor:
    """W₂²/variance of numbers along the last dimension."""
    n = along.shape[-1]
    along = along - along.mean(-1, keepdim=True)
    variance = along.square().mean(-1)
    if n == 1:
        return variance  # 0, or NaN for a token that is not finite.
    # Token i, in order, is transported to the quantiles between (i − 1)/n and i/n of a standard Gaussian. As the derivative
    # of −φ is xφ, the mean of Φ⁻¹ over that share is n(φ at its lower edge − φ at its upper edge), and φ is 0 at the ends.
    edges = torch.arange(1, n, dtype=along.dtype, device=along.device) / n
    density = torch.exp(-torch.special.ndtri(edges).square() / 2) / math.sqrt(2 * math.pi)
    zero = density.new_zeros(1)
    quantile_means = n * (torch.cat([zero, density]) - torch.cat([density, zero]))
    # The Gaussian's variance 1 is that of these means plus that within the shares, which no placing of tokens can avoid.
    within = 1 - quantile_means.square().mean()
    scaled = along.sort(dim=-1).values / torch.where(variance == 0, 1.0, variance).sqrt().unsqueeze(-1)
    distance = (scaled - quantile_means).square().mean(-1) + within
    distance = torch.where(variance.isnan(), torch.nan, distance)
    return torch.where(variance == 0, 0.0, distance)


def _root(squares: Tensor, null: float) -> ObservableReading:
    """The root of the mean over directions; its standard error is that of the mean times the derivative of the root."""
    value = squares.mean().sqrt()
    if len(squares) == 1:
        return ObservableReading(value, null=_number(null))
    error = squares.std() / len(squares) ** 0.5 / (2 * torch.where(value == 0, 1.0, value))
    return ObservableReading(value, error, _number(null))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _check_count(owner: str, tokens: int) -> None:
    if tokens < _LEAST_FOR_CUMULANTS:
        raise ValueError(f"{owner} needs at least {_LEAST_FOR_CUMULANTS} tokens, got {tokens}")


def _check_directions(points: Tensor, directions: Tensor) -> None:
    check_cloud(points)
    shape = floating("directions", directions).shape
    if not points.is_meta:
        check_values(directions=directions)
    if len(shape) != 2 or shape[1] != points.shape[-1] or shape[0] == 0:
        raise ValueError(
            f"directions must have shape (m, {points.shape[-1]}) for points {tuple(points.shape)}, got {tuple(shape)}"
        )
