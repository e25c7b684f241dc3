"""What a probe reads: the model that was given, and its batches, made of text, pairs, images or as they are."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described
from massieu.probing.checks.check import check_readable
from massieu.probing.data.documents import Document, check_sources, given_documents, read_documents, reference_documents
from massieu.probing.data.images import ImageBatches, given_images, processor_of, reads_images
from massieu.probing.data.pair_batches import PairBatches, check_pair_configuration, check_pair_model
from massieu.probing.data.pairs import Pairs, check_pairs, given_pairs
from massieu.probing.data.text import TextBatches
from massieu.probing.model.model import (
    AnnouncedModel,
    LoadedModel,
    as_loaded,
    default_model,
    load_model,
    longest,
    longest_by,
    table_of_positions,
)
from massieu.probing.model.tokenizers import check_tokenizer, check_vocabulary
from massieu.probing.reading.generation import check_generates
from massieu.probing.session.session import Input, ProbeProgress
from massieu.probing.session.sharing import Sharing

DEFAULT_LENGTH = 256
"""Tokens in a window, where nobody says how many and the model has as many positions."""


def of_text(
    model: str | Path | nn.Module | None,
    tokenizer_or_batches: Any,
    asked: tuple[Any, ...],
    sizes: dict[str, Any],
    loading: dict[str, Any],
    sharing: Sharing | None,
    tell: Callable[[ProbeProgress], None],
) -> tuple[LoadedModel, Input]:
    """The model, and its batches: those that were given, or made of text."""
    text, texts, source, target, column, packing, generate, bos = asked
    by_name, max_length = not isinstance(model, nn.Module), sizes["max_length"]
    pairs, documents = given_pairs(text, texts, source, target), None
    if pairs is None:
        said, documents = _documents(text, texts, column, sizes["max_tokens"], check=by_name)
    else:
        said, packing = _check_pairs(*pairs, column, sizes["max_tokens"], check=by_name), False
        if bos is not None:
            raise InputError("bos is for windows of text; the tokenizer marks the two sides of a pair by itself")
    tell(ProbeProgress("loading the model"))
    reads_text = tokenizer_or_batches is None or callable(tokenizer_or_batches)

    def check(announced: AnnouncedModel) -> None:
        if reads_text:
            _check_announced(announced, tokenizer_or_batches, max_length, pairs is not None)

    needs_tokenizer = tokenizer_or_batches is None
    loaded = load_given(model, tokenizer_or_batches, needs_tokenizer=needs_tokenizer, check=check, **loading)
    if generate is not None:
        check_generates(loaded.whole, loaded.name)
    if not reads_text:
        if text is not None or texts is not None or pairs is not None:
            raise InputError("give either batches or text, not both")
        if bos is not None:
            raise InputError("bos is for text; batches are read as they are")
        return loaded, Input(
            _batches(tokenizer_or_batches), "batches", packing, max_length or DEFAULT_LENGTH, loaded.tokenizer
        )
    tokenizer = _tokenizer(loaded, tokenizer_or_batches)
    length, window = _length(loaded, max_length, generate)
    sizes = sizes | {"max_length": length}
    tokenizer = tokenizer if sharing is None else sharing.tokenizer(tokenizer, loaded.name)
    if pairs is None:
        assert documents is not None
        batches = TextBatches(tokenizer, documents, **sizes, packing=packing, bos=bos)
    else:
        check_pair_model(loaded.module, tokenizer, loaded.name)
        batches = PairBatches(tokenizer, pairs[1], loaded.module, loaded.name, **sizes)
    if sharing is not None:
        sharing.check(batches)
    return loaded, Input(batches, said, packing, length, tokenizer, window)


def of_images(
    model: str | Path | nn.Module | None,
    processor: Any,
    images: Any,
    texts: Any,
    others: dict[str, Any],
    sizes: dict[str, Any],
    loading: dict[str, Any],
    tell: Callable[[ProbeProgress], None],
) -> tuple[LoadedModel, Input]:
    """The model, and its batches of images.

    Raises:
        InputError: something was given that goes with text alone, or what `given_images` and `reads_images` find.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(
            f"images are read in place of text: leave out {', '.join(given)} (texts may be given, one for each image)"
        )
    if isinstance(processor, str | Path):
        processor = processor_of(processor, None, loading["trust_remote_code"])
    if processor is not None and not callable(processor):
        raise InputError("give either batches or images, not both")
    said, pictures = given_images(images)
    captions = [texts] if isinstance(texts, str) else None if texts is None else list(texts)
    if captions is not None and not all(isinstance(each, str) for each in captions):
        raise InputError("texts beside images must be strings, one for each image")
    tell(ProbeProgress("loading the model"))
    loaded = load_given(model, processor, needs_tokenizer=False, **loading)
    if processor is None:
        if isinstance(model, nn.Module):
            raise InputError("a model in memory needs a processor of images: massieu.probe(model, processor, images=…)")
        processor = processor_of(
            default_model() if model is None else model, loading["revision"], loading["trust_remote_code"]
        )
    loaded = reads_images(loaded, processor, captions)
    batches = ImageBatches(processor, pictures, captions, sizes["batch_size"])
    return loaded, Input(
        batches, said, False, sizes["max_length"] or DEFAULT_LENGTH, getattr(processor, "tokenizer", None)
    )


