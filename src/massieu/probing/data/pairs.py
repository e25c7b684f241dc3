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
    """A source and its target, as they stand in a row; None where a row has none."""

    name: str
    source: str | None
    target: str | None

    @property
    def whole(self) -> bool:
        """Whether there is text on both sides."""
        return bool(self.source and self.source.strip() and self.target and self.target.strip())


PairReader = Callable[[], Iterable[Pair]]
"""A function that reads the pairs anew."""


def given_pairs(
    paths: Sequence[str | Path] | None, strings: Any, source: str | None, target: str | None
) -> tuple[str, PairReader]:
    """The pairs that a caller gave: what they are, in words, and a function that reads them.

    Args:
        paths: Files and folders of tables.
        strings: A data set, objects with the two columns, or pairs of strings, whose columns have no names.
        source, target: Names of the two columns.

    Raises:
        InputError: neither paths nor strings, or both; one of the two columns alone, or one for both; columns without
            text, or for text without columns.
    """
    if (paths is None) == (strings is None):
        raise InputError("pairs are given as either paths (files of tables) or strings (the pairs themselves)")
    if source is None and target is None:
        if paths is not None or is_dataset(strings) or isinstance(strings, str) or not isinstance(strings, Sequence):
            raise InputError("pairs need the names of their columns: give source and target")
        _check_pair_at(strings, 1)
        return _in_words(len(strings)), partial(_of_sequence, strings)
    columns = _columns(source, target)
    said = f"columns {columns[0]!r} (source) and {columns[1]!r} (target) of"
    if paths is not None:
        return f"{said} {', '.join(map(str, paths))}", partial(_of_files, paths, columns)
    if is_dataset(strings):
        rows = dataset_fields(strings, columns)
        return f"{said} a data set", lambda: _pairs(rows(), "data set", columns)
    if isinstance(strings, str) or not isinstance(strings, Iterable):
        raise InputError(f"source and target name columns, and strings is {_kind(strings)}, which has none")
    rows_given = strings if isinstance(strings, Sequence) else list(strings)
    return f"{said} {_in_words(len(rows_given))}", partial(_of_objects, rows_given, columns)


def check_pairs(pairs: PairReader, limit: int | None = None) -> None:
    """Read all pairs once, or as many as so many tokens may need, so that bad input is found before any work is done.

    Raises:
        InputError: what is wrong with the text; no pair has text on both sides.
    """
    whole = [0, 0]
    wanted = checked_characters(limit)
    for pair in pairs():  # all of it: what is wrong may come last
        whole[pair.whole] += 1
        wanted -= len(pair.source or "") + len(pair.target or "")
        if wanted <= 0:
            break
    if not whole[True]:
        reason = "no row has both a source and a target" if whole[False] else "there is no row in it"
        raise InputError(f"the text holds no pairs: {reason}")


def _columns(source: str | None, target: str | None) -> tuple[str, str]:
    for side, column, other in (("source", source, "target"), ("target", target, "source")):
        if column is None:
            raise InputError(f"only {other} was given; pairs need both columns, source and target: give {side} too")
        if not isinstance(column, str) or not column:
            raise InputError(f"{side} must be the name of a column, got {column!r}")
    assert source is not None and target is not None
    if source == target:
        raise InputError(f"source and target must be two columns, and both are {source!r}")
    return source, target


def _in_words(number: int) -> str:
    return "1 pair" if number == 1 else f"{number:,} pairs"


def _kind(given: Any) -> str:
    return "a string" if isinstance(given, str) else type(given).__name__


def _check_pair_at(strings: Sequence[Any], number: int) -> None:
    """Raises:
    InputError: there is no pair of strings at this place, counted from 1.
    """
    if not strings:
        raise InputError("strings is empty: there is no pair in it")
    each = strings[number - 1]
    if Conversation.of(each) is not None or not isinstance(each, tuple | list) or len(each) != 2:
        given = f"a {type(each).__name__} of {len(each)}" if isinstance(each, tuple | list) else type(each).__name__
        raise InputError(f"strings must hold pairs of strings, but item {number} is {given}")


def _of_sequence(strings: Sequence[Any]) -> Iterator[Pair]:
    for number, each in enumerate(strings, 1):
        _check_pair_at(strings, number)
        yield _pair(f"pair {number}", each, f"the pair at place {number} of strings", SIDES)


def _of_objects(strings: Sequence[Any], columns: tuple[str, str]) -> Iterator[Pair]:
    for number, each in enumerate(strings, 1):
        if not isinstance(each, Mapping):
            raise InputError(
                f"source and target name columns, but item {number} of strings is {_kind(each)}, which has none"
            )
        if missing := [column for column in columns if column not in each]:
            there = ", ".join(map(repr, each)) or "none"
            raise InputError(
                f"the row at place {number} of strings has no column {missing[0]!r}; its columns are {there}"
            )
        yield _pair(f"row {number}", [each[c] for c in columns], f"the row at place {number} of strings", columns)


def _of_files(sources: Sequence[str | Path], columns: tuple[str, str]) -> Iterator[Pair]:
    for given in sources:
        if str(given) == STANDARD_INPUT:
            raise InputError("standard input is plain text, without columns; source and target need a table in a file")
        paths = files_of(given, columns[0])
        tables = [path for path in paths if kind_of_file(path) in OF_COLUMNS]
        if not tables:
            raise InputError(
                f"source and target name columns, and {given} has none: {' '.join(OF_COLUMNS)} have columns, "
                f"{' '.join(PLAIN)} are plain text"
            )
        for path in tables:
            yield from _of_file(path, columns)


def _of_file(path: Path, columns: tuple[str, str]) -> Iterator[Pair]:
    kind, name = kind_of_file(path), str(path)
    if kind == PARQUET:
        with explained(path):
            yield from _pairs(parquet_fields(path, name, columns), name, columns)
        return
    with opened(path) as stream:
        yield from _pairs(_READERS[kind](stream, name, columns), name, columns)


def _pairs(rows: Fields, name: str, columns: Sequence[str]) -> Iterator[Pair]:
    for number, values in rows:
        yield _pair(f"{name}:{number}", values, f"{name}:{number}", columns)


def _pair(name: str, values: Sequence[Any], where: str, columns: Sequence[str]) -> Pair:
    texts = [
        None if value is None else text_in(value, f"{where}: the column {column!r}")
        for value, column in zip(values, columns, strict=True)
    ]
    return Pair(name, *texts)
