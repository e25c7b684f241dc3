"""The page in headless Chromium: what is drawn, with which digits, and what is left out or folded."""

import re
from collections.abc import Callable

import polars
import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver as WebDriver
from tests.support.report.browsing import NARROW, Page
from tests.support.report.synthetic_results import Results

from massieu.report.page import render

pytestmark = pytest.mark.needs("browser")


OVERLAPS = """(() => {
  const boxes = (drawing, selector) => [...drawing.querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const found = [];
  for (const drawing of document.querySelectorAll(".js-plotly-plot")) {
    const titles = boxes(drawing, ".xtitle, .ytitle, .y2title");
    const ticks = boxes(drawing, ".xtick text, .ytick text, .y2tick text");
    for (const title of titles) for (const tick of ticks) if (meet(title, tick)) found.push([title, tick]);
    const frame = drawing.getBoundingClientRect();
    for (const box of [...titles, ...ticks]) if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push(box);
  }
  return found;
})()"""


# --- looked at ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_page(open_page: Callable[..., Page]) -> Page:
    """Opened once for tests that only look at it; those that open another page come after them."""
    return open_page("encoder")


@pytest.mark.slow
def test_the_bars_at_both_ends_of_a_distribution_are_open(encoder_page: Page) -> None:
    texts = encoder_page.run("document.querySelector('#plots .js-plotly-plot').data[0].text")
    first, *between, last = [text.split(":")[0] for text in texts]  # pyright: ignore
    assert first.endswith(" or less")
    assert last.endswith(" or more")
    assert all(" to " in text for text in between)


@pytest.mark.slow
def test_depth_is_drawn_in_order_with_its_control(encoder_page: Page, results: dict[str, Results]) -> None:
    page = encoder_page
    layers = results["encoder"].layers
    assert page.run("document.querySelectorAll('.depth .js-plotly-plot').length") == 3
    for place, name in ((0, "pairwise_distance_log_ratio"), (2, "effective_rank_change")):
        control = layers.filter(polars.col("statistic") == f"{name}/reinitialised")["value"].to_list()
        drawn = page.run("document.querySelectorAll('.depth .js-plotly-plot')[arguments[0]].data.at(-1).y", place)
        assert drawn == pytest.approx(control, rel=1e-5)
    drawn = "document.querySelector('.depth .js-plotly-plot').data"
    symbols = page.run(f"{drawn}.flatMap(({{marker}}) => (marker?.symbol ? [marker.symbol] : []))")
    assert {"circle", "square", "diamond", "x-thin"} == set(symbols)  # pyright: ignore
    assert "of 6" in page.text(".depth > p")


def assert_titles_keep_clear(page: Page) -> None:
    page.unfold()
    assert page.run("document.querySelectorAll('.js-plotly-plot .ytitle').length") > 5  # pyright: ignore
    assert page.run(OVERLAPS) == []


@pytest.mark.slow
def test_titles_of_axes_keep_clear_of_the_numbers(encoder_page: Page) -> None:
    assert_titles_keep_clear(encoder_page)


def titles_of_charts(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('#plots h4')].map((one) => one.textContent)")  # pyright: ignore


@pytest.mark.slow
def test_a_chart_of_one_point_is_left_out(
    encoder_page: Page, new_tab: Callable[..., Page], results: dict[str, Results]
) -> None:
    assert "Entropy by number of visible keys" in titles_of_charts(encoder_page)
    one = results["encoder"]
    bins = polars.col("statistic").str.starts_with("entropy/visible_keys_") & ~polars.col("statistic").str.ends_with(
        "_16"
    )
    page = new_tab()
    page.open(render(one.run, one.details, one.heads.filter(~bins), one.layers))
    titles = titles_of_charts(page)
    assert "Entropy by number of visible keys" not in titles
    assert "Selective log Z by position in the window" in titles


# --- opened anew -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_titles_of_axes_keep_clear_of_the_numbers_on_a_narrow_page(open_page: Callable[..., Page]) -> None:
    assert_titles_keep_clear(open_page("encoder", NARROW))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1e-3, 4e-9])
def test_numbers_on_the_map_tell_the_lowest_from_the_highest(
    spread: float, new_tab: Callable[..., Page], results: dict[str, Results]
) -> None:
    one = results["encoder"]
    rows = polars.col("statistic") == "entropy"
    close = polars.when(rows).then(2 + spread * polars.col("value")).otherwise(polars.col("value"))
    page = new_tab()
    page.open(render(one.run, one.details, one.heads.with_columns(value=close), one.layers), "#statistic=entropy")
    low, high = re.findall(r"(?:Lowest|Highest): (\S+) in", page.text("#map-summary"))
    kept = spread > 2**-15  # the page keeps 15 bits of a number; closer ones are the same to it
    assert (float(low) < float(high)) == kept
    written = page.run("document.getElementById('map').data.at(-1).text ?? []")
    if kept:
        assert len(set(written)) > 10  # two digits of the difference  # pyright: ignore


@pytest.mark.slow
def test_a_browser_that_cannot_unpack_says_so(driver: WebDriver, open_page: Callable[..., Page]) -> None:
    page = open_page("encoder")
    old = driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "delete window.DecompressionStream"}
    )
    try:
        driver.refresh()
        assert page.text("#failure").startswith("This browser cannot unpack the drawings and numbers of this page")
        assert "Attention on the first token" in page.text(".cards") or page.text(".cards h3")
        assert page.driver.get_log("browser") == []
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", old)
