"""Alarms of a training run, each from the run's own history: no reference run is needed."""

from collections.abc import Mapping

import numpy as np

from massieu.probing.monitor.alarm_history import Alarm, History, Numbers, Place
from massieu.probing.monitor.alarm_rules import RULES
from massieu.probing.monitor.processes import MonitorSums, is_first_process
from massieu.probing.monitor.stream_numbers import STREAM
from massieu.probing.monitor.warning import warn


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
            is_new = title not in self._ringing
            self._ringing.add(title)
            if is_new and is_first_process():
                warn(str(alarm))
        return alarms


def watched_numbers(measured: MonitorSums, values: Mapping[str, float]) -> dict[str, Numbers]:
    """What rules look at, by quantity: numbers of heads and layers, and of the whole model.

    Args:
        measured: What a monitor measured.
        values: A record's numbers by their names without the prefix, the training's own among them.
    """
    numbers: dict[str, Numbers] = {}
    for quantity in ("largest_logit", "selective_log_partition", "entropy"):
        of_heads = _numbers_of_heads(measured, quantity)
        if of_heads is not None:
            numbers[quantity] = of_heads
    fractions = _numbers_of_heads(measured, "entropy_fraction")
    if fractions is not None:
        # Fractions near 1 hardly move on a log scale; their distances from 1 do.
        numbers["distance_from_uniform"] = Numbers(fractions.places, 1 - fractions.values)
    layers = [layer for layer in measured.stream if f"{layer}/{STREAM[0]}" in values]
    if layers:
        places = tuple(Place(layer, None) for layer in layers)
        for quantity in STREAM:
            numbers[quantity] = Numbers(places, np.array([values[f"{layer}/{quantity}"] for layer in layers]))
    whole_model = (Place("", None),)
    for quantity in ("gradient_norm", "unchanged_weights"):
        if quantity in values:
            numbers[quantity] = Numbers(whole_model, np.array([values[quantity]]))
    return numbers


def _numbers_of_heads(measured: MonitorSums, quantity: str) -> Numbers | None:
    sites = [site for site in measured.sites if site.has(quantity)]
    if not sites:
        return None
    places = tuple(Place(site.place, head) for site in sites for head in range(site.heads))
    return Numbers(places, np.concatenate([site.values(quantity) for site in sites]))
