"""Formulas of the pages: written once in LaTeX, shown as MathML, copied as LaTeX."""

import re
from collections import Counter
from html import unescape
from pathlib import Path

import pytest
from markdown import Markdown
from math_core import LatexError
from mkdocs.config import load_config
from scripts.formulas import display, formulas, mathml

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ANNOTATION = re.compile(r'<annotation data-search-exclude encoding="application/x-tex">(.*?)</annotation>', re.DOTALL)


def markdown() -> Markdown:
    """As the site reads its pages."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    return Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)


def annotations(page: str) -> Counter[str]:
    """The LaTeX that a built page carries, and how often."""
    return Counter(unescape(latex) for latex in ANNOTATION.findall(page))


def prose(page: str) -> str:
    """What a reader sees of a built page, without code."""
    without_code = re.sub(r"<(pre|code|script|style|annotation)\b.*?</\1>", "", page, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", without_code))


def test_a_formula_in_a_line_carries_its_latex():
    page = markdown().convert("If $`a_i < b`$ and `$x`, so.\n\n$`x^2`$\n\n| $`p\\mid q`$ |\n|---|\n| **$`y*z*`$** |\n")
    assert annotations(page) == Counter(["a_i < b", "x^2", "p\\mid q", "y*z*"])
    assert "<msub><mi>a</mi><mi>i</mi></msub>" in page
    assert "<code>$x</code>" in page
    assert page.count("<p>") == 2
    assert page.count("<em>") == 0


def test_a_sign_behind_a_formula_stays_on_its_line():
    page = markdown().convert("(of $`x`$), $`y`$ and $`z`$.")
    assert re.findall(r"</math>([^<]*)</span>", page) == ["),", "", "."]


def test_a_displayed_formula_stands_alone():
    page = markdown().convert("So\n\n```math\nx = 1, \\\\\ny = 2\n```\n\nholds.")
    assert annotations(page) == Counter(["x = 1, \\\\\ny = 2"])
    assert '<div class="formula"><math display="block">' in page


def test_a_formula_that_may_be_wider_than_a_telephone_scrolls():
    page = markdown().convert("$`x`$ and $`" + " + ".join(["x"] * 20) + "`$")
    assert page.count('class="formula"') == page.count('class="long formula"') == 1


def test_an_unknown_command_stops_the_build():
    with pytest.raises(LatexError, match="nosuchcommand"):
        mathml(r"\nosuchcommand x")
    with pytest.raises(LatexError):
        display(r"\frac{1}{")


@pytest.mark.medium
def test_every_formula_of_every_page_is_shown_and_carries_its_source():
    reader = markdown()
    total = 0
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        page = reader.reset().convert(text)
        assert annotations(page) == Counter(formulas(text)), path.name
        assert not re.findall(r".{0,30}[$\\].{0,30}", prose(page)), path.name
        total += len(formulas(text))
    assert total > 1000
