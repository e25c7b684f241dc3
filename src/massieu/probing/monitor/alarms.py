"""Alarms of a training run, each from the run's own history: no reference run is needed."""

import math
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from massieu.foundation.printable import visible
from massieu.probing.monitor.processes import MonitorSums
from massieu.probing.monitor.quantities import STREAM, Array
from massieu.probing.monitor.writers import is_first

WINDOW = 16
"""So many records are a number's history; before there are so many, the first record is."""
FEWEST = 4
"""Fewer records do not say how much a number moves by chance."""
RUNNING = 2
"""A number is in alarm once so many records running are outside."""
CHANCE = 1e-5
"""How likely one number of a rule may be outside by chance, if its logarithm is a random walk."""
PAGE = "docs/how-to/alarms.md"
_NORMAL_OVER_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_HUGE = 1e300
"""Infinity counts as this number, so that differences of logarithms are numbers."""


@dataclass(frozen=True)
class Rule:
    """When one quantity is in alarm.

    Attributes:
        title: what happens.
        quantity: a head's, a layer's, or the model's number; ``distance_from_uniform`` is 1 − ``entropy_fraction``.
        key: the quantity's name in a record, of the layer, or of the model.
        rises: whether it is outside above its history, else below.
        factor: how far from its history it is at least.
        factor_at_first: the same from the first record, while there is no history; learning begins then.
        negligible: smaller numbers count as this one, since their changes do not matter.
        first_step: what to do first.
        over_mean: whether the mean over all heads is compared, rather than each number.
        bound: the number is compared with this from the beginning, and not with its history; None where it is not.
    """

    title: str
    quantity: str
    key: str
    rises: bool
    negligible: float
    first_step: str
    factor: float = 1.0
    factor_at_first: float = 1.0
    over_mean: bool = False
    bound: float | None = None

    @property
    def page(self) -> str:
        """Where the rule is explained."""
        return f"{PAGE}#{self.title.replace(' ', '-')}"


RULES = (
    Rule(
        "growing logits",
        quantity="largest_logit",
        key="largest_logit_max",
        rises=True,
        factor=3.0,
        factor_at_first=4.0,
        negligible=10.0,
        first_step="lower the learning rate, or clip with massieu.nn.clip_logits",
    ),
    Rule(
        "sharpening attention",
        quantity="selective_log_partition",
        key="selective_log_partition_mean",
        rises=True,
        factor=2.5,
        factor_at_first=3.0,
        negligible=1.0,
        over_mean=True,
        first_step="lower the learning rate",
    ),
    Rule(
        "entropy collapse",
        quantity="entropy",
        key="entropy_mean",
        rises=False,
        factor=1.5,
        factor_at_first=2.0,
        negligible=1e-3,
        over_mean=True,
        first_step="lower the learning rate",
    ),
    Rule(
        "uniform attention",
        quantity="distance_from_uniform",
        key="entropy_fraction_mean",
        rises=False,
        factor=1.3,
        factor_at_first=2.0,
        negligible=1e-3,
        over_mean=True,
        first_step="look whether tokens have become equal (spread), and go back to a checkpoint before it",
    ),
    Rule(
        "collapsing tokens",
        quantity="spread",
        key="spread",
        rises=False,
        factor=1.3,
        factor_at_first=20.0,
        negligible=1e-12,
        first_step="go back to a checkpoint before it, and lower the learning rate or warm up for longer",
    ),
    Rule(
        "falling rank",
        quantity="effective_rank",
        key="effective_rank",
        rises=False,
        factor=2.2,
        factor_at_first=4.0,
        negligible=1.0,
        first_step="go back to a checkpoint before it, and lower the learning rate or warm up for longer",
    ),
    Rule(
        "growing gradient",
        quantity="gradient_norm",
        key="gradient_norm",
        rises=True,
        factor=3.0,
        factor_at_first=5.0,
        negligible=1e-12,
        first_step="look at the batch, then lower the learning rate or clip gradients",
    ),
    Rule(
        "lost updates",
        quantity="unchanged_weights",
        key="unchanged_weights",
        rises=True,
        negligible=1e-3,
        first_step="keep the weights that the optimiser trains in float32, and compute in half precision by autocast",
        bound=0.5,
    ),
)
"""All rules."""


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
        where = ""
        if self.rule.over_mean:
            where = f", most in {self.place}"
        elif self.place.layer:
            where = f" in {self.place}"
        if self.places > 1:
            unit = "layer" if self.place.head is None else "head"
            where += f" and {self.places - 1} more {unit}{'s' if self.places > 2 else ''}"
        beside = "where its own history has" if self.rule.bound is None else "and an alarm from"
        return (
            f"{self.rule.title}{where}, since step {self.since}: {compared} is {self.value:.3g} at step {self.step}, "
            f"{beside} {self.usual:.3g}. First {self.rule.first_step}. See {self.rule.page}"
        )


