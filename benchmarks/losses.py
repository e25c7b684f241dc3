"""Losses that keep no matrix of scores, against those that do.

    python benchmarks/losses.py

float32, one thread, forward and backward. About ten minutes and 8 GiB, most of both for the matrices.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import harness
from massieu.ops.contrastive import info_nce
from massieu.ops.vocabulary import linear_cross_entropy

WORDS, WIDTH, SIZE, TEMPERATURE = 50257, 768, 256, 0.07
ROWS = 4096
"""Rows of the score matrix that are kept at a time where all of it would not fit."""
Sides = tuple[harness.Work, harness.Work]


def _gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> harness.Work:
    return lambda: torch.autograd.grad(loss(*inputs), inputs)


def _vocabulary(label_smoothing: float = 0.0, ignored: float = 0.0) -> Callable[[float], Sides]:
    def prepare(tokens: float) -> Sides:
        torch.manual_seed(0)
        hidden = torch.randn(int(tokens), WIDTH, requires_grad=True)
        weight = (torch.randn(WORDS, WIDTH) / WIDTH**0.5).requires_grad_()
        target = torch.randint(WORDS, (int(tokens),))
        target[: int(ignored * len(target))] = -100

        def logits(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.cross_entropy(hidden @ weight.mT, target, label_smoothing=label_smoothing)

        def ours(hidden: Tensor, weight: Tensor) -> Tensor:
            found = linear_cross_entropy(hidden, weight, target, label_smoothing=label_smoothing)
            assert isinstance(found, Tensor)
            return found

        return _gradients(logits, hidden, weight), _gradients(ours, hidden, weight)

    return prepare


def _pairs(symmetric: bool = False, in_rows: bool = False) -> Callable[[float], Sides]:
    def prepare(pairs: float) -> Sides:
        torch.manual_seed(0)
        query, key = (F.normalize(torch.randn(int(pairs), SIZE), dim=-1).requires_grad_() for _ in range(2))
        temperature = torch.tensor(TEMPERATURE, requires_grad=True)
        target = torch.arange(int(pairs))

        def matrix(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
            scores = query @ key.mT / temperature
            loss = F.cross_entropy(scores, target)
            return (loss + F.cross_entropy(scores.mT, target)) / 2 if symmetric else loss

        def part(query: Tensor, key: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(query @ key.mT / temperature, target, reduction="sum")

        def rows(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
            total = query.new_zeros(())
            for some, own in zip(query.split(ROWS), target.split(ROWS), strict=True):
                total = total + checkpoint(part, some, key, temperature, own, use_reentrant=False)
            return total / len(query)

        def ours(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
            found = info_nce(query, key, temperature=temperature, symmetric=symmetric)
            assert isinstance(found, Tensor)
            return found

        inputs = query, key, temperature
        return _gradients(rows if in_rows else matrix, *inputs), _gradients(ours, *inputs)

    return prepare


# name: (reference, tokens or pairs, bar of time, bar of memory, preparation, rounds)
LOGITS, MATRIX = "F.cross_entropy(h @ W.T, y)", "F.cross_entropy of the score matrix"
IN_ROWS = f"F.cross_entropy of {ROWS} rows of scores at a time, checkpointed"
CASES = {
    "linear cross-entropy, 2048 × 768 × 50257": (LOGITS, 2048, 1.35, 0.2, _vocabulary(), 9),
    "the same, label smoothing": (LOGITS, 2048, 1.35, 0.2, _vocabulary(label_smoothing=0.1), 5),
    "the same, half of the tokens ignored": (LOGITS, 2048, 1.35, 0.2, _vocabulary(ignored=0.5), 5),
    "InfoNCE, 8192 × 256": (MATRIX, 8192, 1.2, 0.05, _pairs(), 9),
    "InfoNCE, 16384 × 256": (MATRIX, 16384, 1.2, 0.05, _pairs(), 5),
    "InfoNCE, 32768 × 256": (IN_ROWS, 32768, 1.2, None, _pairs(in_rows=True), 5),
    "InfoNCE, symmetric, 8192 × 256": (MATRIX, 8192, 1.2, 0.05, _pairs(symmetric=True), 9),
}


def _compare(name: str) -> harness.Comparison:
    reference, size, time_bar, memory_bar, prepare, rounds = CASES[name]
    timing = harness.compare_times(*prepare(size), rounds=rounds, warm_up=1)
    times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, time_bar)
    before, after = (harness.peak_memory(Path(__file__), "--memory", name, side) for side in ("0", "1"))
    return harness.Comparison(name, reference, *times, before, after, after / before, memory_bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "SIDE"), help="print one side's peak memory, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        name, side = arguments.memory
        _, size, _, _, prepare, _ = CASES[name]
        harness.print_peak(lambda share: prepare(share * size)[int(side)])
        return
    print(harness.write("losses", [_compare(name) for name in CASES]))


if __name__ == "__main__":
    main()
