"""Audio in batches from Python: which frames are read and what they are called, against the stock models' own numbers."""

from typing import Any

import pytest
import torch
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.capture.tokens import BatchTokens
from massieu.probing.data.token_names import frames_of, token_names
from massieu.probing.model.model import as_loaded
from massieu.probing.replaced.effect import Effects

_SPEECH: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8, 8),
    "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 12,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "vocab_size": 40, "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "decoder_layers": 1,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 16, "max_source_positions": 30,
    "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2", {**_SPEECH, "feat_extract_norm": "layer"}),
    "wav2vec2, group norm": ("Wav2Vec2", {**_SPEECH, "feat_extract_norm": "group"}),
    "hubert": ("Hubert", {**_SPEECH, "feat_extract_norm": "layer"}),
    "whisper": ("Whisper", _WHISPER),
}
SAMPLES = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(400) < torch.tensor([400, 200, 33])[:, None]).long()  # 19, 9 and 0 or 1 frames


def sharp(kind: str) -> Any:
    """A model whose heads differ."""
    import transformers

    torch.manual_seed(1)
    architecture, settings = _KINDS[kind]
    config = getattr(transformers, f"{architecture}Config")(**settings)
    made = getattr(transformers, f"{architecture}Model")(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(0, 1)
    return made


def entropies(weights: Any, real: torch.Tensor) -> list[float]:
    """Mean over real queries, of each layer's heads in turn."""
    layers = [torch.special.entr(layer.double()).sum(-1) for layer in weights]  # (B, H, L)
    return [float(layer[:, head][real].mean()) for layer in layers for head in range(layer.shape[1])]


def of(result: Any, site: str = "") -> list[float]:
    rows = result.heads.rows(named=True)
    return [row["value"] for row in rows if row["statistic"] == "entropy" and row["site"].startswith(site)]


@pytest.mark.medium
@every_row("name", ["wav2vec2", "wav2vec2, group norm", "hubert"])
def test_padding_of_samples_is_padding_of_frames(name):
    model = sharp(name)
    given = {"input_values": SAMPLES[:2], "attention_mask": MASK[:2]}
    found = massieu.probe(model, [given], statistics=["entropy"], draws=0)
    real = model._get_feature_vector_attention_mask(19, MASK[:2])
    assert real.sum(1).tolist() == [19, 9]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(**given, output_attentions=True).attentions
    assert of(found) == pytest.approx(entropies(stock, real), rel=1e-5)
    assert found.run.text.tokens == 19 + 9


def test_frames_are_those_of_the_models_own_mask():
    model = sharp("wav2vec2")
    for length in (33, 44, 45, 57, 100, 199, 200, 399, 400):
        mask = (torch.arange(400) < torch.tensor([[400], [length]])).long()
        found = frames_of(model, {"input_values": SAMPLES[:2], "attention_mask": mask})
        assert found is not None
        assert torch.equal(found.real, model._get_feature_vector_attention_mask(19, mask))


def test_frames_are_named_by_their_time():
    from transformers import SEWConfig

    model = sharp("wav2vec2")
    given = {"input_values": SAMPLES, "attention_mask": MASK}
    assert token_names(model, given, 1)["text"] == [
        f"{i / 800:.3f} s" for i in range(9)
    ]  # 20 samples of 16,000 a second
    model.config.conv_stride, model.config.conv_kernel = (5, 2, 2, 2, 2, 2, 2), (10, 3, 3, 3, 3, 2, 2)
    names = token_names(model, {"input_values": torch.zeros(1, 16_000)}, 0)["text"]
    assert len(names) == 49  # as of every base model, for a second
    assert (names[0], names[12], names[-1]) == ("0.00 s", "0.24 s", "0.96 s")
    assert token_names(model, {"input_values": torch.zeros(1, 100)}, 0) == {"text": []}
    whisper = sharp("whisper")
    names = token_names(whisper, {"input_features": torch.zeros(1, 8, 60)}, 0)["text"]
    assert (len(names), names[12], names[-1]) == (30, "0.24 s", "0.58 s")
    squeezed = SEWConfig(**{k: v for k, v in _SPEECH.items() if k != "num_feat_extract_layers"})
    model.config = squeezed  # attends to every second frame of its convolutions
    assert token_names(model, {"input_values": SAMPLES}, 0) == {}
    assert token_names(torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)}, 0) == {}


@pytest.mark.medium
def test_whispers_encoder_attends_to_all_of_its_window():
    model = sharp("whisper")
    features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[3, 9, 8, 7], [3, 9, 0, 0]])
    given = {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long()}
    given["attention_mask"] = (torch.arange(60) < torch.tensor([[60], [30]])).long()  # which the model does not use
    found = massieu.probe(model, massieu.Batches([given], window=30), statistics=["entropy", "climb"])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(**given, output_attentions=True)
    every = torch.ones(2, 30, dtype=torch.bool)
    assert of(found, "encoder") == pytest.approx(entropies(stock.encoder_attentions, every), rel=1e-5)
    assert of(found, "decoder.layers.0.encoder_attn") == pytest.approx(
        entropies(stock.cross_attentions, ids > 0), rel=1e-5
    )
    assert of(found, "decoder.layers.0.self_attn") == pytest.approx(
        entropies(stock.decoder_attentions, ids > 0), rel=1e-5
    )
    assert found.run.sample.queries == 60
    [example] = found.details["examples"][:1]
    assert example["tokens"]["text"][-1] == "0.58 s"


def test_padded_rows_are_sampled_at_their_real_frames():
    model = sharp("wav2vec2")
    given = {"input_values": SAMPLES[:2], "attention_mask": MASK[:2]}
    audio = frames_of(model, given)
    assert audio is not None
    tokens = BatchTokens(given, frames=audio.real)
    drawn = tokens.positions(1, 19, 64, False, False, torch.Generator().manual_seed(0))
    assert sorted(drawn.tolist()) == list(range(9))
    assert not len(BatchTokens(given).positions(1, 19, 64, False, False, torch.Generator().manual_seed(0)))


def test_a_row_too_short_for_a_frame_counts_nothing():
    model = sharp("wav2vec2")
    mask = MASK * torch.tensor([1, 1, 0])[:, None]
    assert int(model._get_feature_vector_attention_mask(19, mask)[2].sum()) > 0  # the model attends to its padding
    both = massieu.probe(model, [{"input_values": SAMPLES, "attention_mask": mask}], statistics=["entropy"], draws=0)
    one = {"input_values": SAMPLES[:2], "attention_mask": mask[:2]}
    assert of(both) == pytest.approx(of(massieu.probe(model, [one], statistics=["entropy"], draws=0)), rel=1e-5)
    assert both.run.text.tokens == 19 + 9


def test_replaced_attention_is_measured_at_real_frames():
    model = sharp("hubert")
    effects = Effects(as_loaded(model), [massieu.Replacement("off", windows=2)])
    _, real = effects._values({"input_values": SAMPLES[:2], "attention_mask": MASK[:2]})
    assert real.sum(1).tolist() == [19, 9]


def test_a_decoder_without_tokens_is_refused():
    model = sharp("whisper")
    with pytest.raises(InputError, match="the batch holds no tokens for it; give decoder_input_ids too"):
        massieu.probe(model, [{"input_features": torch.zeros(1, 8, 60)}])
