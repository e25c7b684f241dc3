"""A text that several processes share, and a reading that is broken off and gone on with: the table of one reading."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
import torch.distributed as dist
from tests.support.command_line import ENVIRONMENT, assert_bad, checkpoint, run
from tests.support.probing import zoo

import massieu
from massieu.errors import InputError, ProcessLostError
from massieu.probing.model.model import as_loaded
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading
from massieu.probing.result.result import ProbeResult
from massieu.probing.session import course as course_module
from massieu.probing.session.course import Course, forget
from massieu.probing.session.session import Input, Session
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS, STATISTICS, VALUES
from massieu.probing.sums.running import packed
from massieu.probing.sums.units import Units

__all__ = ["checkpoint"]  # a fixture

GROUPS = frozenset({ATTENTION, VALUES, CLIMB, EXPANSION, MAPS})
FILE = "share-1-of-1.safetensors"


def model(name: str) -> torch.nn.Module:
    """The zoo's model with one layer, or one on either side: its sums are of every kind."""
    layers = {"encoder_layers": 1, "decoder_layers": 1} if name == "bart" else {"num_hidden_layers": 1}
    return zoo.model(name, **layers)


def batches(name: str, number: int = 3, rows: int = 1, length: int = 8) -> list[dict[str, Any]]:
    return [zoo.inputs(name, rows=rows, length=length, seed=seed) for seed in range(number)]


def tables(result: ProbeResult) -> "polars.DataFrame":
    return polars.concat([result.heads, result.layers])


def assert_same_table(found: "polars.DataFrame", expected: "polars.DataFrame") -> None:
    """Values of sums in float64, each to some roundings: 1e-12 relative. A spread's error is of its own size."""
    names = ["site", "layer", "head", "statistic", "count"]
    assert found.select(names).equals(expected.select(names))
    for column in ("value", "standard_error"):
        one, other = (frame[column].to_numpy().astype(float) for frame in (found, expected))
        scale = np.nan_to_num(np.abs(expected["value"].to_numpy().astype(float)))
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        assert (np.nan_to_num(np.abs(one - other)) <= 1e-12 * np.maximum(np.abs(np.nan_to_num(other)), scale)).all()


# --- several processes -----------------------------------------------------------------------------------------------


def session(
    name: str, rank: int, processes: int, given: list[dict[str, Any]], groups: frozenset[str] = GROUPS
) -> Session:
    options = Options(groups, Units(), 20, climb_queries=6)
    source = Input(given, "batches", True, 20, None)
    course = Course(rank, processes)
    return Session(as_loaded(model(name)), source, options, lambda _: None, None, course=course)


class _Sent(Exception):  # noqa: N818 - nothing is wrong
    """A process has sent its sums."""


def shared(
    name: str,
    given: list[list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    groups: frozenset[str] = GROUPS,
) -> ProbeResult:
    """What the first of several processes finds, each with its batches; they read one after the other, the first last."""
    sent: list[bytes] = []

    def exchange(course: Course, own: bytes) -> list[bytes]:
        sent.insert(0, own)
        if course.rank:
            raise _Sent
        return sent

    monkeypatch.setattr(Course, "_exchange", exchange)
    for rank in range(len(given) - 1, 0, -1):
        with pytest.raises(_Sent):
            session(name, rank, len(given), given[rank], groups).read_all(threading.Event())
    first = session(name, 0, len(given), given[0], groups)
    complete = first.read_all(threading.Event())
    return first.result(frozenset(STATISTICS), {}, complete)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "processes", "groups"),
    [("gpt2", 3, 2, GROUPS), ("bart", 1, 2, frozenset({ATTENTION, EXPANSION}))],
    ids=["every group", "more than batches"],
)
def test_processes_share_the_batches_and_get_the_table_of_one(name, number, processes, groups, monkeypatch):
    given = batches(name, number)
    alone = shared(name, [given], monkeypatch, groups)
    assert alone.complete
    together = shared(name, [given] * processes, monkeypatch, groups)
    assert_same_table(tables(together), tables(alone))
    for part in ("text", "error_unit", "sample", "complete"):
        assert getattr(together.run, part) == getattr(alone.run, part)
    assert together.details == alone.details


@pytest.mark.medium
def test_processes_that_are_given_different_batches_are_refused(monkeypatch):
    given, few = batches("gpt2"), frozenset({ATTENTION})
    with pytest.raises(InputError, match="every process must be given all batches, in the same order"):
        shared("gpt2", [given, given[::-1]], monkeypatch, few)
    with pytest.raises(InputError, match="every process must be given all batches"):
        shared("gpt2", [given, given[:2]], monkeypatch, few)


