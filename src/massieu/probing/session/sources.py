"""What a probe reads: the model that was given, and its batches, made of text, pairs, images or as they are."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from torch import nn

from massieu.errors import InputError, require_extra
from massieu.probing.checks.check import check_readable
from massieu.probing.data.given import Batches, Data, Images, Pairs, Text
from massieu.probing.data.images import ImageBatches, processor_of, reads_images
from massieu.probing.data.pair_batches import PairBatches, check_pair_configuration, check_pair_model
from massieu.probing.data.text import TextBatches
from massieu.probing.model.checkpoint import default_model
from massieu.probing.model.given import Checkpoint
from massieu.probing.model.model import AnnouncedModel, LoadedModel, load, load_tokenizer
from massieu.probing.model.positions import config_positions, max_positions, max_table_positions
from massieu.probing.model.tokenizers import check_tokenizer, check_vocabulary
from massieu.probing.reading.generation import check_generates
from massieu.probing.session.progress import ProbeProgress
from massieu.probing.session.session import Input
from massieu.probing.session.sharing import Sharing

DEFAULT_LENGTH = 256
"""Tokens in a window, where nobody says how many and the model has as many positions."""
Head = bool | Literal["if any"]


@dataclass(frozen=True, eq=False)
class Opening:
    """A model that is to be loaded, and what is to be known for it.

    Attributes:
        head: as for `load_model`.
        batch_size: rows of a batch.
        tell: says what is done.
        sharing: what this probe has in common with others.
    """

    model: Checkpoint | nn.Module
    head: Head
    batch_size: int
    tell: Callable[[ProbeProgress], None]
    sharing: Sharing | None = None

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with the model may run; of a module in memory none is known."""
        return isinstance(self.model, Checkpoint) and self.model.trust_remote_code

    def loaded(self, tokenizer: bool = False, check: Callable[[AnnouncedModel], None] | None = None) -> LoadedModel:
        """The model, which can be read.

        Args:
            check: called before the weights of a model are read; see `load_model`.
        """
        self.tell(ProbeProgress("loading the model"))
        loaded = load(self.model, tokenizer=tokenizer, head=self.head, check=check)
        if isinstance(self.model, Checkpoint):
            check_readable(loaded.module)
        return loaded

    def input(self, data: Data) -> tuple[LoadedModel, Input]:
        """The model, and its batches of these data.

        Raises:
            InputError: what is wrong with either, or that they do not go together.
        """
        if isinstance(data, Images):
            return self._of_images(data)
        if isinstance(data, Batches):
            return self._of_batches(data)
        return self._of_text(data) if isinstance(data, Text) else self._of_pairs(data)

    def _of_text(self, data: Text) -> tuple[LoadedModel, Input]:
        loaded, tokenizer = self._with_tokenizer(data)
        if data.continue_for is not None:
            check_generates(loaded.whole, loaded.name)
        tokenizer = self._checked(loaded, tokenizer)
        length, window = _length(loaded, data.window, data.continue_for)
        tokenizer = tokenizer if self.sharing is None else self.sharing.tokenizer(tokenizer, loaded.name)
        batches = TextBatches(
            tokenizer,
            data.read,
            window=length,
            limit=data.limit,
            batch_size=self.batch_size,
            fill_windows=data.filled,
            bos=data.bos,
        )
        if self.sharing is not None:
            self.sharing.check(batches)
        return loaded, Input(batches, data.description, data.filled, length, tokenizer, window)

    def _of_pairs(self, data: Pairs) -> tuple[LoadedModel, Input]:
        loaded, tokenizer = self._with_tokenizer(data)
        tokenizer = self._checked(loaded, tokenizer)
        length, window = _length(loaded, data.window, None)
        tokenizer = tokenizer if self.sharing is None else self.sharing.tokenizer(tokenizer, loaded.name)
        check_pair_model(loaded.module, tokenizer, loaded.name)
        sizes = {"window": length, "limit": data.limit, "batch_size": self.batch_size}
        batches = PairBatches(tokenizer, data.read, loaded.module, loaded.name, **sizes)
        if self.sharing is not None:
            self.sharing.check(batches)
        return loaded, Input(batches, data.description, False, length, tokenizer, window)

    def _of_batches(self, data: Batches) -> tuple[LoadedModel, Input]:
        tokenizer = self._named(data.tokenizer)
        loaded = self.loaded()
        if data.continue_for is not None:
            check_generates(loaded.whole, loaded.name)
        tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
        return loaded, Input(data.batches, "batches", data.filled, data.window or DEFAULT_LENGTH, tokenizer)

    def _of_images(self, data: Images) -> tuple[LoadedModel, Input]:
        processor = data.processor
        if isinstance(processor, str | PathLike):
            processor = processor_of(processor, None, self.trust_remote_code)
        loaded = self.loaded()
        if processor is None:
            if not isinstance(self.model, Checkpoint):
                raise InputError("a model in memory needs a processor of images: massieu.Images(images, processor)")
            name = default_model() if self.model.name is None else self.model.name
            processor = processor_of(name, self.model.revision, self.trust_remote_code)
        loaded = reads_images(loaded, processor, data.captions)
        batches = ImageBatches(processor, data.pictures, data.captions, self.batch_size)
        return loaded, Input(batches, data.description, False, DEFAULT_LENGTH, getattr(processor, "tokenizer", None))

    def _with_tokenizer(self, data: Text | Pairs) -> tuple[LoadedModel, Any]:
        """The model that is to read text, once the text was looked at, and the tokenizer that was given."""
        tokenizer = self._named(data.tokenizer)
        if isinstance(self.model, Checkpoint):
            data.check()

        def check(announced: AnnouncedModel) -> None:
            _check_announced(announced, tokenizer, data.window, isinstance(data, Pairs))

        return self.loaded(tokenizer is None, check), tokenizer

    def _named(self, tokenizer: Any) -> Any:
        """The tokenizer, loaded where it is given by its name."""
        if isinstance(tokenizer, str | PathLike):
            return load_tokenizer(tokenizer, trust_remote_code=self.trust_remote_code)
        return tokenizer

    def _checked(self, loaded: LoadedModel, tokenizer: Any) -> Any:
        """The tokenizer that was given or else the model's own, once it is sure that the model reads what comes of it."""
        tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise _no_tokenizer(loaded.name, loaded.tokenizer_problem)
        check_tokenizer(tokenizer, loaded.module, loaded.name)
        return tokenizer


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
    most = config_positions(announced.config)
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
        f"{name} has no tokenizer{reason}, so it cannot read text; name one (--tokenizer, or from Python "
        "massieu.Text(paths, tokenizer)), or give batches of its inputs: massieu.probe(model, batches)"
    )


def _too_long(max_length: int, most: int, name: str) -> InputError:
    return InputError(f"a window of {max_length} tokens is more than the {most} positions that {name} has")


def _length(loaded: LoadedModel, max_length: int | None, generate: int | None) -> tuple[int, str | None]:
    """Tokens in a window, and in a sentence why they are fewer than the default.

    Raises:
        InputError: more were asked for than the model has positions.
    """
    most = max_positions(loaded.module)
    if max_length is not None:
        if most is not None and max_length > most:
            raise _too_long(max_length, most, loaded.name)
        return max_length, None
    reason = "the model has no more positions"
    if generate is not None and (positions := max_table_positions(loaded.module)) is not None:
        most = max(positions - generate + 1, 1)
        reason += " beside those of the new tokens"
    if most is None or most >= DEFAULT_LENGTH:
        return DEFAULT_LENGTH, None
    return most, f"windows have {most} tokens in place of the default {DEFAULT_LENGTH}: {reason}"
