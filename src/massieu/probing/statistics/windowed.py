"""Groups that are measured head by head on the sampled windows, each statistic with a control of its own.

A statistic is a function of a `HeadWindow`, one window of one attention site. It returns for each head a sum and the divisor
of that sum, so that the windows' sums make a mean with a standard error. Its control is the same function of another window,
which lacks the property in question.
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
    """The queries of each head with the keys of another; None where all heads share one key head."""
    key = window.call.key
    if key.shape[1] < 2:
        return None
    return replace(window, call=replace(window.call, key=key.roll(1, dims=1)))


def shuffled_values(window: HeadWindow) -> HeadWindow:
    """Each key with the value of another, drawn at random among those that are not padding."""
    places = window.real.nonzero()[:, 0]
    order = torch.arange(len(window.real), device=places.device)
    order[places] = places[torch.randperm(len(places), generator=window.generator()).to(places.device)]
    return replace(window, call=replace(window.call, value=window.call.value[:, :, order]))


def shuffled_coordinates(window: HeadWindow) -> HeadWindow:
    """Keys whose coordinates along their principal axes are shuffled among the tokens, independently of each other.

    Mean, covariance and each coordinate's law stay; any other dependence between coordinates is gone.
    """
    places = window.real.nonzero()[:, 0]
    keys = window.call.key[0, :, places].double()
    mean = keys.mean(1, keepdim=True)
    # Rows of `left` are tokens, its columns the coordinates along principal axes, of unit length.
    left, sizes, right = torch.linalg.svd(keys - mean, full_matrices=False)
    order = torch.rand(left.shape, generator=window.generator()).argsort(1).to(left.device)
    moved = mean + (left.gather(1, order) * sizes[:, None]) @ right
    key = window.call.key.clone()
    key[0, :, places] = moved.to(key.dtype)
    return replace(window, call=replace(window.call, key=key))


def permuted_heads(window: HeadWindow) -> HeadWindow | None:
    """Each head with its number at another query, permuted head by head; None where there is one head."""
    if window.call.query.shape[1] < 2:
        return None
    return replace(window, permuted=True)


CONTROLS: dict[str, Control] = {
    "mismatched_keys": other_heads_keys,
    "shuffled_values": shuffled_values,
    "shuffled_coordinates": shuffled_coordinates,
    "permuted_heads": permuted_heads,
}
"""By name, which `Statistic.control` holds."""


@dataclass(frozen=True, eq=False)
class WindowFunction:
    """A statistic of a window, and its control, which is the same statistic of another window.

    Attributes:
        control: name of the control, and the function that makes its window. None if there is no control, or if random models
            are the control.
    """

    measure: WindowMeasure
    control: tuple[str, Control] | None = None


def registered(register: Register[WindowMeasure]) -> dict[str, WindowFunction]:
    """The statistics of a group of the package, by their names."""
    functions: dict[str, WindowFunction] = {}
    for name, measure in register.functions.items():
        control = STATISTICS[name].control
        functions[name] = WindowFunction(measure, (control, CONTROLS[control]) if control in CONTROLS else None)
    return functions


class WindowStatistics(RunningParts):
    """Running means of one group at one site, each with its control."""

    def __init__(self, functions: Mapping[str, WindowFunction], heads: int, units: Units) -> None:
        self.functions = functions
        self.ratio = Ratio((2, len(functions), heads), units)

    def update(self, window: HeadWindow, numbers: Sequence[int] | None, fence: Fence = nullcontext) -> None:
        """Add a window.

        Args:
            numbers: its place among the sampled ones.
            fence: a failure inside leaves out the statistic of this name alone.
        """
        total = torch.zeros(1, *self.ratio.shape, dtype=torch.float64)
        count = torch.zeros_like(total)
        control_windows: dict[Control, HeadWindow | None] = {}  # several statistics share a control
        for place, (name, function) in enumerate(self.functions.items()):
            with fence(name):
                total[0, 0, place], count[0, 0, place] = _finite(*function.measure(window))
                if function.control is None:
                    continue
                make_control = function.control[1]
                if make_control not in control_windows:
                    control_windows[make_control] = make_control(window)
                control_window = control_windows[make_control]
                if control_window is not None:
                    total[0, 1, place], count[0, 1, place] = _finite(*function.measure(control_window))
        self.ratio.update(total, count, numbers)


PURPOSE = 100_000
"""Of the random numbers; each site has its own purpose, this number plus its index."""


class HeadWindowGroup(Group):
    """A group that is measured head by head on the sampled windows.

    Attributes:
        register: its statistics.
    """

    events = frozenset({Event.CALLS})
    register: ClassVar[Register[WindowMeasure]]

    def functions(self) -> Mapping[str, WindowFunction]:
        """The functions that are measured, by the statistics' names."""
        return registered(self.register)

    def begin(self, model: ModelReading) -> None:
        """A running result for each site."""
        super().begin(model)
        functions = self.functions()
        self.sites = [WindowStatistics(functions, info.heads, model.sampled_units) for info in model.sites]

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Measure each sampled window by itself."""
        if call.query.shape[0] != tokens.rows:  # the call's sequences are parts of items, such as windows of an image
            return
        info = tokens.info
        for window in tokens.sampled:
            generator = window.drawn(PURPOSE + info.index)
            places = tokens.queries.real[window.row].nonzero()[:, 0]
            order = torch.randperm(len(places), generator=generator)[: self.model.sampled_queries].sort().values
            head_window = HeadWindow(
                call=call.rows(slice(window.row, window.row + 1)),
                real=tokens.keys.real[window.row],
                queries=places[order.to(places.device)],
                seed=generator.initial_seed(),
                itself=info.itself,
            )
            if len(head_window.queries) and bool(head_window.real.any()):
                self.sites[info.index].update(head_window, window.numbers, self.fence)

    def ratios(self) -> Iterator[RunningRatio]:
        """The means."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            for place, name in enumerate(results.functions):
                yield RunningRatio(RowPlace.of_site(info), name, results.ratio, (0, place))

    def rows(self) -> Iterator[Row]:
        """The means, their halves, and those of the controls."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            place = RowPlace.of_site(info)
            parts = RatioParts(results.ratio)
            for index, (name, function) in enumerate(results.functions.items()):
                yield from rows_of(place, name, parts, (0, index))
                if function.control is not None:
                    yield Row(place, name, function.control[0], parts.at((1, index)))


def _finite(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums on the CPU, 0 for heads whose numbers are not finite."""
    finite = total.isfinite() & count.isfinite()
    return torch.where(finite, total, 0.0).double().cpu(), torch.where(finite, count, 0.0).double().cpu()
