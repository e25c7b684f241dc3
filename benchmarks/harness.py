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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"
_STARTED = time.perf_counter()
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
    """95 % bootstrap interval of the ratio, over rounds."""
    time_bar: float | None
    reference_mebibytes: float | None = None
    mebibytes: float | None = None
    memory_ratio: float | None = None
    memory_bar: float | None = None
    memory_interval: tuple[float, float] | None = field(default=None, kw_only=True)
    """The same of the ratio of peaks, where more than one was taken."""
    counted_seconds: float | None = field(default=None, kw_only=True)
    """Operations and bytes that our side cannot do without, one after the other at the rates of this run."""
    rounds: int | None = field(default=None, kw_only=True)
    """How often each side was timed."""
    why: str | None = field(default=None, kw_only=True)
    """What stands between the row and its bar, or what the reference cannot do."""

    @property
    def met(self) -> bool | None:
        """Whether the upper ends of both intervals are under their bars; None where there is no bar."""
        memory = self.memory_ratio if self.memory_interval is None else self.memory_interval[1]
        found = [
            upper <= bar
            for upper, bar in ((self.time_interval[1], self.time_bar), (memory, self.memory_bar))
            if bar is not None and upper is not None
        ]
        return all(found) if found else None


@dataclass(frozen=True)
class Timing:
    """Median times of two sides that took turns, and their ratio."""

    reference_seconds: float
    seconds: float
    ratio: float
    interval: tuple[float, float]


def compare_times(reference: Work, ours: Work, rounds: int = 15, warm_up: int = 2) -> Timing:
    """Time `ours` against `reference`, taking turns, after `warm_up` unmeasured rounds."""
    return paired(take_turns((reference, ours), rounds, warm_up))


def take_turns(sides: Iterable[Work], rounds: int, warm_up: int = 2) -> np.ndarray:
    """Seconds of each side in each of the rounds, shape (rounds, sides), after `warm_up` unmeasured rounds."""
    works = list(sides)
    times = np.empty((rounds, len(works)))
    for turn in range(-warm_up, rounds):
        for side, work in enumerate(works):
            start = time.process_time()
            work()
            if turn >= 0:
                times[turn, side] = time.process_time() - start
    return times


def paired(numbers: np.ndarray) -> Timing:
    """Medians of two columns (reference, ours), the median of the rounds' ratios, and its interval by resampling rounds.

    The two sides of a round follow each other, so a machine that is slow for a while changes its ratio little.
    """
    rounds = len(numbers)
    ratios = numbers[:, 1] / numbers[:, 0]
    drawn = ratios[np.random.default_rng(0).integers(rounds, size=(2000, rounds))]
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    first, second = (float(np.median(numbers[:, side])) for side in (0, 1))
    return Timing(first, second, float(np.median(ratios)), (float(low), float(high)))


# --- memory ----------------------------------------------------------------------------------------------------------


def print_peak(prepare: Callable[[float], Work]) -> None:
    """What a fresh process runs: do the work once; print its seconds and the mebibytes that the resident set grows by.

    Args:
        prepare: makes the inputs, their length scaled by its argument, and returns the work. It is first called with
            0.02 and that work done, so that one-off allocations of the libraries do not count.
    """
    prepare(0.02)()
    work = prepare(1.0)
    before, ballast = peak(), []
    while peak() == before:
        # The system tells the highest resident set only: fill up to it, so that all growth shows.
        ballast.append(np.ones(2**15))
    before = peak()
    start = time.process_time()
    work()
    print(time.process_time() - start, (peak() - before) / 2**20)


def peak() -> int:
    """Highest resident set of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def allocated(work: Work) -> float:
    """The most mebibytes that PyTorch has allocated at a time while the work was done, beyond those before it.

    The resident set is no measure of it: what the allocator keeps of freed tensors differs by half from run to run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return float(sizes.max()) / 2**20


def run_fresh(script: Path, *arguments: str) -> tuple[float, float]:
    """Run ``script arguments`` in a fresh process; it must call `print_peak`. Returns seconds and mebibytes."""
    command = [sys.executable, str(script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        what = " (out of memory?)" if run.returncode == -9 else ""
        raise RuntimeError(f"{' '.join(command)} ended with status {run.returncode}{what}\n{run.stderr}")
    seconds, mebibytes = run.stdout.split()[-2:]
    return float(seconds), float(mebibytes)


def peak_memory(script: Path, *arguments: str) -> float:
    """Mebibytes that one run in a fresh process takes; see `run_fresh`."""
    return run_fresh(script, *arguments)[1]


# --- the machine's rates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """What a piece of work cannot do without."""

    flops: float = 0.0
    exponentials: float = 0.0
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0

    def __mul__(self, times: float) -> "Count":
        return Count(*(times * amount for amount in asdict(self).values()))

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def seconds(self, rates: dict[str, float]) -> float:
        """One after the other at the given rates."""
        return sum(amount / rates[name] for name, amount in asdict(self).items())


def rate(amount: float, work: Work, rounds: int = 7) -> float:
    """Amount a second of this thread, the median."""
    return amount / float(np.median(take_turns([work], rounds, warm_up=1)))


def rates() -> dict[str, float]:
    """Ceilings of one thread: products, exponentials, bytes read from memory and from a second-level cache."""
    memory = torch.ones(1 << 28)
    matrix = torch.randn(2048, 2048)
    cached = torch.randn(3 << 16)
    return {
        "flops": rate(2 * 2048**3, lambda: matrix @ matrix),
        "exponentials": rate(cached.numel(), cached.exp, 101),
        "memory_bytes": rate(4 * memory.numel(), memory.sum),
        "cache_bytes": rate(4 * cached.numel(), cached.sum, 101),
    }


# --- results ---------------------------------------------------------------------------------------------------------


def steps(names: Iterable[str]) -> Iterator[str]:
    """The names one by one, saying on the terminal which one is worked on, and how long all took so far."""
    listed, start = list(names), time.perf_counter()
    for place, name in enumerate(listed, 1):
        minutes, seconds = divmod(int(time.perf_counter() - start), 60)
        print(f"[{place}/{len(listed)}, {minutes}:{seconds:02}] {name}", flush=True)
        yield name


def write(name: str, rows: Sequence[Comparison], **more: object) -> Path:
    """Write ``results/<name>.json`` and print the rows as a table."""
    path = save(name, rows=[asdict(row) | {"met": row.met} for row in rows], **more)
    for row in rows:
        low, high = row.time_interval
        line = f"{row.name} / {row.reference}: time {row.time_ratio:.3f} [{low:.3f}, {high:.3f}] (bar {row.time_bar})"
        if row.memory_ratio is not None:
            line += f", memory {row.memory_ratio:.3f} (bar {row.memory_bar})"
        print(f"{line}; {row.reference_seconds * 1e3:.1f} → {row.seconds * 1e3:.1f} ms; met: {row.met}")
    return path


def save(name: str, **content: object) -> Path:
    """Write ``results/<name>.json``: date, machine, how long this process took until now, and the content given."""
    machine = {"processor": _processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    whole = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/{name}.py",
        "machine": machine | {"python": platform.python_version()},
        "minutes": round((time.perf_counter() - _STARTED) / 60, 1),
        **content,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def _processor() -> str:
    """The processor's name where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
