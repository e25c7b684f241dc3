"""Where a command's files go: tried before the work, and a second place if the first fails after it."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from massieu.errors import InputError, require_extra
from massieu.foundation.files import is_special, linked_to
from massieu.report.writing import check_name

PAGE_ROOM = 8_000_000
"""Bytes of the largest page."""


@contextmanager
def result_folder(folder: Path) -> Iterator[None]:
    """The folder is this run's until the end: made, written to, with room for a result. What draws the page is there.

    Raises:
        InputError: it cannot be had; nothing is left behind then.
    """
    for module in ("polars", "jinja2", "plotly.offline", "scipy"):
        require_extra(module, "probe")
    from massieu.probing.result_files import FILES, ROOM
    from massieu.report.folder import reserved

    with reserved(folder, FILES, ROOM):
        yield


def check_page(path: Path) -> None:
    """That a page can be drawn and written there.

    Raises:
        InputError: it cannot.
    """
    require_extra("jinja2", "probe")
    if os.path.isdir(check_name(path)):
        raise InputError(f"{path} is a folder; the page needs the name of a file")
    from massieu.report.folder import tried

    if is_special(path):
        return  # what a device takes is known only when it is written to
    target = linked_to(path)
    with tried(target.parent, PAGE_ROOM, target.name):
        pass


def kept(save: Callable[[Path], object], place: Path) -> None:
    """Save what took long to find; where that fails, in a new temporary folder.

    Raises:
        InputError: it was not saved in its place; the message says where it is.
    """
    try:
        save(place)
    except InputError as error:
        try:
            elsewhere = Path(tempfile.mkdtemp(prefix="massieu-"), place.absolute().resolve().name)
            save(elsewhere)
        except (InputError, OSError) as second:
            raise InputError(f"{error}; nor could it be saved elsewhere: {second}") from error
        raise InputError(f"{error}; it was saved in {elsewhere} instead") from error
