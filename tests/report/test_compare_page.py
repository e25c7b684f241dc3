"""The page of a comparison: what it says and draws, that it stays small, and how it looks in a browser."""

import copy
import json
import re
from typing import Any

import polars
import pytest
from tests.report.conftest import KINDS
from tests.support.report.synthetic_results import Results, encoder

from massieu.probing.compare.comparison import Comparison
from massieu.probing.result.result import ProbeResult
from massieu.probing.result.stored import run_of
from massieu.report import compare

pytestmark = pytest.mark.medium

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


def test_a_difference_is_counted_for_its_size_too(pair: Comparison):
    """The page says of what is counted only what holds of it: smallest effects let no tiny difference through."""
    page = page_of(pair)
    assert "if its difference is at least its statistic's smallest effect" in page.replace("&#39;", "'")
    assert "tiny differences" not in page


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def small() -> Results:
    """Of two layers with three heads each."""
    made = encoder(layers=2, heads=3)
    return made._replace(run=run_of(made.run, "small"))


@pytest.fixture(scope="module")
def pair(small: Results) -> Comparison:
    return beside(small, {"base": 1.0, "tuned": 9.0})


def course_of(results: Results) -> Comparison:
    """Three steps of a training run, whose models are not given in their order."""
    return beside(results, {"step30": 1.0, "step10": 3.0, "step20": 9.0})


@pytest.fixture(scope="module")
def course(small: Results) -> Comparison:
    return course_of(small)


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
    assert "The largest change is in layer 0, head 1" in page
    assert "1 of 6 heads differs by an effect that matters in some statistic" in page
    assert page.count('class="changed-head"') == len(pair.changed(8)) == 1
    assert "no sums by unit of the text were stored for base and tuned" in page.lower()


def test_nothing_that_differs_is_said_too(small: Results):
    page = page_of(beside(small, {"one": 1.0, "other": 1.0}))
    assert "No head of other differs by an effect that matters" in page
    assert "No head differs by an effect that matters." in page


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
    for kind in KINDS:
        page = page_of(beside(results[kind], {"one": 1.0, "other": 2.0}))
        assert len(page) < 9_000_000, kind
        assert "NaN" not in json.dumps(data_of(page)), kind
