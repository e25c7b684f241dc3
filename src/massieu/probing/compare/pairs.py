"""Two results beside each other: whether their errors are paired, and a row for each statistic of each head."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from massieu.errors import InputError, require_extra
from massieu.probing.compare.difference import Difference, alone, independent, paired, same_units
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
"""The group of statistics that are computed from the weights alone: their differences have no error, and no test."""


@dataclass(frozen=True)
class Pairing:
    """Whether errors are paired, and why in a sentence."""

    paired: bool
    sentence: str


def pairing(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> Pairing:
    """How the errors of two results stand to each other.

    Raises:
        InputError: two different models were read on different texts: what differs may be the text.
    """
    one, other = names
    if any(result.run.settings.get("generate") for result in (first, second)):
        raise InputError(
            f"{one} and {other} cannot be compared: each read what it wrote itself (generate), not one text"
        )
    digests = [None if result.units is None else result.units.text for result in (first, second)]
    if None not in digests and digests[0] == digests[1]:
        return Pairing(True, f"{one} and {other} read the same windows, and their errors are paired")
    known = {result.run.model.hash for result in (first, second)}
    if None not in digests:
        if len(known) == 1 and None not in known:
            said = "are one model on two texts, and their errors are taken as independent"
            return Pairing(False, f"{one} and {other} {said}")
        raise InputError(
            f"{one} and {other} are two models that read different texts, so what differs may be the text; probe both on "
            "the same text with the same tokenizer, window, limit and fill_windows"
        )
    lacking = " and ".join(name for name, digest in zip(names, digests, strict=True) if digest is None)
    if _said_of_text(first) != _said_of_text(second):
        raise InputError(
            f"{one} and {other} cannot be compared: nothing shows that they read the same text ({lacking}: no digest of it "
            "was stored), and their records name different texts"
        )
    said = f"no sums by unit of the text were stored for {lacking}"
    return Pairing(False, f"{said}, so the errors are taken as independent, which is on the careful side")


def _said_of_text(result: ProbeResult) -> tuple[Any, ...]:
    text = result.run.text
    return text.source, text.max_length, text.packing, text.tokens, text.windows


def check_shapes(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> None:
    """That each head of one has its fellow in the other.

    Raises:
        InputError: the models have different sites or numbers of heads.
    """
    shapes = [{site.name: site.heads for site in result.run.sites} for result in (first, second)]
    if shapes[0] == shapes[1]:
        return
    odd = next(site for site in (*shapes[0], *shapes[1]) if shapes[0].get(site) != shapes[1].get(site))
    each = [f"{heads} heads" if (heads := shape.get(odd)) is not None else "no such site" for shape in shapes]
    sizes = [f"{len(shape)} sites with {sum(filter(None, shape.values()))} heads" for shape in shapes]
    raise InputError(
        f"{names[0]} ({sizes[0]}) and {names[1]} ({sizes[1]}) have different shapes, so their heads cannot be matched: "
        f"{odd} has {each[0]} in one and {each[1]} in the other"
    )


@dataclass(frozen=True, eq=False)
class _Cells:
    """The heads of one site, or one sublayer, for one statistic."""

    layer: int | None
    heads: list[int | None]
    value: np.ndarray
    error: np.ndarray


def _cells(frame: "polars.DataFrame") -> dict[tuple[str, str], _Cells]:
    """By site and statistic, without controls, halves and bins."""
    own = frame.filter(~frame["statistic"].str.contains("/", literal=True))
    found = {}
    for (site, statistic), part in own.partition_by("site", "statistic", as_dict=True, maintain_order=True).items():
        numbers = (part[name].cast(float).fill_null(np.nan).to_numpy() for name in ("value", "standard_error"))
        found[str(site), str(statistic)] = _Cells(part["layer"][0], part["head"].to_list(), *numbers)
    return found


def differences(
    first: ProbeResult, second: ProbeResult, how: Pairing, names: tuple[str, str]
) -> tuple["polars.DataFrame", list[str]]:
    """A row for each statistic of each head and sublayer that both results have; and what only one of them has, in words."""
    said = {each.name: each for result in (first, second) for each in result.run.statistics}
    untested = {name for name, each in said.items() if each.gauge_dependent or each.group == EXACT}
    rows: list[dict[str, Any]] = []
    missing: dict[tuple[str, str], None] = {}
    unlike: dict[str, None] = {}
    for scope, (ours, theirs) in (("head", (first.heads, second.heads)), ("layer", (first.layers, second.layers))):
        one, other = _cells(ours), _cells(theirs)
        for key in {**one, **other}:
            if key not in one or key not in other or one[key].heads != other[key].heads:
                missing[key[1], names[0] if key in one else names[1]] = None
                continue
            found, matched = _difference((first, second), (one[key], other[key]), (scope, *key), how)
            if how.paired and not matched and key[1] not in untested:
                unlike[key[1]] = None
            p = np.full(len(one[key].heads), np.nan) if key[1] in untested else found.p_value()
            rows += _rows(scope, key, one[key], other[key], found, p)
    notes = [f"{statistic} was measured in {name} alone" for statistic, name in missing]
    if unlike:
        notes.append(
            f"errors are taken as independent for {', '.join(unlike)}: sums by unit are missing, or of different windows"
        )
    return _with_q_values(rows, names[1]), notes


def _difference(
    results: tuple[ProbeResult, ProbeResult], cells: tuple[_Cells, _Cells], key: tuple[str, str, str], how: Pairing
) -> tuple[Difference, bool]:
    """The difference and its error, and whether it is paired."""
    sums = [None if result.units is None else result.units.sums.get(key) for result in results]
    sampled = key[0] == "layer" or key[2] in _sampled(results[0])
    units = Units("document" if results[0].run.text.packing is False else "window", sampled=sampled)
    if sums[0] is not None and sums[1] is not None and sums[0].totals.shape[1] == len(cells[0].heads):
        if how.paired and same_units(sums[0], sums[1]):
            return paired(sums[0], sums[1], units), True
        return independent(*alone(sums[0], units), *alone(sums[1], units)), False
    sides = []
    for result, each in zip(results, cells, strict=True):
        degrees = (result.run.sample if sampled else result.run.error_unit).degrees or 0.0
        sides += [each.value, each.error, np.full(len(each.heads), degrees)]
    return independent(*sides), False


def _rows(
    scope: str, key: tuple[str, str], one: _Cells, other: _Cells, found: Difference, p: np.ndarray
) -> Iterator[dict[str, Any]]:
    for place, head in enumerate(one.heads):
        numbers = (one.value, other.value, other.value - one.value, found.standard_error, found.degrees, p)
        values = [*(float(each[place]) for each in numbers), np.nan]
        where: tuple[Any, ...] = (scope, key[0], one.layer, head, key[1])
        yield dict(zip((*PLACE, *NUMBERS), (*where, *values), strict=True))


def large(table: "polars.DataFrame", statistics: Iterable[Statistic]) -> np.ndarray:
    """Which rows differ by the smallest effect of their statistic or more; any difference of one that declares none."""
    by_name = {each.name: each for each in statistics}
    numbers = (table[name].fill_null(np.nan).to_list() for name in ("first", "second"))
    return np.array(
        [
            name not in by_name or bool(by_name[name].matters(second, first))
            for name, first, second in zip(table["statistic"], *numbers, strict=True)
        ],
        dtype=bool,
    )


def difference_schema() -> dict[str, Any]:
    """The types of the columns of ``differences.parquet``."""
    polars = require_extra("polars", "probe")
    known = schema()
    texts = dict.fromkeys(("model", "scope"), polars.String)
    places = {name: known[name] for name in PLACE if name in known}
    return texts | places | dict.fromkeys(NUMBERS, polars.Float64)


def _with_q_values(rows: list[dict[str, Any]], model: str) -> "polars.DataFrame":
    """The table; q-values are of all heads, or sublayers, of the model and of all statistics together."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["scope"], []).append(row)
    for family in families.values():
        for row, q in zip(family, benjamini_hochberg(np.array([row["p_value"] for row in family])), strict=True):
            row["q_value"] = float(q)
    polars = require_extra("polars", "probe")
    frame = polars.DataFrame([{"model": model} | row for row in rows], schema=difference_schema(), orient="row")
    return frame.with_columns(polars.col(*NUMBERS).fill_nan(None))


def _sampled(result: ProbeResult) -> set[str]:
    """The statistics that were measured on the sampled windows; records of earlier versions say their group alone."""
    return {each.name for each in result.run.statistics if each.sampled or each.group in SAMPLED}
