"""The error unit: which rows of text count as one independent observation, and the sums kept over them."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

MINIMUM_DOCUMENTS = 30
"""From this many rows on, unpacked documents are called the error unit. Below, rows are too few to be merged in blocks,
and a document, a row and a block are the same thing."""


@dataclass(frozen=True)
class Units:
    """What counts as one independent observation when a standard error is computed.

    Attributes:
        mode: ``"window"``: rows are windows of packed text, and the units are blocks of consecutive windows. There is
            one window a block at first; whenever all blocks are full and another window arrives, neighbouring blocks
            are merged pairwise. From 32 windows on there are then between 32 and 64 blocks (half the capacity to the
            capacity), all of 2^k windows but for the last one, which may be partial. Source: the blocking of Flyvbjerg
            and Petersen, "Error estimates on averages of correlated data" (J. Chem. Phys. 91, 461, 1989).
            ``"document"``: each row is a document, and a unit of its own, however many there are.
        capacity: The largest number of blocks: even, at least 2. Mode ``"document"`` does not use it.
    """

    mode: Literal["window", "document"] = "window"
    capacity: int = 64

    def __post_init__(self) -> None:
        if self.mode not in ("window", "document"):
            raise ValueError(f"mode must be 'window' or 'document', got {self.mode!r}")
        if self.capacity < 2 or self.capacity % 2:
            raise ValueError(f"capacity must be an even number of blocks, 2 or more, got {self.capacity}")


WINDOWS = Units()


@dataclass(frozen=True)
class Estimate:
    """A ratio, its standard error and the number of entries behind it; unpacks into the three."""

    value: Float64[np.ndarray, "*shape"]
    standard_error: Float64[np.ndarray, "*shape"]
    count: Float64[np.ndarray, "*shape"]

    def __iter__(self) -> Iterator[Float64[np.ndarray, "*shape"]]:
        return iter((self.value, self.standard_error, self.count))


class BlockSums:
    """Sums of (total, count) over blocks of consecutive rows."""

    def __init__(self, shape: tuple[int, ...], capacity: int) -> None:
        self.capacity = capacity
        self.size = 1  # rows in a full block
        self.rows = np.zeros(0, dtype=np.int64)  # rows in each block
        self.sums = np.zeros((capacity, 2, *shape))  # the first len(rows) of them are in use

    def add(self, pairs: np.ndarray) -> None:
        while len(pairs):
            used = len(self.rows)
            # Room in the last block; after a merge a partial block can also lie further in front, and stays as it is.
            room = self.size - int(self.rows[-1]) if used else 0
            space = room + (self.capacity - used) * self.size
            if space == 0:
                self.coarsen()
                continue
            taken, pairs = pairs[:space], pairs[space:]
            if room:
                fills = taken[:room]
                self.sums[used - 1] += fills.sum(0)
                self.rows[-1] += len(fills)
                taken = taken[room:]
            if len(taken):
                starts = np.arange(0, len(taken), self.size)
                self.sums[used : used + len(starts)] = np.add.reduceat(taken, starts, axis=0)
                self.rows = np.append(self.rows, np.diff(np.append(starts, len(taken))))

    def coarsen(self) -> None:
        """Merge neighbouring blocks pairwise; an odd one at the end becomes a partial block."""
        self._keep_pairs(self.sums[: len(self.rows)], self.rows)

    def _keep_pairs(self, sums: np.ndarray, rows: np.ndarray) -> None:
        starts = np.arange(0, len(rows), 2)
        self.sums[: len(starts)] = np.add.reduceat(sums, starts, axis=0)
        self.rows = np.add.reduceat(rows, starts)
        self.size *= 2

    def merge(self, other: "BlockSums") -> None:
        if not len(other.rows):
            return
        appended = deepcopy(other)
        while self.size < appended.size and len(self.rows):
            self.coarsen()
        self.size = max(self.size, appended.size)
        while appended.size < self.size:
            appended.coarsen()
        blocks = np.concatenate([self.sums[: len(self.rows)], appended.sums[: len(appended.rows)]])
        rows = np.concatenate([self.rows, appended.rows])
        if len(rows) > self.capacity:
            self._keep_pairs(blocks, rows)
        else:
            self.sums[: len(rows)], self.rows = blocks, rows

    def estimate(self, part: slice) -> Estimate:
        totals, counts = np.moveaxis(self.sums[: len(self.rows)][part], 1, 0)
        total, count = totals.sum(0), counts.sum(0)
        value = _divide(total, count)
        residuals = totals - value * counts
        # An entry that was never counted has value NaN; its residuals are not used.
        return _estimate(value, (residuals**2).sum(0), count, (counts > 0).sum(0))

    def error_unit(self) -> tuple[str, int]:
        return "window" if self.size == 1 else f"block of {self.size} consecutive windows", len(self.rows)


class DocumentSums:
    """Moments of (total, count) over rows, apart for every other row.

    Totals are kept relative to a reference ratio c, the first row's: r = s − c·n. Around it the squared residuals
    Σ (s − m n)² = Σr² − 2(m − c)Σrn + (m − c)²Σn² lose no digits to a large common mean.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rows = 0
        self.reference = np.full(shape, np.nan)  # NaN until the entry's first counted row
        self.moments = np.zeros((2, 6, *shape))  # parity × (Σr, Σn, Σr², Σrn, Σn², number of rows with n > 0)

    def add(self, pairs: np.ndarray) -> None:
        totals, counts = pairs[:, 0], pairs[:, 1]
        counted = counts > 0
        unset = np.isnan(self.reference)
        if len(pairs) and unset.any():
            first = counted.argmax(0)[None]
            ratio = _divide(*(np.take_along_axis(part, first, 0)[0] for part in (totals, counts)))
            # A non-finite first row must not become everybody's reference.
            np.copyto(
                self.reference, np.where(np.isfinite(ratio), ratio, np.where(counted.any(0), 0.0, np.nan)), where=unset
            )
        r = totals - np.where(np.isnan(self.reference), 0.0, self.reference) * counts
        moments = np.stack([r, counts, r * r, r * counts, counts * counts, counted.astype(np.float64)], axis=1)
        for start in (0, 1):
            self.moments[(self.rows + start) % 2] += moments[start::2].sum(0)
        self.rows += len(pairs)

    def merge(self, other: "DocumentSums") -> None:
        reference = np.where(np.isnan(self.reference), other.reference, self.reference)
        moments = other.moved(reference)
        self.moments = self.moved(reference) + (moments[::-1] if self.rows % 2 else moments)
        self.reference = reference
        self.rows += other.rows

    def moved(self, reference: np.ndarray) -> np.ndarray:
        """The moments relative to another reference; those of an entry never counted are all 0."""
        step = np.nan_to_num(self.reference - reference)
        r, n, rr, rn, nn, units = np.moveaxis(self.moments, 1, 0)
        return np.stack([r + step * n, n, rr + 2 * step * rn + step**2 * nn, rn + step * nn, nn, units], axis=1)

    def estimate(self, part: slice) -> Estimate:
        r, n, rr, rn, nn, units = self.moments[part].sum(0)
        above = _divide(r, n)
        residual = np.maximum(rr - 2 * above * rn + above**2 * nn, 0.0)
        return _estimate(self.reference + above, residual, n, units)

    def error_unit(self) -> tuple[str, int]:
        return "document" if self.rows >= MINIMUM_DOCUMENTS else "window", self.rows


def _estimate(value: np.ndarray, residual: np.ndarray, count: np.ndarray, units: np.ndarray) -> Estimate:
    enough = units > 1
    correction = np.where(enough, units, np.nan) / np.where(enough, units - 1, 1)
    return Estimate(value, _divide(np.sqrt(correction * residual), count), count)


def _divide(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """total / count, NaN where count is 0."""
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)
