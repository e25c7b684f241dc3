"""Small models whose constructors make what is easily lost: tables of positions, scales, statistics, weights of two modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TEXT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_IMAGE: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_LEVIT: dict[str, Any] = {
    "image_size": 32, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "conv_dim": [16] * 3,
    "conv_stride": [2] * 3, "conv_kernel": [3] * 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_DEBERTA: dict[str, Any] = {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "layer scale": ("Dinov2", "Model", _IMAGE),
    "bias table": ("Beit", "Model", {**_IMAGE, "use_relative_position_bias": True}),
    "out_proj read by another module": ("SiglipVision", "Model", _IMAGE),
    "relative embeddings of the stack": ("DebertaV2", "Model", {**_DEBERTA, "position_buckets": 8}),
    "two tables of relative embeddings": ("Deberta", "Model", _DEBERTA),
    "batch norm": ("Levit", "Model", _LEVIT),
    "weight norm": ("Wav2Vec2", "Model", _SPEECH),
    "ALiBi": ("Bloom", "Model", {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "tied head": (
        "GPT2",
        "LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 600, "n_positions": 32, "bos_token_id": None,
         "eos_token_id": None},
    ),
    "sinusoids of NumPy": (
        "DistilBert",
        "Model",
        {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 99, "sinusoidal_pos_embds": True},
    ),
}  # fmt: skip
NAMES = tuple(_SETTINGS)


def model(name: str) -> Any:
    """The model, evaluating. It is imported here: collecting tests needs none of it."""
    import transformers

    architecture, head, settings = _SETTINGS[name]
    config = getattr(transformers, f"{architecture}Config")(**settings)
    return getattr(transformers, f"{architecture}{head}")(config).eval()


def inputs(made: nn.Module, length: int = 12) -> dict[str, Tensor]:
    """A batch of two for one of these models."""
    drawn = torch.Generator().manual_seed(0)
    shapes: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: torch.randint(1, 90, (2, length), generator=drawn),
        "pixel_values": lambda: torch.randn(2, 3, 32, 32, generator=drawn),
        "input_values": lambda: torch.randn(2, 400, generator=drawn),
    }
    name = str(made.main_input_name)
    return {name: shapes[name]()}
