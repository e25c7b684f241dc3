"""The page of a training run: what it draws of it, what it says, and that it stays small."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from plotly import offline

from massieu.errors import InputError
from massieu.report import curves
from massieu.storage.record_lines import TrainingRun

SETTINGS = {"prefix": "massieu", "model": "Small", "layers": 2, "heads": [2, 2], "every": 100}


def training_run(name: str = "run", steps: int = 6, **numbers: Any) -> TrainingRun:
    """A run of two layers; ``numbers`` replace what a step has, as functions of the step."""
    records = {}
    for step in range(0, 100 * steps, 100):
        record = {"massieu/loss": 4.0 - step / 1000, "massieu/gradient_norm": 1.0, "massieu/weight_of_mine": 7.0}
        for part, factor in (("mean", 1.0), ("min", 0.5), ("max", 2.0)):
            record[f"massieu/entropy_{part}"] = factor * (1 + step / 1000)
            record[f"massieu/largest_logit_{part}"] = factor * 2
            for layer in range(2):
                record[f"massieu/layer{layer}/entropy_{part}"] = factor * (1 + layer)
        record |= {"massieu/largest_logit_layer": 1.0, "massieu/largest_logit_head": 0.0}
        record["massieu/layer1/head0/entropy"] = 0.25
        records[step] = record | {f"massieu/{key}": made(step) for key, made in numbers.items()}
    return TrainingRun(name, dict(SETTINGS), records)


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def panel_of(page: str, name: str) -> dict[str, Any]:
    [panel] = [panel for panel in data_of(page)["panels"] if panel["name"] == name]
    return panel


@pytest.fixture(scope="module")
def page() -> str:
    return curves.render([training_run(), training_run("other")], training_run("healthy"))


def test_the_drawing_library_is_packed(page: str):
    assert len(page.encode()) < 0.5 * len(offline.get_plotlyjs().encode())
    assert page.count('<script type="text/plain" id="plotly">') == 1


def test_loss_and_gradient_norm_are_first_and_unknown_numbers_last(page: str):
    assert [panel["name"] for panel in data_of(page)["panels"]] == [
        "loss", "gradient_norm", "largest_logit", "entropy", "weight_of_mine",
    ]  # fmt: skip
    assert [panel["name"] for panel in data_of(page)["panels"] if panel["first"]] == ["loss", "gradient_norm"]


def test_a_panel_holds_every_runs_numbers(page: str):
    lines = {(line["run"], line["part"]): line for line in panel_of(page, "entropy")["lines"]}
    assert list(lines) == [(run, part) for run in range(3) for part in ("mean", "max", "min")]
    assert lines[0, "max"]["steps"] == [0, 100, 200, 300, 400, 500]
    assert lines[2, "max"]["values"] == [2.0, 2.2, 2.4, 2.6, 2.8, 3.0]
    [first, *_] = [line for line in panel_of(page, "largest_logit")["lines"] if line["part"] == "max"]
    assert first["where"] == ["layer 1, head 0"] * 6
    assert [run["reference"] for run in data_of(page)["runs"]] == [False, False, True]


def test_runs_of_one_name_are_told_apart():
    names = ["a (1)", "a (1)", "a", "a", "a (2)"]
    shown = [run["name"] for run in data_of(curves.render([training_run(name) for name in names]))["runs"]]
    assert shown == ["a (1)", "a (1) (2)", "a", "a (2)", "a (2) (2)"]


def test_maps_are_of_layers_and_of_heads_apart(page: str):
    maps = {(entry["run"], entry["quantity"]): entry for entry in data_of(page)["maps"]}
    assert maps[0, "entropy_min"]["rows"] == ["layer0", "layer1"]
    assert maps[0, "entropy_min"]["values"] == [[0.5] * 6, [1.0] * 6]
    assert maps[0, "entropy/head"]["rows"] == ["layer1/head0"]
    assert len(maps) == 3 * 4


def test_numbers_that_are_none_leave_a_gap_and_a_mark_and_are_named():
    values = {200: math.nan, 300: math.inf, 400: -math.inf}
    page = curves.render([training_run(loss=lambda step: values.get(step, 1.0))])
    panel = panel_of(page, "loss")
    assert panel["lines"][0]["values"] == [1, 1, None, None, None, 1]
    assert panel["lost"] == [{"run": 0, "part": "", "steps": [200, 300, 400], "values": ["NaN", "∞", "−∞"]}]
    assert "<strong>NaN or infinite</strong> from step 200: massieu/loss." in page
    assert 'id="lost"' not in curves.render([training_run()])


def test_alarms_are_listed_by_episode_and_marked():
    run = training_run(loss=lambda step: 9.0 if step else math.nan)
    ringing = {100: ["massieu/loss"], 200: ["massieu/loss", "massieu/entropy_min"], 500: ["massieu/loss"]}
    page = curves.render([replace(run, alarms=ringing)])
    rows = re.findall(r'<th scope="row"><code>(.*?)</code></th>(.*?)</tr>', page)
    result = [(key, *re.findall(r'<td data-label="[^"]*">(.*?)</td>', cells)) for key, cells in rows]
    assert result == [
        ("massieu/loss", "100", "200", "2", "9"),
        ("massieu/entropy_min", "200", "200", "1", "0.600"),
        ("massieu/loss", "500", "500", "1", "9"),
    ]
    assert panel_of(page, "loss")["alarms"] == [{"part": "", "steps": [100, 200, 500], "values": [9, 9, 9]}]
    assert panel_of(page, "entropy")["alarms"] == [{"part": "min", "steps": [200], "values": [0.6]}]


def test_an_alarm_of_a_layer_is_drawn_on_the_models_curve():
    page = curves.render([replace(training_run(), alarms={200: ["massieu/layer1/entropy_min"], 300: ["massieu/loss"]})])
    assert panel_of(page, "entropy")["alarms"] == [{"part": "min", "steps": [200], "values": [0.6]}]


def test_axes_are_logarithmic_where_positive_numbers_span_much():
    page = curves.render([training_run(loss=lambda step: 10.0 ** (step / 100), gradient_norm=lambda step: step)])
    assert panel_of(page, "loss")["logarithmic"]
    assert not panel_of(page, "gradient_norm")["logarithmic"]  # it has a zero
    assert not panel_of(page, "entropy")["logarithmic"]


@pytest.mark.medium
def test_a_long_run_keeps_its_extremes_and_stays_small():
    def spiky(step: int) -> float:
        return {177_700: 1e6, 133_300: -1e6, 155_500: math.nan}.get(step, 1.0 + step % 700 / 1000)

    numbers = {f"layer{layer}/head{head}/entropy": spiky for layer in range(12) for head in range(2)}
    run = training_run("long", 2_000, loss=spiky, **numbers)
    page = curves.render([run])
    line, *_ = panel_of(page, "loss")["lines"]
    assert len(line["steps"]) <= 2 * curves.MOST_POINTS
    assert dict(zip(line["steps"], line["values"], strict=True))[177_700] == 1e6
    assert dict(zip(line["steps"], line["values"], strict=True))[133_300] == -1e6
    assert panel_of(page, "loss")["lost"][0]["steps"] == [155_500]
    heads = next(entry for entry in data_of(page)["maps"] if entry["quantity"] == "entropy/head")
    assert max(value for value in heads["values"][0] if value is not None) == 1e6
    assert heads["interval"] and len(heads["values"][0]) <= curves.MOST_COLUMNS
    assert "the smallest and the largest number of each interval are drawn" in page
    assert len(page) - len(curves.render([training_run()])) < 4_000_000


def test_of_an_interval_the_extremes_and_what_its_name_says_are_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 4)
    monkeypatch.setattr(curves, "MOST_COLUMNS", 2)
    values = dict(zip(range(0, 600, 100), (3.0, 1.0, 2.0, 5.0, math.inf, 4.0), strict=True))
    numbers = dict.fromkeys(("loss", "layer0/a_mean", "layer0/a_min", "layer0/a_max", "layer0/a"), values.__getitem__)
    page = curves.render([training_run(**numbers)])
    [line] = panel_of(page, "loss")["lines"]
    # Of (3, 1, 2) the 3 and the 1, of (5, ∞, 4) all: the least, the largest and the gap.
    assert dict(zip(line["steps"], line["values"], strict=True)) == {0: 3, 100: 1, 300: 5, 400: None, 500: 4}
    maps = {entry["quantity"]: entry for entry in data_of(page)["maps"]}
    assert [maps[name]["values"] for name in ("a_mean", "a_min", "a_max", "a")] == [
        [[2, None]], [[1, None]], [[3, None]], [[3, None]],
    ]  # fmt: skip
    assert maps["a_mean"]["lost"] == [[0, 1, "∞"]]
    assert maps["a_mean"]["steps"] == [0, 300]


def test_what_makes_runs_incomparable_and_what_was_left_out_is_said():
    other = replace(training_run("other"), settings=SETTINGS | {"layers": 12}, notes=["line 3 of other was cut off"])
    page = curves.render([training_run(), other])
    assert "Other cannot be compared with run: it had layers 12 in place of 2." in page
    assert "Line 3 of other was cut off." in page


def test_every_string_is_escaped():
    bad = "</script><script>window.hacked = 1</script><b>"
    run = training_run(bad, **{f"{bad}_mean": lambda step: math.nan, f"layer0/{bad}": lambda step: 1.0})
    run.settings["model"] = bad
    page = curves.render([replace(run, notes=[bad], alarms={100: [bad]})], training_run(bad))
    assert page.count(bad) == 0
    assert "</script><script>window.hacked" not in page


def test_nothing_to_draw_is_said():
    with pytest.raises(InputError, match="there is nothing to draw: no run was given"):
        curves.render([])
