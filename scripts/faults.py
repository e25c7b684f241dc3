"""Is a result lost, or a user's file, when a command is killed or the disk fails? Tried at random places of each command.

    python scripts/faults.py                               # 300 kills and 300 faults, seeded by the commit
    python scripts/faults.py --kills 20 --faults 0 --only probe
    python scripts/faults.py --seed abc --trial 17         # one of them again
    TMPDIR=/dev/shm python scripts/faults.py               # several times faster: no disk is waited for

Each trial begins with a folder that holds a former result and files of the user's that look like a result's. The command
that would make a newer one runs in a process of its own, forked from this one, so that libraries are imported once. It is
killed, at a moment or at a call that changes a file; or one such call fails with ENOSPC, EIO, EINTR or EACCES. Then the
former result must be read or the newer one, whole, and the user's files be as they were. A command whose call failed ends
well or with one sentence. Run again, it must make the newer result, and leave nothing behind. It needs `os.fork`.
"""

import argparse
import builtins
import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES)
CALLS = ("write", "fsync", "replace", "rename", "unlink", "remove", "link", "mkdir", "rmdir", "ftruncate")
"""Functions of `os` that change files; those that open one for writing are counted too."""
LONGEST = 120.0
"""Seconds for one command."""
USERS = {
    "notes.txt": "mine",
    "heads.csv": "site,layer",
    "layers.parquet.bak": "mine",
    "tokens/part-00000.npy": "numbers",
    "tokens/part-00001.bin": "bytes",
    ".massieu-notes": "mine",
    ".massieu-0123456789abcdef": "mine",
    "running/mine.txt": "mine",
    "models/read me": "mine",
    "temperature.json": "{}",
    "run.csv": "mine",
}
"""Files of the user's in every folder."""


# --- what is tried ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command that makes a result, from a former one to a newer one.

    Attributes:
        former, newer: Arguments of the command for either, given the folder.
        version: Which result is there, by a number or a text; raises where it cannot be read.
        places: Names that a folder holds beside the user's files once the command has ended well.
    """

    name: str
    former: Callable[[Path], list[str]]
    newer: Callable[[Path], list[str]]
    version: Callable[[Path], object]
    places: frozenset[str]


def commands(inputs: Path) -> list[Command]:
    """All that are tried; ``inputs`` has the models and texts."""
    tables = {"heads.parquet", "layers.parquet", "details.json", "units.safetensors"}
    store = {".massieu", "run.json", "report.html"}
    shared = ["--statistics", "entropy", "--max-length", "16", "--batch-size", "1", "--seed", "0"]

    def probe(text: str, *others: str) -> Callable[[Path], list[str]]:
        rows = ["--quick", "--per-token", "entropy", "--store-every", "1e-6", *others]
        source = ["probe", str(inputs / "a"), "--text", str(inputs / text)]
        return lambda folder: [*source, "--out", str(folder), *shared, *rows]

    def compare(text: str) -> Callable[[Path], list[str]]:
        models = ["compare", str(inputs / "a"), str(inputs / "b"), "--text", str(inputs / text)]
        return lambda folder: [*models, "--out", str(folder), *shared]

    def monitor(folder: Path) -> list[str]:
        return ["monitor", str(folder / "run.jsonl")]

    def experiment(seed: int) -> Callable[[Path], list[str]]:
        return lambda folder: ["experiment", "temperature", "--quick", "--seeds", str(seed), "--out", str(folder)]

    return [
        Command("probe", probe("one.txt"), probe("two.txt"), _probed, frozenset(tables | store)),
        Command(
            "compare",
            compare("one.txt"),
            compare("two.txt"),
            _compared,
            frozenset({".massieu", "comparison.json", "differences.parquet", "values.parquet", "report.html"}),
        ),
        Command("monitor", monitor, monitor, _monitored, frozenset({"run.jsonl", "run.html"})),
        Command(
            "experiment",
            experiment(5),
            experiment(6),
            _tried,
            frozenset({"temperature.quick.json", "temperature.quick.html"}),
        ),
        Command(
            "report",
            probe("one.txt"),
            lambda folder: ["report", str(folder)],
            _drawn,
            frozenset(tables | store),
        ),
    ]


def _probed(folder: Path) -> object:
    from massieu.probing.result.result import ProbeResult

    result = ProbeResult.load(folder)
    assert result.complete
    # Rows that could not be written are left out with a warning, and everything else is measured.
    if not any("per-token" in warning for warning in result.run.warnings):
        assert len(result.tokens(0, 0)) == result.run.text.tokens
    return result.run.text.tokens


def _compared(folder: Path) -> object:
    from massieu.probing.compare.comparison import Comparison
    from massieu.probing.result.result import ProbeResult

    for kept in (folder / "models").glob("*/run.json"):
        assert ProbeResult.load(kept.parent).complete
    return Comparison.load(folder).runs[0].text.tokens


def _monitored(folder: Path) -> object:
    from massieu.storage.record_lines import read_run

    assert not read_run(folder / "run.jsonl").notes
    page = (folder / "run.html").read_text()
    return "former" if page == "former" else len(page) if page.rstrip().endswith("</html>") else "half"


def _tried(folder: Path) -> object:
    from massieu.papers.experiments.run import load

    page = (folder / "temperature.quick.html").read_text()
    assert page.rstrip().endswith("</html>")
    return sorted(load(folder / "temperature.quick.json").runs)


def _drawn(folder: Path) -> object:
    from massieu.probing.result.result import ProbeResult

    ProbeResult.load(folder)
    hashes = json.loads((folder / "run.json").read_text())["files"]
    return hashes["report.html"]


def make_inputs(folder: Path) -> None:
    """Two small models with a tokenizer, and two texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **special)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder / name)
        whole.save_pretrained(folder / name)
    generator = random.Random(0)
    for name, number in (("one.txt", 60), ("two.txt", 100)):
        (folder / name).write_text(" ".join(generator.choices(words[5:], k=number)))


