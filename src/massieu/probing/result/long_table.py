"""The two long tables of a result: built row by row, read back from what was stored."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, Real

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
        self._blocks: list[_Block] = []

    def add(
        self,
        site: str,
        layer: int | None,
        statistic: str,
        value: Real[np.ndarray, "heads"] | float,
        standard_error: Real[np.ndarray, "heads"] | float | None,
        count: Real[np.ndarray, "heads"] | float,
    ) -> None:
        """Add a row for each head of a site; for a single number, one row without a head.

        Args:
            value: of each head, or a single number.
            standard_error: of each head, or one for all; None where there is none.
            count: of each head, or one for all.

        Raises:
            ValueError: the lengths differ.
        """
        values = np.asarray(value, dtype=np.float64)
        if values.ndim > 1:
            raise ValueError(f"values must have shape (heads,), got {values.shape}")
        rows = values.size
        self._blocks.append(
            _Block(
                site,
                layer,
                statistic,
                has_heads=values.ndim == 1,
                values=values.reshape(-1),
                errors=_of_each(np.nan if standard_error is None else standard_error, rows),
                counts=_of_each(np.rint(count).astype(np.int64), rows),
            )
        )

    def frame(self) -> "polars.DataFrame":
        """The table, rows in the order in which they were added.

        Raises:
            MissingExtraError: polars is not installed.
        """
        polars = require_extra("polars", "probe")
        if not self._blocks:
            return polars.DataFrame(schema=schema())
        # Which block each row belongs to. Names are written once a block: heads times statistics may be a million rows.
        block = np.repeat(np.arange(len(self._blocks)), [len(each.values) for each in self._blocks])
        columns = {
            "site": polars.Series([each.site for each in self._blocks]).gather(block),
            "layer": polars.Series([each.layer for each in self._blocks], dtype=polars.Int32).gather(block),
            "head": np.concatenate([each.heads() for each in self._blocks]),
            "statistic": polars.Series([each.statistic for each in self._blocks]).gather(block),
            "value": np.concatenate([each.values for each in self._blocks]),
            "standard_error": np.concatenate([each.errors for each in self._blocks]),
            "count": np.concatenate([each.counts for each in self._blocks]),
        }
        table = polars.DataFrame(columns, schema_overrides=schema())
        is_a_head = polars.col("head") >= 0
        return table.with_columns(
            polars.when(is_a_head).then(polars.col("head")),
            polars.col("value", "standard_error").fill_nan(None),
        )


def _of_each(numbers: Real[np.ndarray, "#rows"] | float, rows: int) -> Real[np.ndarray, " rows"]:
    """A number for each row of a block; one that holds for all is repeated."""
    # Mostly they are there already, and a table has thousands of blocks.
    if isinstance(numbers, np.ndarray) and numbers.shape == (rows,):
        return numbers
    return np.broadcast_to(numbers, (rows,))


@dataclass(frozen=True, eq=False)
class _Block:
    """The rows of one statistic at one site: one for each head, or a single one without a head."""

    site: str
    layer: int | None
    statistic: str
    has_heads: bool
    values: Float64[np.ndarray, " rows"]
    errors: Float64[np.ndarray, " rows"]
    counts: Int64[np.ndarray, " rows"]

    def heads(self) -> Int64[np.ndarray, " rows"]:
        """The number of each row's head, −1 where there is none."""
        return np.arange(len(self.values)) if self.has_heads else np.array([-1])


def schema() -> dict[str, Any]:
    """The types of a table's columns."""
    polars = require_extra("polars", "probe")
    kinds = (polars.String, polars.Int32, polars.Int32, polars.String, polars.Float64, polars.Float64, polars.Int64)
    return dict(zip(COLUMNS, kinds, strict=True))


def read_table(name: str, content: bytes, folder: Path) -> "polars.DataFrame":
    """A stored table; ``name`` and ``folder`` are for the message.

    Raises:
        InputError: the content is not a table of a result.
        MissingExtraError: polars is not installed.
    """
    polars = require_extra("polars", "probe")
    types = schema()
    try:
        if name.endswith(".csv"):
            frame = polars.read_csv(content, schema_overrides=types)
        else:
            frame = polars.read_parquet(content)
        frame = frame.select(COLUMNS).cast(types)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise InputError(f"{folder / name} is not a table of a result: {str(error).splitlines()[0]}") from error
    if frame["site"].null_count() or frame["statistic"].null_count():
        raise InputError(f"{folder / name} is not a table of a result: a row names no site or no statistic")
    return frame
