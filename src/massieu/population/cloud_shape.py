"""How far a cloud of tokens is from a Gaussian: cumulants and transport distances of its projections (S13, E1).

A cloud is a tensor ``(*batch, n, d)`` of equally weighted tokens; everything is computed in float64. Projections on to a line
of which all tokens fall on one point, to the rounding of inner products, have cumulants and distance 0. A cloud with a NaN or
an infinity gives NaN, and leaves the others of its batch untouched. Memory is linear in n·d.
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
from massieu.ops.sharded.collectives import Peers
from massieu.population.reading import (
    ObservableReading,
    Processes,
    centred,
    check_cloud,
    check_single_cloud,
    collected,
    counts,
    greatest,
    shared,
    summed,
)

_BLOCK = 32
"""Directions at a time: a block of projections is as large as a cloud of that width."""
_NULL_DRAWS = 2**22
_NULL_REPETITIONS = (32, 1024)
_CHANCE = 0.05
_LEAST_FOR_CUMULANTS = 4


class ProjectedCumulantsResult(NamedTuple):
    """Standardised cumulants of each projection; 0 in expectation for independent Gaussian tokens."""

    third: Float[Tensor, "*batch m"]
    """k₃/k₂^{3/2}: skewness."""
    fourth: Float[Tensor, "*batch m"]
    """k₄/k₂²: excess kurtosis."""


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
    """Third and fourth cumulant of the tokens along each direction, divided by the power of their variance.

    Cumulants are Fisher's k-statistics, unbiased whatever the law; their ratios have for independent Gaussian tokens mean 0
    and the standard deviations of `gaussian_cumulant_spread`.

    Args:
        points: At least 4 tokens.
        directions: Of any length; see `random_directions`.
        group: Processes that share the cloud's tokens, each with its own; the result is the same on all.

    Raises:
        ValueError: fewer than 4 tokens, or directions of another dimension.
        TypeError: no floating-point tensors.
    """
    check = partial(_check_directions, points, directions)
    processes = shared("projected_cumulants", points, group, check, {"directions": directions})
    relative, n = centred(points, processes)
    _check_count("the fourth cumulant", n)
    third, fourth = [], []
    for block in directions.to(relative).split(_BLOCK):
        along = _projected(relative, block, processes)
        square = along.square()
        powers = torch.stack([square.sum(-2), (square * along).sum(-2), square.square().sum(-2)])
        second, cube, quartic = summed(powers, processes) / n
        k2 = n * second / (n - 1)
        k3 = n**2 * cube / ((n - 1) * (n - 2))
        k4 = n**2 * ((n + 1) * quartic - 3 * (n - 1) * second.square()) / ((n - 1) * (n - 2) * (n - 3))
        spread = torch.where(k2 == 0, 1.0, k2)
        third.append(k3 / spread**1.5)
        fourth.append(k4 / spread.square())
    return ProjectedCumulantsResult(torch.cat(third, -1), torch.cat(fourth, -1))


def gaussian_cumulant_spread(tokens: int) -> tuple[float, float]:
    """Standard deviations of the third and fourth of `projected_cumulants` for n independent Gaussian tokens; exact.

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
    """W₂² between the tokens along each direction and N(mean, variance) of them, divided by that (biased) variance.

    W₂² = ∫₀¹ (F⁻¹(t) − mean − σΦ⁻¹(t))² dt, with Φ⁻¹ integrated exactly over the share 1/n of each token. It lies in [0, 2),
    is 0 only in the limit of infinitely many tokens, and is the mean over directions what is called the sliced distance;
    `gaussian_distance_null` tells what to expect of Gaussian tokens. The tokens of a group are gathered, one block of
    directions at a time.

    Raises:
        ValueError: directions of another dimension.
        TypeError: no floating-point tensors.
    """
    check = partial(_check_directions, points, directions)
    processes = shared("squared_gaussian_distance", points, group, check, {"directions": directions})
    relative, _ = centred(points, processes)
    blocks = directions.to(relative).split(_BLOCK)
    return torch.cat(
        [_distance(collected(_projected(relative, block, processes), processes).mT) for block in blocks], -1
    )


