"""The page in headless Chromium, wide and narrow, light and dark: drawn, usable by pointer and keyboard, quiet."""

from collections.abc import Callable

import polars
import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from tests.support.report.browsing import WIDTHS, Page, assert_map_shows, assert_quiet, values_of
from tests.support.report.synthetic_results import Results
from tests.support.rows import some_slow

pytestmark = pytest.mark.needs("browser")


@pytest.mark.medium
@some_slow(
    ("kind", "width", "theme"),
    [
        ("encoder", 1400, "light"), ("large", 400, "dark"), ("hostile", 400, "light"), ("encoder", 400, "dark"),
        ("encoder_decoder", 400, "light"), ("bare", 400, "dark"), ("encoder", 1400, "dark"), ("large", 1400, "light"),
    ],
    2,
)  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_selector_and_toggle_change_the_map(
    width: int, open_page: Callable[..., Page], results: dict[str, Results]
) -> None:
    page, result = open_page("encoder", width), results["encoder"]
    assert_map_shows(page, result, values_of(result, "weight_first"))
    page.choose("#statistic", "own_write_sharpens")
    value, control = values_of(result, "own_write_sharpens"), values_of(result, "own_write_sharpens/mismatched")
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
@some_slow("width", WIDTHS, 1)
def test_a_click_and_the_select_boxes_open_a_head(width: int, open_page: Callable[..., Page]) -> None:
    page = open_page("encoder", width)
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
@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_tell_their_strongest_keys(
    width: int, open_page: Callable[..., Page], results: dict[str, Results]
) -> None:
    page, details = open_page("encoder", width), results["encoder"].details
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
    page, run = open_page("encoder_decoder"), results["encoder_decoder"].run
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
def test_depth_is_drawn_in_order_with_its_control(open_page: Callable[..., Page], results: dict[str, Results]) -> None:
    page, layers = open_page("encoder"), results["encoder"].layers
    assert page.run("document.querySelectorAll('.depth .js-plotly-plot').length") == 3
    for place, name in ((0, "pairwise_distance_log_ratio"), (2, "effective_rank_change")):
        control = layers.filter(polars.col("statistic") == f"{name}/reinitialised")["value"].to_list()
        drawn = page.run("document.querySelectorAll('.depth .js-plotly-plot')[arguments[0]].data.at(-1).y", place)
        assert drawn == pytest.approx(control, rel=1e-5)
    drawn = "document.querySelector('.depth .js-plotly-plot').data"
    symbols = page.run(f"{drawn}.flatMap(({{marker}}) => (marker?.symbol ? [marker.symbol] : []))")
    assert {"circle", "square", "diamond", "x-thin"} == set(symbols)  # pyright: ignore
    assert "of 6" in page.text(".depth > p")


@pytest.mark.slow
def test_tokens_without_a_text_are_named_by_position(open_page: Callable[..., Page]) -> None:
    page = open_page("hostile", 400)
    page.choose("#window", 1)
    assert page.text("#tokens").replace("\u200b", "").split()[:3] == ["#0", "#1", "#2"]
    page.run("document.querySelector('#tokens .token').click()")
    assert page.run("document.querySelectorAll('#strongest li').length") == 1
    assert_quiet(page)


@pytest.mark.medium
def test_a_bare_run_says_what_is_missing(open_page: Callable[..., Page]) -> None:
    page = open_page("bare", 400)
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
