"""Which part of a text one process reads, where it stores its running sums, and with whom it adds them up."""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import massieu
from massieu.errors import InputError, ProcessLostError
from massieu.foundation.files import remove_left, replacing
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.module_hash import settings_hash
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import forget_rows
from massieu.probing.sums.running import State, is_packed, packed, unpacked
from massieu.storage.record_files import TOKENS
from massieu.storage.writing import check_name, explaining

RUNNING = "running"
"""The folder in a result's folder where running sums are stored."""
STORE_EVERY = 5.0
"""Minutes."""
_FILE = "share-{}-of-{}.safetensors"
_NAME = re.compile(r"share-\d+-of-(\d+)\.safetensors")
PATIENCE = timedelta(days=30)
"""How long the slowest process is waited for: only one that has died ends the wait."""


class Resumable(Protocol):
    """What a course takes through the text: a session."""

    loaded: LoadedModel
    options: Options
    batches: int
    warnings: list[str]

    def state(self) -> State:
        """All that was measured."""
        ...

    def restore(self, state: State) -> None:
        """Go on from such a state."""
        ...

    def add(self, state: State) -> None:
        """Add what another process has measured."""
        ...


@dataclass(eq=False)
class Course:
    """The way of one process through the text.

    Every process comes past all batches, so that windows have the same numbers everywhere; it reads each one in
    ``processes``, beginning with its own number. Running sums are stored with how far it has come, and with a digest of
    the batches it has come past.

    Attributes:
        rank, processes: which process this is, and of how many.
        folder: where running sums are stored; None is nowhere.
        resume: go on from what is stored there.
        every: minutes between two times of storing.
        settings: what has to be the same for sums to belong together.
        group: the processes, connected for tensors in main memory; None is the default group.
    """

    rank: int = 0
    processes: int = 1
    folder: Path | None = None
    resume: bool = False
    every: float = STORE_EVERY
    settings: dict[str, Any] = field(default_factory=dict)
    group: Any = None
    start: int = 0
    digest: str = ""
    _empty: State = field(default_factory=dict)
    _stored: State = field(default_factory=dict)
    _kept: bool = False
    _latest: float = field(default_factory=time.monotonic)

    def owns(self, batch: int) -> bool:
        """Whether this process reads a batch: the processes take them in turn."""
        return batch >= self.start and batch % self.processes == self.rank

    def has_stored_sums(self) -> bool:
        """Whether there is something to resume.

        Raises:
            InputError: what is there was stored by another number of processes.
        """
        if self.folder is None or not self.resume:
            return False
        stored = _stored_in(self.folder)
        other_numbers = set(stored.values()) - {self.processes}
        if other_numbers:
            raise InputError(
                f"{self.folder} holds the running sums of {_number(min(other_numbers))}; resume with as many, not with "
                f"{_number(self.processes)}"
            )
        return bool(stored)

    def resumes(self) -> bool:
        """Whether this process goes on from sums of its own."""
        path = self._path()
        return self.has_stored_sums() and path is not None and path.exists()

    def begin(self, session: Resumable, empty: State) -> None:
        """After the first batch: put what was stored, or nothing, in place of sums that are not this process's own.

        Raises:
            InputError: what was stored belongs to another run.
        """
        self._empty = empty
        self._latest = time.monotonic()
        path = self._path()
        if path is not None:
            loaded = session.loaded
            # The digest of a checkpoint is that of its weights, and its configuration can be edited.
            model = {"model": loaded.hash, "model configuration": settings_hash(loaded.module)}
            self.settings |= {"massieu": massieu.__version__, **model, "seed": session.options.seed}
        if path is not None and self.resumes():
            with explaining(f"{path} cannot be read"):
                stored = unpacked(path.read_bytes(), str(path))
            self._check(stored, path)
            self.start = stored["batches"]
            self._stored = stored
            with _belonging(path):
                session.restore(stored["session"])
        elif self.rank:
            session.restore(empty)

    def _check(self, stored: State, path: Path) -> None:
        stored_settings = stored.get("settings", {})
        for name, setting in self.settings.items():
            stored_setting = stored_settings.get(name)
            if stored_setting == setting:
                continue
            if name == "own_statistics":
                before = stored_setting or {}
                now = setting or {}
                changed = [statistic for statistic in before | now if before.get(statistic) != now.get(statistic)]
                raise InputError(
                    f"cannot resume: {path} is of a run in which the code of {', '.join(changed)} was another; give the "
                    "statistic that it was begun with, or begin without resume"
                )
            what = f"{name} (by its digest)" if name.startswith("model") else name
            raise InputError(
                f"cannot resume: {path} is of a run with another {what}: {stored_setting!r}, not {setting!r}"
            )

    def advance(self, session: Resumable, inputs: dict[str, Any]) -> None:
        """Add a batch to the digest of the text, and compare it with the stored one at the place to resume at.

        Raises:
            InputError: the text up to here is not what the stored sums were read from.
        """
        digest = hashlib.sha256(self.digest.encode())
        for name, value in inputs.items():
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self.digest = digest.hexdigest()
        if session.batches + 1 == self.start and self.digest != self._stored["digest"]:
            raise InputError(
                f"cannot resume: the text differs from the one that {self._path()} was read from, among its first "
                f"{self.start} batches"
            )

    def check_reached(self, session: Resumable) -> None:
        """Raises:
        InputError: the text has ended before the place to resume at.
        """
        if session.batches < self.start:
            raise InputError(
                f"cannot resume: the text has {session.batches} batches, but {self._path()} was read from {self.start}"
            )

    def store(self, session: Resumable, now: bool = False) -> None:
        """Store the running sums, if it is time to; a failure is noted, and the reading goes on."""
        path = self._path()
        due = now or time.monotonic() - self._latest >= 60 * self.every
        if path is None or not due or session.batches <= self.start:
            return
        state = {"settings": self.settings, "batches": session.batches, "digest": self.digest}
        content = packed(state | {"session": session.state()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left(path.parent, path.stem)
            with replacing(path, mark=path.stem) as aside:
                aside.write_bytes(content)
            self._kept = True
            for old, processes in _stored_in(path.parent).items():
                if processes != self.processes:  # of an earlier run, which this one replaces
                    old.unlink(missing_ok=True)
        except OSError as error:
            note = f"running sums could not be stored in {path.parent}: {error.strerror or error}"
            if note not in session.warnings:
                session.warnings.append(note)
        self._latest = time.monotonic()

    def add_resume_hint(self, error: Exception) -> None:
        """Add a note to an error that ends the reading: where its running sums are stored."""
        if self.folder is not None and (self._kept or self.start):
            error.add_note(f"(running sums are stored in {self.folder}, to be resumed)")

    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / _FILE.format(self.rank + 1, self.processes)

    def finish(self, session: Resumable, complete: bool) -> bool:
        """Store the sums of a reading that was interrupted, and give every process those of all.

        Returns:
            Whether all have read to the end.

        Raises:
            InputError: as `gather`.
            ProcessLostError: as `gather`.
        """
        if not complete:
            self.store(session, now=True)
        return complete if self.processes == 1 else self.gather(session, complete)

    # Several processes -------------------------------------------------------------------------------------------------

    def gather(self, session: Resumable, complete: bool) -> bool:
        """Give every process the sums of all; returns whether all have read to the end.

        Raises:
            InputError: the processes were not given the same batches.
            ProcessLostError: another process has ended before its time.
        """
        own_statistics = self.settings.get("own_statistics")
        mine = {
            "complete": complete,
            "digest": self.digest,
            "session": session.state(),
            "own_statistics": own_statistics,
        }
        try:
            sent = self._exchange(packed(mine))
        except RuntimeError as error:
            self.store(session, now=True)
            kept = "" if self.folder is None else f"; what was read is stored in {self.folder}"
            raise ProcessLostError(
                f"one of the {self.processes} processes has ended before the others{kept}"
            ) from error
        parts = [unpacked(content, f"what process {rank} has sent") for rank, content in enumerate(sent, 1)]
        complete = all(part["complete"] for part in parts)
        if any(part["own_statistics"] != own_statistics for part in parts):
            raise InputError(
                "every process must be given the same statistics; the code of one's own differs between them"
            )
        if complete and len({part["digest"] for part in parts}) > 1:
            raise InputError(
                "every process must be given all batches, in the same order; they were given different ones"
            )
        session.restore(self._empty)
        for part in parts:
            session.add(part["session"])
        return complete

    def _exchange(self, own: bytes) -> list[bytes]:
        """What each process sends, in all of them."""
        return [_broadcast(own if rank == self.rank else b"", rank, self.group) for rank in range(self.processes)]


def course_for(distributed: bool, folder: Path | None, resume: bool, every: float, settings: dict[str, Any]) -> Course:
    """The course of this process.

    Raises:
        InputError: there is no process group to share the text in; something that no run has stored has the name of running
            sums.
    """
    place = None if folder is None else check_name(folder)
    if place is not None and place.exists() and not place.is_dir():
        raise InputError(f"{place} is a file; running sums need a folder")
    if place is not None:
        _check_ours(place)
    rank = 0
    processes = 1
    group = None
    if distributed:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "distributed=True needs an initialised process group (torch.distributed.init_process_group); on the "
                "command line, torchrun makes one"
            )
        rank = dist.get_rank()
        processes = dist.get_world_size()
        # Made before the work: a process that has died is then noticed by its connection, which cannot be made later.
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
    settings = settings | {"processes": processes}
    return Course(rank, processes, place, resume, every, settings, group)


def running_in(folder: Path) -> Path:
    """The folder of running sums in a result's folder.

    Raises:
        InputError: it is a symbolic link, and the result's folder may be somebody else's.
    """
    place = folder / RUNNING
    if place.is_symlink():
        raise InputError(f"{place} is a symbolic link, and no link in a result's folder is followed; remove it")
    return place


def _check_ours(folder: Path) -> None:
    """That what has the names of running sums is such, since it may be replaced and removed.

    Raises:
        InputError: it is not; the message names it.
    """
    for path in (folder / TOKENS, *folder.glob("*")):
        named = path.name == TOKENS or _NAME.fullmatch(path.name) is not None
        if named and path.is_symlink():
            raise InputError(f"{path} is a symbolic link, and no link among running sums is followed; remove it")
        if named and path.name != TOKENS and not is_packed(path):
            raise InputError(f"{path} is in the way: it holds no running sums; move it, or name another folder")


def forget(folder: Path) -> None:
    """Remove the running sums, and the per-token rows beside them, of a run whose result is saved.

    Raises:
        InputError: they cannot be removed.
    """
    with explaining(f"the result is saved, but the running sums in {folder} could not be removed"):
        for path in _stored_in(folder):
            path.unlink(missing_ok=True)
        remove_left(folder / TOKENS)
        forget_rows(folder / TOKENS)
        remove_left(folder)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _stored_in(folder: Path) -> dict[Path, int]:
    """The files of running sums in a folder, and how many processes there were."""
    named = {path: _NAME.fullmatch(path.name) for path in sorted(folder.glob("*"))}
    return {path: int(match[1]) for path, match in named.items() if match and is_packed(path)}


def _broadcast(content: bytes, source: int, group: Any) -> bytes:
    """The bytes of one process, in all."""
    size = torch.tensor([len(content)])
    dist.broadcast(size, source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    if content:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, source, group=group)
    return data.numpy().tobytes()


@contextmanager
def _belonging(path: Path) -> Iterator[None]:
    """Sums that do not fit are of another run."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot resume: {path} does not hold the sums of this run ({error})") from error


def _number(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"
