"""A lock on a folder, so that one process at a time writes to it. The lock ends with its process."""

import errno
import os
import socket
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from massieu.errors import InputError
from massieu.storage.writing import explaining

LOCK = ".massieu_lock"
_BEGINNING = " (process "
"""The beginning of a lock file's content."""
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which no link is followed and no FIFO blocks."""
_RETRY_INTERVAL = 0.05
"""Seconds between two attempts to lock."""
_TAKEN = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""Errors of a lock that another holds."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of a file system without locks."""

_held: dict[tuple[str, int], int] = {}
"""The open lock files of this process, by folder and thread."""


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[bool]:
    """Lock a folder that exists against other writers; yields False if the file system has no locks.

    A thread that has the lock may take it again.

    Args:
        wait: Seconds to wait until another writer has finished.

    Raises:
        InputError: another process or thread writes there, or no file can be made there.
    """
    key = (os.path.realpath(folder), threading.get_ident())
    if key in _held:
        yield True
        return
    try:
        yield _acquire(folder, key, time.monotonic() + wait)
    finally:
        # None in the child of a fork, which has closed its copy: the lock is the parent's.
        if (descriptor := _held.pop(key, None)) is not None:
            _release(folder / LOCK, descriptor)


def is_locked(folder: Path) -> bool:
    """Whether another thread or process writes to the folder."""
    if (os.path.realpath(folder), threading.get_ident()) in _held:
        return False
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | _SAFELY)
    except OSError:
        return False
    try:
        _lock(descriptor, shared=True)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(descriptor)
    return False


def _acquire(folder: Path, key: tuple[str, int], until: float) -> bool:
    """Take the lock and add it to `_held`; False if the file system has no locks."""
    path = folder / LOCK
    while True:
        with explaining(f"cannot write to the folder {folder}"):
            descriptor = _opened(path)
        try:
            _check_ours(path, descriptor)
            _lock(descriptor)
            _held[key] = descriptor  # At once, since an interruption may come at any moment.
        except InputError:
            os.close(descriptor)
            raise
        except OSError as error:
            holder = _holder(path, descriptor)
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                warnings.warn(f"{folder} is on a file system without locks: let no other run write there", stacklevel=5)
                return False
            if error.errno not in _TAKEN:
                raise InputError(f"cannot lock the folder {folder}{_owned(path)}: {error.strerror}") from error
            if time.monotonic() >= until:
                raise InputError(f"another run{holder}") from None
            time.sleep(_RETRY_INTERVAL)
            continue
        if _still_there(path, descriptor):
            # The content is for messages only; a full disk, or another user's file, does not take it.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{_BEGINNING}{os.getpid()} on {socket.gethostname()})".encode())
            return True
        os.close(_held.pop(key))  # Its former holder has removed the file meanwhile.


def _opened(path: Path) -> int:
    """A descriptor of the lock file, which is made if it is missing."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except FileNotFoundError:  # Another process has just removed the folder, as it was empty.
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except PermissionError as error:
        if not os.path.lexists(path):
            raise
        try:  # Another user's, perhaps left by a run that was killed; to lock it, reading is enough.
            return os.open(path, os.O_RDONLY | _SAFELY)
        except PermissionError:
            raise InputError(
                f"the lock {path}{_owned(path)} cannot be opened; if no run of theirs is writing there, let them remove "
                "it, or name another folder"
            ) from error
    except OSError as error:
        if os.path.islink(path):
            raise InputError(f"{path} is a symbolic link, and no link is followed there; remove it") from error
        raise


def _check_ours(path: Path, descriptor: int) -> None:
    """Check that the file with the lock's name is a lock: the content of another file would be lost.

    Raises:
        InputError: it is another file.
    """
    status = os.fstat(descriptor)
    is_lock = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1  # 0 if it has just been removed.
    # A new lock is empty, and one on a full disk may hold a part of the beginning.
    if not is_lock or _read(descriptor)[: len(_BEGINNING)] not in _BEGINNING:
        raise InputError(f"{path} is in the way: it is no lock of massieu; move it, or name another folder")


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path, descriptor: int) -> str:
    """The process that has the lock and what to do, as the rest of a sentence."""
    process = _read(descriptor)
    sentence = f"{process}{_owned(path)} is writing to the folder {path.parent}; name another folder"
    if process and not process.endswith(f" on {socket.gethostname()})"):
        sentence += f", or remove {path} if that process is dead, whose computer has not given up its lock"
    return sentence


def _owned(path: Path) -> str:
    """A phrase that names the owner of a file; empty if it is this user or not known."""
    if os.name == "nt":
        return ""
    try:
        number = path.lstat().st_uid
    except OSError:  # The file is gone.
        return ""
    if number == os.geteuid():
        return ""
    try:
        return f" of the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f" of the user number {number}"


def _read(descriptor: int) -> str:
    with suppress(OSError):  # The content is for messages only.
        os.lseek(descriptor, 0, os.SEEK_SET)
        return os.read(descriptor, 300).decode(errors="replace")
    return ""


if os.name == "nt":
    import msvcrt

    _FAR = 1 << 30  # The locked byte lies behind all content, so that others may read the content.

    def _lock(descriptor: int, shared: bool = False) -> None:
        os.lseek(descriptor, _FAR, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

    def _release(path: Path, descriptor: int) -> None:
        os.close(descriptor)
        with suppress(OSError):  # Another process has opened it already; then it stays.
            path.unlink()

else:
    import fcntl
    import pwd

    def _lock(descriptor: int, shared: bool = False) -> None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def _release(path: Path, descriptor: int) -> None:
        try:
            with suppress(OSError):  # The folder may be gone or read-only; an unlocked file does no harm.
                if _still_there(path, descriptor):
                    path.unlink()
        finally:
            os.close(descriptor)

    def _forget() -> None:
        """Close the copies in a forked process: an open one would keep the lock after its owner's death."""
        for descriptor in _held.values():
            os.close(descriptor)
        _held.clear()

    os.register_at_fork(after_in_child=_forget)
