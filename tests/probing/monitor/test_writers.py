"""Where a monitor's records go: no line but the last is cut by a kill, resumed runs, targets that fail, what is refused."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import every_row

from massieu import InputError
from massieu.probing.monitor.alarm_history import Alarm, Place
from massieu.probing.monitor.alarm_rules import RULES
from massieu.probing.monitor.lines_file import LinesFile
from massieu.probing.monitor.outlets import Outlets
from massieu.probing.monitor.writers import writer_for
from massieu.storage.record_lines import read_run, record_line

SETTINGS = {"every": 100, "prefix": "massieu", "model": "Model", "layers": 2, "heads": [4, 4]}
NOT_FINITE = {"massieu/loss": math.nan, "massieu/gradient_norm": math.inf, "massieu/learning_rate": -math.inf}


class Record(dict):
    alarms: list[Alarm] = []


def same(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(
        found[key] == value or (math.isnan(found[key]) and math.isnan(value)) for key, value in wanted.items()
    )


def test_lines_are_strict_json_and_are_read_back(tmp_path: Path):
    path = tmp_path / "new" / "run.jsonl"
    write = writer_for(path, SETTINGS)
    write({"massieu/loss": 0.1, "massieu/layer0/entropy_mean": 1 / 3}, 0)
    record = Record(NOT_FINITE)
    record.alarms = [Alarm(RULES[0], "massieu/loss", math.nan, 1.0, 100, 90, Place("", None), 1)]
    write(record, 100)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    header, first, second = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert header["monitor"] == SETTINGS
    assert first == {"step": 0, "massieu/loss": 0.1, "massieu/layer0/entropy_mean": 1 / 3}
    assert second["massieu/loss"] == "NaN"
    assert [second["massieu/gradient_norm"], second["massieu/learning_rate"]] == ["Infinity", "-Infinity"]
    run = read_run(path)
    assert run.settings == SETTINGS
    assert run.prefix == "massieu"
    assert same(run.records[100], NOT_FINITE)
    assert run.alarms == {100: ["massieu/loss"]}
    assert not run.notes


def test_a_resumed_run_appends_and_the_latest_is_read(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    write = writer_for(path, SETTINGS)
    for step in (0, 100, 200, 300):
        write({"massieu/loss": float(step)}, step)
    with path.open("ab") as file:
        file.write(b'{"step":400,"massieu/lo')  # cut when the machine stopped
    resumed = writer_for(path, SETTINGS)
    for step in (100, 200):
        resumed({"massieu/loss": step + 0.5}, step)
    run = read_run(path)
    # Steps 300 and 400 are of the attempt that was given up.
    assert run.curve("loss") == {0: 0.0, 100: 100.5, 200: 200.5}
    assert run.notes == ["line 6 of run.jsonl was cut off and is left out"]
    assert sum("monitor" in line for line in path.read_text().splitlines()) == 1


def test_a_file_of_another_run_is_gone_on_with_and_said(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    writer_for(path, SETTINGS)({"massieu/loss": 1.0}, 0)
    with pytest.warns(UserWarning, match="has records of another run: layers 2 in place of 12"):
        writer_for(path, SETTINGS | {"layers": 12})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer_for(path, SETTINGS | {"every": 7, "heads": (4, 4)})


KILLED = """
import sys
from massieu.probing.monitor.writers import writer_for
write = writer_for(sys.argv[1], {"prefix": "massieu"})
step = 0
while True:
    write({f"massieu/layer{n}/entropy_mean": float(step) for n in range(400)}, step)
    step += 1
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_kill_cuts_no_line_but_the_last_and_the_run_goes_on(tmp_path: Path):
    # Linux may end a write between two pages where its process is killed, so the last line is whole or cut by chance.
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    end = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size > 300_000):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    data = path.read_bytes()
    whole = data.count(b"\n") - 1  # without the header
    writer_for(path, {"prefix": "massieu"})({f"massieu/layer{n}/entropy_mean": float(whole) for n in range(400)}, whole)
    run = read_run(path)
    cut = not data.endswith((b"\n", b"}"))
    assert run.notes == [f"line {whole + 2} of run.jsonl was cut off and is left out"] * cut
    assert list(run.records) == list(range(whole + 1))
    assert all(set(record.values()) == {float(step)} and len(record) == 400 for step, record in run.records.items())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_once_and_training_goes_on():
    kept: list[int] = []
    write = Outlets(["/dev/full", lambda record, step: kept.append(step)], SETTINGS)
    with pytest.warns(
        UserWarning, match=r"step 0 could not be written to /dev/full \(.*No space.*training goes on"
    ) as said:
        assert [write({"massieu/loss": 1.0}, step) for step in (0, 100)] == [None, None]
    assert len(said) == 1
    assert kept == [0, 100]


