"""Tokens that are not text: the frames of audio, which of them are real, and names of frames and of patches of images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

AUDIO = frozenset({"input_values", "input_features"})
"""Inputs that hold audio: its samples, or features of them."""
NOT_TEXT = AUDIO | {"pixel_values"}
"""Inputs whose tokens are not text, and may have names all the same."""
SAMPLING_RATE = 16_000
"""Samples in a second of these families' training data; their feature extractors state it, not the models."""
_HOP = 160
"""Samples between two columns of Whisper's features."""


def token_names(module: nn.Module, inputs: Mapping[str, Any], row: int) -> dict[str, list[str]]:
    """Names of the tokens of one row, for each side whose tokens are not text; empty if nothing is known of them.

    A frame of audio is named by the time at which it begins, such as ``0.24 s``. Padding has no name. The patches of an image
    (side "image") are named by their place, such as ``row 3, column 5``; tokens before them have names in brackets.

    Args:
        row: of the batch.
    """
    frames = frames_of(module, inputs)
    if frames is None:
        patches = _patches(module, inputs)
        return {} if patches is None else {"image": patches}
    decimals = max(2, -math.floor(math.log10(frames.seconds)))
    number_of_frames = int(frames.real[row].sum())
    return {"text": [f"{number * frames.seconds:.{decimals}f} s" for number in range(number_of_frames)]}


_BEFORE_PATCHES: dict[str, tuple[str, ...]] = {
    "vit": ("[CLS]",),
    "vit_msn": ("[CLS]",),
    "deit": ("[CLS]", "[distillation]"),
    "dinov2": ("[CLS]",),
    "dinov2_with_registers": ("[CLS]",),
    "beit": ("[CLS]",),
    "clip_vision_model": ("[CLS]",),
    "siglip": (),
    "siglip_vision_model": (),
}
"""Tokens before the patches, for the families whose order of tokens is known; patches of others have no names."""


def _patches(module: nn.Module, inputs: Mapping[str, Any]) -> list[str] | None:
    """Names of the tokens of an image; None where their order is not known."""
    config: Any = getattr(module, "config", None)
    config = getattr(config, "vision_config", config)
    kind = getattr(config, "model_type", None)
    pixels = inputs.get("pixel_values")
    size = getattr(config, "patch_size", None)
    if kind not in _BEFORE_PATCHES or not isinstance(pixels, Tensor) or pixels.dim() != 4 or not isinstance(size, int):
        return None
    registers = getattr(config, "num_register_tokens", 0) if kind == "dinov2_with_registers" else 0
    rows, columns = (number // size for number in pixels.shape[-2:])
    patches = [f"row {row}, column {column}" for row in range(1, rows + 1) for column in range(1, columns + 1)]
    return [*_BEFORE_PATCHES[kind], *(f"[register {number}]" for number in range(1, registers + 1)), *patches]


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames into which a model divides a batch of audio.

    Attributes:
        seconds: from the beginning of one frame to that of the next.
        real: frames that are not padding.
    """

    seconds: float
    real: Bool[Tensor, "B F"]


def frames_of(module: nn.Module, inputs: Mapping[str, Any]) -> Frames | None:
    """The frames of a batch, for models whose configuration says how they form them; None for all others.

    Wav2vec 2.0 and related models read samples through convolutions; their ``attention_mask`` is over samples. Whisper reads
    features at every second column, and has no padding: its encoder attends to all of its window, including silence.
    """
    config: Any = getattr(module, "config", None)
    samples = inputs.get("input_values")
    features = inputs.get("input_features")
    strides = getattr(config, "conv_stride", None)
    kernels = getattr(config, "conv_kernel", None)
    if isinstance(samples, Tensor) and samples.dim() == 2 and strides and kernels and not _is_squeezed(config):
        convolutions = list(zip(kernels, strides, strict=True))
        mask = inputs.get("attention_mask")
        lengths = torch.full(samples.shape[:1], samples.shape[1], device=samples.device)
        all_frames = _frames_after(lengths, convolutions)
        if isinstance(mask, Tensor) and mask.shape == samples.shape:
            lengths = mask.long().sum(1)
        numbers = torch.arange(int(all_frames[0]), device=samples.device)
        return Frames(math.prod(strides) / SAMPLING_RATE, numbers < _frames_after(lengths, convolutions)[:, None])
    if getattr(config, "model_type", None) == "whisper" and isinstance(features, Tensor) and features.dim() == 3:
        shape = (features.shape[0], (features.shape[2] + 1) // 2)
        return Frames(2 * _HOP / SAMPLING_RATE, torch.ones(shape, dtype=torch.bool, device=features.device))
    return None


def _is_squeezed(config: Any) -> bool:
    """Whether a model attends to fewer frames than its convolutions produce, as SEW does."""
    return getattr(config, "squeeze_factor", 1) != 1


def _frames_after(lengths: Int[Tensor, " B"], convolutions: list[tuple[int, int]]) -> Int[Tensor, " B"]:
    """Number of frames after convolutions of these kernels and strides, without padding.

    Args:
        lengths: in samples.
    """
    for kernel, stride in convolutions:
        lengths = (lengths - kernel) // stride + 1
    return lengths.clamp(min=0)
