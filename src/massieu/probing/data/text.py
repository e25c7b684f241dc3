"""From documents to batches: documents are tokenised while they are read, and cut into windows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from massieu.errors import InputError, require_extra
from massieu.probing.data.documents import Document, pieces
from massieu.probing.data.text_tables import Conversation
from massieu.probing.model.checkpoint import counted, sentence

UNKNOWN_SHARE = 0.05
"""Above this share of unknown tokens a run warns."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens for a model.

    Attributes:
        inputs: ``input_ids`` and ``attention_mask`` (0 where a row is padded), each (B, L): the arguments of the model's
            forward.
        special: The tokenizer's special tokens (CLS, SEP, BOS, EOS, …), but not the unknown token, which stands for text.
        names: For each row, the name of the document in which it starts.
        target_special: Special tokens of ``decoder_input_ids``; None for batches without them.
    """

    inputs: dict[str, Tensor]
    special: Bool[Tensor, "B L"] | None
    names: tuple[str, ...]
    target_special: Bool[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class TextReport:
    """The text that was read so far, in numbers.

    Attributes:
        documents: Documents from which at least one token was taken.
        tokens: Tokens in the rows, with special tokens, without padding.
        windows: Rows.
        dropped: One sentence about text that is not in the rows; None when nothing was left out.
        words: Tokens in the rows that are not special: those that stand for text.
        unknown: How many of these are the tokenizer's unknown token; None for tokenizers without one, such as byte-level ones.
    """

    documents: int = 0
    tokens: int = 0
    windows: int = 0
    dropped: str | None = None
    words: int = 0
    unknown: int | None = None

    @property
    def unknown_share(self) -> float | None:
        """Share of the text's tokens that are unknown ones."""
        return None if self.unknown is None else self.unknown / max(self.words, 1)

    def many_unknown(self) -> str | None:
        """A warning if much of the text is unknown to the tokenizer."""
        if self.unknown is None or not self.unknown_share or self.unknown_share <= UNKNOWN_SHARE:
            return None
        return (
            f"{100 * self.unknown_share:.3g} % of the text's tokens ({self.unknown:,} of {self.words:,}) are unknown to the "
            "tokenizer, so what the model read there is not the text; is it the model's own tokenizer, and its language?"
        )


@dataclass(frozen=True)
class _Row:
    """One row of tokens.

    Attributes:
        special: which of the tokens are special.
        name: of the document in which the row starts.
        documents: how many documents have begun by the end of the row.
    """

    ids: list[int]
    special: list[bool]
    name: str
    documents: int


class _StreamToken(NamedTuple):
    """A token in the stream of all documents, with the number and the name of its document."""

    id: int
    document: int
    name: str


@dataclass
class _LeftOut:
    """Tokens that were read and are in no row.

    Attributes:
        tail: tokens at the end of the text that do not fill a window.
        cut: tokens of documents beyond the length of a row, in ``cut_documents`` documents.
    """

    tail: int = 0
    cut: int = 0
    cut_documents: int = 0

    def sentence(self, window: int, stopped_after: int | None) -> str | None:
        """What is left out, for the reader of a report; None for nothing.

        Args:
            stopped_after: tokens after which reading stopped at the limit; None if it did not.
        """
        parts = []
        if self.tail:
            parts.append(f"the last {counted(self.tail, 'token')}, too few to fill a window, were left out")
        if self.cut:
            documents = counted(self.cut_documents, "document")
            parts.append(f"{counted(self.cut, 'token')} of {documents}, beyond a length of {window}, were left out")
        if stopped_after is not None:
            parts.append(f"text after the first {counted(stopped_after, 'token')} was not read (the limit)")
        return "; ".join(parts) or None


