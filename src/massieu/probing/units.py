"""The error unit: which rows of text count as one independent observation, and the sums kept over them."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

from massieu.probing.running import State, fitting

MINIMUM_DOCUMENTS = 30
"""From this many rows on, unpacked documents are called the error unit. Below, rows are too few to be merged in blocks,
and a document, a row and a block are the same thing."""


@dataclass(frozen=True)
class Units:
    """What counts as one independent observation when a standard error is computed.

    Attributes:
        mode: ``"window"``: rows are windows of packed text, and the units are blocks of consecutive windows. There is
            one window a block at first; whenever a window lies behind the last block that there is room for,
            neighbouring blocks are merged pairwise. From 32 windows on there are then between 32 and 64 blocks (half the
            capacity to the capacity), all of 2^k windows but for the last one, which may be partial. Source: the
            blocking of Flyvbjerg and Petersen, "Error estimates on averages of correlated data" (J. Chem. Phys. 91,
            461, 1989).
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


class RowOrder:
    """Which rows of the text sums have seen: rows with numbers, or rows in the order of their arrival.

    Attributes:
        following: one more than the largest number seen.
        numbered: whether the rows came with numbers; None before the first.
    """

    def __init__(self) -> None:
        self.following = 0
        self.numbered: bool | None = None

    def take(self, rows: int, numbers: np.ndarray | None) -> np.ndarray:
        """The numbers of rows that arrive.

        Raises:
            ValueError: some rows came with numbers and some without, or a number is negative.
        """
        given = numbers is not None
        if self.numbered not in (None, given):
            raise ValueError("either all rows or none must have numbers")
        if numbers is None:
            numbers = np.arange(self.following, self.following + rows)
        elif numbers.min() < 0:
            raise ValueError(f"numbers of rows must be ≥ 0, got {numbers.min()}")
        self.numbered, self.following = given, max(self.following, int(numbers.max()) + 1)
        return numbers

    def follows(self, other: "RowOrder") -> bool:
        """Whether the other's rows have no numbers and come after these.

        Raises:
            ValueError: the rows of one have numbers, those of the other none.
        """
        if None not in (self.numbered, other.numbered) and self.numbered != other.numbered:
            raise ValueError("cannot merge rows that have numbers with rows that have none")
        return other.numbered is False

    def merge(self, other: "RowOrder", first: int) -> None:
        """Take note of another's rows, whose numbers begin at ``first``."""
        self.following = max(self.following, first + other.following)
        self.numbered = other.numbered if self.numbered is None else self.numbered

    def state(self) -> State:
        return {"following": self.following, "numbered": self.numbered}

    def restore(self, state: State) -> None:
        self.following, self.numbered = state["following"], state["numbered"]


