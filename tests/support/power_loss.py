"""What a disk may hold after a power failure: of what was not waited for, any part may be missing.

A `Disk` watches a folder while a program runs. It knows what was on the disk for certain, by the calls of fsync, and what
else may be: a file has any of the contents that it had since it was last waited for, or none; a folder any of its lists
of names since then, whatever has become of other folders.
"""

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHANGING = ("open", "write", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir")

Content = bytes | dict[str, int]
"""Of a file, or of a folder: numbers of its entries by name."""


@dataclass
class Disk:
    """The states that a folder may be in, at each moment since it was first looked at.

    Attributes:
        moments: For each moment, the contents that each file or folder may have.
    """

    root: Path
    moments: list[dict[int, list[Content]]] = field(default_factory=list)
    _possible: dict[int, list[Content]] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)  # by inode, which systems use again
    _count: int = 0

    def __post_init__(self) -> None:
        self._look()
        self._possible = {number: contents[-1:] for number, contents in self._possible.items()}
        self.moments = [dict(self._possible)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every call in the block that changes something is a moment."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGING:
                patch.setattr(os, name, self._noting(getattr(os, name)))
            patch.setattr(os, "fsync", self._settled)
            yield

    def _noting(self, function: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            self._look()
            return found

        return noted

    def _settled(self, descriptor: int) -> None:
        self._look()
        number = self._numbers.get(os.fstat(descriptor).st_ino)
        if number is not None:
            self._possible[number] = self._possible[number][-1:]
        self.moments.append(dict(self._possible))

    def _look(self) -> None:
        """Add what is there now to what may be."""
        seen: dict[int, int] = {}
        self._look_at(self.root, seen)
        self._numbers = seen
        self.moments.append(dict(self._possible))

    def _look_at(self, path: Path, seen: dict[int, int]) -> int:
        status = path.lstat()
        number = seen.get(status.st_ino, self._numbers.get(status.st_ino))
        is_folder = stat.S_ISDIR(status.st_mode)
        if number is None:
            self._count += 1
            number = self._count
            self._possible[number] = [{} if is_folder else b""]
        seen[status.st_ino] = number
        content: Content = (
            {each.name: self._look_at(each, seen) for each in sorted(path.iterdir())}
            if is_folder
            else path.read_bytes()
        )
        if self._possible[number][-1] != content:
            self._possible[number] = [*self._possible[number], content]
        return number

    def states(self, target: Path, draws: int = 2) -> Iterator[tuple[int, Path]]:
        """Folders as they may be after a failure, with the number of the moment: of each, the oldest, the newest, others."""
        generator = random.Random(0)
        seen = set()
        for place, moment in enumerate(self.moments):
            choices = [{number: contents[0] for number, contents in moment.items()}]
            choices += [{number: contents[-1] for number, contents in moment.items()}]
            for _ in range(draws):
                choices.append({number: generator.choice(contents) for number, contents in moment.items()})
            for chosen in choices:
                known = repr(sorted(chosen.items()))
                if known in seen and place < len(self.moments) - 1:
                    continue
                seen.add(known)
                shutil.rmtree(target, ignore_errors=True)
                _put(chosen, 1, target)
                yield place, target


def _put(chosen: dict[int, Content], number: int, path: Path) -> None:
    content = chosen[number]
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, inner in content.items():
        _put(chosen, inner, path / name)
