"""From pairs of texts to batches: the source tokenised for the encoder, the target as the decoder reads it in training."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from massieu.errors import InputError
from massieu.probing.data.pairs import SIDES, Pair, Side
from massieu.probing.data.text import Batch, TextReport, padding_token, special_ids
from massieu.probing.model.checkpoint import counted
from massieu.probing.model.target_labels import shifted_labels

_ASKED = {"padding": False, "return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
_MARKED = {"return_special_tokens_mask": True}


@dataclass(frozen=True)
class _Side:
    """Tokens of one side of a pair."""

    ids: list[int]
    special: list[bool]
    cut: int


@dataclass(frozen=True)
class _Row:
    name: str
    source: _Side
    target: _Side

    @property
    def sides(self) -> tuple[_Side, _Side]:
        return self.source, self.target


def check_pair_configuration(config: Any, name: str) -> None:
    """Raises:
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
    """That a model has an encoder that reads tokens, and a decoder beside it, and that the target's language is known.

    Raises:
        InputError: it has not; its decoder's first token is not known; the tokenizer would mark the target as text in
            the source's language.
    """
    taken = inspect.signature(model.forward).parameters
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not decodes or not {"input_ids", "decoder_input_ids"} <= set(taken):
        raise _no_pairs(name)
    decoder_tokens(model, [0, 1], name)
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise InputError(
            f"the tokenizer of {name} marks each text with its language, and the target's is not set: it would be marked as "
            "the source's; give the tokenizer from Python with its src_lang and tgt_lang set"
        )


def decoder_tokens(model: Any, labels: list[int], name: str) -> list[int]:
    """What the decoder reads to predict these labels.

    Raises:
        InputError: as `shifted_labels`.
    """
    return shifted_labels(model, torch.tensor([labels]), name)[0].tolist()


class PairBatches:
    """Batches of pairs, one in a row, while they are read: memory does not grow with the text.

    Each side is tokenised by itself, the target as ``text_target``, with the tokenizer's own special tokens. It is cut at
    ``window`` tokens by the tokenizer, and padded at the end to the longest of its batch. A pair without text on one
    side is left out and counted.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        pairs: A function that reads the pairs anew.
        model: An encoder–decoder, whose shift of labels makes the decoder's tokens.
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
        self._tokenizer, self._pairs, self._model, self._name = tokenizer, pairs, model, name
        self._length, self._limit, self._batch_size = window, limit, batch_size
        self._special = special_ids(tokenizer)
        unknown: int | None = tokenizer.unk_token_id
        self._unknown = None if unknown in self._special else unknown
        self._report = TextReport()

    @property
    def report(self) -> TextReport:
        """What the latest iteration has read; what was left out is said after its last batch."""
        return self._report

    def __iter__(self) -> Iterator[Batch]:
        self._report = report = TextReport(unknown=None if self._unknown is None else 0)
        left_out, stopped_after = _LeftOut(), None
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
        tokens = sum(len(side.ids) for side in row.sides)
        words = tokens - sum(sum(side.special) for side in row.sides)
        unknown = report.unknown
        if unknown is not None:
            unknown += sum(side.ids.count(self._unknown) for side in row.sides)  # type: ignore[arg-type]
        return TextReport(
            report.documents + 1, report.tokens + tokens, report.windows + 1, None, report.words + words, unknown
        )

    def _rows(self, left_out: "_LeftOut") -> Iterator[_Row]:
        for pair in self._pairs():
            sides = None
            if pair.whole:
                sides = [self._encoded(side, getattr(pair, side), pair.name) for side in SIDES]
            if sides is None or not all(side is not None for side in sides):
                left_out.empty += 1
                continue
            source, labels = sides
            assert source is not None and labels is not None
            left_out.add(source.cut, labels.cut)
            yield _Row(pair.name, source, self._target(labels))

    def _target(self, labels: _Side) -> _Side:
        """What the decoder reads: its first token is a special one, the padding token too where that is its start."""
        ids = decoder_tokens(self._model, labels.ids, self._name)
        marks = {i for i, special in zip(labels.ids, labels.special, strict=True) if special} | self._special
        return _Side(ids, [not place or i in marks for place, i in enumerate(ids)], labels.cut)

    def _encoded(self, side: Side, text: str, name: str) -> _Side | None:
        """One side's tokens, cut by the tokenizer, which keeps its special tokens; None where the text has no token."""
        given = self._tokens(side, text)
        whole = given["input_ids"]
        if len(whole) > self._length:
            given = self._tokens(side, text, truncation=True, max_length=self._length)
        ids: list[int] = given["input_ids"]
        special = [i in self._special or bool(mark) for i, mark in zip(ids, given["special_tokens_mask"], strict=True)]
        if len(whole) > len(ids) and all(special):
            raise InputError(
                f"a window of {self._length} tokens leaves no room for the {side} of {name} beside the tokenizer's "
                f"{len(ids)} special tokens"
            )
        return None if all(special) else _Side(ids, special, len(whole) - len(ids))

    def _tokens(self, side: Side, text: str, **cut: Any) -> Any:
        argument = {"text": text} if side == "source" else {"text_target": text}
        return self._tokenizer(**argument, **_ASKED, **_MARKED, **({"truncation": False} | cut))

    def _batch(self, rows: list[_Row]) -> Batch:
        padding = padding_token(self._tokenizer)
        source, target = (_Padded.of([row.sides[side] for row in rows], padding) for side in (0, 1))
        inputs = {"input_ids": source.ids, "attention_mask": source.real}
        inputs |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real}
        return Batch(inputs, source.special, tuple(row.name for row in rows), target.special)


@dataclass(frozen=True, eq=False)
class _Padded:
    ids: Tensor
    real: Tensor
    special: Tensor

    @classmethod
    def of(cls, sides: list[_Side], padding: int) -> "_Padded":
        """Rows of one length; what is real is known by counting, because a start token may be the padding token."""
        ids = pad_sequence([torch.tensor(side.ids) for side in sides], batch_first=True, padding_value=padding)
        real = pad_sequence([torch.ones(len(side.ids), dtype=torch.long) for side in sides], batch_first=True)
        return cls(ids, real, pad_sequence([torch.tensor(side.special) for side in sides], batch_first=True))


@dataclass
class _LeftOut:
    """What was read and put in no row."""

    empty: int = 0
    pairs: int = 0
    source: int = 0
    target: int = 0

    def add(self, source: int, target: int) -> None:
        """Count tokens that a pair was cut by."""
        self.source, self.target = self.source + source, self.target + target
        self.pairs += bool(source or target)

    def sentence(self, window: int, stopped_after: int | None) -> str | None:
        """What is left out, for the reader of a report."""
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
