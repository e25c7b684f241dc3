"""Does a step along the residual stream move a window's tokens apart or together? (claim S12, experiment E3)"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from massieu.foundation.threads import one_thread
from massieu.population import observables
from massieu.probing.model.precision import ONE_POINT_RANK, Cloud, computed_in, is_one_point
from massieu.probing.statistics.group import (
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    RunningRatio,
    SampledWindow,
)
from massieu.probing.statistics.layer_groups import SublayerRatios, sublayer_rows
from massieu.probing.statistics.registry import EXPANSION, SHIM, Register
from massieu.probing.stream.replays import NO_ORDER
from massieu.probing.stream.wiring import Step
from massieu.probing.sums.units import Units

_BEFORE = 0
_AFTER = 1
_CHANGE = 2
FEWEST = 8
"""Tokens of a window; fewer say nothing about a covariance."""
NUMBERS_PER_PIECE = 2**20
"""Numbers in the clouds that are measured at a time; in float64 they still fit a processor's cache."""
_POINTS = "Measured within windows, on at most 64 positions with distinct tokens."
REGISTER = Register[Callable[[Tensor, Tensor], Tensor]](EXPANSION)
"""Functions of a level before and after a step, or of clouds and their spectra."""
_of_points = partial(REGISTER.statistic, paper=SHIM, caveat=_POINTS, scope="layer")
_change = partial(_of_points, signed=True)
_level = partial(_of_points, headline=False)


@_change(
    "Change of the mean pairwise distance",
    formula="log(d_after / d_before), d = mean ‖x_i − x_j‖",
    claim="S12, E3",
    unit="nats",
)
def pairwise_distance_log_ratio(before: Tensor, after: Tensor) -> Tensor:
    """Do the tokens of a window move apart (+) or together (−)?"""
    return torch.log(after / before)


@_change(
    "Change of the log-determinant",
    formula="mean over directions of log λ_after − log λ_before, λ the spectrum of the token covariance",
    claim="S12, E3",
    unit="nats per direction",
)
def log_determinant_change(before: Tensor, after: Tensor) -> Tensor:
    """Does the volume that the tokens of a window span grow (+) or shrink (−)?"""
    return after - before


@_change(
    "Change of the effective rank", formula="e^H(λ/Σλ) after − before", claim="E1, N12", unit="directions", smallest=1.0
)
def effective_rank_change(before: Tensor, after: Tensor) -> Tensor:
    """In how many more (+) or fewer (−) directions do the tokens of a window differ after the step?"""
    return after - before


@_level("Mean pairwise distance", formula="mean over pairs of ‖x_i − x_j‖", claim="E3", scale="positive")
def pairwise_distance(cloud: Tensor, spectrum: Tensor) -> Tensor:
    """How spread are the tokens of a window along the depth?"""
    return observables.pairwise_distance(cloud)


@_level(
    "Log-determinant of the token covariance",
    formula="mean over directions of log λ",
    claim="E3",
    unit="nats per direction",
    scale="number",
)
def log_determinant(cloud: Tensor, spectrum: Tensor) -> Tensor:
    """How spread are the tokens of a window along the depth?"""
    return observables.log_determinant(spectrum)


@_level("Effective rank of the token covariance", formula="e^H(λ/Σλ)", claim="E3", unit="directions")
def effective_rank(cloud: Tensor, spectrum: Tensor) -> Tensor:
    """How spread are the tokens of a window along the depth?"""
    return observables.effective_rank(spectrum)


LEVELS = (pairwise_distance, log_determinant, effective_rank)
_RANK = LEVELS.index(effective_rank)
CHANGES = (pairwise_distance_log_ratio, log_determinant_change, effective_rank_change)


@dataclass(frozen=True)
class _CloudStep:
    """A step from one cloud to another.

    Attributes:
        sublayer: its index.
        start, end: numbers of the clouds.
        window: its place among the sampled ones; None where windows come in the order of the text.
    """

    sublayer: int
    start: int
    end: int
    window: int | None


