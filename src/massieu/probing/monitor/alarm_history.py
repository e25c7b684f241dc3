"""The history of one quantity in a training run, and whether its latest numbers are far outside it."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from massieu.probing.monitor.alarm_rules import Rule
from massieu.probing.monitor.site_numbers import Array

WINDOW = 16
"""So many records are a number's history; before there are so many, the first record is."""
FEWEST = 4
"""Fewer records do not say how much a number moves by chance."""
RUNNING = 2
"""A number is in alarm once so many records running are outside."""
CHANCE = 1e-5
"""How likely one number of a rule may be outside by chance, if its logarithm is a random walk."""
_NORMAL_OVER_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_HUGE = 1e300
"""Infinity counts as this number, so that differences of logarithms are numbers."""


class Place(NamedTuple):
    """Where a number was measured: the layer as records name it, and the head where heads have the number.

    The layer of a number of the whole model is empty.
    """

    layer: str
    head: int | None

    def __str__(self) -> str:
        return self.layer if self.head is None else f"{self.layer}, head {self.head}"


class Numbers(NamedTuple):
    """One quantity's numbers at a step, shape (N,), and the place of each."""

    places: tuple[Place, ...]
    values: Array


class Alarm(NamedTuple):
    """One quantity far outside its own history.

    Attributes:
        rule: the rule that it broke.
        key: the name in the record of what is compared.
        value: what is compared, at this step.
        usual: the median of its history, or the first record's where there is none yet; or the bound of a rule that has one.
        step: of this record.
        since: the step of the first record outside.
        place: the head or layer that has moved furthest.
        places: how many heads or layers are outside; 1 where their mean is compared.
    """

    rule: Rule
    key: str
    value: float
    usual: float
    step: int
    since: int
    place: Place
    places: int

    def __str__(self) -> str:
        quantity = self.rule.quantity.replace("_", " ")
        compared = f"the mean over heads of {quantity}" if self.rule.over_mean else quantity
        reference = "where its own history has" if self.rule.bound is None else "and an alarm from"
        return (
            f"{self.rule.title}{self._where()}, since step {self.since}: {compared} is {self.value:.3g} at step {self.step}, "
            f"{reference} {self.usual:.3g}. First {self.rule.first_step}. See {self.rule.page}"
        )

    def _where(self) -> str:
        where = ""
        if self.rule.over_mean:
            where = f", most in {self.place}"
        elif self.place.layer:
            where = f" in {self.place}"
        others = self.places - 1
        if others > 0:
            unit = "layer" if self.place.head is None else "head"
            where += f" and {others} more {unit if others == 1 else f'{unit}s'}"
        return where


@dataclass(frozen=True, eq=False)
class _Reference:
    """What the latest records are compared with.

    Attributes:
        level: (M,).
        least: how far above it is outside, (M,).
        values: each place's own number, (N,).
    """

    level: Array
    least: Array
    values: Array


