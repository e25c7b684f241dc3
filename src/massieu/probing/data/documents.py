"""Sources of text: files, folders and standard input, read piece by piece and never held as a whole."""

import bz2
import codecs
import gzip
import io
import lzma
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from massieu.errors import InputError
from massieu.probing.data.own_files import is_own_file, own_files
from massieu.probing.data.text_tables import (
    Conversation,
    Rows,
    check_characters,
    dataset_rows,
    is_dataset,
    not_utf8,
    read_json,
    read_jsonl,
    read_parquet,
    read_separated,
)
from massieu.storage.record_lines import is_record_of_monitor

STANDARD_INPUT = "-"
PIECE = 1 << 16
"""Characters tokenised at a time; they bound the memory that a long document takes."""
_BLOCK = 1 << 16
"""Bytes read at a time."""
_CHECKED = 1 << 20
"""Characters that are always checked before a run."""
_LONGEST_TOKEN = 32
"""Characters of a token: more than its mean over any text."""
_PAIRS_HINT = "; pairs of texts are massieu.Pairs(strings=…)"
_SPACE_IN_TEXT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class Document:
    """A text to read, or the next piece of the text before it, if ``continues`` is true."""

    name: str
    text: str
    continues: bool = False


def read_documents(
    sources: Sequence[str | Path], *, column: str | None = None, stdin: TextIO | None = None
) -> Iterator[Document]:
    """Read files, folders and standard input, lazily.

    A ``.txt``, ``.md``, ``.rst`` or ``.py`` file is one document (a long one comes in pieces). A ``.jsonl`` file holds one
    document in each line, a ``.csv``, ``.tsv`` or ``.parquet`` file one in each row, a ``.json`` file a list of documents or
    columns. All but ``.parquet`` may be packed (``.gz``, ``.bz2``, ``.xz``). Only a ``.json`` file is held in memory as a
    whole.

    Folders are read recursively in alphabetical order, their files before their folders. Files of other kinds and names
    that begin with a dot are left out; so are ``.json``, ``.csv`` and ``.tsv`` files, unless a column is named. Files that
    massieu itself wrote are never read: results, comparisons, and records of training.

    Args:
        sources: Files and folders; ``"-"`` is standard input, plain text.
        column: Column, or field of JSON objects, that holds the text; None for "text".
        stdin: Read in place of ``sys.stdin``.

    Raises:
        InputError: as `check_sources`, here only when the error is reached; also standard input that is not UTF-8.
    """
    for source in sources:
        if str(source) == STANDARD_INPUT:
            yield from _in_pieces("standard input", _standard_input(_open_input() if stdin is None else stdin))
        else:
            for path in files_of(source, column):
                yield from _read(path, column)


def checked_characters(limit: int | None) -> float:
    """Number of characters to check before a run that reads ``limit`` tokens; without a limit, all of them.

    Tokens are far shorter than `_LONGEST_TOKEN` in nearly all text. If they are not, an error further on is found when it is
    reached.
    """
    return math.inf if limit is None else _CHECKED + _LONGEST_TOKEN * limit


