"""Which keys a query sees, whatever a model writes in its masks, against the model's own eager attentions in float64."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.probing import eager
from tests.support.probing.readings import attention_of
from tests.support.rows import every_row
from torch import Tensor, nn

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite, explicit_attention
from massieu.probing.capture.tokens import BatchTokens, Tokens
from massieu.probing.checks.check import first_look
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading
from massieu.probing.statistics.catalogue import PACKAGE
from massieu.probing.statistics.query_means import query_statistics
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import ATTENTION
from massieu.probing.sums.units import Units


def call_with(log_weight: Tensor, seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    length, keys = log_weight.shape[-2:]
    query = torch.randn(1, log_weight.shape[1], length, 4, generator=generator)
    key, value = (torch.randn(1, log_weight.shape[1], keys, 4, generator=generator) for _ in range(2))
    output = torch.empty(1, length, log_weight.shape[1], 4)
    return AttentionCall(
        AttentionSite("a"), nn.Identity(), query, key, value, log_weight, False, 0.5, None, None, output
    )


def reading_of(call: AttentionCall) -> QueryReading:
    queries, keys = (
        Tokens(torch.ones(len(call.query), each.shape[2], dtype=torch.bool), None) for each in (call.query, call.key)
    )
    return QueryReading(call, queries, keys, torch.arange(call.query.shape[2]), queries.real.shape == keys.real.shape)


SHUT = torch.arange(12) >= 7


@pytest.mark.parametrize("least", [-80.0, -100.0, -1e4, -1e9, -torch.inf])
@pytest.mark.parametrize("bias", [0.0, 1.0, 16.0])
def test_a_key_behind_a_gap_of_80_nats_is_shut(least, bias):
    position = bias * torch.linspace(0.0, 1.0, 12).roll(3)[None, None, None].expand(1, 2, 3, -1)
    lowered = least - bias if least == -80.0 else least  # the gap is then 80 nats at least
    weight = position + torch.where(SHUT, lowered, 0.0)
    assert torch.equal(call_with(weight).visible(), ~SHUT.expand(1, 2, 3, -1))


def test_the_steps_of_a_bias_by_position_shut_nothing():
    """ALiBi of 600 keys: the farthest lies 300 nats below the nearest, with all others between."""
    distance = torch.arange(600.0)[:, None] - torch.arange(600.0)
    seen = distance >= 0
    for slope in (0.5, 2**-8):
        weight = (-slope * distance).masked_fill(~seen, -torch.inf)[None, None]
        assert torch.equal(call_with(weight).visible()[0, 0], seen)
        padded = weight + torch.where(torch.arange(600) >= 500, -1e4, 0.0)
        assert torch.equal(call_with(padded).visible()[0, 0, :500], seen[:500] & (torch.arange(600) < 500))


def test_a_row_without_another_key_is_seen_as_the_model_sees_it():
    weight = torch.full((1, 1, 2, 5), -1e4)
    weight[:, :, 1, 2:] = torch.nan
    assert bool(call_with(weight).visible().all())


def test_scores_without_a_known_mask_have_no_gaps():
    call = replace(call_with(torch.tensor([[[[0.0, -200.0, -torch.inf]]]])), grade="scores")
    assert call.visible().flatten().tolist() == [True, True, False]


def test_the_largest_score_is_that_of_a_visible_key_and_weights_are_the_models():
    weight = torch.where(SHUT, -100.0, 0.0).expand(1, 2, 3, -1)
    call = call_with(weight)
    call.key[:, :, SHUT] *= 9
    scores = 0.5 * call.query.double() @ call.key.double().mT
    p = torch.softmax(scores + weight.double(), -1)
    seen = scores[..., ~SHUT]
    values = query_statistics(reading_of(call), PACKAGE.query_functions).values
    expected = {
        "largest_score": seen.amax(-1),
        "largest_score_above_mean": seen.amax(-1) - seen.mean(-1),
        "entropy_fraction": -(p * p.log()).sum(-1) / torch.tensor(7.0).log(),
        "log_partition": torch.logsumexp(scores + weight.double(), -1),
        "weight_first": p[..., 0],
    }
    for name, right in expected.items():
        assert torch.allclose(values[name].double(), right, atol=1e-5, rtol=1e-5), name


class Biased(nn.Module):
    """One head under an additive mask, through PyTorch's fused function or step by step."""

    def __init__(self, mask: Tensor, fused: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.mask, self.fused = mask, fused

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens).unflatten(-1, (1, 12)).transpose(1, 2).chunk(3, -1)
        if self.fused:
            output = nn.functional.scaled_dot_product_attention(query, key, value, self.mask)
        else:
            output = torch.softmax(query @ key.mT / 2 + self.mask, -1) @ value
        return self.out(output.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [False, True])
