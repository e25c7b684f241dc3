"""Small models with random weights, one of each wiring that matters, and inputs for them."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_COMMON: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GPT2 = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 99,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA2 = {
    **_GROUPED, "head_dim": 12, "attn_logit_softcapping": 2.0, "sliding_window": 8, "query_pre_attn_scalar": 12,
}  # fmt: skip
_GPT_OSS = {
    **_GROUPED, "head_dim": 12, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_T5 = {
    "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4, "vocab_size": 99,
    "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip


def _create(architecture: str, settings: dict[str, Any], **changes: Any) -> nn.Module:
    """A model of transformers with random weights. It is imported here: collecting tests needs none of it."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**settings | changes)
    return getattr(transformers, f"{architecture}Model")(config)


_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _COMMON),
    "gpt2": ("GPT2", _GPT2),
    "llama": ("Llama", _GROUPED),
    "modernbert": ("ModernBert", {**_COMMON, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "gemma2": ("Gemma2", _GEMMA2),
    "gpt_oss": ("GptOss", _GPT_OSS),
    "t5": ("T5", _T5),
    "bart": ("Bart", _BART),
    "vit": ("ViT", _VIT),
    "albert": ("Albert", {**_COMMON, "embedding_size": 24}),
    "gpt_neox": ("GPTNeoX", _COMMON),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 12}),
    "olmo2": ("Olmo2", _GROUPED),
    "cohere": ("Cohere", _GROUPED),
    "swin": ("Swin", _SWIN),
}

MAKERS: dict[str, Callable[..., nn.Module]] = {
    name: functools.partial(_create, *settings) for name, settings in _SETTINGS.items()
}
"""Each creates a model; keywords replace settings of its configuration."""


def _t5_dispatches() -> bool:
    """Whether the installed release of transformers dispatches T5's attention, by its source: importing takes seconds."""
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "models" / "t5" / "modeling_t5.py"
    return "def eager_attention_forward(" in source.read_text(encoding="utf-8")


# T5 dispatches its attention in newer releases only; massieu says so on the older ones (see test_probe.py).
T5_DISPATCHES = _t5_dispatches()
if not T5_DISPATCHES:
    del MAKERS["t5"]

REQUIRED = tuple(
    name for name in ("bert", "gpt2", "llama", "modernbert", "gemma2", "gpt_oss", "t5", "bart", "vit") if name in MAKERS
)
_IMAGES = ("vit", "swin")


@functools.cache
def model(name: str, **changes: Any) -> nn.Module:
    """A model in evaluation mode whose attention is far from uniform; do not change it."""
    return fresh(name, **changes)


def fresh(name: str, sharpness: float = 4.0, **changes: Any) -> nn.Module:
    """A new copy, with weight matrices scaled up so that attention is far from uniform; `changes` of its settings."""
    torch.manual_seed(0)
    made = MAKERS[name](**changes).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(sharpness)
    return made


def inputs(name: str, *, padded: bool = False, rows: int = 3, length: int = 20, seed: int = 1) -> dict[str, Tensor]:
    """One batch; with ``padded`` the last two rows are shorter."""
    generator = torch.Generator().manual_seed(seed)
    if name in _IMAGES:
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, 99, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 14:] = 0
        mask[2, 9:] = 0
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if name in ("t5", "bart"):
        batch |= {"decoder_input_ids": ids.roll(1, 1), "decoder_attention_mask": mask}
    return batch


def real(batch: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Which tokens are no padding; all of them where there is no mask of that shape."""
    mask = batch.get("attention_mask")
    fits = mask is not None and tuple(mask.shape) == shape
    return mask.bool() if mask is not None and fits else torch.ones(shape, dtype=torch.bool)