class TextBatches:
    """Cuts documents into batches of token windows, while they are read: memory does not grow with the text.

    To fill windows, the tokens of all documents form one stream, in which the tokenizer's EOS (or else SEP) token, if it has
    one, separates documents. The stream is cut into full windows, each with the tokenizer's own special tokens around it. A
    tail that does not fill a window is left out, unless it is all there is. Without filled windows, a row is one document,
    cut at ``window`` tokens and padded to the longest row of its batch.

    A row begins with the tokens that the tokenizer puts before a text: its BOS token if it is set to (Llama's is, GPT-2's and
    SmolLM2's are not), unless ``bos`` decides otherwise.

    Documents longer than 65,536 characters are tokenised in pieces that end at a space. This shows only with a SentencePiece
    tokenizer that puts a space before any text: one token at the beginning of a piece may differ.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        documents: The documents, or a function that returns them anew; with a function or a list, the batches can be
            iterated over again.
        window: Tokens in a row, special ones included.
        limit: Stop with the row that reaches this many tokens.
        batch_size: Rows in a batch; the last batch may have fewer.
        fill_windows: Whether rows are windows of the stream; False gives each document its row.
        bos: Whether rows begin with the BOS token; None leaves it to the tokenizer.

    Raises:
        InputError: ``bos`` is True, and the tokenizer has no BOS token.

    Iterating raises:
        InputError: there is no token in the text, or ``window`` leaves no room beside the special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        documents: Iterable[Document] | Callable[[], Iterable[Document]],
        *,
        window: int,
        limit: int | None = None,
        batch_size: int = 8,
        fill_windows: bool = True,
        bos: bool | None = None,
    ) -> None:
        if bos and tokenizer.bos_token_id is None:
            raise InputError(f"bos=True needs a BOS token, and {type(tokenizer).__name__} has none")
        self._tokenizer = tokenizer
        self._documents = documents
        self._length = window
        self._limit = limit
        self._batch_size = batch_size
        self._fill_windows = fill_windows
        self._bos = bos
        self._conversations: bool | None = None  # whether the text is conversations; known from the first document on
        self._special = special_ids(tokenizer)
        unknown: int | None = tokenizer.unk_token_id
        self._unknown = None if unknown in self._special else unknown  # GPT-2's marks an end, and stands for no word
        self._around: tuple[list[int], list[int]] | None = None
        self._report = TextReport()

    @property
    def report(self) -> TextReport:
        """What the latest iteration has read; `TextReport.dropped` is known after its last batch."""
        return self._report

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """Special tokens at the beginning and the end of a row; empty before the first row."""
        return ([], []) if self._around is None else self._around

    def bos_sentence(self) -> str | None:
        """Whether rows begin with the BOS token, and who decided it; None before the first row, or without such a token."""
        if self._conversations:
            return "conversations are written by the tokenizer's chat template, which puts their special tokens itself"
        identifier = self._tokenizer.bos_token_id
        if identifier is None or self._around is None:
            return None
        token = self._tokenizer.bos_token
        begins = identifier in self._around[0]
        if self._bos is not None:
            return f"rows begin {'with' if begins else 'without'} the BOS token {token} (bos={self._bos})"
        if begins:
            return f"rows begin with the BOS token {token}, which the tokenizer adds"
        return f"rows begin without the BOS token {token}, which the tokenizer does not add (bos=True adds it)"

    def __iter__(self) -> Iterator[Batch]:
        self._report = TextReport(unknown=None if self._unknown is None else 0)
        left_out = _LeftOut()
        stopped_after: int | None = None
        batch: list[_Row] = []
        for row in self._filled_windows(left_out) if self._fill_windows else self._document_rows(left_out):
            # A full batch is given only once another row follows, so that the report is complete with the last batch.
            if len(batch) == self._batch_size:
                yield self._batch(batch)
                batch = []
            batch.append(row)
            self._report = self._counted(self._report, row)
            if self._limit is not None and self._report.tokens >= self._limit:
                stopped_after = self._report.tokens
                break
        if not batch:
            raise InputError("the text is empty: there is no token in it")
        self._report = replace(self._report, dropped=left_out.sentence(self._length, stopped_after))
        yield self._batch(batch)

    def _counted(self, report: TextReport, row: _Row) -> TextReport:
        """The report with one row more."""
        unknown = None
        if self._unknown is not None:
            unknown = (report.unknown or 0) + row.ids.count(self._unknown)
        return TextReport(
            documents=row.documents,
            tokens=report.tokens + len(row.ids),
            windows=report.windows + 1,
            words=report.words + len(row.ids) - sum(row.special),
            unknown=unknown,
        )

    def _filled_windows(self, left_out: _LeftOut) -> Iterator[_Row]:
        """Full windows of the stream of all documents' tokens."""
        stream: list[_StreamToken] = []
        separator = self._separator()
        latest: tuple[int, str] | None = None  # number and name of the document before
        any_filled = False
        for number, name, ids in self._encoded():
            if latest is not None and latest != (number, name) and separator is not None:
                stream.append(_StreamToken(separator, *latest))
            latest = (number, name)
            stream += [_StreamToken(token, number, name) for token in ids]
            length = self._length_for_text()
            filled = len(stream) - len(stream) % length
            for start in range(0, filled, length):
                yield self._window(stream[start : start + length])
            del stream[:filled]
            any_filled = any_filled or filled > 0
        if stream and not any_filled:
            yield self._window(stream)
        else:
            left_out.tail = len(stream)

    def _window(self, tokens: list[_StreamToken]) -> _Row:
        return self._row([token.id for token in tokens], tokens[0].name, tokens[-1].document)

    def _document_rows(self, left_out: _LeftOut) -> Iterator[_Row]:
        """A row for each document."""
        for (number, name), pieces_of_document in groupby(self._encoded(), key=itemgetter(0, 1)):
            row_ids: list[int] = []
            cut = 0
            for _, _, ids in pieces_of_document:
                fitting = ids[: self._length_for_text() - len(row_ids)]
                row_ids += fitting
                cut += len(ids) - len(fitting)
                if cut and self._is_last(len(row_ids)):
                    break  # the rest is not read, however long the document is
            left_out.cut += cut
            left_out.cut_documents += cut > 0
            yield self._row(row_ids, name, number)

    def _is_last(self, length: int) -> bool:
        """Whether a row with ``length`` tokens of text reaches the limit."""
        assert self._around is not None
        tokens = self._report.tokens + length + sum(map(len, self._around))
        return self._limit is not None and tokens >= self._limit

    def _encoded(self) -> Iterator[tuple[int, str, list[int]]]:
        """Number and name of a document, and tokens of a piece of it; documents without a token are not counted."""
        number = 0
        is_counted = False  # whether the current document has a number yet
        for document in self._documents() if callable(self._documents) else self._documents:
            is_counted = is_counted and document.continues
            text = document.text
            is_conversation = isinstance(text, Conversation)
            if isinstance(text, Conversation):
                text = by_template(self._tokenizer, text.messages)
            for piece in pieces(text):
                ids = _encode(self._tokenizer, piece)
                if not ids:
                    continue
                self._check_kind(is_conversation)
                if self._around is None:
                    # A template writes all special tokens itself.
                    self._around = ([], []) if is_conversation else _around(self._tokenizer, piece, ids, self._bos)
                if not is_counted:
                    number += 1
                    is_counted = True
                yield number, document.name, ids

    def _check_kind(self, is_conversation: bool) -> None:
        """Check that a document fits those before it.

        Raises:
            InputError: conversations and other texts are mixed, or ``bos`` is given with conversations.
        """
        if self._conversations is None:
            self._conversations = is_conversation
        if self._conversations != is_conversation:
            raise InputError("the text mixes conversations with other texts; read them one after the other")
        if is_conversation and self._bos is not None:
            raise InputError("bos is for plain text; a chat template puts the special tokens of conversations itself")

    def _length_for_text(self) -> int:
        """Number of tokens of text for which a row has room."""
        assert self._around is not None
        special = sum(map(len, self._around))
        if self._length <= special:
            raise InputError(
                f"a window of {self._length} tokens leaves no room for text beside the tokenizer's {special} special tokens"
            )
        return self._length - special

    def _separator(self) -> int | None:
        """The token between two documents in the stream; None if the tokenizer has none."""
        eos = self._tokenizer.eos_token_id
        return self._tokenizer.sep_token_id if eos is None else eos

    def _row(self, ids: list[int], name: str, documents: int) -> _Row:
        assert self._around is not None
        before, after = self._around
        special = [True] * len(before) + [token in self._special for token in ids] + [True] * len(after)
        return _Row([*before, *ids, *after], special, name, documents)

    def _batch(self, rows: list[_Row]) -> Batch:
        padding = padding_token(self._tokenizer)
        ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True, padding_value=padding)
        real = pad_sequence([torch.ones(len(row.ids), dtype=torch.long) for row in rows], batch_first=True)
        special = pad_sequence([torch.tensor(row.special) for row in rows], batch_first=True)
        return Batch({"input_ids": ids, "attention_mask": real}, special, tuple(row.name for row in rows))


