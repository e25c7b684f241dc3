"""The error unit: which rows of text count as one independent observation, and the sums kept over them."""

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float64

from massieu.probing.sums.running import State, fitting
from massieu.probing.sums.unit_errors import ratio_error

MINIMUM_DOCUMENTS = 30
"""From this many rows on, unpacked documents are called the error unit. Below, a document and a row are the same thing."""
SAMPLE_SHARE = 0.1  # of the windows, for replays, clouds and controls
SAMPLE_LEAST = 4  # windows at the beginning that are always sampled, so that short texts have error bars
FEWEST_UNITS = 4
"""From fewer units of text nothing is announced."""
GAP = 8
"""One block in so many lies between the halves of a text."""


@dataclass(frozen=True)
class Units:
    """What counts as one observation when a standard error is computed.

    The units are blocks of consecutive rows. There is one row a block at first; whenever a row lies behind the last block
    that there is room for, neighbouring blocks are merged pairwise. From 32 rows on there are then between 32 and 64
    blocks (half the capacity to the capacity), all of 2^k rows but for the last one, which may be partial. Source: the
    blocking of Flyvbjerg and Petersen, "Error estimates on averages of correlated data" (J. Chem. Phys. 91, 461, 1989).

    Attributes:
        mode: ``"window"``: rows are windows of packed text, and neighbouring ones may be alike.
            ``"document"``: each row is a document, and rows are independent.
        capacity: The largest number of blocks: even, at least 2.
        sampled: The rows are the sampled ones of a text, and the text is longer than they are many.
    """

    mode: Literal["window", "document"] = "window"
    capacity: int = 64
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("window", "document"):
            raise ValueError(f"mode must be 'window' or 'document', got {self.mode!r}")
        if self.capacity < 2 or self.capacity % 2:
            raise ValueError(f"capacity must be an even number of blocks, 2 or more, got {self.capacity}")

    def windows(self, rows: int) -> int | None:
        """The number of windows in the text that these rows are of, or are sampled from; None where rows are independent."""
        if self.mode == "document":
            return None
        if not self.sampled:
            return rows
        return max(rows, round((rows - SAMPLE_LEAST) / SAMPLE_SHARE))


WINDOWS = Units()


@dataclass(frozen=True)
class Estimate:
    """A ratio, its standard error and the number of entries behind it; unpacks into the three.

    Attributes:
        degrees: of freedom of the error; 0 where there is none.
    """

    value: Float64[np.ndarray, "*shape"]
    standard_error: Float64[np.ndarray, "*shape"]
    count: Float64[np.ndarray, "*shape"]
    degrees: Float64[np.ndarray, "*#shape"] = field(default_factory=lambda: np.zeros(()))

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
        have_numbers = numbers is not None
        if self.numbered not in (None, have_numbers):
            raise ValueError("either all rows or none must have numbers")
        if numbers is None:
            numbers = np.arange(self.following, self.following + rows)
        elif numbers.min() < 0:
            raise ValueError(f"numbers of rows must be ≥ 0, got {numbers.min()}")
        self.numbered = have_numbers
        self.following = max(self.following, int(numbers.max()) + 1)
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
        """Count another's rows as seen; their numbers begin at ``first``."""
        self.following = max(self.following, first + other.following)
        if self.numbered is None:
            self.numbered = other.numbered

    def state(self) -> State:
        return {"following": self.following, "numbered": self.numbered}

    def restore(self, state: State) -> None:
        self.following = state["following"]
        self.numbered = state["numbered"]


class BlockSums:
    """Sums of (total, count) over blocks of consecutive rows.

    A row's block is its number in the text divided by the rows in a block, so that sums of any rows of one text, read in
    any order and by any process, add up to the same blocks.
    """

    def __init__(self, shape: tuple[int, ...], units: Units) -> None:
        self.units = units
        self.capacity = units.capacity
        self.order = RowOrder()
        self.size = 1  # rows in a full block
        self.rows = np.zeros(0, dtype=np.int64)  # rows in each block, up to the last one with any
        self.sums = np.zeros((units.capacity, 2, *shape))  # the first len(rows) of them are in use

    def add(self, pairs: np.ndarray, numbers: np.ndarray | None = None) -> None:
        if not len(pairs):
            return
        numbers = self.order.take(len(pairs), numbers)
        if (np.diff(numbers) < 0).any():
            ascending = np.argsort(numbers, kind="stable")
            numbers = numbers[ascending]
            pairs = pairs[ascending]
        while numbers[-1] // self.size >= self.capacity:
            self.coarsen()
        # Rows of one block stand together now; each run of them is summed at once.
        blocks = numbers // self.size
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        self.reach(blocks[-1] + 1)
        for block, part in zip(blocks[starts], np.split(pairs, starts[1:]), strict=True):
            self.sums[block] += part.sum(0)
        self.rows[blocks[starts]] += np.diff(np.append(starts, len(blocks)))

    def reach(self, blocks: int) -> None:
        """Have so many blocks in use at least."""
        self.rows = np.append(self.rows, np.zeros(max(blocks - len(self.rows), 0), dtype=np.int64))

    def coarsen(self) -> None:
        """Merge neighbouring blocks pairwise; an odd one at the end becomes a partial block."""
        used = len(self.rows)
        starts = np.arange(0, used, 2)
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

    def of_heads(self, heads: slice) -> "BlockSums":
        """The sums of some heads, which are the last dimension; views of these."""
        part = copy(self)
        part.order = copy(self.order)
        part.sums = self.sums[..., heads]
        return part

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
        self.size = state["size"]
        self.rows = rows
        self.sums = sums

    def estimate(self, part: slice = slice(None)) -> Estimate:
        """Of all blocks, or of some."""
        totals, counts = np.moveaxis(self.sums[: len(self.rows)][part], 1, 0)
        all_rows = int(self.rows.sum())
        rows = int(self.rows[part].sum())
        windows = self.units.windows(all_rows)
        # A part of the rows stands for as large a part of the text.
        windows_of_part = windows and windows * rows // all_rows
        value, error, degrees = ratio_error(totals, counts, windows_of_part)
        return Estimate(value, error, counts.sum(0), degrees)

    def halves(self) -> tuple[slice, slice]:
        """Two independent parts of the text: alternate documents, or both ends of one text."""
        blocks = len(self.rows)
        if self.units.mode == "document":
            return slice(0, None, 2), slice(1, None, 2)
        gap = max(blocks // GAP, int(blocks > 3))
        middle = (blocks - gap + 1) // 2
        return slice(0, middle), slice(middle + gap, None)

    def error_unit(self) -> tuple[str, int]:
        """What a block is, in words, and how many there are."""
        has_documents = self.units.mode == "document" and self.rows.sum() >= MINIMUM_DOCUMENTS
        row = "document" if has_documents else "window"
        unit = row if self.size == 1 else f"block of {self.size} consecutive {row}s"
        return unit, int((self.rows > 0).sum())
