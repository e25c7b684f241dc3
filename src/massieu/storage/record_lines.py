"""The record of a training run as JSON lines: `massieu.Monitor` appends to it, and the page of curves reads it.

The first line is a header, ``{"massieu": version, "monitor": settings}``; each other line is one record,
``{"step": 100, "massieu/loss": 2.5, ...}``. JSON has no NaN and no infinity; the strings of `NOT_FINITE` stand for them.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from massieu.errors import InputError
from massieu.storage.writing import check_name, explaining

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
COMPARABLE = ("model", "layers", "heads", "batch")
"""Settings without which the numbers of two runs cannot be compared."""
_HEADER = b'{"massieu"'
_BEGINNINGS = (b'{"step"', _HEADER)
"""The beginnings of complete lines: a line that begins so and breaks off was cut when its process ended."""
_SHOWN = 40
"""Characters of a wrong line that an error quotes."""


@dataclass(frozen=True)
class TrainingRun:
    """The records of one run.

    Attributes:
        name: Name of its file, without the ending.
        settings: Those of the monitor; empty if the file has no header.
        records: The numbers of each step, by rising step.
        alarms: The keys in alarm, for each step that had one.
        notes: A sentence for each line that was left out.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    records: dict[int, dict[str, float]] = field(default_factory=dict)
    alarms: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """The prefix of its keys: that of the header, or else the most frequent one."""
        prefix = self.settings.get("prefix")
        if isinstance(prefix, str):
            return prefix
        prefixes = Counter(key.partition("/")[0] for record in self.records.values() for key in record if "/" in key)
        return prefixes.most_common(1)[0][0] if prefixes else ""

    def quantities(self) -> list[str]:
        """The keys without the prefix, in the order in which the records name them."""
        start = f"{self.prefix}/" if self.prefix else ""
        keys = dict.fromkeys(key for record in self.records.values() for key in record)
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def curve(self, quantity: str) -> dict[int, float]:
        """The numbers of a quantity, by step; steps without it are left out."""
        key = f"{self.prefix}/{quantity}" if self.prefix else quantity
        return {step: record[key] for step, record in self.records.items() if key in record}


def header_line(version: str, settings: Mapping[str, Any]) -> str:
    """The first line of a file."""
    return _line({"massieu": version, "monitor": dict(settings)})


def record_line(step: int, record: Mapping[str, float], alarms: Sequence[str] = ()) -> str:
    """The line of a record; ``alarms`` are the keys that are in alarm."""
    entries: dict[str, Any] = {"step": step, **record}
    if alarms:
        entries["alarms"] = list(alarms)
    return _line(entries)


def _line(value: Any) -> str:
    return json.dumps(_writable(value), allow_nan=False, separators=(",", ":")) + "\n"


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def differing(one: Mapping[str, Any], other: Mapping[str, Any], also: Sequence[str] = ()) -> str:
    """The differences of two monitors' settings that keep their numbers from being compared, as a phrase; "" if none."""
    other = json.loads(_line(other))  # As a file holds them, where a tuple is a list.
    names = [name for name in (*COMPARABLE, *also) if name in one and name in other and one[name] != other[name]]
    return ", ".join(f"{name} {one[name]} in place of {other[name]}" for name in names)


def is_record_of_monitor(path: Path) -> bool:
    """Whether a file begins with a monitor's header; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEADER)) == _HEADER
    except OSError:
        return False


def read_header(path: Path) -> dict[str, Any]:
    """The settings in a file's header; empty if it has none."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        return {}
    settings = header.get("monitor") if isinstance(header, dict) else None
    return settings if isinstance(settings, dict) else {}


def read_run(path: str | os.PathLike[str]) -> TrainingRun:
    """Read a run's records.

    If a run went back to an earlier step, its new records replace those from that step on. A line that was cut off when a
    process ended is left out, and a note says so.

    Raises:
        InputError: the file cannot be read, holds no record, or a line of it is no record.
    """
    path = check_name(path)
    run = TrainingRun(path.stem)
    with explaining(f"cannot read {path}"), path.open("rb") as file:
        lines = list(file)
    for number, line in enumerate(lines, 1):
        # A crash may leave zero bytes where lines were to be written.
        if not line.strip(b"\0\t\r\n "):
            continue
        try:
            entries = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            entries = None
            begins_a_line = line.startswith(_BEGINNINGS) or any(text.startswith(line.rstrip()) for text in _BEGINNINGS)
            if begins_a_line or (number == len(lines) and not line.endswith(b"\n")):
                run.notes.append(f"line {number} of {path.name} was cut off and is left out")
                continue
        if not isinstance(entries, dict):
            raise InputError(
                f"{path}, line {number}: it must hold a JSON object, as a monitor writes it, not {_shown(line)}"
            )
        if "massieu" in entries:
            run.settings.update(entries["monitor"] if isinstance(entries.get("monitor"), dict) else {})
        else:
            _add_record(run, entries, f"{path}, line {number}")
    if not run.records:
        raise InputError(f"{path} holds no record of a monitor" + ("" if any(lines) else ": it is empty"))
    return run


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _add_record(run: TrainingRun, entries: dict[str, Any], where: str) -> None:
    step = entries.pop("step", None)
    if isinstance(step, bool) or not isinstance(step, int | float) or step < 0 or step != step // 1:
        raise InputError(f'{where}: a record needs its "step", a whole number from 0 on, not {step!r}')
    alarms = entries.pop("alarms", [])
    if not isinstance(alarms, list):
        raise InputError(f'{where}: "alarms" must be a list of keys, not {type(alarms).__name__}')
    record = dict(_numbers(entries, where))
    # Steps rise in the order of the records, so only the last ones can be later than this one.
    while run.records and (latest := next(reversed(run.records))) > step:
        del run.records[latest]
        run.alarms.pop(latest, None)
    run.records.setdefault(int(step), {}).update(record)
    if alarms:
        run.alarms[int(step)] = [str(key) for key in alarms]
    else:
        run.alarms.pop(int(step), None)


def _numbers(entries: dict[str, Any], where: str) -> Iterator[tuple[str, float]]:
    for key, value in entries.items():
        if value is None:
            continue
        if isinstance(value, str) and value in NOT_FINITE:
            yield key, NOT_FINITE[value]
        elif isinstance(value, float) or (type(value) is int and abs(value) < 10**300):
            yield key, float(value)
        else:
            raise InputError(
                f'{where}: "{key}" must be a number, null, "NaN", "Infinity" or "-Infinity", not {value!r:.60}'
            )