# --- tokenizers ------------------------------------------------------------------------------------------------------


def token_strings(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Readable tokens, one string for each.

    A space before a word is ``▁``. The bytes of byte-level vocabularies are decoded to characters; bytes that are only a part
    of a character are written as ``<0xE4>``. WordPiece's ``##`` stays.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in str(getattr(backend, "decoder", None)) or hasattr(tokenizer, "byte_decoder")
    added = tokenizer.added_tokens_decoder  # these are written as they are, in byte-level vocabularies too

    def readable(identifier: int, token: str | None) -> str:
        if token is None:
            return f"<{identifier}>"
        if byte_level and identifier not in added:
            return _decoded(token)
        return token

    return [readable(identifier, token) for identifier, token in zip(ids, tokens, strict=True)]


def _decoded(token: str) -> str:
    """The characters of a byte-level token."""
    if any(character not in _byte_of_character() for character in token):
        return token
    token_bytes = bytes(_byte_of_character()[character] for character in token)
    # A byte that is no character becomes a lone surrogate, U+DC00 plus the byte.
    decoded = "".join(
        f"<0x{ord(character) - 0xDC00:02X}>" if "\udc80" <= character <= "\udcff" else character
        for character in token_bytes.decode("utf-8", "surrogateescape")
    )
    return "▁" + decoded[1:] if decoded.startswith(" ") else decoded


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte for each character of a byte-level token: printable bytes are themselves, others stand from U+0100 on."""
    table = require_extra("transformers.convert_slow_tokenizer", "probe").bytes_to_unicode()
    return {character: byte for byte, character in table.items()}


def _encode(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    # Windows are cut here, not by the tokenizer: `verbose` would warn that a text is longer than the model reads.
    off = ("truncation", "padding", "return_attention_mask", "return_token_type_ids", "verbose")
    return tokenizer(text, add_special_tokens=add_special_tokens, **dict.fromkeys(off, False))["input_ids"]


def by_template(tokenizer: Any, messages: Any, *, answer_follows: bool = False) -> str:
    """A conversation as the tokenizer's chat template writes it.

    Args:
        answer_follows: whether it ends with what the template writes before an answer.

    Raises:
        InputError: the tokenizer has no template, or the template does not take these messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            f"the text holds conversations, and {type(tokenizer).__name__} has no chat template to write them with; give them "
            "as plain text, or a tokenizer that has one"
        )
    template_error = require_extra("jinja2", "probe").TemplateError
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    except template_error as error:
        raise InputError(f"the tokenizer's chat template does not take these messages: {sentence(error)}") from error


