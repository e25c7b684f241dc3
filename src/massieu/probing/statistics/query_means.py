"""Running means of the per-query statistics of one site, over the whole text and in bins of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
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
"""A share may lie outside 0 to 1 by this much: sums of weights in half precision."""
HISTOGRAM_EDGES = {
    "selective_log_partition": np.linspace(0.0, 10.0, 41),
    "entropy_fraction": np.linspace(0.0, 1.0, 26),
}


@dataclass(frozen=True, eq=False)
class QueryResult:
    """Per-query statistics of one attention call, and which queries count.

    Attributes:
        values: by statistic, and by ``NAME/CONTROL`` for its control.
        valid: queries that are not padding and whose log Z and entropy are finite.
        defined: by name, where a statistic that is not defined at every valid query is defined.
        visible: how many keys a query sees.
        broken: real queries that are not valid.
    """

    values: dict[str, Float[Tensor, "B H L"]]
    valid: Bool[Tensor, "B H L"]
    defined: dict[str, Bool[Tensor, "B H L"]]
    visible: Int[Tensor, "B_or_1 H_or_1 L"]
    broken: Bool[Tensor, "B H L"]


Fence = Callable[[str], AbstractContextManager[None]]
"""A failure inside leaves out the statistic of this name alone."""


@dataclass(frozen=True, eq=False)
class QueryFunction:
    """A statistic of queries, and what is needed to compute it.

    Attributes:
        moments: those that it reads beside `ALWAYS_READ`.
        needs_scores: it has no meaning where scores are not known apart from log-weights.
        control: name of its own control, and the function that makes it; None without a control, or with random models.
        own: the function is the user's, and its result is checked.
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
    moments = (moment for function in functions.values() for moment in function.moments)
    return tuple(dict.fromkeys([*ALWAYS_READ, *moments]))


def names_with_controls(functions: Functions) -> tuple[str, ...]:
    """Names of all running means: every statistic, and every control that is another call, as ``NAME/CONTROL``."""
    controls = (f"{name}/{function.control[0]}" for name, function in functions.items() if function.control is not None)
    return *functions, *controls


def query_statistics(reading: QueryReading, functions: Functions, fence: Fence = nullcontext) -> QueryResult:
    """The per-query statistics of one attention call that have a meaning there, each with its own control."""
    result = QueryResult({}, reading.valid, {}, reading.visible, reading.real & ~reading.valid)
    for name, function in functions.items():
        if reading.call.grade == "scores" and function.needs_scores:
            continue
        with fence(name):
            _measure(result, name, function, reading)
            if function.control is not None:
                control_name, make_control = function.control
                control = _control_reading(reading, make_control)
                if control is not None:
                    _measure(result, f"{name}/{control_name}", function, control)
    return result


def _control_reading(reading: QueryReading, make_control: Callable[[QueryReading], object]) -> QueryReading | None:
    """The reading that the user's control returns; None where there is no such thing."""
    with calling_own(make_control, _shared(reading)):
        control = make_control(reading)
    if not (control is None or isinstance(control, QueryReading)):
        raise OwnFunctionError(f"its control returned {described(control)}; needed is a QueryReading, or None")
    return control


def _measure(result: QueryResult, name: str, function: QueryFunction, reading: QueryReading) -> None:
    """Add one statistic of a reading to the result, under this name."""
    if function.own:
        with calling_own(function.measure, [*_shared(reading), *result.values.values()]):
            returned = function.measure(reading)
        values = _checked(returned, result.valid, function.share)
    else:
        values = cast(PerQuery, function.measure(reading))
    if isinstance(values, tuple):
        defined = result.valid & values[1]  # before anything is stored: shapes that do not fit raise here
        result.values[name] = values[0]
        result.defined[name] = defined
    elif values is not None:
        result.values[name] = values


def _shared(reading: QueryReading) -> list[Tensor | None]:
    """Tensors of a reading that other functions are given too."""
    call = reading.call
    tensors = [call.query, call.key, call.value, call.output, call.log_weight, reading.key, reading.positions]
    tensors += [reading.visible, reading.real, reading.valid]
    for tokens in (reading.queries, reading.keys):
        tensors += [tokens.ids, tokens.real, tokens.special]
    return tensors + [moment for moment in reading.moments.declared if isinstance(moment, Tensor)]


