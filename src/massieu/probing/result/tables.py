"""From running results to the two tables: values, controls, halves of the text, and tests against the controls."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from massieu.probing.capture.sites import SiteInfo
from massieu.probing.reading.reading import Reading
from massieu.probing.reading.site_reading import SiteReading
from massieu.probing.replaced.effect import head_rows
from massieu.probing.result.long_table import TableBuilder
from massieu.probing.statistics.climb import MOVERS, PARTS, paired
from massieu.probing.statistics.expansion import CHANGES
from massieu.probing.statistics.extremes import EXTREMES
from massieu.probing.statistics.layer_groups import Row
from massieu.probing.statistics.registry import ASKED, STATISTICS
from massieu.probing.statistics.repeated import NAMES
from massieu.probing.sums.accumulate import Ratio, block_sums
from massieu.probing.sums.comparisons import Arrangement, BesideRandom, RandomModels, both, with_their_tails
from massieu.probing.sums.significance import benjamini_hochberg, difference_p, other_heads, two_sided_p
from massieu.probing.sums.unit_sums import Key, SiteSums
from massieu.probing.sums.units import FEWEST_UNITS, Estimate
from massieu.report.record import ReplacementRecord, Sublayer


class HeadTable:
    """Collects the heads' rows and, at the end, the tests over all heads of the model."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.builder = TableBuilder()
        self.wanted = wanted
        self.tests = Tests()

    def add(self, info: SiteInfo, name: str, found: Estimate) -> None:
        if name.partition("/")[0] in self.wanted and np.any(found.count > 0):
            self.builder.add(info.site.name, info.layer, name, found.value, found.standard_error, found.count)

    def compare(
        self, info: SiteInfo, name: str, own: Estimate, draws: RandomModels | None, nulls: Sequence["Null"] = ()
    ) -> None:
        """Test a site's heads against controls of their own, and against the random heads of the draws."""
        if name not in self.wanted or STATISTICS[name].gauge_dependent:
            return
        compared = None
        numbers = None if draws is None else draws.of_head(info.site.name, name)
        if numbers is not None:
            compared = BesideRandom.of(own, numbers, STATISTICS[name], arrangement_of(info))
            self.add(info, f"{name}/reinitialised", _law(compared, own.count))
        self.tests.add(name, (info.site.name, info.layer), own, compared, nulls)

    def add_tests(self) -> None:
        """The p-values, and the q-values over all heads of a statistic (or of a question)."""
        for place, name, p, q in self.tests.results():
            for part, found in (("p_value", p), ("q_value", q)):
                self.builder.add(*place, f"{name}/{part}", found, None, np.isfinite(found))


Null = tuple[np.ndarray, np.ndarray]
"""Of a control: its values, and the p-values against it."""


@dataclass(frozen=True, eq=False)
class _Test:
    place: tuple[str, int | None]
    own: Estimate
    compared: BesideRandom | None
    nulls: Sequence[Null]


class Tests:
    """The tests of all heads, or of all sublayers, statistic by statistic."""

    def __init__(self) -> None:
        self._tests: dict[str, list[_Test]] = {}

    def add(
        self,
        name: str,
        place: tuple[str, int | None],
        own: Estimate,
        compared: BesideRandom | None,
        nulls: Sequence[Null],
    ) -> None:
        """A site (or a sublayer) beside what it is compared with, if there is anything."""
        if compared is not None or nulls:
            self._tests.setdefault(name, []).append(_Test(place, own, compared, nulls))

    def results(self) -> Iterator[tuple[tuple[str, int | None], str, np.ndarray, np.ndarray]]:
        """Place, statistic, p-values and q-values; the statistics that answer one question are one family."""
        families: dict[str, list[tuple[str, _Test, np.ndarray]]] = {}
        for name, tests in self._tests.items():
            group = STATISTICS[name].group
            family = families.setdefault(group if group in ASKED else name, [])
            family += [(name, test, p) for test, p in zip(tests, _p_values(tests), strict=True)]
        for family in families.values():
            adjusted = benjamini_hochberg(np.concatenate([p for _, _, p in family]))
            ends = np.cumsum([len(p) for _, _, p in family])[:-1]
            for (name, test, p), q in zip(family, np.split(adjusted, ends), strict=True):
                if np.isfinite(p).any():
                    yield test.place, name, p, q


