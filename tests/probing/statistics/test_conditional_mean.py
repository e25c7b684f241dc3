"""Conditional means: against regressions that are fitted anew for every token left out, and heads that have one or none."""

import numpy as np
import pytest
import torch
from tests.support.probing.windows import check_batches_change_nothing, drawn, mean, weights_of, window

from massieu.probing.statistics.conditional_mean import (
    PRECISIONS,
    RIDGES,
    kernel_errors,
    output_along_conditional_mean,
    ridge_errors,
    value_by_attention,
    value_by_kernel,
    value_by_ridge,
)
from massieu.probing.statistics.conditional_mean import REGISTER as CONDITIONAL_MEAN_REGISTER
from massieu.probing.statistics.windowed import shuffled_values

H, N, D = 2, 24, 4


def test_errors_of_ridge_regression_are_those_of_fits_without_the_token():
    key, value = drawn(H, N, D, 1).double() + 3, drawn(H, N, 5, 2).double()
    errors_of_tokens = ridge_errors(key, value)
    for head in range(H):
        k, v = key[head].numpy(), value[head].numpy()
        scale = ((k - k.mean(0)) ** 2).sum() / D
        for place in (0, 7, 12):
            for left_out in (0, 7, N - 1):
                # The ridge is on slopes about the mean of all keys, and the intercept is free.
                x = np.hstack([np.ones((N, 1)), k - k.mean(0)])
                others = np.arange(N) != left_out
                penalty = float(RIDGES[place]) * scale * np.diag([0.0] + [1.0] * D)
                fit = np.linalg.solve(x[others].T @ x[others] + penalty, x[others].T @ v[others])
                expected = ((v[left_out] - x[left_out] @ fit) ** 2).sum()
                assert float(errors_of_tokens[place, head, left_out]) == pytest.approx(expected, rel=1e-7)


