"""Pages on disk: complete, or not there."""

import os
from pathlib import Path

from massieu.errors import InputError


def write_whole(path: Path, page: str, what: str) -> None:
    """Write a page beside its place and rename it, so that an earlier one is replaced at once; folders are made.

    Raises:
        InputError: `what` cannot be written there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(page, encoding="utf-8")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {what} {path}: {error.strerror}") from error