class History:
    """The latest numbers of one rule's quantity, and what of them is in alarm.

    N numbers are measured, one at each place, and M levels are compared: N, or a single one of a rule that compares the
    mean. A *level* is the logarithm of a number, with the sign that makes the rule's direction upwards.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._begin(())

    def _begin(self, places: tuple[Place, ...]) -> None:
        """Forget everything: other places are measured than before."""
        self._places = places
        num_levels = 1 if self.rule.over_mean else len(places)
        self._steps: deque[int] = deque(maxlen=WINDOW + RUNNING)
        self._values: deque[Array] = deque(maxlen=WINDOW + RUNNING)  # each (N,)
        self._levels: deque[Array] = deque(maxlen=WINDOW + RUNNING)  # each (M,)
        # NaN where nothing is in alarm; (M,).
        self._since: Array = np.full(num_levels, np.nan)  # the first step outside
        self._usual: Array = np.full(num_levels, np.nan)  # the level before
        self._least: Array = np.full(num_levels, np.nan)  # how far from it is an alarm
        # Each place's number before the latest alarm began; (N,).
        self._usual_values: Array = np.full(len(places), np.nan)

    def add(self, numbers: Numbers | None, step: int, prefix: str = "") -> Alarm | None:
        """Take a record's numbers, and return the alarm of what is furthest outside."""
        if numbers is None or not numbers.places:
            return None
        if numbers.places != self._places:
            self._begin(numbers.places)
        values = numbers.values
        if self._values:
            values = np.where(np.isnan(values), self._values[-1], values)
        if np.isnan(values).all():
            return None
        level = self._level(self._compared(values))
        self._steps.append(step)
        self._values.append(values)
        self._levels.append(level)
        if len(self._levels) == 1:
            self._first_values = values
            self._first_level = level
        # An alarm ends where the number is no longer as far from the level before as made it one.
        self._since = np.where(level - self._usual >= self._least, self._since, np.nan)
        if len(self._levels) > RUNNING:
            self._find_new()
        if np.isnan(self._since).all():
            return None
        return self._alarm(step, prefix)

    def _compared(self, values: Array) -> Array:
        return np.nanmean(values, keepdims=True) if self.rule.over_mean else values

    def _level(self, values: Array) -> Array:
        logarithms = np.log(np.clip(values, self.rule.negligible, _HUGE))
        return logarithms if self.rule.rises else -logarithms

    def _find_new(self) -> None:
        """Begin an alarm for what was outside in all of the latest records."""
        levels = np.stack(self._levels)
        recent = levels[-RUNNING:]
        reference = self._reference(levels[:-RUNNING])
        is_new = (recent.min(0) - reference.level >= reference.least) & np.isnan(self._since)
        if not is_new.any():
            return
        self._since = np.where(is_new, self._steps[-RUNNING], self._since)
        self._usual = np.where(is_new, reference.level, self._usual)
        self._least = np.where(is_new, reference.least, self._least)
        self._usual_values = np.where(self.rule.over_mean | is_new, reference.values, self._usual_values)

    def _reference(self, past: Array) -> _Reference:
        """What to compare with, by the levels before the latest records, (records, M)."""
        rule = self.rule
        if rule.bound is not None:
            values = np.full(len(self._places), rule.bound)
            level = self._level(self._compared(values))
            return _Reference(level, np.zeros_like(level), values)
        if len(past) < WINDOW:
            # The walk began at the first record.
            by_chance = _by_chance(past, len(past) + RUNNING)
            least = np.maximum(math.log(rule.factor_at_first), by_chance)
            return _Reference(self._first_level, least, self._first_values)
        # The end of a random walk of n steps is √(n/3) deviations of a step from the walk's own mean, or median.
        by_chance = _by_chance(past, len(past) / 3 + RUNNING)
        least = np.maximum(math.log(rule.factor), by_chance)
        return _Reference(np.median(past, 0), least, np.median(np.stack(self._values)[:-RUNNING], 0))

    def _alarm(self, step: int, prefix: str) -> Alarm:
        in_alarm = ~np.isnan(self._since)
        values = self._values[-1]
        moved = self._level(values) - self._level(self._usual_values)
        if not self.rule.over_mean:
            moved = np.where(in_alarm, moved, -np.inf)
        furthest = int(np.nan_to_num(moved, nan=-np.inf).argmax())
        place = self._places[furthest]
        key = self.rule.key
        if self.rule.over_mean:
            value = np.nanmean(values)
            usual = np.nanmean(self._usual_values)
            since = self._since[0]
        else:
            value = values[furthest]
            usual = self._usual_values[furthest]
            since = self._since[furthest]
            if place.layer:
                key = f"{place.layer}/{key}"
        return Alarm(
            rule=self.rule,
            key=f"{prefix}/{key}" if prefix else key,
            value=float(value),
            usual=float(usual),
            step=step,
            since=int(since),
            place=place,
            places=int(in_alarm.sum()),
        )


def _by_chance(past: Array, steps: float) -> Array:
    """How far random walks get in so many steps, from the increments of levels before, (records, M); 0 for few records."""
    num_levels = past.shape[1]
    if len(past) < FEWEST:
        return np.zeros(num_levels)
    increments = np.diff(past, axis=0)
    deviations = np.median(np.abs(increments - np.median(increments, 0)), 0)
    # Few increments estimate a spread badly: nothing counts as calmer than the median of all that is compared.
    spread = _NORMAL_OVER_MEDIAN * np.maximum(deviations, np.nanmedian(deviations))
    return NormalDist().inv_cdf(1 - CHANCE / num_levels) * spread * math.sqrt(steps)
