"""Writing files and folders so that each is complete or absent at every moment, whatever ends the process."""

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
"""Beginning of the names of unfinished files and folders. A later process removes those that a killed process has left."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems that cannot wait for a folder's entries."""


@contextmanager
def replacing(path: Path, *, folder: bool = False, durable: bool = True, mark: str = "") -> Iterator[Path]:
    """A temporary path in the folder of `path`, which is renamed to `path` when the block ends without an error.

    An earlier file is replaced in one step, and its mode and owner are kept; an earlier folder must be empty. A link is
    replaced, not followed: `overwriting` is for files that a user names. After an error or Ctrl-C the temporary path is
    removed. If the process is killed it stays, and `remove_left` finds it.

    Args:
        path: The file or folder; its parent folder must exist.
        folder: Write a folder, which exists when the block begins; otherwise a file, which the block has to create.
        durable: Wait until content and name are on the disk. Without it, a machine that stops may keep the name without the
            content, or lose both after the earlier file was removed.
        mark: A word in the temporary name, for `remove_left`.
    """
    if not path.name:
        raise ValueError(f"path must name a file or folder, got {str(path)!r}")
    # The name does not contain that of the file, which may be as long as names can be.
    prefix = f"{LEFT}{mark}-" if mark else LEFT
    temporary = path.with_name(f"{prefix}{secrets.token_hex(8)}")
    try:
        if folder:
            temporary.mkdir()
        earlier = None if folder else _earlier_file(path)
        if earlier is not None:
            _create_private(temporary, earlier)
        yield temporary
        if durable:
            _sync_tree(temporary)
        if earlier is not None:
            temporary.chmod(stat.S_IMODE(earlier.st_mode))
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        # An error of the removal would hide the error that led here.
        with suppress(OSError):
            _remove(temporary)
        raise


@contextmanager
def overwriting(path: Path) -> Iterator[Path]:
    """As `replacing`, for a file that a user names: links, devices and FIFOs stay what they are.

    The file that a link leads to is replaced, and the link is kept. A device or a FIFO is written to directly.
    """
    if is_special(path):
        yield path
        return
    with replacing(linked_to(path)) as temporary:
        yield temporary


def is_special(path: Path) -> bool:
    """Whether a path leads to a device, a FIFO or a socket, which can be written to and must not be replaced."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def linked_to(path: Path) -> Path:
    """The path that a link leads to, whether or not a file exists there; any other path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def remove_left(folder: Path, mark: str = "") -> None:
    """Remove the temporary files and folders that killed processes left in a folder, with a mark only those that have it.

    Call it only where no other process writes, or none with this mark. Another user's files may stay; they do no harm.
    """
    marked = rf"{re.escape(mark)}-" if mark else r"(?:.+-)?"
    temporary_name = re.compile(re.escape(LEFT) + marked + r"[0-9a-f]{16}")
    for path in folder.glob(f"{LEFT}*"):
        if temporary_name.fullmatch(path.name):
            with suppress(OSError):
                _remove(path)


def sync_folder(folder: Path | int) -> None:
    """Wait until a folder's entries are on the disk, if the system can: after a file was created, renamed or removed.

    Args:
        folder: Its path, or an open descriptor of it.
    """
    if os.name == "nt":  # Windows opens no folders
        return
    if isinstance(folder, int):
        _sync_entries(folder)
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # the folder may be writable and not readable
        return
    try:
        _sync_entries(descriptor)
    finally:
        os.close(descriptor)


def _sync_entries(descriptor: int) -> None:
    """`os.fsync` of a folder, on file systems that know it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _sync_tree(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk."""
    if not path.is_dir():
        _sync_file(path)
        return
    for entry in sorted(path.iterdir()):
        _sync_tree(entry)
    sync_folder(path)


def _earlier_file(path: Path) -> os.stat_result | None:
    """Mode and owner of the regular file at a path; None if there is none, or a link."""
    try:
        earlier = path.lstat()
    except OSError:
        return None
    return earlier if stat.S_ISREG(earlier.st_mode) else None


def _create_private(path: Path, earlier: os.stat_result) -> None:
    """Create an empty file that nobody else may read until it is complete, with the earlier file's owner if that is allowed."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    if os.name != "nt":
        with suppress(PermissionError):
            os.chown(path, earlier.st_uid, earlier.st_gid)


def _sync_file(path: Path) -> None:
    # Opened for writing: some systems other than Linux sync no file that is open for reading alone.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
