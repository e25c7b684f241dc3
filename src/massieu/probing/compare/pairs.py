"""Two results compared: whether their errors are paired, and a row for each statistic of each head."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from massieu.errors import InputError, require_extra
from massieu.probing.compare.difference import (
    Difference,
    HeadEstimates,
    alone,
    independent,
    paired,
    same_units,
)
from massieu.probing.result.long_table import schema
from massieu.probing.result.result import ProbeResult
from massieu.probing.statistics.registry import SAMPLED
from massieu.probing.sums.significance import benjamini_hochberg
from massieu.probing.sums.units import Units
from massieu.storage.record import Statistic

if TYPE_CHECKING:
    import polars

PLACE = ("scope", "site", "layer", "head", "statistic")
NUMBERS = ("first", "second", "difference", "standard_error", "degrees", "p_value", "q_value")
COLUMNS = ("model", *PLACE, *NUMBERS)
EXACT = "maps"
"""The group of statistics that are computed from the weights alone: their differences have no error and no test."""


@dataclass(frozen=True)
class Pairing:
    """Whether errors are paired, and a sentence that says why."""

    paired: bool
    sentence: str


def pairing(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> Pairing:
    """Whether the errors of two results can be paired.

    Raises:
        InputError: two different models were read on different texts, so that the text may be what differs.
    """
    one, other = names
    if any(result.run.settings.get("generate") for result in (first, second)):
        raise InputError(
            f"{one} and {other} cannot be compared: each read what it wrote itself (generate), not one text"
        )
    digests = [None if result.units is None else result.units.text for result in (first, second)]
    if None not in digests and digests[0] == digests[1]:
        return Pairing(True, f"{one} and {other} read the same windows, and their errors are paired")
    if None not in digests:
        hashes = {result.run.model.hash for result in (first, second)}
        if len(hashes) == 1 and None not in hashes:
            return Pairing(
                False, f"{one} and {other} are one model on two texts, and their errors are taken as independent"
            )
        raise InputError(
            f"{one} and {other} are two models that read different texts, so what differs may be the text; probe both on "
            "the same text with the same tokenizer, window, limit and fill_windows"
        )
    without_digest = " and ".join(name for name, digest in zip(names, digests, strict=True) if digest is None)
    if _text_of_record(first) != _text_of_record(second):
        raise InputError(
            f"{one} and {other} cannot be compared: nothing shows that they read the same text ({without_digest}: no digest "
            "of it was stored), and their records name different texts"
        )
    return Pairing(
        False,
        f"no sums by unit of the text were stored for {without_digest}, so the errors are taken as independent, which is "
        "on the careful side",
    )


def _text_of_record(result: ProbeResult) -> tuple[Any, ...]:
    """The entries of a record by which its text can be recognised without a digest."""
    text = result.run.text
    return text.source, text.max_length, text.packing, text.tokens, text.windows


def check_shapes(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> None:
    """Check that each head of one model has its counterpart in the other.

    Raises:
        InputError: the models have different sites or numbers of heads.
    """
    first_heads = {site.name: site.heads for site in first.run.sites}
    second_heads = {site.name: site.heads for site in second.run.sites}
    if first_heads == second_heads:
        return
    site = next(site for site in (*first_heads, *second_heads) if first_heads.get(site) != second_heads.get(site))
    raise InputError(
        f"{names[0]} ({_size_of(first_heads)}) and {names[1]} ({_size_of(second_heads)}) have different shapes, so their heads "
        f"cannot be matched: {site} has {_heads_in_words(first_heads.get(site))} in one and "
        f"{_heads_in_words(second_heads.get(site))} in the other"
    )


def _size_of(heads: dict[str, int | None]) -> str:
    return f"{len(heads)} sites with {sum(filter(None, heads.values()))} heads"


def _heads_in_words(heads: int | None) -> str:
    return "no such site" if heads is None else f"{heads} heads"


@dataclass(frozen=True)
class _Key:
    """One statistic at one attention site, or at one sublayer."""

    scope: Literal["head", "layer"]
    site: str
    statistic: str


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of a table for one key: the heads of a site, or a sublayer."""

    layer: int | None
    heads: list[int | None]
    value: np.ndarray
    error: np.ndarray


def _cells(result: ProbeResult) -> dict[_Key, _Cells]:
    """The cells of both tables, without controls, halves and bins: those of heads first."""
    cells: dict[_Key, _Cells] = {}
    tables: tuple[tuple[Literal["head", "layer"], polars.DataFrame], ...] = (
        ("head", result.heads),
        ("layer", result.layers),
    )
    for scope, table in tables:
        statistics = table.filter(~table["statistic"].str.contains("/", literal=True))
        parts = statistics.partition_by("site", "statistic", as_dict=True, maintain_order=True)
        for (site, statistic), part in parts.items():
            cells[_Key(scope, str(site), str(statistic))] = _Cells(
                layer=part["layer"][0],
                heads=part["head"].to_list(),
                value=part["value"].cast(float).fill_null(np.nan).to_numpy(),
                error=part["standard_error"].cast(float).fill_null(np.nan).to_numpy(),
            )
    return cells