def gaussian_distance_null(tokens: int) -> tuple[float, float]:
    """Mean of `squared_gaussian_distance` for n independent Gaussian tokens, and its standard error (about 1 to 7 %).

    The distance does not depend on location and scale, so that it has one law for each n: it is simulated, always with the
    same seed, and kept.

    Raises:
        ValueError: fewer than 1 token.
    """
    return _simulated_null(whole_number("tokens", tokens, least=1))


@door(seed=whole_number)
@dataclass(frozen=True)
class CloudShape:
    """Observable: how far the tokens are from a Gaussian, along the same random directions in every layer.

    Records of the standardised cumulants their root mean square over the directions (`third_cumulant`, `fourth_cumulant`) and
    the largest size (`third_cumulant_largest`, `fourth_cumulant_largest`), and `gaussian_distance`, the sliced W₂ to the
    Gaussian of the same two moments in units of the standard deviation along each direction.

    Standard errors are those over directions, for the tokens as they are. Nulls are for as many independent Gaussian tokens:
    the exact root of the expected mean square, for the distance by simulation; of the largest what it stays below in 95 % of
    such clouds at the least (each direction's cumulant taken as normal).

    Attributes:
        projections: How many directions.
        seed: Of the directions.

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
        processes = shared(
            "CloudShape",
            points,
            group,
            partial(check_single_cloud, points),
            projections=self.projections,
            seed=self.seed,
        )
        count = sum(counts(points, processes))
        _check_count("CloudShape", count)
        generator = torch.Generator().manual_seed(self.seed)
        directions = random_directions(points.shape[-1], self.projections, generator=generator).to(points.device)
        found: dict[str, ObservableReading] = {}
        cumulants = projected_cumulants(points, directions, group=group)
        reach = -torch.special.ndtri(_number(_CHANCE / (2 * self.projections))).item()
        spreads = gaussian_cumulant_spread(count)
        for name, each, spread in zip(("third_cumulant", "fourth_cumulant"), cumulants, spreads, strict=True):
            found[name] = _root(each.square(), spread)
            found[f"{name}_largest"] = ObservableReading(each.abs().amax(), null=_number(reach * spread))
        distance = squared_gaussian_distance(points, directions, group=group)
        found["gaussian_distance"] = _root(distance, math.sqrt(gaussian_distance_null(count)[0]))
        return found


@functools.cache
def _simulated_null(tokens: int) -> tuple[float, float]:
    least, most = _NULL_REPETITIONS
    repetitions = min(most, max(least, _NULL_DRAWS // tokens))
    generator = torch.Generator().manual_seed(0)
    found = torch.cat(
        [_distance(torch.randn(1, tokens, generator=generator, dtype=torch.float64)) for _ in range(repetitions)]
    )
    return found.mean().item(), found.std().item() / repetitions**0.5


def _projected(relative: Tensor, directions: Tensor, group: Peers | None) -> Tensor:
    """Projections of centred tokens, the largest about 1: powers of them neither overflow nor vanish, rounding is 0."""
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
        return variance  # 0, or NaN for a broken token
    edge = torch.arange(1, n, dtype=along.dtype, device=along.device) / n
    density = torch.exp(-torch.special.ndtri(edge).square() / 2) / math.sqrt(2 * math.pi)
    nought = density.new_zeros(1)
    # n ∫ Φ⁻¹ over a token's share: the best that a step function can do; what is left of the unit variance is within shares.
    centre = n * (torch.cat([nought, density]) - torch.cat([density, nought]))
    within = 1 - centre.square().mean()
    scaled = along.sort(dim=-1).values / torch.where(variance == 0, 1.0, variance).sqrt().unsqueeze(-1)
    distance = (scaled - centre).square().mean(-1) + within
    return torch.where(variance == 0, 0.0, torch.where(variance.isnan(), torch.nan, distance))


def _root(squares: Tensor, null: float) -> ObservableReading:
    """The root of the mean over directions; its standard error by the slope of the root."""
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
