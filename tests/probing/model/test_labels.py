"""A training batch of an encoder–decoder: its decoder reads the labels behind a start token, not the source text."""

from typing import Any

import pytest
import torch
import transformers as hf
from tests.support.rows import every_row
from torch import Tensor

import massieu
from massieu import Monitor
from massieu.errors import InputError
from massieu.probing.model.model_inputs import model_inputs

PAD, START, LENGTH = 0, 2, 9
IGNORED = -100
_BART: dict[str, Any] = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": START,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 2,
    "decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": 2,
}  # fmt: skip
_WHISPER = {"num_mel_bins": 4, "max_source_positions": 8, "begin_suppress_tokens": None}
MODELS: dict[str, Any] = {
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**_BART)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**_BART)),
    "m2m_100": lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**_BART)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**_BART, **_WHISPER)),
}
"""M2M-100 and Whisper shift labels inside their own forward alone: no method of theirs shows it."""


def model(name: str) -> Any:
    torch.manual_seed(3)
    made = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    return made


def batch(name: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Two pairs; source and labels are padded, the labels with −100."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, 31, (2, length), generator=generator)
    labels[1, 5:] = IGNORED
    if name == "whisper":
        return {"input_features": torch.randn(2, 4, 16, generator=generator), "labels": labels}
    ids = torch.randint(3, 31, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


@torch.no_grad()
def expected(made: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Each decoder layer's self-entropies (H,) in float64, of the attention that the model's own forward forms of labels."""
    made.set_attn_implementation("eager")
    attentions = made(**inputs, output_attentions=True).decoder_attentions
    made.set_attn_implementation("sdpa")
    real = inputs["labels"] != IGNORED
    real[:, 0] = False  # the first token sees itself alone
    entropies = [torch.special.entr(weights.double()).sum(-1) for weights in attentions]
    return [each.transpose(1, 2)[real].mean(0) for each in entropies]


def check(record: dict[str, float], layers: list[Tensor]) -> None:
    for layer, heads in enumerate(layers):
        for head, value in enumerate(heads):
            names = [n for n in record if n.endswith(f"decoder/layer{layer}/causal/head{head}/entropy")]
            assert len(names) == 1
            assert record[names[0]] == pytest.approx(float(value), rel=1e-5, abs=1e-6)


@pytest.mark.slow
@every_row(("name", "length"), [("bart", LENGTH), *((name, 6) for name in MODELS)])
def test_the_decoder_reads_what_the_models_own_forward_makes_of_labels(name, length):
    """Labels of the source's length, and of another."""
    made, inputs = model(name), batch(name, length)
    layers = expected(made, inputs)
    assert len(layers) == 2
    monitor = Monitor(made, inputs, per_head=True, every=1)
    record = monitor(0)
    assert record is not None
    check(record, layers)
    with torch.no_grad(), monitor.watch(1) as seen:
        made(**inputs)
    assert seen.record is not None
    check(seen.record, layers)


@pytest.mark.medium
def test_padding_of_labels_is_padding_of_the_tokens_that_a_collator_made_of_them():
    made = model("bart")
    inputs = batch("bart")
    given = inputs | {"decoder_input_ids": made.prepare_decoder_input_ids_from_labels(inputs["labels"])}
    record = Monitor(made, given, per_head=True)(0)
    assert record is not None
    check(record, expected(made, inputs))


@pytest.mark.slow
@every_row("name", ["bart", "whisper"])
def test_the_probe_reads_labels_too(name):
    """It reads the model without its head, which takes no labels: they are shifted by the rule of the head."""
    made, inputs = model(name), batch(name, 6)
    labels = inputs["labels"]
    start = made.config.decoder_start_token_id
    shifted = torch.cat([torch.full((2, 1), start), labels[:, :-1]], 1)
    by_hand = {key: value for key, value in inputs.items() if key != "labels"} | {
        "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, PAD),
        "decoder_attention_mask": (labels != IGNORED).long(),
    }
    asked: dict[str, Any] = {"statistics": ["entropy", "weight_diagonal", "pairwise_distance"]}
    wanted = massieu.probe(made, [by_hand], **asked)
    for given in (inputs, by_hand | {"labels": labels}):
        found = massieu.probe(made, [given], **asked)
        assert found.heads.equals(wanted.heads)
        assert found.layers.equals(wanted.layers)
        assert found.run.text == wanted.run.text
        assert found.run.warnings == wanted.run.warnings


def test_labels_that_are_classes_are_not_read():
    torch.manual_seed(0)
    made: Any = hf.BartForSequenceClassification(hf.BartConfig(**_BART)).eval()
    inputs = batch("bart")
    inputs["input_ids"][:, 6] = made.config.eos_token_id
    inputs |= {"labels": torch.tensor([[0], [1]])}
    ready = model_inputs(made, inputs)
    assert torch.equal(ready["decoder_input_ids"][:, 1:], inputs["input_ids"][:, :-1])
    assert torch.equal(ready["decoder_attention_mask"], inputs["attention_mask"])


def test_a_start_token_that_is_not_known_is_told():
    made = model("m2m_100")
    made.config.decoder_start_token_id = None
    with pytest.raises(InputError, match="names no decoder_start_token_id"):
        model_inputs(made, batch("m2m_100"))
    made.config.decoder_start_token_id, made.config.pad_token_id = 2, None
    with pytest.raises(InputError, match="names no pad_token_id"):
        model_inputs(made, batch("m2m_100"))
