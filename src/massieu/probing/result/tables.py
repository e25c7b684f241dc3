"""From rows to the two tables: values, controls, halves of the text, and tests against the controls."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from massieu.probing.capture.sites import SiteInfo
from massieu.probing.result.long_table import TableBuilder
from massieu.probing.statistics.group import Row, RowPlace, RunningRatio
from massieu.probing.statistics.registry import QUESTION_GROUPS
from massieu.probing.sums.accumulate import Ratio, block_sums
from massieu.probing.sums.comparisons import Arrangement, BesideRandom, RandomModels, both, with_their_tails
from massieu.probing.sums.significance import benjamini_hochberg, difference_p
from massieu.probing.sums.unit_sums import Key, SiteSums
from massieu.probing.sums.units import Estimate
from massieu.storage.record import Statistic

Null = tuple[np.ndarray, np.ndarray]
"""Of a control: its values, and the p-values against it."""


@dataclass(frozen=True, eq=False)
class _Test:
    place: RowPlace
    own: Estimate
    compared: BesideRandom | None
    nulls: Sequence[Null]


class Tests:
    """The tests of all heads, or of all sublayers, statistic by statistic."""

    def __init__(self, statistics: Mapping[str, Statistic]) -> None:
        self._statistics = statistics
        self._tests: dict[str, list[_Test]] = {}

    def add(
        self,
        name: str,
        place: RowPlace,
        own: Estimate,
        compared: BesideRandom | None,
        nulls: Sequence[Null],
    ) -> None:
        """A site (or a sublayer) beside what it is compared with, if there is anything."""
        if compared is not None or nulls:
            self._tests.setdefault(name, []).append(_Test(place, own, compared, nulls))

    def results(self) -> Iterator[tuple[RowPlace, str, np.ndarray, np.ndarray]]:
        """Place, statistic, p-values and q-values; the statistics that answer one question are one family."""
        families: dict[str, list[tuple[str, _Test, np.ndarray]]] = {}
        for name, tests in self._tests.items():
            group = self._statistics[name].group
            family = families.setdefault(group if group in QUESTION_GROUPS else name, [])
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


@dataclass(frozen=True, eq=False)
class Tables:
    """The rows of the heads' table and of the layers', sites and sublayers in the order of the model."""

    heads: TableBuilder
    layers: TableBuilder

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        draws: RandomModels | None,
        wanted: Mapping[str, Statistic],
        arrangements: Mapping[str, Arrangement],
    ) -> "Tables":
        """Every row that is wanted, with what it is compared with and the p- and q-values.

        Args:
            draws: the re-initialised control.
            wanted: the statistics that are, by name.
            arrangements: by an attention site's name, which of its heads may be exchanged.
        """
        found = cls(TableBuilder(), TableBuilder())
        known = [row for row in rows if row.statistic in wanted and np.any(row.estimate.count > 0)]
        for row in sorted(known, key=lambda row: (row.place.scope, row.place.order)):
            found._add(row.place, row.name, row.estimate)
        for scope in ("head", "layer"):
            found._add_tests([row for row in known if row.place.scope == scope], wanted, draws, arrangements)
        return found

    def _add(self, place: RowPlace, name: str, found: Estimate) -> None:
        if place.scope == "head":
            self.heads.add(place.name, place.layer, name, found.value, found.standard_error, found.count)
        else:
            value, error, count = (float(each[0]) for each in found)
            self.layers.add(place.name, place.layer, name, value, error, count)

    def _add_tests(
        self,
        rows: Sequence[Row],
        statistics: Mapping[str, Statistic],
        draws: RandomModels | None,
        arrangements: Mapping[str, Arrangement],
    ) -> None:
        """Test statistics against controls of their own and against random models; q-values over all of one scope."""
        tests = Tests(statistics)
        controls = {(row.place, row.statistic): row for row in rows if row.part == statistics[row.statistic].control}
        for row in rows:
            statistic = statistics[row.statistic]
            if row.part or statistic.control is None or statistic.gauge_dependent:
                continue
            control = controls.get((row.place, row.statistic))
            numbers, compared = _of_random_models(draws, row), None
            if numbers is not None:
                arrangement = arrangements.get(row.place.name, Arrangement(1))
                compared = BesideRandom.of(row.estimate, numbers, statistic, arrangement)
                self._add(row.place, f"{row.statistic}/reinitialised", _law(compared, row.estimate.count))
            tests.add(
                row.statistic, row.place, row.estimate, compared, [] if control is None else [_null(row, control)]
            )
        for place, name, p, q in tests.results():
            for part, found in (("p_value", p), ("q_value", q)):
                nothing = np.full_like(found, np.nan)
                self._add(place, f"{name}/{part}", Estimate(found, nothing, np.isfinite(found).astype(float)))


def _of_random_models(draws: RandomModels | None, row: Row) -> np.ndarray | None:
    if draws is None:
        return None
    of = draws.of_head if row.place.scope == "head" else draws.of_layer
    return of(row.place.name, row.statistic)


def _null(own: Row, control: Row) -> Null:
    """A control's values, and the p-values against it."""
    if control.p_value is not None:
        return control.estimate.value, control.p_value
    left, right = own.estimate, control.estimate
    p = difference_p(left.value, left.standard_error, left.degrees, right.value, right.standard_error, right.degrees)
    return right.value, p


def values(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """The numbers by scope, place and statistic: those that the law of random models is made of."""
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {"head": {}, "layer": {}}
    for row in rows:
        if not row.part and np.isfinite(row.estimate.value).any():
            numbers = np.array(row.estimate.value, dtype=np.float64)
            found[row.place.scope].setdefault(row.place.name, {})[row.statistic] = numbers
    return found


def unit_sums(ratios: Iterable[RunningRatio], wanted: frozenset[str]) -> dict[Key, SiteSums]:
    """The sums of the statistics that are wanted and were measured."""
    found: dict[Key, SiteSums] = {}
    for place, name, ratio, index in ratios:
        if name in wanted:
            found |= _kept((place.scope, place.name, name), ratio, index)
    return found


def _kept(key: Key, ratio: Ratio, index: Any) -> dict[Key, SiteSums]:
    totals, counts, rows = block_sums(ratio)
    place = (slice(None), *(index if isinstance(index, tuple) else (index,)))
    kept = SiteSums(totals[place].copy(), counts[place].copy(), rows.copy())
    return {key: kept} if (kept.counts > 0).any() else {}
