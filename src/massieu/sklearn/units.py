"""Columns of a table as units of a machine: their measures, locations and scales, and the learning rates that suit them."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from massieu.foundation.arguments import choice, described, instance
from massieu.measures import Bernoulli, Categorical, Gaussian, Measure, Poisson, Spin, product

Kinds = str | Sequence[str] | Mapping[Any, str] | Measure


class SparseTable(Protocol):
    """Rows in compressed sparse form: a `scipy.sparse.csr_array` or `csr_matrix`."""

    shape: tuple[int, int]
    dtype: np.dtype
    data: np.ndarray
    T: Any

    def toarray(self) -> np.ndarray:
        """The same table, dense."""
        ...

    def astype(self, dtype: Any, /) -> "SparseTable":
        """The table in another type."""
        ...

    def __getitem__(self, index: Any, /) -> "SparseTable": ...

    def __matmul__(self, other: Any, /) -> Any: ...


Table = np.ndarray | SparseTable
"""A table of float64; NaN, in an array alone, is a missing cell."""

DEFAULT_KIND = "gaussian"
"""The kind of columns that a mapping does not name."""
COLUMNS_AT_ONCE = 512
"""Columns of a sparse table that are made dense at a time."""


class _Visible(NamedTuple):
    """A kind of column."""

    measure: Callable[[Tensor, float], Measure]
    """The law of the units, from zeros, one for each column, and from the residual variance."""
    is_allowed: Callable[[np.ndarray], np.ndarray]
    """Which numbers such a column may have."""
    allowed: str
    """The same in words."""
    rate: float = 1.0
    """The largest learning rate that suits them."""
    response: Callable[["Statistics", float], float] = lambda statistics, variance: 0.0
    """Derivative of an unbounded unit's mean in its field, at most; 0 for a bounded one, whose mean cannot run away."""
    units: Callable[["Statistics"], tuple[Any, Any]] = lambda statistics: (0.0, 1.0)
    """Location and scale of each column."""
    bias: Callable[[np.ndarray, np.ndarray], Any] = lambda mean, rows: 0.0
    """The field at which a unit alone has the column's mean."""


class Statistics(NamedTuple):
    """Of columns, over the cells that are there, by the rows' weights."""

    num_rows: np.ndarray
    """How many rows have the cell."""
    mean: np.ndarray
    square: np.ndarray
    """Mean of the squares."""
    variance: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray, weight: np.ndarray | None) -> "Statistics":
        """Statistics of columns, of which each has a cell that is there."""
        count = (~np.isnan(columns)).sum(0)
        if weight is None and (count == len(columns)).all():
            return cls(count, columns.mean(0), np.square(columns).mean(0), columns.var(0))
        weight = np.ones(len(columns)) if weight is None else weight
        share = np.where(np.isnan(columns), 0.0, weight[:, None])
        total = share.sum(0)
        share = share / np.where(total > 0, total, 1.0)
        cells = np.nan_to_num(columns)
        mean = (share * cells).sum(0)
        return cls(count, mean, (share * cells**2).sum(0), (share * (cells - mean) ** 2).sum(0))


def _mean_and_deviation(statistics: Statistics) -> tuple[Any, Any]:
    deviation = np.sqrt(statistics.variance)
    # A column that does not vary has the unit 1.
    return statistics.mean, np.where(deviation > 0, deviation, 1.0)


def _log_odds(share: np.ndarray, rows: Any) -> np.ndarray:
    # In a column of zeros alone, or of ones, the odds of half a row more.
    share = share.clip(0.5 / (rows + 1), 1 - 0.5 / (rows + 1))
    return np.log(share / (1 - share))


