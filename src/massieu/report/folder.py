"""A folder of files that belong together: replaced all at once, read all of one kind.

All are written aside, into a folder that then gets the name `_ARRIVED`; from there they are moved to their places one by
one. What has arrived is the folder's content from that moment on, wherever a process was killed. One of the files, the
record, has the others' hashes, so that who reads while another writes notices it.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from massieu.errors import InputError
from massieu.foundation.files import remove_left, replacing
from massieu.report.locking import is_locked, locked
from massieu.report.writing import check_name, explaining, try_to_write

_ARRIVED = ".massieu_arrived"
_GONE = ".gone"
"""Ends the name of a mark among what has arrived: the file without this ending is to be removed."""
PATIENCE = 20.0
"""Seconds that are waited for another process that saves."""
_MOMENT = 0.5
"""Seconds for which even a reader may hold the lock, to see whether it is free."""
_AGAIN = 0.02

Read = TypeVar("Read")


class MismatchError(InputError):
    """Files of a folder that do not belong together, or are not there."""


def digest(content: bytes) -> str:
    """The hash by which a file is known."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def reserved(folder: Path, files: tuple[str, ...], room: int) -> Iterator[None]:
    """The folder is this thread's to write to, and so many bytes fit; it is made if need be, and removed if it stays empty.

    Raises:
        InputError: another run writes there; it cannot be made or written to; a folder has the name of one of the files.
    """
    with tried(folder, room), locked(folder, wait=_MOMENT):
        _check_free(folder, files)
        yield


@contextmanager
def tried(folder: Path, room: int, name: str | None = None) -> Iterator[None]:
    """So many bytes fit into the folder, and a file of this name; it is made if need be, and removed if it stays empty.

    Raises:
        InputError: it cannot be made or written to.
    """
    folder = check_name(folder)
    made = _make(folder)
    try:
        try_to_write(folder, room)
        if name is not None and not os.path.lexists(folder / name):
            try_to_write(folder, 0, name)
        yield
    finally:
        for each in made:
            with suppress(OSError):  # it holds something, or is gone
                each.rmdir()


def replace(folder: Path, files: Mapping[str, bytes], instead: tuple[str, ...] = ()) -> None:
    """Put files into a folder, all at once; those named in ``instead`` are removed, others are left alone.

    Raises:
        InputError: it cannot be written to, or another run writes there for a long time.
    """
    folder = check_name(folder)
    _make(folder)
    with locked(folder, wait=PATIENCE) as alone, explaining(f"cannot write to the folder {folder}"):
        _check_free(folder, tuple(files))
        if alone:
            remove_left(folder)
        with replacing(folder / _ARRIVED, folder=True, durable=False) as aside:
            for name, content in files.items():
                (aside / name).write_bytes(content)
            for name in instead:
                (aside / f"{name}{_GONE}").touch()
            settle(folder)  # an earlier save may have been interrupted
        settle(folder)


def settle(folder: Path) -> None:
    """Move a complete new set of files to its place.

    Interrupted, it can be run again: a file is either still among the arrived ones or already in its place.
    """
    arrived = folder / _ARRIVED
    if not arrived.is_dir():
        return
    for path in sorted(arrived.iterdir()):
        if path.name.endswith(_GONE):
            (folder / path.name.removesuffix(_GONE)).unlink(missing_ok=True)
            path.unlink()
        else:
            os.replace(path, folder / path.name)
    arrived.rmdir()


def read(folder: Path, *names: str) -> tuple[str, bytes]:
    """The first of the files that is there: its name and content.

    Raises:
        MismatchError: there is none.
        InputError: it cannot be read.
    """
    # What has arrived but was not moved to its place yet is newer than what is there.
    for place in (folder / _ARRIVED, folder):
        for name in names:
            with explaining(f"{place / name} cannot be read"):
                try:
                    return name, (place / name).read_bytes()
                except (FileNotFoundError, NotADirectoryError):
                    continue
    raise MismatchError(f"{folder} has no {' or '.join(names)}; a folder written by 'massieu probe' is needed")


def read_together(folder: Path, record: str, attempt: Callable[[], Read]) -> Read:
    """What `attempt` reads, tried again while another process replaces the files.

    Raises:
        MismatchError: what `attempt` raised, when nobody has changed the folder meanwhile.
    """
    until = time.monotonic() + PATIENCE
    while True:
        before = _state(folder, record)
        try:
            return attempt()
        except MismatchError:
            late = time.monotonic() > until
            if late or (not is_locked(folder) and _state(folder, record) == before):
                raise
        time.sleep(_AGAIN)


def _state(folder: Path, record: str) -> bytes | None:
    try:
        return read(folder, record)[1]
    except MismatchError:
        return None


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns what was made, the innermost first."""
    with explaining(f"the output folder {folder} cannot be made"):
        places = (folder, *folder.absolute().parents)
        missing = [path for path in places if not os.path.lexists(path)]
        nearest = next(path for path in places if os.path.lexists(path))
        if not os.path.isdir(nearest):
            raise InputError(f"the output folder {folder} cannot be made: {nearest} is a file")
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def _check_free(folder: Path, files: tuple[str, ...]) -> None:
    for name in files:
        if os.path.isdir(folder / name):
            raise InputError(f"{folder / name} is a folder, where a file of the result has to be")
