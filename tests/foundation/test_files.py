"""Files are whole or the ones before; numbers are written one way; the package loads no torch."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.support.rows import every_row

from massieu.foundation.files import LEFT, overwriting, remove_left, replacing
from massieu.foundation.numbers import bound, number, whole, with_error
from massieu.foundation.threads import one_thread


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_at_once(tmp_path, durable):
    path = tmp_path / "page"
    path.write_text("old")
    with replacing(path, durable=durable) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["page"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o755])
def test_a_replaced_file_keeps_its_mode_and_is_never_more_open(tmp_path, mode):
    path = tmp_path / "page"
    path.write_text("old")
    path.chmod(mode)
    with replacing(path) as aside:
        aside.write_text("new")
        assert aside.stat().st_mode & 0o077 == 0
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o7777 == mode


def test_an_earlier_file_keeps_its_owner(tmp_path):
    path = tmp_path / "page"
    path.write_text("old")
    owner = (1234, 1235) if os.geteuid() == 0 else (os.geteuid(), os.getegid())  # only root may give a file away
    os.chown(path, *owner)
    with replacing(path) as aside:
        aside.write_text("new")
    assert (path.stat().st_uid, path.stat().st_gid) == owner


@pytest.mark.parametrize("there", [True, False])
def test_a_link_that_a_user_names_is_kept_and_its_target_written(tmp_path, there):
    target = tmp_path / "inner" / "target"
    link = tmp_path / "page"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to(Path("inner") / "target")
    with overwriting(link) as aside:
        aside.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(target.parent) == ["target"]


def test_a_link_in_a_folder_of_ours_is_replaced_and_not_followed(tmp_path):
    target = tmp_path / "target"
    link = tmp_path / "page"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as aside:
        aside.write_text("new")
    assert not link.is_symlink()
    assert target.read_text() == "old"


def test_a_fifo_is_written_to(tmp_path):
    fifo = tmp_path / "page"
    os.mkfifo(fifo)
    with fifo_content(fifo) as content, overwriting(fifo) as aside:
        aside.write_text("new")
    assert content == [b"new"]
    assert fifo.is_fifo()


@contextmanager
def fifo_content(fifo: Path) -> Iterator[list[bytes]]:
    """What is written to a FIFO inside, read by a thread."""
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append(fifo.read_bytes()), daemon=True)
    reader.start()
    yield content
    reader.join(10)


def test_a_device_is_written_to(tmp_path):
    main, terminal = os.openpty()
    link = tmp_path / "page"
    link.symlink_to(os.ttyname(terminal))
    with overwriting(link) as aside:
        aside.write_text("new")
    assert os.read(main, 10) == b"new"
    assert link.is_symlink()
    os.close(main)
    os.close(terminal)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "page"
    path.write_text("old")

    def stopped():
        with replacing(path) as aside:
            aside.write_text("half")
            raise error

    with pytest.raises(error):
        stopped()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "page"):
        pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("folder", [False, True])
def test_a_process_killed_before_the_rename_leaves_the_old(tmp_path, folder):
    path = tmp_path / "page"
    if not folder:
        path.write_text("old")
    code = f"""
import os, pathlib, signal
from massieu.foundation import files
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with files.replacing(pathlib.Path({str(path)!r}), folder={folder}, mark="mine") as aside:
    ((aside / "part") if {folder} else aside).write_text("new")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert path.read_text() == "old" if not folder else not path.exists()
    assert any(name.startswith(f"{LEFT}mine-") for name in os.listdir(tmp_path))
    remove_left(tmp_path, "another")
    assert len(os.listdir(tmp_path)) == (1 if folder else 2)
    remove_left(tmp_path, "mine")
    assert os.listdir(tmp_path) == ([] if folder else ["page"])


def test_what_cannot_be_removed_is_left(tmp_path, monkeypatch):
    (tmp_path / f"{LEFT}0123456789abcdef").touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    remove_left(tmp_path)
    assert os.listdir(tmp_path) == [f"{LEFT}0123456789abcdef"]


def test_files_of_similar_names_are_not_what_a_process_left(tmp_path):
    mine = [f"{LEFT}notes", f"{LEFT}0123456789abcdef.txt", f"{LEFT}0123456789ABCDEF", f"{LEFT}mine-0123456789abcde"]
    for name in (*mine, f"{LEFT}0123456789abcdef", f"{LEFT}mine-0123456789abcdef"):
        (tmp_path / name).touch()
    remove_left(tmp_path, "mine")
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, f"{LEFT}0123456789abcdef"])
    remove_left(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(mine)


def test_a_folder_is_there_when_it_is_complete(tmp_path):
    path = tmp_path / "store"
    with replacing(path, folder=True) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "part").write_text("1")
        assert not path.exists()
    assert (path / "inner" / "part").read_text() == "1"
    with pytest.raises(OSError, match=r"not empty|exists"), replacing(path, folder=True):
        pass
    assert os.listdir(tmp_path) == ["store"]


@every_row(
    "found, wanted",
    [
        (number(1234.5678), "1,235"),
        (number(-0.5), "−0.500"),
        (number(0.123456, 0.012), "0.123"),
        (number(0.123456, 0.05), "0.12"),
        (number(None), "undefined"),
        (number(math.nan), "undefined"),
        (number(-math.inf), "−∞"),
        (with_error(1.23456, 0.012), "1.235 ± 0.012"),
        (with_error(1.23456, None), "1.23"),
        (bound(1e-10), "1e−10"),
        (whole(12345), "12\u202f345"),
        (whole(None), "unknown"),
    ],
    ids=range(12),
)
def test_numbers_in_words(found, wanted):
    assert found == wanted


def test_one_thread_and_then_as_many_as_before():
    def stopped():
        with one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("stop")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert torch.get_num_threads() == before


def test_what_the_command_line_needs_loads_no_torch():
    code = "import sys, massieu.foundation.files, massieu.foundation.numbers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
