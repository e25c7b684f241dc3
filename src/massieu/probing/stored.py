"""What ``run.json`` and ``details.json`` may hold, checked before anything is made of them.

Files are edited, cut off and mixed up. Each check names the entry and what it has to be. Keys that are not listed here may
hold anything; a listed key may be missing unless it is needed.
"""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from massieu.errors import InputError

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
    """A JSON object without numbers or nesting that nothing could be done with.

    Raises:
        InputError: it is none; ``where`` is the file's name.
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
    """Depth and size of everything; without recursion."""
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

# A description is a type; (description, None) where null may stand for it; [description] of a list's items; a function that
# raises; or an object's names with a description each, "!" after those that must be there, `...` for any name.
Description = Any
_KINDS: dict[type, tuple[str, set[type]]] = {
    str: ("a text", {str}),
    bool: ("true or false", {bool}),  # which are no numbers
    int: ("a whole number, at least 0", {int}),
    float: ("a number", {int, float}),
    list: ("a list", {list}),
    dict: ("an object", {dict}),
}


def _check(value: Any, description: Description, where: str) -> None:
    if isinstance(description, tuple):
        if value is not None:
            _check(value, description[0], where)
    elif isinstance(description, list):
        _check(value, list, where)
        for place, item in enumerate(value):
            _check(item, description[0], f"{where}[{place}]")
    elif isinstance(description, dict):
        _check(value, dict, where)
        known = {name if name is ... else name.removesuffix("!"): each for name, each in description.items()}
        for name in known:
            if name not in description and name not in value:  # listed with "!"
                raise InputError(f"{where} lacks {name!r}")
        for name, item in value.items():
            if (expected := known.get(name, known.get(...))) is not None:
                _check(item, expected, f"{where}{' ' if where.endswith(':') else '.'}{_short(name)}")
    elif description not in _KINDS:
        description(value, where)
    else:
        said, kinds = _KINDS[description]
        if type(value) not in kinds or (description is int and not 0 <= value <= LARGEST):
            raise InputError(f"{where} must be {said}, not {_short(value)}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- run.json --------------------------------------------------------------------------------------------------------


def _all(kind: type, names: str) -> dict[str, Description]:
    """Entries of one kind, each of which may be null."""
    return dict.fromkeys(names.split(), (kind, None))


def _pair(value: Any, where: str) -> None:
    if type(value) is not list or len(value) != 2 or {type(each) for each in value} != {int}:
        raise InputError(f"{where} must be a layer and a head, not {_short(value)}")


_FINDING = (
    {"id!": str, "title!": str, "sentence!": str, "heads": ([_pair], None)}
    | _all(float, "value standard_error")
    | _all(str, "unit control caveat statistic")
    | _all(int, "count")
)
_SITE = (
    {"name!": str, "layer!": int, "index": int, "unavailable": ({...: str}, None)}
    | _all(str, "kind query_tokens key_tokens")
    | _all(int, "heads")
)
_STATISTIC = (
    {"name!": str, "title": str}
    | _all(str, "scope group unit formula claim paper control question caveat cost")
    | _all(bool, "headline gauge_dependent signed")
)
_MODEL = _all(str, "name! architecture hash weights missing_weights unexpected_weights")
_MODEL |= _all(int, "layers! heads! parameters")
_SOURCE = _all(str, "source! dropped") | _all(int, "tokens! windows! max_length") | _all(float, "unknown_share")
_RUN = {
    "complete!": bool,
    "findings!": [_FINDING],
    "model": (_MODEL, None),
    "text": (_SOURCE, None),
    "error_unit": (_all(str, "unit!") | _all(int, "count!"), None),
    "self_check": (_all(float, "error! tolerance!") | _all(bool, "passed finite"), None),
    "capture": (_all(str, "route") | _all(int, "attention_sites") | {"unexplained_keywords": ([str], None)}, None),
    "sample": (_all(int, "windows queries"), None),
    "sites": ([_SITE], None),
    "sublayers": ([{"index!": int, "name!": str, "layer!": (int, None), "kind!": str}], None),
    **_all(dict, "settings versions timing"),
    "statistics": ([_STATISTIC], None),
    "warnings": ([str], None),
    "trouble": ({"sentence!": str} | _all(str, "what first"), None),
    "unavailable": ([{"of!": str, "statistic!": str, "reason!": str}], None),
    "nonfinite": ([{"site!": str, "count!": int, "layer!": (int, None), "head!": (int, None)}], None),
    "files": {...: str},
    **_all(str, "massieu_version date"),
}


def check_run(run: dict[str, Any], where: str) -> None:
    """That every entry of a record is what the page and the result take it for.

    Raises:
        InputError: an entry is not; ``where`` is the file's name.
    """
    _check(run, _RUN, f"{where}:")
    indices = [site["index"] for site in run.get("sites") or [] if "index" in site]
    twice = next((index for index in indices if indices.count(index) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: two attention sites have the index {twice}")


# --- details.json ----------------------------------------------------------------------------------------------------


def _rows(value: Any, where: str) -> None:
    if type(value) is not list or not value or any(type(row) is not list for row in value):
        raise InputError(f"{where} must be a list of lists, not {_short(value)}")


def _matrix(value: Any, where: str) -> None:
    """Rows of numbers, all of one length; null where a number is undefined."""
    _rows(value, where)
    for place, row in enumerate(value):
        if not set(map(type, row)) <= {int, float, type(None)}:
            raise InputError(f"{where}[{place}] must be a list of numbers, not {_short(row)}")
        if len(row) != len(value[0]):
            raise InputError(f"{where}[{place}] has {len(row)} numbers, but the first row {len(value[0])}")


def _histogram(value: Any, where: str) -> None:
    _check(value, {"edges!": [float], "counts!": {...: _matrix}}, where)
    bins = len(value["edges"]) - 1
    for site, counts in value["counts"].items():
        for row in counts:
            if len(row) != bins or bins < 1 or any(count is None or not 0 <= count < LARGEST for count in row):
                raise InputError(f"{where}.counts.{_short(site)} must have {max(bins, 1)} counts for each head")


def _strongest(value: Any, where: str) -> None:
    """For each head and query some keys, the strongest first."""
    _rows(value, where)
    for head in value:
        for row in head:
            if type(row) is not list or not set(map(type, row)) <= {int, float, type(None)}:
                raise InputError(f"{where} must hold a list of numbers for each query, not {_short(row)}")


_SHADES = ("selective_log_partition", "entropy")
_STRONGEST = ("top_keys", "top_weights")


def _shown(value: Any, where: str) -> None:
    """One attention site in an example: numbers of each head and query."""
    _check(value, dict.fromkeys(_SHADES, _matrix) | dict.fromkeys(_STRONGEST, _strongest), where)
    keys, weights = (value.get(name) for name in _STRONGEST)
    shapes = [[len(row) for row in value[name]] for name in (*_SHADES, *_STRONGEST) if name in value]
    if any(shape != shapes[0] for shape in shapes) or (keys is None) != (weights is None):
        raise InputError(f"{where}: {', '.join((*_SHADES, *_STRONGEST))} must be of the same heads and queries")
    for head, its_weights in zip(keys or (), weights or (), strict=True):
        for row, shares in zip(head, its_weights, strict=True):
            if len(row) != len(shares) or any(key is not None and not _is_key(key) for key in row):
                raise InputError(f"{where}.top_keys must hold a key's place for each of its top_weights")


def _is_key(key: Any) -> bool:
    return type(key) is int and key < MOST_KEYS


_EXAMPLE = {"tokens!": {...: [str]}, "sites!": {...: _shown}, "title": (str, None)}
_DETAILS = {"histograms": ({...: _histogram}, None), "examples": ([_EXAMPLE], None)}


def check_details(details: dict[str, Any], where: str) -> None:
    """That histograms and examples have the shapes that the page takes for granted.

    Raises:
        InputError: one has not; ``where`` is the file's name.
    """
    _check(details, _DETAILS, f"{where}:")


def check_together(run: dict[str, Any], details: dict[str, Any], heads: "polars.DataFrame", where: str) -> None:
    """That the record, the details and the heads' table mean the same heads.

    Raises:
        InputError: a site has other numbers of heads in two of them; ``where`` is the folder's name.
    """
    measured = {
        site: head + 1 for site, head in heads.group_by("site").max().select("site", "head").rows() if head is not None
    }
    for site, number in measured.items():
        if number > MOST_HEADS:
            raise InputError(f"{where}: the heads' table has {number} heads at {_short(site)}, more than any model has")
    for place, site in enumerate(run.get("sites") or []):
        said = site.get("heads")
        number = measured.get(site["name"], said)
        if said is not None and (said != number or said > MOST_HEADS):
            raise InputError(
                f"{where}: run.json says {said} heads at {_short(site['name'])}, the heads' table {number}"
            )
        index = str(site.get("index", place))
        for part, shape in _parts(details, index):
            if len(shape) != (number or 0):
                raise InputError(
                    f"{where}: details.json has {len(shape)} heads at {_short(site['name'])} ({part}), not {number}"
                )


def _parts(details: dict[str, Any], index: str) -> Iterator[tuple[str, list[Any]]]:
    """Everything that the details hold of a site, by head."""
    for name, histogram in (details.get("histograms") or {}).items():
        if index in histogram["counts"]:
            yield f"the histogram of {_short(name)}", histogram["counts"][index]
    for example in details.get("examples") or []:
        for name, value in example["sites"].get(index, {}).items():
            if name in (*_SHADES, *_STRONGEST):
                yield name, value