def prepare(command: Command, folder: Path) -> None:
    """A folder with the former result and the user's files."""
    for name, content in USERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    if command.name == "monitor":
        lines: list[dict[str, Any]] = [{"massieu": "0.1.0", "monitor": {"prefix": "massieu", "layers": 1, "every": 1}}]
        lines += [{"step": step, "massieu/loss": 2.0, "massieu/entropy_min": 1.0} for step in range(4)]
        (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "run.html").write_text("former")
        return
    if command.name == "report":
        from massieu.report import page

        page.render = lambda *_: "<p>another version's drawing</p>"  # pyright: ignore[reportAttributeAccessIssue]
    run_command(command.former(folder))


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: Its exit status; below 0 the signal that killed it.
        said: What it printed.
        value: What its function returned.
        seconds: How long it took.
    """

    status: int
    said: str
    value: Any
    seconds: float


def forked(function: Callable[[], Any], scratch: Path, kill_after: float | None = None) -> Ended:
    """Call a function in a process of its own, and kill it after so many seconds."""
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        _in_child(function, scratch)
    status = None
    while status is None:
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() - started > (LONGEST if kill_after is None else kill_after):
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        else:
            time.sleep(0.002)
    seconds = time.monotonic() - started
    value = None
    with suppress(OSError, ValueError):
        value = json.loads((scratch / "value").read_text())
    return Ended(status, (scratch / "said").read_text(errors="replace"), value, seconds)


def _in_child(function: Callable[[], Any], scratch: Path) -> None:
    status = 70
    try:
        (scratch / "value").unlink(missing_ok=True)
        said = os.open(scratch / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        value = function()
        status = 0
        (scratch / "value").write_text(json.dumps(value))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_command(arguments: list[str]) -> None:
    """The command in this process.

    Raises:
        SystemExit: it ended with another status than 0.
    """
    from massieu.cli.commands import app

    try:
        app(arguments)
    except SystemExit as error:
        if error.code:
            raise


# --- kills and faults ------------------------------------------------------------------------------------------------


class Shim:
    """Counts the calls that change a file in a folder, and lets one of them end otherwise."""

    def __init__(self, folder: Path, at: int | None = None, end: Callable[[str], None] | None = None) -> None:
        self.folder = os.path.realpath(folder)
        self.at, self.end = at, end
        self.count = 0

    def install(self) -> None:
        """Put counting functions in the place of those of `os` and of `open`."""
        for name in CALLS:
            setattr(os, name, self._counting(name, getattr(os, name)))
        os.open = self._opening(os.open)
        io.open = builtins.open = self._opening_file(io.open)

    def _counting(self, name: str, function: Any) -> Any:
        def counted(first: Any, *rest: Any, **named: Any) -> Any:
            directory = named.get("dir_fd", named.get("dst_dir_fd"))
            target = rest[0] if name in ("replace", "rename", "link") else first
            if self._is_inside(target, directory):
                self._step(name)
            return function(first, *rest, **named)

        return counted

    def _opening(self, function: Any) -> Any:
        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and self._is_inside(path, named.get("dir_fd")):
                self._step("open")
            return function(path, flags, *rest, **named)

        return opened

    def _opening_file(self, function: Any) -> Any:
        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            made = function(file, mode, *rest, **named)
            if set(mode) & set("wax+") and self._is_inside(file, None):
                return _CountedFile(made, self._step)
            return made

        return opened

    def _is_inside(self, target: Any, directory: int | None) -> bool:
        try:
            if isinstance(target, int):
                path = os.readlink(f"/proc/self/fd/{target}")
            elif directory is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(target))
            else:
                path = os.path.join(os.path.realpath(os.path.dirname(target) or "."), os.path.basename(target))
        except (OSError, TypeError, ValueError):
            return False
        return path.startswith(self.folder)

    def _step(self, name: str) -> None:
        self.count += 1
        if self.count == self.at and self.end is not None:
            self.end(name)


class _CountedFile:
    """A file that was opened for writing, whose writes are counted."""

    def __init__(self, file: Any, step: Callable[[str], None]) -> None:
        self._file, self._step = file, step

    def write(self, content: Any) -> int:
        self._step("write")
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_CountedFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


def kill_now(name: str) -> None:
    """End this process as a kill does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


