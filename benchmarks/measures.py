"""`Atoms.mean` against attention, and `Atoms.fisher_vp` against the mean and against the matrix of weights.

    python benchmarks/measures.py

float32, one thread, batch 1, 8 heads of size 64, as many queries as keys. About four minutes.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import harness
from massieu import ops
from massieu.measures import Atoms

HEADS, SIZE = 8, 64
LENGTHS = {512: 41, 2048: 15, 4096: 7}
"""Queries and keys, and rounds of timing."""


@dataclass(frozen=True)
class Row(harness.Comparison):
    """A comparison, and how memory grows: peak ∝ length^exponent, fitted over `LENGTHS`."""

    reference_memory_exponent: float | None = None
    memory_exponent: float | None = None


def _inputs(length: float) -> tuple[Atoms, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, vector = (torch.randn(1, HEADS, int(length), SIZE) for _ in range(3))
    return Atoms.create(key), query / SIZE**0.5, vector


def _attention(length: float) -> harness.Work:
    atoms, eta, _ = _inputs(length)
    return lambda: ops.attention(eta, atoms.points, atoms.points, scale=1.0)


def _mean(length: float) -> harness.Work:
    atoms, eta, _ = _inputs(length)
    return lambda: atoms.mean(eta)


def _fisher_vp(length: float) -> harness.Work:
    atoms, eta, vector = _inputs(length)
    return lambda: atoms.fisher_vp(eta, vector)


def _weight_matrix(length: float) -> harness.Work:
    atoms, eta, vector = _inputs(length)
    key = atoms.points

    def product() -> Tensor:
        weights = torch.softmax(eta @ key.mT, -1)
        change = vector @ key.mT
        return (weights * (change - (weights * change).sum(-1, keepdim=True))) @ key

    return product


SIDES: dict[str, Callable[[float], harness.Work]] = {
    "ops.attention": _attention,
    "Atoms.mean": _mean,
    "Atoms.fisher_vp": _fisher_vp,
    "the matrix of weights": _weight_matrix,
}
# ours, reference: bar of time, bar of memory
PAIRS = {
    ("Atoms.mean", "ops.attention"): (1.1, 1.1),
    ("Atoms.fisher_vp", "Atoms.mean"): (4.0, None),
    ("Atoms.fisher_vp", "the matrix of weights"): (1.1, 1.0),
}


def _exponent(peaks: list[float]) -> float:
    return float(np.polyfit(np.log(list(LENGTHS)), np.log(peaks), 1)[0])


def _rows() -> list[harness.Comparison]:
    peaks = {
        side: [harness.peak_memory(Path(__file__), "--memory", side, str(length)) for length in LENGTHS]
        for side in SIDES
    }
    exponents = {side: _exponent(found) for side, found in peaks.items()}
    for side, found in peaks.items():
        print(f"{side}: {', '.join(f'{peak:.1f}' for peak in found)} MiB, exponent {exponents[side]:.2f}")
    rows: list[harness.Comparison] = []
    for (ours, reference), (time_bar, memory_bar) in PAIRS.items():
        for place, (length, rounds) in enumerate(LENGTHS.items()):
            works = (torch.no_grad()(SIDES[side](length)) for side in (reference, ours))
            timing = harness.compare_times(*works, rounds=rounds)
            before, after = peaks[reference][place], peaks[ours][place]
            times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, time_bar)
            memory = (before, after, after / before, memory_bar, exponents[reference], exponents[ours])
            rows.append(Row(f"{ours}, L = {length}", reference, *times, *memory))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "LENGTH"), help="print one side's peak memory, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        side, length = arguments.memory
        with torch.no_grad():
            harness.print_peak(lambda share: SIDES[side](share * int(length)))
        return
    print(harness.write("measures", _rows()))


if __name__ == "__main__":
    main()
