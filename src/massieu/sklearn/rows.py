"""Rows of a table as tokens: blocks of queries, masks that leave a row out, checks of the columns' spread."""

from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import sparse
from sklearn.utils import validation
from torch import Tensor

from massieu.foundation.arguments import described, number

Candidate = TypeVar("Candidate")

validate_data: Callable[..., Any] = validation.validate_data
"""scikit-learn's function, which has no types."""
_check_sample_weight: Callable[..., np.ndarray] = validation._check_sample_weight

_COLUMNS_AT_ONCE = 512
"""Columns of a sparse table that are made dense at a time."""

_LEAST_VARIANCE = float(np.finfo(np.float64).tiny)
"""Least variance of a column that varies; below it squares lose digits."""

PAIRS_PER_BLOCK = 1 << 23
"""Pairs of a query and a row in a block, at most."""


def tensor(table: np.ndarray) -> Float[Tensor, "rows columns"]:
    """A copy of the table in float64."""
    return torch.tensor(table, dtype=torch.float64)


def as_heads(rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "1 1 rows columns"]:
    """The rows in attention's layout, as one item with one head."""
    return rows[None, None]


def blocks(queries: int, rows: int) -> Iterator[slice]:
    """Slices of the queries with at most `PAIRS_PER_BLOCK` pairs of a query and a row each."""
    size = max(1, PAIRS_PER_BLOCK // rows)
    for first in range(0, queries, size):
        yield slice(first, min(first + size, queries))


def in_blocks(function: Callable[[Tensor], Tensor], query: Tensor, rows: int) -> Tensor:
    """Results of a function of queries, computed block by block."""
    return torch.cat([function(query[block]) for block in blocks(len(query), rows)])


def sample_of(rows: int, most: int) -> Tensor:
    """Indices of at most `most` of the rows, in ascending order, the same in each call."""
    if rows <= most:
        return torch.arange(rows)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:most].sort().values


def others(index: Tensor, rows: int) -> Bool[Tensor, "queries rows"]:
    """Which rows each query sees: all but the row of its index, which it is."""
    return index.unsqueeze(-1) != torch.arange(rows)


def number_or_auto(name: str, value: object) -> float | None:
    """A number above 0, or None for "auto". It is one for all columns, as rows are compared by distances.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be 'auto' or one number for all columns, got {described(value)}")
    return number(name, float(value), above=0)


def check_weights(sample_weight: Any, table: Any) -> np.ndarray | None:
    """Weights of rows; None if there are none.

    Raises:
        ValueError: not one number for each row, a negative one, one that is not finite, or all of them 0.
    """
    if sample_weight is None:
        return None
    weight = _check_sample_weight(sample_weight, table, dtype=np.float64, ensure_non_negative=True)
    if not (weight > 0).any():
        # What scikit-learn's own estimators say of it.
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return weight


def check_spread(name: str, table: Any) -> None:
    """Refuse a table in which squares of differences overflow, or are 0 although the rows differ.

    Cells that are NaN are left out. Of a sparse table all columns are looked at, a few at a time.

    Raises:
        ValueError: names the first column of that kind.
    """
    if sparse.issparse(table):
        for first in range(0, table.shape[1], _COLUMNS_AT_ONCE):
            _check_spread(name, table[:, first : first + _COLUMNS_AT_ONCE].toarray(), first)
    else:
        _check_spread(name, table, 0)


def _check_spread(name: str, table: np.ndarray, first: int) -> None:
    columns = table.astype(np.float64).reshape(len(table), -1)
    is_missing = np.isnan(columns)
    if is_missing.any():
        # A missing cell takes part as another cell of its column.
        present = np.take_along_axis(columns, (~is_missing).argmax(0)[None], 0)
        columns = np.where(is_missing, np.nan_to_num(present), columns)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        variance = columns.var(0)
        lost = ~np.isfinite(variance.sum()) | ((variance < _LEAST_VARIANCE) & (columns != columns[0]).any(0))
    if lost.any():
        column = int(np.argmax(lost if np.isfinite(variance.sum()) else variance))
        size = np.abs(columns[:, column]).max()
        raise ValueError(
            f"{name} must be in units in which float64 can hold squares: column {first + column} has numbers as "
            f"{'large' if size > 1 else 'small'} as {size:.3g}; divide it by a number of that size"
        )


def without_weightless(
    table: np.ndarray, weight: np.ndarray | None, *others: np.ndarray
) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """The positive weights, and the rows of the tables that have them."""
    tables = [table, *others]
    if weight is None:
        return None, tables
    return weight[weight > 0], [each[weight > 0] for each in tables]


def mean_of(rows: Float[Tensor, "rows columns"], weight: Float[Tensor, "rows"] | None) -> Float[Tensor, "columns"]:
    """The mean of rows by their weights."""
    return rows.mean(0) if weight is None else weight @ rows / weight.sum()


def variance_of(rows: Float[Tensor, "rows columns"], weight: Float[Tensor, "rows"] | None) -> Float[Tensor, "columns"]:
    """The variances of the columns by the rows' weights."""
    if weight is None:
        return rows.var(0, correction=0)
    return mean_of((rows - mean_of(rows, weight)).square(), weight)


def total_variance(rows: Float[Tensor, "rows columns"], weight: Float[Tensor, "rows"] | None = None) -> float:
    """Sum of the columns' variances; 1 where no column varies."""
    total = variance_of(rows, weight).sum().item()
    return total if total > 0 else 1.0


def best(errors: Sequence[float], candidates: Sequence[Candidate]) -> tuple[Candidate, float]:
    """The candidate with the least error, and that error; of several the first."""
    least = min(range(len(errors)), key=errors.__getitem__)
    return candidates[least], errors[least]