@pytest.mark.medium
def test_trouble_in_the_share_of_another_process_is_told(monkeypatch):
    given, few = batches("bert", 2), frozenset({ATTENTION})
    given[1] = {"inputs_embeds": torch.full((1, 8, 48), torch.nan)}
    together, alone = (shared("bert", [given] * processes, monkeypatch, few) for processes in (2, 1))
    assert together.trouble == alone.trouble is not None


def test_a_process_that_has_died_leaves_what_the_others_have_read(tmp_path, monkeypatch):
    def lost(course: Course, own: bytes) -> list[bytes]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Course, "_exchange", lost)
    one = session("gpt2", 0, 2, batches("gpt2"), frozenset({ATTENTION}))
    one.course.folder = tmp_path / "running"
    with pytest.raises(ProcessLostError, match=r"one of the 2 processes has ended before the others; .*running"):
        one.read_all(threading.Event())
    assert [path.name for path in (tmp_path / "running").iterdir()] == ["share-1-of-2.safetensors"]


def test_a_group_of_one_process_is_one_process(tmp_path):
    given = batches("gpt2", 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        together = massieu.probe(model("gpt2"), given, statistics=["entropy"], run=massieu.Run(distributed=True))
    finally:
        dist.destroy_process_group()
    assert tables(together).equals(tables(massieu.probe(model("gpt2"), given, statistics=["entropy"])))


# --- broken off and gone on with -------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a process that is killed does not live to see."""


def broken_off(after: int, kind: type[BaseException] = Killed) -> Callable[[Any], None]:
    """Ends a reading after so many batches."""
    seen = itertools.count(1)

    def tell(state: Any) -> None:
        if state.stage == "reading" and next(seen) == after:
            raise kind

    return tell


def often(folder: Path, **how: Any) -> massieu.Run:
    """A run that stores its sums after every batch."""
    return massieu.Run(folder, store_every=1e-9, **how)


@pytest.mark.medium
def test_a_resumed_reading_gives_the_table_of_one_without_a_break(tmp_path):
    given = batches("gpt2")
    whole = massieu.probe(model("gpt2"), massieu.Batches(given, window=20))
    data = massieu.Batches(given, window=20)
    with pytest.raises(Killed):
        massieu.probe(model("gpt2"), data, run=often(tmp_path, progress=broken_off(2)))
    resumed = massieu.probe(model("gpt2"), data, run=often(tmp_path, resume=True))
    assert tables(resumed).equals(tables(whole))
    assert resumed.details == whole.details
    for part in ("text", "error_unit", "sample", "warnings", "nonfinite"):
        assert getattr(resumed.run, part) == getattr(whole.run, part)


@pytest.mark.medium
def test_a_reading_may_be_broken_off_again_and_again(tmp_path):
    given, names = batches("gpt2", 4), ["entropy", "pairwise_distance"]
    for after in (2, 3):
        run = often(tmp_path / "r", resume=True, progress=broken_off(after))
        with pytest.raises(Killed):
            massieu.probe(model("gpt2"), given, statistics=names, run=run)
    resumed = massieu.probe(model("gpt2"), given, statistics=names, run=often(tmp_path / "r", resume=True))
    assert tables(resumed).equals(tables(massieu.probe(model("gpt2"), given, statistics=names)))
    forget(tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_no_batch_but_the_first_is_read_twice(tmp_path, monkeypatch):
    given, read = batches("gpt2", 4), []
    forward = Reading.forward
    monkeypatch.setattr(Reading, "forward", lambda own, *a: read.append(list(a[3])) or forward(own, *a))
    with pytest.raises(Killed):
        massieu.probe(
            model("gpt2"), given, statistics=["symmetric_share"], run=often(tmp_path / "r", progress=broken_off(2))
        )
    massieu.probe(model("gpt2"), given, statistics=["symmetric_share"], run=often(tmp_path / "r", resume=True))
    assert read == [[0], [1], [0], [2], [3]]


def test_between_the_times_of_storing_nothing_is_stored(tmp_path):
    massieu.probe(model("gpt2"), batches("gpt2"), statistics=["entropy"], run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.medium
def test_a_model_whose_passes_leave_something_on_it_is_resumed(tmp_path):
    gpt2: Any = type(model("gpt2"))

    class Noting(gpt2):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            self.longest_pass = max(getattr(self, "longest_pass", 0), output[0].shape[1])
            return output

    noting = model("gpt2")
    noting.__class__ = Noting
    given = [*batches("gpt2", 1, length=8), *batches("gpt2", 1, length=12)]
    massieu.probe(noting, given[:1], statistics=["entropy"], run=often(tmp_path / "r"))
    noting(**given[1])
    resumed = massieu.probe(noting, given, statistics=["entropy"], run=often(tmp_path / "r", resume=True))
    assert tables(resumed).equals(tables(massieu.probe(model("gpt2"), given, statistics=["entropy"])))


@pytest.mark.medium
def test_an_interrupted_reading_is_stored_at_once_and_resumed(tmp_path):
    given, names = batches("gpt2", 4), ["entropy"]
    few = frozenset({ATTENTION})
    one = session("gpt2", 0, 1, given, few)
    one.course = Course(folder=tmp_path / "r")
    asked = threading.Event()
    one.tell = lambda state: asked.set() if state.windows == 2 else None
    assert not one.read_all(asked)
    again = session("gpt2", 0, 1, given, few)
    again.course = Course(folder=tmp_path / "r", resume=True)
    assert again.read_all(threading.Event())
    assert again.course.start == 2
    whole = session("gpt2", 0, 1, given, few)
    whole.read_all(threading.Event())
    results = [each.result(frozenset(names), {}, True) for each in (again, whole)]
    assert tables(results[0]).equals(tables(results[1]))


def test_sums_that_cannot_be_stored_are_a_warning_and_not_the_end(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(course_module, "replacing", full)
    result = massieu.probe(model("gpt2"), batches("gpt2"), statistics=["entropy"], run=often(tmp_path / "r"))
    assert [warning for warning in result.run.warnings if "stored" in warning] == [
        f"running sums could not be stored in {tmp_path / 'r'}: No space left on device"
    ]


@pytest.mark.medium
def test_what_belongs_to_another_run_is_refused(tmp_path):
    given = batches("gpt2", 4)
    with pytest.raises(Killed):
        massieu.probe(model("gpt2"), given, statistics=["entropy"], run=often(tmp_path / "r", progress=broken_off(3)))
    other = zoo.fresh("gpt2", num_hidden_layers=1)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (other, given, {}, "another model"),
        (model("gpt2"), massieu.Batches(given, window=64), {}, "another max_length: 256, not 64"),
        (model("gpt2"), given, {"statistics": ["entropy", "largest_weight"]}, "another statistics"),
        (model("gpt2"), given, {"seed": 1}, "another seed: 0, not 1"),
        (model("gpt2"), [given[0], given[2], given[1]], {}, "the text differs .* among its first 3 batches"),
        (model("gpt2"), given[:2], {}, "the text has 2 batches, but .* was read from 3"),
    ]
    for changed_model, text, changed, message in cases:
        options = {"statistics": ["entropy"], "run": often(tmp_path / "r", resume=True)} | changed
        with pytest.raises(InputError, match=message) as error:
            massieu.probe(changed_model, text, **options)
        assert "\n" not in str(error.value)
    whole = (tmp_path / "r" / FILE).read_bytes()
    (tmp_path / "r" / FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    with pytest.raises(InputError, match=f"{FILE} is damaged: its checksum is not that of its content; begin without"):
        massieu.probe(model("gpt2"), given, statistics=["entropy"], run=often(tmp_path / "r", resume=True))
    (tmp_path / "r" / FILE).write_bytes(b"nothing")
    for resume in (True, False):  # nothing of somebody else's is replaced
        with pytest.raises(InputError, match=f"{FILE} is in the way: it holds no running sums"):
            massieu.probe(model("gpt2"), given, statistics=["entropy"], run=often(tmp_path / "r", resume=resume))
    assert (tmp_path / "r" / FILE).read_bytes() == b"nothing"
    (tmp_path / "r" / FILE).write_bytes(whole)
    (tmp_path / "r" / FILE).rename(tmp_path / "r" / "share-2-of-3.safetensors")
    with pytest.raises(InputError, match="the running sums of 3 processes; resume with as many, not with 1 process"):
        massieu.probe(model("gpt2"), given, statistics=["entropy"], run=often(tmp_path / "r", resume=True))


@pytest.mark.medium
def test_a_checkpoint_whose_configuration_was_edited_is_another_model(tmp_path):
    zoo.fresh("gpt2", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    given, edited = batches("gpt2", 4), tmp_path / "model" / "config.json"
    with pytest.raises(Killed):
        massieu.probe(
            tmp_path / "model", given, statistics=["entropy"], run=often(tmp_path / "r", progress=broken_off(3))
        )
    before = edited.read_text()
    edited.write_text(json.dumps(json.loads(before) | {"scale_attn_weights": False}))
    with pytest.raises(InputError, match="of a run with another model configuration \\(by its digest\\)"):
        massieu.probe(tmp_path / "model", given, statistics=["entropy"], run=often(tmp_path / "r", resume=True))
    edited.write_text(before)
    assert massieu.probe(
        tmp_path / "model", given, statistics=["entropy"], run=often(tmp_path / "r", resume=True)
    ).complete


def test_a_refused_resumption_leaves_what_is_stored(tmp_path):
    given = batches("gpt2")
    with pytest.raises(Killed):
        massieu.probe(model("gpt2"), given, statistics=["symmetric_share"], run=often(tmp_path, progress=broken_off(2)))
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(InputError, match="the text differs"):
        massieu.probe(model("gpt2"), given[::-1], statistics=["symmetric_share"], run=often(tmp_path, resume=True))
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
@pytest.mark.parametrize("name", [FILE, "tokens"])
def test_links_among_running_sums_are_refused(tmp_path, name):
    (tmp_path / "r").mkdir()
    (tmp_path / "outside").write_bytes(packed({}))
    (tmp_path / "r" / name).symlink_to(tmp_path / "outside")
    for resume in (True, False):
        with pytest.raises(InputError, match=f"{name} is a symbolic link, and no link among running sums is followed"):
            massieu.probe(
                model("gpt2"),
                batches("gpt2", 1),
                statistics=["symmetric_share"],
                run=often(tmp_path / "r", resume=resume),
            )
    assert (tmp_path / "outside").read_bytes() == packed({})


def test_with_replacements_nothing_is_stored_that_could_not_be_gone_on_from(tmp_path):
    given = batches("gpt2")
    with pytest.raises(Killed) as error:
        massieu.probe(
            model("gpt2"),
            given,
            replace="off(mean)",
            statistics=["entropy"],
            run=often(tmp_path / "r", progress=broken_off(2)),
        )
    assert not (tmp_path / "r").exists()
    assert not getattr(error.value, "__notes__", [])


def test_wrong_arguments_of_the_course_are_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.touch()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: massieu.Run(resume=True), "resume=True needs the folder in which running sums are stored"),
        (lambda: massieu.Run(store_every=0), "store_every must be a positive number of minutes, got 0"),
        (lambda: massieu.Run(store_every=float("nan")), "store_every must be a positive number of minutes, got nan"),
        (lambda: file, "is a file; running sums need a folder"),
        (lambda: "a\0b", "cannot be the name of a file"),
        (lambda: massieu.Run(distributed=True), "distributed=True needs an initialised process group"),
        (lambda: 3, "run must be a folder or a massieu.Run, got 3"),
    ]
    for wrong, message in cases:
        with pytest.raises(InputError, match=message):
            massieu.probe(model("gpt2"), batches("gpt2", 1), run=wrong())


def test_what_ends_a_reading_says_what_is_stored(tmp_path):
    given: list[Any] = [*batches("gpt2", 2), {"input_ids": torch.tensor([[-1]])}]
    with pytest.raises(InputError) as error:
        massieu.probe(model("gpt2"), given, statistics=["symmetric_share"], run=often(tmp_path / "r"))
    assert error.value.__notes__ == [f"(running sums are stored in {tmp_path / 'r'}, to be resumed)"]


def test_a_run_from_the_beginning_replaces_what_other_numbers_of_processes_have_stored(tmp_path):
    (tmp_path / "share-3-of-4.safetensors").write_bytes(packed({}))
    (tmp_path / "share-3-of-4 copy.safetensors").touch()
    massieu.probe(model("gpt2"), batches("gpt2", 1), statistics=["symmetric_share"], run=often(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "share-3-of-4 copy.safetensors"}


def test_only_stored_sums_are_removed(tmp_path):
    for name in ("share-1-of-2.safetensors", "share-2-of-2.safetensors"):
        (tmp_path / name).write_bytes(packed({}))
    for name in ("mine.txt", "share-1-of-3.safetensors"):
        (tmp_path / name).write_text("mine")
    forget(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "share-1-of-3.safetensors"}
    forget(tmp_path / "not there")


def test_sums_that_cannot_be_removed_are_one_sentence(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / FILE).write_bytes(packed({}))
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(InputError, match=r"the result is saved, but the running sums in .* could not be removed: Perm"):
        forget(tmp_path)


# --- the command -----------------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


TWO_DRAWS = "--draws", 2
"""As the tests of this process have, for the commands that run in another."""


def torchrun(processes: int, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "massieu"]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([*command, *map(str, arguments)], env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, **given)


def said(output: str) -> list[str]:
    """What the command says, without torchrun's own words."""
    return re.findall("^massieu: (.*)$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, None])
def test_torchrun_says_bad_input_once_even_if_one_process_is_late(late, checkpoint, tmp_path):
    """The process that is first with the message ends, and torchrun ends the other before it can speak."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, time\ntime.sleep(60 * (os.environ['RANK'] == '{late}'))\nfrom massieu.cli import main\nmain()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", program]
    ran = subprocess.run(
        [*map(str, command), "probe", str(checkpoint), "--text", "-", "--out", str(tmp_path / "out")],
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode != 0
    assert said(ran.stderr) == [
        "--text - works with one process only, but torchrun started several; give files instead"
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@posix
def test_a_process_that_is_killed_ends_all_and_resumed_they_give_the_table_of_one(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    shared = ["probe", checkpoint, "--text", tmp_path / "text.txt", "--max-length", 32, "--batch-size", 1]
    shared += ["--statistics", "entropy,pairwise_distance", *TWO_DRAWS]
    ran = torchrun(2, *shared, "--out", tmp_path / "2", "--store-every", 1e-3)
    last = tmp_path / "2" / "running" / "share-2-of-2.safetensors"
    until = time.monotonic() + 120
    while not last.exists() and time.monotonic() < until:
        time.sleep(0.01)
    children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, error = ran.communicate(timeout=120)
    assert ran.returncode != 0
    # torchrun ends the others with SIGTERM, which may come before they find out by themselves.
    lost = f"one of the 2 processes has ended before the others; what was read is stored in {last.parent}"
    assert said(error)[-1] in (lost, "interrupted by SIGTERM")
    refused = run(*shared, "--out", tmp_path / "2", "--resume")
    assert_bad(refused, "holds the running sums of 2 processes; resume with as many, not with 1 process")
    again = torchrun(2, *shared, "--out", tmp_path / "2", "--resume")
    out, error = again.communicate(timeout=240)
    assert again.returncode == 0, error
    assert out.count("page:") == 1
    assert [line.partition(" (")[0] for line in said(error)] == ["loading the model", "reading", "writing"]
    assert not last.parent.exists()
    assert run(*shared, "--out", tmp_path / "1").exit_code == 0
    together, alone = (ProbeResult.load(tmp_path / name) for name in "21")
    assert_same_table(tables(together), tables(alone))
    assert together.details == alone.details
    assert together.run.text == alone.run.text


@pytest.mark.slow
@posix
def test_a_terminated_command_is_resumed_to_the_last_bit(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    shared = ["probe", checkpoint, "--text", tmp_path / "text.txt", "--max-length", 32, "--batch-size", 1]
    shared += ["--statistics", "entropy,pairwise_distance", *TWO_DRAWS]
    here = ["--out", tmp_path / "here", "--store-every", 1e-4]
    command = [sys.executable, "-m", "massieu", *map(str, shared + here)]
    stored = tmp_path / "here" / "running" / FILE
    for number, end in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        before = stored.stat().st_mtime_ns if stored.exists() else 0
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as ran:
            until = time.monotonic() + 120
            while (not stored.exists() or stored.stat().st_mtime_ns == before) and time.monotonic() < until:
                time.sleep(0.01)
            ran.send_signal(number)
            _, error = ran.communicate(timeout=120)
        assert ran.returncode == end, error
        command.append("--resume") if "--resume" not in command else None
    assert b"run the same command with --resume to continue" in error
    assert not ProbeResult.load(tmp_path / "here").complete
    assert run(*shared, *here, "--resume").exit_code == 0
    assert not stored.parent.exists()
    assert run(*shared, "--out", tmp_path / "whole").exit_code == 0
    here_is, whole = (ProbeResult.load(tmp_path / name) for name in ("here", "whole"))
    assert here_is.complete
    assert tables(here_is).equals(tables(whole))


@pytest.mark.slow
def test_memory_and_time_for_a_token_do_not_grow_with_the_text():
    """Nothing of a token is kept: 40 bytes, of allocators and running sums, are allowed for each."""
    script = Path(__file__).parents[3] / "benchmarks" / "long_text.py"
    command = [sys.executable, str(script), "--tokens", "100000", "--step", "20000"]
    ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=600, check=True)
    rows = [tuple(map(float, row)) for row in re.findall(r"([\d.]+) µs a token +([\d.]+) MB", ran.stdout)]
    assert len(rows) == 5
    (first, before), (last, after) = rows[0], rows[-1]
    assert after - before < 40 * 80_000 / 1e6
    assert last < 2 * first  # CPU time beside other work varies by a third
