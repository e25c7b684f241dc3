"""What the columns of a table are: kinds of units, as measures, and the units that each column is counted in."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from massieu.foundation.arguments import choice, instance
from massieu.measures import Bernoulli, Categorical, Exponential, Gaussian, Measure, Poisson, Spin, product

Kinds = str | Sequence[str] | Measure


class _Visible(NamedTuple):
    """A kind of column."""

    measure: Callable[[Tensor, float], Measure]
    """Of a column's numbers as zeros, and of the residual variance."""
    holds: Callable[[np.ndarray], np.ndarray]
    """Which numbers such a column may have."""
    words: str
    """The same in words."""
    rate: float
    """A learning rate at which such columns train without diverging."""
    units: Callable[[np.ndarray], tuple[Any, Any]] = lambda column: (0.0, 1.0)
    """Location and scale of the columns of a table."""
    bias: Callable[[np.ndarray, int], Any] = lambda mean, rows: 0.0
    """At which a unit by itself has the column's mean."""


def _spread(columns: np.ndarray) -> tuple[Any, Any]:
    return columns.mean(0), _or_one(columns.std(0))


def _or_one(scale: np.ndarray) -> np.ndarray:
    """A column that does not vary is counted in units of 1."""
    return np.where(scale > 0, scale, 1.0)


def _log_odds(share: np.ndarray, rows: int) -> np.ndarray:
    # A column of zeros alone: as if half a row more were 1.
    share = share.clip(0.5 / (rows + 1), 1 - 0.5 / (rows + 1))
    return np.log(share / (1 - share))


_VISIBLE = {
    "bernoulli": _Visible(
        lambda zero, _: Bernoulli.create(zero + 0.5),
        lambda x: (x == 0) | (x == 1),
        "0 and 1",
        rate=1.0,
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
        rate=0.1,
        bias=lambda mean, rows: np.log(mean.clip(0.5 / (rows + 1))),
    ),
    "gaussian": _Visible(
        lambda zero, variance: Gaussian.create(zero, zero + variance),
        np.isfinite,
        "finite numbers",
        rate=0.1,
        units=_spread,
    ),
    "exponential": _Visible(
        lambda zero, _: Exponential.create(zero + 1),
        lambda x: x >= 0,
        "numbers from 0 upwards",
        rate=0.03,
        units=lambda columns: (0.0, _or_one(columns.mean(0))),
    ),
}
_HIDDEN: dict[str, tuple[Callable[[Tensor], Measure], float]] = {
    "bernoulli": (lambda zero: Bernoulli.create(zero + 0.5), 1.0),
    "spin": (Spin.create, 0.3),
    "gaussian": (lambda zero: Gaussian.create(zero, zero + 1), 0.1),
    "poisson": (lambda zero: Poisson.create(zero + 1), 0.03),
    "exponential": (lambda zero: Exponential.create(zero + 1), 0.03),
    "categorical": (lambda zero: Categorical.create(zero + 1 / len(zero)), 1.0),
}
"""Kinds of hidden units, of zeros as many as there are, and their learning rates."""
_OTHER_RATE = 0.03
"""Of measures of one's own."""


class Columns(NamedTuple):
    """A table's columns as visible units. A row is worth (row − location)/scale to the machine."""

    measure: Measure
    location: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    rate: float
    """The learning rate that suits these columns."""

    @classmethod
    def of(cls, visible: Kinds, table: np.ndarray, names: Sequence[str] | None, residual_variance: float) -> "Columns":
        """The columns of a table.

        Raises:
            ValueError: no such kind; a list of another length than the table is wide; a column that holds what its kind
                does not, with its name.
        """
        rows, width = table.shape
        location, scale, bias = np.zeros(width), np.ones(width), np.zeros(width)
        if isinstance(visible, Measure):
            if tuple(visible.event_shape) != (width,):
                raise ValueError(f"visible is a measure on {tuple(visible.event_shape)}, and X has {width} columns")
            return cls(visible, location, scale, bias, _OTHER_RATE)
        kinds = [visible] * width if isinstance(visible, str) else list(instance("visible", visible, Sequence, _WORDS))
        if len(kinds) != width:
            raise ValueError(f"visible must have one kind for each of {width} columns, got {len(kinds)}")
        parts, rate, first = [], math.inf, 0
        for kind, run in groupby(kinds):
            unit = _VISIBLE[choice("visible", kind, *_VISIBLE)]
            columns = slice(first, first + len(list(run)))
            own = table[:, columns]
            _check(kind, unit, own, first, names)
            location[columns], scale[columns] = unit.units(own)
            mean = own.mean(0)
            bias[columns] = unit.bias(mean, rows)
            zero = torch.zeros(own.shape[1], dtype=torch.float64)
            parts.append(unit.measure(zero, residual_variance))
            # Counts vary as much as their mean is large.
            rate = min(rate, unit.rate / (max(1.0, mean.max()) if kind == "poisson" else 1.0))
            first = columns.stop
        return cls(parts[0] if len(parts) == 1 else product(*parts), location, scale, bias, rate)


_WORDS = f"one of {', '.join(map(repr, _VISIBLE))}, a sequence with one of them for each column, or a measure"


def _check(kind: str, unit: _Visible, columns: np.ndarray, first: int, names: Sequence[str] | None) -> None:
    wrong = ~unit.holds(columns)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        name = first + column if names is None else repr(str(names[first + column]))
        raise ValueError(
            f"column {name} must hold {unit.words} for visible={kind!r}, got {columns[row, column]:.6g} in row {row}"
        )


def hidden_layer(hidden: str | Measure, count: int) -> tuple[Measure, float]:
    """The hidden units, and the learning rate that suits them."""
    if isinstance(hidden, Measure):
        return hidden, _OTHER_RATE
    make, rate = _HIDDEN[choice("hidden", hidden, *_HIDDEN)]
    return make(torch.zeros(count, dtype=torch.float64)), rate
