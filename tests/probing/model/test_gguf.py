"""GGUF files: weights, tokenizer and record, and a real decoder through and through."""

import functools
import struct
from pathlib import Path

import gguf
import numpy as np
import polars
import pytest
import torch
from tests.support import needs

import massieu
from massieu.errors import InputError
from massieu.probing.data.documents import reference_documents
from massieu.probing.data.text import TextBatches
from massieu.probing.model.checkpoint import find_checkpoint
from massieu.probing.model.model import load_model
from massieu.probing.statistics import repeated

LAYERS, HEADS, KEY_HEADS, HEAD_SIZE = 2, 4, 2, 16
WIDTH = HEADS * HEAD_SIZE
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _crafted(settings: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 1)) -> bytes:
    """A GGUF file of version 3 that says it has so many tensors and settings."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + settings + tensors


def _array(kind: int, count: int) -> bytes:
    return _string(b"a") + struct.pack("<IIQ", 9, kind, count)


_U8, _STRING, _ARRAY = 0, 8, 9
LIES = {
    "numbers": _crafted(_array(_U8, 1 << 60)),
    "strings": _crafted(_array(_STRING, 1 << 60)),
    "arrays": _crafted(_array(_ARRAY, 1 << 60)),
    "settings": _crafted(counts=(0, 1 << 63)),
    "tensors": _crafted(counts=(1 << 63, 0)),
    "name": _crafted(struct.pack("<Q", 1 << 62)),
    "deep": _crafted(_array(_ARRAY, 1) + struct.pack("<IQ", _ARRAY, 1) * 2000),
    "dimensions": _crafted(tensors=_string(b"t") + struct.pack("<I", 1 << 31), counts=(1, 0)),
    "shape": _crafted(tensors=_string(b"t") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), counts=(1, 0)),
    "place": _crafted(tensors=_string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 1 << 62), counts=(1, 0)),
    "unknown": _crafted(_string(b"a") + struct.pack("<I", 99)),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_file_that_claims_more_than_it_holds_is_one_sentence_before_it_is_read(content, tmp_path, monkeypatch):
    """The reader would take its word: an array of 2⁶⁰ numbers fills the memory first."""
    monkeypatch.setattr(gguf, "GGUFReader", None)
    file = tmp_path / "crafted.gguf"
    file.write_bytes(content)
    words = r"crafted.gguf \(\d+[\d,]* bytes\) cannot be read as weights, .* something else: (its |')"
    with pytest.raises(InputError, match=words) as raised:
        find_checkpoint(file, None)
    assert "\n" not in str(raised.value)


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        intermediate_size=96, vocab_size=len(_words()), max_position_embeddings=64, head_dim=HEAD_SIZE,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaModel(config).eval()


def _words() -> list[str]:
    """A byte-level vocabulary: the bytes, one word made by merging, and the marks."""
    from massieu.probing.data.text import _byte_of_character

    return ["<s>", "</s>", *_byte_of_character(), "Ġt", "he", "Ġthe"]


def _tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The weights under GGUF's names, rows of queries and keys in its order: neighbours rotate together."""
    named = {"embed_tokens": "token_embd", "norm": "output_norm"}
    named |= {f"layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(LAYERS) for ours, theirs in PARTS.items()}
    found = {}
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = value.reshape(-1, 2, HEAD_SIZE // 2, WIDTH)
            value = halves.swapaxes(1, 2).reshape(value.shape)
        found[f"{named[name.removesuffix('.weight')]}.weight"] = np.ascontiguousarray(value)
    return found


def _write(
    path: Path, tensors: dict[str, np.ndarray], settings: dict[str, object] | None = None, quantised: str = ""
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_vocab_size(len(_words()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(_words())
    writer.add_token_types([3, 3] + [1] * (len(_words()) - 2))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in (settings or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.{name}", value)
    for name, tensor in tensors.items():
        if quantised and quantised in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.medium
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_file_is_read_as_the_model_that_it_was_made_of(tmp_path, by_folder):
    model = _llama()
    file = _write(tmp_path / "small.gguf", _tensors(model))
    loaded = load_model(tmp_path if by_folder else file)
    assert loaded.weights == "GGUF (F32)"
    assert (loaded.missing, loaded.unexpected, loaded.doubts) == ((), (), ())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name
    ids = torch.arange(2, 34).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded.module(ids).last_hidden_state, model(ids).last_hidden_state)
    assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer(" the cat")["input_ids"]) == [
        "Ġthe",
        "Ġ",
        "c",
        "a",
        "t",
    ]


@pytest.mark.medium
def test_quantised_numbers_are_said_to_be(tmp_path):
    model = _llama()
    loaded = load_model(_write(tmp_path / "small.gguf", _tensors(model), quantised="ffn_gate"))
    assert loaded.weights == "GGUF (F32, Q8_0), dequantised to float32"
    found, true = (each.state_dict()["layers.0.mlp.gate_proj.weight"] for each in (loaded.module, model))
    blocks = true.reshape(-1, 32)  # Q8_0: a scale in half precision for 32 numbers of 8 bits
    scale = blocks.abs().amax(1, keepdim=True) / 127
    half = scale.half().float()
    steps = torch.round(blocks / scale)
    bound = scale + steps.abs() * 2.0**-11 * half  # ties may be rounded to either side
    assert ((found.reshape(-1, 32) - steps * half).abs() <= bound).all()
    assert (found != true).any()


@pytest.mark.medium
def test_what_transformers_would_leave_out_is_refused_or_warned_of(tmp_path):
    tensors = _tensors(_llama())
    scaled = {**tensors, "rope_freqs.weight": np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)}
    with pytest.raises(InputError, match=r"scaled rotary frequencies \(rope_freqs.weight\)"):
        load_model(_write(tmp_path / "scaled.gguf", scaled))
    with pytest.raises(InputError, match=r"scaled rotary frequencies \(rope.scaling.type = linear\)"):
        load_model(
            _write(tmp_path / "linear.gguf", tensors, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
        )
    unread = massieu.describe(_write(tmp_path / "unread.gguf", tensors, {"attention.odd": 2.0}))
    assert "transformers does not read: attention.odd" in unread.warnings[0]
    biased = {
        **tensors,
        "blk.0.attn_q.bias": np.ones(WIDTH, dtype=np.float32),
        "output.weight": tensors["token_embd.weight"],
    }
    found = massieu.describe(_write(tmp_path / "biased.gguf", biased))
    assert len(found.warnings) == 1
    # The model has its rotary frequencies as well, which the file has not; they are counted with the model's numbers.
    assert "numbers beside its head that the model does not use" in found.warnings[0]


@pytest.mark.medium
def test_weights_missing_from_a_file_are_refused(tmp_path):
    tensors = {name: tensor for name, tensor in _tensors(_llama()).items() if "blk.1.attn_v" not in name}
    with pytest.raises(InputError, match=r"1 weight is missing from its files \(layers.1.self_attn.v_proj.weight\)"):
        massieu.describe(_write(tmp_path / "hole.gguf", tensors))


@pytest.mark.medium
def test_files_that_are_none_and_folders_of_several(tmp_path):
    file = _write(tmp_path / "whole.gguf", _tensors(_llama()))
    other = tmp_path / "other.gguf"
    for size in (0, 4, 100, file.stat().st_size // 2):
        other.write_bytes(file.read_bytes()[:size])
        with pytest.raises(InputError, match=r"other.gguf .* cannot be read as weights"):
            load_model(other)
    with pytest.raises(InputError, match=r"2 GGUF files \(other.gguf, whole.gguf\); name one"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="holds no weights"):
        load_model(_write(tmp_path / "vocabulary.gguf", {}))


# --- a real decoder --------------------------------------------------------------------------------------------------

TOKENS = 128


def _numbers(tensor: gguf.ReaderTensor) -> np.ndarray:
    """A tensor's numbers in float64, by the definitions of the formats: F32, Q8_0 and Q4_1."""
    rows = int(tensor.shape[1]) if len(tensor.shape) > 1 else 1
    data = np.ascontiguousarray(tensor.data)
    kind = tensor.tensor_type.name
    if kind == "F32":
        return data.astype(np.float64).reshape(rows, -1)
    size = {"Q8_0": 34, "Q4_1": 20}[kind]
    blocks = data.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    if kind == "Q8_0":
        values = scale * blocks[:, 2:].copy().view(np.int8)
    else:
        least = blocks[:, 2:4].copy().view(np.float16).astype(np.float64)
        values = scale * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + least
    return values.reshape(rows, -1)


def _rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions as GGUF stores for: the numbers 2i and 2i + 1 of a head are a plane."""
    length, size = x.shape[-2:]
    angles = np.arange(length)[:, None] * base ** (-np.arange(0, size, 2) / size)
    plane = x[..., 0::2] + 1j * x[..., 1::2]
    turned = plane * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _first_layer(file: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-weights of keys and log Z of the first layer's heads, (H, L, L) and (H, L), from the bytes of the file."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    field = {key: value.contents() for key, value in reader.fields.items() if key.startswith("llama.")}
    heads, key_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    x = _numbers(tensors["token_embd.weight"])[ids]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + field["llama.attention.layer_norm_rms_epsilon"])
    x = x * _numbers(tensors["blk.0.attn_norm.weight"])
    query, key = (x @ _numbers(tensors[f"blk.0.attn_{part}.weight"]).T for part in "qk")
    query = _rotated(query.reshape(len(ids), heads, -1).swapaxes(0, 1), field["llama.rope.freq_base"])
    key = _rotated(key.reshape(len(ids), key_heads, -1).swapaxes(0, 1), field["llama.rope.freq_base"])
    scores = query @ key.repeat(heads // key_heads, 0).swapaxes(1, 2) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
    log_z = np.logaddexp.reduce(scores, axis=-1)
    return scores - log_z[..., None], log_z


@pytest.mark.slow
@pytest.mark.needs("decoder")
def test_a_real_decoder(monkeypatch):
    """SmolLM2-135M-Instruct: 30 layers of 9 heads; the first by its bytes in float64, all by the model's eager weights.

    One reading for all that is asked of it, since it takes seconds to be loaded: it also has heads that look tokens up.
    """
    file = needs.decoder()
    assert file is not None
    # The file has 50,000 words, which are read for the tokenizer, the configuration and the weights: here once for all.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    monkeypatch.setattr(repeated, "SEQUENCES", 4)
    kept = []
    monkeypatch.setattr(
        "massieu.probing.model.model.load_model", lambda *a, **k: kept.append(load_model(*a, **k)) or kept[0]
    )
    statistics = ["weight_first", "entropy", "log_partition", "repeated"]
    text = massieu.Text(window=TOKENS, limit=4 * TOKENS)
    result = massieu.probe(file, text, statistics=statistics, draws=2)
    run = result.run
    assert (run.model.layers, run.model.heads) == (30, 270)
    assert run.model.weights == "GGUF (Q4_1, F32, Q8_0), dequantised to float32"
    assert run.model.missing_weights == "none"
    assert run.model.unexpected_weights == "none"
    assert run.self_check.passed
    assert run.self_check.error < 1e-4
    assert run.text.unknown_share == 0
    assert not run.warnings

    loaded = kept[0]
    rows = [
        batch.inputs["input_ids"]
        for batch in TextBatches(loaded.tokenizer, reference_documents, window=TOKENS, limit=4 * TOKENS)
    ]
    ids = torch.cat(rows)
    assert run.text.windows == len(ids)

    def measured(statistic: str) -> np.ndarray:
        found = result.heads.filter(polars.col("statistic") == statistic).sort("site", "head")
        layers = found["layer"].to_numpy()
        values = found["value"].to_numpy()
        return np.stack([values[layers == layer] for layer in range(30)])

    logs, log_z = (np.stack(part) for part in zip(*(_first_layer(file, row.numpy()) for row in ids), strict=True))
    weights = np.exp(logs)
    entropy = -(weights * np.where(weights > 0, logs, 0)).sum(-1)
    assert np.allclose(measured("entropy")[0], entropy.mean((0, 2)), rtol=1e-4)
    assert np.allclose(measured("log_partition")[0], log_z.mean((0, 2)), rtol=1e-4)
    assert np.allclose(measured("weight_first")[0], weights[..., 0].mean((0, 2)), rtol=1e-3)

    assert measured("induction_weight").max() > 0.3
    assert measured("induction_weight/reinitialised").max() < 0.1

    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        shown = loaded.module(ids, output_attentions=True, use_cache=False).attentions
    first = np.stack([layer[..., 0].double().mean((0, 2)).numpy() for layer in shown])
    # Two ways to the same attention in float32: differences of rounding grow over 30 layers and are multiplied by scores.
    assert np.allclose(measured("weight_first"), first, rtol=5e-3, atol=1e-5)
    mostly = (measured("weight_first") > 0.5).sum()
    assert 0 < (first > 0.501).sum() <= mostly <= (first > 0.499).sum() < 270
    # Four windows of 128 tokens are too few to tell the strongest of 270 heads from random ones.
    assert result.findings[0].sentence.startswith(
        "Nothing to announce. Of 270 heads, the most extreme is the weight of"
    )
