"""Running means of the per-query statistics of one site, over the whole text and in bins of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import described
from massieu.probing.model.unexpected import OwnFunctionError, calling_own
from massieu.probing.statistics.query_reading import PerQuery, QueryMeasure, QueryReading
from massieu.probing.statistics.registry import ALWAYS_READ
from massieu.probing.sums.accumulate import Histogram, Ratio, Spread, Tally
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import Units

_SPREADS = ("selective_log_partition", "entropy")
_POSITION_BINS = 8
_VISIBLE_BINS = 24  # 1, 2, 3–4, 5–8, … keys
SHARE_ROUNDING = 1e-4
"""By so much a share may leave 0 to 1: sums of weights in half precision."""
HISTOGRAM_EDGES = {
    "selective_log_partition": np.linspace(0.0, 10.0, 41),
    "entropy_fraction": np.linspace(0.0, 1.0, 26),
}


@dataclass(frozen=True, eq=False)
class Queries:
    """Per-query numbers of one attention call, and which of them count."""

    values: dict[str, Float[Tensor, "B H L"]]
    valid: Bool[Tensor, "B H L"]
    defined: dict[str, Bool[Tensor, "B H L"]]
    visible: Int[Tensor, "B_or_1 H_or_1 L"]
    broken: Bool[Tensor, "B H L"]


Fence = Callable[[str], AbstractContextManager[None]]
"""What fails inside costs the statistic of this name alone."""


@dataclass(frozen=True, eq=False)
class QueryFunction:
    """A statistic of queries, and what has to be known to compute it.

    Attributes:
        moments: those that it reads beside `ALWAYS_READ`.
        needs_scores: it has no meaning where scores are not known apart from log-weights.
        control: the name of its own control, and what makes it; None where there is none, or random models are the control.
        own: the user's: what it gives is checked.
        share: its numbers lie between 0 and 1.
    """

    measure: QueryMeasure | Callable[[QueryReading], object]
    moments: tuple[str, ...] = ()
    needs_scores: bool = False
    control: tuple[str, Callable[[QueryReading], object]] | None = None
    own: bool = False
    share: bool = False


Functions = Mapping[str, QueryFunction]
"""By the statistics' names."""


def moments_read(functions: Functions) -> tuple[str, ...]:
    """The moments that these statistics read, each once."""
    read = (moment for each in functions.values() for moment in each.moments)
    return tuple(dict.fromkeys([*ALWAYS_READ, *read]))


def names_with_controls(functions: Functions) -> tuple[str, ...]:
    """What running means are kept of: every statistic, and every control that is another call, as ``NAME/CONTROL``."""
    controls = (f"{name}/{each.control[0]}" for name, each in functions.items() if each.control is not None)
    return *functions, *controls


def query_statistics(reading: QueryReading, functions: Functions, fence: Fence = nullcontext) -> Queries:
    """The per-query statistics of one attention call that have a meaning there, each beside its own control."""
    found = Queries({}, reading.valid, {}, reading.visible, reading.real & ~reading.valid)
    for name, function in functions.items():
        if reading.call.grade == "scores" and function.needs_scores:
            continue
        with fence(name):
            _take(found, name, function, reading)
            if function.control is not None:
                called, make = function.control
                with calling_own(make, _shared(reading)):
                    other = make(reading)
                if not (other is None or isinstance(other, QueryReading)):
                    raise OwnFunctionError(
                        f"its control returned {described(other)}; needed is a QueryReading, or None"
                    )
                if other is not None:
                    _take(found, f"{name}/{called}", function, other)
    return found


def _take(found: Queries, name: str, function: QueryFunction, reading: QueryReading) -> None:
    if function.own:
        with calling_own(function.measure, [*_shared(reading), *found.values.values()]):
            given = function.measure(reading)
        given = _checked(given, found.valid, function.share)
    else:
        given = cast(PerQuery, function.measure(reading))
    if isinstance(given, tuple):
        found.values[name], found.defined[name] = given[0], found.valid & given[1]
    elif given is not None:
        found.values[name] = given


def _shared(reading: QueryReading) -> list[Tensor | None]:
    """Tensors of a reading that other functions are given too."""
    call, tokens = reading.call, (reading.queries, reading.keys)
    parts = [call.query, call.key, call.value, call.output, call.log_weight, reading.key, reading.positions]
    parts += [reading.visible, reading.real, reading.valid]
    parts += [getattr(each, name) for each in tokens for name in ("ids", "real", "special")]
    return parts + [each for each in reading.moments.found if isinstance(each, Tensor)]


