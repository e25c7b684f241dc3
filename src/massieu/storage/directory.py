"""An open folder: its files are opened relative to it, written durably, and no symbolic link in it is followed.

A result may come from somebody else, and a link in it may point anywhere. The folder itself may be reached through links,
since its path is the user's own.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from massieu.errors import InputError
from massieu.foundation.files import LEFT, sync_folder

_RELATIVE = os.open in os.supports_dir_fd
"""Whether the system opens files relative to an open folder. If not, links are only looked for beforehand."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_BLOCK = 1 << 20
"""Bytes that are written or copied at a time."""


class Directory:
    """An open folder.

    Attributes:
        path: Its path, for messages and for libraries that open files by name.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that exists, also through links."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY) if _RELATIVE else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _at(self, name: str) -> tuple[str | Path, dict[str, Any]]:
        """The path and the keywords by which functions of `os` refer to an entry."""
        if self._descriptor is None:
            return self.path / name, {}
        return name, {"dir_fd": self._descriptor}

    # --- looking -----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all entries, in order."""
        return sorted(os.listdir(self.path if self._descriptor is None else self._descriptor))

    def status(self, name: str) -> os.stat_result | None:
        """The status of an entry; None if there is none.

        Raises:
            InputError: it is a symbolic link.
        """
        place, relative = self._at(name)
        try:
            status = os.stat(place, follow_symlinks=False, **relative)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(status.st_mode):
            raise InputError(
                f"{self.path / name} is a symbolic link, and no link in a result's folder is followed; put a copy of "
                "what it points to in its place"
            )
        return status

    def is_file(self, name: str) -> bool:
        """Whether there is a regular file of this name."""
        status = self.status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def read(self, name: str) -> bytes:
        """The content of a regular file.

        Raises:
            FileNotFoundError: there is no regular file of this name.
            InputError: it is a symbolic link.
        """
        with os.fdopen(self._open(name), "rb") as file:
            return file.read()

    def digest(self, name: str) -> str:
        """The hash of a regular file, which may be large; raises as `read`."""
        with os.fdopen(self._open(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _open(self, name: str) -> int:
        if not self.is_file(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))
        place, relative = self._at(name)
        return os.open(place, os.O_RDONLY | _NO_LINK | _NO_WAIT | _BINARY, **relative)

    # --- folders in it -----------------------------------------------------------------------------------------------

    def has_folder(self, name: str) -> bool:
        """Whether there is a folder of this name."""
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def below(self, name: str, make: bool = False) -> "Directory":
        """A folder in this one, with `make` created if it is missing.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none, or a file has its name.
            InputError: it is a symbolic link.
        """
        place, relative = self._at(name)
        if self.status(name) is None and make:
            os.mkdir(place, **relative)
        if self._descriptor is None:
            return Directory(self.path / name, None)
        flags = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK
        return Directory(self.path / name, os.open(place, flags, **relative))

    @contextmanager
    def holding(self, name: str, make: bool = False) -> Iterator[tuple["Directory", str]]:
        """The folder that holds a file, and the file's name there: for ``tokens/part`` the folder ``tokens`` and ``part``."""
        folder, _, leaf = name.rpartition("/")
        if not folder:
            yield self, leaf
            return
        with self.below(folder, make) as inner:
            yield inner, leaf

    # --- changing ----------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Write a new file; its content is on the disk when this returns."""
        place, relative = self._at(name)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666, **relative)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest[:_BLOCK]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, name: str, source: Path) -> None:
        """Add a regular file from elsewhere under this name, as a hard link, or as a copy if that is not possible."""
        place, relative = self._at(name)
        at = {"dst_dir_fd": relative["dir_fd"]} if relative else {}
        try:
            os.link(source, place, follow_symlinks=False, **at)
        except OSError:  # Another file system, one without links, or too many links.
            self._copy(name, source)
        if not self.is_file(name):
            raise InputError(f"{source} is no regular file")

    def _copy(self, name: str, source: Path) -> None:
        place, relative = self._at(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        with source.open("rb") as file, os.fdopen(os.open(place, flags, 0o666, **relative), "wb") as copy:
            shutil.copyfileobj(file, copy, _BLOCK)
            copy.flush()
            os.fsync(copy.fileno())

    def move(self, name: str, target: "Directory", new_name: str) -> None:
        """Move an entry to another folder and name, where it replaces what has that name."""
        if self._descriptor is None or target._descriptor is None:
            os.replace(self.path / name, target.path / new_name)
        else:
            os.replace(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file."""
        place, relative = self._at(name)
        os.unlink(place, **relative)

    def remove_empty(self, name: str) -> None:
        """Remove a folder if it exists and is empty."""
        place, relative = self._at(name)
        with suppress(OSError):
            os.rmdir(place, **relative)

    def remove_all(self, name: str) -> None:
        """Remove a folder with all its entries, or a file; what cannot be removed stays."""
        place, relative = self._at(name)
        if self.has_folder(name):
            shutil.rmtree(place, ignore_errors=True, **relative)
        else:
            with suppress(OSError):
                self.remove(name)

    def sync(self) -> None:
        """Wait until the folder's entries are on the disk."""
        sync_folder(self.path if self._descriptor is None else self._descriptor)


def digest(content: bytes) -> str:
    """The SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file that may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def aside_name() -> str:
    """A name that nothing has, for a file or folder that is not complete yet."""
    return f"{LEFT}{secrets.token_hex(8)}"
