"""Small models with random weights, one of each wiring that matters, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

_COMMON: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

T5 = hf.T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=3, num_heads=4, vocab_size=99, decoder_start_token_id=0)

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_COMMON)),
    "gpt2": lambda: hf.GPT2Model(
        hf.GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**_GROUPED)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(**_COMMON, local_attention=8, cls_token_id=1, sep_token_id=2)
    ),
    "gemma2": lambda: hf.Gemma2Model(
        hf.Gemma2Config(
            **_GROUPED, head_dim=12, attn_logit_softcapping=2.0, sliding_window=8, query_pre_attn_scalar=12
        )
    ),
    "gpt_oss": lambda: hf.GptOssModel(
        hf.GptOssConfig(
            **_GROUPED, head_dim=12, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "t5": lambda: hf.T5Model(T5),
    "bart": lambda: hf.BartModel(
        hf.BartConfig(
            d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=99, max_position_embeddings=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        )
    ),
    "vit": lambda: hf.ViTModel(
        hf.ViTConfig(
            hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=32,
            patch_size=8,
        )
    ),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**_COMMON, embedding_size=24)),
    "gpt_neox": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**_COMMON)),
    "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**_GROUPED, head_dim=12)),
    "olmo2": lambda: hf.Olmo2Model(hf.Olmo2Config(**_GROUPED)),
    "cohere": lambda: hf.CohereModel(hf.CohereConfig(**_GROUPED)),
    "swin": lambda: hf.SwinModel(
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
    ),
}  # fmt: skip

# T5 dispatches its attention in newer releases only; massieu says so on the older ones (see test_probe.py).
T5_DISPATCHES = hasattr(hf.models.t5.modeling_t5, "eager_attention_forward")
if not T5_DISPATCHES:
    del MAKERS["t5"]

REQUIRED = tuple(
    name for name in ("bert", "gpt2", "llama", "modernbert", "gemma2", "gpt_oss", "t5", "bart", "vit") if name in MAKERS
)
_IMAGES = ("vit", "swin")
_made: dict[str, nn.Module] = {}


def model(name: str) -> nn.Module:
    """A model in evaluation mode whose attention is far from uniform; do not change it."""
    if name not in _made:
        _made[name] = fresh(name)
    return _made[name]


def fresh(name: str, sharpness: float = 4.0) -> nn.Module:
    """A new copy, with weight matrices scaled up so that attention is far from uniform."""
    torch.manual_seed(0)
    made = MAKERS[name]().eval()
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
