"""What a model does not have is left out with a reason in words, never with the text of an error."""

from typing import Any

import pytest
import torch
from tests.support.probing import eager, zoo
from tests.support.rows import every_row
from torch import Tensor, nn

import massieu
from massieu.probing.model.positions import max_positions
from massieu.probing.statistics.registry import FEED_FORWARD, REPEATED, RESPONSE, STATISTICS, TAP
from massieu.probing.statistics.tap import OTHER_TOKENS

EVERYTHING = sorted({each.group for each in STATISTICS.values()} - {"replacement"})
IDS = torch.arange(24).reshape(2, 12) * 7 % 31 + 3
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def reasons(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, str]:
    """Why groups are left out, of a probe that asks for all but replacements."""
    result = massieu.probe(model, [batch], statistics=EVERYTHING)
    found = {entry.statistic: entry.reason for entry in result.run.unavailable}
    for site in result.run.sites:
        found |= site.unavailable
    assert not any("not foreseen" in reason or "Error: " in reason for reason in found.values()), found
    return found


def siglip() -> tuple[nn.Module, dict[str, Tensor]]:
    text = SIZES | {"vocab_size": 99, "max_position_embeddings": 64, "projection_size": 16}
    image = SIZES | {"image_size": 16, "patch_size": 4}
    batch = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return eager.create("Siglip", {"text_config": text, "vision_config": image}, "sdpa"), batch


def mpt() -> tuple[nn.Module, dict[str, Tensor]]:
    return eager.create("Mpt", {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 32, "vocab_size": 99}), {
        "input_ids": IDS
    }


def bloom() -> tuple[nn.Module, dict[str, Tensor]]:
    """Its GELU is a function of autograd that cannot be transformed."""
    return eager.create("Bloom", {"hidden_size": 16, "n_head": 2, "n_layer": 1, "vocab_size": 99}), {"input_ids": IDS}


def led() -> tuple[nn.Module, dict[str, Tensor]]:
    settings: dict[str, Any] = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 99, "attention_window": 4,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }  # fmt: skip
    return eager.create("LED", settings), {"input_ids": IDS, "decoder_input_ids": IDS[:, :8]}


def xlnet() -> tuple[nn.Module, dict[str, Tensor]]:
    settings = {"vocab_size": 99, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16}
    return eager.create("XLNet", settings), {"input_ids": IDS, "attention_mask": torch.ones(2, 12)}


def canine() -> tuple[nn.Module, dict[str, Tensor]]:
    settings = SIZES | {
        "local_transformer_stride": 16, "downsampling_rate": 4, "num_hash_buckets": 64, "num_hash_functions": 4,
        "max_position_embeddings": 256,
    }  # fmt: skip
    ids = torch.arange(128).reshape(2, 64) + 5
    return eager.create("Canine", settings), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def segformer() -> tuple[nn.Module, dict[str, Tensor]]:
    settings: dict[str, Any] = {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    }  # fmt: skip
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return eager.create("Segformer", settings), {"pixel_values": pixels}


@pytest.mark.slow
def test_windows_of_an_image_are_not_the_streams_tokens():
    """Its attention has fewer queries than the stream has tokens, and more rows than the batch: no token's own weights."""
    model = zoo.fresh("swin", depths=[1], num_heads=[2], image_size=16)
    assert reasons(model, zoo.inputs("swin") | {"pixel_values": torch.randn(2, 3, 16, 16)})[TAP] == OTHER_TOKENS


@pytest.mark.medium
@every_row(
    "make, said",
    [
        (siglip, {REPEATED: "the model does not run on tokens alone, without pixel_values"}),
        (bloom, {FEED_FORWARD: "the layer cannot be run and differentiated on single tokens (RuntimeError)"}),
        (led, {}),
        (mpt, {}),
    ],
)
def test_reasons_are_in_words(make, said):
    model, batch = make()
    assert said.items() <= reasons(model, batch).items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (xlnet, {RESPONSE: "a layer's output was not computed from the states that were seen before it"}),
        (canine, {REPEATED: "the model is not given tokens of a vocabulary"}),
        (segformer, {FEED_FORWARD: "no feed-forward layer was seen on the way of the stream"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_reasons_of_other_architectures_are_in_words(make, said):
    model, batch = make()
    assert said.items() <= reasons(model, batch).items()


@pytest.mark.slow
def test_mpt_reads_as_many_tokens_as_it_has_biases_by_position():
    """Its table of biases is as long as `max_seq_len`; longer made-up texts raised an error inside the model."""
    model, batch = mpt()
    assert max_positions(model) == 32
    assert REPEATED not in reasons(model, batch)
