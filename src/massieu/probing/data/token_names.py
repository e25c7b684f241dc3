"""What attention is over where that is no text: frames of audio, which of them are real, and what they are called."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

SAMPLING_RATE = 16_000
"""Samples in a second that these families are trained on; it is their feature extractor that says it, not the model."""
_HOP = 160  # samples between two columns of Whisper's features


def token_names(module: nn.Module, inputs: Mapping[str, Any], row: int) -> dict[str, list[str]]:
    """Names of the tokens of one row, for each side whose tokens are no text; empty where nothing is known.

    A frame of audio is named by the time at which it begins, as ``0.24 s``. Padding has no name. Patches of an image, the
    side "image", are named by ``row 3, column 5``, and what stands before them by what it is.

    Args:
        row: of the batch.
    """
    found = frames_of(module, inputs)
    if found is None:
        patches = _patches(module, inputs)
        return {} if patches is None else {"image": patches}
    decimals = max(2, -math.floor(math.log10(found.seconds)))
    return {"text": [f"{number * found.seconds:.{decimals}f} s" for number in range(int(found.real[row].sum()))]}


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
"""What stands before the patches, of the families whose order of tokens is known; of others patches have no names."""


def _patches(module: nn.Module, inputs: Mapping[str, Any]) -> list[str] | None:
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
    return [*_BEFORE_PATCHES[kind], *(f"[register {n}]" for n in range(1, registers + 1)), *patches]


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames that a model makes of a batch of audio.

    Attributes:
        seconds: from the beginning of one to that of the next.
        real: which of them are no padding.
    """

    seconds: float
    real: Bool[Tensor, "B F"]


def frames_of(module: nn.Module, inputs: Mapping[str, Any]) -> Frames | None:
    """The frames of a batch for models that say how they make them; None for all others.

    Wav2vec 2.0 and its kin read samples through convolutions, and its ``attention_mask`` is over samples. Whisper reads
    features at every second column, and has no padding: its encoder attends to all of its window, silence too.
    """
    config: Any = getattr(module, "config", None)
    samples, features = inputs.get("input_values"), inputs.get("input_features")
    strides, kernels = getattr(config, "conv_stride", None), getattr(config, "conv_kernel", None)
    if isinstance(samples, Tensor) and samples.dim() == 2 and strides and kernels and not _squeezed(config):
        convolutions = list(zip(kernels, strides, strict=True))
        given = inputs.get("attention_mask")
        lengths = torch.full(samples.shape[:1], samples.shape[1], device=samples.device)
        whole = _convolved(lengths, convolutions)
        if isinstance(given, Tensor) and given.shape == samples.shape:
            lengths = given.long().sum(1)
        numbers = torch.arange(int(whole[0]), device=samples.device)
        return Frames(math.prod(strides) / SAMPLING_RATE, numbers < _convolved(lengths, convolutions)[:, None])
    if getattr(config, "model_type", None) == "whisper" and isinstance(features, Tensor) and features.dim() == 3:
        shape = features.shape[0], (features.shape[2] + 1) // 2
        return Frames(2 * _HOP / SAMPLING_RATE, torch.ones(shape, dtype=torch.bool, device=features.device))
    return None


def _squeezed(config: Any) -> bool:
    """SEW attends to fewer frames than its convolutions give."""
    return getattr(config, "squeeze_factor", 1) != 1


def _convolved(lengths: Int[Tensor, " B"], convolutions: list[tuple[int, int]]) -> Int[Tensor, " B"]:
    """Frames that convolutions of such kernels and strides, without padding, make of so many samples."""
    for kernel, stride in convolutions:
        lengths = (lengths - kernel) // stride + 1
    return lengths.clamp(min=0)
