"""Standard streams that may be closed, full or gone while a command runs."""

import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

from massieu.foundation.printable import visible

CANNOT_WRITE = 2


class OutputLost(Exception):  # noqa: N818 - a state of the stream, raised once
    """Standard output cannot be written to. It is no OSError, which callers would take for one of their own files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror or error}")
        # The reader of a pipe may have closed it; then the command ends like others that SIGPIPE ends.
        self.piped = error.errno == errno.EPIPE
        self.status = 128 + signal.SIGPIPE if self.piped else CANNOT_WRITE


class _Guarded(io.FileIO):
    """A stream's file. After its first failure it accepts and drops all data, so that no later flush fails."""

    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises
        self._has_failed = False

    def write(self, data: Any, /) -> int:
        if not self._has_failed:
            try:
                return super().write(data)
            except OSError as error:
                self._has_failed = True
                if self._raises:
                    raise OutputLost(error) from error
        return len(memoryview(data).cast("B"))


def ready() -> None:
    """Make the standard streams safe to use.

    Closed descriptors are opened on the null device: otherwise a file of the result would get their number, and with it what
    libraries print. Output that fails raises `OutputLost` once. Messages that cannot be printed are dropped, since a run
    should not end because of them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number, which is this one.
    # Python's streams of closed descriptors are None. Output is not wanted then; commands report missing input themselves.
    stdout = sys.stdout or _null_stream()
    stderr = sys.stderr or _null_stream()
    sys.stdout = _guarded(stdout, sys.__stdout__, raises=True)
    sys.stderr = _guarded(stderr, sys.__stderr__, raises=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal can show the formulas.


def _null_stream() -> TextIO:
    return open(os.devnull, "w")


def _guarded(stream: TextIO, original: TextIO | None, raises: bool) -> TextIO:
    # On Windows the console is not a file. A stream that somebody has replaced is left to them.
    if os.name == "nt" or stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    file = io.BufferedWriter(_Guarded(stream.fileno(), raises))
    return io.TextIOWrapper(file, encoding=stream.encoding, line_buffering=stream.line_buffering)


def say(message: str) -> None:
    """Print one line to standard error."""
    print(f"massieu: {visible(message)}", file=sys.stderr, flush=True)


def show(text: str = "", *, bold: str = "", err: bool = False) -> None:
    """Print text to standard output, or to standard error; `bold` precedes it, in bold type on a terminal."""
    import typer

    beginning = typer.style(visible(bold), bold=True) if bold else ""
    typer.echo(f"{beginning}{visible(text)}", err=err)
