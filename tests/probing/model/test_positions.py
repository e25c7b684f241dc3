"""How many tokens a model has positions for: as many as it runs on, and one more has none."""

from typing import Any

import pytest
import torch

from massieu.probing.model.positions import max_positions

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30,
    "max_position_embeddings": 12,
}  # fmt: skip


def create(architecture: str, padding: int) -> Any:
    """A model of transformers with one small layer."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**SIZES, pad_token_id=padding)
    return getattr(transformers, f"{architecture}Model")(config).eval()


@pytest.mark.parametrize(
    ("architecture", "padding", "expected"),
    [
        ("Bert", 0, 12),
        ("Roberta", 1, 10),
        ("Roberta", 4, 7),
        ("XLMRoberta", 1, 10),
        ("Camembert", 1, 10),
        ("MPNet", 1, 10),
        ("Data2VecText", 1, 10),
        ("RobertaPreLayerNorm", 1, 10),
    ],
)
def test_it_is_what_the_model_runs_on(architecture, padding, expected):
    model = create(architecture, padding)
    assert max_positions(model) == expected
    with torch.no_grad():
        model(torch.full((1, expected), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, expected + 1), 5))
