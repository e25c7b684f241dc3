"""Alarms against a reference run: a factor of three, two calls running, once until it returns, and what is not compared."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.rows import every_row

import massieu
from massieu import InputError
from massieu.probing.monitor.alarms import Alarms
from massieu.report.curves import render
from massieu.report.record_lines import TrainingRun, read_run

KEY = "massieu/largest_logit_max"


def reference(values: dict[int, float], quantity: str = "largest_logit_max", prefix: str = "massieu") -> TrainingRun:
    records = {step: {f"{prefix}/{quantity}": value} for step, value in values.items()}
    return TrainingRun("healthy", {"prefix": prefix, "layers": 2}, records)


def rung(alarms: Alarms, values: list[float], every: int = 100, key: str = KEY) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [bool(alarms({key: value}, place * every)) for place, value in enumerate(values)]


FLAT = dict.fromkeys(range(0, 1000, 100), 2.0)


@every_row(
    ("values", "expected"),
    [
        ([6.1, 6.1, 6.1], [False, True, True]),  # from the second call running
        ([6.0, 6.0, 6.0], [False, False, False]),  # three times as much is not yet outside
        ([6.1, 5.9, 6.1, 6.1], [False, False, False, True]),  # a return begins the count again
        ([0.66, 0.66], [False, True]),  # below a third: 0.6667
        ([0.67, 0.67], [False, False]),
        ([math.nan, math.inf], [False, True]),
        ([-1.0, 0.0], [False, True]),
    ],
)
def test_outside_a_factor_of_three_in_two_calls_running(values: list[float], expected: list[bool]):
    assert rung(Alarms(reference(FLAT)), values) == expected


def test_the_least_entropy_is_outside_only_below_a_third():
    low = Alarms(reference(FLAT, "entropy_min"))
    assert rung(low, [7.0, 7.0, 0.6, 0.6], key="massieu/entropy_min") == [False, False, False, True]


def test_an_alarm_names_what_it_compared_and_is_said_once_until_it_returns():
    alarms = Alarms(reference(FLAT))
    said = (
        r"massieu/largest_logit_max is 10 at step 100, where the reference run had 2: outside a factor of 3 in 2 calls"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        found = [alarms({KEY: 10.0}, step) for step in (0, 100, 200, 300)]
    assert len(warned) == 1
    assert found[1] == [(KEY, 10.0, 2.0, 100)]
    assert [len(each) for each in found] == [0, 1, 1, 1]
    with pytest.warns(UserWarning, match="at step 600"):
        assert [len(alarms({KEY: value}, step)) for step, value in ((400, 2.0), (500, 9.0), (600, 9.0))] == [0, 0, 1]


def test_between_two_steps_the_reference_is_a_straight_line():
    alarms = Alarms(reference({0: 1.0, 100: 3.0, 200: 3.0}))
    # At 25 it is 1.5, so that 4.4 is inside and 4.6 outside; by the nearer record 3 would be the limit.
    for value, outside in ((4.4, False), (4.6, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bool(alarms({KEY: value}, 25) + alarms({KEY: value}, 25)) is outside


def test_steps_that_the_reference_lacks_are_said_once():
    alarms = Alarms(reference({0: 1.0, 100: 1.0, 200: 1.0, 900: 1.0, 1000: 1.0}))
    with pytest.warns(UserWarning, match="no record near step 500; nothing is compared there") as said:
        found = [alarms({KEY: 99.0}, step) for step in (500, 600, 1101, 1200)]
    assert found == [[], [], [], []]
    assert len(said) == 1
    # A hundred steps, the usual distance, before the first and after the last record are near enough.
    with pytest.warns(UserWarning, match="at step 1100"):
        assert [len(alarms({KEY: 99.0}, step)) for step in (1050, 1100)] == [0, 1]


def test_what_has_no_ratio_is_not_compared():
    for value in (0.0, -1.0, math.nan, math.inf):
        assert rung(Alarms(reference(dict.fromkeys(FLAT, value))), [5.0, 5.0]) == [False, False]
    alarms = Alarms(reference(FLAT))
    assert alarms({"massieu/loss": 99.0}, 0) + alarms({"massieu/loss": 99.0}, 100) == []


def test_settings_that_differ_are_said_and_prefixes_may_differ(tmp_path: Path):
    with pytest.warns(UserWarning, match="the reference run healthy was another: layers 2 in place of 12") as said:
        Alarms(reference(FLAT), "massieu", {"layers": 12, "every": 7})
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Alarms(reference(FLAT, prefix="old"), "new", {"layers": 2})
    assert rung(other, [9.0, 9.0], key="new/largest_logit_max") == [False, True]
    path = tmp_path / "healthy.jsonl"
    path.write_text("".join(json.dumps({"step": step, KEY: value}) + "\n" for step, value in FLAT.items()))
    assert rung(Alarms(path), [9.0, 9.0]) == [False, True]


@every_row(
    ("given", "said"),
    [
        (5, "reference must be the path of a run's JSON lines, got 5"),
        ("/no/such/run.jsonl", "cannot read /no/such/run.jsonl"),
        (reference(FLAT, "spread_mean"), "the reference run healthy has none of the quantities that are compared"),
    ],
)
def test_a_bad_reference_is_one_sentence(given: object, said: str):
    with pytest.raises(InputError, match=said):
        Alarms(given)  # pyright: ignore


@pytest.mark.medium
def test_a_monitor_with_a_reference_rings_writes_and_draws(tmp_path: Path):
    """Queries that grow tenfold are in alarm from the second call on, in the record, the file and the page's table."""

    def monitored(name: str, **more: Any) -> tuple[torch.nn.Module, massieu.Monitor]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        return model, massieu.Monitor(model, batch, every=10, to=tmp_path / name, **more)

    _, healthy = monitored("healthy.jsonl")
    for step in (0, 10, 20):
        healthy(step, loss=1.0)
    model, monitor = monitored("run.jsonl", reference=tmp_path / "healthy.jsonl")
    first = monitor(0, loss=1.0)
    assert first is not None
    assert first.alarms == []
    with torch.no_grad():
        for layer in model.layers:  # pyright: ignore
            layer.self_attn.in_proj_weight[:8] *= 100  # pyright: ignore
    with pytest.warns(UserWarning, match="massieu/largest_logit_max is .* at step 20, where the reference run had"):
        found = [monitor(step, loss=1.0) for step in (10, 20)]
    keys = [[alarm.key for alarm in record.alarms] for record in found if record is not None]  # pyright: ignore
    assert keys[0] == []
    assert {"massieu/largest_logit_max", "massieu/selective_log_partition_max"} <= set(keys[1])
    assert "massieu/loss" not in keys[1]
    assert read_run(tmp_path / "run.jsonl").alarms == {20: keys[1]}
    assert "<code>massieu/largest_logit_max</code>" in render([read_run(tmp_path / "run.jsonl")])
