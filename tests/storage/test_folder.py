"""Files on disk: complete or not there, one writer at a time, nothing left behind, one sentence where it cannot be."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.storage.saving import NAMES, RECORD, files, save, save_often

from massieu.errors import InputError
from massieu.storage import folder as folders
from massieu.storage import locking
from massieu.storage.directory import Directory
from massieu.storage.locking import is_locked, locked
from massieu.storage.writing import check_name, try_to_write, write_whole

posix = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


def contents(folder: Path) -> dict[str, str]:
    """What people see there: neither the record nor the folder of saves."""
    hidden = (folders.STORE, RECORD)
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in hidden
    }


def texts(content: str) -> dict[str, str]:
    return {name: f"{name} {content}" for name in sorted(NAMES)}


def reserved(folder: Path, room: int = 10) -> AbstractContextManager[None]:
    return folders.reserved(folder, RECORD, NAMES, room)


def stored_texts(stored: folders.Stored) -> dict[str, str]:
    """Every file that the record lists, if it is the one that the record means."""
    result = {}
    for name, hash in json.loads(stored.record)["files"].items():
        content = stored.files.path.joinpath(name).read_bytes() if stored.has(name) else b""
        if folders.digest(content) != hash:
            raise folders.MismatchError(f"{name} is another")
        result[name] = content.decode()
    return result


def load(folder: Path) -> dict[str, str]:
    return folders.read(folder, RECORD, stored_texts)


def saves(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / folders.STORE).iterdir())


class Crash(BaseException):
    """Nothing may catch it."""


# --- saving ----------------------------------------------------------------------------------------------------------


def test_files_are_replaced_together_and_others_are_left_alone(tmp_path):
    folder = tmp_path / "new" / "folder"
    save(folder, files("first") | {"gone": b"stale"})
    (folder / "mine").write_text("kept")
    save(folder, files("second"))
    assert contents(folder) == {"mine": "kept", **texts("second")}
    assert load(folder) == texts("second")
    (only,) = saves(folder)
    assert only == folders.digest((folder / RECORD).read_bytes())
    for name in NAMES:
        assert (folder / name).samefile(folder / folders.STORE / only / name)


def test_a_save_of_the_same_changes_nothing(tmp_path):
    save(tmp_path, files("first"))
    before = [path.stat().st_ino for path in sorted(tmp_path.rglob("*")) if path.name != RECORD]
    save(tmp_path, files("first"))
    assert [path.stat().st_ino for path in sorted(tmp_path.rglob("*")) if path.name != RECORD] == before


def test_a_copy_without_the_folder_of_saves_is_a_result(tmp_path):
    """So are results of earlier versions, which had no such folder."""
    save(tmp_path, files("first") | {"tokens/part": b"rows", "gone": b"stale"})
    shutil.rmtree(tmp_path / folders.STORE)
    assert load(tmp_path) == texts("first") | {"tokens/part": "rows", "gone": "stale"}
    save(tmp_path, files("second"))
    assert contents(tmp_path) == texts("second")
    assert len(saves(tmp_path)) == 1


def test_a_save_that_somebody_has_spoiled_is_made_again(tmp_path):
    save(tmp_path, files("first"))
    (content,) = (tmp_path / folders.STORE).iterdir()
    (content / "one").unlink()
    save(tmp_path, files("first"))
    assert load(tmp_path) == texts("first")


def _step(survived: int, where: str) -> Callable[[pytest.MonkeyPatch], list[str]]:
    """Each call of the system that changes something is the last one in turn."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        done: list[str] = []

        def stop_after(name: str, function: Any) -> Any:
            def step(*given: Any, **named: Any) -> Any:
                if len(done) == survived and where == "before":
                    raise Crash
                result = function(*given, **named)
                if len(done) == survived:
                    raise Crash
                done.append(name)
                return result

            return step

        monkeypatch.setattr(shutil, "rmtree", lambda *given, **named: None)  # what a kill leaves is left
        for name in ("write", "replace", "link", "unlink", "mkdir", "rmdir", "fsync"):
            monkeypatch.setattr(os, name, stop_after(name, getattr(os, name)))
        return done

    return patch