def test_a_long_bias_by_position_hides_nothing_on_the_route_that_follows_scores(fused):
    """50 nats a token over 300 tokens: 15,000 nats in steps, and a mask of −10,000 without any."""
    torch.manual_seed(0)
    distance = (torch.arange(300.0)[:, None] - torch.arange(300.0)).abs()
    padding = torch.where(torch.arange(300) < 280, 0.0, -1e4)
    for mask, seen in ((-50 * distance, 300), (padding.expand(300, -1), 280)):
        (call,) = eager.calls(Biased(mask[None, None], fused), {"tokens": torch.randn(1, 300, 4)})
        assert call.route == "tap"
        assert call.visible().sum(-1).unique().tolist() == [seen]


# --- models of transformers ----------------------------------------------------------------------------------------------

_SHIFTED = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
_TEXT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def text(real: tuple[int, ...] = (10, 6)) -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (len(real), max(real)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(real)) < torch.tensor(real)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


MASKED: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]], str]] = {
    "−100 of shifted windows": ("Swin", _SHIFTED, images, "SwinAttention"),
    "−100 of shifted windows, Donut": ("DonutSwin", _SHIFTED, images, "DonutSwinSelfAttention"),
    "−10,000 of padding": ("MarkupLM", {**_TEXT, "xpath_unit_hidden_size": 4}, text, "MarkupLMSelfAttention"),
}


@pytest.mark.medium
@every_row("name", MASKED)
def test_keys_that_a_model_masks_with_a_small_number_are_not_counted(name):
    architecture, settings, inputs, kind = MASKED[name]
    built, batch = eager.create(architecture, settings), inputs()
    attentions = eager.attentions(built, batch, kind, output_attentions=True)
    calls = eager.calls(built, batch)
    assert len(calls) == len(attentions)
    counts = set()
    for call, weights in zip(calls, attentions, strict=True):
        seen = weights > 1e-25
        entropy = -torch.where(seen, weights * weights.log(), 0.0).sum(-1)
        right = entropy / seen.sum(-1).clamp_min(2).log()
        counts |= set(seen.sum(-1).flatten().tolist())
        found = query_statistics(reading_of(call), PACKAGE.query_functions).values["entropy_fraction"]
        assert torch.allclose(found.double(), right, atol=1e-5, rtol=1e-5), call.site.name
    assert len(counts) > 1  # some keys are masked


# --- sequences that the batch's mask does not fit ------------------------------------------------------------------------

_FUNNEL = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "vocab_size": 40, "num_decoder_layers": 1}


def read(model: nn.Module, batch: dict[str, Tensor]) -> Reading:
    reading = Reading(model, first_look(model, batch).sites, Options(frozenset({ATTENTION}), Units(), 32))
    reading.forward(batch, None, sampled=(), windows=range(len(next(iter(batch.values())))))
    return reading


def assert_means_are_over(reading: Reading, attentions: list[Tensor], real: list[Tensor]) -> None:
    """Entropy and number of queries of every site, against weights in float64 and the queries that are no padding."""
    for results, weights, kept in zip(attention_of(reading), attentions, real, strict=True):
        entropy = -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1).transpose(0, 1)[:, kept].mean(1)
        estimate = results.ratio.estimate()
        index = results.names.index("entropy")
        assert (estimate.count[index] == int(kept.sum())).all()
        assert torch.allclose(torch.from_numpy(estimate.value[index]), entropy, atol=1e-5)


def pooled(real: Tensor) -> Tensor:
    """Funnel's pooling of a mask: pairs of tokens behind the first, real where both are; the last token goes."""
    doubled = torch.cat([real[:, :1], real[:, :-1]], 1)
    padded = nn.functional.pad(doubled, (0, doubled.shape[1] % 2), value=True)
    return padded.unflatten(1, (-1, 2)).all(-1)


@pytest.mark.medium
@every_row("blocks", [[1, 2], [1, 1], [2, 1, 1]])
def test_queries_of_a_pooled_sequence_are_real_where_the_model_says_so(blocks):
    """Also where no later layer of the block shows it."""
    model = eager.create("Funnel", {**_FUNNEL, "block_sizes": blocks})
    batch = text((23, 16, 9))
    real, expected = batch["attention_mask"].bool(), []
    for place, layers in enumerate(blocks):
        expected += [real] * layers if place == 0 else [real := pooled(real)] + [real] * (layers - 1)
    expected.append(batch["attention_mask"].bool())
    attentions = eager.attentions(model, batch, "FunnelRelMultiheadAttention", output_attentions=True)
    assert_means_are_over(read(model, batch), attentions, expected)


