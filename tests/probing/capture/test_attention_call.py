"""Parts of an attention call: what is taken from it is what the whole call has there."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from massieu.probing.capture.attention_call import (
    AttentionCall,
    AttentionSite,
    explicit_attention,
    explicit_logits,
    explicit_scores,
)

BATCH, HEADS, KEY_HEADS, LENGTH, KEYS, WIDTH = 2, 4, 2, 5, 6, 3


def whole_call() -> AttentionCall:
    torch.manual_seed(0)
    query, output = torch.randn(BATCH, HEADS, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, HEADS, WIDTH)
    key, value = torch.randn(2, BATCH, KEY_HEADS, KEYS, WIDTH)
    return AttentionCall(AttentionSite("a"), nn.Identity(), query, key, value, None, False, 0.7, None, None, output)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "soft cap": {"softcap": 1.5},
    "a mask of each item": {"log_weight": torch.tensor([[True] * 4 + [False] * 2, [True] * 6])[:, None, None]},
    "a bias of each head": {"log_weight": torch.linspace(-3, 1, HEADS * LENGTH * KEYS).view(1, HEADS, LENGTH, KEYS)},
    "log-weights of each query": {"log_weight": torch.linspace(-99, 1, LENGTH * KEYS).view(1, 1, LENGTH, KEYS)},
    "a sink of each head": {"sink": torch.arange(4.0)},
    "a sink of each query": {
        "sink": torch.arange(20.0).view(1, HEADS, LENGTH),
        "sink_value": torch.ones(1, HEADS, 1, WIDTH),
    },
    "seen": {"seen": torch.ones(LENGTH, KEYS, dtype=torch.bool).tril()[None, None]},
    "weights": {"weights": torch.arange(float(BATCH * HEADS * LENGTH * KEYS)).view(BATCH, HEADS, LENGTH, KEYS)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_single_queries_of_single_heads(option):
    call = replace(whole_call(), **OPTIONS[option])
    item, heads, queries = torch.tensor([[1, 0, 1], [3, 0, 2], [4, 1, 1]])
    part = call.of_pairs(item, heads, queries)
    for found, expected in zip(explicit_attention(part), explicit_attention(call), strict=True):
        torch.testing.assert_close(found[0, :, 0], expected.expand(BATCH, -1, -1, -1)[item, heads, queries])
    visible = call.visible().expand(BATCH, HEADS, -1, -1)[item, heads, queries]
    assert torch.equal(part.visible().expand(1, 3, 1, KEYS)[0, :, 0], visible)
    assert part.value.shape == (1, 3, KEYS, 0)
    assert part.output.shape == (1, 1, 3, 0)
    if call.sink_logits is not None:
        logits = call.sink_logits.expand(1, HEADS, LENGTH)[0, heads, queries]
        assert torch.equal(part.sink_logits.expand(1, 3, 1)[0, :, 0], logits)
    if call.sink_value is not None:
        assert part.sink_value.shape == (1, 3, 1, WIDTH)
    if call.weights is not None:
        assert torch.equal(part.weights[0, :, 0], call.weights[item, heads, queries])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("option", OPTIONS)
def test_logits_and_scores_of_visible_keys(option, dtype):
    call = replace(whole_call(), **OPTIONS[option])
    scores, log_weight = explicit_attention(call, dtype)
    assert torch.equal(explicit_logits(call, dtype), scores + log_weight)
    assert torch.equal(explicit_scores(call, dtype), scores.masked_fill(~call.visible(), -torch.inf))


def test_logits_of_hidden_keys_are_minus_infinity_whatever_their_scores_are():
    call = whole_call()
    call.key[:, :, 0] = torch.inf
    bias = torch.zeros(1, 1, LENGTH, KEYS)
    bias[..., 0] = -torch.inf
    for log_weight in (bias, ~bias.isneginf()):
        logits = explicit_logits(replace(call, log_weight=log_weight))
        assert (logits[..., 0] == -torch.inf).all()
        assert logits[..., 1:].isfinite().all()
