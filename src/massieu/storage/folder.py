"""A folder that holds a result: each save is a folder of its own inside, never changed, and the record names the newest.

::

    out/run.json                  the record: JSON whose ``files`` has the hash of every other file
    out/heads.parquet, ...        the files of the latest save, where people look for them: hard links, else copies
    out/.massieu/<hash>/...       the files of one save, the record among them, by whose hash the folder is named
    out/.massieu/<hash>.json      the record of an earlier version's result, while it is replaced

The record is replaced in one step, after all that it names is on the disk. A reader follows it by its hash, and so finds one
save or the other, never half of one. Only then are the files of earlier saves removed. A result without ``.massieu``, copied
or of an earlier version, is read from the folder itself.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from massieu.errors import InputError
from massieu.foundation.files import LEFT, sync_folder
from massieu.storage.directory import Directory, aside_name, digest, digest_of
from massieu.storage.locking import LOCK, is_locked, locked
from massieu.storage.writing import check_name, explaining, try_to_write

__all__ = ["MismatchError", "Stored", "digest", "digest_of", "read", "reserved", "save", "save_or_elsewhere", "tried"]

STORE = ".massieu"
"""The folder in a result's folder that holds the saves."""
PATIENCE = 20.0
"""Seconds to wait for another process that saves."""
_MOMENT = 0.5
"""Seconds to wait for a reader that holds the lock only to see whether it is free."""
_RETRY_INTERVAL = 0.02
"""Seconds between two attempts to read."""
_SAVE = re.compile(r"[0-9a-f]{64}")
"""Names of saves in the store."""
_LIST = re.compile(r"([0-9a-f]{64})\.json")
"""Names of kept records in the store."""
_NO_FILES: Mapping[str, Path] = {}

Read = TypeVar("Read")


class MismatchError(InputError):
    """Files of a folder that are missing or do not belong together."""


# --- before the work -------------------------------------------------------------------------------------------------


@contextmanager
def reserved(folder: Path, record: str, files: Sequence[str], room: int) -> Iterator[None]:
    """Reserve a folder for saves of this thread, after a test that `room` bytes fit.

    A missing folder is made, and removed if it stays empty.

    Args:
        record: Name of the record.
        files: Names of the other files, or patterns of them such as ``tokens/part-*``.
        room: Bytes that the save may take.

    Raises:
        InputError: another run writes there; the folder cannot be made or written to; something that no earlier save has
            left is in the place of one of the files.
    """
    with _created(folder) as folder, locked(folder, wait=_MOMENT):
        with explaining(f"cannot read the folder {folder}"), Directory.open(folder) as top:
            _Earlier.saved_in(top, record).check_free(top, (record, *files))
        with tried(folder / STORE, room):
            yield


