"""Shared by the groups about layers: running ratios by sublayer, and rows of the layers' table with their controls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.group import HALVES, Event, Group, ModelReading, RatioParts, Row, RowPlace, RunningRatio
from massieu.probing.statistics.registry import STATISTICS, Register
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Estimate, Units
from massieu.storage.record import Statistic


class SublayerRatios:
    """Running ratios over windows at every sublayer; how they are stored, restored and merged.

    Attributes:
        sublayers: by the sublayer's index; those without a window are absent.
    """

    def __init__(self, shape: tuple[int, ...], units: Units) -> None:
        self.shape = shape
        self.units = units
        self.sublayers: dict[int, Ratio] = {}

    def _new_ratio(self) -> Ratio:
        return Ratio(self.shape, self.units)

    def state(self) -> State:
        """The sums of every sublayer."""
        return {str(sublayer): ratio.state() for sublayer, ratio in self.sublayers.items()}

    def restore(self, state: State) -> None:
        """Continue from stored sums, which replace those held here."""
        self.sublayers = {int(sublayer): self._new_ratio() for sublayer in state}
        for sublayer, ratio in self.sublayers.items():
            ratio.restore(state[str(sublayer)])

    def merge(self, other: Self) -> None:
        """Add what ``other`` has measured on other windows."""
        for sublayer, ratio in other.sublayers.items():
            self.sublayers.setdefault(sublayer, self._new_ratio()).merge(ratio)


class SublayerMeans(SublayerRatios):
    """A group's running means over windows, each with its control, at every sublayer."""

    def __init__(self, statistics: int, units: Units) -> None:
        super().__init__((statistics + 1, 2), units)  # the last one counts windows

    def add(
        self,
        index: int,
        total: Float[Tensor, "statistics 2"],
        count: Float[Tensor, "statistics 2"],
        number: int | None,
    ) -> None:
        """Add a window at one sublayer: totals and their divisors, of the model and of the control.

        Args:
            number: the window's place among the sampled ones.
        """
        finite = total.isfinite() & count.isfinite()
        if not bool((finite & (count > 0)).any()):
            return
        totals, counts = torch.ones(2, 1, *self.shape, dtype=torch.float64)  # the last row stays 1: it counts windows
        totals[0, :-1] = torch.where(finite, total.double(), 0.0)
        counts[0, :-1] = torch.where(finite, count.double(), 0.0)
        ratio = self.sublayers.setdefault(index, self._new_ratio())
        ratio.update(totals, counts, None if number is None else [number])


class SublayerGroup(Group):
    """A group whose statistics are of sublayers, with running means over the sampled windows."""

    events = frozenset({Event.STEPS})
    register: ClassVar[Register[Any]]

    def named(self) -> list[Statistic]:
        """Metadata of its statistics, in their order."""
        return [STATISTICS[name] for name in self.register.functions]

    def begin(self, model: ModelReading) -> None:
        """Running means of no window yet."""
        super().begin(model)
        self.means = SublayerMeans(len(self.named()), model.sampled_units)

    def finish(self) -> None:
        """If there are no numbers, record why."""
        if not self.means.sublayers:
            self.failed.setdefault(self.name, self.why_no_numbers())

    def why_no_numbers(self) -> str:
        """Why no sublayer has numbers."""
        return "no window had tokens enough"

    def ratios(self) -> Iterator[RunningRatio]:
        """The means."""
        for sublayer in self.model.sublayers:
            if sublayer.index in self.means.sublayers:
                for place, statistic in enumerate(self.named()):
                    ratio = self.means.sublayers[sublayer.index]
                    yield RunningRatio(RowPlace.of_sublayer(sublayer), statistic.name, ratio, (place, slice(0, 1)))

    def rows(self) -> Iterator[Row]:
        """The means with their controls; the count is of windows."""
        for sublayer in self.model.sublayers:
            if sublayer.index in self.means.sublayers:
                parts = RatioParts(self.means.sublayers[sublayer.index])
                counts = {part: float(getattr(parts, part).count[-1].max()) for part in ("estimate", *HALVES)}
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), parts, self.named(), counts)


def rows_beside_control(
    place: RowPlace, parts: RatioParts, statistics: Sequence[Statistic], counts: Mapping[str, float]
) -> Iterator[Row]:
    """Rows of sums of shape (statistics, 2), of the model and of the control; halves of the text are without the control.

    Where the control is the re-initialised model, its rows come from another reading.

    Args:
        counts: by part of the text, the number of entries that the table reports.
    """
    for index, statistic in enumerate(statistics):
        yield from sublayer_rows(place, statistic.name, parts, (index, 0), counts)
        if has_own_control(statistic) and statistic.control is not None:
            control_counts = {statistic.control: counts["estimate"]}
            yield from sublayer_rows(place, statistic.name, parts, (index, 1), control_counts)


def sublayer_rows(
    place: RowPlace, name: str, parts: RatioParts, index: tuple[int, ...], counts: Mapping[str, float] | None = None
) -> Iterator[Row]:
    """The rows of one entry, where it was counted.

    Args:
        counts: by part of the text, or for a control by its name, the number of entries that the table reports; None for
            the ratio's own.
    """
    for part in ("estimate", *HALVES) if counts is None else counts:
        if part in HALVES:
            estimate = parts.at(index, part)  # pyright: ignore[reportArgumentType]
        else:
            estimate = parts.tested(index)
        if estimate.count > 0:
            count = estimate.count if counts is None else counts[part]
            # The layers' table has rows of one entry, where the heads' have one for each head.
            one_entry = Estimate(
                np.array([float(estimate.value)]),
                np.array([float(estimate.standard_error)]),
                np.array([float(count)]),
                np.array([float(estimate.degrees)]),
            )
            yield Row(place, name, "" if part == "estimate" else part, one_entry)


def has_own_control(statistic: Statistic) -> bool:
    """Whether a statistic is measured on a control of its own, which is not the re-initialised model."""
    return statistic.control not in (None, "reinitialised")
