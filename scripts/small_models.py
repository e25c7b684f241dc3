"""Small models of transformers' registry with random weights, and inputs for them, by rules over the fields."""

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

WIDTH, HEADS, VOCABULARY, POSITIONS, IMAGE, PATCH, LENGTH = 64, 4, 99, 64, 32, 4, 12
SHARPNESS = {"cpmant": 1.0}  # of scores that are large without it; of others 4
LARGEST = 120_000_000  # parameters; what stays larger than that after shrinking is not built

# What a field becomes, by its name: patterns of whole names, of which the first that matches counts.
_LAYERS = "encoder|decoder|hidden|text|vision|audio|qformer|e|d|generator|predictor"
_RULES: list[tuple[Any, str]] = [
    (
        WIDTH,
        r"hidden_size d_model n_embd embed_dim encoder_dim dim hidden_dim model_dim n_embed emb_dim embedding_size",
    ),
    (WIDTH, r"(encoder|decoder|text|vision|audio|backbone|patch|cross_attention|context|attention)_hidden_(size|dim)"),
    (WIDTH, r"projection_dim output_dim text_embed_dim word_embed_proj_dim d_embed d_latents out_hidden_size"),
    (
        WIDTH,
        r"(encoder|decoder|text|vision|audio|projector|multimodal_projector|qformer)_(embed_dim|dim|width|output_dim)",
    ),
    (
        2 * WIDTH,
        r"d_ff n_inner d_inner inner_dim (.*_)?ffn_dim (.*_)?intermediate_size ffn_hidden_size mlp_dim mamba_d_ssm",
    ),
    (8, r"rotary_dim mamba_(n|num)_heads ssm_num_heads (mamba|ssm)_(d_state|state_size) ssm_state_size state_size"),
    (0.5, r"rotary_pct"),
    (16, r"mamba_(d_head|head_dim) ssm_head_dim linear_(key|value)_head_dim index_head_dim (.*_)?lora_rank"),
    (1, r"mamba_n_groups n_groups n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace"),
    (1, r"moe_num_shared_experts decoder_sparse_step num_expert_groups?"),
    (WIDTH // HEADS, r"d_kv (.*_)?head_dim"),
    (HEADS, r"linear_num_(key|value)_heads"),
    (2, r"(.*_)?num_key_value_heads (.*_)?num_kv_heads n_head_kv index_n_heads"),
    (HEADS, r"n_heads? num_heads .*_attention_heads .*_num_heads num_.*_heads"),
    (2, rf"num_({_LAYERS})?_?layers n_layers? depth ({_LAYERS})_(num_)?(hidden_)?layers num_blocks .*_depth"),
    (2, r"num_(?!.*only).*_layers n_layer_.*"),
    (64, r"(.*_)?codebook_size"),
    (VOCABULARY, r"(.*_)?vocab(ulary)?_size vocab_size_.*"),
    (
        POSITIONS,
        r"(.*_)?max_position_embeddings n_positions max_seq_len n_ctx max_.*positions max_2d_position_embeddings",
    ),
    (POSITIONS, r"max_seq_length max_sequence_length max_source_positions max_target_positions"),
    (2, r"num_experts_per_tok(en)? .*top_k_experts moe_topk moe_top_k num_selected_experts moe_k num_frames"),
    (4, r"(num|n)_(local|routed|zero)?_?experts moe_num_experts"),
    (4, r"sliding_window local_attention window .*chunk_size index_topk block_size local_radius .*attention_window.*"),
    (4, r"window_size"),
    (IMAGE, r"image_size input_size image_resolution crop_size"),
    (PATCH, r"patch_size vision_patch_size"),
    (16, r"num_mel.* n_mels mel_bins num_conv_pos_embeddings"),
    (8, r"num_queries num_query_tokens num_latents n_latents num_.*queries"),
    (4, r"num_conv_pos_embedding_groups"),
    ([[["global", "local"], 1]], r"attention_types"),
]
_PATTERNS = [(re.compile("|".join(names.split())), small) for small, names in _RULES]
_WHERE_NONE = {"num_experts_per_tok": 2, "head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Architectures that the rules get wrong, and what they need.
_SERIES = {"prediction_length": 4, "num_time_features": 1}  # time series: without a length to predict there is none
_SWIN = {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 32, "window_size": 4, "patch_size": 2, "image_size": 32}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "align_vision_model": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "hiera": {
        "image_size": [64, 64],
        "patch_size": [7, 7],
        "embed_dim": 16,
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 8],
    },
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [4, 16], "attention_head_size": 16},
    "esmc": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "glm5_next_text": {"num_key_value_heads": HEADS},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "granite_speech5_encoder": {"context_size": 16},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "moonshine": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "gemma3n_text": {
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _SWIN),
}


