"""Running results over a stream of text: ratios with honest errors, spreads and histograms, never a stored activation.

Text arrives in *rows*: windows of packed text, or one document each. A probe's number is a ratio of sums over rows, for
example the entropy summed over queries divided by the number of queries. Neighbouring tokens are far from independent,
and so are neighbouring windows of one document: an error bar computed from single tokens is much too small. The error
unit is therefore a whole document, or a block of consecutive windows long enough to forget its neighbours.

Everything is kept in float64, in memory that does not grow with the length of the text, and can be merged with the
running result of another part of the text.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Integer, Real
from torch import Tensor

from massieu.foundation.arguments import boolean, check_dense, check_shape, check_values, described, whole_number
from massieu.foundation.doors import any_of, input_door, sequence
from massieu.probing.sums.running import State, fitting
from massieu.probing.sums.units import WINDOWS, BlockSums, Estimate, Units


def _sizes(name: str, value: object) -> object:
    for size in sequence(name, value):
        whole_number(name, size, least=0)
    return value


class Ratio:
    """Σ totals / Σ counts over rows, for an array of statistics, with a standard error over `Units`.

    The standard error is the ratio estimator's, by linearisation; `massieu.probing.sums.unit_errors` says how it takes the
    likeness of neighbouring windows, and documents of unequal length, into account. Each entry of the array has its own
    units: one in which it has count 0 is none of its.

    Source: Cochran, *Sampling Techniques* (3rd edition, 1977), section 6.4.

    Example:
        >>> import numpy as np
        >>> from massieu.probing import Ratio
        >>> mean = Ratio((2,))  # a number for each of two heads
        >>> mean.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2)))
        >>> mean.estimate().value.tolist()
        [2.0, 3.0]

    Args:
        shape: Shape of the array of statistics, for example ``(heads,)`` or ``(bins, heads)``.
        units: What the error is computed over.
    """

    @input_door(shape=_sizes, units=any_of("the units of a group's model", Units))
    def __init__(self, shape: tuple[int, ...], units: Units = WINDOWS) -> None:
        self.shape = tuple(shape)
        self.units = units
        self._sums = BlockSums(self.shape, units)

    def update(
        self,
        total: Real[np.ndarray | Tensor, "rows *shape"],
        count: Real[np.ndarray | Tensor, "rows *#shape"],
        numbers: Sequence[int] | Integer[np.ndarray, " rows"] | None = None,
    ) -> None:
        """Add rows of the text.

        Args:
            total: Sum of the statistic over a row's valid entries. Where ``count`` is 0 it is ignored, NaN included.
            count: Number of valid entries of the row; may have 1 in place of any dimension of ``shape``.
            numbers: Where each row stands among all rows of the text, which may then come in any order, and in several
                accumulators that are merged. None: the rows that follow those before; one that counts nowhere takes no
                place in the order.

        A total that is NaN or infinite where ``count`` is positive makes that entry's value NaN: leave such entries out
        of both.

        Raises:
            ValueError: the shapes do not fit, a count is negative or NaN, or a number is negative or missing.
        """
        totals = _numbers("total", total)
        counts = _numbers("count", count)
        check_shape("total", totals, ("rows", *self.shape))
        _check_expands("count", counts, totals)
        if len(counts) != len(totals):
            raise ValueError(f"count must have a row for each of total's {len(totals)}, got {len(counts)}")
        totals = totals.numpy()
        counts = counts.numpy()
        if not (counts >= 0).all():
            raise ValueError("count must hold numbers ≥ 0")
        # (rows, 2, *shape): total and count; a total where nothing is counted is 0, because it may be NaN.
        pairs = np.empty((len(totals), 2, *self.shape))
        pairs[:, 0] = np.where(counts > 0, totals, 0.0)
        pairs[:, 1] = counts
        # A row that counts nowhere is no unit; on a sample of the text's rows it must not take a place in the order.
        counting = np.asarray(counts.any(axis=tuple(range(1, counts.ndim))))
        places = None if numbers is None else _places(numbers)
        if places is not None and places.shape != counting.shape:
            raise ValueError(f"numbers must hold one for each of {len(counting)} rows, got shape {places.shape}")
        if not counting.all():
            pairs = pairs[counting]
            places = None if places is None else places[counting]
        self._sums.add(pairs, places)

    def merge(self, other: "Ratio") -> None:
        """Add what ``other`` has seen: other rows of the same text. ``other`` is not changed.

        Where rows have numbers, the result is that of one accumulator that has seen them all, errors included, in
        whatever order results are merged. Rows without numbers are taken as the text that follows this one's: values and
        counts are those of the concatenated text, errors those of the union of the two sets of units.

        Raises:
            ValueError: the two differ in shape or in units, or the rows of one have numbers and those of the other none.
        """
        if (self.shape, self.units) != (other.shape, other.units):
            raise ValueError(
                f"cannot merge: shape {self.shape} with {self.units} and shape {other.shape} with {other.units}"
            )
        self._sums.merge(other._sums)

    def of_heads(self, heads: slice) -> "Ratio":
        """What was summed for some heads, the last dimension of the shape; it shares its numbers with this one."""
        part = copy(self)
        part._sums = self._sums.of_heads(heads)
        part.shape = part._sums.sums.shape[2:]
        return part

    def state(self) -> State:
        """All that was summed; see `massieu.probing.sums.running`."""
        return self._sums.state()

    def restore(self, state: State) -> None:
        """Go on from such a state in place of one's own."""
        self._sums.restore(state)

    def estimate(self) -> Estimate:
        """Value, standard error and count from the whole text."""
        return self._sums.estimate()

    def value(self) -> Float64[np.ndarray, "*shape"]:
        """Σ totals / Σ counts; NaN where nothing was counted."""
        return self.estimate().value

    def first_half(self) -> Estimate:
        """The same from one half of the text alone: every second document, or the beginning of one text.

        The two halves share no row, so that heads can be picked on one and their values printed from the other. Between
        the halves of one text a gap of one block in eight is left out: neighbouring windows are alike, and what was picked
        for its noise on one side would have some of it on the other.
        """
        return self._sums.estimate(self._sums.halves()[0])

    def second_half(self) -> Estimate:
        """The same from the other half; see `first_half`."""
        return self._sums.estimate(self._sums.halves()[1])

    def error_unit(self) -> tuple[str, int]:
        """What the error unit is, in words, and how many there are."""
        return self._sums.error_unit()


