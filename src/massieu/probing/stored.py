"""What ``run.json`` and ``details.json`` may hold, checked before anything is made of them.

Files are edited, cut off and mixed up. Each check names the entry and what it has to be. Keys that are not listed here may
hold anything; a listed key may be missing unless it is needed.
"""

import json
import math
from collections.abc import Callable, Iterator
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

Check = Callable[[Any, str], None]


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


# --- a small language of checks --------------------------------------------------------------------------------------


def _kind(said: str, *types: type) -> Check:
    def check(value: Any, where: str) -> None:
        # Not isinstance: true and false are no numbers.
        if type(value) not in types:
            raise InputError(f"{where} must be {said}, not {_short(value)}")

    return check


def _whole(value: Any, where: str) -> None:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise InputError(f"{where} must be a whole number, at least 0, not {_short(value)}")


_TEXT = _kind("a text", str)
_FLAG = _kind("true or false", bool)
_NUMBER = _kind("a number", int, float)
_WHOLE: Check = _whole


def _maybe(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _many(check: Check) -> Check:
    def every(value: Any, where: str) -> None:
        if type(value) is not list:
            raise InputError(f"{where} must be a list, not {_short(value)}")
        for place, item in enumerate(value):
            check(item, f"{where}[{place}]")

    return every


def _named(check: Check | None = None) -> Check:
    def every(value: Any, where: str) -> None:
        if type(value) is not dict:
            raise InputError(f"{where} must be an object, not {_short(value)}")
        if check is not None:
            for name, item in value.items():
                check(item, _in(where, _short(name)))

    return every


def _record(needed: dict[str, Check], others: dict[str, Check] | None = None) -> Check:
    known = needed | (others or {})

    def fields(value: Any, where: str) -> None:
        _named()(value, where)
        for name in needed:
            if name not in value:
                raise InputError(f"{where} lacks {name!r}")
        for name, check in known.items():
            if name in value:
                check(value[name], _in(where, name))

    return fields


def _in(where: str, name: str) -> str:
    return f"{where}{' ' if where.endswith(':') else '.'}{name}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- run.json --------------------------------------------------------------------------------------------------------


def _texts(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _maybe(_TEXT))


def _wholes(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _maybe(_WHOLE))


def _numbers(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _maybe(_NUMBER))


def _flags(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _maybe(_FLAG))


def _pair(value: Any, where: str) -> None:
    _many(_kind("a whole number", int))(value, where)
    if len(value) != 2:
        raise InputError(f"{where} must be a layer and a head, not {_short(value)}")


_FINDING = _record(
    {"id": _TEXT, "title": _TEXT, "sentence": _TEXT},
    _numbers("value", "standard_error")
    | _texts("unit", "control", "caveat", "statistic")
    | _wholes("count")
    | {"heads": _maybe(_many(_pair))},
)
_SITE = _record(
    {"name": _TEXT, "layer": _WHOLE},
    _texts("kind", "query_tokens", "key_tokens")
    | _wholes("heads")
    | {"index": _WHOLE, "unavailable": _maybe(_named(_TEXT))},
)
_STATISTIC = _record(
    {"name": _TEXT},
    {"title": _TEXT}
    | _texts("scope", "group", "unit", "formula", "claim", "paper", "control", "question", "caveat", "cost")
    | _flags("headline", "gauge_dependent", "signed"),
)
_RUN = _record(
    {"complete": _FLAG, "findings": _many(_FINDING)},
    {
        "model": _maybe(
            _record(
                _texts("name") | _wholes("layers", "heads"),
                _texts("architecture", "hash", "weights", "missing_weights", "unexpected_weights") | _wholes("parameters"),
            )
        ),
        "text": _maybe(
            _record(
                _texts("source") | _wholes("tokens", "windows"),
                _texts("dropped") | _wholes("max_length") | _numbers("unknown_share"),
            )
        ),
        "error_unit": _maybe(_record(_texts("unit") | _wholes("count"))),
        "self_check": _maybe(_record(_numbers("error", "tolerance"), _flags("passed", "finite"))),
        "capture": _maybe(
            _record({}, _texts("route") | _wholes("attention_sites") | {"unexplained_keywords": _maybe(_many(_TEXT))})
        ),
        "sample": _maybe(_record({}, _wholes("windows", "queries"))),
        "sites": _maybe(_many(_SITE)),
        "sublayers": _maybe(
            _many(_record({"index": _WHOLE, "name": _TEXT, "layer": _maybe(_WHOLE), "kind": _TEXT}))
        ),
        "settings": _maybe(_named()),
        "versions": _maybe(_named()),
        "timing": _maybe(_named()),
        "statistics": _maybe(_many(_STATISTIC)),
        "warnings": _maybe(_many(_TEXT)),
        "trouble": _maybe(_record({"sentence": _TEXT}, _texts("what", "first"))),
        "unavailable": _maybe(_many(_record({"of": _TEXT, "statistic": _TEXT, "reason": _TEXT}))),
        "nonfinite": _maybe(
            _many(_record({"site": _TEXT, "count": _WHOLE, "layer": _maybe(_WHOLE), "head": _maybe(_WHOLE)}))
        ),
        "files": _named(_TEXT),
    }
    | _texts("massieu_version", "date"),
)  # fmt: skip


def check_run(run: dict[str, Any], where: str) -> None:
    """That every entry of a record is what the page and the result take it for.

    Raises:
        InputError: an entry is not; ``where`` is the file's name.
    """
    _RUN(run, f"{where}:")
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
    _record({"edges": _many(_NUMBER), "counts": _named(_matrix)})(value, where)
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


_SHADES: tuple[str, ...] = ("selective_log_partition", "entropy")
_STRONGEST: tuple[str, ...] = ("top_keys", "top_weights")


def _shown(value: Any, where: str) -> None:
    """One attention site in an example: numbers of each head and query."""
    matrices: dict[str, Check] = dict.fromkeys(_SHADES, _matrix)
    _record({}, matrices | dict.fromkeys(_STRONGEST, _strongest))(value, where)
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


_DETAILS = _record(
    {},
    {
        "histograms": _maybe(_named(_histogram)),
        "examples": _maybe(
            _many(_record({"tokens": _named(_many(_TEXT)), "sites": _named(_shown)}, {"title": _maybe(_TEXT)}))
        ),
    },
)


def check_details(details: dict[str, Any], where: str) -> None:
    """That histograms and examples have the shapes that the page takes for granted.

    Raises:
        InputError: one has not; ``where`` is the file's name.
    """
    _DETAILS(details, f"{where}:")


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
