"""From running results to the two tables: values, controls, halves of the text, and q-values against the controls."""

import itertools
from typing import Any, Literal

import numpy as np

from massieu.probing.accumulate import Ratio
from massieu.probing.long_table import TableBuilder
from massieu.probing.reading import Reading
from massieu.probing.significance import benjamini_hochberg, difference_p, other_heads, two_sided_p
from massieu.probing.site_reading import SiteReading
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.climb import MOVERS, PARTS, ClimbStatistics, paired
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.units import Estimate


class HeadTable:
    """Collects the heads' rows and, at the end, the q-values over all heads of the model."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.builder = TableBuilder()
        self.wanted = wanted
        self._tests: dict[str, list[tuple[SiteInfo, np.ndarray]]] = {}

    def add(self, info: SiteInfo, name: str, found: Estimate) -> None:
        if name.partition("/")[0] in self.wanted and np.any(found.count > 0):
            self.builder.add(info.site.name, info.layer, name, found.value, found.standard_error, found.count)

    def test(self, info: SiteInfo, name: str, p_values: np.ndarray) -> None:
        if name in self.wanted and not np.all(np.isnan(p_values)):
            self._tests.setdefault(name, []).append((info, p_values))

    def add_q_values(self) -> None:
        """Benjamini–Hochberg over all heads, one family for each statistic."""
        for name, family in self._tests.items():
            adjusted = benjamini_hochberg(np.concatenate([p for _, p in family]))
            start = 0
            for info, p_values in family:
                q = adjusted[start : start + len(p_values)]
                start += len(p_values)
                self.add(info, f"{name}/q_value", Estimate(q, np.full(len(q), np.nan), np.isfinite(q).astype(float)))


def head_table(reading: Reading, control: Reading | None, wanted: frozenset[str]) -> TableBuilder:
    """Every row of the heads' table; ``control`` is the same reading of the re-initialised copy."""
    table = HeadTable(wanted)
    for info, results in zip(reading.sites, reading.results, strict=True):
        fresh = {} if control is None else _ratios(control.results[info.index])
        for name, (ratio, index) in _ratios(results).items():
            own = _row(ratio, index)
            table.add(info, name, own)
            for half in ("first_half", "second_half"):
                table.add(info, f"{name}/{half}", _row(ratio, index, half))
            if control is not None and name not in control.left_out():
                _against(table, info, name, own, "reinitialised", _row(*fresh[name]))
        _add_shapes(table, info, results)
        _add_climb_controls(table, info, results.climb)
        _add_maps(table, info, results)
    table.add_q_values()
    return table.builder


def _ratios(results: SiteReading) -> dict[str, tuple[Ratio, Any]]:
    """Every ratio per head by its name: an accumulator, and which of its rows."""
    attention = results.attention
    found: dict[str, tuple[Ratio, Any]] = {name: (attention.ratio, i) for i, name in enumerate(attention.names)}
    found |= {"first_value_norm_ratio": (results.first_value, 0), "write_norm_ratio": (results.climb.write_norm, 0)}
    for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
        found[f"{mover}_{part}"] = (results.climb.steps, (kind, index))
    return found


def _row(ratio: Ratio, index: Any, part: Literal["estimate", "first_half", "second_half"] = "estimate") -> Estimate:
    return Estimate(*(each[index] for each in getattr(ratio, part)()))


def _against(table: HeadTable, info: SiteInfo, name: str, own: Estimate, control: str, null: Estimate) -> None:
    """The control's row, and the test against it where it is the one that the statistic is compared with."""
    table.add(info, f"{name}/{control}", null)
    if STATISTICS[name].control == control and not STATISTICS[name].gauge_dependent:
        table.test(info, name, difference_p(own.value, own.standard_error, null.value, null.standard_error))


def _add_shapes(table: HeadTable, info: SiteInfo, results: SiteReading) -> None:
    """Spreads over tokens, and means in bins of position and of visible keys."""
    for name, spread in results.attention.spreads.items():
        value = spread.value()
        table.add(info, f"{name}/spread", Estimate(value, np.full_like(value, np.nan), spread.count()))
    for name, ratio, index in results.attention.bins():
        table.add(info, name, _row(ratio, index))


def _add_climb_controls(table: HeadTable, info: SiteInfo, climb: ClimbStatistics) -> None:
    for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
        name = f"{mover}_{part}"
        own = _row(climb.steps, (kind, index))
        if not np.any(own.count > 0):
            continue
        _against(table, info, name, own, "random", _row(climb.random, (min(kind, 1), index)))
        if mover == "own_write" and paired(part):
            mean, deviation, number = climb.mismatched(part)
            table.add(info, f"{name}/mismatched", Estimate(mean, deviation, np.asarray(own.count)))
            p = two_sided_p(own.value, own.standard_error, mean, deviation, np.full(info.heads, number))
            table.test(info, name, p)


def _add_maps(table: HeadTable, info: SiteInfo, results: SiteReading) -> None:
    maps = results.maps
    if maps is None:
        return
    heads = info.heads
    exact, once = np.zeros(heads), np.ones(heads)
    for name, found in maps.values.items():
        values = found.numpy()
        own = values if values.ndim == 1 else np.diag(values).copy()
        table.add(info, name, Estimate(own, exact, once))
        if values.ndim == 2:  # a head's write with another's score: the control
            table.add(info, f"{name}/rotation", Estimate(exact, np.full(heads, maps.rotation_deviation), once))
            mean, deviation, number = other_heads(values)
            table.add(info, f"{name}/mismatched", Estimate(mean, deviation, np.full(heads, float(number))))
            table.test(info, name, two_sided_p(own, exact, mean, deviation, np.full(heads, number)))


def layer_table(reading: Reading, control: Reading | None, wanted: frozenset[str]) -> TableBuilder:
    """Every row of the layers' table, sublayer by sublayer in the order of the stream; of a change also its halves."""
    builder = TableBuilder()
    for source in (reading, control):
        if source is None:
            continue
        names = wanted - source.left_out()
        for sublayer in source.tracer.sublayers:
            if sublayer.index not in source.expansion.sublayers:
                continue
            for part in ("estimate", "first_half", "second_half") if source is reading else ("estimate",):
                suffix = "" if source is reading else "/reinitialised"
                suffix = suffix if part == "estimate" else f"/{part}"
                for name, *cell in source.expansion.results(sublayer.index, part):
                    asked = name in STATISTICS or part == "estimate"
                    if asked and name.partition("/")[0] in names and cell[-1] > 0:
                        builder.add(sublayer.name, sublayer.layer, name + suffix, *cell)
    return builder