class Alarms:
    """Compares each record of a run with the records before it, and warns once for each rule until it is quiet again.

    A rule of `RULES` compares a number of each head or layer, or the mean over all heads, on a log scale. Its history is
    the 16 records before. A number is *outside* where it differs from the median of its history by the rule's factor, and by
    more than chance explains: a random walk whose steps have the robust spread (median absolute deviation) of the
    history's, at one in 100,000 over all numbers of the rule. While there are fewer records, the first one is the
    history, with the rule's ``factor_at_first``, which is larger, since learning begins. Outside in two records running
    is an alarm. It lasts while the number is as far from what it was compared with at first. NaN counts as the
    number before it: the monitor names it by itself. A rule with a ``bound`` compares with that alone.

    Simulations, and the runs that the factors come from, are on the page of alarms.

    Args:
        prefix: What the record's keys begin with.
    """

    def __init__(self, prefix: str = "massieu") -> None:
        self._prefix = prefix
        self._histories = [History(rule) for rule in RULES]
        self._ringing: set[str] = set()
        self._last_step = -1

    def __call__(self, numbers: Mapping[str, Numbers], step: int) -> list[Alarm]:
        """The alarms of a record, at most one for each rule, which are warned of where they are new.

        A step that is not after the last one begins new histories: the run went back.
        """
        if step <= self._last_step:
            self._histories = [History(rule) for rule in RULES]
            self._ringing.clear()
        self._last_step = step
        alarms = []
        for history in self._histories:
            title = history.rule.title
            alarm = history.add(numbers.get(history.rule.quantity), step, self._prefix)
            if alarm is None:
                self._ringing.discard(title)
                continue
            alarms.append(alarm)
            if title not in self._ringing:
                self._ringing.add(title)
                if is_first():
                    warnings.warn(visible(f"massieu.Monitor: {alarm}"), stacklevel=4)
        return alarms


