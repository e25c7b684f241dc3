"""The record of a training run as JSON lines: what `massieu.Monitor` appends, and the page of curves reads.

The first line is a header, ``{"massieu": version, "monitor": settings}``; each other line is one record,
``{"step": 100, "massieu/loss": 2.5, ...}``. JSON has no NaN and no infinity: they are the strings of `NOT_FINITE`.
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
"""How whole lines begin: one that begins so and breaks off was cut when its process ended."""
_SHOWN = 40


@dataclass(frozen=True)
class TrainingRun:
    """The records of one run.

    Attributes:
        name: of its file, without the ending.
        settings: of the monitor; empty where the file has no header.
        records: each step's numbers, by rising step.
        alarms: the keys that were in alarm, for each step that had one.
        notes: what was left out, a sentence each.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    records: dict[int, dict[str, float]] = field(default_factory=dict)
    alarms: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """What its keys begin with: as the header says, or else as most of them do."""
        if isinstance(known := self.settings.get("prefix"), str):
            return known
        first = Counter(key.partition("/")[0] for record in self.records.values() for key in record if "/" in key)
        return first.most_common(1)[0][0] if first else ""

    def quantities(self) -> list[str]:
        """The keys without the prefix, in the order in which the records name them."""
        start = f"{self.prefix}/" if self.prefix else ""
        keys = dict.fromkeys(key for record in self.records.values() for key in record)
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def curve(self, quantity: str) -> dict[int, float]:
        """A quantity's number at each step that has it."""
        key = f"{self.prefix}/{quantity}" if self.prefix else quantity
        return {step: record[key] for step, record in self.records.items() if key in record}


def header_line(version: str, settings: Mapping[str, Any]) -> str:
    """The first line of a file."""
    return _line({"massieu": version, "monitor": dict(settings)})


def record_line(step: int, record: Mapping[str, float], alarms: Sequence[str] = ()) -> str:
    """One record's line; ``alarms`` are the keys that are in alarm."""
    return _line({"step": step, **record} | ({"alarms": list(alarms)} if alarms else {}))


def _line(value: Any) -> str:
    return json.dumps(_writable(value), allow_nan=False, separators=(",", ":")) + "\n"


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def differing(one: Mapping[str, Any], other: Mapping[str, Any], also: Sequence[str] = ()) -> str:
    """What two monitors' settings have different, of those without which numbers cannot be compared; empty if nothing."""
    other = json.loads(_line(other))  # as a file holds them: a tuple is a list there
    names = [name for name in (*COMPARABLE, *also) if name in one and name in other and one[name] != other[name]]
    return ", ".join(f"{name} {one[name]} in place of {other[name]}" for name in names)


def is_record_of_monitor(path: Path) -> bool:
    """Whether a file begins as a monitor's does, with its header; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEADER)) == _HEADER
    except OSError:
        return False


def read_header(path: Path) -> dict[str, Any]:
    """The settings in a file's header; empty where it has none."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return {}
    settings = found.get("monitor") if isinstance(found, dict) else None
    return settings if isinstance(settings, dict) else {}


def read_run(path: str | os.PathLike[str]) -> TrainingRun:
    """Read a run's records.

    A run that went back to an earlier step began again there: what it had measured from that step on is replaced. A line
    that was cut off when a process ended is left out, and a note says so.

    Raises:
        InputError: the file cannot be read, holds no record, or a line of it is no record.
    """
    path = check_name(path)
    run = TrainingRun(path.stem)
    with explaining(f"cannot read {path}"), path.open("rb") as file:
        lines = list(file)
    for place, line in enumerate(lines, 1):
        if not line.strip(b"\0\t\r\n "):
            continue
        try:
            found = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            found = None
            begun = line.startswith(_BEGINNINGS) or any(each.startswith(line.rstrip()) for each in _BEGINNINGS)
            if begun or (place == len(lines) and not line.endswith(b"\n")):
                run.notes.append(f"line {place} of {path.name} was cut off and is left out")
                continue
        if not isinstance(found, dict):
            raise InputError(
                f"{path}, line {place}: it must hold a JSON object, as a monitor writes it, not {_shown(line)}"
            )
        if "massieu" in found:
            run.settings.update(found["monitor"] if isinstance(found.get("monitor"), dict) else {})
        else:
            _take(run, found, f"{path}, line {place}")
    if not run.records:
        raise InputError(f"{path} holds no record of a monitor" + ("" if any(lines) else ": it is empty"))
    return run


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _take(run: TrainingRun, found: dict[str, Any], where: str) -> None:
    step = found.pop("step", None)
    if isinstance(step, bool) or not isinstance(step, int | float) or step < 0 or step != step // 1:
        raise InputError(f'{where}: a record needs its "step", a whole number from 0 on, not {step!r}')
    alarms = found.pop("alarms", [])
    if not isinstance(alarms, list):
        raise InputError(f'{where}: "alarms" must be a list of keys, not {type(alarms).__name__}')
    record = dict(_numbers(found, where))
    # Steps rise in the order of the records: only the last ones can be later than this.
    while run.records and (latest := next(reversed(run.records))) > step:
        del run.records[latest]
        run.alarms.pop(latest, None)
    run.records.setdefault(int(step), {}).update(record)
    if alarms:
        run.alarms[int(step)] = [str(key) for key in alarms]
    else:
        run.alarms.pop(int(step), None)


def _numbers(found: dict[str, Any], where: str) -> Iterator[tuple[str, float]]:
    for key, value in found.items():
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
