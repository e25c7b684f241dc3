"""Which files of a folder this package wrote: results, comparisons and records of training, which are never text to read."""

import json
from pathlib import Path

from massieu.storage.record_files import COMPARISON_FILES, COMPARISON_RECORD, FORMATS, RECORD, files_of
from massieu.storage.record_lines import is_record_of_monitor

_RECORDS = {
    RECORD: [name for format in FORMATS for name in files_of(format, per_token=True)],
    COMPARISON_RECORD: list(COMPARISON_FILES),
}
"""The files that say what else was written beside them, and what that may be called."""


def own_files(folder: Path) -> set[Path]:
    """The absolute paths of a result's or a comparison's files, as the record in its folder lists them.

    What else is in the folder is the user's, whatever its name; without a record all of it is.
    """
    own: set[Path] = set()
    for name, usual in _RECORDS.items():
        listed = _listed(folder / name)
        if listed is not None:
            own |= {folder.absolute() / each for each in (name, *(listed or usual))}
    return own


def is_own_file(path: Path) -> bool:
    """Whether a file is a monitor's record, or of a result that is stored in its folder or the one above."""
    if path.suffix == ".jsonl":
        return is_record_of_monitor(path)
    path = path.absolute()
    return any(path in own_files(folder) for folder in (path.parent, path.parent.parent))


def _listed(record: Path) -> list[str] | None:
    """The names in a record of ours; None where the file is none."""
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "schema_version" not in content:
        return None
    files = content.get("files")
    return list(files) if isinstance(files, dict) else []
