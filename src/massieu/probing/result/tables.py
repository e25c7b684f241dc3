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
"""A control's values, and the p-values against it."""


@dataclass(frozen=True, eq=False)
class _Test:
    """The heads of a site (or a sublayer) beside random ones and beside controls of their own."""

    place: RowPlace
    estimate: Estimate
    random: BesideRandom | None
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
        estimate: Estimate,
        random: BesideRandom | None,
        nulls: Sequence[Null],
    ) -> None:
        """Add a test of a site (or a sublayer), unless there is nothing to compare it with."""
        if random is not None or nulls:
            self._tests.setdefault(name, []).append(_Test(place, estimate, random, nulls))

    def results(self) -> Iterator[tuple[RowPlace, str, np.ndarray, np.ndarray]]:
        """Place, statistic, p-values and q-values of each test that has a p-value.

        The q-values are of a family of tests: one statistic at all places, or all statistics that answer one question.
        """
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
    """The p-values of one statistic, site by site, against its own controls and random models, whichever there are."""
    # The tails of the random models' law are estimated over all sites together, so these p-values are made at once.
    random_p_values = iter(with_their_tails([test.random for test in tests if test.random is not None]))
    p_values = []
    for test in tests:
        nulls = list(test.nulls)
        if test.random is not None:
            nulls.append((test.random.centre, next(random_p_values)))
        p_values.append(both(test.estimate.value, nulls))
    return p_values


def _law(random: BesideRandom, count: np.ndarray) -> Estimate:
    """The control's row: mean and standard deviation of one more random head's number."""
    return Estimate(random.centre, random.deviation, count)


def arrangement_of(info: SiteInfo) -> Arrangement:
    """Which heads of a site may be exchanged for each other."""
    # Heads that share a key head form a cluster; where they do not divide evenly, each head is its own.
    clusters = info.key_heads if info.heads % info.key_heads == 0 else info.heads
    return Arrangement(clusters, info.apart)


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
        """Every row of a wanted statistic that has a number, with its controls, p-values and q-values.

        Args:
            draws: the re-initialised control.
            wanted: statistics by name; rows of others are left out.
            arrangements: by an attention site's name, which of its heads may be exchanged.
        """
        tables = cls(TableBuilder(), TableBuilder())
        measured = [row for row in rows if row.statistic in wanted and np.any(row.estimate.count > 0)]
        for row in sorted(measured, key=lambda row: (row.place.scope, row.place.order)):
            tables._add(row.place, row.name, row.estimate)
        for scope in ("head", "layer"):
            tables._add_tests([row for row in measured if row.place.scope == scope], wanted, draws, arrangements)
        return tables

    def _add(self, place: RowPlace, name: str, estimate: Estimate) -> None:
        if place.scope == "head":
            self.heads.add(place.name, place.layer, name, estimate.value, estimate.standard_error, estimate.count)
        else:
            value, error, count = (float(numbers[0]) for numbers in estimate)
            self.layers.add(place.name, place.layer, name, value, error, count)

    def _add_tests(
        self,
        rows: Sequence[Row],
        statistics: Mapping[str, Statistic],
        draws: RandomModels | None,
        arrangements: Mapping[str, Arrangement],
    ) -> None:
        """Add p- and q-values of the rows of one scope, against controls of their own and random models."""
        tests = Tests(statistics)
        controls = {(row.place, row.statistic): row for row in rows if row.part == statistics[row.statistic].control}
        tested = [row for row in rows if not row.part and _is_tested(statistics[row.statistic])]
        beside_random = _beside_random(tested, statistics, draws, arrangements)
        for row in tested:
            control = controls.get((row.place, row.statistic))
            nulls = [] if control is None else [_null(row, control)]
            random = beside_random.get((row.place, row.statistic))
            if random is not None:
                self._add(row.place, f"{row.statistic}/reinitialised", _law(random, row.estimate.count))
            tests.add(row.statistic, row.place, row.estimate, random, nulls)
        for place, name, p_values, q_values in tests.results():
            self._add(place, f"{name}/p_value", _without_error(p_values))
            self._add(place, f"{name}/q_value", _without_error(q_values))


def _without_error(values: np.ndarray) -> Estimate:
    """Numbers that have no standard error; each finite one counts as one entry."""
    return Estimate(values, np.full_like(values, np.nan), np.isfinite(values).astype(float))


def _is_tested(statistic: Statistic) -> bool:
    return statistic.control is not None and not statistic.gauge_dependent


def _beside_random(
    rows: Iterable[Row],
    statistics: Mapping[str, Statistic],
    draws: RandomModels | None,
    arrangements: Mapping[str, Arrangement],
) -> dict[tuple[RowPlace, str], BesideRandom]:
    """The rows that random models have numbers of, by place and statistic; alike sites are compared at once."""
    alike: dict[tuple[str, Arrangement, tuple[int, ...]], list[tuple[Row, np.ndarray]]] = {}
    for row in rows:
        numbers = _of_random_models(draws, row)
        if numbers is not None:
            arrangement = arrangements.get(row.place.name, Arrangement(1))
            alike.setdefault((row.statistic, arrangement, numbers.shape), []).append((row, numbers))
    found: dict[tuple[RowPlace, str], BesideRandom] = {}
    for (name, arrangement, _), sites in alike.items():
        estimates = [row.estimate for row, _ in sites]
        compared = BesideRandom.of(estimates, [numbers for _, numbers in sites], statistics[name], arrangement)
        found |= {(row.place, name): beside for (row, _), beside in zip(sites, compared, strict=True)}
    return found


def _of_random_models(draws: RandomModels | None, row: Row) -> np.ndarray | None:
    """A row's statistic in each random model, (draws, heads); None where fewer than two models have it."""
    if draws is None:
        return None
    if row.place.scope == "head":
        return draws.of_head(row.place.name, row.statistic)
    return draws.of_layer(row.place.name, row.statistic)


def _null(row: Row, control: Row) -> Null:
    """A control's values, and the p-values against it."""
    if control.p_value is not None:
        return control.estimate.value, control.p_value
    left = row.estimate
    right = control.estimate
    p = difference_p(left.value, left.standard_error, left.degrees, right.value, right.standard_error, right.degrees)
    return right.value, p


def values(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """The numbers by scope, place and statistic, of which the law of random models is made."""
    by_scope: dict[str, dict[str, dict[str, np.ndarray]]] = {"head": {}, "layer": {}}
    for row in rows:
        if not row.part and np.isfinite(row.estimate.value).any():
            numbers = np.array(row.estimate.value, dtype=np.float64)
            by_scope[row.place.scope].setdefault(row.place.name, {})[row.statistic] = numbers
    return by_scope


def unit_sums(ratios: Iterable[RunningRatio], wanted: frozenset[str]) -> dict[Key, SiteSums]:
    """The sums of the statistics that are wanted and were measured."""
    sums: dict[Key, SiteSums] = {}
    for place, name, ratio, index in ratios:
        if name not in wanted:
            continue
        site_sums = _sums_at(ratio, index)
        if (site_sums.counts > 0).any():
            sums[place.scope, place.name, name] = site_sums
    return sums


def _sums_at(ratio: Ratio, index: Any) -> SiteSums:
    """A copy of the sums of all blocks, (blocks, …), at one index of what stands behind the blocks."""
    totals, counts, rows = block_sums(ratio)
    trailing = index if isinstance(index, tuple) else (index,)
    entries = (slice(None), *trailing)
    return SiteSums(totals[entries].copy(), counts[entries].copy(), rows.copy())
