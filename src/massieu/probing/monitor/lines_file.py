"""Records as JSON lines, appended to a file."""

import os
from collections.abc import Mapping
from contextlib import closing
from io import FileIO
from typing import Any

import massieu
from massieu.errors import InputError
from massieu.probing.monitor.warning import warn
from massieu.storage.record_lines import differing, header_line, read_header, record_line
from massieu.storage.writing import check_name, explaining


class LinesFile:
    """JSON lines, appended: each record is one write to the system, so that a kill can cut no line but the last.

    The system may end a write between two pages of memory where its process is killed. `read_run` leaves such a line out
    and says so; the next record begins a line of its own.

    A file that has lines already is gone on with. Its header is of the run that began it; where this run's settings are
    others, a warning names them.

    Args:
        path: The file; its folder is made.
        settings: What the header says of the monitor.

    Raises:
        InputError: no such file can be written.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = check_name(path)
        self._settings = dict(settings)
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; records need the name of a file")
        with explaining(f"cannot write records to {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._opened() as file:
                has_lines = _size(file) > 0
        if has_lines:
            self._warn_of_other_settings(read_header(self.path))

    def __call__(self, record: Mapping[str, float], step: int) -> None:
        """Append a record.

        Raises:
            OSError: it could not be written, or not as a whole.
        """
        line = record_line(step, record, [alarm.key for alarm in getattr(record, "alarms", ())])
        with self._opened() as file:
            if _size(file) == 0:
                line = header_line(massieu.__version__, self._settings) + line
            elif not _ends_a_line(file):
                line = "\n" + line
            data = line.encode()
            written = file.write(data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes of a record were written")

    def _opened(self) -> "closing[FileIO]":
        # Unbuffered: one call of `write` is one of the system's.
        return closing(FileIO(self.path, "a+"))

    def _warn_of_other_settings(self, header: Mapping[str, Any]) -> None:
        differences = differing(header, self._settings, ("prefix",))
        if differences:
            warn(f"{self.path} has records of another run: {differences}")


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _ends_a_line(file: FileIO) -> bool:
    """Whether what is there is whole: the latest write of a run before may have been cut."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
