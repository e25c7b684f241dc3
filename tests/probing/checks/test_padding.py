"""Padding that a model is not told of is warned of once, by what is to be given; text that holds the same token is not."""

import warnings
from typing import Any

import pytest
import torch
from tests.support.rows import every_row

import massieu

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30,
    "max_position_embeddings": 24,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 24, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 30, "max_position_embeddings": 24,
}  # fmt: skip
OPT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 30,
    "max_position_embeddings": 24, "word_embed_proj_dim": 16,
}  # fmt: skip


def create(architecture: str, sizes: dict[str, Any], **special: Any) -> Any:
    """A small model of transformers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**sizes, **special)
    return getattr(transformers, f"{architecture}Model")(config).eval()


def bert() -> Any:
    return create("Bert", SIZES, pad_token_id=0, eos_token_id=3)


def gpt2(**special: Any) -> Any:
    return create("GPT2", GPT2, **special)


def bart() -> Any:
    return create("Bart", BART, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)


def llama() -> Any:
    return create("Llama", SIZES, pad_token_id=0)


def opt() -> Any:
    return create("OPT", OPT, pad_token_id=1)


def roberta() -> Any:
    return create("Roberta", SIZES, pad_token_id=1)


def said(model: Any, *batches: Any) -> list[str]:
    """What the probe warns of about padding."""
    result = massieu.probe(model, list(batches), statistics=["entropy"], draws=0)
    return [sentence for sentence in result.run.warnings if "padded" in sentence]


def said_in_training(model: Any, batch: Any) -> list[str]:
    """What a monitor warns of about padding."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        massieu.Monitor(model, batch)(0)
    return [str(each.message) for each in caught if "padded" in str(each.message)]


def ids(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(rows)}


def masked(batch: dict[str, torch.Tensor], token: int) -> dict[str, torch.Tensor]:
    return {**batch, "attention_mask": (batch["input_ids"] != token).long()}


TWO_PADS = ids([5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0])
ENDS = ids([5, 6, 7, 8, 9, 4], [5, 6, 7, 2, 2, 2])


@pytest.mark.slow
@every_row(
    "make, batch, name",
    [
        (bert, TWO_PADS, "attention_mask"),
        (bert, ids([5, 6, 7, 8, 9, 3], [5, 6, 7, 8, 3, 0]), "attention_mask"),
        (bert, ids([5, 6, 7, 8, 9, 3], [0, 0, 5, 6, 7, 3]), "attention_mask"),
        (gpt2, ENDS, "attention_mask"),  # names no padding token: padded with its end token
        (lambda: gpt2(pad_token_id=2), ENDS, "attention_mask"),
        (
            bart,
            {**ids([5, 6, 7, 2]), "decoder_input_ids": torch.tensor([[2, 5, 1, 1]])},
            "decoder_attention_mask",
        ),
    ],
)
def test_rows_that_are_padded_without_a_mask_are_warned_of(make, batch, name):
    (sentence,) = said(make(), batch, batch)
    assert f"give {name}" in sentence
    (sentence,) = said_in_training(make(), batch)
    assert f"give {name}" in sentence


@pytest.mark.slow
@every_row(
    "make, batch",
    [
        (bert, masked(TWO_PADS, 0)),
        (bert, ids([5, 6, 7, 8, 9, 3], [5, 6, 7, 8, 9, 3])),
        (bert, ids([5, 0, 7, 8, 9, 0], [5, 6, 0, 8, 9, 3])),  # a text with the token in its middle
        (bert, ids([0, 1, 2, 3, 4, 5])),
        (gpt2, ids([2, 6, 7, 2, 9, 2], [5, 6, 7, 8, 9, 2])),  # an end token at the end of a text
        (lambda: gpt2(pad_token_id=2), ids([2, 6, 7, 2, 9, 2])),
        (gpt2, masked(ENDS, 2)),
        (bart, {**ids([5, 6, 7, 2]), "decoder_input_ids": torch.tensor([[2, 2, 5, 6]])}),
    ],
)
def test_text_that_holds_the_token_is_not(make, batch):
    assert said(make(), batch) == []
    assert said_in_training(make(), batch) == []


LEFT = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 4], [1, 1, 1, 5, 6, 7]])}


@pytest.mark.medium
@every_row("make, shifted", [(gpt2, True), (bert, True), (llama, False), (opt, False), (roberta, False)])
def test_left_padding_is_warned_of_where_it_shifts_positions(make, shifted):
    model, batch = make(), masked(LEFT, 1)
    assert [("give position_ids" in sentence) for sentence in said(model, batch, batch)] == [True] * shifted
    assert [("give position_ids" in sentence) for sentence in said_in_training(model, batch)] == [True] * shifted
    positions = {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    if shifted:
        assert said(model, positions) == []
        assert said_in_training(model, positions) == []


@pytest.mark.medium
def test_half_precision_does_not_make_rotary_positions_look_shifted():
    model = create("Llama", SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 300}, pad_token_id=0).bfloat16()
    row = torch.randint(2, 30, (1, 260), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(row)
    mask[:, :100] = 0
    assert said(model, {"input_ids": row, "attention_mask": mask}) == []
