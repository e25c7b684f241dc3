"""A command's files, whose places are tested before the work, and its JSON."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any

from massieu.cli.streams import show
from massieu.errors import InputError, require_extra
from massieu.foundation.files import is_special, linked_to
from massieu.storage.writing import check_name

PAGE_ROOM = 8_000_000
"""Bytes of the largest page."""
PICTURES = ("png", "svg", "pdf")
PICTURE_ROOM = 4_000_000
"""Bytes of the largest picture."""


@contextmanager
def result_folder(folder: Path, format: str, per_token: bool) -> Iterator[None]:
    """Reserve the folder of a result, after a test that the result fits and that the libraries of its page are installed.

    Args:
        folder: The folder, which is made if it is missing.
        format: File format of the tables.
        per_token: Whether the result will have a row for each token.

    Raises:
        InputError: the folder cannot be used; nothing is left behind.
    """
    for module in ("polars", "jinja2", "plotly.offline", "scipy"):
        require_extra(module, "probe")
    from massieu.probing.result.result_files import ROOM
    from massieu.storage.folder import reserved
    from massieu.storage.record_files import RECORD, files_of

    with reserved(folder, RECORD, files_of(format, per_token), ROOM):
        yield


def show_json(content: Any) -> None:
    """Print an object or a list as JSON; a number that is not finite becomes null."""
    from massieu.report.encode import encodable

    show(dumps(encodable(content), indent=1, ensure_ascii=False, allow_nan=False))


def check_page(path: Path) -> None:
    """Check that a page can be drawn and written to this path.

    Raises:
        InputError: it cannot.
    """
    require_extra("jinja2", "probe")
    _check_file(path, PAGE_ROOM, "the page")


def check_picture(path: Path) -> str:
    """That a picture can be drawn and written there; its format, by the file's ending.

    Raises:
        InputError: it cannot.
    """
    require_extra("matplotlib.figure", "probe")
    format = path.suffix.lower().removeprefix(".")
    if format not in PICTURES:
        raise InputError(f"a picture's file ends in {', '.join(f'.{each}' for each in PICTURES)}, got {str(path)!r}")
    _check_file(path, PICTURE_ROOM, "the picture")
    return format


def _check_file(path: Path, room: int, what: str) -> None:
    if os.path.isdir(check_name(path)):
        raise InputError(f"{path} is a folder; {what} needs the name of a file")
    from massieu.storage.folder import tried

    if is_special(path):
        return  # Only writing to a device shows what it takes.
    target = linked_to(path)
    with tried(target.parent, room, target.name):
        pass
