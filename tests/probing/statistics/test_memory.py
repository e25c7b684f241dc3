"""Heads as memories: every number against an explicit one, query by query, and heads built to be of each kind."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rows import some_slow
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.statistics import windowed
from massieu.probing.statistics.head_window import QUERIES, HeadWindow
from massieu.probing.statistics.memory import REGISTER as MEMORY_REGISTER
from massieu.probing.statistics.memory import (
    keys_in_use,
    pattern_weight_evenness,
    retrieval_slope,
    retrieval_slope_bound,
)
from massieu.probing.statistics.windowed import other_heads_keys, shuffled_values

H, N, D, SCALE = 4, 24, 6, 0.4
NAMES = tuple(MEMORY_REGISTER.functions)


def window(key: Tensor, query: Tensor, *, causal: bool = False, real: int = N, scale: float = SCALE) -> HeadWindow:
    site = AttentionSite("site")
    output = torch.zeros(1, query.shape[2], query.shape[1], D)
    mask = (torch.arange(N) < real)[None, None, None].expand(1, 1, query.shape[2], N)
    weight = None if causal or real == N else mask
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(9))
    call = AttentionCall(site, nn.Identity(), query, key, value, weight, causal, scale, None, None, output)
    return HeadWindow(call, torch.arange(N) < real, torch.arange(3, real), 7)


def drawn(key_heads: int = H, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, key_heads, N, D, generator=generator), 2 * torch.randn(1, H, N, D, generator=generator)


def explicit(head_window: HeadWindow) -> dict[str, np.ndarray]:
    """Per head, in float64, by loops and full spectra."""
    query, key = head_window.call.query[0].double().numpy(), head_window.call.key[0].double().numpy()
    key = key.repeat(H // len(key), 0)
    real = int(head_window.real.sum())
    by_name: dict[str, list[float]] = {name: [] for name in NAMES}
    for head in range(H):
        keys = key[head, :real] - key[head, :real].mean(0)
        numbers, slopes = [], []
        for place in head_window.queries[:QUERIES].tolist():
            seen = place + 1 if head_window.call.is_causal else real
            scores = SCALE * keys[:seen] @ query[head, place]
            p = np.exp(scores - scores.max())
            p /= p.sum()
            numbers.append(int(np.searchsorted(np.sort(p)[::-1].cumsum(), 0.9 - 1e-12)) + 1)
            mean = p @ keys[:seen]
            covariance = (keys[:seen].T * p) @ keys[:seen] - np.outer(mean, mean)
            slopes.append(SCALE * np.linalg.eigvalsh(covariance)[-1])
        apart = np.linalg.norm(keys[:, None] - keys[None], axis=-1).max()
        w = np.exp(0.5 * SCALE * (keys**2).sum(1))
        w /= w.sum()
        by_name["keys_in_use"].append(np.mean(numbers))
        by_name["retrieval_slope"].append(np.mean(slopes))
        by_name["retrieval_slope_bound"].append(SCALE * apart**2 / 4)
        by_name["pattern_weight_evenness"].append(np.exp(-(w * np.log(w)).sum()) / real)
    return {name: np.array(values) for name, values in by_name.items()}


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "padded"])
def test_numbers_are_the_explicit_ones(kind):
    key, query = drawn(2 if kind == "grouped" else H)
    head_window = window(key, query, causal=kind == "causal", real=17 if kind == "padded" else N)
    for name, expected in explicit(head_window).items():
        total, count = MEMORY_REGISTER.functions[name](head_window)
        # The slope comes of 24 products, whose error falls with the square of the ratio of the two largest eigenvalues.
        np.testing.assert_allclose(total / count, expected, rtol=5e-3 if name == "retrieval_slope" else 1e-5)
        if name == "retrieval_slope":
            assert (np.asarray(total / count) <= expected * (1 + 1e-5)).all()


def test_an_origin_of_the_keys_moves_nothing():
    key, query = drawn()
    moved = window(key + 30 * torch.randn(1, H, 1, D, generator=torch.Generator().manual_seed(3)), query)
    for name, measure in MEMORY_REGISTER.functions.items():
        before, after = (total / count for total, count in map(measure, (window(key, query), moved)))
        torch.testing.assert_close(after, before, rtol=2e-3, atol=1e-4, msg=name)


def test_heads_of_each_kind():
    """One pattern, the average of all, and two that are equally near: the slope is that of the two-point variance."""
    key = torch.zeros(1, H, N, D)
    key[0, :, :, 0] = 0.01 * torch.linspace(-1, 1, N)
    key[0, :, 0, 1], key[0, :, 1, 1] = 5.0, -5.0
    query = torch.zeros(1, H, N, D)
    query[0, 0, :, 1] = 60.0  # the first key alone
    query[0, 2, :, 2] = 1.0
    key[0, 2, :2, 2] = 100.0  # the first two, alike
    head_window = window(key, query, scale=1.0)
    number, slope = (total / count for total, count in (keys_in_use(head_window), retrieval_slope(head_window)))
    assert float(number[0]) == 1 and float(slope[0]) < 1e-6
    assert float(number[2]) == 2 and float(slope[2]) == pytest.approx(25, rel=1e-3)
    assert float(number[1]) == pytest.approx(np.ceil(0.9 * N), abs=1)
    total, count = retrieval_slope_bound(head_window)
    assert float((total / count)[1]) == pytest.approx(25, rel=1e-3)
    assert (slope <= total / count * (1 + 1e-5)).all()
    even, _ = pattern_weight_evenness(window(torch.randn(1, H, 1, D).expand(1, H, N, D), query))
    assert even.tolist() == pytest.approx([1.0] * H)


def test_controls_lack_the_property():
    key, query = drawn()
    head_window = window(key, query)
    other = other_heads_keys(head_window)
    assert other is not None and torch.equal(other.call.key[:, 1], key[:, 0])
    assert other_heads_keys(window(key[:, :1], query)) is None
    shuffled, again = shuffled_values(window(key, query, real=17)), shuffled_values(window(key, query, real=17))
    before = head_window.call.value
    assert torch.equal(shuffled.call.value, again.call.value) and not torch.equal(shuffled.call.value, before)
    assert torch.equal(shuffled.call.value[:, :, 17:], before[:, :, 17:])
    assert torch.equal(shuffled.call.value[0, 0].sort(0).values, before[0, 0].sort(0).values)


def test_numbers_that_are_not_finite_are_left_out():
    key, query = drawn()
    query[0, 1, 5] = torch.nan
    key[0, 2] = torch.inf
    head_window = window(key, query)
    sums = windowed.WindowStatistics(windowed.registered(MEMORY_REGISTER), H, windowed.Units())
    sums.update(head_window, [0])
    value, _, count = sums.ratio.estimate()
    place = NAMES.index("keys_in_use")
    assert count[0, place].tolist() == [QUERIES, QUERIES - 1, 0, QUERIES]
    assert np.isfinite(value[0, place][[0, 1, 3]]).all()
    assert count[0, NAMES.index("pattern_weight_evenness")].tolist() == [1, 1, 0, 1]


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.randint(1, 40, (6, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 12:] = 0


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        network: Any = LlamaModel(LlamaConfig(**SIZES, vocab_size=40, num_key_value_heads=2))
    else:
        network = BertModel(BertConfig(**SIZES, vocab_size=40))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else None
    return network.eval()


@pytest.mark.medium
@some_slow("kind", ["llama", "bert"], 1)
def test_batches_change_nothing_and_controls_stand_beside(kind):
    whole = [{"input_ids": IDS, "attention_mask": MASK}]
    apart = [{"input_ids": IDS[i : i + 2], "attention_mask": MASK[i : i + 2]} for i in (0, 2, 4)]
    one, other = (massieu.probe(model(kind), data, statistics=["memory"]) for data in (whole, apart))
    names = {*one.heads["statistic"]}
    assert {
        *NAMES,
        *(f"{name}/mismatched_keys" for name in NAMES[:2]),
        *(f"{name}/reinitialised" for name in NAMES),
    } <= names
    assert {f"{name}/q_value" for name in NAMES} <= names
    left, right = (result.heads.sort("site", "head", "statistic") for result in (one, other))
    assert left["statistic"].to_list() == right["statistic"].to_list()
    np.testing.assert_allclose(left["value"].to_numpy(), right["value"].to_numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_it_is_opt_in_and_runs_by_itself():
    plain = massieu.probe(model("bert"), [{"input_ids": IDS[:1]}])
    assert not {*NAMES} & {*plain.heads["statistic"]}
    result = massieu.probe(model("bert"), [{"input_ids": IDS[:1]}], statistics=["keys_in_use"])
    assert {name.partition("/")[0] for name in result.heads["statistic"]} == {"keys_in_use"}
