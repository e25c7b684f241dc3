"""Observables as a flow records them: several numbers of one pass over the tokens, under their names."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.population.cloud_shape import (
    gaussian_cumulant_spread,
    gaussian_distance_null,
    projected_cumulants,
    random_directions,
    squared_gaussian_distance,
)
from massieu.population.clusters import cluster_count
from massieu.population.observables import covariance_spectrum, effective_rank, log_determinant
from massieu.population.reading import ObservableReading, Processes, check_single_cloud, counts, shared, summed
from massieu.population.self_attention import self_attention_levels

_CHANCE = 0.05
_LEAST_FOR_CUMULANTS = 4


@dataclass(frozen=True)
class CloudMoments:
    """Where the tokens are and how they spread; linear in tokens.

    Records `mean` (of each coordinate), `length` (root mean square of ‖x‖), `length_of_mean` (‖x̄‖), `covariance_spectrum`,
    `log_determinant` (nats per direction) and `effective_rank`.
    """

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        processes = shared("CloudMoments", points, group, partial(check_single_cloud, points))
        sums = torch.cat([points.double().square().sum().reshape(1), points.double().sum(0)])
        means = summed(sums, processes) / sum(counts(points, processes))
        spectrum = covariance_spectrum(points, group=group)
        return {
            "mean": ObservableReading(means[1:]),
            "length": ObservableReading(means[0].sqrt()),
            "length_of_mean": ObservableReading(means[1:].norm()),
            "covariance_spectrum": ObservableReading(spectrum),
            "log_determinant": ObservableReading(log_determinant(spectrum)),
            "effective_rank": ObservableReading(effective_rank(spectrum)),
        }


@dataclass(frozen=True)
class CloudShape:
    """How far the tokens are from a Gaussian, along the same random directions in every layer.

    Records of the standardised cumulants their root mean square over the directions (`third_cumulant`, `fourth_cumulant`) and
    the largest size (`third_cumulant_largest`, `fourth_cumulant_largest`), and `gaussian_distance`, the sliced W₂ to the
    Gaussian of the same two moments in units of the standard deviation along each direction.

    Standard errors are those over directions, for the tokens as they are. Nulls are for as many independent Gaussian tokens:
    the exact root of the expected mean square, for the distance by simulation; of the largest what it stays below in 95 % of
    such clouds at the least (each direction's cumulant taken as normal).

    Attributes:
        projections: How many directions.
        seed: Of the directions.
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
        if count < _LEAST_FOR_CUMULANTS:
            raise ValueError(f"CloudShape needs a cloud of at least {_LEAST_FOR_CUMULANTS} tokens, got {count}")
        generator = torch.Generator().manual_seed(self.seed)
        directions = random_directions(points.shape[-1], self.projections, generator=generator).to(points.device)
        found: dict[str, ObservableReading] = {}
        cumulants = projected_cumulants(points, directions, group=group)
        reach = -_quantile(_CHANCE / (2 * self.projections))
        spreads = gaussian_cumulant_spread(count)
        for name, each, spread in zip(("third_cumulant", "fourth_cumulant"), cumulants, spreads, strict=True):
            found[name] = _root(each.square(), spread)
            found[f"{name}_largest"] = ObservableReading(each.abs().amax(), null=_number(reach * spread))
        distance = squared_gaussian_distance(points, directions, group=group)
        found["gaussian_distance"] = _root(distance, math.sqrt(gaussian_distance_null(count)[0]))
        return found


@dataclass(frozen=True)
class Clusters:
    """`cluster_count` as an observable: `clusters` and `largest_cluster` (its share of the tokens)."""

    radius: float | None = None
    limit: int = 128

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        found = cluster_count(points, radius=self.radius, limit=self.limit, group=group)
        return {
            "clusters": ObservableReading(found.clusters.double()),
            "largest_cluster": ObservableReading(found.largest),
        }


@dataclass(frozen=True)
class SelfAttention:
    """`self_attention_levels` as an observable; a pass of attention, n² in time."""

    scale: float = 1.0

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        found = self_attention_levels(points, scale=self.scale, group=group)
        return {
            "log_partition": ObservableReading(found.log_partition),
            "selective_log_partition": ObservableReading(found.selective_log_partition),
            "attention_entropy": ObservableReading(found.entropy),
            "log_interaction_energy": ObservableReading(found.log_interaction_energy),
        }


def _root(squares: Tensor, null: float) -> ObservableReading:
    """The root of the mean over directions; its standard error by the slope of the root."""
    value = squares.mean().sqrt()
    if len(squares) == 1:
        return ObservableReading(value, null=_number(null))
    error = squares.std() / len(squares) ** 0.5 / (2 * torch.where(value == 0, 1.0, value))
    return ObservableReading(value, error, _number(null))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _quantile(probability: float) -> float:
    return torch.special.ndtri(_number(probability)).item()
