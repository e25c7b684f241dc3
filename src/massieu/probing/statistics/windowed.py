"""Groups that are measured head by head on the sampled windows, each statistic beside a control of its own.

A statistic is a function of a `HeadWindow`, one window of one attention site. It gives for each head a sum and what it is to
be divided by, so that the windows' sums make a mean with a standard error. Its control is the same function of another
window, which lacks the property in question.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.statistics.group import (
    CallTokens,
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    RunningRatio,
    rows_of,
)
from massieu.probing.statistics.head_window import Control, HeadWindow, WindowMeasure
from massieu.probing.statistics.query_means import Fence
from massieu.probing.statistics.registry import STATISTICS, Register
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import Units


def other_heads_keys(window: HeadWindow) -> HeadWindow | None:
    """The queries of each head with the keys of the next; None where all heads have the same."""
    key = window.call.key
    return None if key.shape[1] < 2 else replace(window, call=replace(window.call, key=key.roll(1, dims=1)))


def shuffled_values(window: HeadWindow) -> HeadWindow:
    """Each key with the value of another, drawn at random among those that are no padding."""
    places = window.real.nonzero()[:, 0]
    order = torch.arange(len(window.real), device=places.device)
    order[places] = places[torch.randperm(len(places), generator=window.generator()).to(places.device)]
    return replace(window, call=replace(window.call, value=window.call.value[:, :, order]))


def shuffled_coordinates(window: HeadWindow) -> HeadWindow:
    """Keys whose coordinates along their principal axes are shuffled, each by itself, among the tokens.

    Mean and covariance stay, and each coordinate's law; what coordinates have to do with each other beyond that is gone.
    """
    places = window.real.nonzero()[:, 0]
    keys = window.call.key[0, :, places].double()
    mean = keys.mean(1, keepdim=True)
    left, sizes, right = torch.linalg.svd(keys - mean, full_matrices=False)
    order = torch.rand(left.shape, generator=window.generator()).argsort(1).to(left.device)
    moved = mean + (left.gather(1, order) * sizes[:, None]) @ right
    key = window.call.key.clone()
    key[0, :, places] = moved.to(key.dtype)
    return replace(window, call=replace(window.call, key=key))


def permuted_heads(window: HeadWindow) -> HeadWindow | None:
    """Each head with what another query gives it; None where there is one head."""
    return None if window.call.query.shape[1] < 2 else replace(window, permuted=True)


CONTROLS: dict[str, Control] = {
    "mismatched_keys": other_heads_keys,
    "shuffled_values": shuffled_values,
    "shuffled_coordinates": shuffled_coordinates,
    "permuted_heads": permuted_heads,
}
"""By the name that `Statistic.control` has."""


@dataclass(frozen=True, eq=False)
class WindowFunction:
    """A statistic of a window, and its control that is another window.

    Attributes:
        control: the name of the control, and what makes it; None where there is none, or random models are the control.
    """

    measure: WindowMeasure
    control: tuple[str, Control] | None = None


def registered(register: Register[WindowMeasure]) -> dict[str, WindowFunction]:
    """The statistics of a group of the package, by their names."""
    found: dict[str, WindowFunction] = {}
    for name, measure in register.functions.items():
        control = STATISTICS[name].control
        found[name] = WindowFunction(measure, (control, CONTROLS[control]) if control in CONTROLS else None)
    return found


class WindowStatistics(RunningParts):
    """Running means of one group at one site, each with its control."""

    def __init__(self, functions: Mapping[str, WindowFunction], heads: int, units: Units) -> None:
        self.functions = functions
        self.ratio = Ratio((2, len(functions), heads), units)

    def update(self, window: HeadWindow, numbers: Sequence[int] | None, fence: Fence = nullcontext) -> None:
        """Add a window.

        Args:
            numbers: its place among the sampled ones.
            fence: what fails inside costs the statistic of this name alone.
        """
        total = torch.zeros(1, *self.ratio.shape, dtype=torch.float64)
        count = torch.zeros_like(total)
        others: dict[Control, HeadWindow | None] = {}
        for place, (name, function) in enumerate(self.functions.items()):
            with fence(name):
                total[0, 0, place], count[0, 0, place] = _finite(*function.measure(window))
                if function.control is None:
                    continue
                make = function.control[1]
                if make not in others:
                    others[make] = make(window)
                if (other := others[make]) is not None:
                    total[0, 1, place], count[0, 1, place] = _finite(*function.measure(other))
        self.ratio.update(total, count, numbers)


PURPOSE = 100_000
"""Of random numbers; each site has its own, above it."""


class HeadWindowGroup(Group):
    """A group that is measured head by head on the sampled windows.

    Attributes:
        register: its statistics.
    """

    events = frozenset({Event.CALLS})
    register: ClassVar[Register[WindowMeasure]]

    def functions(self) -> Mapping[str, WindowFunction]:
        """What is measured, by the statistics' names."""
        return registered(self.register)

    def begin(self, model: ModelReading) -> None:
        """A running result for each site."""
        super().begin(model)
        functions = self.functions()
        self.sites = [WindowStatistics(functions, info.heads, model.sampled_units) for info in model.sites]

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Measure each sampled window by itself."""
        if call.query.shape[0] != tokens.rows:  # sequences that are no items of the batch
            return
        info = tokens.info
        for window in tokens.sampled:
            drawn = window.drawn(PURPOSE + info.index)
            places = tokens.queries.real[window.row].nonzero()[:, 0]
            order = torch.randperm(len(places), generator=drawn)[: self.model.sampled_queries].sort().values
            asked = places[order.to(places.device)]
            part = call.rows(slice(window.row, window.row + 1))
            seen = HeadWindow(part, tokens.keys.real[window.row], asked, drawn.initial_seed(), info.itself)
            if len(seen.queries) and bool(seen.real.any()):
                self.sites[info.index].update(seen, window.numbers, self.fence)

    def ratios(self) -> Iterator[RunningRatio]:
        """The means."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            for place, name in enumerate(results.functions):
                yield RunningRatio(RowPlace.of_site(info), name, results.ratio, (0, place))

    def rows(self) -> Iterator[Row]:
        """The means, their halves, and those of the controls."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            place, parts = RowPlace.of_site(info), RatioParts(results.ratio)
            for index, (name, function) in enumerate(results.functions.items()):
                yield from rows_of(place, name, parts, (0, index))
                if function.control is not None:
                    yield Row(place, name, function.control[0], parts.at((1, index)))


def _finite(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Without the heads whose numbers are not finite."""
    kept = total.isfinite() & count.isfinite()
    return (torch.where(kept, part, 0.0).double().cpu() for part in (total, count))  # pyright: ignore[reportReturnType]
