"""A folder that holds a result: each save is a folder of its own inside, which is never changed, and one file names it.

::

    out/run.json                  the record: JSON whose ``files`` has the hash of every other file
    out/heads.parquet, ...        the files of the latest save, where people look for them: hard links, else copies
    out/.massieu/<hash>/...       the files of one save, the record among them, by whose hash the folder is named
    out/.massieu/<hash>.json      the record of an earlier version's result, while it is replaced

The record is replaced in one step, after all that it names is on the disk. Who reads follows it by its hash, and so
finds one save or the other, never half of one; what an earlier save has left is removed after that. A result without
``.massieu``, copied or of an earlier version, is read where it lies.
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
"""Seconds that are waited for another process that saves."""
_MOMENT = 0.5
"""Seconds for which even a reader may hold the lock, to see whether it is free."""
_AGAIN = 0.02
_SAVE = re.compile(r"[0-9a-f]{64}")
_LIST = re.compile(r"([0-9a-f]{64})\.json")
_NONE: Mapping[str, Path] = {}

Read = TypeVar("Read")


class MismatchError(InputError):
    """Files of a folder that do not belong together, or are not there."""


# --- before the work -------------------------------------------------------------------------------------------------


@contextmanager
def reserved(folder: Path, record: str, files: Sequence[str], room: int) -> Iterator[None]:
    """The folder is this thread's to save to, and so many bytes fit; it is made if need be, and removed if it stays empty.

    Args:
        record: Name of the record.
        files: Names of the other files, or patterns of them such as ``tokens/part-*``.

    Raises:
        InputError: another run writes there; it cannot be made or written to; something that no earlier save has left
            is in the place of one of the files.
    """
    with _made(folder) as folder, locked(folder, wait=_MOMENT):
        with explaining(f"cannot read the folder {folder}"), Directory.open(folder) as top:
            _Earlier.saved_in(top, record).check_free(top, (record, *files))
        with tried(folder / STORE, room):
            yield


@contextmanager
def tried(folder: Path, room: int, name: str | None = None) -> Iterator[None]:
    """So many bytes fit into the folder, and a file of this name; it is made if need be, and removed if it stays empty.

    Raises:
        InputError: it cannot be made or written to.
    """
    with _made(folder) as folder:
        try_to_write(folder, room)
        if name is not None and not os.path.lexists(folder / name):
            try_to_write(folder, 0, name)
        yield


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """The folder, made if need be; what was made is removed where it stays empty."""
    folder = check_name(folder)
    made = _make(folder)
    try:
        yield folder
    finally:
        for each in made:
            with suppress(OSError):  # it holds something, or is gone
                each.rmdir()


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns what was made, the innermost first."""
    with explaining(f"the output folder {folder} cannot be made"):
        places = (folder, *folder.absolute().parents)
        missing = [path for path in places if not os.path.lexists(path)]
        nearest = next(path for path in places if os.path.lexists(path))
        if not os.path.isdir(nearest):
            raise InputError(f"the output folder {folder} cannot be made: {nearest} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
    return missing


# --- saving ----------------------------------------------------------------------------------------------------------


def save(folder: Path, record: str, files: Mapping[str, bytes], linked: Mapping[str, Path] = _NONE) -> None:
    """Replace the result in a folder, in one step; files that no earlier save has left are not touched.

    Args:
        record: Name of the record, which is one of the files, and lists the hashes of all others.
        linked: Files that are somewhere already, which may be large: linked, or copied where that is not possible.

    Raises:
        InputError: the folder cannot be written to, or another run writes there for a long time; something that no
            earlier save has left is in the place of one of the files.
    """
    with (
        _made(folder) as folder,
        locked(folder, wait=PATIENCE) as alone,
        explaining(f"cannot write to the folder {folder}"),
        Directory.open(folder) as top,
    ):
        earlier = _Earlier.saved_in(top, record)
        earlier.check_free(top, (record, *files, *linked))
        try:
            with top.below(STORE, make=True) as store:
                _save(top, store, earlier, files, linked, alone)
        finally:
            top.remove_empty(STORE)


def _save(
    top: Directory,
    store: Directory,
    earlier: "_Earlier",
    files: Mapping[str, bytes],
    linked: Mapping[str, Path],
    alone: bool,
) -> None:
    record = earlier.record_name
    names = [name for name in (*files, *linked) if name != record]
    new = digest(files[record])
    if alone:
        _remove_left(store)
    _keep_list(store, earlier)
    if not _is_whole(store, new, record):
        _write(store, new, files, linked)
    _write_file(store, files[record], top, record)  # from here on, what it names is the result
    with explaining(f"the result in {top.path} is saved, but its files could not be put in their places"):
        _publish(top, store, new, names)
        earlier.remove_stale(top, names)
    if alone:  # else another may have saved since
        earlier.remove_saves(store, new)


def _write(store: Directory, new: str, files: Mapping[str, bytes], linked: Mapping[str, Path]) -> None:
    """Make the folder of a save."""
    aside = aside_name()
    try:
        with store.below(aside, make=True) as content:
            for name, each in files.items():
                with content.holding(name, make=True) as (place, leaf):
                    place.write(leaf, each)
            for name, path in linked.items():
                with content.holding(name, make=True) as (place, leaf):
                    place.link(leaf, path)
            for folder in _folders_of((*files, *linked)):
                with content.below(folder) as inner:
                    inner.sync()
            content.sync()
        if store.status(new) is not None:  # spoiled by somebody, and of no more use
            store.move(new, store, aside_name())
        store.move(aside, store, new)
    except BaseException:
        store.remove_all(aside)
        raise
    store.sync()


def _publish(top: Directory, store: Directory, new: str, names: Sequence[str]) -> None:
    """Put the files of a save where people look for them; its folders are on the disk when this returns, `top` is not yet."""
    with store.below(new) as content:
        for name in names:
            with top.holding(name, make=True) as (place, leaf), content.holding(name) as (source, _):
                _put_link(store, source, place, leaf)
    for folder in _folders_of(names):
        with top.below(folder) as inner:
            inner.sync()


def _put_link(store: Directory, source: Directory, place: Directory, name: str) -> None:
    there, wanted = place.status(name), source.status(name)
    if there is not None and wanted is not None and os.path.samestat(there, wanted):
        return  # renaming one name of a file to another of its names would do nothing
    aside = aside_name()
    try:
        store.link(aside, source.path / name)
        store.move(aside, place, name)
    except BaseException:
        store.remove_all(aside)
        raise


def _keep_list(store: Directory, earlier: "_Earlier") -> None:
    """Keep the record of a result that lies in its folder alone, as those of earlier versions did.

    Once another record has its place, nothing else says which of the files there are ours.
    """
    if earlier.record is None or digest(earlier.record) in earlier.saves:
        return
    name = f"{digest(earlier.record)}.json"
    if store.status(name) is None:
        _write_file(store, earlier.record, store, name)
    earlier.lists.append(name)


def _write_file(store: Directory, content: bytes, place: Directory, name: str) -> None:
    """Replace a file in one step, and wait until that is on the disk."""
    aside = aside_name()
    try:
        store.write(aside, content)
        store.move(aside, place, name)
    except BaseException:
        store.remove_all(aside)
        raise
    place.sync()


def _remove_left(store: Directory) -> None:
    """Remove what killed processes have left."""
    for name in store.names():
        if name.startswith(LEFT):
            store.remove_all(name)


def save_or_elsewhere(save: Callable[[Path], object], place: Path, then: str = "") -> None:
    """Save what took long to find; where that fails, in a new temporary folder.

    Args:
        then: Ends the sentence that says where it is: what to do with it.

    Raises:
        InputError: it was not saved in its place; the message says where it is.
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


# --- what earlier saves have left ------------------------------------------------------------------------------------


@dataclass
class _Earlier:
    """What earlier saves have left in a folder: only this may be replaced or removed.

    Attributes:
        record: The record that is in its place now; None where there is none.
        hashes: Of files, the record among them, by name: one for each earlier save that is known.
        saves: The folders of earlier saves in the store, each with the names of its files, without the record.
        lists: The records that were kept in the store of results that lay in their folder alone.
    """

    record_name: str
    record: bytes | None = None
    hashes: dict[str, set[str]] = field(default_factory=dict)
    saves: dict[str, list[str]] = field(default_factory=dict)
    lists: list[str] = field(default_factory=list)

    @classmethod
    def saved_in(cls, top: Directory, record_name: str) -> "_Earlier":
        """All that is known of a folder.

        Raises:
            InputError: a file's name in a record leads elsewhere, or a link is in its place.
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
                earlier._see(store, name)
        return earlier

    def _see(self, store: Directory, name: str) -> None:
        """Add what an entry of the store says of an earlier save."""
        kept = _LIST.fullmatch(name)
        if kept is not None:
            content = store.read(name) if store.is_file(name) else b""
            if digest(content) == kept[1] and (listed := _listed(content, store.path / name)) is not None:
                self._add(listed, kept[1])
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
        """Whether a file is one that an earlier save has left, as it was."""
        folder = name.rpartition("/")[0]
        if name not in self.hashes or (folder and not top.has_folder(folder)):
            return False
        with top.holding(name) as (place, leaf):
            return place.is_file(leaf) and place.digest(leaf) in self.hashes[name]

    def check_free(self, top: Directory, names: Sequence[str]) -> None:
        """That nothing is in the place of files of these names, or patterns, but what earlier saves have left.

        Raises:
            InputError: something is; the message names it.
        """
        for name in names:
            folder = name.rpartition("/")[0]
            if folder and top.status(folder) is None:
                continue
            if folder and not top.has_folder(folder):
                raise InputError(_in_the_way(top.path / folder))
            with top.holding(name) as (place, pattern):
                matching = [each for each in place.names() if fnmatchcase(each, pattern)]
            for each in matching:
                whole = f"{folder}/{each}" if folder else each
                if not self._owns(top, whole):
                    raise InputError(_in_the_way(top.path / whole))

    def remove_stale(self, top: Directory, names: Sequence[str]) -> None:
        """Remove files of earlier saves that the newest one does not have, and wait until `top` is on the disk."""
        stale = self.hashes.keys() - {*names, self.record_name}
        for name in stale:
            with suppress(InputError):  # a link is somebody's own
                if self._owns(top, name):
                    with top.holding(name) as (place, leaf):
                        place.remove(leaf)
        for folder in _folders_of(stale):
            top.remove_empty(folder)
        top.sync()

    def remove_saves(self, store: Directory, new: str) -> None:
        """Remove all saves but the newest; what cannot be removed, the next save will try again."""
        for name, files in self.saves.items():
            if name == new:
                continue
            with suppress(OSError, InputError), store.below(name) as content:
                for each in files:
                    if self._owns(content, each):
                        with content.holding(each) as (place, leaf):
                            place.remove(leaf)
                for folder in _folders_of(files):
                    content.remove_empty(folder)
                if content.names() == [self.record_name]:  # the last, since by it the others are known
                    content.remove(self.record_name)
        for name in filter(_SAVE.fullmatch, store.names()):
            store.remove_empty(name)
        for name in self.lists:
            with suppress(OSError, InputError):
                store.remove(name)


def _folders_of(names: Iterable[str]) -> set[str]:
    """The folders in a result's folder that files of these names are in."""
    return {name.rpartition("/")[0] for name in names} - {""}


def _in_the_way(path: Path) -> str:
    return (
        f"{path} is in the way: no earlier save has left it, or it was changed since; move it, or name another folder"
    )


def _record_in(store: Directory, name: str, record_name: str) -> bytes | None:
    """The record of a save, if it is the one that its folder is named by."""
    if not store.has_folder(name):
        return None
    with store.below(name) as content:
        found = content.read(record_name) if content.is_file(record_name) else b""
    return found if digest(found) == name else None


def _is_whole(store: Directory, name: str, record_name: str) -> bool:
    """Whether a save is there already, with every file as its record lists it."""
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
    """The hashes of the other files, by name, in a record; None where it is no record, or one without hashes.

    Raises:
        InputError: a name leads out of the folder.
    """
    try:
        found = json.loads(content)
        listed = dict(found["files"]) if "schema_version" in found else None
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
        where: The record's place.
        own: Where its other files are: a save's own folder, or the result's folder itself.
        top: The result's folder.
    """

    record: bytes
    where: Path
    own: Directory
    top: Directory

    def read(self, *names: str) -> tuple[str, bytes]:
        """The first of the files that is there: its name and content.

        Raises:
            MismatchError: there is none.
        """
        for name in names:
            with explaining(f"{self.own.path / name} cannot be read"), suppress(FileNotFoundError):
                return name, self.own.read(name)
        raise MismatchError(
            f"{self.own.path} has no {' or '.join(names)}; a folder that massieu has saved a result into is needed"
        )

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        folder = name.rpartition("/")[0]
        if folder and not self.own.has_folder(folder):
            return False
        with self.own.holding(name) as (place, leaf):
            return place.is_file(leaf)

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self.own.path / name

    def other_published(self, hashes: Mapping[str, str]) -> str | None:
        """The first file of the result whose place in the folder has something else; None where there is none.

        What is missing there was removed by somebody who does not need it.
        """
        if is_locked(self.top.path):  # a save is putting them there
            return None
        for name, hash in hashes.items():
            if "/" not in name and self.top.is_file(name) and self.top.digest(name) != hash:
                return name
        return None


def read(folder: Path, record: str, attempt: Callable[[Stored], Read]) -> Read:
    """What `attempt` reads of the result in a folder; tried again where another save took its place meanwhile.

    Nothing is written.

    Raises:
        MismatchError: there is no record, or what `attempt` raised of a record that is still in its place.
        InputError: it cannot be read.
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
            time.sleep(_AGAIN)


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
        with store.below(name) as own:
            yield Stored(content, top.path / record, own, top)