# --- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A command with its former folder, and what a run of it is known to do.

    Attributes:
        versions: The former result's and the newer one's.
        calls: So many calls change a file.
        seconds: It takes so long.
    """

    command: Command
    former: Path
    versions: tuple[object, object]
    calls: int
    seconds: float


def measured(command: Command, place: Path, scratch: Path) -> Bench:
    """Prepare a command, and run it once without a fault."""
    former, newer = place / command.name / "former", place / command.name / "newer"
    former.mkdir(parents=True)
    _check(forked(lambda: prepare(command, former), scratch))
    shutil.copytree(former, newer)
    before = _check(forked(lambda: command.version(former), scratch)).value

    def counted() -> int:
        shim = Shim(newer)
        shim.install()
        run_command(command.newer(newer))
        return shim.count

    ran = _check(forked(counted, scratch))
    after = _check(forked(lambda: command.version(newer), scratch)).value
    assert before != after, f"the results of {command.name} cannot be told apart"
    return Bench(command, former, (before, after), ran.value, ran.seconds)


def _check(ended: Ended) -> Ended:
    if ended.status:
        raise SystemExit(f"without any fault: status {ended.status}\n{ended.said}")
    return ended


def tried(bench: Bench, kind: str, generator: random.Random, place: Path, scratch: Path) -> tuple[str, list[str]]:
    """One trial: what was done and what it led to, and all that is wrong."""
    command, folder = bench.command, place / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bench.former, folder)  # links become files; those that a save has left are known by their hashes
    at = generator.randrange(1, bench.calls + 1)
    code = generator.choice(ERRORS)
    kill_after = None
    if kind == "fault":
        what = f"{errno.errorcode[code]} at call {at}"
        end: Callable[[str], None] | None = lambda name: _fail(code, name)  # noqa: E731 - beside the other two
    elif generator.random() < 0.5:
        what, end = f"killed at call {at}", kill_now
    else:
        kill_after = generator.uniform(0, bench.seconds)
        what, end = f"killed after {kill_after:.3f} s", None

    def run() -> None:
        Shim(folder, at, end).install()
        run_command(command.newer(folder))

    ended = forked(run, scratch, kill_after)
    wrong = []
    if ended.status not in ((0, 2) if kind == "fault" else (0, -signal.SIGKILL)):
        wrong.append(f"status {ended.status}")
    if "Traceback" in ended.said:
        wrong.append(f"a traceback: {ended.said.splitlines()[-1]}")
    wrong += _changed(folder)
    resume = ["--resume"] if command.name == "probe" and generator.random() < 0.5 else []
    versions: list[object] = []

    def examine() -> list[object]:
        versions.append(command.version(folder))
        (scratch / "first").write_text(json.dumps(versions))
        run_command([*command.newer(folder), *resume])
        return [*versions, command.version(folder)]

    (scratch / "first").unlink(missing_ok=True)
    examined = forked(examine, scratch)
    found = None
    with suppress(OSError):
        (found,) = json.loads((scratch / "first").read_text())
    if examined.status:
        wrong.append(f"status {examined.status} in reading it or in another run: {examined.said[-400:]}")
    if found not in bench.versions:
        wrong.append(f"what is there is {found}")
    if not examined.status and examined.value[1] != bench.versions[1]:
        wrong.append(f"after another run there is {examined.value[1]}")
    wrong += _changed(folder) + _left(folder, command)
    which = "newer" if found == bench.versions[1] else "former"
    return f"{what}: status {ended.status}, the {which}", wrong


def _fail(code: int, name: str) -> None:
    raise OSError(code, os.strerror(code))


def _changed(folder: Path) -> list[str]:
    """The user's files that are not as they were."""
    return [
        f"the user's {name} was changed or removed"
        for name, content in USERS.items()
        if not (folder / name).is_file() or (folder / name).read_text() != content
    ]


