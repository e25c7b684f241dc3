"""The heads as one mixture: against explicit log-partitions, and heads that are alike, gated, or apart."""

import numpy as np
import pytest
import torch
from tests.support.probing.windows import check_batches_change_nothing, drawn, mean, window

from massieu.probing.statistics.head_window import HeadWindow
from massieu.probing.statistics.joint import REGISTER as JOINT_REGISTER
from massieu.probing.statistics.joint import gating_information, mixture_gap, responsibility
from massieu.probing.statistics.windowed import permuted_heads

H, N, D = 3, 20, 4


def explicit(head_window: HeadWindow) -> dict[str, np.ndarray]:
    call, real = head_window.call, int(head_window.real.sum())
    places = head_window.queries.tolist()
    evidence = np.zeros((H, len(places)))
    for head in range(H):
        keys = call.key[0, head * call.key.shape[1] // H, :real].double().numpy()
        for row, place in enumerate(places):
            seen = keys[: place + 1] if call.is_causal else keys
            scores = call.scale * (seen - keys.mean(0)) @ call.query[0, head, place].double().numpy()
            evidence[head, row] = np.log(np.mean(np.exp(scores)))
    share = np.exp(evidence) / np.exp(evidence).sum(0)
    return {
        "mixture_gap": np.log(1 / H / share).mean(1),
        "responsibility": H * share.mean(1),
        "gating_information": (share * np.log(share / share.mean(1, keepdims=True))).mean(1),
    }


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "padded"])
def test_numbers_are_the_explicit_ones(kind):
    heads, real = 1 if kind == "grouped" else H, 15 if kind == "padded" else N
    parts = 2 * drawn(H, N, D), drawn(heads, N, D, 1), drawn(heads, N, 5, 2)
    head_window = window(*parts, causal=kind == "causal", real=real)
    for name, expected in explicit(head_window).items():
        np.testing.assert_allclose(mean(JOINT_REGISTER.functions[name](head_window)), expected, rtol=1e-4, atol=1e-5)


def test_the_gap_is_that_of_the_bound():
    head_window = window(2 * drawn(H, N, D), drawn(H, N, D, 1), drawn(H, N, 5, 2))
    key = head_window.call.key[0].double() - head_window.call.key[0].double().mean(1, keepdim=True)
    scores = head_window.call.scale * head_window.call.query[0, :, head_window.queries].double() @ key.mT
    evidence = scores.logsumexp(-1) - np.log(N)
    mixture = evidence.logsumexp(0) - np.log(H)
    gap = mixture - evidence.mean(0)
    assert mean(mixture_gap(head_window)).mean() == pytest.approx(float(gap.mean()), rel=1e-5)


def test_heads_that_are_alike_share_and_tell_nothing():
    query, key = drawn(1, N, D).expand(H, N, D), drawn(1, N, D, 1).expand(H, N, D)
    head_window = window(query, key, drawn(H, N, 5, 2))
    assert mean(responsibility(head_window)) == pytest.approx([1.0] * H)
    assert (
        np.abs(mean(mixture_gap(head_window))).max() < 1e-6
        and np.abs(mean(gating_information(head_window))).max() < 1e-6
    )


def test_heads_that_take_turns_have_more_information_than_permuted_ones():
    """Two heads that answer every other token: their responsibilities tell log 2 nats. At other queries they tell less."""
    key = torch.zeros(2, N, D)
    key[:, 0, 0] = 5.0
    query = torch.zeros(2, N, D)
    query[0, ::2, 0] = query[1, 1::2, 0] = 40.0
    head_window = window(query, key, drawn(2, N, 5), scale=1.0)
    told, permuted = gating_information(head_window), permuted_heads(head_window)
    assert permuted is not None
    assert mean(told).sum() == pytest.approx(np.log(2), abs=0.02)
    assert mean(gating_information(permuted)).sum() < 0.7 * np.log(2)
    assert permuted_heads(window(query[:1], key[:1], drawn(1, N, 5))) is None


def test_a_query_that_sees_nothing_counts_in_no_head():
    query, key = drawn(H, N, D), drawn(H, N, D, 1)
    query[1, 7] = torch.nan
    head_window = window(query, key, drawn(H, N, 5))
    for measure in JOINT_REGISTER.functions.values():
        total, count = measure(head_window)
        assert count.tolist() == [len(head_window.queries) - 1] * H and total.isfinite().all()


@pytest.mark.medium
def test_batches_change_nothing():
    controls = {
        "mixture_gap": "permuted_heads",
        "responsibility": "reinitialised",
        "gating_information": "permuted_heads",
    }
    check_batches_change_nothing("bert", list(JOINT_REGISTER.functions), controls)
