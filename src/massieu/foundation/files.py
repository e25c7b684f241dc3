"""Files and folders that are complete or not there, at any moment and whatever ends the process."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFT = ".massieu-"
"""Begins the names of what is written aside. What a process that was killed has left is removed by a later one."""


@contextmanager
def replacing(path: Path, *, folder: bool = False, durable: bool = True, mark: str = "") -> Iterator[Path]:
    """A place beside `path` to write to, which takes the name `path` when the block ends well.

    An earlier file is replaced at once; a folder must be new, or the earlier one empty. After an error or Ctrl-C nothing
    is left beside it. A process that is killed leaves what `remove_left` finds.

    Args:
        path: The file or folder; the one that holds it must exist.
        folder: The place is a folder, which is there already; else it is a file, which the block makes.
        durable: Wait until the content is on the disk. Or a machine that stops may have the name and not the content.
        mark: A word in the name of the place, for `remove_left`.
    """
    # A short name of its own: that of the file may be as long as names can be.
    aside = path.with_name(f"{LEFT}{f'{mark}-' if mark else ''}{secrets.token_hex(8)}")
    try:
        if folder:
            aside.mkdir()
        yield aside
        if durable:
            for written in sorted(aside.rglob("*")) if folder else [aside]:
                if written.is_file():
                    _settle(written)
        os.replace(aside, path)
    except BaseException:
        # The first error is the one to tell.
        with suppress(OSError):
            _remove(aside)
        raise


def remove_left(folder: Path, mark: str = "") -> None:
    """Remove what killed processes have left beside files in a folder, or of that only what has the mark.

    Only where no other process writes there, or none with this mark.
    """
    for left in folder.glob(f"{LEFT}{f'{mark}-' if mark else ''}*"):
        _remove(left)


def _settle(path: Path) -> None:
    # Opened for writing: elsewhere than on Linux only such a file can be settled.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