# What is tried, in all nested configurations, until a model is built and runs.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}  # in the place of a backbone of another library
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": HEADS},
    {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}, "num_key_value_heads": HEADS},
    {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
    {"image_size": 64},
    {"sliding_window": None, "num_key_value_heads": HEADS},
    {"head_dim": None},
    {"rope_parameters": None},
    {"mild": True},
    {
        "mild": True,
        "backbone_config": _RESNET,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    },
)
_MILD = re.compile(r".*(layers|vocab_size|experts|n_layer|token_id|depth|positions)|layer_types|n_positions")


def shrunk(config: Any, model_type: str, variant: dict[str, Any]) -> Any:
    """The same kind of configuration with small numbers; nested ones too."""
    return type(config)(**_small_fields(config, type(config), EXCEPTIONS.get(model_type, {}), variant))


def _small_fields(config: Any, kind: type, exceptions: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    accepted = inspect.signature(kind.__init__).parameters
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in accepted or name in variant:
            continue
        if variant.get("mild") and not _MILD.fullmatch(name) and not hasattr(value, "to_dict"):
            if name == "image_size" and isinstance(value, int) and value > 112:
                given[name] = 112
            continue
        if name in getattr(kind, "sub_configs", {}) or hasattr(value, "to_dict"):
            if value is not None:
                given[name] = shrunk(value, getattr(value, "model_type", ""), variant)
        else:
            small = _small(name, value, values.get("layer_types"))
            if small is not value:
                given[name] = small
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        given["num_key_value_heads"] = HEADS  # keys and values are made from one latent vector for every head
    given |= exceptions
    for name, value in variant.items():
        now = given.get(name, values.get(name))
        axial = isinstance(now, dict) and now.get("rope_type") not in (None, "default")
        if name in values and name in accepted and not axial:
            given[name] = now | value if isinstance(now, dict) and isinstance(value, dict) else value
    return given


def _small(name: str, value: Any, layer_kinds: Any) -> Any:
    if value is None and name in _WHERE_NONE:
        return _WHERE_NONE[name]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if name in ("layer_types", "layers_block_type"):
        distinct = list(dict.fromkeys(value))
        return (distinct * 2)[: max(2, len(distinct))]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(value)
    if name.endswith(("token_id", "token_index")) and isinstance(value, int):
        return _TOKENS.get(name, value if 0 <= value < VOCABULARY else 3 + sum(map(ord, name)) % (VOCABULARY - 4))
    if name.endswith("token_id") and isinstance(value, list):
        return _TOKENS.get(name, 2)
    for pattern, small in _PATTERNS:
        if pattern.fullmatch(name):
            kinds = len(set(layer_kinds)) if isinstance(layer_kinds, list) else 0
            return max(2, kinds) if re.fullmatch(r"num_(hidden_)?layers|n_layers?", name) else _of_kind(value, small)
    return value


def _of_kind(value: Any, small: Any) -> Any:
    """The small number in the place of a number, of each of a list, or of a list of lists."""
    if isinstance(value, list | tuple) and not isinstance(small, list):
        return type(value)(_of_kind(each, small) for each in value)
    if isinstance(value, int | float) and not isinstance(small, list) and (0 <= value < small) and small != HEADS:
        return value
    return small if not isinstance(value, dict) else value


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    small = dict(value)
    if "mrope_section" in small:
        small["mrope_section"] = [4, 2, 2]
    for name in ("short_factor", "long_factor"):
        if name in small:
            small[name] = [1.0] * (WIDTH // HEADS // 2)
    return {k: _small_rope(v) if isinstance(v, dict) else v for k, v in small.items()}


def configurations(config: Any) -> Iterator[Any]:
    """A configuration and those nested in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from configurations(value)


def _more_key_heads(config: Any) -> bool:
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return isinstance(heads, int) and isinstance(keys, int) and keys > heads


class Unbuilt(Exception):  # noqa: N818 - a finding, not an error
    """A model that the rules do not build, or that does not run, with the reason."""


class TooLong(BaseException):  # no error of a model's own may be taken for it
    """Building took longer than it may."""


def architecture(model_type: str) -> type[nn.Module]:
    """The class that AutoModel makes for a kind of configuration."""
    import transformers

    names = MODEL_MAPPING_NAMES[model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def built(model_type: str, variant: dict[str, Any]) -> nn.Module:
    """A small model with random weights and attention far from uniform, in evaluation mode.

    Raises:
        Unbuilt: with the reason.
    """
    kind = architecture(model_type)
    try:
        config = shrunk(CONFIG_MAPPING[model_type](), model_type, variant)
        if any(_more_key_heads(each) for each in configurations(config)):
            raise Unbuilt("more key heads than query heads after shrinking")
        with torch.device("meta"), contextlib.suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
            size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                raise Unbuilt(f"{size:,} parameters after shrinking, more than {LARGEST:,}")
        torch.manual_seed(0)
        model = kind(config)
    except Unbuilt:
        raise
    except Exception as error:
        raise Unbuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(SHARPNESS.get(model_type, 4.0))
        if not parameter.isfinite().all() or (parameter.dim() > 1 and not parameter.any()):
            parameter.data.normal_(std=0.05, generator=generator)
    return model.eval()
