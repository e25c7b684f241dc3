"""What ``run.json`` and ``details.json`` may hold, checked before anything is made of them.

Files are edited, cut off and mixed up. Each check names the entry and what it has to be; what it may be is said by the
types of `RunRecord`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from massieu.errors import InputError
from massieu.storage.record import NEEDED, Entry, RunRecord

if TYPE_CHECKING:
    import polars

DEEPEST = 24
"""Levels of lists and objects in a file: several times more than there are in one that was not edited."""
LARGEST = 2**53
"""Counts up to here are exact in every program that reads JSON."""
_LARGEST_SEED = 2**64
MOST_HEADS = 4096
"""Heads of one attention site: far more than any model has, and few enough to draw."""
MOST_KEYS = 2**31
"""Keys that one query may see: no text is as long."""


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a file, with finite numbers and a bounded depth.

    Raises:
        InputError: not a JSON object, or one with such numbers or too deep; ``where`` is the file's name.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except RecursionError as error:
        raise InputError(f"{where} cannot be read: it is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{where} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} holds no record of a run")
    _check_plain(value, where)
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_plain(value: Any, where: str) -> None:
    """Check the depth and the size of all numbers."""
    # Without recursion: a file may be nested more deeply than Python's stack.
    waiting = [(value, 1)]
    while waiting:
        container, depth = waiting.pop()
        if depth > DEEPEST:
            raise InputError(f"{where} cannot be read: it is nested too deeply")
        for item in container.values() if isinstance(container, dict) else container:
            kind = type(item)
            if kind is float:
                if not math.isfinite(item):
                    raise InputError(f"{where} cannot be read: it holds a number that is too large")
            elif kind is int:
                if abs(item) > _LARGEST_SEED:
                    raise InputError(f"{where} cannot be read: it holds a whole number that is too large")
            elif kind is dict or kind is list:
                waiting.append((item, depth + 1))


# --- what an entry may be --------------------------------------------------------------------------------------------

_KINDS: dict[type, tuple[str, set[type]]] = {
    str: ("a text", {str}),
    bool: ("true or false", {bool}),  # which are no numbers
    int: ("a whole number, at least 0", {int}),
    float: ("a number", {int, float}),
    list: ("a list", {list}),
    dict: ("an object", {dict}),
}


def _typed(value: Any, kind: Any, where: str) -> Any:
    """A JSON value, checked against a type: one of `_KINDS`, a pair, an `Entry`, any value, or one of these or None."""
    base = get_origin(kind) or kind
    inner = get_args(kind)
    if base is UnionType:
        return None if value is None else _typed(value, inner[0], where)
    if base is tuple:
        if type(value) is not list or len(value) != 2 or {type(each) for each in value} != {int}:
            raise InputError(f"{where} must be a layer and a head, not {_short(value)}")
        return tuple(value)
    if base is Any:
        return value
    if is_dataclass(base):
        return _entry(base, _typed(value, dict, where), where)
    description, kinds = _KINDS[base]
    if type(value) not in kinds or (base is int and not 0 <= value <= LARGEST):
        raise InputError(f"{where} must be {description}, not {_short(value)}")
    if base is list and inner:
        return [_typed(item, inner[0], f"{where}[{place}]") for place, item in enumerate(value)]
    if base is dict and inner:
        return {name: _typed(item, inner[1], _below(where, name)) for name, item in value.items()}
    return value


def _entry(kind: Any, value: dict[str, Any], where: str) -> Any:
    """An entry made of an object; where a field with a default is null or absent, it has its default."""
    hints = get_type_hints(kind)
    is_needed = {each.name: "needed" in each.metadata for each in fields(kind) if each.init}
    arguments = {}
    for name, needed in is_needed.items():
        if name not in value and needed:
            raise InputError(f"{where} lacks {name!r}")
        if needed or value.get(name) is not None:
            arguments[name] = _typed(value[name], hints[name], _below(where, name))
    entry = kind(**arguments)
    entry.others = {name: item for name, item in value.items() if name not in is_needed}
    return entry


def _below(where: str, name: str) -> str:
    return f"{where}{' ' if where.endswith(':') else '.'}{_short(name)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- run.json --------------------------------------------------------------------------------------------------------


def run_of(value: dict[str, Any], where: str) -> RunRecord:
    """The record of a run, with every entry checked against the type of its field.

    Raises:
        InputError: an entry has another type, or two sites one index; ``where`` is the file's name.
    """
    run = _typed(value, RunRecord, f"{where}:")
    indices = [site.index for site in run.sites if site.index is not None]
    repeated = next((index for index in indices if indices.count(index) > 1), None)
    if repeated is not None:
        raise InputError(f"{where}: two attention sites have the index {repeated}")
    return run


def hashes_of(value: dict[str, Any], where: str) -> dict[str, str] | None:
    """Remove the hashes of the other files from a record and return them; None where it has none.

    Raises:
        InputError: the entry does not hold hashes by name; ``where`` is the file's name.
    """
    if "files" not in value:
        return None
    return _typed(value.pop("files"), dict[str, str], f"{where}: files")


# --- details.json ----------------------------------------------------------------------------------------------------


@dataclass
class _Histogram(Entry):
    edges: list[float] = field(metadata=NEEDED)
    counts: dict[str, Any] = field(metadata=NEEDED)


@dataclass
class _StoredExample(Entry):
    tokens: dict[str, list[str]] = field(metadata=NEEDED)
    sites: dict[str, Any] = field(metadata=NEEDED)
    title: str | None = None


@dataclass
class _StoredExtreme(Entry):
    site: str = field(metadata=NEEDED)
    head: int = field(metadata=NEEDED)
    statistic: str = field(metadata=NEEDED)
    window: int = field(metadata=NEEDED)
    query: int = field(metadata=NEEDED)
    key: int = field(metadata=NEEDED)
    query_token: str | None = None
    key_token: str | None = None


@dataclass
class _Details(Entry):
    histograms: dict[str, Any] = field(default_factory=dict)
    examples: list[_StoredExample] = field(default_factory=list)
    extremes: list[_StoredExtreme] = field(default_factory=list)


def _rows(value: Any, where: str) -> None:
    """Check that a value is a list of lists, at least one."""
    if type(value) is not list or not value or any(type(row) is not list for row in value):
        raise InputError(f"{where} must be a list of lists, not {_short(value)}")


def _matrix(value: Any, where: str) -> None:
    """Check rows of numbers, all of one length; an undefined number is null."""
    _rows(value, where)
    for place, row in enumerate(value):
        if not set(map(type, row)) <= {int, float, type(None)}:
            raise InputError(f"{where}[{place}] must be a list of numbers, not {_short(row)}")
        if len(row) != len(value[0]):
            raise InputError(f"{where}[{place}] has {len(row)} numbers, but the first row {len(value[0])}")


def _histogram(value: Any, where: str) -> None:
    """Check that a histogram has a count of each head for each bin."""
    histogram = _typed(value, _Histogram, where)
    bins = len(histogram.edges) - 1
    for site, counts in histogram.counts.items():
        _matrix(counts, _below(f"{where}.counts", site))
        for row in counts:
            if len(row) != bins or bins < 1 or any(count is None or not 0 <= count < LARGEST for count in row):
                raise InputError(f"{where}.counts.{_short(site)} must have {max(bins, 1)} counts for each head")


def _strongest(value: Any, where: str) -> None:
    """Check lists of numbers, one for each head and query: the strongest keys first, or their weights."""
    _rows(value, where)
    for head in value:
        for row in head:
            if type(row) is not list or not set(map(type, row)) <= {int, float, type(None)}:
                raise InputError(f"{where} must hold a list of numbers for each query, not {_short(row)}")


_SHADES = ("selective_log_partition", "entropy")
_STRONGEST = ("top_keys", "top_weights")


def _shown(value: Any, where: str) -> None:
    """Check one attention site in an example: numbers of each head and query."""
    for name, item in _typed(value, dict, where).items():
        if name in (*_SHADES, *_STRONGEST):
            (_matrix if name in _SHADES else _strongest)(item, _below(where, name))
    keys = value.get("top_keys")
    weights = value.get("top_weights")
    shapes = [[len(row) for row in value[name]] for name in (*_SHADES, *_STRONGEST) if name in value]
    if any(shape != shapes[0] for shape in shapes) or (keys is None) != (weights is None):
        raise InputError(f"{where}: {', '.join((*_SHADES, *_STRONGEST))} must be of the same heads and queries")
    for keys_of_head, weights_of_head in zip(keys or (), weights or (), strict=True):
        for query_keys, query_weights in zip(keys_of_head, weights_of_head, strict=True):
            positions_only = all(key is None or _is_key(key) for key in query_keys)
            if len(query_keys) != len(query_weights) or not positions_only:
                raise InputError(f"{where}.top_keys must hold a key's place for each of its top_weights")


def _is_key(key: Any) -> bool:
    return type(key) is int and key < MOST_KEYS


def check_details(details: dict[str, Any], where: str) -> None:
    """Check that histograms and examples have the shapes that the page needs.

    Raises:
        InputError: one has another shape; ``where`` is the file's name.
    """
    typed_details = _typed(details, _Details, f"{where}:")
    for name, histogram in typed_details.histograms.items():
        _histogram(histogram, _below(f"{where}: histograms", name))
    for place, example in enumerate(typed_details.examples):
        for name, shown in example.sites.items():
            _shown(shown, _below(f"{where}: examples[{place}].sites", name))


def check_together(run: RunRecord, details: dict[str, Any], heads: "polars.DataFrame", where: str) -> None:
    """Check that the record, the details and the heads' table mean the same heads.

    Raises:
        InputError: a site has another layer or other numbers of heads in two of them; ``where`` is the folder's name.
    """
    last_heads = heads.group_by("site").max().select("site", "head").rows()
    heads_in_table = {site: head + 1 for site, head in last_heads if head is not None}
    for site, number in heads_in_table.items():
        if number > MOST_HEADS:
            raise InputError(f"{where}: the heads' table has {number} heads at {_short(site)}, more than any model has")
    layers = dict(heads.select("site", "layer").unique().rows())
    for place, site in enumerate(run.sites):
        layer = layers.get(site.name, site.layer)
        if layer != site.layer:
            raise InputError(
                f"{where}: run.json says layer {site.layer} of {_short(site.name)}, the heads' table {layer}"
            )
        recorded = site.heads
        number = heads_in_table.get(site.name, recorded)
        if recorded is not None and (recorded != number or recorded > MOST_HEADS):
            raise InputError(
                f"{where}: run.json says {recorded} heads at {_short(site.name)}, the heads' table {number}"
            )
        index = str(place if site.index is None else site.index)
        for part, by_head in _parts(details, index):
            if len(by_head) != (number or 0):
                raise InputError(
                    f"{where}: details.json has {len(by_head)} heads at {_short(site.name)} ({part}), not {number}"
                )


def _parts(details: dict[str, Any], index: str) -> Iterator[tuple[str, list[Any]]]:
    """Each entry of the details about one site, in words, and its list with an item for each head."""
    for name, histogram in (details.get("histograms") or {}).items():
        if index in histogram["counts"]:
            yield f"the histogram of {_short(name)}", histogram["counts"][index]
    for example in details.get("examples") or []:
        for name, value in example["sites"].get(index, {}).items():
            if name in (*_SHADES, *_STRONGEST):
                yield name, value
