"""Packed rows: several documents in one row, beside one call a document and beside the documents padded to one length.

    python benchmarks/packed.py

float32, one thread, 8 heads of size 64, causal, forward and backward with cotangents of the output and of log Z. About five
minutes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import cases
from cases import Case, Sides
from massieu import ops

HEADS, SIZE = 8, 64
MANY, EQUAL = [16] * 512, [128] * 64
MIXED = [int(length) for length in np.clip(np.exp(np.random.default_rng(0).normal(5.0, 1.0, 60)), 4, 2048)]
"""Of sixty documents, log-normal: 150 tokens in the middle."""


def _inputs(total: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, total, SIZE, requires_grad=True) for _ in range(3)]
    return inputs, (torch.randn(1, HEADS, total, SIZE), torch.randn(1, HEADS, total))


def _each(lengths: Sequence[int]) -> Callable[[float], Sides]:
    """Beside one call a document."""

    def prepare(share: float) -> Sides:
        own = lengths[: max(1, round(share * len(lengths)))]
        inputs, cotangents = _inputs(sum(own))
        documents = ops.Documents.of_lengths(own)

        def each() -> object:
            parts = zip(*(tensor.split(own, 2) for tensor in inputs), strict=True)
            results = [ops.attention(*part, is_causal=True) for part in parts]
            joined = tuple(torch.cat(found, 2) for found in zip(*results, strict=True))
            return torch.autograd.grad(joined, inputs, cotangents)

        def ours() -> object:
            results = tuple(ops.attention(*inputs, is_causal=True, documents=documents))
            return torch.autograd.grad(results, inputs, cotangents)

        return each, ours

    return prepare


def _padded(lengths: Sequence[int]) -> Callable[[float], Sides]:
    """Beside a batch in which every document is as long as the longest."""

    def prepare(share: float) -> Sides:
        own = lengths[: max(1, round(share * len(lengths)))]
        _, ours = _each(lengths)(share)
        torch.manual_seed(0)
        shape = len(own), HEADS, max(own), SIZE
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        cotangents = torch.randn(shape), torch.randn(shape[:-1])

        def padded() -> object:
            return torch.autograd.grad(tuple(ops.attention(*inputs, is_causal=True)), inputs, cotangents)

        return padded, ours

    return prepare


EACH, PADDED = "one call a document", "a batch as long as the longest"
CASES = {
    "512 documents of 16": Case(EACH, 1.0, _each(MANY), 1.2, rounds=9),
    "64 documents of 128": Case(EACH, 1.0, _each(EQUAL), 1.2, rounds=9),
    "60 documents of uneven lengths": Case(EACH, 1.0, _each(MIXED), 1.05, rounds=41),
    "60 documents of uneven lengths, padded": Case(PADDED, 1.0, _padded(MIXED), 0.5, 0.5, rounds=3),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES)
