"""The files of a stored result: their names, what is written into them, and what is read back out of them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.errors import InputError
from massieu.probing.result import stored
from massieu.probing.result.long_table import read_table
from massieu.storage.record import SCHEMA_VERSION, RunRecord
from massieu.storage.record_files import DETAILS, FORMATS, TABLES

if TYPE_CHECKING:
    import polars

ROOM = 48_000_000
"""Bytes to have free for a result: the largest page, the tables and the details, and the sums of a thousand heads."""


def table_bytes(frame: "polars.DataFrame", format: str) -> bytes:
    """A table as its file holds it."""
    content = io.BytesIO()  # polars cannot open every name that a file may have
    frame.write_parquet(content) if format == "parquet" else frame.write_csv(content)
    return content.getvalue()


def details_bytes(details: dict[str, Any]) -> bytes:
    """``details.json``."""
    return json.dumps(details, separators=(",", ":"), allow_nan=False).encode("ascii")


def record_bytes(run: RunRecord, hashes: dict[str, str]) -> bytes:
    """``run.json``, with the hashes of the files beside it."""
    # In escapes, not characters: a token need not be valid Unicode.
    return json.dumps(run.to_dict() | {"files": hashes}, indent=1, allow_nan=False).encode("ascii")


def read_record(content: bytes, where: str) -> tuple[RunRecord, dict[str, str] | None]:
    """A result's record, and the hashes of its files by name; None where the record has no hashes.

    Raises:
        InputError: not a record, or written by another version of massieu; ``where`` is the file's name.
    """
    value = stored.parse(content, where)
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{where} has schema_version {version}; this version of massieu reads {SCHEMA_VERSION}")
    hashes = stored.hashes_of(value, where)
    return stored.run_of(value, where), hashes


def read_numbers(
    file: Callable[..., tuple[str, bytes]], folder: Path
) -> tuple[dict[str, Any], "polars.DataFrame", "polars.DataFrame"]:
    """The details, the table of heads and the table of layers.

    Args:
        file: of several names, the first that there is a file of, with the file's bytes.
        folder: of the files, for messages.

    Raises:
        InputError: a file does not hold what its name says; the message names it.
        MissingExtraError: polars is not installed.
    """
    _, content = file(DETAILS)
    details = stored.parse(content, str(folder / DETAILS))
    stored.check_details(details, str(folder / DETAILS))
    tables = []
    for table in TABLES:
        name, content = file(*(f"{table}.{ending}" for ending in FORMATS))
        tables.append(read_table(name, content, folder))
    heads, layers = tables
    return details, heads, layers
