"""Alarms from a run's own history: when they ring, what they say, and that noise and learning do not ring them."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

import massieu
from massieu.probing.monitor.alarm_history import RUNNING, WINDOW, Alarm, Numbers, Place
from massieu.probing.monitor.alarm_rules import RULES
from massieu.probing.monitor.alarms import Alarms
from massieu.report.curves import render
from massieu.storage.record_lines import read_run

RULE = {rule.title: rule for rule in RULES}
CALM = [20.0, 20.5, 19.8, 20.1, 20.3, 19.9, 20.2, 20.0] * 2 + [20.1, 20.0]
"""A history of eighteen records."""


def heads(values: list[list[float]] | np.ndarray, quantity: str = "largest_logit") -> list[dict[str, Numbers]]:
    """Records of heads of one layer; shape (records, heads)."""
    table = np.asarray(values, dtype=float)
    places = tuple(Place("layer3", head) for head in range(table.shape[1]))
    return [{quantity: Numbers(places, row)} for row in table]


def rung(alarms: Alarms, records: list[dict[str, Numbers]], every: int = 100, first: int = 0) -> list[list[Alarm]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [alarms(record, first + place * every) for place, record in enumerate(records)]


def steps_in_alarm(values: list[float], quantity: str = "largest_logit", **more: int) -> list[int]:
    found = rung(Alarms(), heads([[value] for value in values], quantity), **more)
    return [alarms[0].step for alarms in found if alarms]


# --- when ----------------------------------------------------------------------------------------------------------------


@every_row(
    ("after", "expected"),
    [
        ([61.0, 61.0, 61.0], [1900, 2000]),  # from the second record running, above 3 × 20.1
        ([59.0, 59.0, 59.0], []),  # not by a factor of three
        ([61.0, 20.0, 61.0, 61.0], [2100]),  # a return begins the count again
        ([61.0, 61.0, 20.0, 20.0], [1900]),  # and ends the alarm
        ([1e6, math.inf, math.inf], [1900, 2000]),
        ([61.0, math.nan, 61.0], [1900, 2000]),  # NaN is as the number before
        ([6.0, 6.0, 6.0], []),  # smaller logits are no trouble
    ],
)
def test_two_records_running_outside_a_factor_of_the_median_of_the_history(after: list[float], expected: list[int]):
    assert steps_in_alarm(CALM + after) == expected


def test_an_alarm_lasts_while_the_number_stays_outside_the_history_that_it_had():
    """The history moves on, but not what the alarm compares with: 40 records are more than the window holds."""
    assert steps_in_alarm(CALM + [80.0] * 40 + [30.0], every=1) == list(range(19, 58))


def test_what_is_negligible_does_not_grow():
    """Logits begin near .1, and learning takes them to 9 within a few records: below 10 they count as 10."""
    assert steps_in_alarm([0.1] * 20 + [0.5, 2.0, 5.0, 9.0, 9.0, 9.0]) == []
    assert steps_in_alarm([0.1] * 20 + [0.5, 2.0, 5.0, 31.0, 31.0, 31.0]) != []


def test_before_there_is_a_history_the_first_record_is_what_numbers_are_compared_with():
    """Tokens that collapse in the first steps: 9.7 → 2e-6. Learning halves the spread of others, and of a few more."""
    assert steps_in_alarm([9.7, 2e-6, 2e-6], "spread", every=5) == [10]
    assert steps_in_alarm([9.7, 4.0, 1.5, 1.3, 1.6, 2.9, 4.4], "spread") == []


def test_a_monitor_that_begins_late_has_no_history():
    """Rebuilt at step 1000, where numbers are as they were at the end, it is quiet."""
    assert steps_in_alarm([50.0, 55.0, 48.0, 52.0] * 10, first=1000) == []


def test_noise_has_to_be_exceeded_too():
    """The same rise by 3.2 is an alarm of a calm head, and chance for one whose logarithm walks by .5 at each record."""
    generator = np.random.default_rng(0)
    calm = 20 * np.exp(0.01 * generator.normal(size=18).cumsum())
    noisy = 20 * np.exp(0.5 * generator.normal(size=18))
    assert steps_in_alarm([*calm, 64, 64, 64]) != []
    assert steps_in_alarm([*noisy, 64, 64, 64]) == []


@every_row(
    ("title", "usual", "inside", "outside"),
    [
        ("growing logits", 20.0, 59.0, 61.0),
        ("sharpening attention", 2.0, 4.9, 5.1),
        ("entropy collapse", 1.8, 1.21, 1.19),
        ("uniform attention", 0.3, 0.235, 0.225),
        ("collapsing tokens", 9.7, 7.5, 7.4),
        ("falling rank", 11.0, 5.1, 4.9),
        ("growing gradient", 0.5, 1.49, 1.51),
        ("lost updates", 0.1, 0.49, 0.51),
    ],
)
def test_each_rule_has_its_factor(title: str, usual: float, inside: float, outside: float):
    quantity = RULE[title].quantity
    history = [usual] * (WINDOW + RUNNING)
    assert steps_in_alarm(history + [inside] * 3, quantity) == []
    found = rung(Alarms(), heads([[value] for value in history + [outside] * 3], quantity))
    assert [[alarm.rule.title for alarm in alarms] for alarms in found[-2:]] == [[title], [title]]


def test_a_rule_with_a_bound_does_not_compare_with_its_history():
    assert steps_in_alarm([0.01, 0.02, 0.01, 0.4, 0.4, 0.4], "unchanged_weights", every=1) == []
    assert steps_in_alarm([0.8, 0.8, 0.8, 0.8, 0.4, 0.8], "unchanged_weights", every=1) == [2, 3]


# --- false alarms ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_row(
    ("kind", "deviation", "count"),
    [("walk", 0.1, 1), ("walk", 0.1, 100), ("walk", 0.3, 24), ("noise", 0.3, 100), ("autoregressive", 0.3, 24)],
)
def test_noise_rings_at_most_one_run_in_twenty(kind: str, deviation: float, count: int):
    """Logarithms of all heads walk, or scatter around a level, for 100 records; 20 runs of each."""
    generator = np.random.default_rng(0)
    false_alarms = 0
    for _ in range(20):
        levels = deviation * generator.normal(size=(100, count))
        if kind == "walk":
            levels = levels.cumsum(0)
        if kind == "autoregressive":
            for row in range(1, len(levels)):
                levels[row] += 0.8 * levels[row - 1]
        false_alarms += any(rung(Alarms(), heads(1e20 * np.exp(levels))))
    assert false_alarms <= 1


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_units_do_not_matter(scale: float, seed: int):
    """Numbers that are all multiplied ring at the same steps."""
    levels = np.random.default_rng(seed).normal(size=(40, 3)).cumsum(0)
    one, other = (
        [bool(alarms) for alarms in rung(Alarms(), heads(factor * np.exp(levels), "spread"))] for factor in (1.0, scale)
    )
    assert one == other


# --- what is said ----------------------------------------------------------------------------------------------------


def test_an_alarm_names_place_since_when_comparison_remedy_and_page():
    after = np.array([[20.0, 90.0, 65.0], [21.0, 200.0, 65.0]])
    found = rung(Alarms("mine"), heads(np.concatenate([np.tile(CALM, (3, 1)).T, after])))
    [alarm] = found[-1]
    assert alarm[1:] == ("mine/layer3/largest_logit_max", 200.0, pytest.approx(20.05), 1900, 1800, ("layer3", 1), 2)
    assert str(alarm) == (
        "growing logits in layer3, head 1 and 1 more head, since step 1800: largest logit is 200 at step 1900, where its own "
        "history has 20.1. First lower the learning rate, or clip with massieu.nn.clip_logits. See "
        "docs/how-to/alarms.md#growing-logits"
    )


def test_an_alarm_of_the_mean_over_heads_names_the_head_that_moved_most():
    values = [[2.0, 1.0, 3.0]] * 18 + [[1.9, 0.05, 1.5]] * 2
    [alarm] = rung(Alarms(), heads(values, "entropy"))[-1]
    assert (alarm.key, alarm.place, alarm.places) == ("massieu/entropy_mean", ("layer3", 1), 1)
    assert (alarm.value, alarm.usual) == pytest.approx((1.15, 2.0))
    assert "entropy collapse, most in layer3, head 1, since step 1800: the mean over heads of entropy is 1.15" in str(
        alarm
    )


def test_each_rule_is_warned_of_once_until_it_is_quiet_again():
    records = heads([[value] for value in [*CALM, 80, 80, 80, 20, 20, 80, 80, 80]])
    alarms = Alarms()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for place, record in enumerate(records):
            alarms(record, 100 * place)
    sentences = [str(each.message) for each in said]
    assert [sentence.partition(":")[0] for sentence in sentences] == ["massieu.Monitor"] * 2
    assert ["since step 1800" in sentences[0], "since step 2300" in sentences[1]] == [True, True]


def test_every_rule_has_its_place_on_the_page():
    text = (Path(massieu.__file__).parents[2] / "docs" / "how-to" / "alarms.md").read_text()
    for rule in RULES:
        assert rule.page == f"docs/how-to/alarms.md#{rule.title.replace(' ', '-')}"
        assert f"\n## {rule.title.capitalize()}\n" in text


# --- what is missing -------------------------------------------------------------------------------------------------


def test_quantities_that_a_record_lacks_are_left_out_and_other_places_begin_anew():
    alarms = Alarms()
    assert rung(alarms, [{}, {}, *heads([[20.0]] * 18), {}, *heads([[20.0, 80.0]] * 3)]) == [[]] * 24


def test_a_run_that_goes_back_begins_new_histories():
    alarms = Alarms()
    rung(alarms, heads([[value] for value in CALM]))
    assert rung(alarms, heads([[80.0]] * 5), first=500) == [[]] * 5


def test_a_head_that_is_nan_from_the_first_record_is_never_in_alarm():
    values = np.full((30, 2), math.nan)
    values[:, 1] = 20.0
    values[20:, 1] = 90.0
    found = rung(Alarms(), heads(values))
    assert [alarms[0].place for alarms in found if alarms] == [("layer3", 1)] * 9


# --- in a monitor ----------------------------------------------------------------------------------------------------


def monitored(path: Path | None = None, **more: Any) -> tuple[torch.nn.Module, massieu.Monitor, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    return model, massieu.Monitor(model, batch, every=10, to=path, **more), batch


@pytest.mark.medium
def test_a_monitor_rings_writes_and_draws_without_a_reference(tmp_path: Path):
    """One layer's queries grow a thousandfold; alarms are in the record, in the file and in the page's table."""
    path = tmp_path / "run.jsonl"
    model, monitor, _ = monitored(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(0, 200, 10):
            monitor(step, loss=1.0)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[:8] *= 1000  # pyright: ignore
    with pytest.warns(UserWarning, match="growing logits in layer1, head"):
        records = [monitor(step, loss=1.0) for step in (200, 210)]
    found = [[alarm.rule.title for alarm in record.alarms] for record in records if record is not None]
    assert found[0] == []
    assert {"growing logits", "sharpening attention"} <= set(found[1])
    assert records[1] is not None
    assert all(alarm.place.layer == "layer1" for alarm in records[1].alarms if alarm.rule.title == "growing logits")
    keys = read_run(path).alarms[210]
    assert "massieu/layer1/largest_logit_max" in keys
    assert set(keys) <= set(records[1])
    assert "<code>massieu/layer1/largest_logit_max</code>" in render([read_run(path)])


@pytest.mark.slow
def test_training_batches_have_a_history_of_their_own_and_alarms_can_be_switched_off():
    model, monitor, batch = monitored()
    _, silent, _ = monitored(alarms=False)
    silent.model = model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(0, 200, 10):
            monitor(step)
            silent(step)
            with monitor.watch(step) as seen:
                model(1000 * batch)
            assert seen.record is not None
            assert seen.record.alarms == []
        with torch.no_grad():
            model.layers[1].self_attn.in_proj_weight[:8] *= 1000  # pyright: ignore
        assert [record.alarms for step in (200, 210) if (record := silent(step)) is not None] == [[], []]


def test_alarms_is_a_truth_value():
    with pytest.raises(TypeError, match="alarms must be True or False"):
        monitored(alarms="yes")
