"""A table of polars as one of pandas, without pyarrow."""

import importlib
from typing import TYPE_CHECKING, Any

from massieu.errors import MissingExtraError

if TYPE_CHECKING:
    import polars


def pandas_table(table: "polars.DataFrame") -> Any:
    """The table as a ``pandas.DataFrame``: the same names and rows.

    A column of integers keeps its type. If some are missing, it has pandas' type for that, such as ``Int32``; a missing
    floating-point number is NaN.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        pandas: Any = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise MissingExtraError("pandas is not installed; install it with: pip install pandas") from error
    columns = {}
    for column in table.iter_columns():
        if column.dtype.is_integer():
            kind = str(column.dtype) if column.null_count() else str(column.dtype).lower()
            columns[column.name] = pandas.Series(column.to_list(), dtype=kind)
        elif column.dtype.is_float():
            columns[column.name] = pandas.Series(column.to_numpy())  # nulls become NaN
        else:
            columns[column.name] = pandas.Series(column.to_list(), dtype=None if len(column) else "object")
    return pandas.DataFrame(columns)