def block_sums(
    ratio: Ratio,
) -> tuple[Float64[np.ndarray, "blocks *shape"], Float64[np.ndarray, "blocks *shape"], Int64[np.ndarray, " blocks"]]:
    """Totals, counts and number of rows of each block of consecutive rows, in both modes of `Units`."""
    blocks = ratio._sums
    totals, counts = np.moveaxis(blocks.sums[: len(blocks.rows)], 1, 0)
    return totals, counts, blocks.rows


class Histogram:
    """Counts of values in equal bins, one histogram a head.

    Bins are closed on the left and open on the right; a value within rounding of an edge may fall on either side of it.
    What lies below the first edge is counted in the first bin and what lies at or above the last edge in the last one,
    infinities included: the end bins read "this or beyond". NaN is not counted.

    Args:
        edges: The bins' edges, increasing in equal steps.
        heads: Number of histograms.

    Raises:
        ValueError: fewer than two edges, or edges that do not increase in equal steps.
    """

    def __init__(self, edges: Float[np.ndarray, "bins+1"], heads: int) -> None:
        self.edges = np.array(edges, dtype=np.float64)
        if self.edges.ndim != 1 or len(self.edges) < 2 or not np.isfinite(self.edges).all():
            raise ValueError("edges must be two or more finite numbers")
        steps = np.diff(self.edges)
        if not (steps > 0).all() or not np.allclose(steps, steps.mean(), rtol=1e-6):
            raise ValueError("edges must increase in equal steps")
        self.counts: Int64[np.ndarray, "heads bins"] = np.zeros((heads, len(steps)), dtype=np.int64)

    def update(
        self,
        values: Real[np.ndarray | Tensor, "rows heads queries"],
        valid: Bool[np.ndarray | Tensor, "#rows #heads #queries"],
    ) -> None:
        """Count the values where ``valid`` is true.

        Raises:
            TypeError: ``valid`` is not boolean.
            ValueError: the shapes do not fit.
        """
        heads, bins = self.counts.shape
        numbers, mask = _values_and_mask(values, valid, (heads,))
        # Equal bins by arithmetic: a search among the edges takes twenty times as long.
        first, last = self.edges[[0, -1]]
        places = ((numbers - first) * (bins / (last - first))).floor_().clamp_(0, bins - 1)
        places += bins * torch.arange(heads, device=numbers.device)[:, None]
        # What is not counted goes into one bin behind all others, which is dropped.
        dropped = heads * bins
        places = torch.where(mask & ~numbers.isnan(), places, dropped).long()
        counts = torch.bincount(places.flatten(), minlength=dropped + 1)[:dropped]
        self.counts += counts.reshape(heads, bins).cpu().numpy()

    def merge(self, other: "Histogram") -> None:
        """Add what ``other`` has counted; exact, and in any order. ``other`` is not changed.

        Raises:
            ValueError: the two differ in edges or in heads.
        """
        if self.counts.shape != other.counts.shape or not np.array_equal(self.edges, other.edges):
            raise ValueError("cannot merge histograms of different edges or heads")
        self.counts += other.counts

    def of_heads(self, heads: slice) -> "Histogram":
        """What was counted for some heads; it shares its counts with this one."""
        part = copy(self)
        part.counts = self.counts[heads]
        return part

    def state(self) -> State:
        """The counts; see `massieu.probing.sums.running`."""
        return {"counts": self.counts.copy()}

    def restore(self, state: State) -> None:
        """Go on from such counts in place of one's own."""
        self.counts = fitting(state["counts"], self.counts.shape)


