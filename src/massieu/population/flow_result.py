"""What a flow recorded: a long table, and the particles in the end. `massieu.report.draw_flow` draws it."""

import math
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import InputError, require_extra

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One number of one layer."""

    layer: int
    """0 is the cloud that the flow began with."""
    observable: str
    index: int | None
    """Of the entry of a vector; None for a number."""
    value: float
    standard_error: float | None
    null: float | None
    """For as many independent Gaussian tokens, where that is known."""


@dataclass(frozen=True, eq=False)
class FlowResult:
    """A flow, layer by layer.

    Attributes:
        rows: The long table, in the order in which it was measured.
        particles: The cloud in the end; of a shared one this process's part.
        lineage: Of each of these particles, the number of the one of layer 0 that it descends from by the draws of resampled
            layers (others keep each token); None where nothing was drawn.
        layers: How many were done.
        complete: False where the flow was interrupted before its last layer.
        settings: What the flow was: depth and processes; tokens, width, dtype and device of the start; hashes of layers and
            observables.
    """

    rows: tuple[FlowRow, ...]
    particles: Float[Tensor, "n d"]
    lineage: Int[Tensor, "n"] | None
    layers: int
    complete: bool
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def observables(self) -> tuple[str, ...]:
        """The names of what was recorded, in the order of their first appearance."""
        return tuple(dict.fromkeys(row.observable for row in self.rows))

    def values(self, observable: str) -> Float[Tensor, "layers *index"]:
        """One observable by layer, float64; NaN where a layer has no value (or fewer entries than others).

        Raises:
            InputError: nothing of that name was recorded.
        """
        return self._column(observable, "value")

    def standard_errors(self, observable: str) -> Float[Tensor, "layers *index"]:
        """Its standard errors, NaN where there is none; raises as `values`."""
        return self._column(observable, "standard_error")

    def nulls(self, observable: str) -> Float[Tensor, "layers *index"]:
        """What it would be for Gaussian tokens, NaN where that is not known; raises as `values`."""
        return self._column(observable, "null")

    @property
    def table(self) -> "polars.DataFrame":
        """The long table: layer, observable, index (null for a number), value, standard_error, null.

        Raises:
            MissingExtraError: polars is not installed.
        """
        polars = require_extra("polars", "probe")
        kinds = (polars.Int32, polars.String, polars.Int32, polars.Float64, polars.Float64, polars.Float64)
        schema = dict(zip((each.name for each in fields(FlowRow)), kinds, strict=True))
        return polars.DataFrame([astuple(row) for row in self.rows], schema=schema, orient="row")

    def _column(self, observable: str, column: str) -> Tensor:
        rows = [row for row in self.rows if row.observable == observable]
        if not rows:
            known = ", ".join(self.observables) or "nothing"
            raise InputError(f"no observable {observable!r} in this flow; it recorded {known}")
        single = all(row.index is None for row in rows)
        width = 1 + max(row.index or 0 for row in rows)
        found = torch.full((self.layers + 1, width), math.nan, dtype=torch.float64)
        for row in rows:
            number = getattr(row, column)
            found[row.layer, row.index or 0] = math.nan if number is None else number
        return found[:, 0] if single else found