def test_a_target_that_fails_is_tried_again_and_an_interruption_is_not_swallowed():
    seen: list[int] = []

    def flaky(record: dict, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt
        if step == 0:
            raise ConnectionError("the network is down")
        seen.append(step)

    write = Outlets(flaky, SETTINGS)
    with pytest.warns(UserWarning, match=r"flaky \(ConnectionError: the network is down\)"):
        write({}, 0)
    write({}, 1)
    assert seen == [1]
    with pytest.raises(KeyboardInterrupt):
        write({}, 2)


def test_objects_and_functions_get_record_and_step():
    calls: list[tuple] = []

    class Run:
        def log(self, data: dict, step: int | None = None, commit: bool | None = None) -> None:
            calls.append(("log", data, step))

    class Board:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            calls.append((tag, scalar_value, global_step))

        def flush(self) -> None:
            calls.append(("flush",))

    module = types.ModuleType("tracker")
    module.log = lambda metrics, step=None: calls.append(("module", metrics, step))  # pyright: ignore
    write = Outlets((Run(), Board(), module, lambda record, step: calls.append((record, step))), SETTINGS)
    record = {"a": 1.0, "b": math.nan}
    write(record, 7)
    assert calls[0] == ("log", record, 7)
    assert calls[1][:1] + calls[1][2:] == ("a", 7)
    assert calls[2][0] == "b"
    assert calls[3:] == [("flush",), ("module", record, 7), (record, 7)]


class Wandb:
    """A run with the rules of Weights & Biases for steps and rows, read off its client and its offline files."""

    def __init__(self) -> None:
        self.step, self.open, self.rows, self.dropped = 0, {}, {}, []
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict, step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            self.dropped.append((step, data))
            return
        if step is not None and step > self.step:
            self._close(step)
        self.open |= data
        if commit or (step is None and commit is None):
            self._close(self.step + 1)

    def finish(self) -> dict[int, dict]:
        self._close(self.step)
        return self.rows

    def _close(self, step: int) -> None:
        if self.open:
            self.rows[self.step] = self.open
        self.open, self.step = {}, step


def run_beside(write: Callable[[dict, int], None], run: Wandb, way: str) -> None:
    """Twelve steps of a loop that logs its loss, with a record at every third."""
    for step in range(12):
        if way == "counted":
            run.log({"loss": step})
            run.log({"more": step})
        if way == "with steps":
            run.log({"loss": step}, step=step)
        if step % 3 == 0:
            write({"massieu/x": step / 2}, step)
        if way == "with steps":
            run.log({"more": step}, step=step)


@pytest.mark.parametrize("way", ["counted", "with steps", "nothing"])
def test_no_number_is_lost_in_weights_and_biases_and_the_programs_own_rows_are_as_before(way: str):
    alone, beside = Wandb(), Wandb()
    run_beside(lambda *_: None, alone, way)
    run_beside(Outlets(beside, {"prefix": "massieu"}), beside, way)
    assert not beside.dropped
    assert beside.axes == {"massieu/*": "massieu/step"}
    rows = beside.finish()
    found = [(row["massieu/step"], row["massieu/x"]) for row in rows.values() if "massieu/step" in row]
    assert found == [(0, 0.0), (3, 1.5), (6, 3.0), (9, 4.5)]
    own = {step: {k: v for k, v in row.items() if "massieu" not in k} for step, row in rows.items()}
    assert {step: row for step, row in own.items() if row} == alone.finish()


def test_the_module_wandb_stands_for_its_run():
    module: Any = types.ModuleType("wandb")
    module.run, module.define_metric, module.log = None, lambda *_, **__: None, lambda *_, **__: None
    with pytest.raises(InputError, match=r"to is the module wandb without a run: call wandb\.init first"):
        Outlets(module, SETTINGS)
    module.run = Wandb()
    Outlets(module, SETTINGS | {"prefix": ""})({"x": 1.0}, 5)
    assert module.run.finish() == {0: {"x": 1.0, "massieu/step": 5}}
    assert not module.run.axes  # a pattern would take in the program's own metrics


def test_only_the_first_process_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    dist = "massieu.probing.monitor.processes.dist"
    monkeypatch.setattr(f"{dist}.is_initialized", lambda: True)
    monkeypatch.setattr(f"{dist}.get_rank", lambda: 1)
    path = tmp_path / "run.jsonl"
    write = Outlets(path, SETTINGS)
    write({"massieu/loss": 1.0}, 0)
    assert not path.exists()
    monkeypatch.setattr(f"{dist}.get_rank", lambda: 0)
    Outlets(path, SETTINGS)({"massieu/loss": 1.0}, 0)
    assert len(path.read_text().splitlines()) == 2


class Logger:
    def log(self, level: int, message: str) -> None: ...


@every_row(
    ("target", "said"),
    [
        (5, "to must be a path, .*, got 5"),
        (Logger(), "got Logger"),
        (lambda record: None, "got a function of other arguments"),
        ("a\0b", "cannot be the name of a file"),
        ("{tmp}", "is a folder"),
        ("{tmp}/file/run.jsonl", "cannot write records to"),
    ],
)
def test_bad_targets_are_refused(target: object, said: str, tmp_path: Path):
    (tmp_path / "file").touch()
    if isinstance(target, str):
        target = target.replace("{tmp}", str(tmp_path))
    with pytest.raises(InputError, match=said):
        writer_for(target)


@every_row(
    ("text", "said"),
    [
        ("", "holds no record of a monitor: it is empty"),
        ('{"massieu": "1", "monitor": {}}\n', "holds no record of a monitor"),
        ('{"step": 1, "x', "holds no record"),
        ("loss 3\n", "line 1: it must hold a JSON object.*'loss 3'"),
        ('{"step": 1}\n[1]\n', "line 2: it must hold a JSON object"),
        ('{"loss": 1}\n', 'a record needs its "step"'),
        ('{"step": 1.5}\n', "a whole number from 0 on, not 1.5"),
        ('{"step": -1}\n', "a whole number from 0 on, not -1"),
        ('{"step": 1, "a": "b"}\n', '"a" must be a number'),
        ('{"step": 1, "a": true}\n', '"a" must be a number'),
        ('{"step": 1, "a": {"b": 1}}\n', '"a" must be a number'),
        ('{"step": 1, "alarms": 3}\n', '"alarms" must be a list'),
        ("null\n", "line 1: it must hold a JSON object"),
    ],
)
def test_what_is_no_run_is_named_with_its_line(text: str, said: str, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_run(path)


def _lines_executed(path: Path) -> int:
    """How many lines of Python reading a run takes."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        read_run(path)
    finally:
        sys.settrace(before)
    return count


def test_reading_takes_as_much_longer_as_there_are_records(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    lines = []
    for count in (200, 800):
        path.write_text("".join(record_line(step, {"massieu/loss": 1.0}) for step in range(count)))
        lines.append(_lines_executed(path))
    assert lines[1] < 4.5 * lines[0]


def test_a_missing_file_is_one_sentence(tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot read .*none.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl")


def test_lines_that_others_write_are_read(tmp_path: Path):
    """Without a header, with Python's own NaN, with a mark at the start, a last line without its end."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"step": 0, "mine/loss": NaN, "mine/x": null}\r\n\n{"step": 1.0, "mine/loss": 2}')
    run = read_run(path)
    assert run.prefix == "mine"
    assert run.quantities() == ["loss"]
    assert math.isnan(run.curve("loss")[0])
    assert run.curve("loss")[1] == 2


@pytest.mark.parametrize("cut", [b'{"step":1', b'{"', b'{"massieu":"0.1'])
def test_a_record_after_a_cut_line_stands_on_a_line_of_its_own(cut: bytes, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    lines = LinesFile(path, SETTINGS)
    lines({"massieu/loss": 1.0}, 0)
    with path.open("ab") as file:
        file.write(cut)
    lines({"massieu/loss": 3.0}, 2)
    assert read_run(path).curve("loss") == {0: 1.0, 2: 3.0}


@pytest.mark.skipif(os.name == "nt", reason="no limit of a file's size")
def test_a_write_that_was_taken_in_part_is_said_and_the_next_record_is_whole(tmp_path: Path):
    """A quota that is reached in the middle of a line."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "run.jsonl"
    write = Outlets(path, SETTINGS)
    write({"massieu/loss": 1.0}, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, limits[1]))
        with pytest.warns(UserWarning, match="7 of [0-9]+ bytes of a record were written"):
            write({"massieu/loss": 2.0}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    write({"massieu/loss": 3.0}, 2)
    run = read_run(path)
    assert run.curve("loss") == {0: 1.0, 2: 3.0}
    assert run.notes == ["line 3 of run.jsonl was cut off and is left out"]
