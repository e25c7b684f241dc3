"""One open page in the browser, and the few questions that tests ask of it."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import polars
import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver as WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from tests.support.report.synthetic_results import Results

NARROW = 400
"""The width of a telephone's window; pages are opened 1400 wide else."""


class Page:
    """One open page, with the few questions the tests ask of it."""

    def __init__(self, driver: WebDriver, path: Path) -> None:
        self.driver = driver
        self.path = path

    def open(self, page: str, address: str = "") -> None:
        self.path.write_text(page, encoding="utf-8")
        self.driver.get("about:blank")  # an address that differs in its last part alone would not load the page again
        self.driver.get(self.path.as_uri() + address)
        self.wait(lambda: self.run("document.documentElement.dataset.ready"))

    def run(self, script: str, *arguments: object) -> object:
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def choose(self, selector: str, value: object) -> None:
        Select(self.driver.find_element(By.CSS_SELECTOR, selector)).select_by_value(str(value))

    def show(self, selector: str) -> None:
        self.run(
            "document.querySelector(arguments[0]).scrollIntoView({behavior: 'instant', block: 'center'})", selector
        )

    def cells(self) -> list[list[float | None]]:
        """The numbers of the drawn map, row by row, from plotly's own state."""
        return self.run("document.getElementById('map').data[0].z")  # pyright: ignore

    def unfold(self) -> None:
        self.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        self.wait(lambda: self.run("!document.querySelector('#plots .plot:not(:has(.main-svg))')"))

    def wait(self, condition: Callable[[], object], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.05)

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def values_of(results: Results, statistic: str) -> dict[tuple[str, int], float]:
    rows = results.heads.filter(polars.col("statistic") == statistic)
    return {(site, head): value for site, head, value in rows.select("site", "head", "value").iter_rows()}


def assert_map_shows(page: Page, results: Results, expected: dict[tuple[str, int], float], size: float = 0) -> None:
    """The map holds the expected numbers, to the relative error 2^-16 of packed numbers of the given size."""
    cells = page.cells()
    for row, site in enumerate(results.run.sites):
        for head in range(site.heads):
            assert cells[row][head] == pytest.approx(expected[site.name, head], rel=2**-16, abs=2 * 2**-16 * size)


def assert_quiet(page: Page) -> None:
    assert page.driver.get_log("browser") == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests())