def _p_values(tests: Sequence[_Test]) -> list[np.ndarray]:
    """Of one statistic, site by site: against its own controls and against random models, whichever there are."""
    random = iter(with_their_tails([test.compared for test in tests if test.compared is not None]))
    found = []
    for test in tests:
        nulls = list(test.nulls)
        if test.compared is not None:
            nulls.append((test.compared.centre, next(random)))
        found.append(both(test.own.value, nulls))
    return found


def _law(compared: BesideRandom, count: np.ndarray) -> Estimate:
    """The control's row: mean and standard deviation of one more random head's number."""
    return Estimate(compared.centre, compared.deviation, count)


def arrangement_of(info: SiteInfo) -> Arrangement:
    """Which heads of a site may be exchanged for each other."""
    return Arrangement(info.key_heads if info.heads % info.key_heads == 0 else info.heads, info.apart)


def head_table(
    reading: Reading,
    draws: RandomModels | None,
    wanted: frozenset[str],
    replacements: Sequence[ReplacementRecord] = (),
) -> TableBuilder:
    """Every row of the heads' table; ``draws`` are the re-initialised control."""
    table = HeadTable(wanted)
    for info, results in zip(reading.sites, reading.results, strict=True):
        nulls = _own_controls(table, info, results)
        for name, (ratio, index) in ratios(results).items():
            own = _row(ratio, index)
            table.add(info, name, own)
            for half in ("first_half", "second_half"):
                table.add(info, f"{name}/{half}", _row(ratio, index, half))
            if STATISTICS[name].control == "reinitialised" or name in nulls:
                table.compare(info, name, _tested(ratio, own), draws, nulls.get(name, ()))
        _add_shapes(table, info, results)
        _add_maps(table, info, results, draws)
        for name, found in head_rows(info, replacements):
            table.add(info, name, found)
        if results.copying is not None:
            copying = results.copying.numpy()
            table.add(info, "copying_score", Estimate(copying, np.zeros(info.heads), np.ones(info.heads)))
    table.add_tests()
    return table.builder


def head_values(results: SiteReading) -> dict[str, np.ndarray]:
    """The numbers of a site's heads by statistic: those that the law of random heads is made of."""
    found = {name: ratio.value()[index] for name, (ratio, index) in ratios(results).items()}
    if results.maps is not None:
        found |= {name: _diagonal(values.numpy()) for name, values in results.maps.values.items()}
    return {name: np.array(values, dtype=np.float64) for name, values in found.items() if np.isfinite(values).any()}


def _diagonal(values: np.ndarray) -> np.ndarray:
    return values if values.ndim == 1 else np.diag(values).copy()


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
    found = getattr(ratio, part)()
    return Estimate(*(each[index] for each in found), degrees=np.asarray(found.degrees)[index])


def _tested(ratio: Ratio, own: Estimate) -> Estimate:
    """The estimate for a test: from too few units of text nothing is announced."""
    enough = ratio.error_unit()[1] >= FEWEST_UNITS
    return own if enough else replace(own, degrees=np.zeros_like(own.value))


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


def _own_controls(table: HeadTable, info: SiteInfo, results: SiteReading) -> dict[str, list[Null]]:
    """The controls of a site that are other windows or other heads' writes: their rows, and p-values against them."""
    found: dict[str, list[Null]] = {}
    for statistics in results.windowed.values():
        for name, place, control in statistics.rows():
            if control is not None:
                own, null = _row(statistics.ratio, place), _row(statistics.ratio, control)
                table.add(info, f"{name}/{STATISTICS[name].control}", null)
                found[name] = [(null.value, _difference_p(_tested(statistics.ratio, own), null))]
    climb = results.climb
    for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
        name = f"{mover}_{part}"
        own, null = _row(climb.steps, (kind, index)), _row(climb.random, (min(kind, 1), index))
        if not np.any(own.count > 0):
            continue
        table.add(info, f"{name}/random", null)
        own = _tested(climb.steps, own)
        if STATISTICS[name].control == "random":
            found[name] = [(null.value, _difference_p(own, null))]
        if mover == "own_write" and paired(part):
            mean, deviation, number = climb.mismatched(part)
            table.add(info, f"{name}/mismatched", Estimate(mean, deviation, np.asarray(own.count)))
            p = two_sided_p(own.value, own.standard_error, mean, deviation, np.full(info.heads, number), own.degrees)
            found[name] = [(mean, p)]
    return found


