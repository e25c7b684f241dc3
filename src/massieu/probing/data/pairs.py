"""Pairs of texts for encoder–decoders: a source for the encoder, and a target that the decoder reads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from massieu.errors import InputError
from massieu.probing.data.documents import (
    OF_COLUMNS,
    PARQUET,
    PLAIN,
    STANDARD_INPUT,
    checked_characters,
    explained,
    files_of,
    kind_of_file,
    opened,
)
from massieu.probing.data.text_tables import (
    Conversation,
    Fields,
    dataset_fields,
    is_dataset,
    json_fields,
    jsonl_fields,
    parquet_fields,
    separated_fields,
    text_in,
)

Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")

_READERS: dict[str, Callable[[BinaryIO, str, Sequence[str]], Fields]] = {
    ".jsonl": jsonl_fields,
    ".json": json_fields,
    ".csv": partial(separated_fields, by=","),
    ".tsv": partial(separated_fields, by="\t"),
}


@dataclass(frozen=True)
class Pair:
    """A source and its target in one row; None where a row has none."""

    name: str
    source: str | None
    target: str | None

    @property
    def whole(self) -> bool:
        """Whether there is text on both sides."""
        return bool(self.source and self.source.strip() and self.target and self.target.strip())


PairReader = Callable[[], Iterable[Pair]]
"""A function that reads the pairs, from the beginning at each call."""


def pairs_of(
    paths: Sequence[str | Path] | None, strings: Any, source: str | None, target: str | None
) -> tuple[str, PairReader]:
    """A description of the user's pairs, and a function that reads them.

    Args:
        paths: Files and folders of tables.
        strings: A data set, objects with the two columns, or pairs of strings without names of columns.
        source, target: Names of the two columns.

    Raises:
        InputError: neither paths nor strings, or both; only one of the two columns, or the same column twice; columns
            for text that has none, or no columns for a table.
    """
    if (paths is None) == (strings is None):
        raise InputError("pairs are given as either paths (files of tables) or strings (the pairs themselves)")
    if source is None and target is None:
        if paths is not None or is_dataset(strings) or isinstance(strings, str) or not isinstance(strings, Sequence):
            raise InputError("pairs need the names of their columns: give source and target")
        _check_pair_at(strings, 1)
        return _number_of_pairs(len(strings)), partial(_pairs_of_sequence, strings)
    columns = _checked_columns(source, target)
    columns_of = f"columns {columns[0]!r} (source) and {columns[1]!r} (target) of"
    if paths is not None:
        return f"{columns_of} {', '.join(map(str, paths))}", partial(_pairs_of_files, paths, columns)
    if is_dataset(strings):
        rows = dataset_fields(strings, columns)
        return f"{columns_of} a data set", lambda: _pairs(rows(), "data set", columns)
    if isinstance(strings, str) or not isinstance(strings, Iterable):
        raise InputError(f"source and target name columns, and strings is {_type_of(strings)}, which has none")
    objects = strings if isinstance(strings, Sequence) else list(strings)
    return f"{columns_of} {_number_of_pairs(len(objects))}", partial(_pairs_of_objects, objects, columns)


def check_pairs(pairs: PairReader, limit: int | None = None) -> None:
    """Read all pairs once, or as many as ``limit`` tokens may need, so that bad input is found before any work is done.

    Raises:
        InputError: an error in the text; no pair has text on both sides.
    """
    has_rows = False
    has_pair = False
    remaining = checked_characters(limit)
    for pair in pairs():  # all of it: an error may come last
        has_rows = True
        has_pair = has_pair or pair.whole
        remaining -= len(pair.source or "") + len(pair.target or "")
        if remaining <= 0:
            break
    if not has_pair:
        reason = "no row has both a source and a target" if has_rows else "there is no row in it"
        raise InputError(f"the text holds no pairs: {reason}")


def _checked_columns(source: str | None, target: str | None) -> tuple[str, str]:
    for side, column, other in (("source", source, "target"), ("target", target, "source")):
        if column is None:
            raise InputError(f"only {other} was given; pairs need both columns, source and target: give {side} too")
        if not isinstance(column, str) or not column:
            raise InputError(f"{side} must be the name of a column, got {column!r}")
    assert source is not None and target is not None
    if source == target:
        raise InputError(f"source and target must be two columns, and both are {source!r}")
    return source, target


def _number_of_pairs(number: int) -> str:
    return "1 pair" if number == 1 else f"{number:,} pairs"


def _type_of(value: Any) -> str:
    return "a string" if isinstance(value, str) else type(value).__name__


def _check_pair_at(strings: Sequence[Any], number: int) -> None:
    """Check one item of pairs without columns.

    Args:
        number: its place, counted from 1.

    Raises:
        InputError: it is not a pair of strings.
    """
    if not strings:
        raise InputError("strings is empty: there is no pair in it")
    item = strings[number - 1]
    if Conversation.of(item) is not None or not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"a {type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise InputError(f"strings must hold pairs of strings, but item {number} is {kind}")


def _pairs_of_sequence(strings: Sequence[Any]) -> Iterator[Pair]:
    for number, item in enumerate(strings, 1):
        _check_pair_at(strings, number)
        yield _pair(f"pair {number}", item, f"the pair at place {number} of strings", SIDES)


def _pairs_of_objects(objects: Sequence[Any], columns: tuple[str, str]) -> Iterator[Pair]:
    for number, item in enumerate(objects, 1):
        if not isinstance(item, Mapping):
            raise InputError(
                f"source and target name columns, but item {number} of strings is {_type_of(item)}, which has none"
            )
        if missing := [column for column in columns if column not in item]:
            columns_of_item = ", ".join(map(repr, item)) or "none"
            raise InputError(
                f"the row at place {number} of strings has no column {missing[0]!r}; its columns are {columns_of_item}"
            )
        values = [item[column] for column in columns]
        yield _pair(f"row {number}", values, f"the row at place {number} of strings", columns)


def _pairs_of_files(sources: Sequence[str | Path], columns: tuple[str, str]) -> Iterator[Pair]:
    for source in sources:
        if str(source) == STANDARD_INPUT:
            raise InputError("standard input is plain text, without columns; source and target need a table in a file")
        paths = files_of(source, columns[0])
        tables = [path for path in paths if kind_of_file(path) in OF_COLUMNS]
        if not tables:
            raise InputError(
                f"source and target name columns, and {source} has none: {' '.join(OF_COLUMNS)} have columns, "
                f"{' '.join(PLAIN)} are plain text"
            )
        for path in tables:
            yield from _pairs_of_file(path, columns)


def _pairs_of_file(path: Path, columns: tuple[str, str]) -> Iterator[Pair]:
    kind = kind_of_file(path)
    name = str(path)
    if kind == PARQUET:
        with explained(path):
            yield from _pairs(parquet_fields(path, name, columns), name, columns)
        return
    with opened(path) as stream:
        yield from _pairs(_READERS[kind](stream, name, columns), name, columns)


def _pairs(rows: Fields, name: str, columns: Sequence[str]) -> Iterator[Pair]:
    """Pairs from rows of two fields."""
    for number, values in rows:
        yield _pair(f"{name}:{number}", values, f"{name}:{number}", columns)


def _pair(name: str, values: Sequence[Any], where: str, columns: Sequence[str]) -> Pair:
    """A pair whose values are text or None.

    Args:
        where: the place of the pair, for an error message.
    """
    texts = [
        None if value is None else text_in(value, f"{where}: the column {column!r}")
        for value, column in zip(values, columns, strict=True)
    ]
    return Pair(name, *texts)