_VISIBLE = {
    "bernoulli": _Visible(
        lambda zero, _: Bernoulli.create(zero + 0.5),
        lambda x: (x == 0) | (x == 1),
        "0 and 1",
        bias=_log_odds,
    ),
    "spin": _Visible(
        lambda zero, _: Spin.create(zero),
        lambda x: (x == -1) | (x == 1),
        "−1 and 1",
        rate=0.3,
        bias=lambda mean, rows: 0.5 * _log_odds(0.5 * (1 + mean), rows),
    ),
    "poisson": _Visible(
        lambda zero, _: Poisson.create(zero + 1),
        lambda x: (x >= 0) & (x == np.floor(x)),
        "counts 0, 1, 2, …",
        # The mean, each count weighted by itself: large counts are where it runs away.
        response=lambda statistics, _: float((statistics.square / np.maximum(statistics.mean, 1e-9)).max()),
        bias=lambda mean, rows: np.log(mean.clip(0.5 / (rows + 1))),
    ),
    "gaussian": _Visible(
        lambda zero, variance: Gaussian.create(zero, zero + variance),
        np.isfinite,
        "finite numbers",
        response=lambda _, variance: variance,
        units=_mean_and_deviation,
    ),
}


class _Hidden(NamedTuple):
    """A kind of hidden units."""

    measure: Callable[[Tensor], Measure]
    """The law of the units, from zeros, one for each."""
    rate: float
    """The largest learning rate that suits them."""
    variance: float
    """The largest variance of one unit; for "categorical", of all states together."""


_HIDDEN = {
    "bernoulli": _Hidden(lambda zero: Bernoulli.create(zero + 0.5), 1.0, 0.25),
    "spin": _Hidden(Spin.create, 0.3, 1.0),
    "gaussian": _Hidden(lambda zero: Gaussian.create(zero, zero + 1), 0.1, 1.0),
    "poisson": _Hidden(lambda zero: Poisson.create(zero + 1), 0.03, 1.0),
    "categorical": _Hidden(lambda zero: Categorical.create(zero + 1 / len(zero)), 1.0, 0.25),
}
_OTHER_RATE = 0.03
"""The learning rate for measures that the user gives."""


class Layer(NamedTuple):
    """The units of a layer, and what limits their learning rate."""

    measure: Measure
    rate: float
    response: float = 0.0
    """Derivative of a unit's mean in its field, at most."""
    variance: float = 0.0
    """The largest variance along any direction."""


def learning_rate(visible: Layer, hidden: Layer) -> float:
    """The largest rate at which a step of the weights does not move the means beyond what it is to correct.

    A step moves the fields of a layer by rate·(error of its means)·(variance of the other layer), and its means by
    `response` times that.
    """
    overshoot = max(visible.response * hidden.variance, hidden.response * visible.variance)
    largest = 1 / overshoot if overshoot > 0 else math.inf
    return min(visible.rate, hidden.rate, largest)