def _checked(returned: object, valid: Bool[Tensor, "B H L"], share: bool) -> PerQuery:
    """What a function of the user's own has returned, with NaN as not defined.

    Args:
        valid: queries that are not padding, with finite numbers.

    Raises:
        OwnFunctionError: it is not a number for each query.
    """
    if returned is None:
        return None
    shape = valid.shape
    values, defined = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    expected = (
        f"a tensor of shape (B, H, L) = {tuple(shape)}, such a pair of values and of where they are defined, or None"
    )
    if not isinstance(values, Tensor) or not (defined is None or isinstance(defined, Tensor)):
        raise OwnFunctionError(f"it returned {described(returned)}; needed is {expected}")
    for part in (values,) if defined is None else (values, defined):
        if part.dim() != 3 or not all(size in (1, full) for size, full in zip(part.shape, shape, strict=True)):
            raise OwnFunctionError(f"it returned a tensor of shape {tuple(part.shape)}; needed is {expected}")
    if values.is_complex():
        raise OwnFunctionError(f"it returned complex numbers; needed is {expected}")
    values = values.detach().double().expand(*shape)
    is_defined = ~values.isnan() if defined is None else ~values.isnan() & defined.bool()
    outside = (values < -SHARE_ROUNDING) | (values > 1 + SHARE_ROUNDING)
    if share and bool((is_defined & valid & outside).any()):
        raise OwnFunctionError(
            "it returned numbers outside of 0 to 1, and its scale is 'share'; is a key counted twice? If not, say "
            "scale='number'"
        )
    return values, is_defined


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
        self, result: QueryResult, positions: Int[Tensor, " L"] | None, rows: int, numbers: Sequence[int] | None = None
    ) -> None:
        """Add one batch.

        Args:
            positions: of the queries; None where these differ from row to row, and then nothing is binned by position.
            rows: items of the batch.
            numbers: where the rows stand in the text; see `Ratio.update`.
        """
        sequences = len(result.valid)
        totals = torch.zeros(sequences, len(self.names), self.heads, dtype=torch.float64, device=result.valid.device)
        counts = torch.zeros_like(totals)
        # Statistics that are defined at the same queries have one count. A tensor as a key is known by its identity.
        by_mask: dict[Tensor, list[str]] = {}
        for name in result.values:
            by_mask.setdefault(result.defined.get(name, result.valid), []).append(name)
        for mask, names in by_mask.items():
            # A look at a number of another device waits for it.
            everywhere = mask.device.type == "cpu" and bool(mask.all())
            count = mask.sum(-1, dtype=torch.float64)
            for name in names:
                place = self.names.index(name)
                values = result.values[name] if everywhere else torch.where(mask, result.values[name], 0.0)
                totals[:, place] = values.sum(-1, dtype=torch.float64)
                counts[:, place] = count
        self.ratio.update(*_in_main_memory(_by_item(totals, rows), _by_item(counts, rows)), numbers)
        self._update_bins(result, positions, rows, numbers)
        for name in result.values.keys() & self.spreads.keys():
            self.spreads[name].update(result.values[name], result.valid)
        for name in result.values.keys() & self.histograms.keys():
            self.histograms[name].update(result.values[name], result.defined.get(name, result.valid))
        self.broken.update(result.broken.sum((0, 2)))

    def _update_bins(
        self, result: QueryResult, positions: Int[Tensor, " L"] | None, rows: int, numbers: Sequence[int] | None
    ) -> None:
        width = -(-self.max_length // _POSITION_BINS)
        position_bin = None if positions is None else (positions // width).clamp_max(_POSITION_BINS - 1)[None, None]
        valid = result.valid.double()
        for ratio, name, bins in (
            (self.by_position, "selective_log_partition", position_bin),
            (self.by_visible, "entropy", _visible_bin(result.visible)),
        ):
            if name not in result.values or bins is None:
                continue
            values = torch.where(result.valid, result.values[name], 0.0).double()
            in_bin = torch.nn.functional.one_hot(bins, ratio.shape[0]).double()  # (B or 1, H or 1, L, bins)
            if in_bin.shape[1] == 1:  # the same bins for all heads: one matrix product
                totals = values @ in_bin[:, 0]
                counts = valid @ in_bin[:, 0]
            else:
                totals = (values[..., None] * in_bin).sum(2)
                counts = (valid[..., None] * in_bin).sum(2)
            ratio.update(*_in_main_memory(_by_item(totals.mT, rows), _by_item(counts.mT, rows)), numbers)

    def take_over(self, other: "AttentionStatistics") -> None:
        """`merge`, without a copy of the other's state."""
        parts = dict(other._parts())
        for name, part in self._parts():
            part.merge(parts[name])

    def of_heads(self, heads: slice) -> "AttentionStatistics":
        """What was summed for some heads; it shares its numbers with this one."""
        part = copy(self)
        part.heads = heads.stop - heads.start
        part.ratio = self.ratio.of_heads(heads)
        part.by_position = self.by_position.of_heads(heads)
        part.by_visible = self.by_visible.of_heads(heads)
        part.spreads = {name: spread.of_heads(heads) for name, spread in self.spreads.items()}
        part.histograms = {name: histogram.of_heads(heads) for name, histogram in self.histograms.items()}
        part.broken = self.broken.of_heads(heads)
        return part

    def bins(self) -> list[tuple[str, Ratio, int]]:
        """Name, running ratio and index of each bin."""
        width = -(-self.max_length // _POSITION_BINS)
        bins = [
            (f"selective_log_partition/position_{index * width}_{(index + 1) * width - 1}", self.by_position, index)
            for index in range(_POSITION_BINS)
        ]
        edges = [(1, 1), (2, 2), *((2**k + 1, 2 ** (k + 1)) for k in range(1, _VISIBLE_BINS - 1))]
        bins += [
            (f"entropy/visible_keys_{fewest}_{most}", self.by_visible, index)
            for index, (fewest, most) in enumerate(edges)
        ]
        return bins


def _visible_bin(visible: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """0 for one key, 1 for two, 2 for three or four, 3 for five to eight, …"""
    exponent = (visible.clamp_min(1).double()).log2().ceil().long()
    return exponent.clamp_max(_VISIBLE_BINS - 1)


def _in_main_memory(totals: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Both in main memory, by one transfer."""
    if totals.device.type == "cpu":
        return totals, counts
    totals, counts = torch.stack([totals, counts.expand_as(totals)]).cpu()
    return totals, counts


def _by_item(values: Tensor, rows: int) -> Tensor:
    """Add up the sequences that one item was cut into."""
    return values if values.shape[0] == rows else values.unflatten(0, (rows, -1)).sum(1)
