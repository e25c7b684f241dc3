"""Time and memory of one thing against another, in one run.

Times are CPU times of this process on one thread, so that other load on the machine matters little; the two sides take
turns, so that what is left of it (and the clock's drift) meets both alike. Memory is the growth of the resident set of
a fresh process while it does the work once. See `benchmarks/ops.py` for the use.
"""

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
Work = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """One row of a benchmark: ratios are ours divided by the reference's, and ought to stay below their bars."""

    name: str
    reference: str
    reference_seconds: float
    seconds: float
    time_ratio: float
    time_interval: tuple[float, float]
    """95 % bootstrap interval of the ratio of medians, over rounds."""
    time_bar: float
    reference_mebibytes: float | None = None
    mebibytes: float | None = None
    memory_ratio: float | None = None
    memory_bar: float | None = None


@dataclass(frozen=True)
class Timing:
    """Median times of two sides that took turns, and their ratio."""

    reference_seconds: float
    seconds: float
    ratio: float
    interval: tuple[float, float]


def compare_times(reference: Work, ours: Work, rounds: int = 15, warm_up: int = 2, resamples: int = 2000) -> Timing:
    """Time `ours` against `reference`, taking turns, after `warm_up` unmeasured rounds."""
    sides = (reference, ours)
    times = np.empty((rounds, 2))
    for turn in range(-warm_up, rounds):
        for side, work in enumerate(sides):
            start = time.process_time()
            work()
            if turn >= 0:
                times[turn, side] = time.process_time() - start
    drawn = times[np.random.default_rng(0).integers(rounds, size=(resamples, rounds))]
    medians = np.median(drawn, axis=1)
    low, high = np.quantile(medians[:, 1] / medians[:, 0], [0.025, 0.975])
    first, second = (float(np.median(times[:, side])) for side in (0, 1))
    return Timing(first, second, second / first, (float(low), float(high)))


def print_peak(prepare: Callable[[float], Work], tiny: float = 0.02) -> None:
    """What a fresh process runs: print the mebibytes that the resident set grows by while the work is done once.

    Args:
        prepare: makes the inputs, their length scaled by its argument, and returns the work. It is first called with
            `tiny` and that work done, so that one-off allocations of the libraries do not count.
    """
    prepare(tiny)()
    work = prepare(1.0)
    before, ballast = _peak(), []
    while _peak() == before:
        # The system tells the highest resident set only: fill up to it, so that all growth shows.
        ballast.append(np.ones(2**15))
    before = _peak()
    work()
    print((_peak() - before) / 2**20)


def _peak() -> int:
    """Highest resident set of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory(script: Path, *arguments: str) -> float:
    """Run ``script arguments`` in a fresh process; it must call `print_peak`. Returns mebibytes."""
    command = [sys.executable, str(script), *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def write(name: str, rows: list[Comparison]) -> Path:
    """Write ``results/<name>.json`` and print the rows as a table."""
    machine = {"processor": _processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine | {"python": platform.python_version()},
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    for row in rows:
        low, high = row.time_interval
        line = f"{row.name} / {row.reference}: time {row.time_ratio:.3f} [{low:.3f}, {high:.3f}] (bar {row.time_bar})"
        if row.memory_ratio is not None:
            line += f", memory {row.memory_ratio:.3f} (bar {row.memory_bar})"
        print(f"{line}; {row.reference_seconds * 1e3:.1f} → {row.seconds * 1e3:.1f} ms")
    return path


def _processor() -> str:
    """The processor's name where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