def _documents(
    text: Sequence[str | Path] | str | Path | None,
    texts: Iterable[Any] | None,
    column: str | None,
    max_tokens: int | None,
    check: bool,
) -> tuple[str, Callable[[], Iterable[Document]]]:
    """What the text is, in words, and a function that reads it."""
    if text is not None and texts is not None:
        raise InputError("give either text (files and folders) or texts (strings), not both")
    if texts is not None:
        return given_documents(texts, column)
    if text is None:
        return "pydoc_data.topics (the reference text that ships with Python)", reference_documents
    sources = [text] if isinstance(text, str | Path) else list(text)
    if check:
        check_sources(sources, column=column, max_tokens=max_tokens)
    return ", ".join(map(str, sources)), lambda: read_documents(sources, column=column)


def _check_pairs(said: str, pairs: Pairs, column: str | None, max_tokens: int | None, check: bool) -> str:
    """Look at pairs that are read in place of documents; what they are, in words."""
    if column is not None:
        raise InputError(f"give either column ({column!r}) or pairs of source and target, not both")
    if check:
        check_pairs(pairs, max_tokens)
    return said


def _batches(given: Any) -> Iterable[Any]:
    """Several batches; one batch in their place is a common mistake, which iterating would hide."""
    if isinstance(given, Tensor | Mapping) or not isinstance(given, Iterable):
        raise InputError(
            f"tokenizer_or_batches must be an iterable of batches, got {described(given)}; put one batch in a list"
        )
    return given


def load_given(
    model: str | Path | nn.Module | None,
    tokenizer: Any,
    needs_tokenizer: bool,
    check: Callable[[AnnouncedModel], None] | None = None,
    **loading: Any,
) -> LoadedModel:
    """The model, loaded where it is given by name.

    Args:
        check: called before the weights of a model are read; see `load_model`.
    """
    if isinstance(model, nn.Module):
        if any(loading[name] is not None for name in ("device", "dtype", "device_map")):
            raise InputError(
                "device, dtype and device_map are for models loaded by name; move a model in memory yourself"
            )
        return as_loaded(model, tokenizer if callable(tokenizer) else None)
    loaded = load_model(model, tokenizer=needs_tokenizer, check=check, **loading)
    check_readable(loaded.module)
    return loaded


def _check_announced(announced: AnnouncedModel, tokenizer: Any, max_length: int | None, pairs: bool) -> None:
    """What is known of a model that is to read text before its weights are read, which may take long.

    Raises:
        InputError: it has no tokenizer, or one without a vocabulary; it has fewer positions than windows have tokens; it is no
            encoder–decoder, and pairs are to be read.
    """
    if not _may_attend(announced.config):
        return  # that it has no attention matters more than its tokenizer, and is said once it is there
    tokenizer = announced.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise _no_tokenizer(announced.name, announced.tokenizer_problem)
    check_vocabulary(tokenizer, announced.name)
    if pairs:
        check_pair_configuration(announced.config, announced.name)
    most = longest_by(announced.config)
    if max_length is not None and most is not None and max_length > most:
        raise _too_long(max_length, most, announced.name)


def _may_attend(config: Any) -> bool:
    """Whether the file of a configuration's model in transformers knows of attention; True where there is no such file."""
    named = require_extra("transformers", "probe").MODEL_MAPPING.get(type(config), None)
    if named is None:
        return True
    kind = named[0] if isinstance(named, tuple) else named
    names = vars(sys.modules[kind.__module__])
    return any(name == "ALL_ATTENTION_FUNCTIONS" or name.endswith("Attention") for name in names)


def _no_tokenizer(name: str, problem: str | None) -> InputError:
    reason = f" ({problem})" if problem else ""
    return InputError(
        f"{name} has no tokenizer{reason}, so it cannot read text; name one (--tokenizer, or the second argument of "
        "massieu.probe), or give batches of its inputs from Python: massieu.probe(model, batches)"
    )


def _too_long(max_length: int, most: int, name: str) -> InputError:
    return InputError(f"max_length {max_length} is more than the {most} positions that {name} has")


def _tokenizer(loaded: LoadedModel, tokenizer: Any) -> Any:
    """The tokenizer that was given or else the model's own, once it is sure that the model reads what comes of it."""
    tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise _no_tokenizer(loaded.name, loaded.tokenizer_problem)
    check_tokenizer(tokenizer, loaded.module, loaded.name)
    return tokenizer


def _length(loaded: LoadedModel, max_length: int | None, generate: int | None) -> tuple[int, str | None]:
    """Tokens in a window, and in a sentence why they are fewer than the default.

    Raises:
        InputError: more were asked for than the model has positions.
    """
    most = longest(loaded.module)
    if max_length is not None:
        if most is not None and max_length > most:
            raise _too_long(max_length, most, loaded.name)
        return max_length, None
    reason = "the model has no more positions"
    if generate is not None and (positions := table_of_positions(loaded.module)) is not None:
        most = max(positions - generate + 1, 1)
        reason += " beside those of the new tokens"
    if most is None or most >= DEFAULT_LENGTH:
        return DEFAULT_LENGTH, None
    return most, f"windows have {most} tokens in place of the default {DEFAULT_LENGTH}: {reason}"
