"""Rows as tokens: blocks of queries, attention of each row to the others, and what a table's spread is."""

from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from sklearn.utils import validation
from torch import Tensor

from massieu.foundation.arguments import described, number

Candidate = TypeVar("Candidate")

validate_data: Callable[..., Any] = validation.validate_data
"""scikit-learn's own, whose types no checker can tell."""

_LEAST_VARIANCE = float(np.finfo(np.float64).tiny)
"""Of a column that varies; below it squares lose digits."""

PAIRS_AT_ONCE = 1 << 23
"""Of a query and a row, in a block."""


def tensor(table: np.ndarray) -> Float[Tensor, "rows columns"]:
    """Its own copy, in float64."""
    return torch.tensor(table, dtype=torch.float64)


def as_heads(rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "1 1 rows columns"]:
    """In attention's layout: one item, one head."""
    return rows[None, None]


def blocks(queries: int, rows: int) -> Iterator[slice]:
    """So many queries at once that no block has more than `PAIRS_AT_ONCE` pairs with the rows."""
    size = max(1, PAIRS_AT_ONCE // rows)
    for first in range(0, queries, size):
        yield slice(first, min(first + size, queries))


def in_blocks(function: Callable[[Tensor], Tensor], query: Tensor, rows: int) -> Tensor:
    """The function of the queries, block by block."""
    return torch.cat([function(query[block]) for block in blocks(len(query), rows)])


def sample_of(rows: int, most: int) -> Tensor:
    """Indices of at most so many rows, in order: the same at each call."""
    if rows <= most:
        return torch.arange(rows)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:most].sort().values


def others(index: Tensor, rows: int) -> Bool[Tensor, "queries rows"]:
    """Which rows each query of that index sees: all but itself."""
    return index.unsqueeze(-1) != torch.arange(rows)


def number_or_auto(name: str, value: object) -> float | None:
    """The number, above 0, or None for "auto". One number serves all columns: rows are compared by distances.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be 'auto' or one number for all columns, got {described(value)}")
    return number(name, float(value), above=0)


def check_spread(name: str, table: np.ndarray) -> None:
    """Raise where distances between rows are lost: squares that overflow, or that are 0 though the rows differ.

    Raises:
        ValueError: naming the first such column.
    """
    columns = table.astype(np.float64).reshape(len(table), -1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        variance = columns.var(0)
        lost = ~np.isfinite(variance.sum()) | ((variance < _LEAST_VARIANCE) & (columns != columns[0]).any(0))
    if lost.any():
        column = int(np.argmax(lost if np.isfinite(variance.sum()) else variance))
        size = np.abs(columns[:, column]).max()
        raise ValueError(
            f"{name} must be in units in which float64 can hold squares: column {column} has numbers as "
            f"{'large' if size > 1 else 'small'} as {size:.3g}; divide it by a number of that size"
        )


def total_variance(rows: Float[Tensor, "rows columns"]) -> float:
    """Of all columns together; 1 where no column varies."""
    spread = rows.var(0, correction=0).sum().item()
    return spread if spread > 0 else 1.0


def best(errors: Sequence[float], candidates: Sequence[Candidate]) -> tuple[Candidate, float]:
    """The candidate of the least error, and its error; the first of those that are alike."""
    place = min(range(len(errors)), key=errors.__getitem__)
    return candidates[place], errors[place]
