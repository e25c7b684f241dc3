"""What the whole suite shares: tests that need more than Python, and what is said at the end of those left out."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A failed assertion of a helper tells its values, as one of a test does.
pytest.register_assert_rewrite("tests.support")
from tests.support import needs, release  # noqa: E402

# Before torch and transformers are loaded, and for the processes that tests start. Their problems are small and share the
# cores; models and texts are on this machine.
for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(name, value)


# No test stops the machine, and waiting for its disk takes longer than most of them. What has to be waited for is tested by
# a function in this one's place.
os.fsync = lambda descriptor: None


# A processor that is emulated for PyTorch is emulated for oneDNN too: PyTorch asks it whether to pack bfloat16 for AMX, and
# its attention then stops, since the packing was built for AVX-512 alone.
if oldest_instructions := {"avx2": "AVX2", "default": "SSE41"}.get(os.environ.get("ATEN_CPU_CAPABILITY", "")):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", oldest_instructions)

EXAMPLES = {"check": 5, "test": 10, "slow": 20, "release": 100}
"""How many examples Hypothesis draws for a test, by tier: `--hypothesis-profile` names one, the Makefile does."""

# No test fails because the machine is busy.
for tier, count in EXAMPLES.items():
    settings.register_profile(tier, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=count)
settings.load_profile("test")

QUICK = "not medium and not slow"
LONGEST = ("test_site.py", "test_examples.py")
"""Files with the longest tests. They begin first, so that no process is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """What is not asked for by mark, keyword or name is the quick tests: `pytest tests/ops` answers in seconds."""
    if not config.option.markexpr and not config.option.keyword and not any("::" in each for each in config.args):
        config.option.markexpr = QUICK
    # A shell starts what it runs in the background deaf to Ctrl-C, which some tests send to themselves and their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # And `nohup` starts it deaf to a lost terminal.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def few_draws() -> Generator[None]:
    """Tests that are not about the control draw two re-initialised models, not eight."""
    from tests.support.probing.draws import draw_by_default

    with pytest.MonkeyPatch.context() as patch:
        draw_by_default(2, patch)
        yield


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if release.in_release_alone(item):
            item.add_marker(release.MARK)


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


def pytest_collection_finish() -> None:
    """What was loaded and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
