"""A pytest plugin: `-p tests.support.cpu_times --cpu-times FILE` writes each test's processor time, as JSON by its name.

Processor time and not wall time, so that a busy machine changes little. Processes that a test starts count, also those that
outlive it: a browser, or the server that processes are forked off. The set-up of a fixture that tests share counts for the
first of them. `scripts/test_table.py` makes a table of the file.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_PROPERTY = "cpu_seconds"
_COLLECTION = "collection"
"""The name under which the file has what each process took until its first test: imports and collection."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write the processor time of each test to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(_CpuTimes(config, Path(path)), "cpu-times-recorder")


class Clock:
    """Processor time of this process, of its descendants that have ended, and of those that live; but not of looking."""

    def __init__(self) -> None:
        self._looking = 0.0

    def seconds(self) -> float:
        started = time.process_time()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = sum(_cpu_ticks(process) for process in _living_descendants("self")) / os.sysconf("SC_CLK_TCK")
        seconds = started - self._looking + ended.ru_utime + ended.ru_stime + living
        self._looking += time.process_time() - started
        return seconds


def _living_descendants(process: str) -> Iterator[str]:
    """Their numbers, as Linux tells them; none on other systems."""
    with suppress(OSError):  # the process, or one of its threads, has ended since
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in children.read_text(encoding="utf-8").split():
                yield child
                yield from _living_descendants(child)


def _cpu_ticks(process: str) -> int:
    """Of a process and of its children that have ended."""
    with suppress(OSError):  # it has ended since
        # The name of the program, in brackets, may hold spaces; twelve fields further are the four times.
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:15])
    return 0


class _CpuTimes:
    """Measures in the process that runs the tests; writes in the one that was started."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._clock = Clock()
        self._started = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._started = self._clock.seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = self._clock.seconds()
        # A process that ends without its parent waiting for it takes its time along: less than nothing is nothing.
        report.user_properties.append((_PROPERTY, max(0.0, now - self._started)))
        self._started = now
        return report

    def pytest_collection_finish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_COLLECTION] = self._clock.seconds()
        elif not self._config.getoption("numprocesses", None):
            self._seconds[_COLLECTION] += self._clock.seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._seconds[_COLLECTION] += getattr(node, "workeroutput", {}).get(_COLLECTION, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += sum(value for name, value in report.user_properties if name == _PROPERTY)

    def pytest_sessionfinish(self) -> None:
        if not hasattr(self._config, "workerinput"):
            self._path.write_text(json.dumps(self._seconds, indent=0), encoding="utf-8")
