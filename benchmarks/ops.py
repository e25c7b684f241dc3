"""Attention with log Z, log Z alone and the moments, against PyTorch's fused attention and the score matrix.

    python benchmarks/ops.py

float32, one thread, batch 1, 8 heads of size 64. About three minutes, most of it for one compilation.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from massieu import ops

HEADS, SIZE = 8, 64


def _inputs(length: float, number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, int(length), SIZE, requires_grad=True) for _ in range(number)]


def _without_gradient(work: harness.Work) -> harness.Work:
    return torch.no_grad()(work)


def _forward(length: float) -> tuple[harness.Work, harness.Work]:
    query, key, value = _inputs(length, 3)
    fused = lambda: F.scaled_dot_product_attention(query, key, value)  # noqa: E731
    return _without_gradient(fused), _without_gradient(lambda: ops.attention(query, key, value))


def _forward_backward(length: float) -> tuple[harness.Work, harness.Work]:
    inputs = _inputs(length, 3)
    grad_output, grad_log_partition = torch.randn_like(inputs[0]), torch.randn(1, HEADS, int(length))

    def fused() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, grad_output)

    def ours() -> object:
        return torch.autograd.grad(ops.attention(*inputs), inputs, (grad_output, grad_log_partition))

    return fused, ours


def _log_partition(length: float) -> tuple[harness.Work, harness.Work]:
    query, key = _inputs(length, 2)
    gradient = torch.randn(1, HEADS, int(length))

    def score_matrix() -> object:
        return torch.autograd.grad(torch.logsumexp(query @ key.mT, -1), (query, key), gradient)

    def ours() -> object:
        return torch.autograd.grad(ops.log_partition(query, key, scale=1.0), (query, key), gradient)

    return score_matrix, ours


def _moments(backend: str) -> Callable[[float], tuple[harness.Work, harness.Work]]:
    def prepare(length: float) -> tuple[harness.Work, harness.Work]:
        query, key, value = _inputs(length, 3)
        fused = lambda: F.scaled_dot_product_attention(query, key, value)  # noqa: E731
        ours = lambda: ops.attention_moments(query, key, value, backend=backend)  # noqa: E731
        return _without_gradient(fused), _without_gradient(ours)

    return prepare


# name: (reference, length, bar of time, bar of memory, preparation, rounds)
FUSED, FUSED_BACKWARD = "fused attention", "fused attention, forward and backward"
CASES = {
    "attention and log Z, forward": (FUSED, 2048, 1.05, 1.1, _forward, 21),
    "attention and log Z, forward and backward": (FUSED_BACKWARD, 2048, 1.1, 1.2, _forward_backward, 15),
    "log Z alone, L = 4096, forward and backward": ("logsumexp(q @ k.mT)", 4096, 0.4, 0.1, _log_partition, 5),
    "moments and output, L = 512, compiled": (FUSED, 512, 1.7, None, _moments("compiled"), 41),
    "moments and output, L = 2048, compiled": (FUSED, 2048, 1.7, None, _moments("compiled"), 15),
    "moments and output, L = 512, blocks": (FUSED, 512, 1.7, None, _moments("blocks"), 41),
    "moments and output, L = 2048, blocks": (FUSED, 2048, 1.7, None, _moments("blocks"), 15),
}


def _compare(name: str) -> harness.Comparison:
    reference, length, time_bar, memory_bar, prepare, rounds = CASES[name]
    timing = harness.compare_times(*prepare(length), rounds=rounds)
    times = (timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, time_bar)
    if memory_bar is None:
        return harness.Comparison(name, reference, *times)
    before, after = (harness.peak_memory(Path(__file__), "--memory", name, side) for side in ("0", "1"))
    return harness.Comparison(name, reference, *times, before, after, after / before, memory_bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "SIDE"), help="print one side's peak memory, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        name, side = arguments.memory
        _, length, _, _, prepare, _ = CASES[name]
        harness.print_peak(lambda share: prepare(share * length)[int(side)])
        return
    print(harness.write("ops", [_compare(name) for name in CASES]))


if __name__ == "__main__":
    main()