def differences(
    first: ProbeResult, second: ProbeResult, pairing: Pairing, names: tuple[str, str]
) -> tuple["polars.DataFrame", list[str]]:
    """A row for each statistic of each head and sublayer that both results have, and sentences about what is missing."""
    statistics = {statistic.name: statistic for result in (first, second) for statistic in result.run.statistics}
    untested = {name for name, statistic in statistics.items() if statistic.gauge_dependent or statistic.group == EXACT}
    rows: list[dict[str, Any]] = []
    # Dictionaries without values: they keep the order, and each entry once.
    missing: dict[tuple[str, str], None] = {}
    unpaired: dict[str, None] = {}
    first_cells = _cells(first)
    second_cells = _cells(second)
    # As in the tables: heads before sublayers, those of the first result before those that only the second has.
    keys = [key for scope in ("head", "layer") for key in {**first_cells, **second_cells} if key.scope == scope]
    for key in keys:
        one = first_cells.get(key)
        other = second_cells.get(key)
        if one is None or other is None or one.heads != other.heads:
            missing[key.statistic, names[1] if one is None else names[0]] = None
            continue
        difference, is_paired = _difference((first, second), (one, other), key, pairing)
        if pairing.paired and not is_paired and key.statistic not in untested:
            unpaired[key.statistic] = None
        p_value = np.full(len(one.heads), np.nan) if key.statistic in untested else difference.p_value()
        rows += _rows(key, one, other, difference, p_value)
    notes = [f"{statistic} was measured in {name} alone" for statistic, name in missing]
    if unpaired:
        notes.append(
            f"errors are taken as independent for {', '.join(unpaired)}: sums by unit are missing, or of different windows"
        )
    return _with_q_values(rows, names[1]), notes


def _difference(
    results: tuple[ProbeResult, ProbeResult], cells: tuple[_Cells, _Cells], key: _Key, pairing: Pairing
) -> tuple[Difference, bool]:
    """The difference and its error, and whether the error is paired."""
    first, second = results
    place = (key.scope, key.site, key.statistic)
    first_sums = None if first.units is None else first.units.sums.get(place)
    second_sums = None if second.units is None else second.units.sums.get(place)
    sampled = key.scope == "layer" or key.statistic in _sampled(first)
    units = Units("document" if first.run.text.packing is False else "window", sampled=sampled)
    if first_sums is not None and second_sums is not None and first_sums.totals.shape[1] == len(cells[0].heads):
        if pairing.paired and same_units(first_sums, second_sums):
            return paired(first_sums, second_sums, units), True
        return independent(alone(first_sums, units), alone(second_sums, units)), False
    # Without sums by unit, the errors of the tables, with the degrees of freedom of the whole run.
    estimates = []
    for result, side in zip(results, cells, strict=True):
        degrees = (result.run.sample if sampled else result.run.error_unit).degrees or 0.0
        estimates.append(HeadEstimates(side.value, side.error, np.full(len(side.heads), degrees)))
    return independent(*estimates), False


def _rows(
    key: _Key, one: _Cells, other: _Cells, difference: Difference, p_value: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Rows of the table, without q-values, which need all of them."""
    for place, head in enumerate(one.heads):
        yield {
            "scope": key.scope,
            "site": key.site,
            "layer": one.layer,
            "head": head,
            "statistic": key.statistic,
            "first": float(one.value[place]),
            "second": float(other.value[place]),
            "difference": float(other.value[place] - one.value[place]),
            "standard_error": float(difference.standard_error[place]),
            "degrees": float(difference.degrees[place]),
            "p_value": float(p_value[place]),
            "q_value": np.nan,
        }


def large(table: "polars.DataFrame", statistics: Iterable[Statistic]) -> np.ndarray:
    """Rows that differ by the smallest effect of their statistic or more; every row of a statistic without one."""
    by_name = {statistic.name: statistic for statistic in statistics}
    first_values = table["first"].fill_null(np.nan).to_list()
    second_values = table["second"].fill_null(np.nan).to_list()
    return np.array(
        [
            name not in by_name or bool(by_name[name].matters(second, first))
            for name, first, second in zip(table["statistic"], first_values, second_values, strict=True)
        ],
        dtype=bool,
    )


def difference_schema() -> dict[str, Any]:
    """The types of the columns of ``differences.parquet``."""
    polars = require_extra("polars", "probe")
    long_table_types = schema()
    texts = dict.fromkeys(("model", "scope"), polars.String)
    places = {name: long_table_types[name] for name in PLACE if name in long_table_types}
    return texts | places | dict.fromkeys(NUMBERS, polars.Float64)


def _with_q_values(rows: list[dict[str, Any]], model: str) -> "polars.DataFrame":
    """The table; one family of q-values holds all statistics of all heads of the model, another those of its sublayers."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["scope"], []).append(row)
    for family in families.values():
        q_values = benjamini_hochberg(np.array([row["p_value"] for row in family]))
        for row, q_value in zip(family, q_values, strict=True):
            row["q_value"] = float(q_value)
    polars = require_extra("polars", "probe")
    frame = polars.DataFrame([{"model": model} | row for row in rows], schema=difference_schema(), orient="row")
    return frame.with_columns(polars.col(*NUMBERS).fill_nan(None))


def _sampled(result: ProbeResult) -> set[str]:
    """The statistics that were measured on the sampled windows; in records of earlier versions, only their group shows it."""
    return {statistic.name for statistic in result.run.statistics if statistic.sampled or statistic.group in SAMPLED}
