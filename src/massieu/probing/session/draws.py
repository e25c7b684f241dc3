"""The re-initialised control: several draws of a model's weights, each read on one window of the text, and then freed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor, nn

from massieu.probing.model.blueprint import blueprint_of
from massieu.probing.model.drawn import Blueprint
from massieu.probing.model.forward import device_of, dtype_of
from massieu.probing.model.fresh import reinitialised
from massieu.probing.model.offload import execution_device
from massieu.probing.model.seeding import seed_of
from massieu.probing.model.unwrap import is_pretrained
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import KnownWays, Reading, RowNumbers
from massieu.probing.result.tables import values
from massieu.probing.statistics.group import Source
from massieu.probing.statistics.registry import REPLACEMENT
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Units
from massieu.storage.record import Sublayer

DRAWS = 8
"""Re-initialised models that a probe draws, unless it is told otherwise."""
Numbers = dict[str, dict[str, Float64[np.ndarray, " heads"]]]
"""By site (or sublayer) and statistic."""


@dataclass(frozen=True, eq=False)
class ControlWindow:
    """A window that a draw reads: the batch that it is a row of, alone where rows can be told apart.

    Attributes:
        rows: numbers of the batch's windows in the text.
    """

    inputs: dict[str, Any]
    special: tuple[Tensor | None, Tensor | None]
    row: int
    rows: list[int]


@dataclass(eq=False)
class Drawn:
    """What one draw has shown: the numbers of its heads and of its sublayers, and why some are missing."""

    heads: Numbers = field(default_factory=dict)
    layers: Numbers = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    trouble: str | None = None

    def state(self) -> State:
        """All of it; see `massieu.probing.sums.running`."""
        return dict(vars(self))


class Draws:
    """So many re-initialised copies of one model, one at a time in memory.

    Draw d reads sampled window d of the text; of a text with fewer sampled windows, n, window d mod n. What is drawn
    depends on the seed and d alone, and what is read on the window: neither batches nor processes nor the order change it.

    Attributes:
        read: what each draw has shown, by its number.
        missing: why there are none.
        warnings: sentences about them.
        seconds: that they took.
    """

    def __init__(
        self,
        model: nn.Module,
        reading: Reading,
        inputs: Mapping[str, Any],
        source: Source | None,
        matters: Callable[[nn.Module], bool] = lambda _: True,
    ) -> None:
        self.model = model
        self.sites = reading.sites
        self.layout = reading.layout
        self.refused = reading.refused
        self.sublayers: list[Sublayer] = reading.sublayers
        self.options = _options_of(reading.options)
        self.number = reading.options.draws
        self.matters = matters
        self.inputs = inputs
        self.source = source
        self.read: dict[int, Drawn] = {}
        self.windows: list[ControlWindow] = []
        self.missing: str | None = None
        self.warnings: list[str] = []
        self.seconds = 0.0
        self._blueprint: Blueprint | str | None = None
        self._known = KnownWays()

    def wants(self, rank: int) -> bool:
        """Whether the sampled window of this rank is to be kept for them."""
        return rank < self.number and len(self.windows) <= rank

    def keep(self, window: ControlWindow) -> None:
        """Keep the next sampled window."""
        self.windows.append(window)

    def take(self, process: int, processes: int, whole: bool) -> None:
        """Make and read the draws of this process whose windows are there.

        Args:
            whole: the text has no more windows: the draws that are left read those that there are.
        """
        ready = self.number if whole and self.windows else len(self.windows)
        started = time.perf_counter()
        for draw in range(process, ready, processes):
            if draw not in self.read and self.missing is None:
                self._make(draw, self.windows[draw % len(self.windows)])
        self.seconds += time.perf_counter() - started

    def _make(self, draw: int, window: ControlWindow) -> None:
        with self._fresh(seed_of(self.options.seed, draw)) as fresh:
            if fresh is None:
                return
            reading = Reading(
                fresh,
                self.sites,
                self.options,
                self.layout,
                self.refused,
                self.inputs,
                self.source,
                is_draw=True,
                known=self._known,
            )
            special, target = window.special
            places = RowNumbers(range(len(window.rows)), {window.row: 0})
            alone = (lambda _: window.inputs) if self.layout.separable else None
            reading.forward(window.inputs, special, [window.row], window.rows, places, target, alone)
            reading.finish()
            self.read[draw] = self._shown(reading)

    @contextmanager
    def _fresh(self, seed: int) -> Iterator[nn.Module | None]:
        """A model with fresh weights, whose memory is freed on leaving, since the next draw needs it."""
        if self._blueprint is None:
            self._blueprint = blueprint_of(self.model)
            if isinstance(self._blueprint, str) and is_pretrained(self.model):
                self._say(f"the re-initialised control takes the memory of a whole model: {self._blueprint}")
        if isinstance(self._blueprint, Blueprint):
            device = execution_device(self.model) or device_of(self.model)
            blocks = {info.block for info in self.sites}
            fresh, weights = self._blueprint.draw(blocks, seed, device, dtype_of(self.model))
            try:
                yield fresh
            finally:
                weights.forget()
            return
        fresh, remark = reinitialised(self.model, seed, self.matters)
        if remark is not None:
            left_out = "is left out: " if fresh is None else ""
            self._say(f"the re-initialised control {left_out}{remark}")
        if fresh is None:
            self.missing = remark
        try:
            yield fresh
        finally:
            if fresh is not None:
                fresh.to_empty(device="meta")

    def _say(self, sentence: str) -> None:
        self.warnings += [sentence] if sentence not in self.warnings else []

    def _shown(self, reading: Reading) -> Drawn:
        """The numbers of one draw's reading; without those of sublayers where these differ from the model's."""
        drawn = Drawn(failed=dict(reading.failed), trouble=reading.trouble and reading.trouble.sentence)
        left_out = reading.left_out()
        numbers = values(row for row in reading.rows() if row.statistic not in left_out)
        drawn.heads = numbers["head"]
        drawn_steps = [(sublayer.name, sublayer.kind) for sublayer in reading.sublayers]
        model_steps = [(sublayer.name, sublayer.kind) for sublayer in self.sublayers]
        if drawn_steps != model_steps:
            drawn.failed["sublayers"] = "the steps of the stream are others than the model's"
            return drawn
        drawn.layers = numbers["layer"]
        return drawn

    # What they have shown ----------------------------------------------------------------------------------------------

    def of_head(self, site: str, statistic: str) -> Float64[np.ndarray, "draws heads"] | None:
        """The numbers of a site's heads in the draws that have any; None where fewer than two have."""
        return _stacked([drawn.heads.get(site, {}).get(statistic) for _, drawn in sorted(self.read.items())])

    def of_layer(self, sublayer: str, statistic: str) -> Float64[np.ndarray, "draws 1"] | None:
        """The numbers of a sublayer in the draws that have any; None where fewer than two have."""
        return _stacked([drawn.layers.get(sublayer, {}).get(statistic) for _, drawn in sorted(self.read.items())])

    def failed(self) -> dict[str, str]:
        """What some draw could not compute, with the reason."""
        return {name: reason for drawn in self.read.values() for name, reason in drawn.failed.items()}

    def trouble(self) -> str | None:
        """Where the numbers of the first draw that has such trouble are not finite."""
        return next((drawn.trouble for _, drawn in sorted(self.read.items()) if drawn.trouble), None)

    # Running results ---------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """What every draw has shown, by its number."""
        return {str(draw): drawn.state() for draw, drawn in self.read.items()}

    def restore(self, state: State) -> None:
        """Go on from such numbers in place of one's own."""
        self.read = {int(draw): Drawn(**drawn) for draw, drawn in state.items()}

    def add(self, state: State) -> None:
        """Take over the draws of another process."""
        self.read |= {int(draw): Drawn(**drawn) for draw, drawn in state.items()}


def _options_of(options: Options) -> Options:
    """What a draw measures: all that the model does, but for what is about the model's own text or output."""
    groups = options.groups - {REPLACEMENT}
    units = Units(options.units.mode, capacity=2)  # of one window
    return replace(options, groups=groups, units=units, per_token=(), replace=())


def _stacked(numbers: list[Float64[np.ndarray, " heads"] | None]) -> Float64[np.ndarray, "draws heads"] | None:
    """The draws whose numbers are all finite, (draws, heads); None of fewer than two."""
    complete = [draw for draw in numbers if draw is not None and np.isfinite(draw).all()]
    return np.stack(complete) if len(complete) > 1 else None
