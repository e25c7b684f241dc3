"""Pages that are written completely or not at all, and tests before the work whether a place can be written to."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from massieu.errors import InputError
from massieu.foundation.files import LEFT, overwriting

_BLOCK = 1 << 20


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn an error of the file system inside this context into one sentence that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: {error.strerror or error}") from error


def check_name(path: str | os.PathLike[str]) -> Path:
    """The path, checked to be one that a file can have.

    Raises:
        InputError: it holds a zero byte, or a character that the file system cannot encode.
    """
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise InputError(f"{str(path)!r} cannot be the name of a file: it holds a character that no name may have")
    return Path(path)


def write_whole(path: Path, page: str | bytes, what: str) -> None:
    """Write a page or a picture, which replaces an earlier one in one step; missing folders are made, and devices written to.

    Characters of tokens that are not valid Unicode become question marks.

    Args:
        path: The file.
        page: Its text.
        what: What it is, for errors.

    Raises:
        InputError: the file cannot be written.
    """
    path = check_name(path)
    with explaining(f"cannot write {what} {path}"):
        if os.path.isdir(path):
            raise InputError(f"{path} is a folder; {what} needs the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with overwriting(path) as aside:
            aside.write_bytes(page if isinstance(page, bytes) else page.encode("utf-8", "replace"))


def try_to_write(folder: Path, room: int, name: str | None = None) -> None:
    """Write `room` bytes into a folder and remove them: only this shows quotas and other limits.

    Args:
        folder: A folder that exists.
        room: Number of bytes.
        name: Name of the file, which must not exist; None: a name that nothing has.

    Raises:
        InputError: the bytes cannot be written.
    """
    trial = folder / (name or f"{LEFT}{secrets.token_hex(8)}")
    with explaining(f"cannot write to the folder {folder}" if name is None else f"cannot write {trial}"):
        file = open(trial, "xb")  # noqa: SIM115 - closed below, and only then removed
    with explaining(f"cannot write {room / 1e6:.0f} MB, which may be needed, to the folder {folder}"):
        try:
            with file:
                for _ in range(0, room, _BLOCK):
                    file.write(bytes(_BLOCK))
        finally:
            with suppress(OSError):
                trial.unlink(missing_ok=True)
