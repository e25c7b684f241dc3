"""The page in headless Chromium: addresses that name what is shown, the map by keyboard, colours by kind."""

from collections.abc import Callable

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from tests.support.report.browsing import Page, assert_map_shows, assert_quiet, values_of
from tests.support.report.synthetic_results import Results

pytestmark = pytest.mark.needs("browser")


def address_of(page: Page) -> str:
    return str(page.run("location.hash"))


@pytest.mark.slow
def test_the_address_names_what_is_shown_and_the_back_button_returns(open_page: Callable[..., Page]) -> None:
    page = open_page("encoder", address="#statistic=entropy&layer=3&head=5")
    assert page.text("#head-title") == "Layer 3, head 5"
    assert page.text("#about-title") == "Entropy"
    page.wait(lambda: page.run("document.getElementById('head-section').getBoundingClientRect().top < 200"))
    page.choose("#statistic", "weight_first")
    page.choose("#site", 2)
    assert address_of(page) == "#statistic=weight_first&layer=2&head=5"
    page.run("document.querySelector('nav a[href=\"#methods\"]').click()")
    assert address_of(page) == "#statistic=weight_first&layer=2&head=5"
    page.run("history.back()")
    page.wait(lambda: page.text("#head-title") == "Layer 3, head 5")
    page.run("history.back()")
    page.wait(lambda: page.text("#about-title") == "Entropy")
    page.run("history.forward()")
    page.wait(lambda: page.text("#about-title") == "Weight on the first token")
    assert not page.driver.find_element(By.ID, "link-trouble").is_displayed()
    assert_quiet(page)


@pytest.mark.slow
def test_an_address_says_the_difference_and_the_site_of_a_layer_that_has_several(
    open_page: Callable[..., Page], results: dict[str, Results]
) -> None:
    page = open_page("encoder", address="#statistic=entropy&show=difference")
    result = results["encoder"]
    value = values_of(result, "entropy")
    control = values_of(result, "entropy/reinitialised")
    assert_map_shows(page, result, {cell: value[cell] - control[cell] for cell in value}, size=5)
    page, (*_, last) = open_page("encoder_decoder"), results["encoder_decoder"].run.sites
    page.choose("#site", last.index)
    address = address_of(page)
    assert f"layer={last.layer}&head=0&site={last.name}" in address
    page = open_page("encoder_decoder", address=address)
    assert last.name in page.text("#head-site")


NOT_THERE = {
    "#statistic=nothing&layer=99&head=3": ("the statistic nothing; layer 99.", "Layer 1, head 3"),
    "#site=%3Cimg%20src%3Dx%20onerror%3Dwindow.hacked%3D1%3E": (
        "the site <img src=x onerror=window.hacked=1>.",
        "Layer 1, head 3",
    ),
    "#constructor=1&toString=2": ("", "Layer 1, head 3"),
    "#layer=3&head=12": ("head 12 in layer 3.", "Layer 3, head 0"),
    "#layer=3&head=two": ("head two in layer 3.", "Layer 3, head 0"),
}
"""What is said of an address, and the head that is shown for it."""


@pytest.mark.slow
def test_an_address_that_names_what_is_not_there_is_told_so(open_page: Callable[..., Page]) -> None:
    """The first when the page is loaded, the others when the address of an open page changes."""
    page = open_page("encoder", address=next(iter(NOT_THERE)))
    for address, (said, shown) in NOT_THERE.items():
        page.run("(location.hash = arguments[0])", address)
        wanted = said and f"The address of this page names something that is not in this result: {said}"
        page.wait(lambda wanted=wanted: page.text("#link-trouble") == wanted)
        assert page.text("#head-title") == shown
    assert page.run("window.hacked === undefined")
    assert_quiet(page)


@pytest.mark.slow
def test_the_map_is_walked_by_keyboard(open_page: Callable[..., Page], results: dict[str, Results]) -> None:
    kind = "encoder_decoder"  # layers of several kinds lie below one another
    page = open_page(kind, address="#statistic=entropy")
    run = results[kind].run
    page.run("document.getElementById('difference').focus()")
    for _ in range(3):
        if page.run("document.activeElement.id") != "map":
            ActionChains(page.driver).send_keys(Keys.TAB).perform()
    assert page.run("document.activeElement.id") == "map"
    assert page.run("document.getElementById('map').getAttribute('aria-label')").startswith("Entropy, by layer")  # pyright: ignore
    press = ActionChains(page.driver).send_keys

    def told() -> str:
        return page.text("#map-cell")

    press(Keys.PAGE_UP, Keys.HOME).perform()
    assert told().startswith("Layer enc 0, head 0:")
    value = values_of(results[kind], "entropy")[run.sites[0].name, 0]
    assert float(told().split(": ")[1].split(" ±")[0]) == pytest.approx(value, rel=0.02)
    press(Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN).perform()
    assert "ayer enc 1, head 1:" in told()
    outline = "document.getElementById('map').layout.shapes.at(-1)"
    assert page.run(f"[{outline}.x0, {outline}.x1]") == [0.5, 1.5]
    assert "head=1" not in address_of(page)
    press(Keys.END, Keys.PAGE_DOWN, Keys.ENTER).perform()
    last = run.sites[-1]
    heads = run.sites[-1].heads
    assert page.text("#head-title").endswith(f"head {heads - 1}")
    assert last.name in page.text("#head-site")
    assert page.run("document.activeElement.id") == "head-title"
    assert told() == ""
    assert_quiet(page)


@pytest.mark.slow
def test_each_kind_of_attention_has_its_own_colours(
    open_page: Callable[..., Page], results: dict[str, Results]
) -> None:
    page = open_page("encoder_decoder", address="#statistic=entropy")
    result = results["encoder_decoder"]
    kinds = {}
    values = values_of(result, "entropy")
    for site in result.run.sites:
        stack = site.name.split(".")[0]
        kinds.setdefault((stack, site.kind), []).extend(values[site.name, head] for head in range(site.heads))
    drawn = page.run(
        "document.getElementById('map').data.filter(({type}) => type === 'heatmap').map(({zmin, zmax}) => [zmin, zmax])"
    )
    expected = [[min(each), max(each)] for each in kinds.values()]
    np.testing.assert_allclose(drawn, expected, rtol=2**-15)  # pyright: ignore
    legend = page.text("#map-legend")
    for name in ("Encoder self-attention:", "Decoder causal self-attention:", "Decoder cross-attention:"):
        assert name in legend
    page.show("#map")
    # A click in the last row, below the titles of three kinds, opens the last site.
    area = page.driver.find_element(By.CSS_SELECTOR, "#map .nsewdrag")
    ActionChains(page.driver).move_to_element_with_offset(
        area, round(area.size["width"] * (0.5 / 4 - 0.5)), area.size["height"] // 2 - 6
    ).click().perform()
    page.wait(lambda: result.run.sites[-1].name in page.text("#head-site"))
