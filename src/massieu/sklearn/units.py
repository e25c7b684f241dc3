"""Columns of a table as units of a machine: their measures, locations and scales, and the learning rates that suit them."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from massieu.foundation.arguments import choice, instance
from massieu.measures import Bernoulli, Categorical, Gaussian, Measure, Poisson, Spin, product

Kinds = str | Sequence[str] | Measure


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
    response: Callable[[np.ndarray, float], float] = lambda columns, variance: 0.0
    """Derivative of an unbounded unit's mean in its field, at most; 0 for a bounded one, whose mean cannot run away."""
    units: Callable[[np.ndarray], tuple[Any, Any]] = lambda column: (0.0, 1.0)
    """Location and scale of each column."""
    bias: Callable[[np.ndarray, int], Any] = lambda mean, rows: 0.0
    """The field at which a unit alone has the column's mean."""


def _mean_and_deviation(columns: np.ndarray) -> tuple[Any, Any]:
    deviation = columns.std(0)
    # A column that does not vary has the unit 1.
    return columns.mean(0), np.where(deviation > 0, deviation, 1.0)


def _log_odds(share: np.ndarray, rows: int) -> np.ndarray:
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
        response=lambda columns, _: float((np.square(columns).mean(0) / np.maximum(columns.mean(0), 1e-9)).max()),
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
    """A table's columns as visible units. A row is worth (row − location)/scale to the machine."""

    layer: Layer
    location: np.ndarray
    scale: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, visible: Kinds, table: np.ndarray, names: Sequence[str] | None, residual_variance: float) -> "Columns":
        """The columns of a table.

        Raises:
            ValueError: no such kind; a list of another length than the table is wide; a column that holds what its kind
                does not, with its name.
        """
        rows, width = table.shape
        location = np.zeros(width)
        scale = np.ones(width)
        bias = np.zeros(width)
        if isinstance(visible, Measure):
            if tuple(visible.event_shape) != (width,):
                raise ValueError(f"visible is a measure on {tuple(visible.event_shape)}, and X has {width} columns")
            return cls(Layer(visible, _OTHER_RATE), location, scale, bias)
        kinds = [visible] * width if isinstance(visible, str) else list(instance("visible", visible, Sequence, _WORDS))
        if len(kinds) != width:
            raise ValueError(f"visible must have one kind for each of {width} columns, got {len(kinds)}")
        measures: list[Measure] = []
        rate = math.inf
        response = 0.0
        first = 0
        # Neighbouring columns of one kind are one measure.
        for kind, run in groupby(kinds):
            unit = _VISIBLE[choice("visible", kind, *_VISIBLE)]
            columns = slice(first, first + len(list(run)))
            numbers = table[:, columns]
            _check(kind, unit, numbers, first, names)
            location[columns], scale[columns] = unit.units(numbers)
            bias[columns] = unit.bias(numbers.mean(0), rows)
            measures.append(unit.measure(torch.zeros(numbers.shape[1], dtype=torch.float64), residual_variance))
            rate = min(rate, unit.rate)
            response = max(response, unit.response(numbers, residual_variance))
            first = columns.stop
        measure = measures[0] if len(measures) == 1 else product(*measures)
        return cls(Layer(measure, rate, response, _largest_variance(table / scale)), location, scale, bias)


_WORDS = f"one of {', '.join(map(repr, _VISIBLE))}, a sequence with one of them for each column, or a measure"


def _largest_variance(table: np.ndarray) -> float:
    """The largest variance along any direction of the columns."""
    centred = table - table.mean(0)
    if len(centred) < centred.shape[1]:
        # The Gram matrix of the rows has the same largest eigenvalue.
        centred = centred.T
    return float(np.linalg.eigvalsh(centred.T @ centred / len(table))[-1])


def _check(kind: str, unit: _Visible, columns: np.ndarray, first: int, names: Sequence[str] | None) -> None:
    """Refuse columns with numbers that their kind of unit cannot have."""
    wrong = ~unit.is_allowed(columns)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        name = first + column if names is None else repr(str(names[first + column]))
        raise ValueError(
            f"column {name} must hold {unit.allowed} for visible={kind!r}, got {columns[row, column]:.6g} in row {row}"
        )


def hidden_layer(hidden: str | Measure, count: int) -> Layer:
    """The hidden units."""
    if isinstance(hidden, Measure):
        return Layer(hidden, _OTHER_RATE)
    unit = _HIDDEN[choice("hidden", hidden, *_HIDDEN)]
    # At worst all units are equal, so that their variances add up. The states of one unit exclude each other.
    variance = unit.variance if hidden == "categorical" else count * unit.variance
    return Layer(unit.measure(torch.zeros(count, dtype=torch.float64)), unit.rate, unit.variance, variance)
