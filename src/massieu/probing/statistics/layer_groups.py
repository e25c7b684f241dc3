"""What the groups about layers have in common: their rows of the layers' table, each beside a control of its own."""

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
    """Running ratios over windows at every sublayer; how they are stored, gone on from, and merged."""

    def __init__(self, shape: tuple[int, ...], units: Units) -> None:
        self.shape, self.units = shape, units
        self.sublayers: dict[int, Ratio] = {}

    def _begun(self) -> Ratio:
        return Ratio(self.shape, self.units)

    def state(self) -> State:
        """The sums of every sublayer."""
        return {str(sublayer): ratio.state() for sublayer, ratio in self.sublayers.items()}

    def restore(self, state: State) -> None:
        """Go on from such sums in place of one's own."""
        self.sublayers = {int(sublayer): self._begun() for sublayer in state}
        for sublayer, ratio in self.sublayers.items():
            ratio.restore(state[str(sublayer)])

    def merge(self, other: Self) -> None:
        """Add what ``other`` has measured on other windows."""
        for sublayer, ratio in other.sublayers.items():
            self.sublayers.setdefault(sublayer, self._begun()).merge(ratio)


class SublayerMeans(SublayerRatios):
    """A group's running means over windows, each beside its control, at every sublayer."""

    def __init__(self, statistics: int, units: Units) -> None:
        super().__init__((statistics + 1, 2), units)  # the last one counts windows

    def add(
        self,
        index: int,
        total: Float[Tensor, "statistics 2"],
        count: Float[Tensor, "statistics 2"],
        number: int | None,
    ) -> None:
        """Add a window at one sublayer: totals and what they are divided by, of the model and of the control.

        Args:
            number: the window's place among the sampled ones.
        """
        finite = total.isfinite() & count.isfinite()
        if not bool((finite & (count > 0)).any()):
            return
        sums = torch.ones(2, 1, *self.shape, dtype=torch.float64)
        for row, given in enumerate((total, count)):
            sums[row, 0, :-1] = torch.where(finite, given.double(), 0.0)
        ratio = self.sublayers.setdefault(index, self._begun())
        ratio.update(sums[0], sums[1], None if number is None else [number])


class SublayerGroup(Group):
    """A group whose statistics are of sublayers, with running means over the sampled windows."""

    events = frozenset({Event.STEPS})
    register: ClassVar[Register[Any]]

    def named(self) -> list[Statistic]:
        """Its statistics, in their order."""
        return [STATISTICS[name] for name in self.register.functions]

    def begin(self, model: ModelReading) -> None:
        """Running means."""
        super().begin(model)
        self.means = SublayerMeans(len(self.named()), model.sampled_units)

    def finish(self) -> None:
        """Say why there are no numbers, if there are none."""
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
        """The means beside their controls; the count is of windows."""
        for sublayer in self.model.sublayers:
            if sublayer.index in self.means.sublayers:
                parts = RatioParts(self.means.sublayers[sublayer.index])
                counts = {part: float(getattr(parts, part).count[-1].max()) for part in ("estimate", *HALVES)}
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), parts, self.named(), counts)


def rows_beside_control(
    place: RowPlace, parts: RatioParts, statistics: Sequence[Statistic], counts: Mapping[str, float]
) -> Iterator[Row]:
    """Rows of sums of shape (statistics, 2), own and control; of half the text without the controls.

    Where the control is the re-initialised model, its rows are of another reading.

    Args:
        counts: by part of the text, what the table gives as the number of entries.
    """
    for index, statistic in enumerate(statistics):
        yield from sublayer_rows(place, statistic.name, parts, (index, 0), counts)
        if has_own_control(statistic) and statistic.control is not None:
            beside = {statistic.control: counts["estimate"]}
            yield from sublayer_rows(place, statistic.name, parts, (index, 1), beside)


def sublayer_rows(
    place: RowPlace, name: str, parts: RatioParts, index: tuple[int, ...], counts: Mapping[str, float] | None = None
) -> Iterator[Row]:
    """The rows of one entry that was counted.

    Args:
        counts: by part of the text, or of a control, what the table gives as the number of entries; None: the ratio's own.
    """
    for part in ("estimate", *HALVES) if counts is None else counts:
        of_half = part in HALVES
        found = parts.at(index, part) if of_half else parts.tested(index)  # pyright: ignore[reportArgumentType]
        if found.count > 0:
            count = found.count if counts is None else counts[part]
            numbers = (np.array([float(each)]) for each in (found.value, found.standard_error, count, found.degrees))
            value, error, number, degrees = numbers
            yield Row(place, name, "" if part == "estimate" else part, Estimate(value, error, number, degrees))


def has_own_control(statistic: Statistic) -> bool:
    """Whether a statistic is measured on a control of its own, which is not the re-initialised model."""
    return statistic.control not in (None, "reinitialised")
