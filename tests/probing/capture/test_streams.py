"""Which tokens a number is about: of the text, of what a decoder reads, of an image; and to which layer it belongs."""

import sys
from typing import Any

import numpy as np
import polars
import pytest
import torch
import transformers as hf
from tests.support.probing import zoo
from tests.support.probing.readings import attention_of
from tests.support.rows import every_row

import massieu
from massieu.probing.capture.sites import find_sites, first_pass
from massieu.probing.checks.check import first_look
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading
from massieu.probing.sums.units import Units

_BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
DECODERS = {
    "OPT": lambda: hf.OPTModel(
        hf.OPTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, vocab_size=99,
            max_position_embeddings=64, word_embed_proj_dim=48, pad_token_id=0,
        )
    ),
    "BART's decoder alone": lambda: hf.BartForCausalLM(hf.BartConfig(**_BART)),
    "BART's decoder alone, that says it is a pair": lambda: hf.BartForCausalLM(hf.BartConfig(**_BART)),
}  # fmt: skip
# Some models take their softmax in float32 whatever their weights are: p is off by some roundings, so Σ p log p by (H + 1)
# times as many, and H is at most log 28.
ROUNDING = 4 * (1 + np.log(28)) * torch.finfo(torch.float32).eps


def sharp(make):
    torch.manual_seed(0)
    model = make().double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def batch(rows=3, length=20):
    """Shorter rows are padded; token 5 stands for a special one."""
    given = zoo.inputs("bert", padded=True, rows=rows, length=length)
    given["input_ids"][:, [0, 7]] = 5
    given["input_ids"] *= given["attention_mask"]
    return given


def weights_of(model, prepared):
    """The attention matrices that the model's own eager code returns."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(**prepared, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    return found


def averages(weights, special, real):
    """Entropy and weight on special tokens, averaged over the real queries of a batch, per head."""
    queries = real[:, None].double()
    entropy = -torch.where(weights > 0, weights * weights.clamp_min(1e-300).log(), 0.0).sum(-1)
    on_special = (weights * special[:, None, None].double()).sum(-1)
    return [((x * queries).sum((0, 2)) / queries.sum()).numpy() for x in (entropy, on_special)]


def read(model, given, special):
    """Entropy and weight on special tokens of each site, as the probe has them."""
    sites = first_look(model, given).sites
    reading = Reading(model, sites, Options(frozenset({"attention"}), Units(), 20))
    reading.forward(given, special, [], range(len(special)))
    found = attention_of(reading)
    names = [found[0].names.index(name) for name in ("entropy", "weight_special")]
    return sites, [[results.ratio.value()[n] for n in names] for results in found]


@pytest.mark.medium
@every_row("name", sorted(DECODERS))
def test_a_decoder_alone_reads_the_text(name):
    """Its padding enters no average and its special tokens are the text's, whatever its modules are called."""
    model, given = sharp(DECODERS[name]), batch()
    trunk = model.base_model
    if "pair" in name:
        model.config.is_encoder_decoder = trunk.config.is_encoder_decoder = True
    special, real = given["input_ids"] == 5, given["attention_mask"].bool()
    sites, found = read(trunk, given, special)
    expected = [averages(w, special, real) for w in weights_of(model, given).attentions]
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)
    assert not any(info.in_decoder for info in sites)
    run = massieu.probe(model, massieu.Batches([given], window=20), statistics=["entropy"], draws=0).run
    assert {(s.query_tokens, s.key_tokens) for s in run.sites} == {("text", "text")}


@pytest.mark.medium
def test_a_decoder_beside_an_encoder_reads_its_own_tokens():
    """Of an encoder–decoder, the decoder's special tokens are the text's, one further, behind a start token."""
    model, given = sharp(lambda: hf.BartModel(hf.BartConfig(**_BART))), batch()
    special, real = given["input_ids"] == 5, given["attention_mask"].bool()
    moved = special.roll(1, 1)
    moved[:, 0] = True
    sites, found = read(model, given, special)
    out = weights_of(model, model_inputs(model, given))
    expected = [averages(w, special, real) for w in out.encoder_attentions]
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        expected += [averages(own, moved, real), averages(cross, special, real)]
    assert [info.in_decoder for info in sites] == [False] * 2 + [True] * 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)


@pytest.mark.slow
def test_decoder_tokens_of_another_length_have_their_own_padding():
    model, given = sharp(lambda: hf.BartModel(hf.BartConfig(**_BART))), batch()
    longer = zoo.inputs("bert", rows=3, length=28, seed=4)
    longer["attention_mask"][0, 11:] = 0
    given |= {f"decoder_{name}": value for name, value in longer.items()}
    result = massieu.probe(model, massieu.Batches([given], window=28), statistics=["entropy", "effective_rank"])
    own = result.heads.filter((polars.col("statistic") == "entropy") & polars.col("site").str.contains("decoder"))
    assert set(own["count"]) == {28 + 28 + 11}
    real = longer["attention_mask"].bool()
    expected = averages(weights_of(model, given).decoder_attentions[0], real, real)[0]
    np.testing.assert_allclose(own["value"].to_numpy()[:4], expected, rtol=0, atol=ROUNDING)
    clouds = result.layers.filter(polars.col("statistic") == "effective_rank/before")
    assert (clouds["value"] < 27).all(), "at most as many directions as distinct real tokens"


