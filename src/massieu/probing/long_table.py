"""The two long tables of a result: built row by row, read back from what was stored."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Real

from massieu.errors import InputError, require_extra

if TYPE_CHECKING:
    import polars

COLUMNS = ("site", "layer", "head", "statistic", "value", "standard_error", "count")


class TableBuilder:
    """Collects rows of a result's table.

    The table has a row for each statistic of each head (or of each sublayer, with head null): site, layer, head,
    statistic, value, standard error, count. Undefined numbers (NaN) become null.
    """

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []

    def add(
        self,
        site: str,
        layer: int | None,
        head: int | None,
        statistic: str,
        value: float,
        standard_error: float | None,
        count: float,
    ) -> None:
        """Add one row; ``head`` is None in the table of the layers, ``standard_error`` where there is none."""
        error = np.nan if standard_error is None else standard_error
        self._add(site, layer, [head], statistic, np.array([value]), np.array([error]), np.array([count]))

    def add_heads(
        self,
        site: str,
        layer: int,
        statistic: str,
        values: Real[np.ndarray, "heads"],
        standard_errors: Real[np.ndarray, "heads"] | float | None,
        counts: Real[np.ndarray, "heads"] | float,
    ) -> None:
        """Add a row for each head of a site; one error or count stands for all heads.

        Raises:
            ValueError: the lengths differ.
        """
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(f"values must have shape (heads,), got {values.shape}")
        errors = np.broadcast_to(np.nan if standard_errors is None else standard_errors, values.shape)
        self._add(
            site, layer, list(range(len(values))), statistic, values, errors, np.broadcast_to(counts, values.shape)
        )

    def frame(self) -> "polars.DataFrame":
        """The table, rows in the order in which they were added.

        Raises:
            MissingExtraError: polars is not installed.
        """
        columns = {name: [entry for block in self._blocks for entry in block[name]] for name in COLUMNS}
        polars = require_extra("polars", "probe")
        return polars.DataFrame(columns, schema=_schema()).with_columns(
            polars.col("value", "standard_error").fill_nan(None)
        )

    def _add(
        self, site: str, layer: int | None, heads: list[Any], statistic: str, values: Any, errors: Any, counts: Any
    ) -> None:
        size = len(heads)
        self._blocks.append(
            {
                "site": [site] * size,
                "layer": [layer] * size,
                "head": heads,
                "statistic": [statistic] * size,
                "value": np.asarray(values, dtype=np.float64).tolist(),
                "standard_error": np.asarray(errors, dtype=np.float64).tolist(),
                "count": np.rint(counts).astype(np.int64).tolist(),
            }
        )


def _schema() -> dict[str, Any]:
    polars = require_extra("polars", "probe")
    kinds = (polars.String, polars.Int32, polars.Int32, polars.String, polars.Float64, polars.Float64, polars.Int64)
    return dict(zip(COLUMNS, kinds, strict=True))


def read_table(name: str, content: bytes, folder: Path) -> "polars.DataFrame":
    """A stored table; ``name`` and ``folder`` are for the message.

    Raises:
        InputError: it is none.
        MissingExtraError: polars is not installed.
    """
    polars = require_extra("polars", "probe")
    schema = _schema()
    try:
        if name.endswith(".csv"):
            frame = polars.read_csv(content, schema_overrides=schema)
        else:
            frame = polars.read_parquet(content)
        frame = frame.select(COLUMNS).cast(schema)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise InputError(f"{folder / name} is not a table of a result: {str(error).splitlines()[0]}") from error
    if frame["site"].null_count() or frame["statistic"].null_count():
        raise InputError(f"{folder / name} is not a table of a result: a row names no site or no statistic")
    return frame
