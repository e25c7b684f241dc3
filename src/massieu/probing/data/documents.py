"""Where text comes from: files, folders, standard input, read piece by piece and never held as a whole."""

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
PIECE = 1 << 16  # characters tokenised at a time: bounds the memory that a long document takes
_BLOCK = 1 << 16  # bytes read at a time
_CHECKED = 1 << 20
"""Characters that are looked through before a run in any case."""
_LONGEST_TOKEN = 32
"""Characters of a token, more than the mean over any text."""
_OF_PAIRS = "; pairs of texts are massieu.Pairs(strings=…)"
_CUT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class Document:
    """A text to read, or, where ``continues`` is true, the next piece of the text before it."""

    name: str
    text: str
    continues: bool = False


def read_documents(
    sources: Sequence[str | Path], *, column: str | None = None, stdin: TextIO | None = None
) -> Iterator[Document]:
    """Read files, folders and standard input, lazily.

    A ``.txt``, ``.md``, ``.rst`` or ``.py`` file is one document (a long one comes in pieces). A ``.jsonl`` file holds one
    in each line; a ``.csv``, ``.tsv`` or ``.parquet`` file one in each row; a ``.json`` file a list of them, or columns. All
    but ``.parquet`` may be packed (``.gz``, ``.bz2``, ``.xz``). Only a ``.json`` file is held in memory as a whole.

    Folders are read recursively in alphabetical order, their files before their folders. Files of other kinds and names
    that begin with a dot are left out; ``.json``, ``.csv`` and ``.tsv`` files too, unless a column is named. What massieu
    itself wrote is never read: results, comparisons, and records of training.

    Args:
        sources: Files and folders; ``"-"`` is standard input, plain text.
        column: Column, or field of JSON objects, that holds the text; None is "text".
        stdin: Read in place of ``sys.stdin``.

    Raises:
        InputError: what `check_sources` finds, here only when the place is reached; and standard input that is not
            UTF-8.
    """
    for source in sources:
        if str(source) == STANDARD_INPUT:
            yield from _whole("standard input", _standard_input(_open_input() if stdin is None else stdin))
        else:
            for path in files_of(source, column):
                yield from _read(path, column)


def checked_characters(limit: int | None) -> float:
    """How much text to look through before a run that reads so many tokens; without a limit, all of it.

    Tokenizers make far shorter tokens of text; should one not, what is wrong further on is found when it is reached.
    """
    return math.inf if limit is None else _CHECKED + _LONGEST_TOKEN * limit