def _around(tokenizer: Any, text: str, ids: list[int], bos: bool | None) -> tuple[list[int], list[int]]:
    """Special tokens before and after a row: those around a text's own tokens in its full encoding.

    Args:
        ids: The text's own tokens.
        bos: Whether the BOS token is among those before; None leaves it to the tokenizer.
    """
    full = _encode(tokenizer, text, add_special_tokens=True)
    starts = range(len(full) - len(ids) + 1)
    start = next((start for start in starts if full[start : start + len(ids)] == ids), None)
    if start is None:
        raise InputError(
            f"{type(tokenizer).__name__} cannot be used: it splits text differently when it adds special tokens"
        )
    before = full[:start]
    after = full[start + len(ids) :]
    if bos is True and tokenizer.bos_token_id not in before:
        before = [tokenizer.bos_token_id, *before]
    if bos is False:
        before = [token for token in before if token != tokenizer.bos_token_id]
    return before, after


def padding_token(tokenizer: Any) -> int:
    """The token with which rows are padded."""
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(identifier for identifier in named if identifier is not None)


def special_ids(tokenizer: Any) -> set[int]:
    """The special tokens except the unknown one, which stands for text, unless it also marks a beginning or an end."""
    marks = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    return (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}) | {
        identifier for name in marks if (identifier := getattr(tokenizer, name)) is not None
    }
