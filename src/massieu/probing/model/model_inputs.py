"""What a model's forward is called with: a batch on its device, without a cache, with decoder tokens where it needs them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.model.forward import decoder_given, device_of, separable
from massieu.probing.model.signature import forward_signature
from massieu.probing.model.target_labels import IGNORED, is_tokens, predicts_labels, shifted_labels

_DUMMY_LENGTH = 16


def model_inputs(module: nn.Module, inputs: Mapping[str, Any], items: int | None = None) -> dict[str, Any]:
    """What the model's forward is called with: on its device, without a cache, with decoder tokens where it needs them.

    Those are the labels behind a start token where the batch holds labels that the decoder is to predict, as in training;
    else the source text behind it.

    Args:
        items: at most so many of the batch, where its first dimension is theirs: a model of transformers. None is all.

    Raises:
        InputError: a decoder has nothing to read, or it is not known what it reads of labels.
    """
    config: Any = getattr(module, "config", None)
    if not (hasattr(module, "main_input_name") and separable(inputs)):
        items = None
    device = device_of(module)
    prepared: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            rows = value[:items] if value.dim() else value
            prepared[name] = _placed(rows, device)
        else:
            prepared[name] = value
    if config is not None and _accepts(module, "use_cache"):
        prepared.setdefault("use_cache", False)
    prepared = with_target(module, prepared)
    # Labels that are no tokens, as of several codebooks, are the model's own forward's to shift.
    needs_tokens = _has_decoder(module) and not predicts_labels(module, prepared) and not decoder_given(prepared)
    if not needs_tokens:
        return prepared
    if "input_ids" in prepared:
        prepared["decoder_input_ids"] = _behind_start(prepared["input_ids"], config)
        if "attention_mask" in prepared:
            prepared["decoder_attention_mask"] = prepared["attention_mask"]
    elif prepared.get("labels") is None:
        raise InputError(
            f"{type(module).__name__} has a decoder beside its encoder, and the batch holds no tokens for it; "
            "give decoder_input_ids too"
        )
    return prepared


def _placed(rows: Tensor, device: torch.device | None) -> Tensor:
    """An input on the model's device. A GPU fetches it when it comes to it; else it would have to come to its end first."""
    if device is None or device.type != "cuda" or rows.device.type != "cpu" or rows.layout != torch.strided:
        return rows.to(device)
    if rows.is_pinned():  # and may be filled anew by whoever gave it
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)


def copied_from_callers(prepared: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Prepared inputs none of which lies in memory of the batch that was given, which the caller may fill anew."""
    given = {value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, Tensor)}
    return {
        name: value.clone() if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in given else value
        for name, value in prepared.items()
    }


def in_main_memory(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for those who look at its numbers, each of which a GPU would have to be asked for."""
    return {
        name: value.cpu() if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in inputs.items()
    }


def with_target(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with what the decoder reads where they hold labels that it is to predict, and no tokens for it.

    A trunk takes no labels; in their place it is given a mask that hides their padding.

    Raises:
        InputError: as `shifted_labels`.
    """
    if not _has_decoder(module) or not predicts_labels(module, inputs) or not is_tokens(inputs["labels"]):
        return inputs
    labels = inputs["labels"]
    targets = dict(inputs)
    if not decoder_given(targets):
        targets["decoder_input_ids"] = shifted_labels(module, labels, type(module).__name__)
    if not _accepts(module, "labels"):
        del targets["labels"]
        if targets.get("decoder_attention_mask") is None:
            targets["decoder_attention_mask"] = (labels != IGNORED).long()
    return targets


def _accepts(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has a parameter of this name."""
    return name in forward_signature(module).parameters


def _has_decoder(module: nn.Module) -> bool:
    """Whether a model has a decoder beside its encoder that can be given tokens."""
    config: Any = getattr(module, "config", None)
    return getattr(config, "is_encoder_decoder", False) and _accepts(module, "decoder_input_ids")


def _behind_start(tokens: Tensor, config: Any) -> Tensor:
    """The same text behind the decoder's start token, as in training; behind token 0 where no start token is named."""
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    shifted = tokens.roll(1, dims=1)
    shifted[:, 0] = 0 if start is None else start
    return shifted


def dummy_inputs(module: nn.Module) -> dict[str, Tensor]:
    """A tiny made-up input that makes every attention site fire; its values mean nothing.

    Raises:
        InputError: the model reads neither tokens nor images, or does not say what it reads.
    """
    class_name = type(module).__name__
    config: Any = getattr(module, "config", None)
    main_input = getattr(module, "main_input_name", None)
    if config is None or main_input is None:
        raise InputError(f"{class_name} does not say what its inputs are; give data, a batch that its forward accepts")
    generator = torch.Generator().manual_seed(0)
    if main_input == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(1, vision.num_channels, height, width, generator=generator)}
    vocabulary = getattr(config, "vocab_size", None)
    if main_input != "input_ids" or vocabulary is None:
        raise InputError(f"{class_name} reads {main_input!r}; give batches of it to probe or describe the model")
    if vocabulary < 1:
        raise InputError(f"the configuration of {class_name} says vocab_size = {vocabulary}: it reads no token")
    positions = getattr(config, "max_position_embeddings", None) or _DUMMY_LENGTH
    length = max(min(_DUMMY_LENGTH, positions), 1)
    ids = torch.randint(0, vocabulary, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
