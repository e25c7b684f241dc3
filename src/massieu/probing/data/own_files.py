"""The files that this package wrote: results, comparisons and records of training, which are never read as text."""

import json
from pathlib import Path

from massieu.storage.record_files import COMPARISON_FILES, COMPARISON_RECORD, FORMATS, RECORD, files_of
from massieu.storage.record_lines import is_record_of_monitor

_RECORDS = {
    RECORD: [name for format in FORMATS for name in files_of(format, per_token=True)],
    COMPARISON_RECORD: list(COMPARISON_FILES),
}
"""By the name of a record, the files that it covers if it lists none."""


def own_files(folder: Path) -> set[Path]:
    """The absolute paths of a result's or a comparison's files, as the record in its folder lists them.

    Any other file in the folder is the user's, whatever its name; without a record, all of them are.
    """
    paths: set[Path] = set()
    for record, usual_names in _RECORDS.items():
        names = _names_in(folder / record)
        if names is not None:
            paths |= {folder.absolute() / name for name in (record, *(names or usual_names))}
    return paths


def is_own_file(path: Path) -> bool:
    """Whether a file is a monitor's record, or belongs to a result that is stored in its folder or the one above."""
    if path.suffix == ".jsonl":
        return is_record_of_monitor(path)
    path = path.absolute()
    return any(path in own_files(folder) for folder in (path.parent, path.parent.parent))


def _names_in(record: Path) -> list[str] | None:
    """The names of files in a record of this package; None if the file is not such a record."""
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "schema_version" not in content:
        return None
    files = content.get("files")
    return list(files) if isinstance(files, dict) else []
