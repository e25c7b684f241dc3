"""Odd masks and soft caps for the small models of transformers' registry."""

import inspect
from collections.abc import Iterator

import torch
from scripts.small_models import configurations
from torch import Tensor, nn

from massieu.probing.model.model_inputs import model_inputs

MASKS = ("middle", "both sides")
NOT_A_NUMBER = "the model's own attention is NaN"
"""What is said of a mask under which a model has no numbers of its own."""
CAP = 2.0  # of scores that are several times as large
CAPS = dict.fromkeys(("attn_logit_softcapping", "attention_logit_cap", "conf_attention_logit_cap", "softcap"), CAP)
"""Fields of configurations that cap the scores of attention, as a variant in which each is low."""


def capped(model: nn.Module) -> bool:
    """Whether the configuration has a field that caps the scores of attention."""
    return any(hasattr(config, name) for config in configurations(model.config) for name in CAPS)


def odd_mask(name: str, rows: int, length: int) -> Tensor:
    """A mask of shape (rows, length), 1 for real tokens: the last row has a hole or padding on both sides."""
    real = torch.ones(rows, length, dtype=torch.long)
    part = max(length // 6, 1)
    if name == "middle":
        real[-1, 2 * part : 4 * part] = 0
    else:
        real[-1, :part] = 0
        real[-1, -part:] = 0
    return real


def masked_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The inputs once more under each odd mask, by the mask's name; nothing for a model that takes no mask."""
    for odd in MASKS:
        masks = {name: _filled(odd, shape) for name, shape in _shapes(model, inputs).items()}
        accepted = {name: mask for name, mask in masks.items() if runs(model, inputs | {name: mask})}
        if accepted:
            yield odd, inputs | accepted


def _filled(odd: str, shape: tuple[int, ...]) -> Tensor:
    """An odd mask of tokens, or of an image's columns."""
    mask = odd_mask(odd, shape[0], shape[-1])
    return mask if len(shape) == 2 else mask[:, None].repeat(1, shape[1], 1)


def _shapes(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each mask that the forward has an argument for, (rows, length) or (rows, height, width)."""
    shapes: dict[str, tuple[int, ...]] = {}
    if "input_ids" in inputs:
        shapes["attention_mask"] = tuple(inputs["input_ids"].shape)
    if "decoder_input_ids" in inputs:
        shapes["decoder_attention_mask"] = tuple(inputs["decoder_input_ids"].shape)
    if "pixel_values" in inputs and inputs["pixel_values"].dim() == 4:
        rows, _, height, width = inputs["pixel_values"].shape
        shapes["pixel_mask"] = (rows, height, width)
    for name in ("input_values", "input_features"):
        if name in inputs:  # frames or samples; the other side, if any, is of mel bands
            shapes.setdefault("attention_mask", (inputs[name].shape[0], max(inputs[name].shape[1:])))
    parameters = inspect.signature(model.forward).parameters
    return {name: shape for name, shape in shapes.items() if name in parameters}


def runs(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether the model runs on these inputs, with and without a cache."""
    try:
        with torch.no_grad():
            model(**inputs)
            model(**model_inputs(model, inputs))
    except Exception:
        return False
    return True
