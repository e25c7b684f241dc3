"""How many tokens a model has positions for: as many as it runs on, and one more has none."""

from typing import Any

import pytest
import torch
import transformers as t

from massieu.probing.model import longest

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30,
    "max_position_embeddings": 12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "found"),
    [
        (t.BertModel, t.BertConfig, 12),
        (t.RobertaModel, t.RobertaConfig, 10),
        (t.XLMRobertaModel, t.XLMRobertaConfig, 10),
        (t.CamembertModel, t.CamembertConfig, 10),
        (t.MPNetModel, t.MPNetConfig, 10),
        (t.Data2VecTextModel, t.Data2VecTextConfig, 10),
        (t.RobertaPreLayerNormModel, t.RobertaPreLayerNormConfig, 10),
    ],
)
def test_it_is_what_the_model_runs_on(model, config, found):
    made = model(config(**SIZES, pad_token_id=0 if model is t.BertModel else 1)).eval()
    assert longest(made) == found
    with torch.no_grad():
        made(torch.full((1, found), 5))
        with pytest.raises((IndexError, RuntimeError)):
            made(torch.full((1, found + 1), 5))


def test_the_padding_may_have_another_number():
    made = t.RobertaModel(t.RobertaConfig(**SIZES, pad_token_id=4)).eval()
    assert longest(made) == 7
    with torch.no_grad():
        made(torch.full((1, 7), 5))
