"""A digest of the text that was read: two results with one digest read the same rows in the same order."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASKS = {
    "input_ids": "attention_mask",
    "attention_mask": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
    "decoder_attention_mask": "decoder_attention_mask",
}
"""By an input's name, the mask that marks its padding."""


class TextDigest:
    """A digest of all rows that were read, in their order; the size of batches does not change it.

    Padding is left out. Floating-point numbers enter as bfloat16, so that a model in bfloat16 and one in float32 read the
    same images by their digests.
    """

    def __init__(self) -> None:
        self._hash: Any = hashlib.sha256()

    def add(self, inputs: Mapping[str, Any], rows: int | None) -> None:
        """Add a batch.

        Args:
            rows: along the first dimension; None if the batch cannot be cut into rows.
        """
        if self._hash is None:
            return
        try:
            for row in [None] if rows is None else range(rows):
                for name in sorted(inputs):
                    self._hash.update(f"{name}:".encode() + _bytes(name, inputs, row))
        except TypeError:
            self._hash = None

    def text(self) -> str | None:
        """The digest; None if a batch held something that has no digest."""
        return None if self._hash is None else f"sha256:{self._hash.hexdigest()}"


def _bytes(name: str, inputs: Mapping[str, Any], row: int | None) -> bytes:
    """The bytes of one input: of one row without its padding, or of the whole input."""
    value = inputs[name]
    if isinstance(value, Tensor) and value.dim() and row is not None:
        value = value[row]
        mask = inputs.get(_MASKS.get(name, ""))
        if isinstance(mask, Tensor) and mask[row].shape == value.shape:
            value = value[mask[row].bool()]
    return _content(value)


def _content(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.bfloat16() if value.is_floating_point() else value
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return f"{value.dtype}{tuple(value.shape)}".encode() + raw
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value).encode()
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_content, value)) + b"]"
    if isinstance(value, Mapping):
        return b"{" + b",".join(str(key).encode() + b":" + _content(item) for key, item in value.items()) + b"}"
    raise TypeError(f"{type(value).__name__} has no digest")


def vocabulary_digest(tokenizer: Any) -> str | None:
    """A digest of a tokenizer's tokens and their numbers; None without a tokenizer."""
    if tokenizer is None:
        return None
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    serialised = json.dumps(tokens, separators=(",", ":")).encode("ascii")
    return f"sha256:{hashlib.sha256(serialised).hexdigest()}"