class Columns(NamedTuple):
    """A table's columns as visible units.

    A column of numbers is one unit, worth (cell − location)/scale to the machine; a "categorical" one has a unit of as many
    states as it has values, and as many places.
    """

    layer: Layer
    location: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    categories: tuple[np.ndarray | None, ...]
    """The values of each column that is "categorical", in ascending order; None for other columns."""

    @classmethod
    def of(
        cls,
        visible: Kinds,
        table: Table,
        names: Sequence[str] | None,
        residual_variance: float,
        weight: np.ndarray | None = None,
    ) -> "Columns":
        """The columns of a table.

        Raises:
            ValueError: no such kind; a list of another length than the table is wide; a name that no column has; a column
                that holds what its kind does not, or nothing, with its name.
        """
        _, width = table.shape
        location = np.zeros(width)
        scale = np.ones(width)
        biases: list[np.ndarray] = []
        categories: list[np.ndarray | None] = [None] * width
        if isinstance(visible, Measure):
            if tuple(visible.event_shape) != (width,):
                raise ValueError(f"visible is a measure on {tuple(visible.event_shape)}, and X has {width} columns")
            return cls(Layer(visible, _OTHER_RATE), location, scale, np.zeros(width), tuple(categories))
        measures: list[Measure] = []
        rate = math.inf
        response = 0.0
        first = 0
        # Neighbouring columns of one kind are one measure.
        for kind, run in groupby(_kinds(visible, width, names)):
            last = first + len(list(run))
            if choice("visible", kind, *_VISIBLE, "categorical") == "categorical":
                for column in range(first, last):
                    values, shares = _categories(_dense(table, column, column + 1)[:, 0], column, names, weight)
                    categories[column] = values
                    measures.append(Categorical.create(torch.from_numpy(shares)))
                    biases.append(np.zeros(len(values)))
                first = last
                continue
            unit = _VISIBLE[kind]
            # A sparse table is never made dense as a whole.
            step = COLUMNS_AT_ONCE if sparse.issparse(table) else width
            for start in range(first, last, step):
                columns = slice(start, min(start + step, last))
                numbers = _dense(table, columns.start, columns.stop)
                _check(kind, unit, numbers, start, names)
                statistics = Statistics.of(numbers, weight)
                location[columns], scale[columns] = unit.units(statistics)
                biases.append(np.zeros(numbers.shape[1]) + unit.bias(statistics.mean, statistics.num_rows))
                response = max(response, unit.response(statistics, residual_variance))
            measures.append(unit.measure(torch.zeros(last - first, dtype=torch.float64), residual_variance))
            rate = min(rate, unit.rate)
            first = last
        measure = measures[0] if len(measures) == 1 else product(*measures)
        is_number = [values is None for values in categories]
        # The states of one unit exclude each other: together they vary by at most 1/2 along any direction.
        largest = 0.0 if all(is_number) else 0.5
        if any(is_number):
            largest += _largest_variance(table[:, is_number] if largest else table, scale[is_number])
        layer = Layer(measure, min(rate, _CATEGORICAL_RATE), response, largest)
        return cls(layer, location, scale, np.concatenate(biases), tuple(categories))

    def units(self, table: np.ndarray) -> np.ndarray:
        """The rows as visible units; NaN where a cell is missing, zeros for a value that the column did not have in `fit`."""
        numbers = (table - self.location) / self.scale
        if all(values is None for values in self.categories):
            return numbers
        parts: list[np.ndarray] = []
        for column, values in enumerate(self.categories):
            cells = table[:, [column]]
            if values is None:
                parts.append(numbers[:, [column]])
            else:
                parts.append(np.where(np.isnan(cells), np.nan, cells == values))
        return np.hstack(parts)

    def table(self, units: np.ndarray) -> np.ndarray:
        """The rows of visible units, or of their means: of a "categorical" column the likeliest value."""
        if all(values is None for values in self.categories):
            return units * self.scale + self.location
        columns: list[np.ndarray] = []
        place = 0
        for column, values in enumerate(self.categories):
            count = 1 if values is None else len(values)
            part = units[:, place : place + count]
            place += count
            if values is None:
                columns.append(part[:, 0] * self.scale[column] + self.location[column])
            else:
                columns.append(values[part.argmax(1)])
        return np.column_stack(columns)


_WORDS = (
    f"one of {', '.join(map(repr, [*_VISIBLE, 'categorical']))}, a sequence with one of them for each column, a mapping of "
    "columns to them, or a measure"
)


def _kinds(visible: str | Sequence[str] | Mapping[Any, str], width: int, names: Sequence[str] | None) -> list[str]:
    """The kind of each column."""
    if isinstance(visible, str):
        return [visible] * width
    if isinstance(visible, Mapping):
        kinds = [DEFAULT_KIND] * width
        places: dict[Any, int] = dict(zip(range(width), range(width), strict=True))
        if names is not None:
            places.update({str(name): place for place, name in enumerate(names)})
        for column, kind in visible.items():
            if column not in places:
                known = f"0 to {width - 1}" if names is None else ", ".join(repr(str(name)) for name in names)
                raise ValueError(f"visible names the column {described(column)}, and the columns of X are {known}")
            kinds[places[column]] = kind
        return kinds
    kinds = list(instance("visible", visible, Sequence, _WORDS))
    if len(kinds) != width:
        raise ValueError(f"visible must have one kind for each of {width} columns, got {len(kinds)}")
    return kinds


