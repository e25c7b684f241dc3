"""Text in tables: the rows of ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` and ``.parquet`` files."""

import csv
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from massieu.errors import InputError, require_extra

TEXT = "text"
"""The column that is read if none is named."""
_ROWS = 1 << 13
"""Rows of a Parquet file read at a time."""
_LONGEST_FIELD = 2**31 - 1
"""Characters of a field in a separated file: the largest C long on every platform."""
_field_limit = threading.Lock()

Rows = Iterator[tuple[int, str]]
"""Texts, each with its line (files of lines) or its row, counted from 1."""
Fields = Iterator[tuple[int, tuple[Any, ...]]]
"""Values of some columns, each row with its line or its row number."""


class Conversation(str):
    """Messages that the tokenizer's chat template turns into a text. As a string, it has a line for each role and content.

    Attributes:
        messages: each with its "role" and "content".
    """

    messages: list[dict[str, str]]

    @classmethod
    def of(cls, value: Any) -> "Conversation | None":
        """A list of messages as a conversation; None if the value is something else."""
        if not isinstance(value, list) or not value:
            return None
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return None
            if not isinstance(message.get("content"), str):
                return None
        conversation = cls("\n".join(f"{message['role']}: {message['content']}" for message in value))
        conversation.messages = value
        return conversation


def check_characters(text: str, what: str) -> None:
    """Check that a text consists of whole characters.

    Raises:
        InputError: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} holds half of a surrogate pair, not a character") from error


def not_utf8(name: str, offset: int) -> InputError:
    """The error for a byte that is not UTF-8."""
    return InputError(f"{name} is not UTF-8 text: the byte at offset {offset} cannot be decoded")


def no_column(where: str, column: str, columns: Iterable[str]) -> InputError:
    """The error for a missing column."""
    return InputError(f"{where} has no column {column!r}; its columns are {', '.join(map(repr, columns)) or 'none'}")


def _lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Lines of a UTF-8 file, with their ends. No byte of a longer character is a line end, so each line decodes alone."""
    offset = 0
    for number, line in enumerate(stream):
        try:
            decoded = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(name, offset + error.start) from error
        offset += len(line)
        yield decoded if number else decoded.removeprefix("\ufeff")


