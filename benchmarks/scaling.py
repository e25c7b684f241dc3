"""What a thousand million keys would cost: this machine's ceilings, and streaming over stores that still fit.

    python benchmarks/scaling.py

One thread, float32, one head of size 64 with values of size 64. About three minutes and 3 GB of disk.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import harness
from massieu import ops
from massieu.ops import streaming
from massieu.ops.attention import AttentionResult
from massieu.ops.store import AtomBlock, AtomStore

SIZE = 64
KEYS = {400_000: 9, 800_000: 7, 1_600_000: 5, 3_200_000: 3}
"""Keys, and rounds of timing; the fewest fill 200 MB, beyond the caches that one thread has to itself."""
QUERIES = (1, 64)
SHARD = 100_000
BAR = 1.5


@dataclass(frozen=True)
class Row(harness.Comparison):
    """Streaming beside attention over the same keys in memory, and beside what the ceilings predict."""

    keys: int = 0
    queries: int = 0
    backward: bool = False
    predicted_seconds: float = 0.0
    """Bytes, products and exponentials at their measured rates, one after the other."""
    exponent: float | None = None
    """Of seconds in the number of keys, fitted over all of them."""


# --- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(folder: Path) -> dict[str, float]:
    """Rates of one thread, and that of reading mapped files in the page cache."""
    store = _store(folder, max(KEYS))

    def read() -> None:
        for block in store.blocks():
            for part in block:
                if part is not None:
                    part.sum()

    return harness.rates() | {"mapped_bytes": harness.rate(max(KEYS) * 2 * SIZE * 4, read)}


def predicted(keys: int, queries: int, backward: bool, rates: dict[str, float]) -> float:
    """Seconds of one pass forwards, scores and mean, and one more backwards: scores, values' part and the gradient."""
    passes, products, exponentials = (2, 5, 2) if backward else (1, 2, 1)
    moved = passes * keys * 2 * SIZE * 4 / rates["mapped_bytes"]
    multiplied = products * 2 * keys * queries * SIZE / rates["flops"]
    return moved + multiplied + exponentials * keys * queries / rates["exponentials"]


# --- streaming -------------------------------------------------------------------------------------------------------


def _blocks(keys: int) -> Iterator[AtomBlock]:
    generator = torch.Generator().manual_seed(0)
    for first in range(0, keys, SHARD):
        shape = 1, min(SHARD, keys - first), SIZE
        yield AtomBlock(*(torch.randn(*shape, generator=generator) for _ in range(2)))


def _store(folder: Path, keys: int) -> AtomStore:
    path = folder / str(keys)
    return AtomStore.open(path) if path.exists() else AtomStore.write(path, _blocks(keys))


def _query(queries: int, backward: bool) -> torch.Tensor:
    return torch.randn(1, 1, queries, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_(backward)


def _finish(result: AttentionResult, backward: bool) -> None:
    if backward:
        (result.output.sum() + result.log_partition.sum()).backward()


def _streaming(folder: Path, keys: int, queries: int, backward: bool) -> harness.Work:
    store, query = _store(folder, keys), _query(queries, backward)
    return lambda: _finish(streaming.attention(query, store), backward)


def _in_memory(folder: Path, keys: int, queries: int, backward: bool) -> harness.Work:
    blocks, query = list(_store(folder, keys).blocks()), _query(queries, backward)
    key = torch.cat([block.points for block in blocks], 1).unsqueeze(0)
    value = torch.cat([block.values for block in blocks if block.values is not None], 1).unsqueeze(0)
    return lambda: _finish(ops.attention(query, key, value), backward)


def _peak(folder: Path, keys: int) -> float:
    """Mebibytes that streaming 64 queries forwards and backwards takes in a fresh process, mapped pages counted."""
    return harness.peak_memory(Path(__file__), "--memory", str(folder), str(keys))


def _rows(folder: Path, rates: dict[str, float]) -> list[harness.Comparison]:
    labels = {f"peak memory of {keys} keys": keys for keys in KEYS}
    peaks = {labels[label]: _peak(folder, labels[label]) for label in harness.steps(labels)}
    works = {
        f"{queries} queries, {'forward and backward' if backward else 'forward'}": (queries, backward)
        for queries in QUERIES
        for backward in (False, True)
    }
    rows: list[harness.Comparison] = []
    for work in harness.steps(works):
        queries, backward = works[work]
        timings = {
            keys: harness.compare_times(
                _in_memory(folder, keys, queries, backward),
                _streaming(folder, keys, queries, backward),
                rounds=rounds,
                warm_up=1,
            )
            for keys, rounds in KEYS.items()
        }
        seconds = [timing.seconds for timing in timings.values()]
        exponent = float(np.polyfit(np.log(list(KEYS)), np.log(seconds), 1)[0])
        for keys, timing in timings.items():
            name = f"{keys} keys, {work}"
            times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, BAR)
            row = Row(
                name,
                "keys in memory",
                *times,
                mebibytes=peaks[keys] if backward and queries == QUERIES[-1] else None,
                keys=keys,
                queries=queries,
                backward=backward,
                predicted_seconds=predicted(keys, queries, backward, rates),
                exponent=exponent,
                rounds=KEYS[keys],
            )
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("FOLDER", "KEYS"), help="print the peak of one store, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        folder, keys = Path(arguments.memory[0]), int(arguments.memory[1])
        harness.print_peak(lambda share: _streaming(folder, keys if share == 1 else min(KEYS), QUERIES[-1], True))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = ceilings(folder)
        path = harness.write("scaling", _rows(folder, rates), ceilings=rates)
    content = json.loads(path.read_text())
    print(json.dumps(rates), path)
    for row in content["rows"]:
        print(row["name"], f"measured/predicted {row['seconds'] / row['predicted_seconds']:.2f}", row["exponent"])


if __name__ == "__main__":
    main()
