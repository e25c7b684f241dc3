"""The suite for statistics of one's own: right ones pass it, and each law is broken by a statistic that breaks it."""

from dataclasses import replace

import pytest
import torch

import massieu
from massieu.errors import InputError
from massieu.testing import StatisticCase, statistic_checks


@massieu.statistic(scale="share")
def nearby(reading):
    return reading.weight_where(lambda query, key: (query - key).abs() <= 2)


@massieu.statistic(moments=["score_variance"], scale="positive", unit="nats²")
def variance(reading):
    return reading.moments.score_variance


@massieu.statistic(depends_on_key_origin=True, unit="nats")
def raw_log_partition(reading):
    return reading.raw_log_partition


@massieu.statistic(of="window", scale="positive")
def entropy_of_a_window(window):
    weights = window.weights()
    entropy = torch.special.entr(weights).sum(-1)
    kept = entropy.isfinite()
    return torch.where(kept, entropy, 0.0).sum(-1), kept.sum(-1)


@massieu.statistic(of="step", scale="positive")
def moved(before, after):
    return (after - before).norm(dim=-1)


RIGHT = (nearby, variance, raw_log_partition, entropy_of_a_window, moved)


@pytest.mark.parametrize(
    ("given", "name"),
    [(given, name) for given in RIGHT for name, _ in statistic_checks(StatisticCase(given))],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_right_statistic_keeps_every_law(given, name):
    statistic_checks(StatisticCase(given))[name]()


def test_an_oracle_of_explicit_weights_is_held_against_it():
    def right(weights):
        places = torch.arange(weights.shape[-1])
        return torch.where((places[:, None] - places).abs() <= 2, weights, 0.0).sum(-1)

    statistic_checks(StatisticCase(nearby, oracle=right))["oracle"]()
    with pytest.raises(AssertionError, match="oracle: the numbers of explicit weights: the numbers differ by up to"):
        statistic_checks(StatisticCase(nearby, oracle=lambda weights: weights[..., 0]))["oracle"]()


def changes_its_input(reading):
    reading.call.query.mul_(1.5)
    return reading.log_partition


def over_the_batch(reading):
    return reading.moments.entropy + reading.moments.entropy.mean()


def of_absolute_places(reading):
    return reading.expected(lambda query, key: key.double())


def of_the_length(reading):
    return reading.moments.entropy * len(reading.positions)


def too_large_for_half_precision(reading):
    return (1e4 * reading.call.query).square().sum(-1)


def infinite_of_one_key(reading):
    return 1 / (reading.visible - 1) + 0 * reading.log_partition


class _Counter:
    calls = 0


def otherwise_each_time(reading):
    _Counter.calls += 1
    return reading.moments.entropy + _Counter.calls


BREAKING = {
    "leaves its input": changes_its_input,
    "batch size": over_the_batch,
    "padding on the left": of_absolute_places,
    "padding on the right": of_the_length,
    "key origin": lambda reading: reading.raw_log_partition,
    "half precision": too_large_for_half_precision,
    "a query of NaN": lambda reading: reading.moments.entropy.nan_to_num(0.0).sum(-1, keepdim=True).expand(-1, -1, 12),
    "one key": infinite_of_one_key,
    "another thread": otherwise_each_time,
    "returns": lambda reading: torch.nan * reading.log_partition,
}


@pytest.mark.parametrize("law", BREAKING)
def test_a_law_is_broken_by_a_statistic_that_breaks_it(law):
    given = massieu.statistic(name="mine")(BREAKING[law])
    with pytest.raises(AssertionError, match=law):
        statistic_checks(StatisticCase(given))[law]()


def test_sums_that_are_not_merged_would_be_seen(monkeypatch):
    from massieu.probing.statistics.query_means import AttentionStatistics

    monkeypatch.setattr(AttentionStatistics, "merge", lambda self, other: None)
    with pytest.raises(AssertionError, match="two processes"):
        statistic_checks(StatisticCase(nearby))["two processes"]()


def test_laws_that_do_not_apply_are_left_out_with_the_reason():
    left_out = statistic_checks(StatisticCase(moved)).left_out
    assert left_out["batch size"] == "a statistic of a step is given one at a time"
    assert left_out["key origin"] == "a step has no keys"
    case = StatisticCase(
        massieu.statistic(name="places")(of_absolute_places), exempt={"padding on the left": "it knows them"}
    )
    assert statistic_checks(case).left_out["padding on the left"] == "it knows them"
    with pytest.raises(ValueError, match="exempt names no law of this suite: paddin"):
        statistic_checks(replace(case, exempt={"paddin": "no"}))
    with pytest.raises(InputError, match="case must be a StatisticCase, got function"):
        statistic_checks(of_absolute_places)  # pyright: ignore[reportArgumentType]
