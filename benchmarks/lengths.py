"""How time and memory grow with the length of a sequence: L = 512, 1,024, … 16,384 queries and keys.

    python benchmarks/lengths.py

float32, one thread, two heads of size 64. Each work beside fused attention and, up to 8,192, beside the matrix of scores
(at 16,384 it would take some 8 GiB); exponents are fitted. About five minutes and 3 GiB.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fit
import harness
from massieu import ops
from massieu.ops.moments import MomentsBackend

HEADS, SIZE, WINDOW = 2, 64, 256
ROUNDS = {512: 21, 1024: 15, 2048: 9, 4096: 5, 8192: 3, 16384: 3}
"""Lengths, and rounds of timing."""
MATRIX_LENGTHS = tuple(length for length in ROUNDS if length <= 8192)
PEAK_LENGTHS = tuple(length for length in ROUNDS if length >= 2048)
"""Where peaks are taken: below, two heads need less than what the system counts by chance."""
Side = Callable[[int], harness.Work]
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3)]


def _forward(function: Function) -> Side:
    def prepare(length: int) -> harness.Work:
        inputs = _inputs(length)
        return torch.no_grad()(lambda: function(*inputs))

    return prepare


def _forward_backward(function: Function) -> Side:
    """With random cotangents on the output and, where there is one, on log Z."""

    def prepare(length: int) -> harness.Work:
        inputs = _inputs(length)
        cotangents = torch.randn(1, HEADS, length, SIZE), torch.randn(1, HEADS, length)

        def work() -> object:
            found = function(*inputs)
            wanted = [cotangents[4 - result.dim()] for result in found]
            return torch.autograd.grad(found, inputs, wanted, allow_unused=True)

        return work

    return prepare


def _fused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return (F.scaled_dot_product_attention(query, key, value),)


def _matrix(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    scores = query @ key.mT * SIZE**-0.5
    log_z = torch.logsumexp(scores, -1)
    return torch.exp(scores - log_z.unsqueeze(-1)) @ value, log_z


def _log_partition(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return (ops.log_partition(query, key),)


def _matrix_log_partition(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return (torch.logsumexp(query @ key.mT * SIZE**-0.5, -1),)


def _moments(backend: MomentsBackend) -> Function:
    def summary(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        output, *moments = ops.attention_moments(query, key, value, backend=backend)
        assert output is not None
        return output, *moments

    return summary


def _matrix_moments(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    scores = query @ key.mT * SIZE**-0.5
    log_p = torch.log_softmax(scores, -1)
    p = log_p.exp()
    mean = (p * scores).sum(-1)
    variance = (p * scores.square()).sum(-1) - mean.square()
    summary = (-(p * log_p).sum(-1), mean, variance, p.amax(-1), p.square().sum(-1))
    return p @ value, torch.logsumexp(scores, -1), *summary


def _window(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return ops.attention(query, key, value, is_causal=True, window=WINDOW)


def _masked(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    place = torch.arange(query.shape[2])
    behind = place.unsqueeze(1) - place
    return (F.scaled_dot_product_attention(query, key, value, attn_mask=(behind >= 0) & (behind <= WINDOW)),)


FUSED, BACKWARD = "fused attention, forward", "fused attention, forward and backward"
SIDES: dict[str, Side] = {
    FUSED: _forward(_fused),
    "score matrix, output and log Z, forward": _forward(_matrix),
    "attention and log Z, forward": _forward(ops.attention),
    "score matrix, six statistics and output": _forward(_matrix_moments),
    "moments and output, blocks": _forward(_moments("blocks")),
    BACKWARD: _forward_backward(_fused),
    "score matrix, output and log Z, forward and backward": _forward_backward(_matrix),
    "attention and log Z, forward and backward": _forward_backward(ops.attention),
    "logsumexp of the score matrix, forward and backward": _forward_backward(_matrix_log_partition),
    "log Z alone, forward and backward": _forward_backward(_log_partition),
    "fused attention with the window as a mask, forward and backward": _forward_backward(_masked),
    f"attention and log Z, causal window of {WINDOW}, forward and backward": _forward_backward(_window),
}
PAIRS = {
    "attention and log Z, forward": (FUSED, "score matrix, output and log Z, forward"),
    "moments and output, blocks": (FUSED, "score matrix, six statistics and output"),
    "attention and log Z, forward and backward": (BACKWARD, "score matrix, output and log Z, forward and backward"),
    "log Z alone, forward and backward": (BACKWARD, "logsumexp of the score matrix, forward and backward"),
    f"attention and log Z, causal window of {WINDOW}, forward and backward": (
        "fused attention with the window as a mask, forward and backward",
        BACKWARD,
    ),
}
"""What each of ours is set beside."""


def _is_matrix(side: str) -> bool:
    return "matrix" in side


def _sides(length: int) -> list[str]:
    return [side for side in SIDES if length in MATRIX_LENGTHS or not _is_matrix(side)]


def _peaks(side: str) -> dict[int, float]:
    """Mebibytes by length, each of a fresh process."""
    lengths = [length for length in PEAK_LENGTHS if length in MATRIX_LENGTHS or not _is_matrix(side)]
    return {length: harness.peak_memory(Path(__file__), "--fresh", side, str(length)) for length in lengths}


def _ratio(times: dict[int, np.ndarray], ours: str, reference: str) -> dict[str, object]:
    """Paired ratios of one side to another, at each length where both were measured."""
    ratios, intervals, lengths = [], [], []
    for length, numbers in times.items():
        names = _sides(length)
        if reference in names:
            timing = harness.paired(numbers[:, [names.index(reference), names.index(ours)]])
            lengths.append(length)
            ratios.append(timing.ratio)
            intervals.append(timing.interval)
    return {"name": ours, "reference": reference, "lengths": lengths, "ratios": ratios, "intervals": intervals}


def _curve(times: dict[int, np.ndarray], side: str, peaks: dict[int, float]) -> dict[str, object]:
    lengths = [length for length in times if side in _sides(length)]
    seconds = [float(np.median(times[length][:, _sides(length).index(side)])) for length in lengths]
    memory = asdict(fit.power(list(peaks), list(peaks.values())))
    return {"name": side, "seconds": asdict(fit.power(lengths, seconds)), "mebibytes": memory}


def _measure(rounds: dict[int, int]) -> tuple[dict[int, np.ndarray], dict[str, dict[int, float]]]:
    peaks = {side: _peaks(side) for side in harness.steps(SIDES)}
    labels = {f"times of all, L = {length}": length for length in rounds}
    times = {}
    for label in harness.steps(labels):
        length = labels[label]
        works = [SIDES[side](length) for side in _sides(length)]
        times[length] = harness.take_turns(works, rounds[length], warm_up=1 if length <= 4096 else 0)
    return times, peaks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", nargs=2, metavar=("SIDE", "LENGTH"), help="one side once: seconds and peak in MiB")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.fresh:
        side, length = options.fresh
        harness.print_peak(lambda share: SIDES[side](int(share * int(length))))
        return
    times, peaks = _measure(ROUNDS)
    path = harness.save(
        "lengths",
        heads=HEADS,
        size=SIZE,
        window=WINDOW,
        curves=[_curve(times, side, peaks.get(side, {})) for side in SIDES],
        ratios=[_ratio(times, ours, reference) for ours, references in PAIRS.items() for reference in references],
    )
    print(path)


if __name__ == "__main__":
    main()
