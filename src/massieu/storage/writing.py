"""One page on disk, complete or not there; and what is in the way of files, found before anything is lost."""

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
    """An error of the file system inside becomes one sentence that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: {error.strerror or error}") from error


def check_name(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can have this name.

    Raises:
        InputError: it holds a zero byte, or a character that is none.
    """
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise InputError(f"{str(path)!r} cannot be the name of a file: it holds a character that no name may have")
    return Path(path)


def write_whole(path: Path, page: str | bytes, what: str) -> None:
    """Write a page or a picture, so that an earlier one is replaced at once; folders are made, devices and FIFOs written to.

    A token need not be valid Unicode; on the page, what is not becomes a question mark.

    Raises:
        InputError: `what` cannot be written there.
    """
    path = check_name(path)
    with explaining(f"cannot write {what} {path}"):
        if os.path.isdir(path):
            raise InputError(f"{path} is a folder; {what} needs the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with overwriting(path) as aside:
            aside.write_bytes(page if isinstance(page, bytes) else page.encode("utf-8", "replace"))


def try_to_write(folder: Path, room: int, name: str | None = None) -> None:
    """Write so many bytes into a folder and remove them: quotas and limits are known to nothing else.

    Args:
        name: Of the file; one that nothing has.

    Raises:
        InputError: they cannot be written.
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
