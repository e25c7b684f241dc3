"""Hopfield layers against the way of hopfield-layers, which holds every pass's weights.

    python benchmarks/hopfield.py

float32, one thread, batch 1, 4096 patterns of 512 numbers, 8 heads of size 64. About ten minutes and 10 GiB of memory.
hopfield-layers is no package that can be installed, so `_dense` does what it computes in a forward pass: the weights of
all pairs in each pass, of the heads that are still active, and their change since the last pass.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from massieu.nn import Hopfield, HopfieldPooling

SIZE, HEADS, LENGTH = 512, 8, 4096
THRESHOLD = 1e-12


def _dense(query: Tensor, key: Tensor, value: Tensor, passes: int) -> Tensor:
    """(heads, L, D), (heads, N, D) and (heads, N, E) to (heads, L, E), by matrices of weights."""
    scale = query.shape[-1] ** -0.5
    active = torch.ones(len(query), 1, 1, dtype=torch.bool)
    weights = torch.softmax(query * scale @ key.mT, -1)
    for _ in range(passes - 1):
        chosen = weights.masked_select(active).view(-1, *weights.shape[1:])
        query = query.masked_scatter(active, chosen @ key.masked_select(active).view(-1, *key.shape[1:]))
        scores = (query * scale @ key.mT).masked_select(active).view(-1, *weights.shape[1:])
        before, weights = weights, weights.masked_scatter(active, torch.softmax(scores, -1))
        with torch.no_grad():
            active = active & ((before - weights).norm(dim=(1, 2)) > THRESHOLD)[:, None, None]
    return F.dropout(weights, 0.0) @ value


def _steps(passes: int, length: int) -> tuple[harness.Work, harness.Work]:
    torch.manual_seed(0)
    layer = Hopfield(SIZE, HEADS, steps=passes)
    patterns = torch.randn(1, length, SIZE, requires_grad=True)
    inputs = [patterns, *layer.parameters()]

    def dense() -> object:
        parts = (layer.query(patterns), layer._keys(patterns), layer._values(patterns))
        found = _dense(*(part.flatten(0, 1) for part in parts), passes)
        return torch.autograd.grad(layer.output(found.transpose(0, 1).flatten(1)).sum(), inputs)

    def ours() -> object:
        return torch.autograd.grad(layer(patterns).sum(), inputs)

    return dense, ours


def _pooling(passes: int, length: int) -> tuple[harness.Work, harness.Work]:
    torch.manual_seed(0)
    pooling = HopfieldPooling(SIZE, HEADS, quantity=16, steps=passes)
    layer, patterns = pooling.hopfield, torch.randn(8, length, SIZE)
    inputs = list(pooling.parameters())

    def dense() -> object:
        query = layer.query(pooling.states).expand(len(patterns), -1, -1, -1)
        parts = (query, layer._keys(patterns), layer._values(patterns))
        found = _dense(*(part.flatten(0, 1) for part in parts), passes).unflatten(0, (-1, HEADS))
        return torch.autograd.grad(layer.output(found.transpose(1, 2).flatten(2)).sum(), inputs)

    def ours() -> object:
        return torch.autograd.grad(pooling(patterns).sum(), inputs)

    return dense, ours


# name: (passes, length, bar of time, bar of memory, preparation, rounds)
CASES = {
    "Hopfield, 1 pass, L = 4096, forward and backward": (1, LENGTH, 0.5, 0.1, _steps, 3),
    "Hopfield, 4 passes, L = 4096, forward and backward": (4, LENGTH, 0.1, 0.03, _steps, 3),
    "HopfieldPooling, 16 states, 4 passes, 8 × 4096 patterns": (4, LENGTH, 1.1, 1.1, _pooling, 3),
}


def _compare(name: str) -> harness.Comparison:
    passes, length, time_bar, memory_bar, prepare, rounds = CASES[name]
    timing = harness.compare_times(*prepare(passes, length), rounds=rounds, warm_up=1)
    before, after = (harness.peak_memory(Path(__file__), "--memory", name, side) for side in ("0", "1"))
    times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, time_bar)
    return harness.Comparison(name, "all weights held", *times, before, after, after / before, memory_bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "SIDE"), help="print one side's peak memory, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        name, side = arguments.memory
        passes, length, _, _, prepare, _ = CASES[name]
        harness.print_peak(lambda share: prepare(passes, int(share * length))[int(side)])
        return
    print(harness.write("hopfield", [_compare(name) for name in CASES]))


if __name__ == "__main__":
    main()