class ExpansionStatistics(SublayerRatios):
    """Running results along the depth: for each sublayer the cloud's levels before and after, and their change.

    During a forward pass only the sampled tokens of each point are copied. They are measured some clouds at a time, so
    that memory grows neither with the depth nor with the batch.
    """

    def __init__(self, units: Units) -> None:
        super().__init__((len(LEVELS), 3), units)
        self._steps: list[_CloudStep] = []
        # Clouds are numbered in the order in which they are copied: first the measured ones, then those that wait.
        self._levels: list[Float64[Tensor, " levels"]] = []
        self._waiting: list[Cloud] = []
        self._waiting_numbers = 0
        self._latest: dict[int, tuple[Tensor, int]] = {}  # for each row: the point last reached, and its cloud

    def collect(self, step: Step, row: int, positions: Int[Tensor, " S"], number: int | None = None) -> None:
        """Take the sampled tokens of one window (item ``row`` of the batch) before and after one step.

        Args:
            number: where the window stands among the sampled ones; see `Ratio.update`.
        """
        if len(positions) < FEWEST:
            return
        latest = self._latest.get(row)
        if latest is not None and latest[0] is step.before:  # most steps begin where the one before them ended
            start = latest[1]
        else:
            start = self._copy(step.before, row, positions)
        end = self._copy(step.after, row, positions)
        self._latest[row] = (step.after, end)
        self._steps.append(_CloudStep(step.sublayer.index, start, end, number))

    def _copy(self, points: Float[Tensor, "B L D"], row: int, positions: Int[Tensor, " S"]) -> int:
        """Copy the cloud of some tokens; returns its number."""
        cloud = points[row].index_select(0, positions).cpu()
        if self._waiting_numbers + cloud.numel() > NUMBERS_PER_PIECE:
            self._measure()
        self._waiting.append(Cloud(cloud, computed_in(points)))
        self._waiting_numbers += cloud.numel()
        return len(self._levels) + len(self._waiting) - 1

    def _measure(self) -> None:
        """Measure the clouds that wait, those of one shape together, and drop them."""
        levels = torch.zeros(len(self._waiting), len(LEVELS), dtype=torch.float64)
        shapes: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        for index, cloud in enumerate(self._waiting):
            shapes.setdefault((cloud.dtype, cloud.points.shape), []).append(index)
        with one_thread():
            for (dtype, _), places in shapes.items():
                clouds = torch.stack([self._waiting[index].points for index in places]).double()
                spectrum = observables.covariance_spectrum(clouds)
                values = torch.stack([level(clouds, spectrum) for level in LEVELS], -1)
                values[is_one_point(clouds, dtype), _RANK] = ONE_POINT_RANK
                levels[places] = values
        self._levels += levels.unbind()
        self._waiting.clear()
        self._waiting_numbers = 0

    def finish(self) -> None:
        """Add what the forward pass collected to the running results, and drop it."""
        self._measure()
        for step in self._steps:
            before = self._levels[step.start]
            after = self._levels[step.end]
            change = torch.stack([measure(*levels) for measure, *levels in zip(CHANGES, before, after, strict=True)])
            values = torch.stack([before, after, change], dim=-1)[
                None
            ]  # (1, levels, `_BEFORE`, `_AFTER` and `_CHANGE`)
            finite = values.isfinite()
            ratio = self.sublayers.setdefault(step.sublayer, self._new_ratio())
            numbers = None if step.window is None else [step.window]
            ratio.update(torch.where(finite, values, 0.0), finite.double(), numbers)
        self._steps.clear()
        self._levels.clear()
        self._latest.clear()


class ExpansionGroup(Group):
    """How far apart the tokens of a sampled window are, before and after each step of the stream."""

    name = EXPANSION
    events = frozenset({Event.STEPS})

    def begin(self, model: ModelReading) -> None:
        """Running results."""
        super().begin(model)
        self.clouds = ExpansionStatistics(model.sampled_units)
        if any(info.tokens_first is None for info in model.sites):
            self.failed[EXPANSION] = NO_ORDER

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Take the clouds before and after."""
        self.clouds.collect(step, window.row, window.cloud(step), window.number)

    def after_pass(self) -> None:
        """Measure the clouds of the pass."""
        self.clouds.finish()

    def ratios(self) -> Iterator[RunningRatio]:
        """The changes."""
        for sublayer in self.model.sublayers:
            ratio = self.clouds.sublayers.get(sublayer.index)
            if ratio is None:
                continue
            for index, change in enumerate(CHANGES):
                yield RunningRatio(
                    RowPlace.of_sublayer(sublayer), change.__name__, ratio, (index, slice(_CHANGE, _CHANGE + 1))
                )

    def rows(self) -> Iterator[Row]:
        """Each level before and after, and its change with the halves of the text; of a draw the changes alone."""
        for sublayer in self.model.sublayers:
            if sublayer.index not in self.clouds.sublayers:
                continue
            place = RowPlace.of_sublayer(sublayer)
            parts = RatioParts(self.clouds.sublayers[sublayer.index])
            for index, (level, change) in enumerate(zip(LEVELS, CHANGES, strict=True)):
                if self.model.is_draw:
                    yield from _whole_text(place, change.__name__, parts, (index, _CHANGE))
                    continue
                for part, column in (("before", _BEFORE), ("after", _AFTER)):
                    for row in _whole_text(place, level.__name__, parts, (index, column)):
                        yield replace(row, part=part)
                yield from sublayer_rows(place, change.__name__, parts, (index, _CHANGE))


def _whole_text(place: RowPlace, name: str, parts: RatioParts, index: tuple[int, int]) -> Iterator[Row]:
    """The row of one entry from the whole text, where it was counted; the halves are not computed."""
    return islice(sublayer_rows(place, name, parts, index), 1)
