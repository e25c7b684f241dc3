"""Cards of the papers' questions against tables whose answer is known."""

import copy
from typing import Any

import numpy as np
import pytest
from tests.support.report.synthetic_results import Results, Rows, empty_table, encoder

from massieu.probing.result.stored import run_of
from massieu.probing.statistics.registry import GROUPS, OPT_IN, STATISTICS
from massieu.report.page import render
from massieu.report.questions import QUESTIONS, questions_of
from massieu.storage.record import Statistic

LAYERS = 2
HEADS = 4
CELLS = LAYERS * HEADS


def made(q_values: Any, own: Any, null: Any | None = 1.0, group: str = "memory") -> Results:
    """A run whose one statistic has these numbers in its heads."""
    result = encoder(LAYERS, HEADS)
    record = result.run | {"statistics": []}
    run = run_of(record, "made")
    run.statistics = [
        Statistic(
            "asked", "What was asked", group=group, question="Is it so?", caveat="<b>Nothing</b> else.", unit="nats",
            scope="head", control="mismatched_keys", scale="positive", smallest=0.1,
        )
    ]  # fmt: skip
    rows = Rows()
    own, q_values = (np.broadcast_to(each, CELLS).reshape(LAYERS, HEADS) for each in (own, q_values))
    for site, values, tested in zip(run.sites, own, q_values, strict=True):
        rows.add(site.name, site.layer, "asked", values, 0.1, 100)
        if null is not None:
            rows.add(site.name, site.layer, "asked/mismatched_keys", np.broadcast_to(null, HEADS), 0.1, 100)
            rows.add(site.name, site.layer, "asked/reinitialised", np.broadcast_to(null, HEADS), 0.1, 100)
        rows.add(site.name, site.layer, "asked/q_value", tested, np.nan, 1)
    return Results(run, {}, rows.table(), empty_table())


@pytest.mark.parametrize(
    ("q_values", "own", "verdict"),
    [
        (0.9, 2.0, "no difference from untrained models in any of 8 heads"),
        (0.01, 2.0, "above its control and untrained models in 8 of 8 heads"),
        (0.01, 0.5, "below its control and untrained models in 8 of 8 heads"),
        ([0.01] * 4 + [0.5] * 4, 0.5, "below its control and untrained models in 4 of 8 heads"),
        ([0.01] * 3 + [0.5] * 5, 0.5, "below its control and untrained models in 3 of 8 heads"),
        (0.01, [2.0, 0.5] * 4, "above or below its control and untrained models in 8 of 8 heads"),
        ([np.nan] * 4 + [0.05] * 4, 2.0, "no difference from untrained models in any of 4 heads"),
        (np.nan, 2.0, "too little text to test it"),
        (0.01, 1.05, "no difference from untrained models in any of 8 heads"),
    ],
)
def test_the_verdict_is_what_the_test_allows(q_values, own, verdict):
    result = made(q_values, own)
    (card,) = questions_of(result.run, result.heads, result.layers)
    (answer,) = card.answers
    assert answer.verdict == verdict
    assert (answer.middle, answer.lowest, answer.highest) == (np.median(own), np.min(own), np.max(own))
    assert answer.control == 1.0 and answer.control_name == "keys of another head"


def test_heads_without_a_number_are_not_counted():
    result = made(0.01, [np.nan] * 3 + [3.0] * 5)
    (card,) = questions_of(result.run, result.heads, result.layers)
    assert card.answers[0].count == 5 and card.answers[0].verdict.endswith("in 5 of 5 heads")
    nothing = made(0.01, np.nan)
    assert questions_of(nothing.run, nothing.heads, nothing.layers) == []


def test_without_a_control_no_verdict_is_given():
    result = made(np.nan, 2.0, None)
    (card,) = questions_of(result.run, result.heads, result.layers)
    assert card.answers[0].control is None and card.answers[0].verdict == "not compared with an untrained model"
    assert "keys of another head" not in str(card.answers[0])


def test_groups_of_other_questions_have_no_card():
    result = made(0.01, 2.0, group="attention")
    assert questions_of(result.run, result.heads, result.layers) == []
    assert 'id="questions"' not in render(result.run, result.details, result.heads, result.layers)


def test_the_page_has_the_card_and_escapes_its_words():
    result = made(0.01, 2.0)
    page = render(result.run, result.details, result.heads, result.layers)
    assert "What the papers ask" in page and QUESTIONS["memory"][0] in page
    assert "above its control and untrained models in 8 of 8 heads" in page
    assert "&lt;b&gt;Nothing&lt;/b&gt; else." in page


def test_statistics_of_sublayers_are_answered_for_sublayers():
    result = made(0.01, 2.0)
    run = copy.deepcopy(result.run)
    run.statistics = [Statistic("moved", "What moved", group="feed_forward", scope="layer", control="shuffled_tokens")]
    rows = Rows()
    for place, sublayer in enumerate(run.sublayers):
        rows.add(sublayer.name, sublayer.layer or 0, "moved", float(place), 0.1, 5, heads=False)
        for control in ("shuffled_tokens", "reinitialised"):
            rows.add(sublayer.name, sublayer.layer or 0, f"moved/{control}", 0.5, 0.1, 5, heads=False)
        rows.add(sublayer.name, sublayer.layer or 0, "moved/q_value", 0.01 if place else 0.9, np.nan, 1, heads=False)
    (card,) = questions_of(run, empty_table(), rows.table())
    number = len(run.sublayers)
    assert card.answers[0].verdict == f"above its control and untrained models in {number - 1} of {number} sublayers"


def test_every_question_is_of_a_group_and_its_first_statistic_is_one_of_it():
    for group, (question, first) in QUESTIONS.items():
        assert question.endswith("?") and group in GROUPS and group in OPT_IN
        assert STATISTICS[first].group == group
