"""Whether a batch holds padding that the model is not told of: tokens that stand for nothing then count as text."""

import math
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor, nn

from massieu.probing.model.forward import dtype_of, output_tensor, real_mask, run
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.precision import relative_difference
from massieu.probing.model.signature import forward_signature

_TEXT_ALONE = frozenset({"input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "labels"})
"""Inputs of a row that can be cut; images, sounds and caches beside the text cannot be cut with it."""
_MARKS_OF_TEXT = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "unk_token_id")


def unmarked_padding(module: nn.Module, inputs: dict[str, Any]) -> str | None:
    """A warning where rows of token ids are padded and no mask says so; None where they are not.

    The padding token is the one that the model's configuration names, or else its end token. Rows are padded where one ends
    in it at least twice, because a text may end in a token that marks an end as well. Once is enough for a token that stands
    for nothing else, if no row has it in its middle. At the beginning it is padding from twice on, but never in a decoder,
    which starts with it.
    """
    for name, mask_name, decoder in (
        ("input_ids", "attention_mask", False),
        ("decoder_input_ids", "decoder_attention_mask", True),
    ):
        ids = inputs.get(name)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            continue
        if inputs.get(mask_name) is not None or real_mask(inputs, decoder=decoder) is not None:
            continue
        for token, marks_text in _padding_tokens(getattr(module, "config", None)):
            rows = int(_padded_rows(ids, token, marks_text, decoder=decoder).sum())
            if rows:
                return (
                    f"{rows} of {len(ids)} rows of {name} are padded with the token {token}, and no {mask_name} says so, so "
                    f"the padding is attended to and measured as text; give {mask_name}"
                )
    return None


def _padding_tokens(config: Any) -> list[tuple[int, bool]]:
    """Tokens that rows may be padded with, and whether they mark something in a text too."""
    if config is None:
        return []
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    marks: set[Any] = set()
    for name in _MARKS_OF_TEXT:
        value = getattr(config, name, None)
        marks |= set(value) if isinstance(value, list | tuple) else {value}
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        return [(padding, padding in marks)]
    ends = getattr(config, "eos_token_id", None)
    listed = ends if isinstance(ends, list | tuple) else [ends]
    return [(token, True) for token in listed if token is not None]


def _padded_rows(ids: Int[Tensor, "B L"], token: int, marks_text: bool, *, decoder: bool) -> Bool[Tensor, " B"]:
    is_token = ids == token
    whole = is_token.all(dim=1)
    at_end = is_token.flip(1).long().cumprod(dim=1).sum(dim=1)
    at_beginning = is_token.long().cumprod(dim=1).sum(dim=1)
    in_middle = is_token.sum(dim=1) - at_end - at_beginning
    if not marks_text and bool((in_middle[~whole] == 0).all()):
        padded = at_end >= 1
    else:
        padded = at_end >= 2
    if not decoder:
        padded = padded | (at_beginning >= 2)
    return padded & ~whole


def left_padded_row(module: nn.Module, inputs: dict[str, Any]) -> int | None:
    """The first row that begins with padding, of a batch whose positions could be given and are not; None without one."""
    if "position_ids" not in forward_signature(module).parameters or inputs.get("position_ids") is not None:
        return None
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not tensors <= _TEXT_ALONE:
        return None
    real = real_mask(inputs, decoder=False)
    assert real is not None
    rows = (~real[:, 0] & real.any(dim=1)).nonzero()
    return int(rows[0]) if len(rows) else None


@torch.no_grad()
def shifted_positions(module: nn.Module, inputs: dict[str, Any], row: int) -> str | None:
    """A warning where padding before a row's text changes what the model makes of it; None where it does not.

    The row is read twice: as it is, and without its padding. Models that count positions from the beginning of the row, as
    GPT-2 does, give other numbers. Rotary positions are relative, and some models count real tokens; theirs stay the same
    up to rounding.
    """
    tensors = {name: value[[row]] for name, value in inputs.items() if isinstance(value, Tensor) and name != "labels"}
    real = real_mask(tensors, decoder=False)
    assert real is not None
    begin = int(real[0].long().argmax())  # the first token of the row's text
    padded = model_inputs(module, tensors)
    cut = model_inputs(module, {name: value[:, begin:] for name, value in tensors.items()})
    with_padding = output_tensor(module, run(module, padded))[:, begin:]
    without_padding = output_tensor(module, run(module, cut))
    compared = real[:, begin:].to(without_padding.device)
    # Rounding of rotary angles differs with the position; a shift of learned positions is far larger than its square root.
    allowed = math.sqrt(torch.finfo(dtype_of(module)).eps)
    if relative_difference(with_padding[compared], without_padding[compared]) <= allowed:
        return None
    return (
        f"rows are padded at the left, and {type(module).__name__} counts positions from the beginning of the row, padding "
        "included, so its numbers are those of shifted text; give position_ids, or pad at the right"
    )


class PaddingCheck:
    """Warns, once of each kind, of padding in a model's batches that the model is not told of."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._unmarked = False
        self._tried_left = False

    def warnings(self, inputs: dict[str, Any]) -> list[str]:
        """Warnings of this batch that no batch before has brought."""
        sentences = []
        if not self._unmarked:
            sentence = unmarked_padding(self._module, inputs)
            if sentence is not None:
                self._unmarked = True
                sentences.append(sentence)
        # Of a sharded model every process has to make the same passes, and only some may have rows with padding.
        if not self._tried_left and not (dist.is_initialized() and dist.get_world_size() > 1):
            row = left_padded_row(self._module, inputs)
            if row is not None:
                self._tried_left = True
                sentence = shifted_positions(self._module, inputs, row)
                if sentence is not None:
                    sentences.append(sentence)
        return sentences
