"""Formulas of the site in the browser: copied as LaTeX and whole, and no wider than a telephone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Keys
from tests.support.report.browsing import NARROW, Page
from tests.test_formulas import markdown

ASSETS = Path(__file__).parent.parent.parent / "docs" / "assets"
LONG = " + ".join(f"\\alpha_{{{i}}}" for i in range(40))
TEXT = f"The mean $`\\bar{{x}} = \\frac{{1}}{{n}}\\sum_i x_i`$ is\n\n```math\n{LONG}\n```\n\nand in a line $`{LONG}`$."

pytestmark = [pytest.mark.slow, pytest.mark.needs("browser")]


@pytest.fixture
def page(new_tab: Callable[..., Page]) -> Page:
    """A page of the site with three formulas, and a place to paste to."""
    style = (ASSETS / "site.css").read_text(encoding="utf-8")
    script = (ASSETS / "formulas.js").read_text(encoding="utf-8")
    viewport = "<meta name='viewport' content='width=device-width'>"
    head = f"<!DOCTYPE html><html data-ready='yes'><head><meta charset='utf-8'>{viewport}<style>{style}</style></head>"
    body = f"<body class='md-typeset'>{markdown().convert(TEXT)}<textarea></textarea><script>{script}</script></body>"
    shown = new_tab(NARROW)
    shown.open(f"{head}{body}</html>")
    return shown


def pasted(page: Page, first: str, last: str) -> str:
    """What arrives in a field if the text between two nodes, which JavaScript finds, is copied there by the keyboard."""
    page.run(f"document.getSelection().setBaseAndExtent({first}, 0, {last}, 1)")
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys("c").key_up(Keys.CONTROL).perform()
    page.run("document.querySelector('textarea').focus()")
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
    return str(page.run("document.querySelector('textarea').value"))


def test_a_part_of_a_formula_is_copied_whole(page: Page) -> None:
    inside = "document.querySelector('math mfrac mi').firstChild"
    assert pasted(page, inside, inside) == "$\\bar{x} = \\frac{1}{n}\\sum_i x_i$"


def test_text_with_formulas_is_copied_with_their_latex(page: Page) -> None:
    lines = pasted(page, "document.querySelector('p').firstChild", "document.querySelectorAll('p')[1].lastChild")
    assert lines == f"The mean $\\bar{{x}} = \\frac{{1}}{{n}}\\sum_i x_i$ is\n$${LONG}$$\nand in a line ${LONG}$."


def test_long_formulas_scroll_in_their_place(page: Page) -> None:
    assert page.run("document.documentElement.scrollWidth") == NARROW
    for place in ("div.formula", ".long.formula"):
        box = f"document.querySelector('{place}')"
        assert page.run(f"{box}.scrollWidth > {box}.clientWidth")
        assert page.run(f"{box}.clientWidth <= {NARROW}")


def test_the_latex_is_not_shown(page: Page) -> None:
    assert "alpha" not in page.text("body")
