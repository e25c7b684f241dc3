"""The data that a probe reads, as objects that check themselves: text, pairs of texts, images, or batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import described, flag
from massieu.foundation.doors import check_fields, count, sequence, text
from massieu.probing.data.documents import (
    Document,
    check_sources,
    documents_of,
    read_documents,
    reference_documents,
)
from massieu.probing.data.images import Picture, checked_captions, pictures_of
from massieu.probing.data.pairs import PairReader, check_pairs, pairs_of
from massieu.probing.data.text_tables import is_dataset

Paths = str | PathLike[str] | Sequence[str | PathLike[str]] | None
"""A file, a folder, "-" for standard input, or a list of these."""
_LEAST = {"window": (4, "--max-length"), "limit": (1, "--max-tokens"), "continue_for": (1, "--generate")}
"""The smallest value of each size, and its option on the command line."""
_DEFAULT_SETTINGS: dict[str, Any] = {
    "column": None,
    "packing": True,
    "source": None,
    "target": None,
    "bos": None,
    "max_length": None,
    "max_tokens": None,
    "generate": None,
}
"""A result's record of its data: the names in the record, and the values where the user gave none."""


@dataclass(frozen=True, eq=False)
class Text:
    """Text that a tokenizer cuts into windows: files and folders, or strings; by default, the reference text of Python.

    Args:
        paths: files, folders, or "-" for standard input. None stands for ``strings``, or without these for the English text
            that every Python ships.
        tokenizer: the tokenizer, its folder or its name on the hub; None for the model's own.
        strings: the text itself, which is never taken for a path: a string, a list of documents, conversations as lists of
            messages, or a ``Dataset`` or ``IterableDataset`` of the package `datasets`.
        window: tokens in a window; None for 256, or the number of positions that the model has if that is smaller.
        limit: stop after this many tokens.
        column: column of a file or data set, or field of JSON objects, that holds the text; None for "text".
        fill_windows: cut the text into full windows; False keeps one document per row, with padding.
        bos: whether rows begin with the BOS token; None leaves it to the tokenizer's own setting.
        continue_for: each document is a prompt, and the model writes at most this many tokens after it, by its own
            ``generate`` with a cache. The queries that produced the new tokens are measured.

    Raises:
        InputError: both paths and strings; a column without a table; something that is not text; a window of fewer than 4
            tokens; a limit or ``continue_for`` below 1. A missing file is an error only when it is read.

    Example:
        >>> import massieu
        >>> massieu.Text(strings=["the text itself", "another one"], window=64)
        Text(window=64, description='2 strings')
    """

    paths: Paths = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    _: KW_ONLY
    strings: Any = field(default=None, repr=False)
    window: int | None = None
    limit: int | None = field(default=None, repr=False)
    column: str | None = field(default=None, repr=False)
    fill_windows: bool = field(default=True, repr=False)
    bos: bool | None = field(default=None, repr=False)
    continue_for: int | None = field(default=None, repr=False)
    description: str = field(default="", init=False)
    """The text in words, such as "2 strings"."""
    read: Callable[[], Iterable[Document]] = field(init=False, repr=False)
    """Reads the documents, from the beginning at each call."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        check_fields(self, column=text, fill_windows=flag, bos=flag, tokenizer=_check_tokenizer, strings=_check_strings)
        paths = _path_tuple(self.paths)
        _set(self, strings=_reusable(self.strings))
        if paths is not None and self.strings is not None:
            raise InputError("give either paths (files and folders) or strings (the text itself), not both")
        if self.strings is not None:
            description, read = documents_of(self.strings, self.column)
        elif paths is not None:
            description = ", ".join(map(str, paths))
            read = partial(read_documents, paths, column=self.column)
        elif self.column is None:
            description = "pydoc_data.topics (the reference text that ships with Python)"
            read = reference_documents
        else:
            raise InputError(f"a column ({self.column!r}) was named, but no table that has it; give paths or strings")
        _set(self, paths=paths, description=description, read=read)

    def check(self) -> None:
        """Read files once, so that errors in them are found before any work is done.

        Raises:
            InputError: as `check_sources`.
        """
        paths = _path_tuple(self.paths)
        if paths is not None:
            check_sources(paths, column=self.column, limit=self.limit)

    @property
    def filled(self) -> bool:
        """Whether rows are full windows; prompts have a row each."""
        return self.fill_windows and self.continue_for is None

    def settings(self) -> dict[str, Any]:
        """The user's settings, as a result's record holds them."""
        return _settings(self) | {
            "column": self.column,
            "packing": self.fill_windows,
            "bos": self.bos,
            "generate": self.continue_for,
        }


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of texts for an encoder–decoder: a source that the encoder reads, and a target that the decoder reads.

    Args:
        paths: files of tables, or folders of them.
        tokenizer: as for `Text`.
        source, target: names of the two columns, or fields of JSON objects.
        strings: the pairs themselves, in place of ``paths``: tuples of two strings, without names of columns; or, with
            ``source`` and ``target``, mappings, or a data set of the package `datasets`.
        window: tokens in each side of a pair; None as for `Text`.
        limit: stop after this many tokens of both sides together.

    Raises:
        InputError: neither paths nor strings, or both; only one of the two columns, or the same column twice; columns for
            text that has none, or no columns for a table; sizes as for `Text`.

    Example:
        >>> import massieu
        >>> massieu.Pairs(strings=[("the cat", "die Katze")])
        Pairs(window=None, description='1 pair')
    """

    paths: Paths = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    _: KW_ONLY
    source: str | None = field(default=None, repr=False)
    target: str | None = field(default=None, repr=False)
    strings: Any = field(default=None, repr=False)
    window: int | None = None
    limit: int | None = field(default=None, repr=False)
    description: str = field(default="", init=False)
    """The pairs in words, such as "1 pair"."""
    read: PairReader = field(init=False, repr=False)
    """Reads the pairs, from the beginning at each call."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        check_fields(self, source=text, target=text, tokenizer=_check_tokenizer, strings=_check_strings)
        paths = _path_tuple(self.paths)
        _set(self, strings=_reusable(self.strings))
        description, read = pairs_of(paths, self.strings, self.source, self.target)
        _set(self, paths=paths, description=description, read=read)

    def check(self) -> None:
        """Read the pairs once, so that errors in them are found before any work is done.

        Raises:
            InputError: as `check_pairs`.
        """
        check_pairs(self.read, self.limit)

    def settings(self) -> dict[str, Any]:
        """The user's settings, as a result's record holds them."""
        return _settings(self) | {"source": self.source, "target": self.target}


@dataclass(frozen=True, eq=False)
class Images:
    """Images that a checkpoint's processor makes into batches.

    Args:
        images: a file or folder, or a list of files, folders, images of Pillow, arrays and tensors.
        processor: the processor, its folder or its name on the hub; None for the model's own.
        captions: texts for the images, one for each; None where the model reads images alone.

    Raises:
        InputError: no image; a file that does not exist, or is not an image; another number of captions than of images.
        MissingExtraError: files without Pillow.

    Example:
        >>> import massieu
        >>> import torch
        >>> massieu.Images([torch.zeros(3, 8, 8)], captions=["nothing"])
        Images(description='1 image')
    """

    images: Any = field(repr=False)
    processor: Any = field(default=None, repr=False)
    _: KW_ONLY
    captions: str | Sequence[str] | None = field(default=None, repr=False)
    description: str = field(default="", init=False)
    """The images in words, such as "1 image"."""
    pictures: Sequence[Picture] = field(default=(), init=False, repr=False)
    """The images, each read when it is needed."""

    def __post_init__(self) -> None:
        check_fields(self, processor=_check_processor, captions=_check_strings)
        _set(self, images=_reusable(self.images))
        description, pictures = pictures_of(self.images)
        captions = checked_captions(self.captions, len(pictures))
        _set(self, description=description, pictures=pictures, captions=captions)

    def settings(self) -> dict[str, Any]:
        """The user's settings, as a result's record holds them."""
        return _DEFAULT_SETTINGS | _name_of_tokenizer(self.processor)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches as a model's forward takes them. A list of batches alone stands for them wherever data are an argument.

    Args:
        batches: an iterable of batches, each a tensor, a tuple (arguments in order) or a mapping (by name). A mask (B, L) in a
            mapping marks padding: ``attention_mask`` is True at real tokens, ``key_padding_mask``,
            ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are True at padding.
        tokenizer: as for `Text`; it names the tokens on the page.
        documents: rows are independent documents; False if they are windows of one text.
        window: tokens in a full window, to which positions are compared; None for 256.
        continue_for: rows are prompts, as for `Text`.

    Raises:
        InputError: one batch in place of several; strings; a window of fewer than 4 tokens, ``continue_for`` below 1.

    Example:
        >>> import massieu
        >>> import torch
        >>> massieu.Batches([{"input_ids": torch.arange(8)[None]}], documents=True)
        Batches(documents=True, window=None)
        >>> massieu.Batches(torch.arange(8)[None])
        Traceback (most recent call last):
        massieu.errors.InputError: batches must be an iterable of batches, got a tensor of torch.int64; put one batch in a list
    """

    batches: Iterable[Any] = field(repr=False)
    _: KW_ONLY
    tokenizer: Any = field(default=None, repr=False)
    documents: bool = False
    window: int | None = None
    continue_for: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_sizes(self)
        check_fields(self, tokenizer=_check_tokenizer, documents=flag)
        batches = self.batches
        if isinstance(batches, Tensor | np.ndarray | Mapping) or not isinstance(batches, Iterable):
            raise InputError(
                f"batches must be an iterable of batches, got {described(batches)}; put one batch in a list"
            )
        has_strings = isinstance(batches, Sequence) and any(isinstance(batch, str) for batch in batches)
        if isinstance(batches, str) or has_strings:
            raise InputError(
                "batches must not be strings: give massieu.Text(strings=…) for text, or massieu.Text(paths)"
            )

    @property
    def filled(self) -> bool:
        """Whether rows are windows of one text."""
        return not self.documents and self.continue_for is None

    def settings(self) -> dict[str, Any]:
        """The user's settings, as a result's record holds them."""
        return _settings(self) | {"packing": not self.documents, "generate": self.continue_for}


