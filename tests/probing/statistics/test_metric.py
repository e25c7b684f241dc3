"""What a head compares tokens by: explicit numbers, heads of which the hypothesis holds, and heads of which it does not."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.support.probing.windows import check_batches_change_nothing, drawn, mean, weights_of, window
from tests.support.rows import some_slow

from massieu.probing.statistics.head_window import QUERIES, HeadWindow
from massieu.probing.statistics.metric import REGISTER as METRIC_REGISTER
from massieu.probing.statistics.metric import (
    fisher_evenness,
    precision_antisymmetric_share,
    precision_cosine,
    retrieved_law_distance,
)

H, N, D = 3, 40, 4


def explicit(head_window: HeadWindow) -> dict[str, list[float]]:
    """By inverses and symmetric roots in place of triangular factors."""
    call, real = head_window.call, int(head_window.real.sum())
    numbers: dict[str, list[float]] = {name: [] for name in METRIC_REGISTER.functions}
    for head in range(H):
        keys = call.key[0, head * call.key.shape[1] // H, :real].double()
        query = call.query[0, head, :real].double().numpy()
        covariance = np.cov(keys.numpy().T, bias=True)
        root = np.real(scipy.linalg.sqrtm(covariance))
        inverse = np.linalg.inv(root)
        k, q = (keys.numpy() - keys.numpy().mean(0)) @ inverse, (query - query.mean(0)) @ root
        numbers["precision_cosine"].append((q * k).sum() / np.sqrt((q**2).sum() * (k**2).sum()))
        slope = q.T @ k
        numbers["precision_antisymmetric_share"].append(
            np.linalg.norm((slope - slope.T) / 2) ** 2 / np.linalg.norm(slope) ** 2
        )
        places = head_window.queries.tolist()
        weights = np.array([weights_of(head_window, head, place) for place in places])
        information = np.mean([(k.T * p) @ k - np.outer(p @ k, p @ k) for p in weights[:QUERIES]], 0)
        numbers["fisher_evenness"].append(np.trace(information) ** 2 / D / np.trace(information @ information))
        retrieved = weights @ k
        spread = np.cov(retrieved.T, bias=True)
        middle = np.real(np.trace(scipy.linalg.sqrtm(spread)))
        square = (retrieved.mean(0) ** 2).sum() + np.trace(spread) + D - 2 * middle
        numbers["retrieved_law_distance"].append(np.sqrt(square / D))
    return numbers


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "padded"])
def test_numbers_are_the_explicit_ones(kind):
    heads, real = 1 if kind == "grouped" else H, 30 if kind == "padded" else N
    key = drawn(heads, N, D, 1) @ drawn(heads, D, D, 3) + 2
    head_window = window(2 * drawn(H, N, D) + 1, key, drawn(heads, N, 5, 2), causal=kind == "causal", real=real)
    for name, expected in explicit(head_window).items():
        np.testing.assert_allclose(mean(METRIC_REGISTER.functions[name](head_window)), expected, rtol=1e-5, atol=1e-6)


def with_metric(power: float, scale: float = 1.0) -> HeadWindow:
    """Heads whose queries are the keys times a power of their covariance."""
    key = drawn(H, 200, D, 1) @ (torch.diag(torch.tensor([3.0, 1.0, 0.5, 0.2]))) + 1
    centred = (key - key.mean(1, keepdim=True)).double()
    covariance = centred.mT @ centred / 200
    sizes, axes = torch.linalg.eigh(covariance)
    metric = axes @ torch.diag_embed(sizes**power) @ axes.mT
    return window((centred @ metric).float(), key, drawn(H, 200, 5, 2), scale=scale)


def test_the_precision_is_found_and_other_powers_are_not():
    cosines = {power: float(mean(precision_cosine(with_metric(power))).mean()) for power in (-2, -1, 0, 1)}
    assert cosines[-1] == pytest.approx(1, abs=1e-5)
    assert max(value for power, value in cosines.items() if power != -1) < 0.9
    other = window(drawn(H, 200, D, 5), drawn(H, 200, D, 1), drawn(H, 200, 5, 2))
    assert np.abs(mean(precision_cosine(other))).max() < 0.2
    assert np.abs(mean(precision_antisymmetric_share(with_metric(-1)))).max() < 1e-6


def test_gaussian_tokens_and_the_precision_carry_the_law_of_queries_to_that_of_keys():
    """With β W_QᵀW_K = Σ⁻¹ and very many Gaussian keys, each query retrieves the key of its own token (X1)."""
    precise, blunt = with_metric(-1), with_metric(-1, scale=1e-4)
    precise = replace(precise, call=replace(precise.call, scale=1.0))
    near, far = mean(retrieved_law_distance(precise)), mean(retrieved_law_distance(blunt))
    assert near.max() < 0.4 and far.min() > 0.95
    assert mean(fisher_evenness(blunt)).min() > 0.95
    narrow = window(20 * torch.eye(D)[0].expand(H, 200, D), precise.call.key[0], drawn(H, 200, 5), scale=1.0)
    assert mean(fisher_evenness(narrow)).max() < 0.8


def test_how_a_head_splits_its_map_moves_nothing():
    query, key, turn = drawn(H, N, D), drawn(H, N, D, 1), drawn(1, D, D, 7)[0] + 2 * torch.eye(D)
    one = window(query, key, drawn(H, N, 5))
    other = window(query @ torch.linalg.inv(turn).T, key @ turn + drawn(H, 1, D, 8), drawn(H, N, 5))
    for measure in METRIC_REGISTER.functions.values():
        np.testing.assert_allclose(mean(measure(one)), mean(measure(other)), rtol=1e-3, atol=1e-4)


def test_other_sequences_few_tokens_and_numbers_that_are_not_finite_have_no_number():
    query, key = drawn(H, N, D), drawn(H, N, D, 1)
    key[1, 3] = torch.inf
    head_window = window(query, key, drawn(H, N, 5))
    for measure in METRIC_REGISTER.functions.values():
        total, count = measure(head_window)
        assert count.tolist() == [1, 0, 1] and total.isfinite().all()
        assert measure(replace(head_window, itself=False))[1].tolist() == [0] * H
        assert measure(window(query, drawn(H, N, D, 1), drawn(H, N, 5), real=7))[1].tolist() == [0] * H


@pytest.mark.medium
@some_slow("kind", ["llama", "bert"], 1)
def test_batches_change_nothing(kind):
    names = list(METRIC_REGISTER.functions)
    check_batches_change_nothing(kind, names, dict.fromkeys(names, "mismatched_keys"))
