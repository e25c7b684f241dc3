"""Tables of pandas from those of polars: names, rows, whole numbers and missing ones."""

import importlib.util
import sys
import types
from datetime import date
from typing import Any

import numpy as np
import polars
import pytest

from massieu.errors import MissingExtraError
from massieu.foundation.pandas_tables import pandas_table

TABLE = polars.DataFrame(
    {
        "layer": polars.Series([0, 1, None], dtype=polars.Int32),
        "count": polars.Series([3, 4, 5], dtype=polars.Int64),
        "site": ["a", None, "c"],
        "value": [0.5, None, float("inf")],
        "complete": [True, False, True],
        "day": [date(2026, 1, 1)] * 3,
    }
)


class ReplacedPandas(types.ModuleType):
    """What `pandas_table` asks of pandas, where that is not installed: columns as pairs of values and type."""

    def Series(self, values: Any, dtype: Any = None) -> tuple[list[Any], Any]:  # noqa: N802 - the name in pandas
        return list(values), dtype

    def DataFrame(self, columns: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - the name in pandas
        return columns


def test_columns_and_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", ReplacedPandas("pandas"))
    columns = pandas_table(TABLE)
    assert list(columns) == TABLE.columns
    assert columns["layer"] == ([0, 1, None], "Int32")
    assert columns["count"] == ([3, 4, 5], "int64")
    assert columns["site"] == (["a", None, "c"], None)
    np.testing.assert_array_equal(columns["value"][0], [0.5, np.nan, np.inf])
    assert pandas_table(TABLE.clear())["site"] == ([], "object")


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="`make bridges` has pandas")
def test_pandas_itself() -> None:
    frame = pandas_table(TABLE)
    assert [str(kind) for kind in frame.dtypes[["layer", "count", "value", "complete"]]] == [
        *("Int32", "int64", "float64", "bool")
    ]
    assert frame["layer"].isna().tolist() == [False, False, True] and frame["layer"][1] == 1
    assert frame["site"].isna().tolist() == [False, True, False]
    assert frame.shape == TABLE.shape and pandas_table(TABLE.clear()).shape == (0, 6)


def test_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pandas is not installed; install it with: pip install pandas"):
        pandas_table(TABLE)