Data = Text | Pairs | Images | Batches


def given_data(data: Any) -> Data:
    """The user's argument ``data`` as an object. A path, or a list of paths, names text; every other iterable holds batches.

    Raises:
        InputError: it is none of these; the message names the object that is needed.
    """
    if isinstance(data, Data):
        return data
    if data is None or isinstance(data, str | PathLike) or _are_paths(data):
        return Text(data)
    if callable(data):
        raise InputError(
            f"data must be text, images or batches, got {described(data)}; give massieu.Text(paths, tokenizer) for a "
            "tokenizer, and massieu.Images(images, processor) for a processor"
        )
    if not isinstance(data, list | tuple) and is_dataset(data):
        raise InputError("data is a data set: give massieu.Text(strings=data, column=…), or massieu.Batches(data)")
    return Batches(data)


def _are_paths(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str | PathLike) for item in data)


def _path_tuple(paths: Any) -> tuple[str | Path, ...] | None:
    """Paths, one or several, as a tuple; None stays None.

    Raises:
        InputError: there is no path, or something else among them.
    """
    if paths is None:
        return None
    is_one = isinstance(paths, str | PathLike | Tensor | np.ndarray | Mapping) or not isinstance(paths, Iterable)
    items: Any = [paths] if is_one else list(paths)  # pyright: ignore[reportArgumentType]
    for item in items:
        if not isinstance(item, str | PathLike):
            raise InputError(
                f"paths must be files and folders, got {described(item)}; text itself is given as strings=, and batches as "
                "massieu.Batches(batches)"
            )
    if not items:
        raise InputError("no text was given in paths; name a file, a folder, or - for standard input")
    return tuple(item if isinstance(item, str) else Path(item) for item in items)