def _dense(table: Table, first: int, last: int) -> np.ndarray:
    """Some columns as an array."""
    columns = table[:, first:last]
    return columns if isinstance(columns, np.ndarray) else columns.toarray()


def _categories(
    column: np.ndarray, place: int, names: Sequence[str] | None, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column and their shares."""
    is_there = ~np.isnan(column)
    _check_not_empty(is_there, place, names)
    values, index = np.unique(column[is_there], return_inverse=True)
    if len(values) > MOST_CATEGORIES:
        raise ValueError(
            f"column {_name(place, names)} must have at most {MOST_CATEGORIES} values for 'categorical', got {len(values)}"
        )
    counts = np.bincount(index, None if weight is None else weight[is_there], len(values)).astype(np.float64)
    # Half a row more for each, so that none is impossible.
    return values, (counts + 0.5) / (counts + 0.5).sum()


MOST_CATEGORIES = 1000
"""The most values that a column may have to be read as categories."""
_CATEGORICAL_RATE = 1.0


def _largest_variance(table: Table, scale: np.ndarray | None = None) -> float:
    """The largest variance along any direction of the columns, in units of a scale; missing cells are at their mean."""
    rows, width = table.shape
    scale = np.ones(width) if scale is None else scale
    if isinstance(table, np.ndarray):
        scaled = table / scale
        if np.isnan(scaled).any():
            centred = np.nan_to_num(scaled - np.nanmean(scaled, 0))
        else:
            centred = scaled - scaled.mean(0)
        if rows < width:
            # The Gram matrix of the rows has the same largest eigenvalue.
            centred = centred.T
        return float(np.linalg.eigvalsh(centred.T @ centred / rows)[-1])
    scaled = table @ sparse.diags(1 / scale)
    mean = np.asarray(scaled.mean(0)).ravel()
    if rows < width:
        # Products of rows about the mean: (x − m)·(y − m) = x·y − x·m − y·m + m·m.
        product = scaled @ mean
        moments = (scaled @ scaled.T).toarray() - product[:, None] - product + mean @ mean
    else:
        moments = (scaled.T @ scaled).toarray() - rows * np.outer(mean, mean)
    return float(np.linalg.eigvalsh(moments / rows)[-1])


def _check(kind: str, unit: _Visible, columns: np.ndarray, first: int, names: Sequence[str] | None) -> None:
    """Refuse columns with numbers that their kind of unit cannot have, and columns without a number."""
    is_missing = np.isnan(columns)
    wrong = ~unit.is_allowed(columns) & ~is_missing
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"column {_name(first + column, names)} must hold {unit.allowed} for visible={kind!r}, "
            f"got {columns[row, column]:.6g} in row {row}"
        )
    if is_missing.all(0).any():
        column = int(is_missing.all(0).argmax())
        _check_not_empty(~is_missing[:, column], first + column, names)


def _check_not_empty(is_there: np.ndarray, place: int, names: Sequence[str] | None) -> None:
    if not is_there.any():
        raise ValueError(f"column {_name(place, names)} must have a cell that is not missing")


def _name(place: int, names: Sequence[str] | None) -> Any:
    return place if names is None else repr(str(names[place]))


def hidden_layer(hidden: str | Measure, count: int) -> Layer:
    """The hidden units."""
    if isinstance(hidden, Measure):
        return Layer(hidden, _OTHER_RATE)
    unit = _HIDDEN[choice("hidden", hidden, *_HIDDEN)]
    # At worst all units are equal, so that their variances add up. The states of one unit exclude each other.
    variance = unit.variance if hidden == "categorical" else count * unit.variance
    return Layer(unit.measure(torch.zeros(count, dtype=torch.float64)), unit.rate, unit.variance, variance)
