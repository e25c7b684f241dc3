"""Functions of PyTorch that compute attention are read as they are given: fused attention, and the modules made of it."""

import math

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.model.forward import uncompiled

BATCH, LENGTH, WIDTH, HEADS = 2, 5, 16, 4
SIZE = WIDTH // HEADS
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3]])
ULPS = 32 * torch.finfo(torch.float32).eps  # sums of at most 16 products of order 1, in two orders


def explicit(call: AttentionCall) -> Tensor:
    """(B, L, H, D) by softmax in float64; rows that see no key are zeros."""
    query, key, value = call.query.double(), call.key.double(), call.value.double()
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * call.scale
    if call.log_weight is not None:
        weight = call.log_weight
        scores = scores.masked_fill(~weight, -math.inf) if weight.dtype == torch.bool else scores + weight.double()
    if call.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def check(module: nn.Module, *inputs: Tensor, real: Tensor | None = None, **options) -> list[AttentionCall]:
    """Read the module; what it gives must stay its own at real positions, and each call must explain its output."""
    module.eval()
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = module(*inputs, **options)
        with capturing(module, calls.append) as capture:
            tapped = module(*inputs, **options)
    plain, tapped = (each[0] if isinstance(each, tuple) else each for each in (plain, tapped))
    keep = ... if real is None else real
    assert torch.allclose(tapped[keep], plain[keep], rtol=ULPS, atol=ULPS)
    assert calls and not capture.refused
    for call in calls:
        assert (call.grade, call.route) == ("full", "tap")
        assert torch.allclose(call.output.double(), explicit(call), rtol=ULPS, atol=ULPS)
    return calls


def batch(length: int = LENGTH, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(BATCH, length, width, generator=torch.Generator().manual_seed(seed))


class Fused(nn.Module):
    """Projections around one call of a fused function, which is given queries, keys and values as (B, H, L, D)."""

    def __init__(self, mix, key_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mix = mix
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(self.mix(*heads).transpose(1, 2).flatten(2))


def given(*masks: Tensor, **options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, *masks, **options)


def added(value: float) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(FUTURE, value)


def by_mathematics(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


SDPA = {
    "plain": (given(), HEADS),
    "by its other name": (torch._C._nn.scaled_dot_product_attention, HEADS),
    "by keywords": (lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q), HEADS),
    "one kernel": (by_mathematics, HEADS),
    "causal": (given(is_causal=True), HEADS),
    "fewer keys, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3], is_causal=True),
        HEADS,
    ),
    "boolean mask": (given(~FUTURE), HEADS),
    **{f"mask of {v:.3g}": (given(added(v)), HEADS) for v in (-math.inf, torch.finfo(torch.float32).min, -1e4)},
    "biases": (given(torch.arange(25.0).view(5, 5) * 0.1), HEADS),
    "biases of heads": (given(torch.arange(100.0).view(4, 5, 5) * 0.03), HEADS),
    "no visible key": (given(torch.zeros(LENGTH, LENGTH, dtype=torch.bool)), HEADS),
    "scale": (given(scale=0.05), HEADS),
    "scale of nought": (given(scale=0.0), HEADS),
    "negative scale": (given(scale=-0.5), HEADS),
    "three dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (BATCH, -1)),
        HEADS,
    ),
    "five dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(*(t[:, None] for t in (q, k, v)))[:, 0],
        HEADS,
    ),
    "grouped": (given(enable_gqa=True), 2),
    "one key head": (given(enable_gqa=True), 1),
}


@every_row("name", list(SDPA))
def test_fused_attention_is_read_with_all_its_arguments(name):
    module, x = Fused(*SDPA[name]), batch()
    (call,) = check(module, x)
    query = module.query(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
    assert torch.equal(call.query, query)
    if name == "fewer keys, causal":  # PyTorch counts from the upper left corner
        assert torch.equal(call.visible().expand(BATCH, HEADS, 5, 3)[0, 0], torch.ones(5, 3, dtype=torch.bool).tril())


MODULE = {
    "plain": ({}, {}),
    "padded": ({}, {"key_padding_mask": PADDING}),
    "masked": ({}, {"attn_mask": FUTURE}),
    "causal": ({}, {"attn_mask": FUTURE, "is_causal": True}),
    "mask of each head": ({}, {"attn_mask": torch.arange(200.0).view(8, 5, 5).sin()}),
    "learned key and a zero": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}),
}