class History:
    """The latest numbers of one rule's quantity, and what of them is in alarm."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._begin(())

    def _begin(self, places: tuple[Place, ...]) -> None:
        """Forget everything: other places are measured than before."""
        self._places = places
        compared = 1 if self.rule.over_mean else len(places)
        self._steps: deque[int] = deque(maxlen=WINDOW + RUNNING)
        # Each of shape (N,).
        self._values: deque[Array] = deque(maxlen=WINDOW + RUNNING)
        # Logarithms of what is compared, with a sign that makes the rule's direction upwards; each (M,), M = 1 for a mean.
        self._levels: deque[Array] = deque(maxlen=WINDOW + RUNNING)
        # Of what is in alarm: the first step outside, the level before, and how far from it is an alarm. Else NaN; (M,).
        self._since: Array = np.full(compared, np.nan)
        self._usual: Array = np.full(compared, np.nan)
        self._least: Array = np.full(compared, np.nan)
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
        self._steps.append(step)
        self._values.append(values)
        self._levels.append(self._level(self._compared(values)))
        if len(self._levels) == 1:
            self._first_values, self._first_level = values, self._levels[-1]
        self._since = np.where(self._levels[-1] - self._usual >= self._least, self._since, np.nan)
        if len(self._levels) > RUNNING:
            self._look()
        if np.isnan(self._since).all():
            return None
        return self._alarm(step, prefix)

    def _compared(self, values: Array) -> Array:
        return np.nanmean(values, keepdims=True) if self.rule.over_mean else values

    def _level(self, values: Array) -> Array:
        logarithms = np.log(np.clip(values, self.rule.negligible, _HUGE))
        return logarithms if self.rule.rises else -logarithms

    def _look(self) -> None:
        """Find what is newly outside in the latest records."""
        levels = np.stack(self._levels)
        past, recent = levels[:-RUNNING], levels[-RUNNING:]
        if self.rule.bound is not None:
            usual_values = np.full(len(self._places), self.rule.bound)
            usual = self._level(self._compared(usual_values))
            least = np.zeros_like(usual)
        elif len(past) < WINDOW:
            usual, usual_values = self._first_level, self._first_values
            least = np.maximum(math.log(self.rule.factor_at_first), _by_chance(past, len(past) + RUNNING))
        else:
            usual, usual_values = np.median(past, 0), np.median(np.stack(self._values)[:-RUNNING], 0)
            # The end of a random walk of n steps is √(n/3) deviations of a step from the walk's own mean, or median.
            least = np.maximum(math.log(self.rule.factor), _by_chance(past, len(past) / 3 + RUNNING))
        new = (recent.min(0) - usual >= least) & np.isnan(self._since)
        if new.any():
            self._since = np.where(new, self._steps[-RUNNING], self._since)
            self._usual = np.where(new, usual, self._usual)
            self._least = np.where(new, least, self._least)
            self._usual_values = np.where(self.rule.over_mean | new, usual_values, self._usual_values)

    def _alarm(self, step: int, prefix: str) -> Alarm:
        ringing = ~np.isnan(self._since)
        values, usual = self._values[-1], self._usual_values
        moved = self._level(values) - self._level(usual)
        if not self.rule.over_mean:
            moved = np.where(ringing, moved, -np.inf)
        furthest = int(np.nan_to_num(moved, nan=-np.inf).argmax())
        place = self._places[furthest]
        if self.rule.over_mean:
            name, compared, value, before = self.rule.key, 0, np.nanmean(values), np.nanmean(usual)
        else:
            name = f"{place.layer}/{self.rule.key}" if place.layer else self.rule.key
            compared, value, before = furthest, values[furthest], usual[furthest]
        return Alarm(
            rule=self.rule,
            key=f"{prefix}/{name}" if prefix else name,
            value=float(value),
            usual=float(before),
            step=step,
            since=int(self._since[compared]),
            place=place,
            places=int(ringing.sum()),
        )


def _by_chance(past: Array, walked: float) -> Array:
    """How far random walks get in so many steps, from the increments of levels before, (records, M); 0 for few records."""
    if len(past) < FEWEST:
        return np.zeros(past.shape[1])
    increments = np.diff(past, axis=0)
    deviations = np.median(np.abs(increments - np.median(increments, 0)), 0)
    # Few increments estimate a spread badly: nothing counts as calmer than the median of all that is compared.
    spread = _NORMAL_OVER_MEDIAN * np.maximum(deviations, np.nanmedian(deviations))
    return NormalDist().inv_cdf(1 - CHANCE / past.shape[1]) * spread * math.sqrt(walked)


def watched_numbers(measured: MonitorSums, record: Mapping[str, float]) -> dict[str, Numbers]:
    """What rules look at, by quantity: numbers of heads and layers, and of the whole model.

    Args:
        measured: What a monitor measured.
        record: Its numbers by their names without the prefix, the training's own among them.
    """
    watched: dict[str, Numbers] = {}
    for quantity in ("largest_logit", "selective_log_partition", "entropy", "entropy_fraction"):
        sites = [site for site in measured.sites if site.has(quantity)]
        if sites:
            places = tuple(Place(site.place, head) for site in sites for head in range(site.heads))
            watched[quantity] = Numbers(places, np.concatenate([site.means(quantity) for site in sites]))
    if "entropy_fraction" in watched:
        fractions = watched.pop("entropy_fraction")
        watched["distance_from_uniform"] = Numbers(fractions.places, 1 - fractions.values)
    layers = [layer for layer in measured.stream if f"{layer}/{STREAM[0]}" in record]
    for quantity in STREAM if layers else ():
        values = np.array([record[f"{layer}/{quantity}"] for layer in layers])
        watched[quantity] = Numbers(tuple(Place(layer, None) for layer in layers), values)
    for quantity in ("gradient_norm", "unchanged_weights"):
        if quantity in record:
            watched[quantity] = Numbers((Place("", None),), np.array([record[quantity]]))
    return watched
