"""Whether a tokenizer can be the model's: with another one, every number would be about other tokens than the text's."""

from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError


def check_vocabulary(tokenizer: Any, name: str) -> None:
    """Raises:
    InputError: it is no tokenizer, or one without a vocabulary, as one that was made without its files.
    """
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "all_special_ids"):
        raise InputError(f"{type(tokenizer).__name__} is not a tokenizer of transformers")
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special = set(tokenizer.all_special_ids)
    special |= {identifier for identifier, token in added_tokens.items() if token.special}
    words = set(tokenizer.get_vocab().values()) - special
    if len(words) < 2:  # a SentencePiece one without its files still knows the space
        raise InputError(
            f"the tokenizer of {name} has no vocabulary beside its special tokens, so it cannot read text: its files "
            f"({', '.join(getattr(tokenizer, 'vocab_files_names', {}).values())}) are missing; "
            "save it beside the model with save_pretrained, or name one with --tokenizer"
        )


def check_tokenizer(tokenizer: Any, model: nn.Module, name: str) -> None:
    """That a tokenizer has a vocabulary, and one that the model has embeddings for.

    Tokens that were added to the vocabulary may lie beyond the embeddings as long as the text has none of them
    (`check_ids`): Gemma 3's text models come with a token for images that only their larger siblings embed.

    Raises:
        InputError: as `check_vocabulary`; or its vocabulary is larger than the model's.
    """
    check_vocabulary(tokenizer, name)
    rows = embedded(model)
    if rows is not None and tokenizer.vocab_size > rows:
        raise InputError(
            f"the tokenizer cannot be that of {name}: it has {tokenizer.vocab_size:,} tokens, and the model embeds {rows:,}"
        )


def check_ids(model: nn.Module, inputs: dict[str, Any]) -> None:
    """That the model embeds every token it is given; on a GPU one that it does not would end the process.

    Raises:
        InputError: a token beyond its embeddings.
    """
    for name in ("input_ids", "decoder_input_ids"):
        _check_ids(model, inputs, name)


def _check_ids(model: nn.Module, inputs: dict[str, Any], name: str) -> None:
    ids = inputs.get(name)
    rows = embedded(model)
    if not isinstance(ids, Tensor) or rows is None or not ids.numel():
        return
    strange = ids[(ids < 0) | (ids >= rows)]
    placeholders = torch.tensor(_placeholders(getattr(model, "config", None)), dtype=ids.dtype, device=ids.device)
    strange = strange[~torch.isin(strange, placeholders)]
    if strange.numel():
        raise InputError(
            f"{name} hold the token {int(strange[0])}, and {type(model).__name__} embeds tokens 0 to {rows - 1:,}; "
            "they come from another model's tokenizer"
        )


def embedded(model: nn.Module) -> int | None:
    """How many tokens a model embeds; None where it has no plain table of embeddings."""
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def special_ids(tokenizer: Any, config: Any) -> set[int]:
    """Tokens that are no words: a tokenizer's special and added ones, and those that a model's configuration names."""
    settings = {} if config is None else vars(config)
    ids = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    ids |= set(_placeholders(config))
    if tokenizer is not None:
        ids |= set(tokenizer.all_special_ids)
        ids |= set(getattr(tokenizer, "added_tokens_decoder", {}))
    return ids


def _placeholders(config: Any) -> list[int]:
    """Tokens that stand for an image or a sound, which models put in the place of before they embed."""
    settings = {} if config is None else vars(config)
    values = [value for name, value in settings.items() if name.endswith(("_token_id", "_token_index"))]
    return [value for value in values if type(value) is int and abs(value) < 1 << 63]  # no tensor holds others