@every_row("weights", [True, False])
@every_row("name", list(MODULE))
def test_multihead_attention_is_read_in_all_its_forms(name, weights):
    torch.manual_seed(2)
    options, arguments = MODULE[name]
    module, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options), batch()
    (call,) = check(module, x, x, x, need_weights=weights, **arguments)
    assert call.query.shape == (BATCH, HEADS, LENGTH, SIZE) and call.key.shape[2] == LENGTH + len(options)
    if name in ("masked", "causal"):
        assert torch.equal(~call.visible().expand(BATCH, HEADS, -1, -1)[1, 2], FUTURE)
    if "key_padding_mask" in arguments:
        hidden = ~call.visible().expand(BATCH, HEADS, LENGTH, -1)[..., :LENGTH]
        assert torch.equal(hidden, PADDING[:, None, None].expand_as(hidden))


@every_row("weights", [True, False])
def test_multihead_attention_to_other_widths_and_without_a_batch(weights):
    torch.manual_seed(3)
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=10, batch_first=True)
    (call,) = check(module, batch(), batch(7, 6), batch(7, 10), need_weights=weights)
    assert call.key.shape == (BATCH, HEADS, 7, SIZE)
    x = batch()[0]
    (call,) = check(nn.MultiheadAttention(WIDTH, HEADS), x, x, x, need_weights=weights)
    assert call.query.shape == (1, HEADS, LENGTH, SIZE)


@every_row("weights", [True, False])
def test_keys_and_values_that_stand_already(weights):
    class Static(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:
            own = (self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0, self.out_proj.weight)
            kept = {"static_k": batch(6, SIZE, 4).repeat(4, 1, 1), "static_v": batch(6, SIZE, 5).repeat(4, 1, 1)}
            rest = {"training": False, "need_weights": weights, **kept}
            return F.multi_head_attention_forward(x, x, x, WIDTH, HEADS, *own, self.out_proj.bias, **rest)[0]

    (call,) = check(Static(WIDTH, HEADS), batch().transpose(0, 1))
    assert call.key.shape == (BATCH, HEADS, 6, SIZE)


def layer(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(6)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, **options)


def test_encoders_leave_their_fast_path_and_keep_their_results_at_real_positions():
    (call,) = check(layer(), batch(), src_key_padding_mask=PADDING, real=~PADDING)
    assert call.site.module_name == "self_attn"
    nested = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=True)
    calls = check(nested, batch(), src_key_padding_mask=PADDING, real=~PADDING)
    assert [call.site.module_name for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():  # the fast path was there to be left: it writes zeros at padded positions
        assert not nested(batch(), src_key_padding_mask=PADDING)[PADDING].any()


@pytest.mark.medium
def test_decoders_are_read_with_their_attention_across():
    torch.manual_seed(7)
    module = nn.Transformer(WIDTH, HEADS, 2, 2, 32, batch_first=True)
    calls = check(module, batch(), batch(9), tgt_mask=torch.ones(9, 9, dtype=torch.bool).triu(1), tgt_is_causal=True)
    assert [(c.query.shape[2], c.key.shape[2]) for c in calls] == [(5, 5)] * 2 + [(9, 9), (9, 5)] * 2


def flex(score=None, mask=None, **options):
    blocks = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, score, blocks, **options)


SLOPES = torch.tensor([0.5, 0.1, 2.0, 3.0])


def causal(b, h, i, j):
    return i >= j


def by_distance(score, b, h, i, j):
    return score - SLOPES[h] * (i - j).abs()


FLEX = {
    "plain": (None, None),
    "mask": (None, causal),
    "biases and a mask": (by_distance, causal),
    "hidden by the score": (lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), None),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", FLEX)
def test_flexattention_is_read_with_its_functions(name):
    score, mask = FLEX[name]
    with uncompiled():
        (call,) = check(Fused(flex(score, mask, scale=0.3, enable_gqa=True), 2), batch())
    if name != "plain":
        assert torch.equal(~call.visible().expand(BATCH, HEADS, -1, -1)[1, 2], FUTURE)
    if name == "biases and a mask":
        where = torch.arange(LENGTH)
        bias = -SLOPES[:, None, None] * (where[:, None] - where).abs()
        assert torch.equal(call.log_weight[0], bias.masked_fill(FUTURE, -math.inf))


@pytest.mark.medium
@pytest.mark.parametrize(
    "score", [lambda s, *_: 2 * torch.tanh(s / 2), lambda s, *_: 500 * torch.tanh(s / 500), lambda s, *_: 1.001 * s]
)
def test_flexattention_that_bends_its_scores_is_refused(score):
    module, calls = Fused(flex(score)).eval(), []
    with uncompiled(), torch.no_grad(), capturing(module, calls.append) as capture:
        module(batch())
    assert not calls and "does more than add a number" in capture.refused[""]
