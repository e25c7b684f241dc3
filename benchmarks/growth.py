"""How the cost of a probe grows: with the number of windows, and with windows of a model of thousands of heads.

    python benchmarks/growth.py
    python benchmarks/growth.py --part windows --divide 5

Each probe is a fresh process that reads random tokens in batches, with all default statistics and eight draws. Two numbers
of windows are read, one twice the other, and compared. Time is what one more window costs: the median over the later half of
the batches, which read no draws and as many sampled windows each. Memory is the peak of the resident set. Both should be the
same. What the process pays once, the tables and the page among it, stands beside them. Sums have room for 64 error units from
the start, of which a sampled window, one in ten, is one at first; so the shorter text has more than 640 windows. Rows are
written as they are done; a part that is run alone replaces its own. The heads take about 12 minutes, the windows 15;
`--divide 5` reads a fifth of the windows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

import harness
import massieu

VOCABULARY = 512
FEWEST_BATCHES = 12
"""All draws are read in the first half of so many."""
TIME_BAR = 1.1
MEMORY_BAR = 1.05


@dataclass(frozen=True)
class Part:
    """A model of random weights, and how many windows are read of it at most."""

    layers: int
    heads: int
    width: int
    windows: int
    length: int
    batch_size: int

    def texts(self, divided_by: int) -> list[int]:
        """Numbers of windows, whole batches each: a half, all."""
        batches = max(self.windows // (2 * divided_by * self.batch_size), FEWEST_BATCHES)
        return [times * batches * self.batch_size for times in (1, 2)]


PARTS = {
    "heads": Part(layers=70, heads=64, width=256, windows=1_400, length=16, batch_size=10),
    "windows": Part(layers=4, heads=4, width=64, windows=100_000, length=16, batch_size=50),
}


@dataclass(frozen=True)
class Read:
    """What a probe of a text took."""

    windows: int
    seconds_per_window: float
    seconds_once: float
    """First look, tables, findings and the page: all that is not reading windows at that rate."""
    peak_mib: float


@dataclass(frozen=True)
class Row(harness.Comparison):
    """A text beside one of half its length."""

    part: str = ""
    windows: int = 0
    seconds_once: float = 0.0


def read(part: Part, windows: int) -> Read:
    """Probe so many windows in this process, and write the result."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=part.length,
        n_embd=part.width,
        n_layer=part.layers,
        n_head=part.heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2Model(config).eval()
    generator = torch.Generator().manual_seed(1)
    num_batches = windows // part.batch_size
    times = []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(num_batches):
            times.append(time.process_time())
            yield {"input_ids": torch.randint(VOCABULARY, (part.batch_size, part.length), generator=generator)}

    start = time.process_time()
    result = massieu.probe(model, massieu.Batches(batches(), window=part.length), batch_size=part.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "result")
    total = time.process_time() - start
    per_window = float(np.median(np.diff(times)[num_batches // 2 :])) / part.batch_size
    return Read(windows, per_window, total - windows * per_window, harness.peak() / 2**20)


def read_fresh(name: str, windows: int) -> Read:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--part", name, "--read", str(windows)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return Read(**json.loads(run.stdout.splitlines()[-1]))


def row(name: str, half: Read, whole: Read) -> Row:
    """A text beside one of half its length."""
    part = PARTS[name]
    ratio = whole.seconds_per_window / half.seconds_per_window
    return Row(
        name=f"{whole.windows:,} windows of {part.length}, {part.layers} layers of {part.heads} heads: one more window",
        reference=f"{half.windows:,} windows",
        reference_seconds=half.seconds_per_window,
        seconds=whole.seconds_per_window,
        time_ratio=ratio,
        time_interval=(ratio, ratio),
        time_bar=TIME_BAR,
        reference_mebibytes=half.peak_mib,
        mebibytes=whole.peak_mib,
        memory_ratio=whole.peak_mib / half.peak_mib,
        memory_bar=MEMORY_BAR,
        rounds=1,
        part=name,
        windows=whole.windows,
        seconds_once=whole.seconds_once,
    )


def stored_rows(without: list[str]) -> list[Row]:
    """The rows of earlier runs, but for those of some parts."""
    path = harness.RESULTS / "growth.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    kept = [{name: value for name, value in entry.items() if name != "met"} for entry in rows]
    return [Row(**entry) for entry in kept if entry["part"] not in without]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="read an N-th of the windows")
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.read:
        print(json.dumps(asdict(read(PARTS[arguments.part], arguments.read))))
        return
    names = list(PARTS) if arguments.part is None else [arguments.part]
    rows = stored_rows(without=names)
    for name in names:
        texts = PARTS[name].texts(arguments.divide)
        half: Read | None = None
        steps = harness.steps(f"{name}: {windows:,} windows" for windows in texts)
        for windows, step in zip(texts, steps, strict=True):
            whole = read_fresh(name, windows)
            print(f"{step}: {whole}", flush=True)
            if half is not None:
                rows.append(row(name, half, whole))
                harness.write("growth", rows)
            half = whole


if __name__ == "__main__":
    main()