def beginning(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """As much of the documents as so many tokens may need."""
    wanted = checked_characters(limit)
    for document in documents:
        yield document
        wanted -= len(document.text)
        if wanted <= 0:
            return


def check_sources(sources: Sequence[str | Path], *, column: str | None = None, limit: int | None = None) -> None:
    """Read everything but standard input once, so that bad input is found before any work is done.

    Where only so many tokens are wanted, as much as these may need is read.

    Raises:
        InputError: no such file or folder; unknown kind of file; folder without text; no text inside; not UTF-8 (with
            the offset of the byte); a packed file that is broken; what is not JSON; a row with more or fewer fields than
            the first line; no such column, or one that does not hold text; standard input is closed.
    """
    if not sources:
        raise InputError("no text was given; name a file, a folder, or - for standard input")
    tables = False
    wanted = checked_characters(limit)
    for source in sources:
        if str(source) == STANDARD_INPUT:
            _open_input()
            continue
        files = files_of(source, column)
        tables = tables or any(kind_of_file(path) in OF_COLUMNS for path in files)
        # Up to there all of it is read: what is wrong may come last.
        empty = wanted > 0
        for document in (document for path in files for document in _read(path, column)):
            if wanted <= 0:
                break
            wanted -= len(document.text)
            empty = empty and not document.text.strip()
        if empty:
            raise InputError(f"the text is empty: there is nothing to read in {source}")
    if column is not None and not tables:
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
        InputError: no text in them; something that is no string; half of a surrogate pair.
    """
    listed = [texts] if isinstance(texts, str) else list(texts)
    listed = [Conversation.of(text) or text for text in listed]
    for number, text in enumerate(listed, 1):
        if not isinstance(text, str):
            raise InputError(
                f"strings must be texts, or lists of messages with a role and a content, got {type(text).__name__} at place "
                f"{number}{_OF_PAIRS if isinstance(text, tuple | list) and len(text) == 2 else ''}"
            )
        check_characters(text, f"the string at place {number} of strings")
    if not any(text.strip() for text in listed):
        raise InputError("strings is empty: there is nothing to read in it")
    return [Document(f"string {number}", text) for number, text in enumerate(listed, 1)]


def given_documents(texts: Any, column: str | None = None) -> tuple[str, Callable[[], Iterable[Document]]]:
    """Text that a caller holds: what it is, in words, and a function that reads it.

    Args:
        texts: A string, strings, or a ``Dataset`` or ``IterableDataset`` of the package `datasets`, read row by row.
        column: Column of a data set that holds the text; None is "text".

    Raises:
        InputError: what `string_documents` finds; a dictionary of data sets; no such column; a column of strings.
    """
    if is_dataset(texts):
        rows = dataset_rows(texts, column)
        return f"column {column or 'text'!r} of a data set", lambda: _numbered("data set", rows())
    if column is not None:
        raise InputError(f"a column ({column!r}) was named, but strings holds texts, which have none")
    strings = string_documents(texts)
    return "1 string" if len(strings) == 1 else f"{len(strings):,} strings", lambda: strings


def files_of(named: str | Path, column: str | None) -> list[Path]:
    """The files a source stands for, in the order of reading."""
    source = Path(named)
    if not str(named):
        raise InputError("the name of a text is empty; name a file, a folder, or - for standard input")
    if not os.path.exists(named):  # unlike Path.exists, it takes any name: over-long ones too
        strings = "; from Python, text itself is massieu.Text(strings=…)" if len(str(named).split()) > 1 else ""
        raise InputError(f"there is no text {shortened(str(named))}: no such file or folder{strings}")
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
    found: list[Path] = []
    own = own_files(source.absolute().parent)  # the source may be a folder inside a result
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        own |= own_files(Path(folder))
        paths = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        found += [path for path in paths if kind_of_file(path) in _KINDS and path.is_file()]
    readable = [path for path in found if path.absolute() not in own and not is_record_of_monitor(path)]
    files = [path for path in readable if column is not None or kind_of_file(path) not in _OFTEN_NO_TEXT]
    if readable and not files:
        kinds = " ".join(_OFTEN_NO_TEXT)
        raise InputError(f"the folder {source} holds only {kinds} files; name their column of text, or the files")
    if not files:
        written = "" if not found else " other than what massieu has written"
        raise InputError(f"the folder {source} holds no text{written}; files that can be read end in {_READABLE}")
    return files


def shortened(text: str, length: int = 240) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= length else text[:length].rstrip() + " …"


def kind_of_file(path: Path) -> str:
    """What a file holds, by its name: ``.csv`` for ``a.csv`` and ``a.csv.gz``; none for a packed file of no known kind."""
    suffix = path.suffix.lower()
    if suffix not in _UNPACK:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in _STREAMED else suffix


def _read(path: Path, column: str | None) -> Iterator[Document]:
    kind, name = kind_of_file(path), str(path)
    if kind == PARQUET:
        with explained(path):
            yield from _numbered(name, read_parquet(path, name, column))
        return
    with opened(path) as stream:
        if kind in PLAIN:
            yield from _whole(name, _decoded(stream, name))
        else:
            yield from _numbered(name, _TABLES[kind](stream, name, column))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked where it is packed."""
    unpack = _UNPACK.get(path.suffix.lower())
    with explained(path), path.open("rb") if unpack is None else unpack(path) as stream:
        yield stream


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, what the system says of a file that cannot be read is an `InputError`."""
    name, unpack = str(path), _UNPACK.get(path.suffix.lower())
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{name} cannot be unpacked: {error}") from error
    except OSError as error:
        if unpack is not None and error.errno is None:  # bz2 says so what is no bz2
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
_STREAMED = (*PLAIN, *_TABLES)
_KINDS = (*PLAIN, ".jsonl", PARQUET, ".json", ".csv", ".tsv")
OF_COLUMNS = (*_TABLES, PARQUET)
_OFTEN_NO_TEXT = (".json", ".csv", ".tsv")  # settings and numbers: in folders, read where a column is named
_UNPACK: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READABLE = f"{' '.join(_KINDS)}, all but .parquet also packed as {' '.join(_UNPACK)}"


def _open_input() -> TextIO:
    """Standard input; Python has none where the descriptor was closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise InputError(
            "standard input is closed, so there is no text to read in it; pipe the text to it, or name a file"
        )
    return sys.stdin


def _standard_input(stdin: TextIO) -> Iterator[str]:
    binary: BinaryIO | None = getattr(stdin, "buffer", None)
    try:
        yield from iter(lambda: stdin.read(_BLOCK), "") if binary is None else _decoded(binary, "standard input")
    except OSError as error:
        raise InputError(f"cannot read standard input: {error.strerror or error}") from error


def _decoded(stream: BinaryIO, name: str) -> Iterator[str]:
    """Blocks of a UTF-8 stream, line ends made ``\\n``."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, begun = 0, False
    while True:
        block = stream.read(_BLOCK)
        waiting = len(decoder.getstate()[0])  # bytes of a character that the block before began
        try:
            decoded = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(name, offset - waiting + error.start) from error
        if not begun:
            decoded = decoded.removeprefix("\ufeff")
        begun = begun or bool(decoded)
        offset += len(block)
        yield newlines.decode(decoded, final=not block)
        if not block:
            return


def _whole(name: str, blocks: Iterable[str]) -> Iterator[Document]:
    """One document made of blocks, in pieces that fit in memory."""
    waiting, continues = "", False
    for block in blocks:
        waiting += block
        while len(waiting) > PIECE:
            cut = _cut(waiting, 0)
            yield Document(name, waiting[:cut], continues)
            waiting, continues = waiting[cut:], True
    yield Document(name, waiting, continues)


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of at most `PIECE` characters."""
    start = 0
    while start < len(text):
        end = _cut(text, start)
        yield text[start:end]
        start = end


def _cut(text: str, start: int) -> int:
    """Where a piece ends: before a single space between words, which is where tokenizers cut as well."""
    end = start + PIECE
    places = [place.start() for place in _CUT.finditer(text, start + PIECE // 2, end)] if end < len(text) else ()
    return places[-1] if places else min(end, len(text))
