"""Results and rendered pages, and the browser that shows them, made once per test run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from tests.support import needs
from tests.support.report import synthetic_results
from tests.support.report.browsing import Page
from tests.support.report.synthetic_results import Results

from massieu.probing.result.stored import run_of
from massieu.report.page import render

KINDS = ("encoder", "large", "encoder_decoder", "bare", "hostile")


class Made(dict[str, Any]):
    """What is made of a kind of result, once it is asked for: the large one takes seconds."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: str) -> Any:
        self[kind] = self._make(kind)
        return self[kind]


def _result(kind: str) -> Results:
    assert kind in KINDS
    made = getattr(synthetic_results, kind)()
    return made._replace(run=run_of(made.run, kind))


@pytest.fixture(scope="session")
def results() -> dict[str, Results]:
    return Made(_result)


@pytest.fixture(scope="session")
def pages(results: dict[str, Results]) -> dict[str, str]:
    return Made(lambda kind: render(*results[kind]))


FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChromiumDriver]:
    """One browser for all tests. Those of the fast tier are in one file, which one process of the run takes."""
    from selenium import webdriver
    from selenium.common.exceptions import NoSuchDriverException

    browser = needs.browser()
    assert browser is not None
    edge = browser.kind == "edge"
    options = webdriver.EdgeOptions() if edge else webdriver.ChromeOptions()
    options.binary_location = browser.program
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    logs = "ms:loggingPrefs" if edge else "goog:loggingPrefs"
    options.set_capability(logs, {"browser": "ALL", "performance": "ALL"})
    service = (webdriver.EdgeService if edge else webdriver.ChromeService)(browser.driver)
    try:
        browser = (webdriver.Edge if edge else webdriver.Chrome)(options=options, service=service)
    except NoSuchDriverException:
        # A browser without its driver, and Selenium could not fetch one.
        needs.leave_out("browser")
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def new_tab(driver: ChromiumDriver, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Page]:
    """Closes the tab that is shown and opens another, in which nothing is shown yet."""
    path = tmp_path_factory.mktemp("page") / "report.html"

    def opened(width: int = 1400, theme: str = "light") -> Page:
        driver.get_log("browser")
        before = driver.current_window_handle
        driver.switch_to.new_window("tab")  # a tab keeps 50 entries of history, and drops those of pages that were left
        after = driver.current_window_handle
        driver.switch_to.window(before)
        driver.close()
        driver.switch_to.window(after)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        driver.get_log("performance")
        return Page(driver, path)

    return opened


@pytest.fixture(scope="session")
def open_page(new_tab: Callable[..., Page], pages: dict[str, str]) -> Callable[..., Page]:
    def opened(kind: str, width: int = 1400, theme: str = "light", address: str = "") -> Page:
        page = new_tab(width, theme)
        page.open(pages[kind], address)
        return page

    return opened
