"""What the probes of one comparison share: the tokenizer, so that all read the same tokens, and the re-initialised control."""

import json
from typing import Any

from torch import nn

from massieu.errors import InputError
from massieu.probing.data.pair_batches import PairBatches
from massieu.probing.data.text import TextBatches
from massieu.probing.data.text_digest import TextDigest
from massieu.probing.model.unwrap import is_pretrained
from massieu.probing.reading.options import Options
from massieu.probing.session.draws import Draws

_OF_THE_FILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""What a configuration says of the checkpoint alone."""


class Sharing:
    """Of the first probe: its tokenizer and its re-initialised control, which the ones after it take over.

    The control of two models of one shape is the same copy, drawn from one seed and read on the same windows.
    """

    def __init__(self) -> None:
        self._text: str | None = None
        self._text_source = ""
        self._tokenizer: tuple[Any, str] | None = None
        self._draws: tuple[tuple[Any, ...], Draws] | None = None

    def expect_text(self, digest: str | None, source: str) -> None:
        """Require the rows that are read from now on to have the digest of a stored result's text.

        Args:
            digest: None where the result has none, and nothing is checked.
            source: the result's name, for messages.
        """
        self._text = digest
        self._text_source = source

    def tokenizer(self, own: Any, name: str) -> Any:
        """The first probe's tokenizer, once it was checked that its tokens mean the same to this model.

        Raises:
            InputError: the model's own has other tokens, or gives them other numbers.
        """
        if self._tokenizer is None:
            self._tokenizer = own, name
        shared, first = self._tokenizer
        own_vocabulary = own.get_vocab()
        shared_vocabulary = shared.get_vocab()
        # One may have added tokens: it is enough that all tokens of the smaller vocabulary have the same numbers.
        small, large = sorted((own_vocabulary, shared_vocabulary), key=len)
        if any(large.get(token) != identifier for token, identifier in small.items()):
            raise InputError(
                f"{first} and {name} have different tokenizers ({len(shared_vocabulary):,} and {len(own_vocabulary):,} "
                "tokens), so no text is the same windows to both; models are compared that read the same tokens"
            )
        return shared

    def check(self, batches: TextBatches | PairBatches) -> None:
        """Check that these batches are the rows of the expected text, if one is expected.

        Raises:
            InputError: the rows are others.
        """
        if self._text is None:
            return
        digest = TextDigest()
        for batch in batches:
            digest.add(batch.inputs, len(batch.names))
        if digest.text() != self._text:
            raise InputError(
                f"the text is not what {self._text_source} was read on; give the same text, window, limit and fill_windows"
            )

    def draws(self, model: nn.Module, options: Options) -> Draws | None:
        """The control of a model of the same shape that was read with the same options."""
        if self._draws is None:
            return None
        shape, draws = self._draws
        return draws if shape == _shape(model, options) else None

    def keep_draws(self, model: nn.Module, options: Options, draws: Draws | None) -> None:
        """Keep a control that has read its windows, for the probes after this one."""
        shape = _shape(model, options)
        if draws is not None and shape is not None:
            self._draws = shape, draws


def _shape(model: nn.Module, options: Options) -> tuple[Any, ...] | None:
    """All that a freshly built copy depends on; None for a module that is not built from a configuration."""
    if not is_pretrained(model):
        return None
    config: Any = model.config
    settings = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_FILE}
    weights = [(name, tuple(weight.shape), weight.dtype, weight.device) for name, weight in model.state_dict().items()]
    return type(model), json.dumps(settings, sort_keys=True, default=str), weights, options