@pytest.mark.medium
@pytest.mark.parametrize("copied", [False, True])
def test_killed_at_any_moment_the_folder_reads_as_one_or_the_other(tmp_path, copied):
    """Also where the former result lies in its folder alone; a later save has all its files in their places."""
    seen = []
    survived = 0
    while True:
        folder = tmp_path / str(survived)
        save(folder, files("former") | {"stale": b"s", "tokens/part": b"p"})
        if copied:
            shutil.rmtree(folder / folders.STORE)
        with pytest.MonkeyPatch.context() as monkeypatch:
            _step(survived, "before")(monkeypatch)
            try:
                save(folder, files("newer"))
            except Crash:
                ended = False
            else:
                ended = True
        seen.append(load(folder)["one"])
        assert load(folder) in (texts("former") | {"stale": "s", "tokens/part": "p"}, texts("newer"))
        save(folder, files("newest"))
        assert contents(folder) == texts("newest")
        assert len(saves(folder)) == 1
        if ended:
            break
        survived += 1
    assert survived > 20
    assert seen == sorted(seen)  # the former until some moment, the newer from there on
    assert {seen[0], seen[-1]} == {"one former", "one newer"}


@pytest.mark.parametrize("function", ["unlink", "rmdir"])
@pytest.mark.parametrize("failing", range(4))
def test_what_a_save_could_not_remove_the_next_one_does(tmp_path, monkeypatch, function, failing):
    save(tmp_path, files("first") | {"tokens/part": b"p"})
    whole = getattr(os, function)
    calls = []

    def fails_once(*given: Any, **named: Any) -> None:
        calls.append(given)
        if len(calls) == failing + 1:
            raise PermissionError(errno.EACCES, "Permission denied")
        whole(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fails_once)
        with suppress(InputError):
            save(tmp_path, files("second") | {"tokens/part": b"q"})
    save(tmp_path, files("third") | {"tokens/part": b"r"})
    assert contents(tmp_path) == texts("third") | {"tokens/part": "r"}
    assert saves(tmp_path) == [folders.digest((tmp_path / RECORD).read_bytes())]


def test_what_dead_processes_left_is_removed_and_what_is_not_ours_is_not(tmp_path):
    save(tmp_path, files("former"))
    left = tmp_path / folders.STORE / ".massieu-0123456789abcdef"
    left.mkdir()
    (left / "heads.parquet").write_text("half")
    (tmp_path / ".massieu-notes").write_text("mine")
    (tmp_path / ".massieu-0123456789abcdef").write_text("mine")
    save(tmp_path, files("first"))
    assert len(saves(tmp_path)) == 1
    assert sorted(contents(tmp_path)) == sorted([".massieu-0123456789abcdef", ".massieu-notes", *NAMES])


def test_what_a_living_one_writes_is_not_removed(tmp_path):
    (tmp_path / folders.STORE / ".massieu-theirs").mkdir(parents=True)
    with lock_of_another_thread(tmp_path), pytest.raises(InputError, match="another run"), short_patience():
        save(tmp_path, files("first"))
    assert (tmp_path / folders.STORE / ".massieu-theirs").is_dir()


# --- a user's own files ----------------------------------------------------------------------------------------------

OWN = ("two", "tokens/part-00000.npy", "tokens/part-00001.bin", "heads.csv", "report.html", "three", RECORD)


