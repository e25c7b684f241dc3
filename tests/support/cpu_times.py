"""A pytest plugin: `-p tests.support.cpu_times --cpu-times FILE` writes each test's processor time, as JSON by its name.

Processor time and not wall time, so that a busy machine changes little. Processes that a test starts and waits for count.
The set-up of a fixture that tests share counts for the first of them. `scripts/test_table.py` makes a table of the file.
"""

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator
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


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class _CpuTimes:
    """Measures in the process that runs the tests; writes in the one that was started."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._started = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu_seconds()
        report.user_properties.append((_PROPERTY, now - self._started))
        self._started = now
        return report

    def pytest_collection_finish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_COLLECTION] = _cpu_seconds()
        elif not self._config.getoption("numprocesses", None):
            self._seconds[_COLLECTION] += _cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._seconds[_COLLECTION] += getattr(node, "workeroutput", {}).get(_COLLECTION, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += sum(value for name, value in report.user_properties if name == _PROPERTY)

    def pytest_sessionfinish(self) -> None:
        if not hasattr(self._config, "workerinput"):
            self._path.write_text(json.dumps(self._seconds, indent=0), encoding="utf-8")
