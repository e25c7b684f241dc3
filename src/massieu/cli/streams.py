"""Standard input and output that may be closed, full, or gone while a command runs."""

import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

from massieu.foundation.printable import visible

CANNOT_WRITE = 2


class OutputLost(Exception):  # noqa: N818 - a state of the stream, told once
    """Standard output cannot be written to. No OSError: others take those for their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror or error}")
        # Who reads a pipe may have seen enough; then a command ends like others that SIGPIPE ends.
        self.piped = error.errno == errno.EPIPE
        self.status = 128 + signal.SIGPIPE if self.piped else CANNOT_WRITE


class _Guarded(io.FileIO):
    """A stream's file. After its first failure it takes everything and writes nothing, so that no later flush fails."""

    def __init__(self, descriptor: int, tell: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._tell, self._lost = tell, False

    def write(self, data: Any, /) -> int:
        if not self._lost:
            try:
                return super().write(data)
            except OSError as error:
                self._lost = True
                if self._tell:
                    raise OutputLost(error) from error
        return len(memoryview(data).cast("B"))


def ready() -> None:
    """Make the standard streams safe to use.

    Descriptors that are closed are opened on nothing: a result's file would get their numbers, and what a library prints.
    Output that fails raises `OutputLost` once. Messages that cannot be shown are dropped: nobody reads them, and a run
    does not end for it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    # Python has no stream where the descriptor was closed. Output is not wanted then; input is missing, and said to be.
    sys.stdout, sys.stderr = sys.stdout or _nothing(), sys.stderr or _nothing()
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, tell=True)
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, tell=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show the formulas


def _nothing() -> TextIO:
    return open(os.devnull, "w")


def _guarded(stream: TextIO, original: TextIO | None, tell: bool) -> TextIO:
    # On Windows the console is no plain file; a stream that was replaced is its owner's.
    if os.name == "nt" or stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    file = io.BufferedWriter(_Guarded(stream.fileno(), tell))
    return io.TextIOWrapper(file, encoding=stream.encoding, line_buffering=stream.line_buffering)


def say(message: str) -> None:
    """One line on standard error."""
    print(f"massieu: {visible(message)}", file=sys.stderr, flush=True)


def show(text: str = "", *, bold: str = "", err: bool = False) -> None:
    """Text on standard output, or on standard error; on a terminal its beginning may be bold."""
    import typer

    typer.echo(f"{typer.style(visible(bold), bold=True) if bold else ''}{visible(text)}", err=err)
