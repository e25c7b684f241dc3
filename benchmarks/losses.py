"""Losses that keep no matrix of scores, against those that do.

    python benchmarks/losses.py

float32, one thread, forward and backward, each run in a process of its own. About seven minutes and 8 GiB, most of both
for the matrices.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cases
import fit
import harness
from cases import Case, Sides
from massieu.ops.contrastive import info_nce
from massieu.ops.vocabulary import linear_cross_entropy

WORDS, WIDTH, SIZE, TEMPERATURE = 50257, 768, 256, 0.07
ROWS = 4096
"""Rows of the score matrix that are kept at a time where all of it would not fit."""
MATRICES = (4096, 8192, 12288, 16384)
"""Pairs of which the whole score matrix is measured, to say what `TOO_MANY` would take."""
TOO_MANY = 32768


def _gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> harness.Work:
    return lambda: torch.autograd.grad(loss(*inputs), inputs)


def _vocabulary(
    label_smoothing: float = 0.0, ignored: float = 0.0, in_chunks: bool = False
) -> Callable[[float], Sides]:
    def prepare(tokens: float) -> Sides:
        torch.manual_seed(0)
        hidden = torch.randn(int(tokens), WIDTH, requires_grad=True)
        weight = (torch.randn(WORDS, WIDTH) / WIDTH**0.5).requires_grad_()
        target = torch.randint(WORDS, (int(tokens),))
        target[: int(ignored * len(target))] = -100

        def logits(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.cross_entropy(hidden @ weight.mT, target, label_smoothing=label_smoothing)

        def chunks(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())

        def ours(hidden: Tensor, weight: Tensor) -> Tensor:
            found = linear_cross_entropy(hidden, weight, target, label_smoothing=label_smoothing)
            assert isinstance(found, Tensor)
            return found

        return _gradients(chunks if in_chunks else logits, hidden, weight), _gradients(ours, hidden, weight)

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


def _count(rows: int, columns: int, width: int) -> harness.Count:
    """Scores multiplied out twice and both gradients, four products; an exponential of each score both times."""
    return harness.Count(flops=2 * 4 * rows * columns * width, exponentials=2 * rows * columns)


def _matrix_of_too_many() -> dict[str, object]:
    """Seconds and mebibytes of the score matrix at sizes where it fits, and what their fit says of `TOO_MANY` pairs."""
    names = {f"the score matrix of {pairs} pairs, to extrapolate": str(pairs) for pairs in MATRICES}
    found = []
    for name in harness.steps(names):
        runs = [harness.run_fresh(Path(__file__), "--size", names[name], "--fresh", PAIRS, "0") for _ in range(2)]
        found.append(np.median(runs, axis=0))
    seconds, mebibytes = np.array(found).T
    return {
        "pairs": TOO_MANY,
        "seconds": asdict(fit.power(MATRICES, seconds, at=TOO_MANY)),
        "mebibytes": asdict(fit.power(MATRICES, mebibytes, at=TOO_MANY)),
    }


def _vocabulary_case(rounds: int, **options: float) -> Case:
    used = round(2048 * (1 - options.get("ignored", 0.0)))
    count = _count(used, WORDS, WIDTH)
    prepare = _vocabulary(**options)
    return Case("F.cross_entropy(h @ W.T, y)", 2048, prepare, 1.35, 0.2, rounds, fresh=True, count=count)


def _pairs_case(pairs: int, rounds: int, symmetric: bool = False) -> Case:
    count, prepare = _count(pairs, pairs, SIZE), _pairs(symmetric)
    return Case("F.cross_entropy of the score matrix", pairs, prepare, 1.2, 0.05, rounds, fresh=True, count=count)


IN_CHUNKS = Case(
    "F.linear_cross_entropy in its own chunks",
    2048,
    _vocabulary(in_chunks=True),
    rounds=3,
    fresh=True,
    count=_count(2048, WORDS, WIDTH),
    why="the peer has first derivatives alone, and no log Z",
)
IN_ROWS = Case(
    f"F.cross_entropy of {ROWS} rows of scores at a time, checkpointed",
    TOO_MANY,
    _pairs(in_rows=True),
    time_bar=1.2,
    rounds=3,
    fresh=True,
    count=_count(TOO_MANY, TOO_MANY, SIZE),
)
PAIRS = "InfoNCE, 8192 × 256"
CASES = {
    "linear cross-entropy, 2048 × 768 × 50257": _vocabulary_case(rounds=5),
    "the same, label smoothing": _vocabulary_case(rounds=3, label_smoothing=0.1),
    "the same, half of the tokens ignored": _vocabulary_case(rounds=3, ignored=0.5),
    "the same, beside PyTorch's own": IN_CHUNKS,
    PAIRS: _pairs_case(8192, rounds=5),
    "InfoNCE, 16384 × 256": _pairs_case(16384, rounds=4),
    f"InfoNCE, {TOO_MANY} × 256": IN_ROWS,
    "InfoNCE, symmetric, 8192 × 256": _pairs_case(8192, rounds=5, symmetric=True),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES, matrix=_matrix_of_too_many)