def _checked(given: object, valid: Bool[Tensor, "B H L"], share: bool) -> PerQuery:
    """What a function of the user's own has given, NaN as not defined.

    Args:
        valid: queries that are no padding, with finite numbers.

    Raises:
        OwnFunctionError: it is not a number for each query.
    """
    if given is None:
        return None
    shape = valid.shape
    values, defined = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    expected = (
        f"a tensor of shape (B, H, L) = {tuple(shape)}, such a pair of values and of where they are defined, or None"
    )
    if not isinstance(values, Tensor) or not (defined is None or isinstance(defined, Tensor)):
        raise OwnFunctionError(f"it returned {described(given)}; needed is {expected}")
    for part in (values,) if defined is None else (values, defined):
        if part.dim() != 3 or not all(size in (1, whole) for size, whole in zip(part.shape, shape, strict=True)):
            raise OwnFunctionError(f"it returned a tensor of shape {tuple(part.shape)}; needed is {expected}")
    if values.is_complex():
        raise OwnFunctionError(f"it returned complex numbers; needed is {expected}")
    values = values.detach().double().expand(*shape)
    known = ~values.isnan() if defined is None else ~values.isnan() & defined.bool()
    if share and bool((known & valid & ((values < -SHARE_ROUNDING) | (values > 1 + SHARE_ROUNDING))).any()):
        raise OwnFunctionError(
            "it returned numbers outside of 0 to 1, and its scale is 'share'; is a key counted twice? If not, say "
            "scale='number'"
        )
    return values, known


class AttentionStatistics(RunningParts):
    """Running per-query statistics of one site.

    Rows of a batch are the error unit's rows; a model that cuts each item into several sequences (image windows) has
    its sequences added up.
    """

    def __init__(self, names: Sequence[str], heads: int, units: Units, max_length: int) -> None:
        self.names = tuple(names)
        self.heads = heads
        self.max_length = max_length
        self.ratio = Ratio((len(self.names), heads), units)
        self.by_position = Ratio((_POSITION_BINS, heads), units)
        self.by_visible = Ratio((_VISIBLE_BINS, heads), units)
        self.spreads = {name: Spread((heads,)) for name in _SPREADS}
        self.histograms = {name: Histogram(edges, heads) for name, edges in HISTOGRAM_EDGES.items()}
        self.broken = Tally((heads,))

    def update(
        self, found: Queries, positions: Int[Tensor, " L"] | None, rows: int, numbers: Sequence[int] | None = None
    ) -> None:
        """Add one batch of ``rows`` items; without positions, where those differ from row to row, none are binned.

        Args:
            numbers: where the rows stand in the text; see `Ratio.update`.
        """
        shape = found.valid.shape
        totals = torch.zeros(shape[0], len(self.names), self.heads, dtype=torch.float64, device=found.valid.device)
        counts = torch.zeros_like(totals)
        by_mask: dict[Tensor, list[str]] = {}
        for name in found.values:
            by_mask.setdefault(found.defined.get(name, found.valid), []).append(name)
        for mask, names in by_mask.items():
            places = [self.names.index(name) for name in names]
            stacked = torch.stack([found.values[name] for name in names], dim=1)
            totals[:, places] = torch.where(mask[:, None], stacked, 0.0).sum(-1, dtype=torch.float64)
            counts[:, places] = mask.sum(-1, dtype=torch.float64)[:, None]
        self.ratio.update(_by_item(totals, rows), _by_item(counts, rows), numbers)
        self._update_bins(found, positions, rows, numbers)
        for name in found.values.keys() & self.spreads.keys():
            self.spreads[name].update(found.values[name], found.valid)
        for name in found.values.keys() & self.histograms.keys():
            self.histograms[name].update(found.values[name], found.defined.get(name, found.valid))
        self.broken.update(found.broken.sum((0, 2)))

    def _update_bins(
        self, found: Queries, positions: Int[Tensor, " L"] | None, rows: int, numbers: Sequence[int] | None
    ) -> None:
        width = -(-self.max_length // _POSITION_BINS)
        by_position = None if positions is None else (positions // width).clamp_max(_POSITION_BINS - 1)[None, None]
        valid = found.valid.double()
        for ratio, name, bins in (
            (self.by_position, "selective_log_partition", by_position),
            (self.by_visible, "entropy", _visible_bin(found.visible)),
        ):
            if name not in found.values or bins is None:
                continue
            values = torch.where(found.valid, found.values[name], 0.0).double()
            chosen = torch.nn.functional.one_hot(bins, ratio.shape[0]).double()
            if chosen.shape[1] == 1:  # the same bins for all heads: one matrix product
                totals, counts = values @ chosen[:, 0], valid @ chosen[:, 0]
            else:
                totals, counts = ((x[..., None] * chosen).sum(2) for x in (values, valid))
            ratio.update(_by_item(totals.mT, rows), _by_item(counts.mT, rows), numbers)

    def bins(self) -> list[tuple[str, Ratio, int]]:
        """Name, accumulator and index of each bin."""
        width = -(-self.max_length // _POSITION_BINS)
        named = [
            (f"selective_log_partition/position_{i * width}_{(i + 1) * width - 1}", self.by_position, i)
            for i in range(_POSITION_BINS)
        ]
        edges = [(1, 1), (2, 2), *((2**k + 1, 2 ** (k + 1)) for k in range(1, _VISIBLE_BINS - 1))]
        named += [(f"entropy/visible_keys_{a}_{b}", self.by_visible, i) for i, (a, b) in enumerate(edges)]
        return named


def _visible_bin(visible: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """0 for one key, 1 for two, 2 for three or four, 3 for five to eight, …"""
    exponent = (visible.clamp_min(1).double()).log2().ceil().long()
    return exponent.clamp_max(_VISIBLE_BINS - 1)


def _by_item(values: Tensor, rows: int) -> Tensor:
    """Add up the sequences that one item was cut into."""
    return values if values.shape[0] == rows else values.unflatten(0, (rows, -1)).sum(1)
