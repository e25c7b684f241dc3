"""What the tests of each room cost and reach: tests, processor time, coverage, as a table.

    python -m pytest -m "not slow" --cpu-times times.json --cov=massieu --cov-branch --cov-report=json:coverage.json
    python scripts/test_table.py --times times.json --coverage coverage.json

`--times-before` and `--coverage-before` add columns from an earlier run. A room of the tests is a folder of `tests/`, or a
file that lies in `tests/` itself. Coverage is of lines and branches together, as coverage.py counts them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

COLLECTION = "collection"
FEWEST_SECONDS = 3.0
"""Of processor time, for a file to have a row of its own."""


def room_of_test(name: str) -> str:
    """`ops` of `tests/ops/test_window.py::test_x`; `test_cli` of a file in `tests/` itself."""
    if name == COLLECTION:
        return name
    parts = Path(name.partition("::")[0]).with_suffix("").parts
    return parts[1]


def room_of_source(path: str) -> str:
    """`ops` of `src/massieu/ops/window.py`; the file's name for a file of the package itself."""
    parts = Path(path).with_suffix("").parts
    return parts[parts.index("massieu") + 1]


def coverage_by_room(report: Mapping) -> dict[str, float]:
    """Percent of lines and branches, by room, and of the whole package as `all`."""
    covered: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for path, entry in report["files"].items():
        summary = entry["summary"]
        for room in (room_of_source(path), "all"):
            covered[room] += summary["covered_lines"] + summary["covered_branches"]
            total[room] += summary["num_statements"] + summary["num_branches"]
    return {room: 100 * covered[room] / total[room] for room in total if total[room]}


def times_by_room(times: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """The number of tests and their seconds, by room, and of all as `all`."""
    tests: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for name, duration in times.items():
        for room in (room_of_test(name), "all"):
            tests[room] += name != COLLECTION
            seconds[room] += duration
    return {room: (tests[room], seconds[room]) for room in seconds}


def times_by_file(times: Mapping[str, float]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for name, duration in times.items():
        seconds[name.partition("::")[0]] += duration
    return dict(seconds)


def _read(path: Path | None) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path else {}


def _rooms_table(arguments: argparse.Namespace) -> Table:
    table = Table("room", title="by room")
    columns: list[tuple[str, dict[str, str]]] = []
    for label, path in (("before", arguments.times_before), ("", arguments.times)):
        if path is not None:
            rooms = times_by_room(_read(path))
            columns.append((f"tests {label}", {room: str(count) for room, (count, _) in rooms.items()}))
            columns.append((f"seconds {label}", {room: f"{duration:.1f}" for room, (_, duration) in rooms.items()}))
    for label, path in (("before", arguments.coverage_before), ("", arguments.coverage)):
        if path is not None:
            rooms = coverage_by_room(_read(path))
            columns.append((f"covered % {label}", {room: f"{percent:.1f}" for room, percent in rooms.items()}))
    for label, _ in columns:
        table.add_column(label.strip(), justify="right")
    rooms = sorted({room for _, values in columns for room in values}, key=lambda room: (room == "all", room))
    for room in rooms:
        table.add_row(room, *(values.get(room, "") for _, values in columns), end_section=room == rooms[-2])
    return table


def _files_table(times: Mapping[str, float]) -> Table:
    table = Table("file", title=f"files of {FEWEST_SECONDS:g} seconds or more")
    table.add_column("seconds", justify="right")
    for file, duration in sorted(times_by_file(times).items(), key=lambda row: -row[1]):
        if duration >= FEWEST_SECONDS:
            table.add_row(file, f"{duration:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--times", "--times-before", "--coverage", "--coverage-before"):
        parser.add_argument(option, type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if all(value is None for value in vars(arguments).values()):
        parser.error("give --times, --coverage or both")
    console = Console(width=110)
    console.print(_rooms_table(arguments))
    if arguments.times is not None:
        console.print(_files_table(_read(arguments.times)))


if __name__ == "__main__":
    main()
