"""A monitor's record with statistics of the user's own, beside explicit weights; training goes on where one fails."""

import numpy as np
import pytest
import torch
from tests.support.probing import oracle, zoo

import massieu
from massieu.errors import InputError


@massieu.statistic(scale="share")
def nearby(reading):
    return reading.weight_where(lambda query, key: (query - key).abs() <= 3)


def explicit(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of each layer a number for each head: over the queries that see more than one key, as all means of a monitor."""
    places = torch.arange(batch["input_ids"].shape[1])
    near = (places[:, None] - places).abs() <= 3
    found = []
    for layer in oracle.attention_of("gpt2", batch):
        weight = torch.where(near, layer["scores"].softmax(-1), 0.0).sum(-1)
        found.append(weight[:, :, 1:].mean((0, 2)))
    return found


def test_it_is_recorded_for_each_layer_and_for_the_model():
    batch = zoo.inputs("gpt2")
    record = massieu.Monitor(zoo.fresh("gpt2"), batch, every=1, statistics=[nearby, "largest_weight"])(0)
    assert record is not None
    layers = explicit(batch)
    for number, heads in enumerate(layers):
        for end, value in (("mean", heads.mean()), ("min", heads.min()), ("max", heads.max())):
            assert record[f"massieu/layer{number}/nearby_{end}"] == pytest.approx(float(value), rel=1e-5)
    assert record["massieu/nearby_mean"] == pytest.approx(float(torch.stack(layers).mean()), rel=1e-5)
    assert 0 < record["massieu/largest_weight_mean"] <= 1
    plain = massieu.Monitor(zoo.fresh("gpt2"), batch, every=1)(0)
    assert plain is not None
    for name, value in plain.items():
        if not name.startswith("massieu/monitor"):  # what the record took of time
            np.testing.assert_equal(record[name], value, err_msg=name)


def failing_from(call: int):
    calls = []

    def failing(reading):
        calls.append(None)
        if len(calls) > call:
            raise ArithmeticError("no more")
        return reading.moments.entropy

    return failing


def test_a_function_that_never_works_is_refused_before_training():
    with pytest.raises(InputError, match="the statistic failing does not work on the batch: it raised ArithmeticError"):
        massieu.Monitor(zoo.fresh("gpt2"), zoo.inputs("gpt2"), statistics=[failing_from(0)])


def test_a_function_that_fails_later_is_warned_of_once_and_left_out():
    monitor = massieu.Monitor(zoo.fresh("gpt2"), zoo.inputs("gpt2"), every=1, statistics=[failing_from(6)])
    first = monitor(0)
    assert first is not None
    assert first["massieu/failing_mean"] == pytest.approx(first["massieu/entropy_mean"], rel=1e-6)
    with pytest.warns(
        UserWarning, match="failing could not be computed and is left out of this record: it raised Arith"
    ):
        second = monitor(1)
    third = monitor(2)
    assert second is not None and third is not None
    assert "massieu/failing_mean" not in second
    assert second["massieu/entropy_mean"] == first["massieu/entropy_mean"]


def test_a_statistic_of_a_window_is_the_probes():
    @massieu.statistic(of="window")
    def of_a_window(window):
        return window.weights().amax(-1).sum(-1), torch.ones(4)

    with pytest.raises(InputError, match="a monitor measures statistics of queries, and of_a_window is none"):
        massieu.Monitor(zoo.fresh("gpt2"), zoo.inputs("gpt2"), statistics=[of_a_window])
    with pytest.raises(InputError, match="unknown statistic 'entrpy'"):
        massieu.Monitor(zoo.fresh("gpt2"), zoo.inputs("gpt2"), statistics=["entrpy"])
