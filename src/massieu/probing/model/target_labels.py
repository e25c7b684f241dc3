"""What the decoder of an encoder–decoder reads where a batch holds labels: their shift, as training makes it."""

import sys
from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.model.checkpoint import sentence
from massieu.probing.model.signature import forward_signature

IGNORED = -100
"""The label of a token that the loss leaves out, as of padding."""
_SHIFT = "prepare_decoder_input_ids_from_labels"


def is_tokens(labels: object) -> bool:
    """Whether labels may be of tokens: one whole number for each."""
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def predicts_labels(module: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the labels of a batch are what an encoder–decoder's decoder is to predict, and not classes of the text.

    A trunk takes no labels: it is given what its model with a head is trained on.
    """
    labels = inputs.get("labels")
    if labels is None:
        return False
    if "labels" not in forward_signature(module).parameters:
        return is_tokens(labels)
    can_generate: Any = getattr(module, "can_generate", None)
    return can_generate is not None and can_generate()


def shifted_labels(model: Any, labels: Int[Tensor, "B T"], name: str) -> Int[Tensor, "B T"]:
    """What the decoder reads to predict these labels: by the model's own shift, else behind its start token.

    A trunk has no labels, so that the shift is that of the class with a head from the same file. Some such classes shift
    inside their forward alone; all of these put the start token first and padding in the place of `IGNORED`.

    Raises:
        InputError: the start token or the padding is not known, or the model's own shift fails.
    """
    shift = _shift_of(model)
    if shift is None:
        return _behind_start(model.config, labels, name)
    try:
        return shift(model, labels=labels)
    except Exception as error:  # of whatever class: code of the model, which asks for what its configuration lacks
        raise InputError(f"{name} cannot make decoder tokens of a target: {sentence(error)}") from error


def _shift_of(model: Any) -> Any:
    """The shift of the model's class, or of a class with a head in the files of its classes; None where there is none."""
    file_names = dict.fromkeys(kind.__module__ for kind in type(model).__mro__ if kind is not object)
    kinds = [type(model)]
    for file_name in file_names:
        kinds.extend(kind for kind in vars(sys.modules[file_name]).values() if _of_same_config(kind, model))
    for kind in kinds:
        shift = getattr(kind, _SHIFT, None)
        if shift is not None:
            return shift
    return None


def _behind_start(config: Any, labels: Tensor, name: str) -> Tensor:
    """The labels moved by one token, behind the start token: what a decoder reads to predict them."""
    start = getattr(config, "decoder_start_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    if start is None:
        raise InputError(
            f"the configuration of {name} names no decoder_start_token_id, so it is not known what its decoder reads "
            "before the target; set it, or give batches with decoder_input_ids from Python"
        )
    tokens = labels.roll(1, dims=1)
    tokens[:, 0] = start
    ignored = tokens == IGNORED
    if padding is None and bool(ignored.any()):
        raise InputError(
            f"the configuration of {name} names no pad_token_id, so it is not known what its decoder reads in the place of "
            f"labels of {IGNORED}; set it, or give batches with decoder_input_ids from Python"
        )
    return tokens if padding is None else tokens.masked_fill(ignored, padding)


def _of_same_config(kind: Any, model: Any) -> bool:
    return isinstance(kind, type) and getattr(kind, "config_class", None) is type(model.config)