@pytest.mark.parametrize("name", ["two", "three", RECORD, "tokens/part-1"])
def test_a_file_that_no_save_has_left_is_in_the_way(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    attempts: list[Callable[[], object]] = [lambda: save(tmp_path, files("new") | {"tokens/part-1": b"new"})]
    attempts.append(lambda: folders.reserved(tmp_path, RECORD, (*NAMES, "tokens/part-*"), 10).__enter__())
    for attempt in attempts:
        with pytest.raises(InputError, match=rf"{name} is in the way: no earlier save has left it"):
            attempt()
        assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["mine"]


def test_files_that_only_look_like_those_of_a_result_are_left_alone(tmp_path):
    """Neither a save with them nor one without them touches what it does not need the place of."""
    for name in ("tokens/part-00000.npy", "tokens/part-00001.bin", "heads.csv", "notes/two"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    save(tmp_path, files("first") | {"tokens/part-1": b"rows"})
    save(tmp_path, files("second"))
    assert {path: path.read_text() for path in before} == before
    assert not (tmp_path / "tokens" / "part-1").exists()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_was_changed_since_is_not_replaced(tmp_path, in_place):
    save(tmp_path, files("first"))
    if not in_place:
        (tmp_path / "two").unlink()
    (tmp_path / "two").write_text("two, with notes")
    with pytest.raises(InputError, match=r"two is in the way: no earlier save has left it, or it was changed since"):
        save(tmp_path, files("second"))
    assert (tmp_path / "two").read_text() == "two, with notes"
    (tmp_path / "two").rename(tmp_path / "mine")
    save(tmp_path, files("second"))
    assert contents(tmp_path) == texts("second") | {"mine": "two, with notes"}


def test_a_stale_file_that_was_changed_or_linked_stays(tmp_path):
    (tmp_path / "elsewhere").write_text("linked")
    folder = tmp_path / "out"
    save(folder, files("first") | {"stale": b"s", "staler": b"r"})
    (folder / "stale").write_text("with notes")
    (folder / "staler").unlink()
    (folder / "staler").symlink_to(tmp_path / "elsewhere")
    save(folder, files("second"))
    assert contents(folder) == texts("second") | {"stale": "with notes", "staler": "linked"}


# --- links in a stranger's folder ------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("place", [RECORD, "one", "tokens", folders.STORE, locking.LOCK, "the save", "the save/one"])
def test_no_link_in_a_result_is_followed(tmp_path, place):
    """Nothing behind it is read, written or removed."""
    folder = tmp_path / "theirs"
    outside = tmp_path / "outside"
    save(folder, files("first") | {"tokens/part-1": b"rows"})
    if place.startswith("the save"):
        (content,) = (folder / folders.STORE).iterdir()
        target = content / place.removeprefix("the save").removeprefix("/")
    else:
        target = folder / place
    if target.is_dir():
        shutil.copytree(target, outside)
        shutil.rmtree(target)
    elif place == locking.LOCK:
        outside.write_text("mine")
    else:
        shutil.copy(target, outside)
        target.unlink()
    target.symlink_to(outside)
    before = _tree(outside)
    if place in (RECORD, folders.STORE, "the save", "the save/one"):
        with pytest.raises(InputError, match="is a symbolic link, and no link in a result's folder is followed"):
            folders.read(folder, RECORD, lambda stored: [stored.read(name) for name in NAMES])
    if place == "the save/one":  # which is not used any more, and stays
        save(folder, files("second") | {"tokens/part-1": b"rows"})
    else:
        with pytest.raises(InputError, match="is a symbolic link, and no link"):
            save(folder, files("second") | {"tokens/part-1": b"rows"})
    assert _tree(outside) == before


def _tree(path: Path) -> dict[str, bytes]:
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {str(each): each.read_bytes() for each in paths if each.is_file()}


@pytest.mark.parametrize("name", ["../mine", "/mine", "a/b/c", "", "tokens/..", ".massieu/x", "a\\b", "c:mine"])
def test_names_in_a_record_that_lead_elsewhere_are_refused(tmp_path, name):
    folder = tmp_path / "theirs"
    save(folder, files("first"))
    (tmp_path / "mine").write_text("mine")
    hashes = {name: folders.digest(b"mine")}
    (folder / RECORD).write_text(json.dumps({"schema_version": 1, "files": hashes}))
    with pytest.raises(InputError, match="which is not the name of a file of a result"):
        save(folder, files("second"))
    assert (tmp_path / "mine").read_text() == "mine"


def test_reading_writes_nothing(tmp_path):
    save(tmp_path, files("first"))
    before = {path: path.stat() for path in (tmp_path, *tmp_path.rglob("*"))}
    load(tmp_path)
    after = {path: path.stat() for path in (tmp_path, *tmp_path.rglob("*"))}
    assert {path: (each.st_mtime_ns, each.st_ino) for path, each in after.items()} == {
        path: (each.st_mtime_ns, each.st_ino) for path, each in before.items()
    }


@contextmanager
def short_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "PATIENCE", 0.1)
        yield


class lock_of_another_thread:  # noqa: N801 - used as a context
    """A lock that somebody else has."""

    def __init__(self, folder: Path) -> None:
        self.taken = threading.Event()
        self.enough = threading.Event()
        self.thread = threading.Thread(target=self._hold, args=(folder,))

    def _hold(self, folder: Path) -> None:
        with locked(folder):
            self.taken.set()
            self.enough.wait(20)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.taken.wait(20)

    def __exit__(self, *_: object) -> None:
        self.enough.set()
        self.thread.join()


# --- locks -----------------------------------------------------------------------------------------------------------


def test_one_writer_at_a_time(tmp_path):
    with locked(tmp_path), locked(tmp_path):  # a thread may take its lock again
        assert not is_locked(tmp_path)
    with lock_of_another_thread(tmp_path):
        assert is_locked(tmp_path)
        said = rf"another run \(process {os.getpid()} on .*\) is writing to the folder"
        with pytest.raises(InputError, match=said), locked(tmp_path):
            pytest.fail("taken twice")
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [locking.LOCK]
    assert contents(tmp_path) == {}


def test_a_lock_is_waited_for(tmp_path):
    other = lock_of_another_thread(tmp_path)
    with other:
        threading.Timer(0.1, other.enough.set).start()
        with locked(tmp_path, wait=20):
            assert other.enough.is_set()


def test_a_full_disk_does_not_keep_a_lock_from_being_taken(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with lock_of_another_thread(tmp_path), pytest.raises(InputError, match="another run is writing"), locked(tmp_path):
        pass
    with locked(tmp_path) as alone:
        assert alone


@posix
def test_a_lock_that_another_user_has_left_is_taken_if_it_can_be_read(tmp_path, monkeypatch):
    """A lock needs no right to write to the file."""
    (tmp_path / locking.LOCK).write_text(" (process 7 on elsewhere)")
    refuse_to_open(monkeypatch, os.O_RDWR)
    with locked(tmp_path) as alone:
        assert alone
        assert (tmp_path / locking.LOCK).read_text() == " (process 7 on elsewhere)"


@posix
def test_a_lock_of_another_user_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    lock = tmp_path / locking.LOCK
    lock.touch()
    refuse_to_open(monkeypatch, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setattr(os, "geteuid", lambda: lock.stat().st_uid + 1)
    said = rf"the lock {lock} of the user {lock.owner()} cannot be opened; if no run of theirs .* let them remove it"
    with pytest.raises(InputError, match=said), locked(tmp_path):
        pass
    assert lock.exists()


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, flags: int) -> None:
    """As another user's files: with any of the flags they cannot be opened."""
    whole = os.open

    def refusing(path: Any, given: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(locking.LOCK) and given & flags:
            raise PermissionError(errno.EACCES, "Permission denied")
        return whole(path, given, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


@posix
def test_a_lock_on_another_computer_says_how_to_go_on_if_it_is_dead(tmp_path, monkeypatch):
    with lock_of_another_thread(tmp_path):
        (tmp_path / locking.LOCK).write_text(" (process 7 on elsewhere)")
        said = rf"another run \(process 7 on elsewhere\) is writing .*, or remove {tmp_path / locking.LOCK} if that process"
        with pytest.raises(InputError, match=said), locked(tmp_path):
            pass


@pytest.mark.parametrize("content", ["mine", " (proc"])
def test_a_file_that_is_no_lock_is_not_emptied(tmp_path, content):
    lock = tmp_path / locking.LOCK
    lock.write_text(content)
    if content == "mine":
        with pytest.raises(InputError, match="is in the way: it is no lock of massieu"), locked(tmp_path):
            pass
        assert lock.read_text() == "mine"
    else:  # of a process that was killed while it wrote
        with locked(tmp_path):
            pass
        assert not lock.exists()


@pytest.mark.medium
@posix
def test_a_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from massieu.storage.locking import locked\n"
        f"with locked(Path({str(tmp_path)!r})): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"process {process.pid} on"), locked(tmp_path):
            pytest.fail("taken twice")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(tmp_path):
            pass
    assert contents(tmp_path) == {}


@pytest.mark.medium
@posix
def test_a_fork_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@posix
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(locking, "_lock", unknown)
    (tmp_path / folders.STORE / ".massieu-theirs").mkdir(parents=True)
    with pytest.warns(UserWarning, match="without locks"):
        save(tmp_path, files("first"))
    assert (tmp_path / folders.STORE / ".massieu-theirs").is_dir()  # it may be alive


@pytest.mark.slow
def test_two_processes_save_and_a_third_reads_whole_results(tmp_path):
    save(tmp_path, files("first"))
    start = multiprocessing.get_context("spawn")
    writers = [start.Process(target=save_often, args=(str(tmp_path), who, 30)) for who in "ab"]
    for writer in writers:
        writer.start()

    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(load(tmp_path)["one"])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert contents(tmp_path) in [texts(f"{who}29") for who in "ab"]
    assert len(seen) > 2


# --- before the work -------------------------------------------------------------------------------------------------


def test_what_was_made_for_nothing_is_removed(tmp_path):
    with reserved(tmp_path / "a" / "b", 1000):
        assert is_locked(tmp_path / "a" / "b") is False  # by others
        assert list(contents(tmp_path / "a" / "b")) == [locking.LOCK]
    assert contents(tmp_path) == {}
    with reserved(tmp_path / "a" / "b", 1000):
        save(tmp_path / "a" / "b", files("first"))
    assert contents(tmp_path / "a" / "b") == texts("first")


def test_a_second_run_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_MOMENT", 0.1)
    twice = reserved(tmp_path)
    with lock_of_another_thread(tmp_path), pytest.raises(InputError, match="another run"), twice:
        pytest.fail("reserved twice")


def _taken(folder: Path) -> Path:
    (folder / "a file").touch()
    return folder / "a file"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda here: _taken(here), "cannot be made: .*a file is a file"),
        (lambda here: _taken(here) / "below" / "it", "cannot be made: .*a file is a file"),
        (lambda here: here / ("x" * 300), "cannot be made: File name too long"),
        (lambda here: Path(str(here) + "/nul\0"), "holds a character that no name may have"),
        (lambda here: here / "\ud800", "holds a character that no name may have"),
    ],
)
def test_a_place_that_cannot_be_is_one_sentence(tmp_path, place, said):
    with pytest.raises(InputError, match=said):
        save(place(tmp_path), files("first"))
    with pytest.raises(InputError, match=said), reserved(place(tmp_path)):
        pytest.fail("reserved")


@posix
def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    with reserved(folder):
        save(folder, files("first"))
    assert contents(folder) == texts("first")


def test_a_folder_in_the_place_of_a_file_is_found_before_the_work(tmp_path):
    save(tmp_path, files("former"))
    (tmp_path / "one").unlink()
    (tmp_path / "one").mkdir()
    for attempt in (
        lambda: save(tmp_path, files("newer")),
        lambda: reserved(tmp_path).__enter__(),
    ):
        with pytest.raises(InputError, match="one is in the way: no earlier save has left it"):
            attempt()
    assert (tmp_path / "two").read_text() == "two former"


@posix
def test_a_disk_that_is_full_is_found_before_the_work_and_costs_no_former_result(tmp_path):
    import resource

    save(tmp_path, files("former"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        try_to_write(tmp_path, 1_000_000)
        with pytest.raises(
            InputError, match=r"cannot write 4 MB, which may be needed, to the folder .*: File too large"
        ):
            try_to_write(tmp_path, 4_000_000)
        with pytest.raises(InputError, match=r"cannot write to the folder .*: File too large"):
            save(tmp_path, files("newer") | {"large": bytes(4_000_000)})
        with pytest.raises(InputError, match=r"cannot write the page .*page\.html: File too large"):
            write_whole(tmp_path / "page.html", "x" * 4_000_000, "the page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(tmp_path) == texts("former")


# --- one page --------------------------------------------------------------------------------------------------------


def test_a_page_is_replaced_at_once_and_folders_are_made(tmp_path):
    path = tmp_path / "new" / ("p" * 250 + ".html")
    for content in ("first", "second \ud800"):
        write_whole(path, content, "the page")
    assert contents(path.parent) == {path.name: "second ?"}


def test_the_first_error_is_the_one_that_is_told(tmp_path, monkeypatch):
    """On a read-only folder, removing what was written aside fails as well."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"cannot write the page .*: No space left on device"):
        write_whole(tmp_path / "page.html", "page", "the page")


def test_what_cannot_be_removed_stays(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("text")
    with Directory.open(tmp_path) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            directory.remove_all("full")
        assert (tmp_path / "full" / "file").read_text() == "text"
        directory.remove_all("full")
        assert directory.names() == []


def test_names():
    assert check_name("plain") == Path("plain")
    with pytest.raises(InputError, match="holds a character"):
        check_name("a\0b")
