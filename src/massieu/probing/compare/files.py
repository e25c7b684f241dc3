"""The files of a stored comparison."""

import io
import json
from typing import TYPE_CHECKING, Any

from massieu.errors import InputError, require_extra
from massieu.probing.result import stored
from massieu.storage import folder as folders
from massieu.storage.record_files import COMPARISON_RECORD, DIFFERENCES, VALUES

if TYPE_CHECKING:
    import polars

VERSION = 1


def record_bytes(record: dict[str, Any], files: dict[str, bytes]) -> bytes:
    """The bytes of ``comparison.json``, with the hashes of the other files."""
    hashes = {name: folders.digest(content) for name, content in files.items()}
    return json.dumps({"schema_version": VERSION} | record | {"files": hashes}, indent=1, allow_nan=False).encode(
        "ascii"
    )


def read_files(content: folders.Stored) -> tuple[dict[str, Any], list["polars.DataFrame"]]:
    """The record and the two tables.

    Raises:
        InputError: a file is missing, cannot be read, or is not of this comparison.
    """
    where = str(content.where)
    record = stored.parse(content.record, where)
    if record.get("schema_version") != VERSION:
        raise InputError(f"{where} has schema_version {record.get('schema_version')}; this version reads {VERSION}")
    hashes = stored.hashes_of(record, where) or {}
    polars = require_extra("polars", "probe")
    tables = []
    for name in (DIFFERENCES, VALUES):
        _, table_bytes = content.read(name)
        if hashes.get(name) != folders.digest(table_bytes):
            raise folders.MismatchError(
                f"{content.path(name)} is not the file that {COMPARISON_RECORD} was stored with"
            )
        try:
            tables.append(polars.read_parquet(io.BytesIO(table_bytes)))
        except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
            raise InputError(f"{content.path(name)} is not a table: {str(error).splitlines()[0]}") from error
    return record, tables