def beginning(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """As many of the documents as ``limit`` tokens may need."""
    remaining = checked_characters(limit)
    for document in documents:
        yield document
        remaining -= len(document.text)
        if remaining <= 0:
            return


def check_sources(sources: Sequence[str | Path], *, column: str | None = None, limit: int | None = None) -> None:
    """Read everything but standard input once, so that bad input is found before any work is done.

    With a limit of tokens, only as much is read as these may need.

    Raises:
        InputError: no such file or folder; unknown kind of file; folder without text; no text inside; not UTF-8 (with
            the offset of the byte); a packed file that is broken; what is not JSON; a row with more or fewer fields than
            the first line; no such column, or one that does not hold text; standard input is closed.
    """
    if not sources:
        raise InputError("no text was given; name a file, a folder, or - for standard input")
    has_tables = False
    remaining = checked_characters(limit)
    for source in sources:
        if str(source) == STANDARD_INPUT:
            _open_input()
            continue
        files = files_of(source, column)
        has_tables = has_tables or any(kind_of_file(path) in OF_COLUMNS for path in files)
        # All of it is read up to the limit: an error may come last. A source behind the limit is not called empty.
        is_empty = remaining > 0
        for document in (document for path in files for document in _read(path, column)):
            if remaining <= 0:
                break
            remaining -= len(document.text)
            is_empty = is_empty and not document.text.strip()
        if is_empty:
            raise InputError(f"the text is empty: there is nothing to read in {source}")
    if column is not None and not has_tables:
        raise InputError(
            f"a column ({column!r}) was named, but there is no {' or '.join(OF_COLUMNS)} file among the text"
        )


def reference_documents() -> Iterator[Document]:
    """The English reference text about the Python language that every Python ships, one document per topic."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"pydoc topic {name}", topics[name])


def string_documents(texts: Sequence[str] | str) -> list[Document]:
    """Strings, or conversations as lists of messages, as documents.

    Raises:
        InputError: no text in them; something that is not a string; half of a surrogate pair.
    """
    items = [texts] if isinstance(texts, str) else list(texts)
    items = [Conversation.of(text) or text for text in items]
    for number, text in enumerate(items, 1):
        if not isinstance(text, str):
            hint = _PAIRS_HINT if isinstance(text, tuple | list) and len(text) == 2 else ""
            raise InputError(
                f"strings must be texts, or lists of messages with a role and a content, got {type(text).__name__} at place "
                f"{number}{hint}"
            )
        check_characters(text, f"the string at place {number} of strings")
    if not any(text.strip() for text in items):
        raise InputError("strings is empty: there is nothing to read in it")
    return [Document(f"string {number}", text) for number, text in enumerate(items, 1)]


def documents_of(texts: Any, column: str | None = None) -> tuple[str, Callable[[], Iterable[Document]]]:
    """A description of text in memory, and a function that reads it.

    Args:
        texts: A string, strings, or a ``Dataset`` or ``IterableDataset`` of the package `datasets`, read row by row.
        column: Column of a data set that holds the text; None for "text".

    Raises:
        InputError: as `string_documents`; a dictionary of data sets; no such column; a column for strings.
    """
    if is_dataset(texts):
        rows = dataset_rows(texts, column)
        return f"column {column or 'text'!r} of a data set", lambda: _numbered("data set", rows())
    if column is not None:
        raise InputError(f"a column ({column!r}) was named, but strings holds texts, which have none")
    strings = string_documents(texts)
    return "1 string" if len(strings) == 1 else f"{len(strings):,} strings", lambda: strings


def files_of(named: str | Path, column: str | None) -> list[Path]:
    """The files that a source names, in the order of reading."""
    source = Path(named)
    if not str(named):
        raise InputError("the name of a text is empty; name a file, a folder, or - for standard input")
    if not os.path.exists(named):  # unlike Path.exists, it takes any name, even one that is too long
        # A name of several words may be the text itself.
        hint = "; from Python, text itself is massieu.Text(strings=…)" if len(str(named).split()) > 1 else ""
        raise InputError(f"there is no text {shortened(str(named))}: no such file or folder{hint}")
    if source.is_dir():
        return _files_in(source, column)
    if is_own_file(source):
        raise InputError(f"{source} was written by massieu and is no text; name the text that is to be read")
    if kind_of_file(source) not in _KINDS:
        raise InputError(
            f"{source} is of an unknown kind; files that can be read end in {_READABLE}; "
            "and - reads plain text from standard input"
        )
    return [source]


def _files_in(source: Path, column: str | None) -> list[Path]:
    """Files of text in a folder and in those inside it.

    Raises:
        InputError: there is none.
    """
    candidates: list[Path] = []
    written_by_massieu = own_files(source.absolute().parent)  # the source may be a folder inside a result
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        written_by_massieu |= own_files(Path(folder))
        paths = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        candidates += [path for path in paths if kind_of_file(path) in _KINDS and path.is_file()]
    readable = [
        path for path in candidates if path.absolute() not in written_by_massieu and not is_record_of_monitor(path)
    ]
    files = [path for path in readable if column is not None or kind_of_file(path) not in _OFTEN_NO_TEXT]
    if readable and not files:
        kinds = " ".join(_OFTEN_NO_TEXT)
        raise InputError(f"the folder {source} holds only {kinds} files; name their column of text, or the files")
    if not files:
        exception = " other than what massieu has written" if candidates else ""
        raise InputError(f"the folder {source} holds no text{exception}; files that can be read end in {_READABLE}")
    return files


def shortened(text: str, length: int = 240) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= length else text[:length].rstrip() + " …"


def kind_of_file(path: Path) -> str:
    """A file's kind by its name: ``.csv`` for ``a.csv`` and ``a.csv.gz``, ``.gz`` for a packed file of unknown kind."""
    suffix = path.suffix.lower()
    if suffix not in _UNPACK:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in _PACKABLE else suffix


def _read(path: Path, column: str | None) -> Iterator[Document]:
    """The documents of one file."""
    kind = kind_of_file(path)
    name = str(path)
    if kind == PARQUET:
        with explained(path):
            yield from _numbered(name, read_parquet(path, name, column))
        return
    with opened(path) as stream:
        if kind in PLAIN:
            yield from _in_pieces(name, _decoded(stream, name))
        else:
            yield from _numbered(name, _TABLES[kind](stream, name, column))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked if it is packed."""
    unpack = _UNPACK.get(path.suffix.lower())
    with explained(path), path.open("rb") if unpack is None else unpack(path) as stream:
        yield stream


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, an error of the system in reading a file becomes an `InputError`."""
    name = str(path)
    is_packed = path.suffix.lower() in _UNPACK
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{name} cannot be unpacked: {error}") from error
    except OSError as error:
        if is_packed and error.errno is None:  # bz2 raises an OSError without a number for other data
            raise InputError(f"{name} cannot be unpacked: {error}") from error
        raise InputError(f"cannot read {name}: {error.strerror or error}") from error


def _numbered(name: str, rows: Rows) -> Iterator[Document]:
    return (Document(f"{name}:{number}", text) for number, text in rows)


PLAIN = (".txt", ".md", ".rst", ".py")
PARQUET = ".parquet"
_TABLES: dict[str, Callable[[BinaryIO, str, str | None], Rows]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": partial(read_separated, by=","),
    ".tsv": partial(read_separated, by="\t"),
}
_PACKABLE = (*PLAIN, *_TABLES)
_KINDS = (*PLAIN, ".jsonl", PARQUET, ".json", ".csv", ".tsv")
OF_COLUMNS = (*_TABLES, PARQUET)
_OFTEN_NO_TEXT = (".json", ".csv", ".tsv")
"""Kinds that often hold settings or numbers: in folders they are read only if a column is named."""
_UNPACK: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READABLE = f"{' '.join(_KINDS)}, all but .parquet also packed as {' '.join(_UNPACK)}"


def _open_input() -> TextIO:
    """Standard input; Python has none if the descriptor was closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise InputError(
            "standard input is closed, so there is no text to read in it; pipe the text to it, or name a file"
        )
    return sys.stdin


def _standard_input(stdin: TextIO) -> Iterator[str]:
    """Blocks of standard input; its bytes are decoded here, as UTF-8 whatever the locale."""
    binary: BinaryIO | None = getattr(stdin, "buffer", None)
    try:
        yield from iter(lambda: stdin.read(_BLOCK), "") if binary is None else _decoded(binary, "standard input")
    except OSError as error:
        raise InputError(f"cannot read standard input: {error.strerror or error}") from error


def _decoded(stream: BinaryIO, name: str) -> Iterator[str]:
    """Blocks of a UTF-8 stream, with line ends as ``\\n``."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset = 0
    has_begun = False
    while True:
        block = stream.read(_BLOCK)
        pending_bytes = len(decoder.getstate()[0])  # of a character that the block before began
        try:
            decoded = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(name, offset - pending_bytes + error.start) from error
        if not has_begun:
            decoded = decoded.removeprefix("\ufeff")  # a byte order mark
        has_begun = has_begun or bool(decoded)
        offset += len(block)
        yield newlines.decode(decoded, final=not block)
        if not block:
            return


def _in_pieces(name: str, blocks: Iterable[str]) -> Iterator[Document]:
    """One document from its blocks, in pieces of at most `PIECE` characters."""
    pending = ""
    continues = False
    for block in blocks:
        pending += block
        while len(pending) > PIECE:
            end = _end_of_piece(pending, 0)
            yield Document(name, pending[:end], continues)
            pending = pending[end:]
            continues = True
    yield Document(name, pending, continues)


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of at most `PIECE` characters."""
    start = 0
    while start < len(text):
        end = _end_of_piece(text, start)
        yield text[start:end]
        start = end


def _end_of_piece(text: str, start: int) -> int:
    """Where a piece ends: before a single space between words, which is where tokenizers cut as well."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    spaces = [match.start() for match in _SPACE_IN_TEXT.finditer(text, start + PIECE // 2, end)]
    return spaces[-1] if spaces else end
