"""From pairs of texts to batches: sources tokenised for the encoder, targets as the decoder reads them in training."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from massieu.errors import InputError
from massieu.probing.data.pairs import Pair, Side
from massieu.probing.data.text import Batch, TextReport, padding_token, special_ids
from massieu.probing.model.checkpoint import counted
from massieu.probing.model.signature import forward_signature
from massieu.probing.model.target_labels import shifted_labels

_TOKENIZER_OPTIONS = {
    "padding": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "return_special_tokens_mask": True,
    "verbose": False,
}


@dataclass(frozen=True)
class _Side:
    """Tokens of one side of a pair.

    Attributes:
        special: which of them are special tokens.
        cut: number of tokens beyond the length of a row, which are left out.
    """

    ids: list[int]
    special: list[bool]
    cut: int


@dataclass(frozen=True)
class _Row:
    """One pair as tokens."""

    name: str
    source: _Side
    target: _Side

    @property
    def sides(self) -> tuple[_Side, _Side]:
        return self.source, self.target


def check_pair_configuration(config: Any, name: str) -> None:
    """Check a model's configuration before its weights are read.

    Raises:
        InputError: a model of this configuration has no decoder beside an encoder.
    """
    if not getattr(config, "is_encoder_decoder", False):
        raise _no_pairs(name)


def _no_pairs(name: str) -> InputError:
    return InputError(
        f"pairs of texts need an encoder–decoder that reads text on both sides, and {name} is none; give massieu.Text, or name "
        "one column of text (--column)"
    )


def check_pair_model(model: nn.Module, tokenizer: Any, name: str) -> None:
    """Check that a model has an encoder that reads tokens and a decoder, and that the target's language is known.

    Raises:
        InputError: it has not; its decoder's first token is not known; the tokenizer would mark the target as text in
            the source's language.
    """
    parameters = forward_signature(model).parameters
    has_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not has_decoder or not {"input_ids", "decoder_input_ids"} <= set(parameters):
        raise _no_pairs(name)
    decoder_tokens(model, [0, 1], name)
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise InputError(
            f"the tokenizer of {name} marks each text with its language, and the target's is not set: it would be marked as "
            "the source's; give the tokenizer from Python with its src_lang and tgt_lang set"
        )


def decoder_tokens(model: Any, labels: list[int], name: str) -> list[int]:
    """The decoder's input tokens when it predicts these labels.

    Raises:
        InputError: as `shifted_labels`.
    """
    return shifted_labels(model, torch.tensor([labels]), name)[0].tolist()


class PairBatches:
    """Batches of pairs, one in a row, while they are read: memory does not grow with the text.

    Each side is tokenised separately, the target as ``text_target``, with the tokenizer's own special tokens. The tokenizer
    cuts it at ``window`` tokens, and it is padded at the end to the longest of its batch. A pair without text on one side is
    left out and counted.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        pairs: A function that reads the pairs, from the beginning at each call.
        model: An encoder–decoder, whose shift of labels produces the decoder's tokens.
        window: Tokens of a side, special ones included.
        limit: Stop with the pair that reaches this many tokens of both sides together.

    Iterating raises:
        InputError: there is no pair in the text, or ``window`` leaves no room beside the special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        pairs: Callable[[], Iterable[Pair]],
        model: nn.Module,
        name: str,
        *,
        window: int,
        limit: int | None = None,
        batch_size: int = 8,
    ) -> None:
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._model = model
        self._name = name
        self._length = window
        self._limit = limit
        self._batch_size = batch_size
        self._special = special_ids(tokenizer)
        unknown: int | None = tokenizer.unk_token_id
        self._unknown = None if unknown in self._special else unknown
        self._report = TextReport()

    @property
    def report(self) -> TextReport:
        """What the latest iteration has read; `TextReport.dropped` is known after its last batch."""
        return self._report

    def __iter__(self) -> Iterator[Batch]:
        self._report = report = TextReport(unknown=None if self._unknown is None else 0)
        left_out = _LeftOut()
        stopped_after: int | None = None
        batch: list[_Row] = []
        for row in self._rows(left_out):
            if len(batch) == self._batch_size:
                yield self._batch(batch)
                batch = []
            batch.append(row)
            self._report = report = self._counted(report, row)
            if self._limit is not None and report.tokens >= self._limit:
                stopped_after = report.tokens
                break
        if not batch:
            raise InputError("the text is empty: there is no pair with a source and a target in it")
        self._report = replace(report, dropped=left_out.sentence(self._length, stopped_after))
        yield self._batch(batch)

    def _counted(self, report: TextReport, row: _Row) -> TextReport:
        """The report with one row more."""
        tokens = sum(len(side.ids) for side in row.sides)
        words = tokens - sum(sum(side.special) for side in row.sides)
        unknown = report.unknown
        if unknown is not None:
            unknown += sum(side.ids.count(self._unknown) for side in row.sides)  # type: ignore[arg-type]
        return TextReport(
            documents=report.documents + 1,
            tokens=report.tokens + tokens,
            windows=report.windows + 1,
            words=report.words + words,
            unknown=unknown,
        )

    def _rows(self, left_out: "_LeftOut") -> Iterator[_Row]:
        for pair in self._pairs():
            source = labels = None
            if pair.whole:
                source = self._encoded("source", pair.source or "", pair.name)
                labels = self._encoded("target", pair.target or "", pair.name)
            if source is None or labels is None:
                left_out.empty += 1
                continue
            left_out.add(source.cut, labels.cut)
            yield _Row(pair.name, source, self._target(labels))

    def _target(self, labels: _Side) -> _Side:
        """The decoder's input; its first token is special, even if it is the padding token."""
        ids = decoder_tokens(self._model, labels.ids, self._name)
        special_here = {token for token, special in zip(labels.ids, labels.special, strict=True) if special}
        special_here |= self._special
        return _Side(ids, [place == 0 or token in special_here for place, token in enumerate(ids)], labels.cut)

    def _encoded(self, side: Side, text: str, name: str) -> _Side | None:
        """One side's tokens; None if the text has no token.

        The tokenizer cuts them, so that its special tokens stay.
        """
        encoding = self._encode(side, text)
        full_length = len(encoding["input_ids"])
        if full_length > self._length:
            encoding = self._encode(side, text, truncation=True, max_length=self._length)
        ids: list[int] = encoding["input_ids"]
        special = [
            token in self._special or bool(mark)
            for token, mark in zip(ids, encoding["special_tokens_mask"], strict=True)
        ]
        if full_length > len(ids) and all(special):
            raise InputError(
                f"a window of {self._length} tokens leaves no room for the {side} of {name} beside the tokenizer's "
                f"{len(ids)} special tokens"
            )
        return None if all(special) else _Side(ids, special, full_length - len(ids))

    def _encode(self, side: Side, text: str, **truncation: Any) -> Any:
        argument = {"text": text} if side == "source" else {"text_target": text}
        return self._tokenizer(**argument, **_TOKENIZER_OPTIONS, **({"truncation": False} | truncation))

    def _batch(self, rows: list[_Row]) -> Batch:
        padding = padding_token(self._tokenizer)
        source = _Padded.of([row.source for row in rows], padding)
        target = _Padded.of([row.target for row in rows], padding)
        inputs = {"input_ids": source.ids, "attention_mask": source.real}
        inputs |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real}
        return Batch(inputs, source.special, tuple(row.name for row in rows), target.special)


