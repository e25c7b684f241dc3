"""The sums of moments over a tile's keys, by the compiled code: the counterpart of the tensor operations of `moment_blocks`."""

import ctypes
import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from massieu.ops.compiled.library import library

SUMS = ("top", "count", "mean", "spread", "total", "square", "first", "second")
"""The sums in the order in which the code writes them."""
# What a call asks for; the same numbers stand in row_sums.c.
EXPONENTIALS, SQUARES, WEIGHTS, MASKED, POSITION = 1, 2, 4, 8, 16
WITH_EXPONENTIALS = {"total", "square", "first", "second"}
WITH_SQUARES = {"spread", "square", "second"}
LEAST_ROWS = 32
"""Rows for which another thread is worth its start."""


@dataclass(frozen=True)
class RowSums:
    """The sums of some heads' queries."""

    numbers: Tensor
    """(8, heads, rows, 1), float32 and contiguous."""
    sums: dict[str, Tensor]
    """The same by name, each (heads, rows, 1)."""
    position: Tensor
    """The first key that has the largest score, (heads, rows, 1), int32; any number where that score is not a number."""

    @staticmethod
    def empty(shape: Sequence[int], like: Tensor) -> "RowSums":
        """Room for the sums of (heads, rows), not filled."""
        numbers = like.new_empty(len(SUMS), *shape, 1)
        position = numbers.new_empty(*shape, 1, dtype=torch.int32)
        return RowSums(numbers, dict(zip(SUMS, numbers.unbind(), strict=True)), position)

    def named(self, name: str) -> Tensor:
        """One of them, or the position."""
        return self.position if name == "position" else self.sums[name]

    def write(
        self,
        scores: Tensor,
        before: Tensor | None,
        head: int,
        ranges: Tensor | None,
        masked: bool,
        names: Set[str],
        weights: bool,
    ) -> None:
        """Write the sums over the keys of some heads.

        Args:
            scores: (h, rows, keys), float32 and contiguous.
            before: largest scores of the rows over keys before these, (h, rows, 1), contiguous; None where there are none.
            head: the first of the heads here.
            ranges: (queries, 2), int32 and contiguous: the first key that a query sees, and the one after the last. The rows
                of a head are these queries, once or several times. None where each sees all keys.
            masked: whether a score of −∞ is that of a hidden pair; else every pair in the range is visible.
            names: of the sums that are needed; others may not be written.
            weights: whether exp(score − top) takes the place of the scores.
        """
        what = EXPONENTIALS * (weights or not names.isdisjoint(WITH_EXPONENTIALS))
        what |= SQUARES * (not names.isdisjoint(WITH_SQUARES))
        what |= WEIGHTS * weights
        what |= MASKED * masked
        what |= POSITION * ("position" in names)
        heads, length, keys = scores.shape
        rows = heads * length
        stride = self.position.numel()
        skipped = 4 * head * length  # bytes of the heads before
        _function()(
            scores.data_ptr(),
            None if before is None else before.data_ptr(),
            None if ranges is None else ranges.data_ptr(),
            self.numbers.data_ptr() + skipped,
            self.position.data_ptr() + skipped,
            rows,
            keys,
            1 if ranges is None else len(ranges),
            stride,
            what,
            *_threads(),
            min(torch.get_num_threads(), rows // LEAST_ROWS),
        )


@functools.cache
def _function() -> Any:
    """The code as a function of addresses and numbers."""
    loaded = library()
    assert not isinstance(loaded, str), loaded
    function = loaded.massieu_row_sums
    function.argtypes = [
        *([ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4 + [ctypes.c_int32]),
        *([ctypes.c_void_p] * 3 + [ctypes.c_int32]),
    ]
    function.restype = None
    return function


@functools.cache
def _threads() -> tuple[Any, Any, Any]:
    """How the OpenMP of PyTorch starts its threads, numbers and counts them; None three times where it is another's."""
    process = ctypes.CDLL(None)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    if not all(hasattr(process, name) for name in names):
        return None, None, None
    start, number, count = (ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names)
    return start, number, count


@functools.cache
def failure() -> str | None:
    """Why the code cannot be used on this machine: it is not there, or its sums are wrong. None if it can."""
    loaded = library()
    if isinstance(loaded, str):
        return loaded
    return _wrong_sum()


def _wrong_sum() -> str | None:
    """A phrase about the first sum that is off by more than rounding, on a small tile; None if all are right."""
    # Ten keys after the last whole register of any size, and scores from which every second pair is hidden.
    rows, keys = 6, 90
    numbers = torch.arange(rows * keys, dtype=torch.float32, device="cpu")
    scores = torch.sin(numbers * 1.7).reshape(1, rows, keys) * 9
    scores[..., ::2] = -torch.inf
    exact = _exact_sums(scores[..., 1::2].double())
    found_sums = RowSums.empty((1, rows), scores)
    found_sums.write(scores, None, 0, None, True, {"position", *SUMS}, False)
    for name, found in found_sums.sums.items():
        error = float((found - exact[name]).abs().max())
        # The sums are of at most a few hundred terms, which rounding to float32 changes by at most 2⁻²⁴ of their size.
        if not error <= keys * torch.finfo(torch.float32).eps * max(1.0, float(exact[name].abs().max())):
            return f"its sum {name!r} is off by {error:.1e} on this machine"
    wanted = 2 * scores[..., 1::2].argmax(-1, keepdim=True) + 1
    return None if torch.equal(found_sums.position.long(), wanted) else "it finds another largest score on this machine"


def _exact_sums(scores: Tensor) -> dict[str, Tensor]:
    """The same sums in plain operations."""
    top, mean = scores.amax(-1, keepdim=True), scores.mean(-1, keepdim=True)
    x = scores - top
    weight = x.exp()
    return {
        "top": top,
        "count": torch.full_like(top, scores.shape[-1]),
        "mean": mean,
        "spread": (scores - mean).norm(dim=-1, keepdim=True),
        "total": weight.sum(-1, keepdim=True),
        "square": weight.norm(dim=-1, keepdim=True),
        "first": (weight * x).sum(-1, keepdim=True),
        "second": (weight * x.square()).sum(-1, keepdim=True),
    }
