"""What the whole suite shares: tests that need more than Python, and what is said at the end of those left out."""

import signal
from collections import defaultdict
from collections.abc import Generator

import pytest
from tests import needs


def pytest_configure() -> None:
    """A shell starts what it runs in the background deaf to Ctrl-C, which some tests send to themselves and their children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for tool in mark.args:
            if needs.FOUND[tool]() is None:
                needs.leave_out(tool)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """The last lines: what was not tested, and what to install for it."""
    yield
    left_out = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        _, found, tool = reason.partition(needs.REASON)
        if found and tool in needs.INSTALL.values():
            left_out[tool].append(report.nodeid)
    for tool, tests in left_out.items():
        terminalreporter.write_line(f"not run, for want of {tool}:", yellow=True)
        for test in sorted(tests):
            terminalreporter.write_line(f"  {test}")