def _parsed(source: str, where: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error


def _values(fields: Any, where: str, columns: Sequence[str]) -> tuple[Any, ...]:
    """The values of these fields in a JSON object."""
    for column in columns:
        if not isinstance(fields, dict):
            raise InputError(f"{where} is not a JSON object with a field {column!r}")
        if column not in fields:
            raise no_column(where, column, fields)
    return tuple(fields[column] for column in columns)


def _field(fields: Any, where: str, column: str) -> str | None:
    """The text or the conversation in a field; None if it holds null."""
    [value] = _values(fields, where, [column])
    return None if value is None else _document_in(value, f"{where}: the field {column!r}")


def text_in(value: Any, what: str) -> str:
    """A value, checked to be text.

    Raises:
        InputError: it is not text, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise InputError(f"{what} does not hold text but {json.dumps(value, default=repr)[:40]}")
    check_characters(value, what)
    return value


def _document_in(value: Any, what: str) -> str:
    """A value, checked to be text or a list of messages.

    Raises:
        InputError: as `text_in`.
    """
    conversation = Conversation.of(value)
    if conversation is None:
        return text_in(value, what)
    check_characters(conversation, what)
    return conversation


def _objects(stream: BinaryIO, name: str) -> Iterator[tuple[int, str, Any]]:
    """The JSON value in each line that is not empty, with the line's number and its place for an error message."""
    for number, line in enumerate(_lines(stream, name), 1):
        if line.strip("\ufeff \t\r\n"):
            where = f"{name}:{number}"
            yield number, where, _parsed(line.lstrip("\ufeff"), where)


def read_jsonl(stream: BinaryIO, name: str, column: str | None) -> Rows:
    """Texts from an object in each line; lines whose field is null are skipped."""
    for number, where, value in _objects(stream, name):
        text = _field(value, where, column or TEXT)
        if text is not None:
            yield number, text


def jsonl_fields(stream: BinaryIO, name: str, columns: Sequence[str]) -> Fields:
    """Some fields of the object in each line."""
    for number, where, value in _objects(stream, name):
        yield number, _values(value, where, columns)


def _whole_json(stream: BinaryIO, name: str) -> Any:
    """The value of a JSON file, which is read as a whole."""
    content = stream.read()
    try:
        return _parsed(content.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        mark = 3 if content.startswith(b"\xef\xbb\xbf") else 0  # the decoder counts bytes after the mark
        raise not_utf8(name, mark + error.start) from error


def json_fields(stream: BinaryIO, name: str, columns: Sequence[str]) -> Fields:
    """Some fields of a list of objects, or of an object of columns; the file is held in memory as a whole."""
    content = _whole_json(stream, name)
    if isinstance(content, dict):
        lists = _values(content, name, columns)
        if not all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists):
            raise InputError(f"{name}: its columns {' and '.join(map(repr, columns))} are not lists of one length")
        yield from enumerate(zip(*lists, strict=True), 1)
    elif isinstance(content, list):
        for number, entry in enumerate(content, 1):
            yield number, _values(entry, f"{name}:{number}", columns)
    else:
        raise InputError(f"{name} holds JSON of another form; a list of objects or an object of columns is needed")


def read_json(stream: BinaryIO, name: str, column: str | None) -> Rows:
    """Texts of a list of strings, a list of objects, or an object of columns, held in memory as a whole; null is skipped."""
    content = _whole_json(stream, name)
    has_columns = isinstance(content, dict)
    if has_columns:
        if (column or TEXT) not in content:
            raise no_column(name, column or TEXT, content)
        content = content[column or TEXT]
    if not isinstance(content, list):
        form = f"whose column {column or TEXT!r} is no list" if has_columns else "of another form"
        raise InputError(
            f"{name} holds JSON {form}; a list of strings, a list of objects or an object of columns is needed"
        )
    for number, entry in enumerate(content, 1):
        where = f"{name}:{number}"
        if entry is None:
            continue
        if has_columns or (isinstance(entry, str | list) and column is None):
            yield number, _document_in(entry, where)
        elif isinstance(entry, str):
            raise InputError(f"{where} is a string, so it has no column {column!r}; leave the column out")
        else:
            text = _field(entry, where, column or TEXT)
            if text is not None:
                yield number, text


def read_separated(stream: BinaryIO, name: str, column: str | None, *, by: str) -> Rows:
    """Texts of a file whose fields are separated by commas or tabs, and quoted if needed; the first line names the columns."""
    return ((line, text) for line, (text,) in separated_fields(stream, name, [column or TEXT], by=by))


def separated_fields(stream: BinaryIO, name: str, columns: Sequence[str], *, by: str) -> Fields:
    """Some columns of a file whose fields are separated by commas or tabs."""
    records = _records(stream, name, by)
    _, header = next(records, (1, []))
    for column in columns:
        if column not in header:
            raise no_column(name, column, header)
        if header.count(column) > 1:
            raise InputError(f"{name} has {header.count(column)} columns {column!r}; one is needed")
    places = [header.index(column) for column in columns]
    for line, fields in records:
        if len(fields) != len(header):
            raise InputError(
                f"{name}:{line} has {len(fields)} fields where the first line names {len(header)}; "
                "a field with a separator or a line end inside must be in double quotes"
            )
        yield line, tuple(fields[place] for place in places)


def _records(stream: BinaryIO, name: str, by: str) -> Iterator[tuple[int, list[str]]]:
    """Records that are not empty, each with the line in which it begins."""
    reader = csv.reader(_lines(stream, name), delimiter=by, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = _next_record(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{name}:{line} cannot be read as fields in double quotes: {error}") from error
        if fields:
            yield line, fields


def _next_record(reader: Any) -> list[str]:
    """The next record, however long its fields. The limit of `csv` is one number for the whole process, hence the lock."""
    with _field_limit:
        limit = csv.field_size_limit()
        try:
            csv.field_size_limit(_LONGEST_FIELD)
            return next(reader)
        finally:
            csv.field_size_limit(limit)


def read_parquet(path: Path, name: str, column: str | None) -> Rows:
    """Texts of a Parquet file; rows whose text is null are skipped."""
    return ((row, text) for row, (text,) in parquet_fields(path, name, [column or TEXT]) if text is not None)


def parquet_fields(path: Path, name: str, columns: Sequence[str]) -> Fields:
    """Some columns of text of a Parquet file, with None for null."""
    polars = require_extra("polars", "probe")
    table = polars.scan_parquet(path, glob=False)
    try:
        schema = table.collect_schema()
        for column in columns:
            if column not in schema:
                raise no_column(name, column, schema)
            if schema[column] != polars.String:
                raise InputError(f"{name}: the column {column!r} does not hold text but {schema[column]}")
        start = 0
        while len(part := table.select(*columns).slice(start, _ROWS).collect()):
            yield from enumerate(part.iter_rows(), start + 1)
            start += len(part)
    except polars.exceptions.PolarsError as error:
        raise InputError(f"{name} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def is_dataset(value: Any) -> bool:
    """Whether an object is a data set of the package `datasets`, by its attributes."""
    return all(hasattr(value, name) for name in ("column_names", "features", "__iter__")) or is_split(value)


def is_split(value: Any) -> bool:
    """Whether an object is a dictionary of several such data sets."""
    return isinstance(value, dict) and isinstance(getattr(value, "column_names", None), dict)


def dataset_rows(dataset: Any, column: str | None) -> Callable[[], Rows]:
    """A function that reads one column of a data set, row by row; rows whose text is null are skipped.

    Raises:
        InputError: a dictionary of data sets; no such column. When it is read: a value that is not text, or no text at all.
    """
    column = column or TEXT
    return partial(_dataset_rows, dataset_fields(dataset, [column]), column)


def dataset_fields(dataset: Any, columns: Sequence[str]) -> Callable[[], Fields]:
    """A function that reads some columns of a data set, row by row.

    Raises:
        InputError: as for `dataset_rows`.
    """
    if is_split(dataset):
        raise InputError(f"strings is a dictionary of data sets; give one of them: {', '.join(map(repr, dataset))}")
    names = dataset.column_names  # None for a streamed data set that does not know them
    if names is None:
        return partial(_dataset_fields, dataset, columns)
    for column in columns:
        if column not in names:
            raise no_column("the data set", column, names)
    # Without the other columns, whose images or sounds would be decoded.
    return partial(_dataset_fields, dataset.select_columns(list(columns)), columns)


def _dataset_fields(dataset: Any, columns: Sequence[str]) -> Fields:
    for number, row in enumerate(dataset, 1):
        for column in columns:
            if column not in row:
                raise no_column(f"row {number} of the data set", column, row)
        yield number, tuple(row[column] for column in columns)


def _dataset_rows(fields: Callable[[], Fields], column: str) -> Rows:
    is_empty = True
    for number, (text,) in fields():
        if text is None:
            continue
        text = Conversation.of(text) or text
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InputError(f"row {number} of the data set: the column {column!r} does not hold text but {kind}")
        check_characters(text, f"row {number} of the data set")
        is_empty = is_empty and not text.strip()
        yield number, text
    if is_empty:
        raise InputError(f"the data set is empty: there is no text in its column {column!r}")
