"""From running results to the two tables: values, controls, halves of the text, and q-values against the controls."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from massieu.probing.accumulate import Ratio, block_sums
from massieu.probing.long_table import TableBuilder
from massieu.probing.reading import Reading
from massieu.probing.replaced.effect import head_rows
from massieu.probing.significance import benjamini_hochberg, difference_p, other_heads, two_sided_p
from massieu.probing.site_reading import SiteReading
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.climb import MOVERS, PARTS, ClimbStatistics, paired
from massieu.probing.statistics.expansion import CHANGES
from massieu.probing.statistics.extremes import EXTREMES
from massieu.probing.statistics.layer_groups import LayerGroup
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.statistics.repeated import NAMES
from massieu.probing.unit_sums import Key, SiteSums
from massieu.probing.units import Estimate
from massieu.report.record import ReplacementRecord, Sublayer


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


def head_table(
    reading: Reading,
    control: Reading | None,
    wanted: frozenset[str],
    replacements: Sequence[ReplacementRecord] = (),
) -> TableBuilder:
    """Every row of the heads' table; ``control`` is the same reading of the re-initialised copy."""
    table = HeadTable(wanted)
    for info, results in zip(reading.sites, reading.results, strict=True):
        fresh = {} if control is None else ratios(control.results[info.index])
        for name, (ratio, index) in ratios(results).items():
            own = _row(ratio, index)
            table.add(info, name, own)
            for half in ("first_half", "second_half"):
                table.add(info, f"{name}/{half}", _row(ratio, index, half))
            if control is not None and name not in control.left_out():
                _against(table, info, name, own, "reinitialised", _row(*fresh[name]))
        _add_windowed(table, info, results)
        _add_shapes(table, info, results)
        _add_climb_controls(table, info, results.climb)
        _add_maps(table, info, results)
        for name, found in head_rows(info, replacements):
            table.add(info, name, found)
        if results.copying is not None:
            copying = results.copying.numpy()
            table.add(info, "copying_score", Estimate(copying, np.zeros(info.heads), np.ones(info.heads)))
    table.add_q_values()
    return table.builder


def ratios(results: SiteReading) -> dict[str, tuple[Ratio, Any]]:
    """Every ratio per head by its name: an accumulator, and which of its rows."""
    attention = results.attention
    found: dict[str, tuple[Ratio, Any]] = {name: (attention.ratio, i) for i, name in enumerate(attention.names)}
    found |= {"first_value_norm_ratio": (results.first_value, 0), "write_norm_ratio": (results.climb.write_norm, 0)}
    for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
        found[f"{mover}_{part}"] = (results.climb.steps, (kind, index))
    for statistics in results.windowed.values():
        found |= {name: (statistics.ratio, own) for name, own, _ in statistics.rows()}
    if results.repeated is not None:
        found |= {name: (results.repeated.ratio, index) for index, name in enumerate(NAMES)}
    return found


def _row(ratio: Ratio, index: Any, part: Literal["estimate", "first_half", "second_half"] = "estimate") -> Estimate:
    return Estimate(*(each[index] for each in getattr(ratio, part)()))


def _against(table: HeadTable, info: SiteInfo, name: str, own: Estimate, control: str, null: Estimate) -> None:
    """The control's row, and the test against it where it is the one that the statistic is compared with."""
    table.add(info, f"{name}/{control}", null)
    if STATISTICS[name].control == control and not STATISTICS[name].gauge_dependent:
        table.test(info, name, difference_p(own.value, own.standard_error, null.value, null.standard_error))


def _add_shapes(table: HeadTable, info: SiteInfo, results: SiteReading) -> None:
    """Spreads over tokens, means in bins of position and of visible keys, and extremes."""
    for name, spread in results.attention.spreads.items():
        value = spread.value()
        table.add(info, f"{name}/spread", Estimate(value, np.full_like(value, np.nan), spread.count()))
    for name, ratio, index in results.attention.bins():
        table.add(info, name, _row(ratio, index))
    counts = dict(zip(results.attention.names, results.attention.ratio.estimate().count, strict=True))
    for row, (name, end) in enumerate(EXTREMES):
        value = results.extremes.value(row)
        table.add(info, f"{name}/{end}", Estimate(value, np.full_like(value, np.nan), counts[name]))


