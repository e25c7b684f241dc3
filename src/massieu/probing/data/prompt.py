"""One prompt as a batch: a text, or a list of messages that the tokenizer's chat template writes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from massieu.errors import InputError
from massieu.probing.data.text import by_template


def is_messages(value: object) -> bool:
    """Whether a value is a list of messages, as chat templates take them."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def prompt_batch(tokenizer: Any, prompt: Any) -> dict[str, Tensor]:
    """The tokens of one prompt, (1, L), with the special tokens that the tokenizer itself or its chat template writes.

    Args:
        prompt: a text; or messages, after which the model's answer follows, unless the last one is the answer.

    Raises:
        InputError: the prompt has no token, or is no Unicode text; messages, and the tokenizer has no chat template that
            takes them.
    """
    if is_messages(prompt):
        answer_follows = prompt[-1].get("role") != "assistant"
        text = by_template(tokenizer, prompt, answer_follows=answer_follows)
    else:
        text = prompt
    if not text.strip():
        raise InputError(f"the prompt is empty: {text!r}; give at least one word")
    if not _is_unicode(text):
        raise InputError(f"the prompt {text!r} holds half a character (a surrogate), which no tokenizer reads")
    # A template writes all special tokens itself. `verbose` would warn that a text is longer than the model reads.
    ids = tokenizer(text, add_special_tokens=not is_messages(prompt), truncation=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError(f"the tokenizer makes no token of the prompt {text!r}; give another one")
    input_ids = torch.tensor([ids])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def _is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which an argument that is not in the terminal's encoding is given as."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
