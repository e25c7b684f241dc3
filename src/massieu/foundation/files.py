"""Files and folders that are complete or not there, at any moment and whatever ends the process."""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFT = ".massieu-"
"""Begins the names of what is written aside. What a process that was killed has left is removed by a later one."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems say that do not know how to wait for a folder."""


@contextmanager
def replacing(path: Path, *, folder: bool = False, durable: bool = True, mark: str = "") -> Iterator[Path]:
    """A place beside `path` to write to, which takes the name `path` when the block ends well.

    An earlier file is replaced at once, and its mode and owner are kept; a folder must be new, or the earlier one empty. A
    link is replaced, not followed: for a file that a user names there is `overwriting`. After an error or Ctrl-C nothing is
    left beside it. A process that is killed leaves what `remove_left` finds.

    Args:
        path: The file or folder; the one that holds it must exist.
        folder: The place is a folder, which is there already; else it is a file, which the block makes.
        durable: Wait until content and name are on the disk. Or a machine that stops may have the name and not the
            content, or neither after what it replaces was removed.
        mark: A word in the name of the place, for `remove_left`.
    """
    if not path.name:
        raise ValueError(f"path must name a file or folder, got {str(path)!r}")
    # A short name of its own: that of the file may be as long as names can be.
    aside = path.with_name(f"{LEFT}{f'{mark}-' if mark else ''}{secrets.token_hex(8)}")
    try:
        if folder:
            aside.mkdir()
        earlier = None if folder else _earlier(path)
        if earlier is not None:
            _make_private(aside, earlier)
        yield aside
        if durable:
            _settle_all(aside)
        if earlier is not None:
            aside.chmod(stat.S_IMODE(earlier.st_mode))
        os.replace(aside, path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        # The first error is the one to tell.
        with suppress(OSError):
            _remove(aside)
        raise


@contextmanager
def overwriting(path: Path) -> Iterator[Path]:
    """As `replacing`, for a file that a user names: what has this name stays what it is.

    The file that a link leads to is replaced, and the link is kept. A device or a FIFO is written to directly.
    """
    if is_special(path):
        yield path
        return
    with replacing(linked_to(path)) as aside:
        yield aside


def is_special(path: Path) -> bool:
    """Whether a path leads to a device, a FIFO or a socket: it can be written to, and must not be replaced."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def linked_to(path: Path) -> Path:
    """The place that a link leads to, whether there is a file yet or not; the path itself where it is no link."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def remove_left(folder: Path, mark: str = "") -> None:
    """Remove what killed processes have left beside files in a folder, or of that only what has the mark.

    Only where no other process writes there, or none with this mark. What is another user's may stay; it does no harm.
    """
    name = re.compile(re.escape(LEFT) + (rf"{re.escape(mark)}-" if mark else r"(?:.+-)?") + r"[0-9a-f]{16}")
    for left in folder.glob(f"{LEFT}*"):
        if name.fullmatch(left.name):
            with suppress(OSError):
                _remove(left)


def sync_folder(folder: Path | int) -> None:
    """Wait until a folder's entries are on the disk, where the system can do so: after a file was made, renamed, removed.

    Args:
        folder: Its path, or a descriptor of it.
    """
    if os.name == "nt":  # opens no folders
        return
    if isinstance(folder, int):
        _sync(folder)
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to, and not be read
        return
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _settle_all(path: Path) -> None:
    """A file, or a folder with all that is in it."""
    if not path.is_dir():
        _settle(path)
        return
    for each in sorted(path.iterdir()):
        _settle_all(each)
    sync_folder(path)


def _earlier(path: Path) -> os.stat_result | None:
    """What is known of the file that has a name; None where it is none, or a link."""
    try:
        earlier = path.lstat()
    except OSError:
        return None
    return earlier if stat.S_ISREG(earlier.st_mode) else None


def _make_private(aside: Path, earlier: os.stat_result) -> None:
    """Make an empty file that nobody else may read until it is complete, with the earlier one's owner where that is allowed."""
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    if os.name != "nt":
        with suppress(PermissionError):
            os.chown(aside, earlier.st_uid, earlier.st_gid)


def _settle(path: Path) -> None:
    # Opened for writing: elsewhere than on Linux only such a file can be settled.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