def _add_windowed(table: HeadTable, info: SiteInfo, results: SiteReading) -> None:
    """The controls of the statistics that have one of their own."""
    for statistics in results.windowed.values():
        for name, own, control in statistics.rows():
            if control is not None:
                found, null = _row(statistics.ratio, own), _row(statistics.ratio, control)
                _against(table, info, name, found, STATISTICS[name].control or "", null)


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


class LayerTable(TableBuilder):
    """Collects the layers' rows and, at the end, the q-values over all sublayers of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._cells: dict[str, dict[tuple[str, int | None], tuple[float, float]]] = {}

    def add(self, site: str, layer: int | None, statistic: str, value: Any, standard_error: Any, count: Any) -> None:
        """Add one row."""
        super().add(site, layer, statistic, value, standard_error, count)
        error = float("nan") if standard_error is None else float(standard_error)
        self._cells.setdefault(statistic, {})[site, layer] = (float(value), error)

    def add_q_values(self) -> None:
        """Benjamini–Hochberg over all sublayers, one family for each statistic that has a control."""
        for name, own in list(self._cells.items()):
            null = self._cells.get(f"{name}/{STATISTICS[name].control}", {}) if name in STATISTICS else {}
            places = [place for place in own if place in null]
            if not places or STATISTICS[name].gauge_dependent:
                continue
            (values, errors), (others, other_errors) = (np.array([each[p] for p in places]).T for each in (own, null))
            p_values = difference_p(values, errors, others, other_errors)
            for place, q in zip(places, benjamini_hochberg(p_values), strict=True):
                if np.isfinite(q):
                    super().add(*place, f"{name}/q_value", float(q), None, 1)


def layer_table(reading: Reading, control: Reading | None, wanted: frozenset[str]) -> TableBuilder:
    """Every row of the layers' table, sublayer by sublayer in the order of the stream; of a change also its halves."""
    builder = LayerTable()
    for source in (reading, control):
        if source is None:
            continue
        names = wanted - source.left_out()
        for sublayer in source.tracer.sublayers:
            for group in source.layers.groups():
                _add_group(builder, sublayer, group, names, own=source is reading)
            if sublayer.index not in source.expansion.sublayers:
                continue
            for part in ("estimate", "first_half", "second_half") if source is reading else ("estimate",):
                suffix = "" if source is reading else "/reinitialised"
                suffix = suffix if part == "estimate" else f"/{part}"
                for name, *cell in source.expansion.results(sublayer.index, part):
                    asked = name in STATISTICS or part == "estimate"
                    if asked and name.partition("/")[0] in names and cell[-1] > 0:
                        builder.add(sublayer.name, sublayer.layer, name + suffix, *cell)
    builder.add_q_values()
    return builder


def _add_group(
    builder: TableBuilder, sublayer: Sublayer, found: LayerGroup, wanted: frozenset[str], *, own: bool
) -> None:
    """The rows of a group about layers; of the re-initialised copy its values alone."""
    for part in ("estimate", "first_half", "second_half") if own else ("estimate",):
        for name, *cell in found.rows(sublayer.index, part):
            if name.partition("/")[0] in wanted and (own or "/" not in name):
                suffix = "" if own and part == "estimate" else f"/{part}" if own else "/reinitialised"
                builder.add(sublayer.name, sublayer.layer, name + suffix, *cell)


def unit_sums(reading: Reading, wanted: frozenset[str]) -> dict[Key, SiteSums]:
    """The sums of the statistics that are wanted and were measured."""
    found: dict[Key, SiteSums] = {}
    for info, results in zip(reading.sites, reading.results, strict=True):
        for name, (ratio, index) in ratios(results).items():
            if name in wanted:
                found |= _kept(("head", info.site.name, name), ratio, index)
    for sublayer in reading.tracer.sublayers:
        for index, change in enumerate(CHANGES):
            ratio = reading.expansion.sublayers.get(sublayer.index)
            if ratio is not None and change.__name__ in wanted:
                found |= _kept(("layer", sublayer.name, change.__name__), ratio, (index, slice(2, 3)))
    return found


def _kept(key: Key, ratio: Ratio, index: Any) -> dict[Key, SiteSums]:
    totals, counts, rows = block_sums(ratio)
    place = (slice(None), *(index if isinstance(index, tuple) else (index,)))
    kept = SiteSums(totals[place].copy(), counts[place].copy(), rows.copy())
    return {key: kept} if (kept.counts > 0).any() else {}