@dataclass(frozen=True, eq=False)
class _Padded:
    """One side of the rows of a batch, padded at the end to one length."""

    ids: Tensor
    real: Tensor
    special: Tensor

    @classmethod
    def of(cls, sides: list[_Side], padding: int) -> "_Padded":
        """Pad one side of some rows."""
        ids = pad_sequence([torch.tensor(side.ids) for side in sides], batch_first=True, padding_value=padding)
        # Real tokens are counted, not compared with the padding token, because that may be a start token.
        real = pad_sequence([torch.ones(len(side.ids), dtype=torch.long) for side in sides], batch_first=True)
        special = pad_sequence([torch.tensor(side.special) for side in sides], batch_first=True)
        return cls(ids, real, special)


@dataclass
class _LeftOut:
    """Text that was read and is in no row.

    Attributes:
        empty: pairs without text on one side.
        pairs: pairs that were cut, by so many tokens of the ``source`` and the ``target``.
    """

    empty: int = 0
    pairs: int = 0
    source: int = 0
    target: int = 0

    def add(self, source: int, target: int) -> None:
        """Count a pair by the number of tokens that were cut from its sides."""
        self.source += source
        self.target += target
        self.pairs += bool(source or target)

    def sentence(self, window: int, stopped_after: int | None) -> str | None:
        """What is left out, for the reader of a report; None for nothing.

        Args:
            stopped_after: tokens after which reading stopped at the limit; None if it did not.
        """
        parts = []
        if self.pairs:
            parts.append(
                f"{counted(self.source, 'source token')} and {counted(self.target, 'target token')} of "
                f"{counted(self.pairs, 'pair')}, beyond a length of {window}, were left out"
            )
        if self.empty:
            verb = "was" if self.empty == 1 else "were"
            parts.append(f"{counted(self.empty, 'row')} without a source or a target {verb} left out")
        if stopped_after is not None:
            parts.append(f"text after the first {counted(stopped_after, 'token')} was not read (the limit)")
        return "; ".join(parts) or None
