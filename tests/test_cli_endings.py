"""How a command ends: signals at any moment, standard streams that are closed, full or gone, folders that cannot be written."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import COMMAND, ENVIRONMENT, FILES, StandInResult, assert_bad, checkpoint, probed, run

from massieu import interruption
from massieu.cli import streams
from massieu.errors import InputError
from massieu.interruption import CONTROL_C, ENDINGS, Interruption, interruptible
from massieu.probing import run as run_module
from massieu.probing.data.documents import check_sources
from massieu.probing.result.result import ProbeResult
from massieu.storage.locking import locked

__all__ = ["checkpoint", "probed"]  # fixtures

QUICKLY = "--quick", "--statistics", "entropy"
"""For a command of which only the end is looked at."""

posix = pytest.mark.skipif(os.name == "nt", reason="signals and descriptors of POSIX")


def _process(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], text=True, env=ENVIRONMENT, timeout=120, check=False, **given
    )


# --- signals ---------------------------------------------------------------------------------------------------------


def test_with_nothing_to_keep_a_signal_ends_at_once():
    for number in ENDINGS:
        asked = Interruption()
        with pytest.raises(KeyboardInterrupt):
            asked.receive(number)
        assert (asked.asked.is_set(), asked.number, asked.status) == (True, number, 128 + number)
        if number != signal.SIGINT:
            asked.receive(number)  # `timeout` and shells send theirs twice; the first is being seen to


def test_with_something_to_keep_the_first_signal_waits():
    for number in ENDINGS:
        asked = Interruption()
        asked.hold()
        asked.receive(number)
        assert asked.asked.is_set()
        asked.receive(signal.SIGTERM)
        assert asked.number == number
        with pytest.raises(KeyboardInterrupt):
            asked.receive(signal.SIGINT)  # who presses Ctrl-C again means it


def test_while_libraries_are_loaded_a_signal_waits_for_them():
    asked = Interruption()
    loaded = []

    def load() -> None:
        with asked.loading():
            asked.receive(signal.SIGTERM)
            loaded.append("torch")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert loaded == ["torch"]


@pytest.mark.parametrize("owns_process", [False, True])
def test_the_collector_passes_over_imports_of_a_process_of_ones_own_alone(monkeypatch, owns_process):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    asked = Interruption()
    asked.owns_process = owns_process
    with asked.loading():
        assert gc.isenabled() != owns_process
    assert gc.isenabled()
    assert frozen == [False] * owns_process
    gc.disable()
    try:
        with asked.loading():
            pass
        assert not gc.isenabled()  # as somebody wanted it
    finally:
        gc.enable()


@posix
def test_handlers_are_set_for_a_while_and_ignored_signals_stay_ignored():
    before = {number: signal.getsignal(number) for number in ENDINGS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interruptible(ENDINGS) as outer:
            assert signal.getsignal(signal.SIGTERM) == outer.receive
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with interruptible(CONTROL_C) as inner:
                assert inner is outer
                inner.hold()
            signal.raise_signal(signal.SIGTERM)
            assert outer.asked.wait(5)
            assert outer.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert interruption._current is None
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def test_a_signal_that_meets_a_finaliser_is_noted_without_a_traceback():
    """Python drops what a finaliser raises and prints its traceback."""

    class Left:
        def __del__(self) -> None:
            if not sys.is_finalizing():
                signal.raise_signal(signal.SIGINT)
                "".join(map(str, range(3)))  # some steps in which Python may see to it

    told = []
    before = sys.unraisablehook
    sys.unraisablehook = told.append
    try:
        with interruptible() as asked:
            Left()
        assert asked.asked.is_set()
        assert sys.unraisablehook == told.append
    finally:
        sys.unraisablehook = before
    assert told == []


def test_another_thread_gets_no_signals():
    handlers = []

    def enter() -> None:
        with interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


@posix
@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("complete", [True, False])
def test_an_ending_while_the_result_is_saved_waits_for_it(probed, tmp_path, monkeypatch, number, complete):
    """The signal comes in the midst of the save, which goes on."""
    probed.result = StandInResult(complete=complete)
    save = probed.result.save

    def probe(*given: Any, **options: Any) -> StandInResult:
        with interruptible() as asked:
            asked.hold()
        return probed.result

    def interrupted_save(folder: Path, format: str) -> Path:
        signal.raise_signal(number)
        time.sleep(0.01)
        return save(folder, format)

    monkeypatch.setattr(run_module, "probe", probe)
    monkeypatch.setattr(probed.result, "save", interrupted_save)
    ran = run("probe", "--out", tmp_path)
    assert ran.exit_code == 128 + number
    assert probed.result.saved == [(tmp_path, "parquet")]
    assert ("incomplete" in ran.stderr) == (not complete)
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    assert f"massieu: interrupted{by}" in ran.stderr.splitlines()[-1]


@posix
def test_an_error_that_an_interruption_caused_is_the_interruption(probed, tmp_path, monkeypatch):
    """As where a library catches KeyboardInterrupt while it is imported."""

    def probe(*given: Any, **options: Any) -> StandInResult:
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(1)
        except KeyboardInterrupt:
            raise ImportError("half of a library") from None
        raise AssertionError("not interrupted")

    monkeypatch.setattr(run_module, "probe", probe)
    ran = run("probe", "--out", tmp_path / "out")
    assert (ran.exit_code, ran.stderr) == (143, "massieu: interrupted by SIGTERM\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@posix
@pytest.mark.parametrize("number", ENDINGS)
def test_the_exit_status_is_the_signals_wherever_it_came(tmp_path, number):
    """Inside `exec`, too, after which `python -m` itself would say SIGINT."""
    (tmp_path / "ending.py").write_text(
        "from massieu.cli import commands, main\n"
        f"inside = 'import signal; signal.raise_signal({int(number)})'\n"
        "commands.terminal.list_statistics = lambda _: exec(inside)\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "ending", "statistics"]
    ran = subprocess.run(command, capture_output=True, env=ENVIRONMENT, cwd=tmp_path, check=False)
    assert ran.returncode == 128 + number


@pytest.mark.slow
@posix
def test_an_ending_writes_what_was_measured(tmp_path, checkpoint):
    """SIGHUP here; Ctrl-C is pressed in `tests/probing/test_probe.py`, and SIGTERM sent before a run is resumed."""
    text = tmp_path / "long.txt"
    out = tmp_path / "out"
    text.write_text("The cat sat on the mat, and the dog did not. " * 50_000)
    command = [
        *COMMAND,
        "probe",
        str(checkpoint),
        "--text",
        str(text),
        "--out",
        str(out),
        "--batch-size",
        "2",
        *QUICKLY,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        while "reading" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.2)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
        assert "incomplete" in process.stderr.read().splitlines()[-1]
        assert "page:" in process.stdout.read()
    assert {path.name for path in out.iterdir()} == FILES | {"running"}  # to go on from
    stored = json.loads((out / "run.json").read_text())
    assert not stored["complete"]
    assert stored["text"]["windows"] >= 2
    assert not ProbeResult.load(out).complete


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGINT, 0.3), (signal.SIGTERM, 1.0), (signal.SIGKILL, 2.0), (signal.SIGINT, 3.0), (signal.SIGTERM, 4.0)],
)
def test_an_ending_at_any_moment_leaves_no_half_result_and_no_traceback(tmp_path, checkpoint, number, seconds):
    text = tmp_path / "text.txt"
    out = tmp_path / "out"
    text.write_text("The cat sat on the mat, and the dog did not. " * 400)
    command = [*COMMAND, "probe", str(checkpoint), "--text", str(text), "--out", str(out), *QUICKLY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        time.sleep(seconds)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode in (0, -number, 128 + number)
    # Before the first line of this package runs, Python itself tells of Ctrl-C.
    assert "Traceback" not in said or seconds < 0.5
    if (out / "run.json").exists():
        ProbeResult.load(out)
    ran = run("probe", checkpoint, "--text", text, "--out", out, *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in out.iterdir()} == FILES


# --- standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@posix
@pytest.mark.parametrize("arguments", [["statistics"], ["--help"]])
def test_output_that_cannot_be_written_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        ran = _process(*arguments, stdout=full)
    said = "massieu: cannot write to standard output: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (2, said)


@pytest.mark.medium
@posix
def test_a_reader_that_has_seen_enough_ends_it_as_it_ends_others():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        ran = _process("--help", stdout=nobody)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
@posix
def test_closed_streams_are_quiet_and_get_nothing_of_a_file(tmp_path):
    from tests.probing.result.test_result import made_up

    out = made_up().save(tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    shell = " ".join([*COMMAND, "report", str(out)])
    ran = subprocess.run(["sh", "-c", f"{shell} <&- >&- 2>&-"], env=ENVIRONMENT, timeout=120, check=False)
    assert ran.returncode == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_standard_input_that_is_closed_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # as Python leaves it where the descriptor is closed
    with pytest.raises(InputError, match="standard input is closed, so there is no text to read in it"):
        check_sources(["-"])


@pytest.mark.slow
@posix
def test_standard_input_that_is_closed_is_one_sentence(tmp_path):
    shell = " ".join([*COMMAND, "probe", "--text", "-", "--out", str(tmp_path / "out")])
    ran = subprocess.run(["sh", "-c", f"{shell} <&-"], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "massieu: standard input is closed, so there is no text to read in it; pipe the text to it, or name a file\n"
    )
    assert not (tmp_path / "out").exists()


@posix
def test_messages_that_nobody_can_read_end_nothing(tmp_path):
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        quiet = streams._Guarded(descriptor, raises=False)
        assert [quiet.write(b"four"), quiet.write(b"")] == [4, 0]
        loud = streams._Guarded(descriptor, raises=True)
        with pytest.raises(streams.OutputLost, match="No space left"):
            loud.write(b"four")
        assert loud.write(b"more") == 4  # told once
    finally:
        os.close(descriptor)


@pytest.mark.medium
def test_the_package_is_a_command():
    ran = subprocess.run(
        [sys.executable, "-m", "massieu", "--version"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert ran.stdout.startswith("massieu ")


# --- where results go ------------------------------------------------------------------------------------------------


def test_the_folder_is_tried_before_the_model_is_read(probed, tmp_path):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert_bad(run("probe", "--out", tmp_path / "out"), r"report\.html is in the way: no earlier save has left it")
    assert_bad(run("probe", "--out", tmp_path / ("x" * 300)), "cannot be made: File name too long")
    assert_bad(run("probe", "y" * 300), "cannot be made: File name too long")
    assert probed.options == {}


def test_no_room_is_found_before_the_model_is_read(probed, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, before[1]))
    try:
        ran = run("probe", "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_bad(ran, r"cannot write 48 MB, which may be needed, to the folder .*out/\.massieu: File too large")
    assert probed.options == {}
    assert not (tmp_path / "out").exists()


def test_a_second_run_with_the_same_folder_is_told_before_the_model_is_read(probed, tmp_path, monkeypatch):
    monkeypatch.setattr("massieu.storage.folder._MOMENT", 0.1)
    ready = threading.Event()
    enough = threading.Event()

    def other() -> None:
        with locked(tmp_path):
            ready.set()
            enough.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert ready.wait(30)
        assert_bad(run("probe", "--out", tmp_path), r"another run \(process \d+ on .*\) is writing to the folder")
    finally:
        enough.set()
        thread.join()
    assert probed.options == {}
    assert run("probe", "--out", tmp_path).exit_code == 0


def test_what_cannot_be_saved_in_its_place_is_saved_elsewhere(probed, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    save = probed.result.save
    out = tmp_path / "out"

    def full(folder: Path, format: str) -> Path:
        if folder == out:
            raise InputError(f"cannot write to the folder {folder}: No space left on device")
        return save(folder, format)

    monkeypatch.setattr(probed.result, "save", full)
    ran = run("probe", "--out", out)
    (elsewhere, _), *_ = probed.result.saved
    assert elsewhere.name == "out"
    assert elsewhere.parent.parent == tmp_path / "temporary"
    said = f"massieu: cannot write to the folder {out}: No space left on device; it was saved in {elsewhere} instead"
    assert (ran.exit_code, ran.stderr.splitlines()[-1]) == (2, said)

    monkeypatch.setattr(probed.result, "save", lambda folder, format: full(out, format))
    ran = run("probe", "--out", out)
    assert ran.exit_code == 2
    assert "No space left on device; nor could it be saved elsewhere: cannot write" in ran.stderr.splitlines()[-1]


def test_a_page_of_claims_is_tried_before_they_are_checked(tmp_path, monkeypatch):
    def checked(*_: object, **__: object) -> None:
        raise AssertionError("the claims were checked")

    monkeypatch.setattr("massieu.papers.claims.run.verify", checked)
    assert_bad(run("verify", "--html", tmp_path), "is a folder; the page needs the name of a file")
    assert_bad(run("verify", "--html", tmp_path / ("x" * 300)), "File name too long")
    (tmp_path / "file").touch()
    assert_bad(run("verify", "--html", tmp_path / "file" / "page.html"), "cannot be made: .*file is a file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