class Tally:
    """Whole numbers that are added up, for an array of things that are counted.

    Args:
        shape: Shape of the array, for example ``(heads,)``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.counts: Int64[np.ndarray, "*shape"] = np.zeros(shape, dtype=np.int64)

    def update(self, counts: Integer[np.ndarray | Tensor, "*shape"]) -> None:
        """Add counts.

        Raises:
            ValueError: the shape does not fit.
        """
        added = _tensor(counts).cpu().numpy()
        if added.shape != self.counts.shape:
            raise ValueError(f"counts must have shape {self.counts.shape}, got {added.shape}")
        self.counts += added

    def merge(self, other: "Tally") -> None:
        """Add what ``other`` has counted; exact, and in any order. ``other`` is not changed."""
        self.update(other.counts)

    def of_heads(self, heads: slice) -> "Tally":
        """What was counted for some heads, the last dimension; it shares its counts with this one."""
        part = copy(self)
        part.counts = self.counts[..., heads]
        return part

    def state(self) -> State:
        """The counts; see `massieu.probing.sums.running`."""
        return {"counts": self.counts.copy()}

    def restore(self, state: State) -> None:
        """Go on from such counts in place of one's own."""
        self.counts = fitting(state["counts"], self.counts.shape)


class Spread:
    """Standard deviation over all valid entries (tokens, queries) of the text, for an array of statistics.

    A description of how different tokens are, not an error. Means and sums of squared deviations are merged batch by
    batch, so that a small spread around a large mean keeps its digits.

    Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (Am. Stat. 37, 242, 1983), eq. 2.1.

    Args:
        shape: Shape of the array of statistics, for example ``(heads,)``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = tuple(shape)
        self._count = np.zeros(self.shape)
        self._mean = np.zeros(self.shape)
        self._squares = np.zeros(self.shape)

    def update(
        self,
        values: Real[np.ndarray | Tensor, "rows *shape entries"],
        valid: Bool[np.ndarray | Tensor, "#rows *#shape #entries"],
    ) -> None:
        """Add the values where ``valid`` is true. A NaN or an infinity among them makes the result NaN.

        Raises:
            TypeError: ``valid`` is not boolean.
            ValueError: the shapes do not fit.
        """
        numbers, mask = _values_and_mask(values, valid, self.shape)
        rows_and_entries = (0, -1)
        count = mask.sum(rows_and_entries, dtype=torch.float64)
        mean = torch.where(mask, numbers, 0.0).sum(rows_and_entries) / count.clamp_min(1.0)
        # Deviations from this batch's mean, not squares: Σx² − n·x̄² loses the digits of a small spread.
        deviations = torch.where(mask, numbers - mean[..., None], 0.0)
        squares = deviations.square_().sum(rows_and_entries)
        self._add(*torch.stack([count, mean, squares]).cpu().numpy())

    def merge(self, other: "Spread") -> None:
        """Add what ``other`` has seen; in any order. ``other`` is not changed.

        Raises:
            ValueError: the two differ in shape.
        """
        if self.shape != other.shape:
            raise ValueError(f"cannot merge shape {self.shape} and shape {other.shape}")
        self._add(other._count, other._mean, other._squares)

    def of_heads(self, heads: slice) -> "Spread":
        """What was seen of some heads, the last dimension; it shares its numbers with this one."""
        part = copy(self)
        part._count = self._count[..., heads]
        part._mean = self._mean[..., heads]
        part._squares = self._squares[..., heads]
        part.shape = part._count.shape
        return part

    def state(self) -> State:
        """Counts, means and sums of squares; see `massieu.probing.sums.running`."""
        return {"count": self._count.copy(), "mean": self._mean.copy(), "squares": self._squares.copy()}

    def restore(self, state: State) -> None:
        """Go on from such sums in place of one's own."""
        self._count = fitting(state["count"], self.shape)
        self._mean = fitting(state["mean"], self.shape)
        self._squares = fitting(state["squares"], self.shape)

    def value(self) -> Float64[np.ndarray, "*shape"]:
        """√(Σ (x − x̄)² / (n − 1)); NaN where fewer than two entries were seen."""
        return np.sqrt(np.where(self._count > 1, self._squares, np.nan) / np.maximum(self._count - 1, 1))

    def count(self) -> Float64[np.ndarray, "*shape"]:
        """Number of entries."""
        return self._count.copy()

    def _add(self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        """Merge another set of entries: Σ² = Σ₁² + Σ₂² + δ² n₁ n₂ / (n₁ + n₂), with δ the difference of the means."""
        total = self._count + count
        share = count / np.maximum(total, 1.0)
        step = mean - self._mean
        self._squares = self._squares + squares + step**2 * self._count * share
        self._mean = self._mean + step * share
        self._count = total


def _numbers(name: str, value: Any) -> Tensor:
    """Numbers that were given, in main memory and in float64."""
    try:
        numbers = _tensor(value if isinstance(value, Tensor) else np.asarray(value))
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array or a tensor of numbers, got {described(value)}") from None
    if numbers.is_complex():
        raise TypeError(f"{name} must be real, got {described(value)}")
    check_dense(name, numbers)
    check_values(**{name: numbers})
    return numbers.cpu().double()


def _places(numbers: Any) -> Int64[np.ndarray, " rows"]:
    try:
        return np.array(numbers, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"numbers must be whole numbers, one for each row, got {described(numbers)}") from error


def _tensor(array: np.ndarray | Tensor) -> Tensor:
    # PyTorch warns of numpy arrays that may not be written to; those alone are copied.
    return array.detach() if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements="W"))


def _values_and_mask(
    values: np.ndarray | Tensor, valid: np.ndarray | Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Float64 values and a mask of the same shape (rows, *shape, entries), on the values' device."""
    numbers = _tensor(values)
    if numbers.device.type == "mps":  # has no float64
        numbers = numbers.cpu()
    numbers = numbers.double()
    mask = _tensor(valid).to(numbers.device)
    check_shape("values", numbers, ("rows", *shape, "entries"))
    boolean("valid", mask)
    _check_expands("valid", mask, numbers)
    return numbers, mask.expand(numbers.shape)


def _check_expands(name: str, value: Tensor, whole: Tensor) -> None:
    fits = value.ndim == whole.ndim and all(a in (1, b) for a, b in zip(value.shape, whole.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} of shape {tuple(value.shape)} must broadcast to shape {tuple(whole.shape)}")
