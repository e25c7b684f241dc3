"""What a head's output rests on: against loops that leave tokens out and against finite differences."""

import numpy as np
import pytest
import torch
from tests.support.probing.windows import check_batches_change_nothing, drawn, mean, weights_of, window
from tests.support.rows import some_slow

from massieu.probing.statistics.head_window import QUERIES, HeadWindow
from massieu.probing.statistics.uncertainty import REGISTER as UNCERTAINTY_REGISTER
from massieu.probing.statistics.uncertainty import (
    output_effective_tokens,
    output_lipschitz,
    query_fisher_information,
)

H, N, D = 3, 20, 4


def made(kind: str) -> HeadWindow:
    heads = 1 if kind == "grouped" else H
    real = 15 if kind == "padded" else N
    return window(2 * drawn(H, N, D), drawn(heads, N, D, 1), drawn(heads, N, 5, 2), causal=kind == "causal", real=real)


def explicit(head_window: HeadWindow) -> dict[str, list[float]]:
    call, real = head_window.call, int(head_window.real.sum())
    found: dict[str, list[float]] = {name: [] for name in UNCERTAINTY_REGISTER.functions}
    for head in range(H):
        own = head * call.key.shape[1] // H
        keys, values = (part[0, own, :real].double().numpy() for part in (call.key, call.value))
        queries = call.query[0, head, head_window.queries].double().numpy()
        steps = call.scale * (queries - queries.mean(0)) / np.sqrt(len(queries))
        spread = np.sqrt(((values - values.mean(0)) ** 2).sum(1).mean())
        tokens, information, lipschitz = [], [], []
        for place in head_window.queries[:QUERIES].tolist():
            p = weights_of(head_window, head, place)
            output = p @ values
            changes = []
            for j in range(real):
                rest = np.delete(p, j)
                changes.append(np.linalg.norm(rest @ np.delete(values, j, 0) / rest.sum() - output))
            tokens.append(np.sum(changes) ** 2 / np.sum(np.square(changes)))
            covariance = (keys.T * p) @ keys - np.outer(p @ keys, p @ keys)
            information.append(np.trace(steps @ covariance @ steps.T))
            cross = (values.T * p) @ keys - np.outer(output, p @ keys)
            lipschitz.append(np.linalg.norm(cross @ steps.T, 2) / spread)
        for name, numbers in zip(found, (tokens, information, lipschitz), strict=True):
            found[name].append(float(np.mean(numbers)))
    return found


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "padded"])
def test_numbers_are_the_explicit_ones(kind):
    head_window = made(kind)
    for name, expected in explicit(head_window).items():
        # Power iteration finds the norm from below, with an error that falls with the square of the ratio of the two largest.
        found = mean(UNCERTAINTY_REGISTER.functions[name](head_window))
        np.testing.assert_allclose(found, expected, rtol=5e-3 if name == "output_lipschitz" else 1e-6)


def test_the_lipschitz_constant_bounds_small_steps_and_the_information_is_twice_the_divergence():
    head_window = window(drawn(1, N, D), drawn(1, N, D, 1), drawn(1, N, 5, 2))
    values = head_window.call.value[0, 0].double().numpy()
    queries = head_window.call.query[0, 0, head_window.queries].double()
    spread = np.sqrt(((values - values.mean(0)) ** 2).sum(1).mean())
    largest, twice = [], []
    for number, place in enumerate(head_window.queries[:QUERIES].tolist()):
        p = weights_of(head_window, 0, place)
        moved = []
        for step in queries - queries.mean(0):
            other = head_window.call.query.clone().double()
            other[0, 0, place] += 1e-4 * step
            near = HeadWindow(
                head_window.call.__class__(**{**vars(head_window.call), "query": other}),
                head_window.real,
                head_window.queries,
                head_window.seed,
            )
            q = weights_of(near, 0, place)
            moved.append(np.linalg.norm((q - p) @ values) / 1e-4 / spread)
            twice.append(2 * float((p * np.log(p / q)).sum()) / 1e-8)
        largest.append(np.linalg.norm(moved) / np.sqrt(len(queries)))
        assert number < QUERIES
    # The root of the mean square over the steps is at most √rank times the worst direction's, and at least it.
    ratio = np.mean(largest) / float(mean(output_lipschitz(head_window))[0])
    assert 0.99 < ratio < np.sqrt(D) + 0.01
    assert np.mean(twice) == pytest.approx(float(mean(query_fisher_information(head_window))[0]), rel=1e-3)


def test_one_token_and_all_of_them():
    key, value = torch.zeros(2, N, D), torch.zeros(2, N, N)
    value[:] = 5 * torch.eye(N)
    key[0, 0, 0] = 1.0
    query = torch.zeros(2, N, D)
    query[0, :, 0] = 12.0  # the first token has nearly all of the weight
    number = mean(output_effective_tokens(window(query, key, value, scale=1.0)))
    assert number[0] == pytest.approx(1, abs=0.01) and number[1] == pytest.approx(N)


def test_scales_and_origins_move_nothing():
    query, key, value = drawn(H, N, D), drawn(H, N, D, 1), drawn(H, N, 5, 2)
    for measure in UNCERTAINTY_REGISTER.functions.values():
        before = mean(measure(window(query, key, value)))
        shifted = mean(measure(window(query, key + drawn(H, 1, D, 5), 3 * value + drawn(H, 1, 5, 6))))
        split = mean(measure(window(7 * query, key / 7, value)))
        np.testing.assert_allclose(shifted, before, rtol=1e-4)
        np.testing.assert_allclose(split, before, rtol=1e-4)


def test_queries_without_a_defined_number_have_none():
    query, key, value = drawn(H, N, D), drawn(H, N, D, 1), drawn(H, N, 5, 2)
    value[0] = 1.0  # all alike: no token changes the output
    query[1, 5] = torch.nan
    head_window = window(query, key, value)
    assert output_effective_tokens(head_window)[1].tolist() == [0, QUERIES - 1, QUERIES]
    alone = window(query[:, :1], key[:, :1], value[:, :1])
    for measure in UNCERTAINTY_REGISTER.functions.values():
        total, count = measure(alone)
        assert total.isfinite().all() and count.isfinite().all()


@pytest.mark.medium
@some_slow("kind", ["llama", "bert"], 1)
def test_batches_change_nothing(kind):
    names = list(UNCERTAINTY_REGISTER.functions)
    check_batches_change_nothing(kind, names, dict.fromkeys(names, "reinitialised"))
