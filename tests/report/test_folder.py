"""Files on disk: complete or not there, one writer at a time, nothing left behind, one sentence where it cannot be."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.report import folder as folders
from massieu.report import locking
from massieu.report.locking import is_locked, locked
from massieu.report.writing import check_name, try_to_write, write_whole

posix = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")
NAMES = ("one", "two", "three")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def files(content: str) -> dict[str, bytes]:
    return {name: f"{name} {content}".encode() for name in NAMES}


def texts(content: str) -> dict[str, str]:
    return {name: f"{name} {content}" for name in sorted(NAMES)}


class Crash(BaseException):
    """Nothing may catch it."""


# --- replacing -------------------------------------------------------------------------------------------------------


def test_files_are_replaced_together_and_others_are_left_alone(tmp_path):
    folder = tmp_path / "new" / "folder"
    folders.replace(folder, files("first"))
    (folder / "mine").write_text("kept")
    (folder / "gone").write_text("stale")
    folders.replace(folder, files("second"), instead=("gone", "never there"))
    assert contents(folder) == {"mine": "kept", **texts("second")}


@pytest.mark.parametrize("survived", range(6))
def test_killed_at_any_moment_the_folder_reads_as_one_or_the_other(tmp_path, monkeypatch, survived):
    """Each step that changes the folder is the last one in turn."""
    folders.replace(tmp_path, files("former") | {"stale": b"s"})
    done = []

    def stop_after(function: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            if len(done) == survived:
                raise Crash
            done.append(function.__name__)
            return function(*given, **named)

        return step

    with monkeypatch.context() as patch:
        # What a kill leaves is left: no cleaning up.
        patch.setattr(shutil, "rmtree", lambda *given, **named: None)
        for place, name in ((os, "replace"), (Path, "rename"), (Path, "mkdir"), (Path, "rmdir")):
            patch.setattr(place, name, stop_after(getattr(place, name)))
        with pytest.raises(Crash):
            folders.replace(tmp_path, files("newer"), instead=("stale",))
    read = {folders.read(tmp_path, name)[1] for name in NAMES}
    assert read in (set(files("former").values()), set(files("newer").values()))
    folders.replace(tmp_path, files("newest"))
    left = contents(tmp_path)
    left.pop("stale", None)
    assert left == texts("newest")


def test_what_dead_processes_left_is_removed_and_what_is_not_ours_is_not(tmp_path):
    for name in (".massieu-abc", ".massieu-def"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "heads.parquet").write_text("half")
    (tmp_path / ".massieu-page").write_text("half a page")
    (tmp_path / ".massieu").mkdir()
    folders.replace(tmp_path, files("first"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".massieu", *NAMES])


def test_what_a_living_one_writes_is_not_removed(tmp_path):
    (tmp_path / ".massieu-theirs").mkdir()
    with lock_of_another_thread(tmp_path), pytest.raises(InputError, match="another run"), short_patience():
        folders.replace(tmp_path, files("first"))
    assert (tmp_path / ".massieu-theirs").is_dir()


@contextmanager
def short_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "PATIENCE", 0.1)
        yield


class lock_of_another_thread:  # noqa: N801 - used as a context
    """A lock that somebody else has."""

    def __init__(self, folder: Path) -> None:
        self.taken, self.enough = threading.Event(), threading.Event()
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


@pytest.mark.medium
@posix
def test_a_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from massieu.report.locking import locked\n"
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
    (tmp_path / ".massieu-theirs").mkdir()
    with pytest.warns(UserWarning, match="without locks"):
        folders.replace(tmp_path, files("first"))
    assert (tmp_path / ".massieu-theirs").is_dir()  # it may be alive


def _save_often(folder: str, who: str, times: int) -> None:
    for number in range(times):
        folders.replace(Path(folder), files(f"{who}{number}"))


@pytest.mark.medium
def test_two_processes_save_and_a_third_reads_whole_results(tmp_path):
    folders.replace(tmp_path, files("first"))
    start = multiprocessing.get_context("spawn")
    writers = [start.Process(target=_save_often, args=(str(tmp_path), who, 30)) for who in "ab"]
    for writer in writers:
        writer.start()

    def attempt() -> str:
        found = [folders.read(tmp_path, name)[1].decode().split()[1] for name in NAMES]
        if len(set(found)) > 1:
            raise folders.MismatchError("mixed")
        return found[0]

    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(folders.read_together(tmp_path, NAMES[0], attempt))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert contents(tmp_path) in [texts(f"{who}29") for who in "ab"]
    assert len(seen) > 2


# --- before the work -------------------------------------------------------------------------------------------------


def test_what_was_made_for_nothing_is_removed(tmp_path):
    with folders.reserved(tmp_path / "a" / "b", NAMES, 1000):
        assert is_locked(tmp_path / "a" / "b") is False  # by others
        assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [locking.LOCK]
    assert contents(tmp_path) == {}
    with folders.reserved(tmp_path / "a" / "b", NAMES, 1000):
        folders.replace(tmp_path / "a" / "b", files("first"))
    assert contents(tmp_path / "a" / "b") == texts("first")


def test_a_second_run_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_MOMENT", 0.1)
    twice = folders.reserved(tmp_path, NAMES, 10)
    with lock_of_another_thread(tmp_path), pytest.raises(InputError, match="another run"), twice:
        pytest.fail("reserved twice")


def _taken(folder: Path) -> Path:
    (folder / "a file").touch()
    return folder / "a file"


@every_row(
    "place, said",
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
        folders.replace(place(tmp_path), files("first"))
    with pytest.raises(InputError, match=said), folders.reserved(place(tmp_path), NAMES, 10):
        pytest.fail("reserved")


@posix
def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    with folders.reserved(folder, NAMES, 10):
        folders.replace(folder, files("first"))
    assert contents(folder) == texts("first")


def test_a_folder_in_the_place_of_a_file_is_found_before_the_work(tmp_path):
    folders.replace(tmp_path, files("former"))
    (tmp_path / "one").unlink()
    (tmp_path / "one").mkdir()
    for attempt in (
        lambda: folders.replace(tmp_path, files("newer")),
        lambda: folders.reserved(tmp_path, NAMES, 10).__enter__(),
    ):
        with pytest.raises(InputError, match="one is a folder, where a file of the result has to be"):
            attempt()
    assert (tmp_path / "two").read_text() == "two former"


@posix
def test_a_disk_that_is_full_is_found_before_the_work_and_costs_no_former_result(tmp_path):
    import resource

    folders.replace(tmp_path, files("former"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        try_to_write(tmp_path, 1_000_000)
        with pytest.raises(
            InputError, match=r"cannot write 4 MB, which may be needed, to the folder .*: File too large"
        ):
            try_to_write(tmp_path, 4_000_000)
        with pytest.raises(InputError, match=r"cannot write to the folder .*: File too large"):
            folders.replace(tmp_path, files("newer") | {"large": bytes(4_000_000)})
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


def test_names():
    assert check_name("plain") == Path("plain")
    with pytest.raises(InputError, match="holds a character"):
        check_name("a\0b")
