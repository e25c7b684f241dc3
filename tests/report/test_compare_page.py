"""The page of a comparison: what it says and draws, that it stays small, and how it looks in a browser."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import polars
import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait
from tests.support.report.synthetic_results import Results

from massieu.probing.compare.comparison import Comparison
from massieu.probing.result import ProbeResult
from massieu.report import compare

LEAD = "entropy_fraction"


def beside(results: Results, factors: dict[str, float], head: int = 1, layer: int = 0) -> Comparison:
    """A result beside copies of it in which one head's lead statistic is multiplied."""
    first = ProbeResult(copy.deepcopy(results.run), results.details, results.heads, results.layers)
    made = [first]
    for factor in list(factors.values())[1:]:
        one = (polars.col("layer") == layer) & (polars.col("head") == head) & (polars.col("statistic") == LEAD)
        value = polars.when(one).then(polars.col("value") * factor).otherwise(polars.col("value")).alias("value")
        made.append(
            ProbeResult(copy.deepcopy(results.run), results.details, results.heads.with_columns(value), results.layers)
        )
    return Comparison.of(made, list(factors))


def page_of(comparison: Comparison) -> str:
    return comparison._page()


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def pair(results: dict[str, Results]) -> Comparison:
    return beside(results["encoder"], {"base": 1.0, "tuned": 9.0})


@pytest.fixture(scope="module")
def course(results: dict[str, Results]) -> Comparison:
    return beside(results["encoder"], {"step30": 1.0, "step10": 3.0, "step20": 9.0})


def test_the_maps_hold_both_values_and_the_difference(pair: Comparison):
    data = data_of(page_of(pair))
    table = pair.differences.filter((polars.col("scope") == "head") & (polars.col("statistic") == LEAD))
    cells = data["pairs"]["tuned"][LEAD]
    for name, drawn in (("first", data["first"][LEAD]), *((name, cells[name]) for name in ("second", "difference"))):
        assert drawn == pytest.approx([*table[name]], rel=1e-3, nan_ok=True), name
    assert sum(value != 0 for value in cells["difference"]) == 1
    assert data["lead"] == LEAD
    assert data["course"] is None


def test_the_changed_head_is_said_in_words(pair: Comparison):
    page = page_of(pair)
    assert "1 of " in page
    assert "heads differ significantly in at least one statistic. The largest change is in layer 0, head 1" in page
    assert page.count('class="changed-head"') == len(pair.changed(8)) == 1
    assert "no sums by unit of the text were stored for base and tuned" in page.lower()


def test_nothing_that_differs_is_said_too(results: dict[str, Results]):
    page = page_of(beside(results["encoder"], {"one": 1.0, "other": 1.0}))
    assert "No head of other differs significantly" in page
    assert "No head differs significantly." in page


def test_a_course_is_drawn_in_the_order_of_steps(course: Comparison):
    data = data_of(page_of(course))
    assert data["course"]["steps"] == [10, 20, 30]
    assert data["course"]["models"] == ["step10", "step20", "step30"]
    own = course.values.filter(
        (polars.col("scope") == "head") & (polars.col("statistic") == LEAD) & (polars.col("layer") == 0)
    )
    means = [own.filter(polars.col("model") == model)["value"].mean() for model in data["course"]["models"]]
    assert data["course"]["lines"][LEAD][0] == pytest.approx(means, rel=1e-3)


def test_many_models_do_not_make_the_page_large(course: Comparison, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "MOST_NUMBERS", 10)
    page = page_of(course)
    assert data_of(page)["drawn"] == [2]
    assert "The maps of 1 models are left out" in page


def test_strings_of_the_model_and_the_text_are_escaped(results: dict[str, Results]):
    hostile = beside(results["hostile"], {"<script>alert(1)</script>": 1.0, "</title><b>\ud800": 9.0}, head=0)
    page = page_of(hostile)
    page.encode("utf-8")
    assert "<script>alert" not in page
    assert "</title><b>" not in page
    scripts = re.findall(r"<script[^>]*>", page)
    assert len(scripts) == 3


@pytest.mark.slow
def test_every_kind_of_result_is_drawn(results: dict[str, Results]):
    for kind, each in results.items():
        page = page_of(beside(each, {"one": 1.0, "other": 2.0}))
        assert len(page) < 9_000_000, kind
        assert "NaN" not in json.dumps(data_of(page)), kind


@pytest.fixture
def shown(driver: ChromiumDriver, course: Comparison, tmp_path: Path) -> ChromiumDriver:
    (tmp_path / "report.html").write_text(page_of(course), encoding="utf-8")
    driver.get((tmp_path / "report.html").as_uri())
    WebDriverWait(driver, 20).until(lambda each: each.execute_script("return document.documentElement.dataset.ready"))
    return driver


@pytest.mark.medium
@pytest.mark.needs("browser")
def test_the_browser_draws_what_is_chosen(shown: ChromiumDriver, course: Comparison):
    def drawn(place: str) -> list[list[float | None]]:
        return shown.execute_script(f"return document.getElementById('map-{place}').data[0].z")

    differences = [value for row in drawn("difference") for value in row if value]
    assert len(differences) == 1
    before = differences[0]
    Select(shown.find_element(By.ID, "model")).select_by_visible_text("step10")
    after = [value for row in drawn("difference") for value in row if value]
    assert after[0] == pytest.approx(before * 2 / 8, rel=1e-3)  # 3 − 1 times the value, and 9 − 1
    assert len(shown.execute_script("return document.getElementById('course-drawing').data")) == len(drawn("first"))
    shown.execute_script("document.getElementById('theme').click()")
    for width in (1400, 500):
        shown.set_window_size(width, 900)
        fits = "return document.documentElement.scrollWidth <= window.innerWidth"
        WebDriverWait(shown, 10).until(lambda each: each.execute_script(fits))  # noqa: B023 - drawn again after a moment
    assert [entry for entry in shown.get_log("browser") if entry["level"] == "SEVERE"] == []
