"""A benchmark as a table of cases: each is measured against its reference, in time and in memory.

`main` is the whole program of `benchmarks/ops.py` and `benchmarks/losses.py`.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import harness

Sides = tuple[harness.Work, harness.Work]
"""The reference's work and ours."""


@dataclass(frozen=True)
class Case:
    """What is compared, at which size, how often, and the bars."""

    reference: str
    size: float
    prepare: Callable[[float], Sides]
    """Makes both works for a size."""
    time_bar: float | None = None
    memory_bar: float | None = None
    rounds: int = 15
    fresh: bool = False
    """Take time and memory together, each run in a process of its own: for works of a second and more."""
    memory_rounds: int = 3
    """Peaks of each side where they are taken apart from times; 0 where memory says nothing."""
    count: harness.Count | None = None
    why: str | None = None


def _measure(script: Path, name: str, case: Case, rates: dict[str, float]) -> harness.Comparison:
    def run_fresh(rounds: int) -> np.ndarray:
        """Seconds and mebibytes, shape (rounds, sides, 2)."""
        return np.array([[harness.run_fresh(script, "--fresh", name, side) for side in "01"] for _ in range(rounds)])

    if case.fresh:
        found = run_fresh(case.rounds)
        timing, peaks = harness.paired(found[..., 0]), found[..., 1]
    else:
        timing = harness.compare_times(*case.prepare(case.size), rounds=case.rounds)
        peaks = run_fresh(case.memory_rounds)[..., 1] if case.memory_rounds else None
    times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, case.time_bar)
    counted = None if case.count is None else case.count.seconds(rates)
    if peaks is None:
        return harness.Comparison(
            name, case.reference, *times, counted_seconds=counted, rounds=case.rounds, why=case.why
        )
    memory = harness.paired(peaks)
    return harness.Comparison(
        name,
        case.reference,
        *times,
        *(memory.reference_seconds, memory.seconds, memory.ratio, case.memory_bar),
        memory_interval=memory.interval,
        counted_seconds=counted,
        rounds=case.rounds,
        why=case.why,
    )


def main(script: Path, description: str | None, cases: dict[str, Case], **more: Callable[[], object]) -> None:
    """Measure all cases and write them, with what the functions in `more` return, to ``results/<script's name>.json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", nargs=2, metavar=("CASE", "SIDE"), help="one side once: seconds and peak in MiB")
    parser.add_argument("--size", type=float, help="with --fresh: of this size instead of the case's own")
    parser.add_argument("--only", metavar="PART", help="print only cases with this in their name, and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.fresh:
        name, side = arguments.fresh
        size = cases[name].size if arguments.size is None else arguments.size
        harness.print_peak(lambda share: cases[name].prepare(share * size)[int(side)])
        return
    rates = harness.rates()
    chosen = [name for name in cases if arguments.only is None or arguments.only in name]
    rows = [_measure(script, name, cases[name], rates) for name in harness.steps(chosen)]
    if arguments.only is not None:
        for row in rows:
            print(row, row.met)
        return
    print(harness.write(script.stem, rows, rates=rates, **{key: found() for key, found in more.items()}))
