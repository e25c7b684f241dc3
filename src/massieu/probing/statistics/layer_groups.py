"""What the groups about layers have in common: their rows of the layers' table, each beside a control of its own."""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.registry import STATISTICS, measures
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import State
from massieu.probing.sums.units import FEWEST_UNITS, Estimate, Units

Row = tuple[str, float, float, float, float]
"""Name, value, standard error, count, and degrees of freedom of the error: 0 where nothing may be announced from it."""


class LayerGroup(Protocol):
    """Running results of a group whose statistics are of sublayers."""

    def rows(self, index: int, part: str) -> Iterator[Row]:
        """The rows of a sublayer, of all (``estimate``) or half the text (``first_half``, ``second_half``)."""
        ...


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

    def __init__(self, group: str, units: Units) -> None:
        super().__init__((len(measures(group)) + 1, 2), units)  # the last one counts windows
        self.group = group

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
        sums = torch.ones(2, 1, len(measures(self.group)) + 1, 2, dtype=torch.float64)
        for row, given in enumerate((total, count)):
            sums[row, 0, :-1] = torch.where(finite, given.double(), 0.0)
        ratio = self.sublayers.setdefault(index, self._begun())
        ratio.update(sums[0], sums[1], None if number is None else [number])

    def rows(self, index: int, part: str) -> Iterator[Row]:
        """As `LayerGroup.rows`; the count is of windows."""
        if index in self.sublayers:
            ratio = self.sublayers[index]
            windows = float(getattr(ratio, part)().count[-1].max())
            yield from rows_beside_control(ratio, list(measures(self.group)), windows, part)


def rows_beside_control(ratio: Ratio, names: Sequence[str], tokens: float, part: str) -> Iterator[Row]:
    """Rows of sums of shape (statistics, 2), own and control; of half the text without the controls.

    Where the control is the re-initialised model, its rows are of another reading.
    """
    found = getattr(ratio, part)()
    for place, name in enumerate(names):
        beside = has_own_control(name) and part == "estimate"
        for which, suffix in enumerate(("", f"/{STATISTICS[name].control}") if beside else ("",)):
            if found.count[place, which] > 0:
                cell = float(found.value[place, which]), float(found.standard_error[place, which])
                yield (name + suffix, *cell, tokens, tested_degrees(ratio, found, (place, which)))


def tested_degrees(ratio: Ratio, found: Estimate, place: tuple[int, ...]) -> float:
    """Degrees of freedom of an error for a test; from too few units of text nothing is announced."""
    return float(np.asarray(found.degrees)[place]) if ratio.error_unit()[1] >= FEWEST_UNITS else 0.0


def has_own_control(name: str) -> bool:
    """Whether a statistic is measured on a control of its own, which is not the re-initialised model."""
    return STATISTICS[name].control not in (None, "reinitialised")
