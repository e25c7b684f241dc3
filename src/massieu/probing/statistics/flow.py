"""How the law of tokens changes through the depth: is a Gaussian its equilibrium? (claims S11–S13, experiment E1)

The tokens of a window after each step of the stream are a cloud of points. Its control is a cloud of as many independent
Gaussian points with the same mean and covariance. Directions are drawn once, and are the same at every step.

One statistic compares two steps: are the layers Euler's method for one flow (Shim §2.3)? Two layers of one kind, with
updates g and f, lead to x + g + f, and one step of double length to x + 2g. They differ by f − g.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.threads import one_thread
from massieu.population import observables
from massieu.population.cloud_shape import projected_cumulants, random_directions, squared_gaussian_distance
from massieu.population.clusters import cluster_count
from massieu.probing.model.precision import ONE_POINT_RANK, computed_in, is_one_point
from massieu.probing.statistics.group import ModelReading, SampledWindow
from massieu.probing.statistics.layer_groups import SublayerGroup
from massieu.probing.statistics.registry import FLOW, SHIM, STATISTICS, Register
from massieu.probing.stream.wiring import Step
from massieu.storage.record import Statistic

PROJECTIONS = 64
"""Random directions."""
FEWEST = 8
"""Tokens of a window; of fewer there are no numbers."""
RADIUS = 0.5
"""Radius of a cluster of unit vectors: an angle of 29°."""
Cloud = Float[Tensor, "n d"]
REGISTER = Register[Callable[[Cloud], Tensor]](FLOW)
_of_cloud = partial(
    REGISTER.statistic,
    paper=SHIM,
    scope="layer",
    control="gaussian",
    caveat="Measured on the distinct tokens of a window; a few tokens of huge norm can decide it. No equilibrium is claimed.",
)


def _directions(cloud: Cloud) -> Float[Tensor, "m d"]:
    return random_directions(cloud.shape[-1], PROJECTIONS, generator=torch.Generator().manual_seed(0))


@_of_cloud(
    "Effective rank of the tokens",
    formula="e^H(λ/Σλ), λ the spectrum of the covariance",
    claim="E1, N12",
    control="reinitialised",
    scale="positive",
)
def stream_effective_rank(cloud: Cloud) -> Tensor:
    """In how many directions do the tokens of a window differ after this step?"""
    return observables.effective_rank(observables.covariance_spectrum(cloud))


@_of_cloud(
    "Third cumulant", formula="mean |k₃ / k₂^{3/2}| over 64 random directions", claim="S13, E1", scale="positive"
)
def stream_third_cumulant(cloud: Cloud) -> Tensor:
    """How skewed are the tokens along random directions (0 for Gaussian tokens)?"""
    return projected_cumulants(cloud, _directions(cloud)).third.abs().mean()


@_of_cloud("Fourth cumulant", formula="mean k₄ / k₂² over 64 random directions", claim="S13, E1", signed=True)
def stream_fourth_cumulant(cloud: Cloud) -> Tensor:
    """Do the tokens have heavier (+) or lighter (−) tails than Gaussian ones along random directions?"""
    return projected_cumulants(cloud, _directions(cloud)).fourth.mean()


@_of_cloud(
    "Distance from a Gaussian",
    formula="sliced W₂ to the Gaussian of equal mean and variance, in standard deviations",
    claim="S13, E1",
    scale="positive",
)
def stream_gaussian_distance(cloud: Cloud) -> Tensor:
    """How far are the tokens from a Gaussian cloud of equal moments, along random directions?"""
    return squared_gaussian_distance(cloud, _directions(cloud)).mean().sqrt()


@_of_cloud("Cosine of two tokens", formula="mean cos(x_i, x_j), i ≠ j", claim="S12, N5, E1", signed=True)
def stream_cosine(cloud: Cloud) -> Tensor:
    """Do the tokens of a window all point in one direction (1), or in unrelated ones (0)?"""
    unit = torch.nn.functional.normalize(cloud, dim=-1)
    number = len(cloud)
    return (unit.sum(0).square().sum() - unit.square().sum()) / (number * (number - 1))


@_of_cloud(
    "Clusters of tokens",
    formula="tokens that no other stands for within 29°, one a cluster",
    claim="N5, E1",
    scale="positive",
)
def stream_clusters(cloud: Cloud) -> Tensor:
    """Into how many groups of similar direction do the tokens of a window fall?"""
    return cluster_count(torch.nn.functional.normalize(cloud, dim=-1), radius=RADIUS, limit=len(cloud)).clusters


UPDATES = Register[Callable[[Cloud, Cloud], tuple[Tensor, Tensor]]](FLOW)
"""Statistics of a step's update and of that of the last step of its kind."""