class BlockSums:
    """Sums of (total, count) over blocks of consecutive rows.

    A row's block is its number in the text divided by the rows in a block, so that sums of any rows of one text, read in
    any order and by any process, add up to the same blocks.
    """

    def __init__(self, shape: tuple[int, ...], capacity: int) -> None:
        self.capacity = capacity
        self.order = RowOrder()
        self.size = 1  # rows in a full block
        self.rows = np.zeros(0, dtype=np.int64)  # rows in each block, up to the last one with any
        self.sums = np.zeros((capacity, 2, *shape))  # the first len(rows) of them are in use

    def add(self, pairs: np.ndarray, numbers: np.ndarray | None = None) -> None:
        if not len(pairs):
            return
        numbers = self.order.take(len(pairs), numbers)
        ascending = np.argsort(numbers, kind="stable")
        numbers, pairs = numbers[ascending], pairs[ascending]
        while numbers[-1] // self.size >= self.capacity:
            self.coarsen()
        blocks = numbers // self.size
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        self.reach(blocks[-1] + 1)
        self.sums[blocks[starts]] += np.add.reduceat(pairs, starts, axis=0)
        self.rows[blocks[starts]] += np.diff(np.append(starts, len(blocks)))

    def reach(self, blocks: int) -> None:
        """Have so many blocks in use at least."""
        self.rows = np.append(self.rows, np.zeros(max(blocks - len(self.rows), 0), dtype=np.int64))

    def coarsen(self) -> None:
        """Merge neighbouring blocks pairwise; an odd one at the end becomes a partial block."""
        used, starts = len(self.rows), np.arange(0, len(self.rows), 2)
        if used:
            merged = np.add.reduceat(self.sums[:used], starts, axis=0)
            self.sums[:used] = 0.0
            self.sums[: len(starts)] = merged
            self.rows = np.add.reduceat(self.rows, starts)
        self.size *= 2

    def merge(self, other: "BlockSums") -> None:
        """Add the blocks of other rows of the text; without numbers, those of the text that follows this one's."""
        if not len(other.rows):
            return
        added = deepcopy(other)
        while True:
            while added.size < self.size:
                added.coarsen()
            while self.size < added.size:
                self.coarsen()
            # Rows without numbers follow in a block of their own.
            first = -(-self.order.following // self.size) if self.order.follows(other.order) else 0
            if first + len(added.rows) <= self.capacity:
                break
            self.coarsen()
        self.reach(first + len(added.rows))
        here = slice(first, first + len(added.rows))
        self.sums[here] += added.sums[: len(added.rows)]
        self.rows[here] += added.rows
        self.order.merge(other.order, first * self.size)

    def state(self) -> State:
        return {
            "order": self.order.state(),
            "size": self.size,
            "rows": self.rows.copy(),
            "sums": self.sums[: len(self.rows)].copy(),
        }

    def restore(self, state: State) -> None:
        rows = np.array(state["rows"], dtype=np.int64)
        sums = np.zeros_like(self.sums)
        sums[: len(rows)] = fitting(state["sums"], (len(rows), *sums.shape[1:]))
        self.order.restore(state["order"])
        self.size, self.rows, self.sums = state["size"], rows, sums

    def estimate(self, part: slice) -> Estimate:
        totals, counts = np.moveaxis(self.sums[: len(self.rows)][part], 1, 0)
        total, count = totals.sum(0), counts.sum(0)
        value = _divide(total, count)
        residuals = totals - value * counts
        # An entry that was never counted has value NaN; its residuals are not used.
        return _estimate(value, (residuals**2).sum(0), count, (counts > 0).sum(0))

    def error_unit(self) -> tuple[str, int]:
        units = int((self.rows > 0).sum())
        return "window" if self.size == 1 else f"block of {self.size} consecutive windows", units


class DocumentSums:
    """Moments of (total, count) over rows, apart for every other row.

    Totals are kept relative to a reference ratio c, the first row's: r = s − c·n. Around it the squared residuals
    Σ (s − m n)² = Σr² − 2(m − c)Σrn + (m − c)²Σn² lose no digits to a large common mean.
    """

    def __init__(self, shape: tuple[int, ...], capacity: int) -> None:
        self.rows = 0
        self.order = RowOrder()
        self.blocks = BlockSums(shape, capacity)  # of consecutive rows: for comparisons, not for errors
        self.reference = np.full(shape, np.nan)  # NaN until the entry's first counted row
        self.moments = np.zeros((2, 6, *shape))  # parity × (Σr, Σn, Σr², Σrn, Σn², number of rows with n > 0)

    def add(self, pairs: np.ndarray, numbers: np.ndarray | None = None) -> None:
        if not len(pairs):
            return
        self.blocks.add(pairs, numbers)
        numbers = self.order.take(len(pairs), numbers)
        totals, counts = pairs[:, 0], pairs[:, 1]
        counted = counts > 0
        unset = np.isnan(self.reference)
        if unset.any():
            first = counted.argmax(0)[None]
            ratio = _divide(*(np.take_along_axis(part, first, 0)[0] for part in (totals, counts)))
            # A non-finite first row must not become everybody's reference.
            np.copyto(
                self.reference, np.where(np.isfinite(ratio), ratio, np.where(counted.any(0), 0.0, np.nan)), where=unset
            )
        r = totals - np.where(np.isnan(self.reference), 0.0, self.reference) * counts
        moments = np.stack([r, counts, r * r, r * counts, counts * counts, counted.astype(np.float64)], axis=1)
        for parity in (0, 1):
            self.moments[parity] += moments[numbers % 2 == parity].sum(0)
        self.rows += len(pairs)

    def merge(self, other: "DocumentSums") -> None:
        """Add other rows of the text; without numbers, those of the text that follows this one's."""
        reference = np.where(np.isnan(self.reference), other.reference, self.reference)
        moments, first = other.moved(reference), self.order.following if self.order.follows(other.order) else 0
        self.moments = self.moved(reference) + (moments[::-1] if first % 2 else moments)
        self.reference = reference
        self.rows += other.rows
        self.order.merge(other.order, first)
        self.blocks.merge(other.blocks)

    def state(self) -> State:
        own = {"rows": self.rows, "reference": self.reference.copy(), "moments": self.moments.copy()}
        return own | {"order": self.order.state(), "blocks": self.blocks.state()}

    def restore(self, state: State) -> None:
        reference, moments = (fitting(state[name], vars(self)[name].shape) for name in ("reference", "moments"))
        self.order.restore(state["order"])
        self.blocks.restore(state["blocks"])
        self.rows, self.reference, self.moments = state["rows"], reference, moments

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
