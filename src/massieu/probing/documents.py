"""Where text comes from: files, folders, standard input, read piece by piece and never held as a whole."""

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from massieu.errors import InputError, require_extra

STANDARD_INPUT = "-"
PIECE = 1 << 16  # characters tokenised at a time: bounds the memory that a long document takes
_BLOCK = 1 << 16  # bytes read at a time
_ROWS = 1 << 13  # rows of a Parquet file read at a time
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

    A ``.txt``, ``.md``, ``.rst`` or ``.py`` file is one document (a long one comes in pieces); a ``.jsonl`` file holds one
    in each line, a ``.parquet`` file one in each row. Folders are read recursively in alphabetical order, their files
    before their folders; files of other kinds and names that begin with a dot are left out.

    Args:
        sources: Files and folders; ``"-"`` is standard input, plain text.
        column: Field of ``.jsonl`` and ``.parquet`` files that holds the text; None is "text".
        stdin: Read in place of ``sys.stdin``.

    Raises:
        InputError: what `check_sources` finds, here only when the place is reached; and standard input that is not
            UTF-8.
    """
    for source in sources:
        if str(source) == STANDARD_INPUT:
            yield from _whole("standard input", _standard_input(_open_input() if stdin is None else stdin))
        else:
            for path in _files(source):
                yield from _read(path, column)


def check_sources(sources: Sequence[str | Path], *, column: str | None = None) -> None:
    """Read everything but standard input once, so that bad input is found before any work is done.

    Raises:
        InputError: no such file or folder; unknown kind of file; folder without text; no text inside; not UTF-8 (with
            the offset of the byte); a line that is not JSON; no such column, or one that does not hold text; standard
            input is closed.
    """
    if not sources:
        raise InputError("no text was given; name a file, a folder, or - for standard input")
    tables = False
    for source in sources:
        if str(source) == STANDARD_INPUT:
            _open_input()
            continue
        files = _files(source)
        tables = tables or any(_suffix(path) in _TABLES for path in files)
        # All of it is read: what is wrong may come last.
        if not sum(bool(document.text.strip()) for path in files for document in _read(path, column)):
            raise InputError(f"the text is empty: there is nothing to read in {source}")
    if column is not None and not tables:
        raise InputError(f"a column ({column!r}) was named, but there is no {' or '.join(_TABLES)} file among the text")


def reference_documents() -> Iterator[Document]:
    """The English reference text about the Python language that every Python ships, one document per topic."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"pydoc topic {name}", topics[name])


def string_documents(texts: Sequence[str] | str) -> list[Document]:
    """Strings as documents.

    Raises:
        InputError: no text in them; something that is no string; half of a surrogate pair.
    """
    listed = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(listed, 1):
        if not isinstance(text, str):
            raise InputError(f"texts takes strings, got {type(text).__name__} at place {number}")
        _check_characters(text, f"the string at place {number} of texts")
    if not any(text.strip() for text in listed):
        raise InputError("texts is empty: there is nothing to read in it")
    return [Document(f"string {number}", text) for number, text in enumerate(listed, 1)]


def _check_characters(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} holds half of a surrogate pair, not a character") from error


def _files(named: str | Path) -> list[Path]:
    """The files a source stands for, in the order of reading."""
    source = Path(named)
    if not str(named):
        raise InputError("the name of a text is empty; name a file, a folder, or - for standard input")
    if not os.path.exists(named):  # unlike Path.exists, it takes any name: over-long ones too
        strings = "; from Python, text itself goes to texts" if len(str(named).split()) > 1 else ""
        raise InputError(f"there is no text {shortened(str(named))}: no such file or folder{strings}")
    if source.is_dir():
        found = []
        for folder, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        files = [path for path in found if _suffix(path) in _READERS and path.is_file()]
        if not files:
            raise InputError(f"the folder {source} holds no text; files that can be read end in {' '.join(_READERS)}")
        return files
    if _suffix(source) not in _READERS:
        raise InputError(
            f"{source} is of an unknown kind; files that can be read end in {' '.join(_READERS)}, "
            "and - reads plain text from standard input"
        )
    return [source]


def shortened(text: str, length: int = 240) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= length else text[:length].rstrip() + " …"


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _read(path: Path, column: str | None) -> Iterator[Document]:
    try:
        yield from _READERS[_suffix(path)](path, column or "text")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _read_plain(path: Path, _: str) -> Iterator[Document]:
    with path.open("rb") as stream:
        yield from _whole(str(path), _decoded(stream, str(path)))


def _read_jsonl(path: Path, column: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                decoded = line.decode("utf-8").lstrip("\ufeff")
            except UnicodeDecodeError as error:
                raise _not_utf8(str(path), offset + error.start) from error
            offset += len(line)
            if decoded.strip():
                yield Document(f"{path}:{number}", _field(decoded, f"{path}:{number}", column))


def _field(line: str, where: str, column: str) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not a JSON object with a field {column!r}")
    if column not in fields:
        raise _no_column(where, column, fields)
    text = fields[column]
    if not isinstance(text, str):
        raise InputError(f"{where}: the field {column!r} does not hold text but {json.dumps(text)[:40]}")
    _check_characters(text, f"{where}: the field {column!r}")
    return text


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    polars = require_extra("polars", "probe")
    table = polars.scan_parquet(path, glob=False)
    try:
        schema = table.collect_schema()
        if column not in schema:
            raise _no_column(str(path), column, schema)
        if schema[column] != polars.String:
            raise InputError(f"{path}: the column {column!r} does not hold text but {schema[column]}")
        start = 0
        while len(texts := table.select(column).slice(start, _ROWS).collect()[column]):
            for row, text in enumerate(texts, start + 1):
                if text is not None:
                    yield Document(f"{path}:{row}", text)
            start += len(texts)
    except polars.exceptions.PolarsError as error:
        raise InputError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


_TABLES: dict[str, Callable[[Path, str], Iterator[Document]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
_READERS = dict.fromkeys((".txt", ".md", ".rst", ".py"), _read_plain) | _TABLES


def _no_column(where: str, column: str, columns: Iterable[str]) -> InputError:
    return InputError(f"{where} has no column {column!r}; its columns are {', '.join(map(repr, columns)) or 'none'}")


def _not_utf8(name: str, offset: int) -> InputError:
    return InputError(f"{name} is not UTF-8 text: the byte at offset {offset} cannot be decoded")


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
            raise _not_utf8(name, offset - waiting + error.start) from error
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