def _difference_p(own: Estimate, null: Estimate) -> np.ndarray:
    return difference_p(own.value, own.standard_error, own.degrees, null.value, null.standard_error, null.degrees)


def _add_maps(table: HeadTable, info: SiteInfo, results: SiteReading, draws: RandomModels | None) -> None:
    maps = results.maps
    if maps is None:
        return
    heads = info.heads
    exact, once = np.zeros(heads), np.ones(heads)
    for name, found in maps.values.items():
        values = found.numpy()
        own = Estimate(_diagonal(values), exact, once, np.full(heads, np.inf))
        table.add(info, name, own)
        if values.ndim == 2:  # a head's write with another's score: the control
            table.add(info, f"{name}/rotation", Estimate(exact, np.full(heads, maps.rotation_deviation), once))
            mean, deviation, number = other_heads(values)
            table.add(info, f"{name}/mismatched", Estimate(mean, deviation, np.full(heads, float(number))))
            p = two_sided_p(own.value, exact, mean, deviation, np.full(heads, number), own.degrees)
            table.compare(info, name, own, draws, [(mean, p)])


class LayerTable(TableBuilder):
    """Collects the layers' rows and, at the end, the tests over all sublayers of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._cells: dict[str, dict[tuple[str, int | None], Estimate]] = {}

    def add_row(self, sublayer: Sublayer, row: Row, part: str = "") -> None:
        """Add one row, of a part of the text or a control if one is named."""
        name, value, error, count, degrees = row
        place = sublayer.name, sublayer.layer
        self.add(*place, name + part, value, error, count)
        numbers = (np.array([float(each)]) for each in (value, error, count, degrees))
        self._cells.setdefault(name + part, {})[place] = Estimate(*numbers)

    def add_tests(self, draws: RandomModels | None) -> None:
        """The p-values, and the q-values over all sublayers of a statistic (or of a question)."""
        tests = Tests()
        for name, cells in list(self._cells.items()):
            if name not in STATISTICS or STATISTICS[name].gauge_dependent or STATISTICS[name].control is None:
                continue
            controls = self._cells.get(f"{name}/{STATISTICS[name].control}", {})
            for place, own in cells.items():
                nulls = [(null.value, _difference_p(own, null))] if (null := controls.get(place)) is not None else []
                numbers = None if draws is None else draws.of_layer(place[0], name)
                compared = None
                if numbers is not None:
                    compared = BesideRandom.of(own, numbers, STATISTICS[name], Arrangement(1))
                    law = _law(compared, own.count)
                    self.add(*place, f"{name}/reinitialised", *(float(each[0]) for each in law))
                if compared is not None or STATISTICS[name].control != "reinitialised":
                    tests.add(name, place, own, compared, nulls)
        for place, name, p, q in tests.results():
            for part, found in (("p_value", p), ("q_value", q)):
                self.add(*place, f"{name}/{part}", float(found[0]), None, 1)


def layer_table(reading: Reading, draws: RandomModels | None, wanted: frozenset[str]) -> TableBuilder:
    """Every row of the layers' table, sublayer by sublayer in the order of the stream; of a change also its halves."""
    table = LayerTable()
    for sublayer in reading.tracer.sublayers:
        for part in ("estimate", "first_half", "second_half"):
            suffix = "" if part == "estimate" else f"/{part}"
            for group in reading.layers.groups():
                for row in group.rows(sublayer.index, part):
                    if row[0].partition("/")[0] in wanted:
                        table.add_row(sublayer, row, suffix)
            for row in expansion_rows(reading, sublayer, part):
                if (row[0] in STATISTICS or part == "estimate") and row[0].partition("/")[0] in wanted:
                    table.add_row(sublayer, row, suffix)
    table.add_tests(draws)
    return table


def expansion_rows(reading: Reading, sublayer: Sublayer, part: str = "estimate") -> Iterator[Row]:
    """Of the expansion, where it was counted."""
    if sublayer.index in reading.expansion.sublayers:
        yield from (row for row in reading.expansion.results(sublayer.index, part) if row[3] > 0)


def layer_values(reading: Reading, sublayer: Sublayer) -> dict[str, np.ndarray]:
    """The numbers of a sublayer by statistic: those that the law of random models is made of."""
    rows = [row for group in reading.layers.groups() for row in group.rows(sublayer.index, "estimate")]
    rows += expansion_rows(reading, sublayer)
    return {name: np.array([value]) for name, value, *_ in rows if name in STATISTICS and np.isfinite(value)}


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
