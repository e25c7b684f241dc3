"""Made-up inputs for a small model of transformers, by what its forward is called with; the first that it takes are used."""

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from scripts.small_models import IMAGE, LENGTH, POSITIONS, VARIANTS, VOCABULARY, WIDTH, Unbuilt, built, configurations
from torch import Tensor, nn

_ROWS = 2
_PADDED = 3  # tokens of the second row that are padding
_MELS = 16
_AS_IT_IS: Mapping[str, Any] = {}


def _field(model: nn.Module, default: Any, *names: str) -> Any:
    """The first of these fields in the model's configuration, or in one nested in it."""
    for config in configurations(model.config):
        for name in names:
            value = getattr(config, name, None)
            if isinstance(default, int) and isinstance(value, list | tuple) and value:
                value = value[0]
            if value is not None:
                return value
    return default


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def tokens(model: nn.Module, length: int = LENGTH) -> Tensor:
    """Token numbers that mean nothing to the model, such as the place of an image."""
    special = {v for c in configurations(model.config) for k, v in vars(c).items() if k.endswith(("token_id", "_index"))
               if isinstance(v, int)}  # fmt: skip
    vocabulary = min(_field(model, VOCABULARY, "vocab_size"), VOCABULARY)
    plain = torch.tensor([n for n in range(3, vocabulary) if n not in special] or [0])
    chosen = torch.randint(0, len(plain), (_ROWS, length), generator=torch.Generator().manual_seed(1))
    return plain[chosen]


def mask(length: int = LENGTH, padded: bool = True) -> Tensor:
    """Which tokens are real: in the second row the last few are not."""
    real = torch.ones(_ROWS, length, dtype=torch.long)
    if padded:
        real[1, -_PADDED:] = 0
    return real


def _size(model: nn.Module) -> tuple[int, int]:
    size = _field(model, None, "image_size", "input_size") or IMAGE
    if isinstance(size, dict):
        size = [size.get("height", IMAGE), size.get("width", IMAGE)]
    if isinstance(size, list | tuple):
        flat = [n for n in size if isinstance(n, int)][-2:]
        return (flat[0], flat[-1]) if flat else (IMAGE, IMAGE)
    return size, size


def _patches(model: nn.Module) -> dict[str, Tensor]:
    """Patches in a row as Qwen's towers take them: one image of four by four patches."""
    channels = _field(model, 3, "in_channels", "in_chans", "num_channels")
    patch, time = _field(model, 4, "patch_size"), _field(model, 1, "temporal_patch_size")
    flat = _random(16, channels * time * patch * patch)
    return {"flat": flat, "grid": torch.tensor([[1, 4, 4]])}