@contextmanager
def tried(folder: Path, room: int, name: str | None = None) -> Iterator[None]:
    """Test that `room` bytes, and a file of this name, can be written to a folder.

    A missing folder is made, and removed if it stays empty.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    with _created(folder) as folder:
        try_to_write(folder, room)
        if name is not None and not os.path.lexists(folder / name):
            try_to_write(folder, 0, name)
        yield


@contextmanager
def _created(folder: Path) -> Iterator[Path]:
    """The folder, made if it is missing; folders that were made are removed if they stay empty."""
    folder = check_name(folder)
    created = _make(folder)
    try:
        yield folder
    finally:
        for path in created:
            with suppress(OSError):  # It holds something, or is gone.
                path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Make the folder with its parents; returns those that were missing, the innermost first."""
    with explaining(f"the output folder {folder} cannot be made"):
        path_and_parents = (folder, *folder.absolute().parents)
        missing = [path for path in path_and_parents if not os.path.lexists(path)]
        nearest = next(path for path in path_and_parents if os.path.lexists(path))
        if not os.path.isdir(nearest):
            raise InputError(f"the output folder {folder} cannot be made: {nearest} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
    return missing


# --- saving ----------------------------------------------------------------------------------------------------------


def save(folder: Path, record: str, files: Mapping[str, bytes], linked: Mapping[str, Path] = _NO_FILES) -> None:
    """Replace the result in a folder, in one step; files that no earlier save has left are not touched.

    Args:
        record: Name of the record, which is one of the files, and lists the hashes of all others.
        files: Contents of the files by their names.
        linked: Files that exist elsewhere and may be large: they are linked, or copied if that is not possible.

    Raises:
        InputError: the folder cannot be written to, or another run writes there for a long time; something that no
            earlier save has left is in the place of one of the files.
    """
    with (
        _created(folder) as folder,
        locked(folder, wait=PATIENCE) as has_lock,
        explaining(f"cannot write to the folder {folder}"),
        Directory.open(folder) as top,
    ):
        earlier = _Earlier.saved_in(top, record)
        earlier.check_free(top, (record, *files, *linked))
        try:
            with top.below(STORE, make=True) as store:
                _save(top, store, earlier, files, linked, has_lock)
        finally:
            top.remove_empty(STORE)


def _save(
    top: Directory,
    store: Directory,
    earlier: "_Earlier",
    files: Mapping[str, bytes],
    linked: Mapping[str, Path],
    has_lock: bool,
) -> None:
    record = earlier.record_name
    names = [name for name in (*files, *linked) if name != record]
    new = digest(files[record])
    if has_lock:
        _remove_left(store)
    _keep_list(store, earlier)
    if not _is_whole(store, new, record):
        _write(store, new, files, linked)
    _write_file(store, files[record], top, record)  # From here on, the new save is the result.
    with explaining(f"the result in {top.path} is saved, but its files could not be put in their places"):
        _publish(top, store, new, names)
        earlier.remove_stale(top, names)
    if has_lock:  # Otherwise another process may have saved since.
        earlier.remove_saves(store, new)


def _write(store: Directory, new: str, files: Mapping[str, bytes], linked: Mapping[str, Path]) -> None:
    """Write the folder of a save under another name, and rename it once all of it is on the disk."""
    aside = aside_name()
    try:
        with store.below(aside, make=True) as content:
            for name, file_content in files.items():
                with content.holding(name, make=True) as (place, leaf):
                    place.write(leaf, file_content)
            for name, path in linked.items():
                with content.holding(name, make=True) as (place, leaf):
                    place.link(leaf, path)
            for folder in _folders_of((*files, *linked)):
                with content.below(folder) as inner:
                    inner.sync()
            content.sync()
        if store.status(new) is not None:  # A save of this name that somebody has damaged.
            store.move(new, store, aside_name())
        store.move(aside, store, new)
    except BaseException:
        store.remove_all(aside)
        raise
    store.sync()


def _publish(top: Directory, store: Directory, new: str, names: Sequence[str]) -> None:
    """Link the files of a save into the result's folder. Its subfolders are synchronised to the disk, `top` itself is not."""
    with store.below(new) as content:
        for name in names:
            with top.holding(name, make=True) as (place, leaf), content.holding(name) as (source, _):
                _put_link(store, source, place, leaf)
    for folder in _folders_of(names):
        with top.below(folder) as inner:
            inner.sync()


def _put_link(store: Directory, source: Directory, place: Directory, name: str) -> None:
    present = place.status(name)
    target = source.status(name)
    if present is not None and target is not None and os.path.samestat(present, target):
        return  # Renaming one name of a file to another name of it would leave both.
    aside = aside_name()
    try:
        store.link(aside, source.path / name)
        store.move(aside, place, name)
    except BaseException:
        store.remove_all(aside)
        raise


def _keep_list(store: Directory, earlier: "_Earlier") -> None:
    """Keep the record of a result without a save in the store, as earlier versions wrote it.

    Once another record has its place, nothing else says which of the files in the folder belonged to it.
    """
    if earlier.record is None or digest(earlier.record) in earlier.saves:
        return
    name = f"{digest(earlier.record)}.json"
    if store.status(name) is None:
        _write_file(store, earlier.record, store, name)
    earlier.lists.append(name)


def _write_file(store: Directory, content: bytes, place: Directory, name: str) -> None:
    """Replace a file in one step, and wait until it is on the disk."""
    aside = aside_name()
    try:
        store.write(aside, content)
        store.move(aside, place, name)
    except BaseException:
        store.remove_all(aside)
        raise
    place.sync()


def _remove_left(store: Directory) -> None:
    """Remove incomplete files and folders that killed processes have left."""
    for name in store.names():
        if name.startswith(LEFT):
            store.remove_all(name)


def save_or_elsewhere(save: Callable[[Path], object], place: Path, then: str = "") -> None:
    """Save a result that took long to compute; if that fails, save it in a new temporary folder.

    Args:
        save: Saves it in a folder.
        place: The folder that was asked for.
        then: What to do with the other folder; ends the sentence that names it.

    Raises:
        InputError: the result was not saved in its place; the message says where it is.
    """
    try:
        save(place)
    except InputError as error:
        try:
            elsewhere = Path(tempfile.mkdtemp(prefix="massieu-"), place.absolute().resolve().name)
            save(elsewhere)
        except (InputError, OSError) as second:
            raise InputError(f"{error}; nor could it be saved elsewhere: {second}") from error
        raise InputError(f"{error}; it was saved in {elsewhere} instead{then}") from error


# --- the files of earlier saves --------------------------------------------------------------------------------------


@dataclass
class _Earlier:
    """The files that earlier saves have left in a folder: only these may be replaced or removed.

    Attributes:
        record_name: Name of the record.
        record: The content of the present record; None if there is none.
        hashes: Hashes of files, including the record, by name: one for each known save.
        saves: The folders of earlier saves in the store, each with the names of its files, without the record.
        lists: Records in the store that belonged to results without a save there.
    """

    record_name: str
    record: bytes | None = None
    hashes: dict[str, set[str]] = field(default_factory=dict)
    saves: dict[str, list[str]] = field(default_factory=dict)
    lists: list[str] = field(default_factory=list)

    @classmethod
    def saved_in(cls, top: Directory, record_name: str) -> "_Earlier":
        """The earlier saves of a folder, by its records.

        Raises:
            InputError: a name in a record leads out of the folder, or a link is in the place of a file.
        """
        earlier = cls(record_name)
        if top.is_file(record_name):
            content = top.read(record_name)
            if (listed := _listed(content, top.path / record_name)) is not None:
                earlier.record = content
                earlier._add(listed, digest(content))
        if not top.has_folder(STORE):
            return earlier
        with top.below(STORE) as store:
            for name in store.names():
                earlier._add_entry(store, name)
        return earlier

    def _add_entry(self, store: Directory, name: str) -> None:
        """Add the files of the earlier save that an entry of the store belongs to, if it belongs to one."""
        list_match = _LIST.fullmatch(name)
        if list_match is not None:
            record_hash = list_match[1]
            content = store.read(name) if store.is_file(name) else b""
            if digest(content) == record_hash and (listed := _listed(content, store.path / name)) is not None:
                self._add(listed, record_hash)
                self.lists.append(name)
        elif _SAVE.fullmatch(name):
            content = _record_in(store, name, self.record_name)
            listed = None if content is None else _listed(content, store.path / name / self.record_name)
            if listed is not None:
                self._add(listed, name)
                self.saves[name] = list(listed)

    def _add(self, listed: Mapping[str, str], record_hash: str) -> None:
        for name, hash in (*listed.items(), (self.record_name, record_hash)):
            self.hashes.setdefault(name, set()).add(hash)

    def _owns(self, top: Directory, name: str) -> bool:
        """Whether a file was left by an earlier save and is unchanged."""
        folder = name.rpartition("/")[0]
        if name not in self.hashes or (folder and not top.has_folder(folder)):
            return False
        with top.holding(name) as (place, leaf):
            return place.is_file(leaf) and place.digest(leaf) in self.hashes[name]

    def check_free(self, top: Directory, names: Sequence[str]) -> None:
        """Check that only files of earlier saves have these names, or names of these patterns.

        Raises:
            InputError: another file has such a name; the message names it.
        """
        for name in names:
            folder = name.rpartition("/")[0]
            if folder and top.status(folder) is None:
                continue
            if folder and not top.has_folder(folder):
                raise InputError(_in_the_way(top.path / folder))
            with top.holding(name) as (place, pattern):
                matching = [leaf for leaf in place.names() if fnmatchcase(leaf, pattern)]
            for leaf in matching:
                path_in_folder = f"{folder}/{leaf}" if folder else leaf
                if not self._owns(top, path_in_folder):
                    raise InputError(_in_the_way(top.path / path_in_folder))

    def remove_stale(self, top: Directory, names: Sequence[str]) -> None:
        """Remove files of earlier saves that the newest save does not have, and wait until `top` is on the disk."""
        stale = self.hashes.keys() - {*names, self.record_name}
        for name in stale:
            with suppress(InputError):  # No save makes links, so a link is the user's.
                if self._owns(top, name):
                    with top.holding(name) as (place, leaf):
                        place.remove(leaf)
        for folder in _folders_of(stale):
            top.remove_empty(folder)
        top.sync()

    def remove_saves(self, store: Directory, new: str) -> None:
        """Remove all saves but the newest; the next save tries again what cannot be removed now."""
        for name, files in self.saves.items():
            if name == new:
                continue
            with suppress(OSError, InputError), store.below(name) as content:
                for file in files:
                    if self._owns(content, file):
                        with content.holding(file) as (place, leaf):
                            place.remove(leaf)
                for folder in _folders_of(files):
                    content.remove_empty(folder)
                if content.names() == [self.record_name]:  # Last, as the record lists the others.
                    content.remove(self.record_name)
        for name in filter(_SAVE.fullmatch, store.names()):
            store.remove_empty(name)
        for name in self.lists:
            with suppress(OSError, InputError):
                store.remove(name)


def _folders_of(names: Iterable[str]) -> set[str]:
    """The subfolders of a result's folder that hold files of these names."""
    return {name.rpartition("/")[0] for name in names} - {""}


def _in_the_way(path: Path) -> str:
    return (
        f"{path} is in the way: no earlier save has left it, or it was changed since; move it, or name another folder"
    )


def _record_in(store: Directory, name: str, record_name: str) -> bytes | None:
    """The record of a save; None if it is missing or its hash is not the name of the save's folder."""
    if not store.has_folder(name):
        return None
    with store.below(name) as content:
        record = content.read(record_name) if content.is_file(record_name) else b""
    return record if digest(record) == name else None


def _is_whole(store: Directory, name: str, record_name: str) -> bool:
    """Whether a save exists, with every file as its record lists it."""
    record = _record_in(store, name, record_name)
    if record is None:
        return False
    with store.below(name) as content:
        for file, hash in (_listed(record, content.path / record_name) or {}).items():
            folder = file.rpartition("/")[0]
            if folder and not content.has_folder(folder):
                return False
            with content.holding(file) as (place, leaf):
                if not place.is_file(leaf) or place.digest(leaf) != hash:
                    return False
    return True


def _listed(content: bytes, where: Path) -> dict[str, str] | None:
    """The hashes of the other files by name, from a record; None if the content is no record or has no hashes.

    Raises:
        InputError: a name leads out of the folder.
    """
    try:
        record = json.loads(content)
        listed = dict(record["files"]) if "schema_version" in record else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    for name in listed or ():
        if not _is_name(name):
            raise InputError(f"{where} lists {name[:80]!r}, which is not the name of a file of a result")
    return listed


def _is_name(name: str) -> bool:
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", STORE, LOCK) or part.startswith(".") for part in parts):
        return False
    return not any(character in name for character in "\\:\0")


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class Stored:
    """A result that is being read.

    Attributes:
        record: The content of its record.
        where: The path of the record.
        files: The folder of its other files: that of a save, or the result's folder itself.
        top: The result's folder.
    """

    record: bytes
    where: Path
    files: Directory
    top: Directory

    def read(self, *names: str) -> tuple[str, bytes]:
        """Name and content of the first of these files that exists.

        Raises:
            MismatchError: none exists.
        """
        for name in names:
            with explaining(f"{self.files.path / name} cannot be read"), suppress(FileNotFoundError):
                return name, self.files.read(name)
        raise MismatchError(
            f"{self.files.path} has no {' or '.join(names)}; a folder that massieu has saved a result into is needed"
        )

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        folder = name.rpartition("/")[0]
        if folder and not self.files.has_folder(folder):
            return False
        with self.files.holding(name) as (place, leaf):
            return place.is_file(leaf)

    def path(self, name: str) -> Path:
        """The path of a file."""
        return self.files.path / name

    def other_published(self, hashes: Mapping[str, str]) -> str | None:
        """The first file in the result's folder that differs from the save; None if none does.

        A missing file is no difference: somebody has removed a link that they do not need.
        """
        if is_locked(self.top.path):  # A save is linking the files just now.
            return None
        for name, hash in hashes.items():
            if "/" not in name and self.top.is_file(name) and self.top.digest(name) != hash:
                return name
        return None


def read(folder: Path, record: str, attempt: Callable[[Stored], Read]) -> Read:
    """What `attempt` reads of the result in a folder; tried again if another save has replaced it meanwhile.

    Nothing is written.

    Raises:
        MismatchError: there is no record, or `attempt` raised this error and the record is still the same.
        InputError: the folder cannot be read.
    """
    until = time.monotonic() + PATIENCE
    with explaining(f"{folder} cannot be read"), Directory.open(folder) as top:
        while True:
            content = _record_of(top, record)
            try:
                with _saved(top, record, content) as stored:
                    return attempt(stored)
            except (MismatchError, FileNotFoundError):
                if _record_of(top, record) == content or time.monotonic() > until:
                    raise
            time.sleep(_RETRY_INTERVAL)


def _record_of(top: Directory, record: str) -> bytes:
    try:
        return top.read(record)
    except FileNotFoundError as error:
        raise MismatchError(
            f"{top.path} has no {record}; a folder that massieu has saved a result into is needed"
        ) from error


@contextmanager
def _saved(top: Directory, record: str, content: bytes) -> Iterator[Stored]:
    name = digest(content)
    if not top.has_folder(STORE):
        yield Stored(content, top.path / record, top, top)
        return
    with top.below(STORE) as store:
        if store.status(name) is None:
            yield Stored(content, top.path / record, top, top)
            return
        with store.below(name) as files:
            yield Stored(content, top.path / record, files, top)
