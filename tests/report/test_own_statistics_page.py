"""A statistic of the user's own in the page, in a browser: the menu, the map, a head's panel, the methods."""

from pathlib import Path

import polars
import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from tests.support.probing import zoo
from tests.support.report.browsing import Page, assert_quiet

import massieu

pytestmark = [pytest.mark.needs("browser"), pytest.mark.slow]


@massieu.statistic(formula="Σ p_j, |i − j| ≤ 10", scale="share", title="Nearby <b>")
def nearby(reading):
    """How much attention goes to the ten nearest tokens?"""
    return reading.weight_where(lambda query, key: (query - key).abs() <= 10)


def test_its_numbers_are_found_in_the_page(driver: ChromiumDriver, tmp_path: Path) -> None:
    batches = [zoo.inputs("gpt2", seed=seed) for seed in range(4)]
    result = massieu.probe(
        zoo.model("gpt2"), massieu.Batches(batches, window=20), statistics=["entropy", nearby], draws=4
    )
    page = Page(driver, tmp_path / "report.html")
    page.requests()  # those of the browser's own start
    page.open(result._page(), "#statistic=nearby&layer=1&head=2")
    assert page.text("#about-title") == "Nearby <b>"
    assert "How much attention goes to the ten nearest tokens?" in page.text("#about")
    rows = result.heads.filter(polars.col("statistic") == "nearby")
    values = {(layer, head): value for layer, head, value in rows.select("layer", "head", "value").iter_rows()}
    cells = page.cells()
    for (layer, head), value in values.items():
        assert cells[layer][head] == pytest.approx(value, rel=2**-15)
    page.unfold()
    shown = page.text("#head-table")
    assert "Nearby <b>" in shown and f"{values[1, 2]:.3g}" in shown
    assert "Σ p_j, |i − j| ≤ 10" in page.text("#methods")
    assert_quiet(page)
