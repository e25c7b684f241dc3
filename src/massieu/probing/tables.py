"""From running results to the two tables: values, controls, halves of the text, and q-values against the controls."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from massieu.probing.accumulate import Ratio
from massieu.probing.long_table import TableBuilder
from massieu.probing.reading import Reading, SiteResults
from massieu.probing.significance import benjamini_hochberg, difference_p, other_heads, two_sided_p
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.attention import PER_QUERY
from massieu.probing.statistics.climb import MOVERS, PARTS, ClimbStatistics, paired
from massieu.probing.statistics.expansion import CHANGES
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
        twin = None if control is None else control.results[info.index]
        for name, pick in _estimates(results):
            found = pick(results)
            table.add(info, name, found.estimate)
            for half, estimate in (("first_half", found.first), ("second_half", found.second)):
                table.add(info, f"{name}/{half}", estimate)
            if twin is not None and control is not None and name not in control.left_out():
                _against_reinitialised(table, info, name, found.estimate, pick(twin).estimate)
        _add_shapes(table, info, results)
        _add_climb_controls(table, info, results.climb)
        _add_maps(table, info, results)
    table.add_q_values()
    return table.builder


class _Halves:
    """One row of an accumulator: the whole text and its two halves."""

    def __init__(self, ratio: Ratio, index: int | tuple[int, ...]) -> None:
        whole, first, second = ratio.estimate(), ratio.first_half(), ratio.second_half()
        self.estimate, self.first, self.second = (
            Estimate(e.value[index], e.standard_error[index], e.count[index]) for e in (whole, first, second)
        )


def _estimates(results: SiteResults) -> Iterator[tuple[str, Callable[[SiteResults], _Halves]]]:
    """Names of all per-head ratios, with a function that takes each from any site's results."""
    for index, name in enumerate(PER_QUERY):
        yield name, lambda r, i=index: _Halves(r.attention.ratio, i)
    yield "first_value_norm_ratio", lambda r: _Halves(r.first_value, 0)
    yield "write_norm_ratio", lambda r: _Halves(r.climb.write_norm, 0)
    for place in itertools.product(range(len(MOVERS)), range(len(PARTS))):
        yield f"{MOVERS[place[0]]}_{PARTS[place[1]]}", lambda r, i=place: _Halves(r.climb.steps, i)


def _against_reinitialised(table: HeadTable, info: SiteInfo, name: str, own: Estimate, fresh: Estimate) -> None:
    table.add(info, f"{name}/reinitialised", fresh)
    if STATISTICS[name].control == "reinitialised" and not STATISTICS[name].gauge_dependent:
        table.test(info, name, difference_p(own.value, own.standard_error, fresh.value, fresh.standard_error))


def _add_shapes(table: HeadTable, info: SiteInfo, results: SiteResults) -> None:
    """Spreads over tokens, and means in bins of position and of visible keys."""
    for name, spread in results.attention.spreads.items():
        value = spread.value()
        table.add(info, f"{name}/spread", Estimate(value, np.full_like(value, np.nan), spread.count()))
    for name, ratio, index in results.attention.bins():
        table.add(info, name, _Halves(ratio, index).estimate)


def _add_climb_controls(table: HeadTable, info: SiteInfo, climb: ClimbStatistics) -> None:
    for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
        name = f"{mover}_{part}"
        own = _Halves(climb.steps, (kind, index)).estimate
        if not np.any(own.count > 0):
            continue
        random = _Halves(climb.random, (min(kind, 1), index)).estimate
        table.add(info, f"{name}/random", random)
        if STATISTICS[name].control == "random" and not STATISTICS[name].gauge_dependent:
            p = difference_p(own.value, own.standard_error, random.value, random.standard_error)
            table.test(info, name, p)
        if mover == "own_write" and paired(part):
            mean, deviation, number = climb.mismatched(part)
            table.add(info, f"{name}/mismatched", Estimate(mean, deviation, np.asarray(own.count)))
            p = two_sided_p(own.value, own.standard_error, mean, deviation, np.full(info.heads, number))
            table.test(info, name, p)


def _add_maps(table: HeadTable, info: SiteInfo, results: SiteResults) -> None:
    maps = results.maps
    if maps is None:
        return
    heads = info.heads
    exact, once = np.zeros(heads), np.ones(heads)
    cosine = maps.cosine.numpy()
    own = np.diag(cosine).copy()
    table.add(info, "write_score_cosine", Estimate(own, exact, once))
    rotation = np.full(heads, maps.rotation_deviation)
    table.add(info, "write_score_cosine/rotation", Estimate(exact, rotation, once))
    mean, deviation, number = other_heads(cosine)
    table.add(info, "write_score_cosine/mismatched", Estimate(mean, deviation, np.full(heads, float(number))))
    table.test(info, "write_score_cosine", two_sided_p(own, exact, mean, deviation, np.full(heads, number)))
    symmetric = maps.symmetric_share.numpy()
    table.add(info, "symmetric_share", Estimate(symmetric, exact, once))
    table.add(info, "antisymmetric_share", Estimate(1 - symmetric, exact, once))


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
                    asked = name in CHANGES or part == "estimate"
                    if asked and name.partition("/")[0] in names and cell[-1] > 0:
                        builder.add(sublayer.name, sublayer.layer, name + suffix, *cell)
    return builder