@pytest.mark.medium
def test_padding_of_a_mask_of_pairs_is_what_the_model_masks():
    """A mask of four dimensions, for a decoder that also attends to a sequence with padding of its own."""
    from transformers.models.maskformer.modeling_maskformer import MaskFormerDetrConfig, MaskFormerDetrDecoder

    torch.manual_seed(0)
    config = MaskFormerDetrConfig(d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16)
    model = MaskFormerDetrDecoder._from_config(config, attn_implementation="eager").eval()
    real = torch.arange(10) < torch.tensor([10, 4])[:, None]
    least = torch.finfo(torch.float32).min
    batch = {
        "inputs_embeds": torch.randn(2, 10, 16),
        "attention_mask": torch.where(real, 0.0, least)[:, None, None].expand(-1, 1, 10, -1),
        "encoder_hidden_states": torch.randn(2, 10, 16),
        "encoder_attention_mask": (torch.arange(10) < torch.tensor([7, 10])[:, None]).long(),
    }
    own = eager.attentions(model, batch, "MaskFormerDetrSelfAttention")
    cross = eager.attentions(model, batch, "MaskFormerDetrCrossAttention")
    attentions = [weights for pair in zip(own, cross, strict=True) for weights in pair]
    assert_means_are_over(read(model, batch), attentions, [real] * 4)


@pytest.mark.medium
def test_a_monitor_says_once_that_the_padding_of_pooled_queries_counts():
    model, batch = eager.create("Funnel", {**_FUNNEL, "block_sizes": [1, 2]}), text((23, 16, 9))
    monitor = massieu.Monitor(model, batch, every=1)
    with pytest.warns(UserWarning, match="does not fit sequences of length 12 inside FunnelModel"):
        monitor(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor(1)


@pytest.mark.medium
def test_padding_that_no_pass_tells_is_said():
    """Embeddings in place of tokens: nothing else can stand at their padding. Without padding there is nothing to say."""
    model = eager.create("Funnel", {**_FUNNEL, "block_sizes": [1, 1]})
    mask = text((23, 16, 9))["attention_mask"]
    embedded = {"inputs_embeds": torch.randn(3, 23, 16), "attention_mask": mask}
    assert read(model, embedded).untold == {12}
    assert not read(model, embedded | {"attention_mask": torch.ones_like(mask)}).untold
    assert not read(model, text((23, 16, 9))).untold


def test_keys_of_another_sequence_are_real_where_the_model_sees_them_whatever_mask_is_as_long():
    call = call_with(torch.where(SHUT, -torch.inf, 0.0).expand(1, 1, 12, -1))
    inputs = {"inputs_embeds": torch.zeros(1, 12, 4), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    inputs["attention_mask"][:, :2] = 0
    tokens = BatchTokens(inputs)
    assert torch.equal(tokens.of(call, decoder=False, keys=True, cross=True).real, ~SHUT[None])
    assert torch.equal(tokens.of(call, decoder=False, cross=True).real, inputs["attention_mask"].bool())
    both = BatchTokens({**inputs, "decoder_input_ids": torch.ones(1, 12, dtype=torch.long)})
    assert torch.equal(both.of(call, decoder=False, keys=True, cross=True).real, inputs["attention_mask"].bool())


def test_padding_is_told_by_a_mask_of_pixels_through_what_the_model_masks():
    call = call_with(torch.where(SHUT, -torch.inf, 0.0).expand(1, 1, 12, -1))
    inputs = {"pixel_values": torch.zeros(1, 3, 4, 3), "pixel_mask": torch.ones(1, 4, 3)}
    tokens = BatchTokens(inputs)
    assert torch.equal(tokens.of(call, decoder=False).real, ~SHUT[None])
    assert tokens.positions(0, 12, 99, False, False, torch.Generator()).max() == 6
    assert bool(BatchTokens({"pixel_values": inputs["pixel_values"]}).of(call, decoder=False).real.all())


@pytest.mark.medium
def test_an_eager_function_adds_a_boolean_mask():
    """So it does in all of transformers: True is then a bias of one nat, and nothing is shut, as in Grounding DINO's text."""
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    model = eager.create("Bert", settings)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    batch = {"input_ids": torch.arange(12).view(2, 6) % 9, "attention_mask": mask}
    (call,), (right,) = eager.calls(model, batch), eager.attentions(model, batch, "BertSelfAttention")
    scores, weight = explicit_attention(call, torch.float64)
    assert torch.allclose(torch.softmax(scores + weight, -1), right, atol=1e-5)
    assert bool(call.visible().all())