def test_special_tokens_that_are_not_known_have_no_weight():
    """Batches do not say which tokens are special: the weight on them is not 0 but unknown."""
    result = massieu.probe(zoo.model("gpt2"), massieu.Batches([batch()], window=20), statistics=["attention"])
    assert "weight_special" not in set(result.heads["statistic"])
    assert all("special" in s.unavailable["weight_special"] for s in result.run.sites)
    assert "weight_first" in set(result.heads["statistic"])


@pytest.mark.medium
def test_differential_attention_has_as_many_layers_as_the_model():
    """DiffLlama applies one attention matrix to two sets of values: that is one site, seen once."""
    if not hasattr(sys.modules[hf.DiffLlamaModel.__module__], "eager_attention_forward"):
        pytest.skip("this release of transformers does not dispatch DiffLlama's attention")
    config = hf.DiffLlamaConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96,
        vocab_size=99, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, given = sharp(lambda: hf.DiffLlamaModel(config)), batch()
    result = massieu.probe(model, massieu.Batches([given], window=20))
    assert (result.run.model.layers, result.run.model.heads) == (3, 12)
    assert result.run.unavailable == []
    assert all("2 sets of values" in s.unavailable["values"] for s in result.run.sites)
    kinds = [s.kind for s in result.run.sublayers]
    assert kinds[:4] == ["norm", "attention", "norm", "feed_forward"]
    real = given["attention_mask"].bool()
    expected = np.concatenate([averages(w, real, real)[0] for w in weights_of(model, given).attentions])
    found = result.heads.filter(polars.col("statistic") == "entropy")["value"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)


def test_a_module_that_attends_twice_is_one_layer_and_one_called_twice_is_two():
    twice: Any = zoo.fresh("bert")
    attention = twice.encoder.layer[0].attention.self
    plain = attention.forward

    def both(hidden_states, *arguments, **keywords):
        plain(2 * hidden_states, *arguments, **keywords)
        return plain(hidden_states, *arguments, **keywords)

    attention.forward = both
    for model, layers in ((twice, [0, 0, 1, 2]), (zoo.model("albert"), [0, 1, 2])):
        seen = first_pass(model, zoo.inputs("bert"))
        assert [info.layer for info in find_sites(model, seen)] == layers


@pytest.mark.medium
def test_self_and_cross_attention_of_one_name_are_one_layer():
    """BERT as a decoder calls both of a block's attention modules ``self``: its blocks are still layers, not two each."""
    settings = {key: value for key, value in zoo.model("bert").config.to_dict().items() if key != "architectures"}
    settings |= {"is_decoder": True, "add_cross_attention": True}
    pair = hf.EncoderDecoderModel(
        encoder=zoo.fresh("bert"), decoder=hf.BertLMHeadModel(hf.BertConfig(**settings))
    ).eval()
    pair.config.decoder_start_token_id, pair.config.pad_token_id = 1, 0
    run = massieu.probe(pair, massieu.Batches([batch()], window=20), statistics=["entropy"], draws=0).run
    assert run.model.layers == 3 + 3
    decoder = [(s.layer, s.kind, s.query_tokens, s.key_tokens) for s in run.sites[3:]]
    assert decoder == [
        (layer, *kind)
        for layer in range(3)
        for kind in (("causal", "decoder", "decoder"), ("cross", "decoder", "text"))
    ]


@pytest.mark.medium
@every_row("name, tokens", [("vit", 2 * 3 * 17), ("swin", 2 * 3 * 256)])
def test_an_image_model_has_read_its_patches(name, tokens):
    """32 × 32 pixels: 4 × 4 patches and a class token, or 16 × 16 patches."""
    given = [zoo.inputs(name), zoo.inputs(name, seed=2)]
    result = massieu.probe(zoo.model(name), given, statistics=["entropy"], draws=0)
    assert result.run.text.tokens == tokens


@pytest.mark.medium
def test_padding_of_sound_enters_no_average():
    """The mask of a model of sound is about samples: padding is then what no query sees, and tokens are frames."""
    config = hf.Wav2Vec2Config(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, conv_dim=(16, 16),
        conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    model = sharp(lambda: hf.Wav2Vec2Model(config))
    sound = torch.randn(2, 640, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(2, 640, dtype=torch.long)
    mask[1, 300:] = 0
    given = {"input_values": sound * mask, "attention_mask": mask}
    result = massieu.probe(model, massieu.Batches([given], window=64), statistics=["entropy"], draws=0)
    frames = [model._get_feat_extract_output_lengths(int(n)).item() for n in mask.sum(1)]
    entropy = result.heads.filter(polars.col("statistic") == "entropy")
    assert set(entropy["count"]) == {sum(frames)}
    assert result.run.text.tokens == sum(frames)
    real = torch.arange(frames[0])[None] < torch.tensor(frames)[:, None]
    expected = np.concatenate([averages(w, real, real)[0] for w in weights_of(model, given).attentions])
    np.testing.assert_allclose(entropy["value"].to_numpy(), expected, rtol=0, atol=ROUNDING)