def test_errors_of_kernel_regression_are_those_without_the_token():
    key, value = drawn(H, N, D, 1).double(), drawn(H, N, 5, 2).double()
    errors_of_tokens = kernel_errors(key, value)
    for head in range(H):
        k, v = key[head].numpy(), value[head].numpy()
        squares = ((k[:, None] - k[None]) ** 2).sum(-1)
        some = np.sort(squares[::4][~np.eye(N, dtype=bool)[::4]])
        middle = some[(len(some) - 1) // 2]
        for place, precision in enumerate(PRECISIONS.tolist()):
            weights = np.exp(-0.5 * precision * squares / middle) * (1 - np.eye(N))
            expected = ((v - weights @ v / weights.sum(1, keepdims=True)) ** 2).sum(1)
            # Weights are in float32; a logit of size m is rounded by m eps, the precisions go to 256 times the middle's.
            np.testing.assert_allclose(errors_of_tokens[place, head].numpy(), expected, rtol=1e-4)


def test_the_setting_of_each_half_is_chosen_on_the_other():
    key, value = drawn(H, N, D, 1), drawn(H, N, 5, 2) + torch.tanh(drawn(H, N, D, 1)) @ drawn(H, D, 5, 3)
    head_window = window(drawn(H, N, D), key, value)
    for measure, errors in ((value_by_ridge, ridge_errors), (value_by_kernel, kernel_errors)):
        errors_of_tokens = errors(key.double(), value.double()).numpy()
        for head in range(H):
            v = value[head].double().numpy()
            missed = 0.0
            for half in (0, 1):
                best = errors_of_tokens[:, head, 1 - half :: 2].sum(1).argmin()
                missed += errors_of_tokens[best, head, half::2].sum()
            whole = sum(((v[i] - np.delete(v, i, 0).mean(0)) ** 2).sum() for i in range(N))
            total, count = measure(head_window)
            assert float(total[head] / count[head]) == pytest.approx(1 - missed / whole, rel=1e-5, abs=1e-6)
            assert float(count[head]) == N


@pytest.mark.parametrize("causal", [False, True])
def test_the_heads_own_weights_without_the_token(causal):
    head_window = window(2 * drawn(H, N, D), drawn(H, N, D, 1), drawn(H, N, 5, 2), causal=causal)
    for head in range(H):
        v = head_window.call.value[0, head].double().numpy()
        missed, whole = 0.0, 0.0
        for place in head_window.queries.tolist():
            p = weights_of(head_window, head, place)
            p[place] = 0
            others = [j for j in range(place + 1 if causal else N) if j != place]
            missed += ((v[place] - p @ v / p.sum()) ** 2).sum()
            whole += ((v[place] - v[others].mean(0)) ** 2).sum()
        assert mean(value_by_attention(head_window))[head] == pytest.approx(1 - missed / whole, rel=1e-5, abs=1e-6)


def test_attention_to_another_sequence_has_no_value_of_its_own_token():
    head_window = window(drawn(H, N, D), drawn(H, N, D, 1), drawn(H, N, 5, 2))
    other = type(head_window)(head_window.call, head_window.real, head_window.queries, head_window.seed, itself=False)
    assert value_by_attention(other)[1].tolist() == [0.0] * H


def test_values_that_are_the_conditional_means_are_found_and_others_are_not():
    """The first head's values are linear in its keys, the second's have nothing to do with them."""
    number, key = 160, drawn(2, 160, D, 1)
    value = torch.stack([key[0] @ drawn(1, D, 5, 3)[0] + 1, drawn(1, number, 5, 4)[0]])
    head_window = window(drawn(2, number, D), key, value)
    shuffled = shuffled_values(head_window)
    assert mean(value_by_ridge(head_window))[0] > 0.999
    for measure in (value_by_ridge, value_by_kernel):
        own, null = mean(measure(head_window)), mean(measure(shuffled))
        assert own[0] > 0.5 > 0.1 > null[0] and max(abs(own[1]), abs(null[1])) < 0.1
    along, null = mean(output_along_conditional_mean(head_window)), mean(output_along_conditional_mean(shuffled))
    assert along[0] > 0.9 and max(abs(along[1]), abs(null[0])) < 0.35


def test_with_gaussian_keys_the_output_is_along_the_conditional_mean_explicitly():
    head_window = window(
        drawn(H, 60, D), drawn(H, 60, D, 1), drawn(H, 60, 5, 2) + drawn(H, 60, D, 1) @ drawn(H, D, 5, 3)
    )
    for head in range(H):
        k, v = (part[0, head].double().numpy() for part in (head_window.call.key, head_window.call.value))
        cosines = []
        for half in (0, 1):
            keys, values, held = k[half::2], v[half::2], v[1 - half :: 2]
            errors = ridge_errors(torch.from_numpy(keys)[None], torch.from_numpy(values)[None])[:, 0].sum(-1)
            ridge = float(RIDGES[errors.argmin()]) * ((keys - keys.mean(0)) ** 2).sum() / D
            centred = keys - keys.mean(0)
            slope = np.linalg.solve(centred.T @ centred + ridge * np.eye(D), centred.T @ (values - values.mean(0)))
            for place in head_window.queries.tolist():
                p = weights_of(head_window, head, place)[1 - half :: 2]
                output = p @ held / p.sum() - held.mean(0)
                expected = (head_window.call.query[0, head, place].double().numpy() - keys.mean(0)) @ slope
                cosines.append(output @ expected / np.linalg.norm(output) / np.linalg.norm(expected))
        assert mean(output_along_conditional_mean(head_window))[head] == pytest.approx(np.mean(cosines), rel=1e-6)


def test_few_tokens_and_numbers_that_are_not_finite_have_no_share():
    few = window(drawn(H, 5, D), drawn(H, 5, D, 1), drawn(H, 5, 5, 2))
    value = drawn(H, N, 5, 2)
    value[0] = 2.0  # nothing to tell
    for measure in CONDITIONAL_MEAN_REGISTER.functions.values():
        total, count = measure(few)
        assert count.tolist() == [0.0] * H or measure is value_by_attention
        total, count = measure(window(drawn(H, N, D), drawn(H, N, D, 1), value))
        assert count[0] == 0 and total.isfinite().all() and count[1] > 0


@pytest.mark.medium
def test_batches_change_nothing():
    names = list(CONDITIONAL_MEAN_REGISTER.functions)
    check_batches_change_nothing("llama", names, dict.fromkeys(names, "shuffled_values"))