def _left(folder: Path, command: Command) -> list[str]:
    """What is in the folder that should not be."""
    named = {name.partition("/")[0] for name in USERS}
    # A page is written aside in a folder of the user's, where nothing tells what a killed process left from their files.
    pages = command.name in ("monitor", "experiment")
    there = [each for each in folder.iterdir() if not (pages and each.name.startswith(".massieu-"))]
    wrong = [f"{each.name} was left" for each in there if each.name not in named | command.places]
    wrong += [f"running/{each.name} was left" for each in (folder / "running").iterdir() if each.name != "mine.txt"]
    store = folder / ".massieu"
    if store.is_dir():
        entries = sorted(each.name for each in store.iterdir())
        record = next(folder / name for name in ("run.json", "comparison.json") if (folder / name).exists())
        if entries != [hashlib.sha256(record.read_bytes()).hexdigest()]:
            wrong.append(f".massieu holds {entries}")
    return wrong


def commit() -> str:
    """The hash of the commit."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"


def main() -> int:
    """Run the trials; returns how many went wrong, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="how many kills [300]")
    parser.add_argument("--faults", type=int, default=300, help="how many failing calls [300]")
    parser.add_argument("--only", help="one command: probe, compare, monitor, experiment or report")
    parser.add_argument("--seed", default=commit(), help="what the trials are drawn from [the commit]")
    parser.add_argument("--trial", type=int, help="run this one alone")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import_all()
    stand_in()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        place = Path(name)
        inputs, scratch = place / "inputs", place / "scratch"
        inputs.mkdir()
        scratch.mkdir()
        _check(forked(lambda: make_inputs(inputs), scratch))
        # Where a result goes that cannot be saved in its place.
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
        chosen = [each for each in commands(inputs) if arguments.only in (None, each.name)]
        benches = [measured(each, place, scratch) for each in chosen]
        for bench in benches:
            print(f"{bench.command.name}: {bench.calls} calls that change a file, {bench.seconds:.1f} s", flush=True)
        return _run_all(benches, arguments, place, scratch)


def import_all() -> None:
    """Load what the commands need, once for all; none of it starts a thread."""
    import jinja2  # noqa: F401
    import plotly.offline  # noqa: F401
    import pydantic.type_adapter  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers.modeling_gguf_pytorch_utils  # noqa: F401
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

    import massieu.cli.commands
    import massieu.papers.experiments.run
    import massieu.probing.compare.run
    import massieu.probing.run  # noqa: F401

    del AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast
    torch.set_num_threads(1)


def stand_in() -> None:
    """Short pages, a small room and the numbers of a stored experiment: what is tried here is how they are stored."""
    from massieu.papers.experiments import run
    from massieu.papers.experiments.study import find
    from massieu.probing.result import result_files
    from massieu.report import compare, curves, page

    drawn = "<html>" + "a page of some length " * 2000 + "</html>"
    for module in (page, compare, curves):
        module.render = lambda *_, **__: drawn
    result_files.ROOM = 4_000_000
    numbers = next(iter(run.load(run.RESULTS / "temperature.json").runs.values()))
    object.__setattr__(find("temperature"), "measure", lambda seed, quick: numbers)


def _run_all(benches: list[Bench], arguments: argparse.Namespace, place: Path, scratch: Path) -> int:
    kinds = ["kill"] * arguments.kills + ["fault"] * arguments.faults
    random.Random(f"{arguments.seed} order").shuffle(kinds)
    counts: Counter[tuple[str, str, str]] = Counter()
    failures = 0
    for number, kind in enumerate(kinds):
        if number % 50 == 49:
            print(f"{number} trials, {failures} went wrong", flush=True)
        if arguments.trial not in (None, number):
            continue
        bench = benches[number % len(benches)]
        generator = random.Random(f"{arguments.seed} {number}")
        said, wrong = tried(bench, kind, generator, place, scratch)
        counts[bench.command.name, kind, said.rpartition(" ")[2]] += 1
        if wrong:
            failures += 1
            print(f"trial {number}, {bench.command.name}, {said}: {'; '.join(wrong)}", flush=True)
    for (name, kind, which), number in sorted(counts.items()):
        print(f"{name}, {kind}: {number} times the {which} result")
    print(f"{sum(counts.values())} trials, seed {arguments.seed}: {failures} went wrong")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