def _choices(model: nn.Module) -> dict[str, list[Any]]:
    """For each argument that is known, what may be given for it, best first."""
    channels, patch = _field(model, 3, "num_channels", "in_channels", "in_chans"), _field(model, 4, "patch_size")
    height, width = _size(model)
    mels = _field(model, _MELS, "num_mel_bins", "feature_size", "input_feat_per_channel", "mel_bins", "n_mels")
    long = 2 * _field(model, POSITIONS, "max_source_positions")
    frames = _field(model, 2, "num_frames", "frames_per_clip")
    patches = _patches(model)
    ids = tokens(model)
    images = [_random(_ROWS, channels, height, width), _random(_ROWS, channels, 64, 64), _random(1, channels, 224, 224)]
    videos = [_random(_ROWS, frames, channels, height, width), _random(_ROWS, 4, channels, height, width)]
    flat = _random(_ROWS, 16, channels * patch * patch)
    audio = [_random(_ROWS, mels, long), _random(_ROWS, 64, mels), _random(_ROWS, mels, 64), _random(_ROWS, 64, 80),
             _random(_ROWS, 80, 64), _random(_ROWS, 64, 160), _random(_ROWS, 64, 128), _random(_ROWS, 128, 64)]  # fmt: skip
    waves = [_random(_ROWS, 4000), _random(_ROWS, 1, 4000), _random(_ROWS, _field(model, 64, "max_length"), mels)]
    lags = _field(model, [0], "lags_sequence")
    past = (_field(model, None, "context_length", "prediction_length") or 16) + max(
        lags if isinstance(lags, list) else [0]
    )
    return {
        "input_ids": [ids],
        "decoder_input_ids": [tokens(model, LENGTH - 2)],
        "attention_mask": [mask()],
        "pixel_values": [*images, *videos, patches["flat"], flat],
        "hidden_states": [patches["flat"], _random(_ROWS, LENGTH, WIDTH)],
        "grid_thw": [patches["grid"]],
        "image_grid_thw": [patches["grid"]],
        "merge_sizes": [torch.tensor([2])],
        "pixel_values_videos": [_random(_ROWS, 4, 3, height, width), *videos],
        "input_features": audio,
        "audio_mel": audio,
        "audio_mel_mask": [torch.zeros(_ROWS, 64, dtype=torch.bool)],
        "input_values": waves,
        "input_features_mask": [torch.ones(_ROWS, 64, dtype=torch.long)],
        "qformer_input_ids": [ids],
        "query_embeds": [_random(_ROWS, 8, WIDTH)],
        "inputs_embeds": [_random(_ROWS, LENGTH, WIDTH)],
        "bbox": [torch.tensor([1, 2, 8, 9]).expand(_ROWS, LENGTH, 4).contiguous()],
        "inputs": [_random(_ROWS, LENGTH, WIDTH), ids],
        "visual_feats": [_random(_ROWS, 5, _field(model, WIDTH, "visual_feat_dim"))],
        "visual_pos": [torch.rand(_ROWS, 5, 4)],
        "states": [_random(_ROWS, LENGTH, _field(model, 17, "state_dim"))],
        "actions": [_random(_ROWS, LENGTH, _field(model, 4, "act_dim"))],
        "returns_to_go": [_random(_ROWS, LENGTH, 1)],
        "timesteps": [torch.arange(LENGTH).expand(_ROWS, -1)],
        "past_values": [_random(_ROWS, past), _random(_ROWS, past, _field(model, 1, "num_input_channels"))],
        "past_observed_mask": [torch.ones(_ROWS, past)],
        "past_time_features": [_random(_ROWS, past, _field(model, 0, "num_time_features"))],
        "past_values_padding": [torch.zeros(_ROWS, past)],
        "freq": [torch.zeros(_ROWS, 1, dtype=torch.long)],
        "latents": [_random(_ROWS, LENGTH, WIDTH), _random(_ROWS, WIDTH, LENGTH)],
        "prompt_pixel_values": [images[0]],
        "prompt_masks": [images[0]],
        "pixel_attention_mask": [torch.ones(_ROWS, 16, dtype=torch.long)],
        "spatial_shapes": [torch.full((_ROWS, 2), 4)],
        "entity_ids": [ids[:, :3]],
        "task_inputs": [ids],
        "noise_embeds": [_random(_ROWS, 4, WIDTH)],
        "context_hidden_states": [_random(_ROWS, LENGTH, WIDTH)],
    }


# Arguments that are given beside those without a default, where the forward has them.
_BESIDE = {
    "bbox",
    "decoder_input_ids",
    "visual_feats",
    "visual_pos",
    "actions",
    "returns_to_go",
    "timesteps",
    "past_observed_mask",
}


def _wanted(model: nn.Module) -> list[list[str]]:
    """Sets of arguments to try, best first."""
    parameters = inspect.signature(model.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = model.main_input_name
    mains = [main] if isinstance(main, str) else list(main)
    beside = [name for name in parameters if name in _BESIDE]
    first = list(dict.fromkeys([*needed, *(m for m in mains if m in parameters), *beside]))
    tries = [first, needed] if needed else [first]
    both = [name for name in ("input_ids", "pixel_values", "input_features", "input_values") if name in parameters]
    tries += [list(dict.fromkeys([*first, *both])), *([*needed, name] for name in both), [*needed, "inputs_embeds"]]
    return [names for names in tries if names and all(name in parameters for name in names)]


def inputs_for(model: nn.Module) -> dict[str, Tensor]:
    """Inputs that the model's forward takes, with some padding where it has a mask for it.

    Raises:
        Unbuilt: it takes none of those that are tried, with what it said to the first.
    """
    choices, said = _choices(model), ""
    parameters = inspect.signature(model.forward).parameters
    for names in _wanted(model):
        unknown = [name for name in names if name not in choices]
        if unknown:
            said = said or f"no inputs are made for {', '.join(unknown)}"
            continue
        for values in itertools.islice(itertools.product(*(choices[name] for name in names)), 16):
            given = dict(zip(names, values, strict=True))
            masked = "attention_mask" in parameters and "attention_mask" not in given and "input_ids" in given
            for extra in ([{"attention_mask": mask()}, {"attention_mask": mask(padded=False)}] if masked else []) + [
                {}
            ]:
                try:
                    with torch.no_grad():
                        model(**given, **extra)
                except Exception as error:
                    said = said or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                else:
                    return given | extra
    raise Unbuilt(f"its forward takes none of the inputs that are made: {said}")


def small_model(model_type: str, fields: Mapping[str, Any] = _AS_IT_IS) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of an architecture and inputs that its forward takes; fields are set in all its configurations.

    Raises:
        Unbuilt: none of the variants is built and runs, with what the first said.
    """
    said: Unbuilt | None = None
    for variant in VARIANTS:
        try:
            model = built(model_type, variant | fields)
            return model, inputs_for(model)
        except Unbuilt as error:
            said = said or error
    assert said is not None
    raise said