@UPDATES.statistic(
    "Effect of halving the steps",
    formula="Σ‖f − g‖² / Σ‖f + g‖², f the update of a step, g that of the last step of its kind",
    claim="S20, E1",
    paper=SHIM,
    scope="layer",
    caveat="Measured on the distinct tokens of a window; a few tokens of huge norm can decide it. A small number does not say "
    "that the model needs so many layers.",
    scale="positive",
)
def stream_step_halving(update: Cloud, last_update: Cloud) -> tuple[Tensor, Tensor]:
    """Do two layers lead to where one step of double length leads (0: one flow), or are their updates unrelated (1)?"""
    return (update - last_update).square().sum(), (update + last_update).square().sum()


@dataclass(frozen=True, eq=False)
class _Update:
    """What a step has added to some tokens of a window."""

    index: int
    """Of the sublayer."""
    positions: Int[Tensor, " n"]
    update: Cloud

    def follows(self, last: "_Update") -> bool:
        """Whether the last update is of the same tokens, earlier in the same pass."""
        same_tokens = last.positions.equal(self.positions) and last.update.shape == self.update.shape
        return last.index < self.index and same_tokens


def gaussian(cloud: Cloud, generator: torch.Generator) -> Cloud:
    """As many independent Gaussian points with the cloud's mean and (biased) covariance."""
    mean = cloud.mean(0)
    # Σ_j g_ij (x_j − x̄)/√n has the covariance Σ_j (x_j − x̄)(x_j − x̄)ᵀ/n: no d × d factor is needed.
    normal = torch.randn(len(cloud), len(cloud), generator=generator, dtype=cloud.dtype)
    return mean + normal @ (cloud - mean) / len(cloud) ** 0.5


PURPOSE = 200_000
"""Of the random numbers; each sublayer has its own purpose, this number plus its index."""


class FlowGroup(SublayerGroup):
    """The law of the tokens of a sampled window after each step of the stream."""

    name = FLOW
    register = REGISTER

    def named(self) -> list[Statistic]:
        """Metadata of its statistics, in their order: those of clouds, then those of updates."""
        return [STATISTICS[name] for name in (*REGISTER.functions, *UPDATES.functions)]

    def begin(self, model: ModelReading) -> None:
        """Begin as other groups, without an update."""
        super().begin(model)
        self._last_updates: dict[tuple[int, str, bool], _Update] = {}

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Measure the cloud after one step, and a Gaussian one."""
        positions = window.cloud(step)
        generator = window.drawn(PURPOSE + step.sublayer.index)
        if len(positions) < FEWEST:
            return
        before, cloud = (stream[window.row, positions].detach().cpu().double() for stream in (step.before, step.after))
        functions = REGISTER.functions
        totals, counts = torch.full((2, len(self.named()), 2), torch.nan, dtype=torch.float64)
        if bool(cloud.isfinite().all()):
            clouds = (cloud, gaussian(cloud, generator))
            counts[: len(functions)] = 1
            with one_thread():
                for place, (name, measure) in enumerate(functions.items()):
                    with self.fence(name):
                        totals[place] = torch.stack([measure(points) for points in clouds])
            # Tokens that differ by rounding alone are one point, whose spectrum is noise.
            if bool(is_one_point(cloud, computed_in(step.after))):
                totals[list(functions).index(stream_effective_rank.__name__)] = ONE_POINT_RANK
        update = _Update(step.sublayer.index, positions.cpu(), cloud - before)
        key = (window.row, step.sublayer.kind, step.in_decoder)
        last = self._last_updates.get(key)
        self._last_updates[key] = update
        if last is not None and update.follows(last):
            for place, (name, compare) in enumerate(UPDATES.functions.items(), len(functions)):
                with self.fence(name):
                    totals[place, 0], counts[place, 0] = compare(update.update, last.update)
        self.means.add(step.sublayer.index, totals, counts, window.number)
