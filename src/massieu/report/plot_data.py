"""The numbers of a figure, whichever library draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from massieu.report import colours
from massieu.report.figures import bin_in_words
from massieu.report.tables import Column

DEPTH = {
    "pairwise_distance": "pairwise_distance_log_ratio",
    "log_determinant": "log_determinant_change",
    "effective_rank": "effective_rank_change",
}
"""Quantities that are measured before and after each sublayer, and the statistic of their change."""


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One statistic of every head.

    Attributes:
        labels: of the layers.
        signed: whether 0 is in the middle of the scale.
    """

    values: Float[np.ndarray, "layers heads"]
    errors: Float[np.ndarray, "layers heads"]
    labels: list[str]
    title: str
    unit: str
    signed: bool

    @property
    def shades(self) -> list[str]:
        """The colours, from the smallest number to the largest."""
        return colours.DIVERGING["light"] if self.signed else colours.SEQUENTIAL

    @property
    def reach(self) -> float | None:
        """The number that has the last colour, where 0 has the middle one; else None."""
        if not self.signed or not np.isfinite(self.values).any():
            return None
        return float(np.abs(self.values[np.isfinite(self.values)]).max())


@dataclass(frozen=True, eq=False)
class Distribution:
    """A histogram over tokens. The bins at both ends hold all that lies beyond them too."""

    title: str
    unit: str
    edges: list[float]
    counts: Sequence[int]

    @property
    def total(self) -> int:
        """How many tokens there are."""
        return sum(self.counts)

    @property
    def percent(self) -> list[float]:
        """The share of each bin."""
        return [100 * count / self.total for count in self.counts]

    @property
    def middles(self) -> list[float]:
        """The middle of each bin."""
        return [(low + high) / 2 for low, high in zip(self.edges, self.edges[1:], strict=False)]

    @property
    def widths(self) -> list[float]:
        """The width of each bin."""
        return [high - low for low, high in zip(self.edges, self.edges[1:], strict=False)]

    @property
    def hints(self) -> list[str]:
        """What a pointer shows over each bin."""
        return [
            f"{bin_in_words(self.edges, place)}: {percent:.1f} % of tokens"
            for place, percent in enumerate(self.percent)
        ]


@dataclass(frozen=True, eq=False)
class Depth:
    """A quantity before and after each sublayer, its change there, and the change in a re-initialised copy of the model.

    A quantity that was not measured has columns of NaN.
    """

    title: str
    change_title: str
    names: list[str]
    layers: list[int | None]
    kinds: list[str]
    before: Column
    after: Column
    change: Column
    control: Column

    @classmethod
    def create(
        cls, quantity: str, change_title: str, sublayers: list[dict[str, Any]], columns: dict[str, Column]
    ) -> Self:
        """The columns of a quantity, those of the table of layers by name."""
        size = len(sublayers)
        missing = Column(np.full(size, np.nan), np.full(size, np.nan), np.zeros(size, dtype=np.int64))
        change = DEPTH[quantity]
        return cls(
            title=quantity.replace("_", " "),
            change_title=change_title,
            names=[entry["name"] for entry in sublayers],
            layers=[entry["layer"] for entry in sublayers],
            kinds=[entry["kind"] if entry["kind"] in colours.KINDS else "other" for entry in sublayers],
            before=columns.get(f"{quantity}/before", missing),
            after=columns.get(f"{quantity}/after", missing),
            change=columns.get(change, missing),
            control=columns.get(f"{change}/reinitialised", missing),
        )

    def places(self) -> dict[str, list[int]]:
        """The places of the sublayers of each kind."""
        return {
            kind: [place for place, other in enumerate(self.kinds) if other == kind]
            for kind in dict.fromkeys(self.kinds)
        }

    def ticks(self, most: int = 16) -> dict[int, str]:
        """The places where a layer begins, with its number; at most so many. What stands behind all layers has none."""
        starts = [
            place
            for place, layer in enumerate(self.layers)
            if layer is not None and (place == 0 or layer != self.layers[place - 1])
        ]
        step = -(-len(starts) // most) or 1
        return {place: str(self.layers[place]) for place in starts[::step]}

    def segments(self, places: Sequence[int]) -> tuple[list[float], list[float]]:
        """The line from before to after each sublayer, as one path that NaN interrupts."""
        horizontal: list[float] = []
        vertical: list[float] = []
        for place in places:
            horizontal += [place - 0.5, place + 0.5, np.nan]
            vertical += [float(self.before.value[place]), float(self.after.value[place]), np.nan]
        return horizontal, vertical

    def hint(self, place: int) -> list[str]:
        """Lines of what a pointer shows over a sublayer."""
        lines = [self.names[place]]
        if np.isfinite(self.after.value[place]):
            lines.append(f"{self.before.text(place)} → {self.after.text(place)}")
        if np.isfinite(self.change.value[place]):
            lines.append(f"change: {self.change.text(place)}, n = {self.change.count[place]:,}")
        if np.isfinite(self.control.value[place]):
            lines.append(f"re-initialised: {self.control.text(place)}")
        return lines


def tint_of(kind: str) -> dict[str, str]:
    """Colour and marker of a kind of sublayer."""
    return colours.KINDS.get(kind, colours.OTHER_KIND)