def _reusable(values: Any) -> Any:
    """The values; those of an iterator, which can be read only once, as a list."""
    return list(values) if hasattr(values, "__next__") else values


def _check_strings(name: str, value: object) -> None:
    if not isinstance(value, str):
        sequence(name, value)


def _check_tokenizer(name: str, value: object) -> None:
    if not (isinstance(value, str | PathLike) or callable(value)):
        raise TypeError(f"{name} must be a tokenizer or the name of one, got {described(value)}")


def _check_processor(name: str, value: object) -> None:
    if not (isinstance(value, str | PathLike) or callable(value)):
        raise TypeError(f"{name} must be a processor of images or the name of one, got {described(value)}")


def _check_sizes(data: Any) -> None:
    """Check ``window``, ``limit`` and ``continue_for``, as far as the object has them.

    Raises:
        InputError: a size is not a whole number, or too small.
    """
    check_fields(data, window=count, limit=count, continue_for=count)
    for name, (least, option) in _LEAST.items():
        value = getattr(data, name, None)
        if value is not None and value < least:
            raise InputError(f"{name} ({option}) must be at least {least}, got {value}")


def _settings(data: Any) -> dict[str, Any]:
    """Sizes, and the name of the tokenizer if it was given by name."""
    sizes = {"max_length": data.window, "max_tokens": getattr(data, "limit", None)}
    return _DEFAULT_SETTINGS | sizes | _name_of_tokenizer(data.tokenizer)


def _name_of_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The entry of a record; empty for a tokenizer that was given as an object."""
    return {"tokenizer": str(tokenizer)} if isinstance(tokenizer, str | PathLike) else {}


def _set(data: Any, **values: Any) -> None:
    """Set fields of a frozen object while it is initialised."""
    for name, value in values.items():
        object.__setattr__(data, name, value)
