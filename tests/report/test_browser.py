"""Pages in headless Chromium, wide and narrow, light and dark: drawn, usable by pointer and keyboard, quiet.

All tests of the fast tier that need a browser are here, so that they share one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait
from tests.report.test_compare_page import course_of, page_of
from tests.report.test_curves import training_run
from tests.report.test_flow_drawing import panel
from tests.support.report.browsing import NARROW, Page, assert_map_shows, assert_quiet, values_of
from tests.support.report.synthetic_results import Results, encoder
from tests.support.rows import some_slow

from massieu.probing.result.stored import run_of
from massieu.report import curves
from massieu.report.flow import draw

pytestmark = pytest.mark.needs("browser")


@pytest.mark.medium
@some_slow(
    ("kind", "width", "theme"),
    [("hostile", 400, "dark"), ("encoder", 1400, "light"), ("encoder_decoder", 1400, "dark"), ("large", 400, "light")],
    1,
)
def test_every_page_is_drawn_quietly_and_fits_its_width(
    kind: str, width: int, theme: str, open_page: Callable[..., Page]
) -> None:
    page = open_page(kind, width, theme)
    assert page.run("[window.innerWidth, document.documentElement.scrollWidth]") == [width, width]
    kinds = {"bare": 0, "hostile": 2, "encoder_decoder": 3}.get(kind, 1)  # of attention: each has a colour scale
    assert page.run("document.querySelectorAll('#map .heatmaplayer .hm').length") == kinds
    red, *_ = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")  # pyright: ignore
    assert red < 60 if theme == "dark" else red > 200
    assert page.run("window.hacked === undefined")
    assert_quiet(page)
    assert_prints_whole(page, width)


def assert_prints_whole(page: Page, width: int) -> None:
    """No picture is broken between two sheets or wider than they are, and what waits for a click is left out."""
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    pictures = "[...document.querySelectorAll('figure.overview, .plot, #map svg.main-svg')]"
    assert page.run(f"{pictures}.length > 0")
    assert page.run(f"{pictures}.every((part) => getComputedStyle(part).breakInside === 'avoid')")
    assert page.run(f"{pictures}.every((part) => part.getBoundingClientRect().right <= {width})")
    assert page.run("[...document.querySelectorAll('nav, #theme')].every((part) => part.offsetParent === null)")


@pytest.mark.slow
def test_selector_and_toggle_change_the_map(open_page: Callable[..., Page], results: dict[str, Results]) -> None:
    page = open_page("encoder", NARROW)
    result = results["encoder"]
    assert_map_shows(page, result, values_of(result, "weight_first"))
    page.choose("#statistic", "own_write_sharpens")
    value = values_of(result, "own_write_sharpens")
    control = values_of(result, "own_write_sharpens/mismatched")
    assert_map_shows(page, result, value)
    assert page.text("#about-title") == "Sharpened by the head's own write (share)"
    inside = sum(q >= 0.05 for q in values_of(result, "own_write_sharpens/q_value").values())
    assert f"{72 - inside} of 72 heads differ from the control" in page.text("#map-summary")
    assert f", {inside} do not" in page.text("#map-summary")
    page.show("#mode")
    page.driver.find_element(By.ID, "difference").click()
    assert_map_shows(page, result, {cell: value[cell] - control[cell] for cell in value}, size=1)
    low, high = page.run("(({zmin, zmax}) => [zmin, zmax])(document.getElementById('map').data[0])")  # pyright: ignore
    assert low == pytest.approx(-high)
    page.choose("#statistic", "log_partition")
    assert_map_shows(page, result, values_of(result, "log_partition"))
    assert not page.driver.find_element(By.ID, "difference").is_enabled()
    assert "depends on the key origin" in page.text("#about-gauge")
    assert_quiet(page)


@pytest.mark.slow
def test_a_click_and_the_select_boxes_open_a_head(open_page: Callable[..., Page]) -> None:
    page = open_page("encoder")
    page.show("#map")
    area = page.driver.find_element(By.CSS_SELECTOR, "#map .nsewdrag")
    size = area.size
    offset = (size["width"] * (7.5 / 12 - 0.5), size["height"] * (4.5 / 6 - 0.5))
    pointer = ActionChains(page.driver).move_to_element_with_offset(area, *map(round, offset))
    pointer.perform()
    page.wait(lambda: page.run("document.querySelector('#map .hoverlayer').textContent.includes('layer 4, head 7')"))
    assert page.run(
        "/±.*control.*±.*n = .*its control \\(q/.test(document.querySelector('#map .hoverlayer').textContent)"
    )
    pointer.click().perform()
    page.wait(lambda: page.text("#head-title") == "Layer 4, head 7")
    page.wait(lambda: page.run("document.getElementById('head-section').getBoundingClientRect().top < 200"))
    page.driver.find_element(By.ID, "site").send_keys("2")
    page.driver.find_element(By.ID, "head").send_keys("11")
    page.wait(lambda: page.text("#head-title") == "Layer 2, head 11")
    assert "encoder.layer.2.attention.self" in page.text("#head-site")
    page.unfold()
    assert page.run("document.querySelectorAll('#plots .plot svg.main-svg').length") >= 4
    assert_quiet(page)


@pytest.mark.slow
def test_tokens_tell_their_strongest_keys(open_page: Callable[..., Page], results: dict[str, Results]) -> None:
    page = open_page("encoder", NARROW)
    details = results["encoder"].details
    page.choose("#site", 3)
    page.choose("#head", 6)
    page.show("#tokens")
    token = page.driver.find_element(By.CSS_SELECTOR, '#tokens [data-place="9"]')
    entry = details["examples"][0]["sites"]["3"]

    def shown() -> list[int]:
        marked = page.driver.find_elements(By.CSS_SELECTOR, "#tokens .token.key")
        order = sorted(marked, key=lambda element: int(element.get_attribute("data-rank") or 0))
        return [int(element.get_attribute("data-place") or -1) for element in order]

    def hovered() -> bool:
        ActionChains(page.driver).move_to_element(token).perform()
        return shown() == entry["top_keys"][6][9]

    page.wait(hovered)
    weights = [
        element.text for element in page.driver.find_elements(By.CSS_SELECTOR, "#strongest li > span:nth-child(2)")
    ]
    for written, weight in zip(weights, entry["top_weights"][6][9], strict=True):
        assert float(written.removesuffix("%")) == pytest.approx(100 * weight, abs=0.9)
    token.click()
    token.send_keys(Keys.ARROW_RIGHT)
    assert shown() == entry["top_keys"][6][10]
    assert "at position 10" in page.text("#token-title")
    before = page.run("getComputedStyle(document.querySelector('#tokens .token')).backgroundColor")
    page.choose("#shade", "entropy")
    assert page.run("getComputedStyle(document.querySelector('#tokens .token')).backgroundColor") != before
    assert_quiet(page)


@pytest.mark.slow
def test_keys_of_cross_attention_are_another_text(open_page: Callable[..., Page], results: dict[str, Results]) -> None:
    page = open_page("encoder_decoder")
    run = results["encoder_decoder"].run
    (cross, *_) = [site.index for site in run.sites if site.kind == "cross"]
    page.choose("#site", cross)
    assert "wonderful" in page.text("#tokens")
    assert page.text("#keys").replace("\u200b", "").startswith("Das")
    assert page.run("document.querySelectorAll('#keys .token.key').length") == 5
    assert page.run("document.querySelectorAll('#tokens .token.key').length") == 0
    page.choose("#site", run.sites[-1].index)
    assert_quiet(page)


@pytest.mark.slow
def test_the_theme_button_turns_page_and_drawings(open_page: Callable[..., Page]) -> None:
    page = open_page("encoder")
    ink = "document.getElementById('map').layout.font.color"
    colours = [page.run(ink)]
    page.driver.find_element(By.ID, "theme").click()
    colours.append(page.run(ink))
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert len(set(colours)) == 2
    assert_quiet(page)


@pytest.mark.slow
def test_findings_lead_to_their_map_and_head(open_page: Callable[..., Page]) -> None:
    page = open_page("encoder")
    buttons = page.driver.find_elements(By.CSS_SELECTOR, ".card:nth-child(3) .links button")
    assert [button.text for button in buttons] == ["Show on the map", "layer 3, head 1", "layer 5, head 9"]
    buttons[0].click()
    assert page.run("document.getElementById('statistic').value") == "own_write_sharpens"
    page.show(".card:nth-child(3) .links")
    page.wait(lambda: page.run("document.querySelector('.card:nth-child(3) .links').getBoundingClientRect().top > 0"))
    page.run("document.querySelectorAll('.card:nth-child(3) .links button')[2].click()")
    assert page.text("#head-title") == "Layer 5, head 9"
    assert_quiet(page)


@pytest.mark.slow
def test_tokens_without_a_text_are_named_by_position(open_page: Callable[..., Page]) -> None:
    page = open_page("hostile", NARROW)
    page.choose("#window", 1)
    assert page.text("#tokens").replace("\u200b", "").split()[:3] == ["#0", "#1", "#2"]
    page.run("document.querySelector('#tokens .token').click()")
    assert page.run("document.querySelectorAll('#strongest li').length") == 1
    assert_quiet(page)


@pytest.mark.slow
def test_a_bare_run_says_what_is_missing(open_page: Callable[..., Page]) -> None:
    page = open_page("bare", NARROW)
    page.unfold()
    text = page.text("body")
    for sentence in (
        "No example text was kept in this run",
        "No distribution and no binned mean",
        "No sublayer was measured",
        "This statistic has no value in any head",
        "no value",
    ):
        assert sentence in text


@pytest.mark.slow
def test_a_narrow_page_is_short_and_its_parts_open(open_page: Callable[..., Page]) -> None:
    page = open_page("encoder", 390)
    height = "document.documentElement.scrollHeight"
    assert page.run(height) < 6_000  # pyright: ignore
    assert not page.driver.find_element(By.ID, "sublayers").is_displayed()
    page.run("document.querySelector('nav a[href=\"#sublayers-section\"]').click()")
    page.wait(lambda: page.run("document.querySelectorAll('.depth .main-svg').length > 2"))
    page.unfold()
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("document.querySelector('#head-table .scroll').scrollWidth") > 600  # pyright: ignore
    assert_quiet(page)


# --- the pages of a training run, of a comparison and of a flow ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1300, "light")])
def test_the_page_of_a_training_run(width: int, theme: str, driver: ChromiumDriver, tmp_path: Path):
    """Drawn without a request or an error, as wide as the window; the map follows its selectors."""
    hot = training_run("<i>hot</i>", loss=lambda step: math.nan if step == 300 else 10.0 ** (step / 100))
    path = tmp_path / "page.html"
    drawn = curves.render(
        [replace(hot, alarms={400: ["massieu/loss"]}), training_run("other")], training_run("healthy")
    )
    path.write_text(drawn, encoding="utf-8")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    driver.get_log("browser")
    driver.get(path.as_uri())

    def ask(script: str) -> Any:
        return driver.execute_script(f"return {script}")

    end = time.monotonic() + 20
    while not ask("document.documentElement.dataset.ready"):
        assert time.monotonic() < end, "the page did not get there"
    assert ask("[window.innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert ask("document.querySelectorAll('.chart .plot-container').length") == 5
    loss = "document.querySelector('#first .chart')"
    assert ask(f"{loss}.data.map(({{y}}) => y)")[2] == [1, 10, 100, None, 10000, 100000]
    assert ask(f"{loss}.layout.yaxis.type") == "log"
    assert ask(f"{loss}.querySelectorAll('.scatterlayer .trace').length") == 5  # three runs, a mark, an alarm
    names = ask("[...document.querySelectorAll('#runs span')].map((each) => each.textContent)")
    assert names == ["<i>hot</i>", "other", "healthy (reference)"]
    Select(driver.find_element(By.ID, "quantity")).select_by_value("entropy_min")
    assert ask("document.getElementById('map').data[0].z") == [[0.5] * 6, [1.0] * 6]
    Select(driver.find_element(By.ID, "run")).select_by_visible_text("other")
    assert driver.find_element(By.ID, "quantity").get_attribute("value") == "entropy_min"
    red, *_ = ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert red < 60 if theme == "dark" else red > 200
    ask("document.getElementById('theme').click()")
    assert ask("document.documentElement.dataset.theme") == ("light" if theme == "dark" else "dark")
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_the_page_of_a_comparison(driver: ChromiumDriver, tmp_path: Path) -> None:
    """It draws what is chosen, and fits its window."""
    made = encoder(layers=2, heads=3)
    (tmp_path / "report.html").write_text(page_of(course_of(made._replace(run=run_of(made.run, "small")))))
    driver.get((tmp_path / "report.html").as_uri())
    WebDriverWait(driver, 20).until(lambda each: each.execute_script("return document.documentElement.dataset.ready"))

    def drawn(place: str) -> list[list[float | None]]:
        return driver.execute_script(f"return document.getElementById('map-{place}').data[0].z")

    differences = [value for row in drawn("difference") for value in row if value]
    assert len(differences) == 1
    before = differences[0]
    Select(driver.find_element(By.ID, "model")).select_by_visible_text("step10")
    after = [value for row in drawn("difference") for value in row if value]
    assert after[0] == pytest.approx(before * 2 / 8, rel=1e-3)  # 3 − 1 times the value, and 9 − 1
    assert len(driver.execute_script("return document.getElementById('course-drawing').data")) == len(drawn("first"))
    driver.execute_script("document.getElementById('theme').click()")
    for width in (1400, 500):
        driver.set_window_size(width, 900)
        fits = "return document.documentElement.scrollWidth <= window.innerWidth"
        WebDriverWait(driver, 10).until(lambda each: each.execute_script(fits))  # noqa: B023 - drawn again after a moment
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.medium
def test_the_page_of_a_flow_fits_wide_and_narrow_windows(driver: ChromiumDriver, tmp_path: Path):
    panels = [panel(f"observable_{index}", [[1.0], [2.0 * index], [3.0]]) for index in range(7)]
    path = draw(panels, "title").save(tmp_path / "page.html")
    driver.get_log("browser")  # what an earlier test left
    for width, columns in ((1300, 4), (400, 1)):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(path.as_uri())
        assert driver.execute_script("return document.documentElement.scrollWidth") == width
        left = driver.execute_script(
            "return [...document.querySelectorAll('svg')].map((svg) => Math.round(svg.getBoundingClientRect().left))"
        )
        assert len(set(left)) == columns
        assert driver.get_log("browser") == []
