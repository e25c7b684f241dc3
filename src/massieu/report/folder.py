"""A folder of files that belong together: replaced all at once, read all of one kind.

All are written aside, into a folder that then gets the name `_ARRIVED`; from there they are moved to their places one by
one. What has arrived is the folder's content from that moment on, wherever a process was killed. One of the files, the
record, has the others' hashes, so that who reads while another writes notices it.
"""

import glob
import hashlib
import os
import shutil
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

_NONE: Mapping[str, Path] = {}

Read = TypeVar("Read")


class MismatchError(InputError):
    """Files of a folder that do not belong together, or are not there."""


def digest(content: bytes) -> str:
    """The hash by which a file is known."""
    return hashlib.sha256(content).hexdigest()


def digest_of(path: Path) -> str:
    """The same of a file that may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def replace(
    folder: Path, files: Mapping[str, bytes], instead: tuple[str, ...] = (), linked: Mapping[str, Path] = _NONE
) -> None:
    """Put files into a folder, all at once; those named in ``instead`` are removed, others are left alone.

    Args:
        instead: names of files; one that ends with a hyphen, as ``tokens/part-``, stands for all that begin so.
        linked: large files, which are somewhere already, by names in a folder of this one: linked, or copied where
            that is not possible.

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
                mark = aside / f"{name}{_GONE}"
                mark.parent.mkdir(exist_ok=True)
                mark.touch()
            for name, path in linked.items():
                (aside / name).parent.mkdir(exist_ok=True)
                _link(path, aside / name)
            settle(folder)  # an earlier save may have been interrupted
        settle(folder)


def settle(folder: Path) -> None:
    """Move a complete new set of files to its place.

    Interrupted, it can be run again: a file is either still among the arrived ones or already in its place.
    """
    arrived = folder / _ARRIVED
    if not arrived.is_dir():
        return
    inner = sorted(path for path in arrived.iterdir() if path.is_dir())
    for place in (*inner, arrived):
        # What is to be removed goes first: it may be followed by files of the same names.
        for path in sorted(place.iterdir(), key=lambda path: (not path.name.endswith(_GONE), path.name)):
            target = folder / path.relative_to(arrived)
            if path.name.endswith(_GONE):
                for old in target.parent.glob(_pattern(target.name.removesuffix(_GONE))):
                    old.unlink(missing_ok=True)
                path.unlink()
            else:
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)
        place.rmdir()
        if place != arrived:
            with suppress(OSError):  # it holds something, or there is none
                (folder / place.name).rmdir()


def _pattern(name: str) -> str:
    """What a mark names: a hyphen at its end is followed by anything."""
    return glob.escape(name) + ("*" if name.endswith("-") else "")


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, target)


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


def has(folder: Path, name: str) -> bool:
    """Whether the file is in its place, or has arrived and is about to be."""
    return any((place / name).is_file() for place in (folder / _ARRIVED, folder))


def place(folder: Path, name: str) -> Path:
    """Where the file is now: among what has arrived, or in its place."""
    arrived = folder / _ARRIVED / name
    return arrived if arrived.is_file() else folder / name


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
