"""The result of a flow: a long table, and the particles at the end. `massieu.report.draw_flow` draws it."""

import math
from dataclasses import astuple, dataclass, field, fields
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import InputError, require_extra
from massieu.foundation.pandas_tables import pandas_table
from massieu.foundation.short_repr import html_table

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One number of one layer."""

    layer: int
    """0: the cloud that the flow began with."""
    observable: str
    index: int | None
    """Index of the entry of a vector; None for a number."""
    value: float
    standard_error: float | None
    null: float | None
    """The value for as many independent Gaussian tokens; None if that is not known."""


@dataclass(frozen=True, eq=False)
class FlowResult:
    """The observables of a flow, layer by layer.

    Attributes:
        rows: The long table, in the order in which it was measured.
        particles: The cloud at the end; of a shared cloud the tokens of this process.
        lineage: For each of these particles the number of the particle of layer 0 that it descends from, by the draws of
            resampled layers (other layers keep each token); None if nothing was drawn.
        layers: How many layers were applied.
        complete: False if the flow was interrupted before its last layer.
        settings: Depth and number of processes; tokens, width, dtype and device of the first cloud; hashes of layers and
            observables.
    """

    rows: tuple[FlowRow, ...]
    particles: Float[Tensor, "n d"]
    lineage: Int[Tensor, "n"] | None
    layers: int
    complete: bool
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        state = f"{self.layers} layers" if self.complete else f"{self.layers} layers (interrupted: incomplete)"
        tokens = " × ".join(map(str, self.particles.shape))
        return f"FlowResult: {state}, {tokens} numbers at the end; observables {', '.join(self.observables) or 'none'}"

    def _repr_html_(self) -> str:
        by_place = {(row.observable, row.index, row.layer): row.value for row in self.rows}
        numbers = [name for name in self.observables if (name, None, self.layers) in by_place]
        layers = sorted({0, self.layers})
        rows = [[name, *(_four_digits(by_place.get((name, None, layer))) for layer in layers)] for name in numbers]
        table = html_table(["observable", *(f"layer {layer}" for layer in layers)], rows)
        return f"<pre>{escape(repr(self))}</pre>{table}"

    @property
    def observables(self) -> tuple[str, ...]:
        """The names of the observables, in the order of their first appearance."""
        return tuple(dict.fromkeys(row.observable for row in self.rows))

    def values(self, observable: str) -> Float[Tensor, "layers *index"]:
        """One observable by layer, float64; NaN for layers without a value, and for entries that a layer lacks.

        Raises:
            InputError: nothing of that name was recorded.
        """
        return self._column(observable, "value")

    def standard_errors(self, observable: str) -> Float[Tensor, "layers *index"]:
        """The standard errors of an observable, NaN where there is none; raises as `values`."""
        return self._column(observable, "standard_error")

    def nulls(self, observable: str) -> Float[Tensor, "layers *index"]:
        """The values of an observable for Gaussian tokens, NaN where they are not known; raises as `values`."""
        return self._column(observable, "null")

    @property
    def table(self) -> "polars.DataFrame":
        """The long table: layer, observable, index (null for a number), value, standard_error, null.

        Raises:
            MissingExtraError: polars is not installed.
        """
        polars = require_extra("polars", "probe")
        types = (polars.Int32, polars.String, polars.Int32, polars.Float64, polars.Float64, polars.Float64)
        schema = dict(zip((column.name for column in fields(FlowRow)), types, strict=True))
        return polars.DataFrame([astuple(row) for row in self.rows], schema=schema, orient="row")

    def to_pandas(self) -> Any:
        """The long table as a ``pandas.DataFrame``, without pyarrow.

        Raises:
            MissingExtraError: polars or pandas is not installed.
        """
        return pandas_table(self.table)

    def _column(self, observable: str, column: str) -> Tensor:
        rows = [row for row in self.rows if row.observable == observable]
        if not rows:
            recorded = ", ".join(self.observables) or "nothing"
            raise InputError(f"no observable {observable!r} in this flow; it recorded {recorded}")
        is_number = all(row.index is None for row in rows)
        width = 1 + max(row.index or 0 for row in rows)
        values = torch.full((self.layers + 1, width), math.nan, dtype=torch.float64)
        for row in rows:
            number = getattr(row, column)
            values[row.layer, row.index or 0] = math.nan if number is None else number
        return values[:, 0] if is_number else values


def _four_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
