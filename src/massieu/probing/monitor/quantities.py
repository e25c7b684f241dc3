"""What a monitor measures of each attention call and of the stream, as numbers that can be added up over processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.errors import InputError
from massieu.population import observables
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.nonfinite import kind_of
from massieu.probing.model.precision import ONE_POINT_RANK, Cloud, is_one_point
from massieu.probing.statistics import attention as of_query
from massieu.probing.statistics.catalogue import Named, Selection
from massieu.probing.statistics.group import fenced
from massieu.probing.statistics.query_means import Functions, QueryFunction, QueryResult, moments_read, query_statistics
from massieu.probing.statistics.query_reading import QueryMeasure, QueryReading
from massieu.probing.statistics.registry import moments_of

Array = np.ndarray[Any, np.dtype[np.float64]]
QUANTITIES: dict[str, QueryMeasure] = {
    "selective_log_partition": of_query.selective_log_partition,
    "largest_logit": of_query.largest_score,
    "largest_logit_above_mean": of_query.largest_score_above_mean,
    "entropy": of_query.entropy,
    "entropy_fraction": of_query.entropy_fraction,
    "weight_first": of_query.weight_first,
    "sink_weight": of_query.sink_weight,
}
"""Each quantity's function, a statistic of the probe. A head's number is its mean over the queries, but for `LARGEST`."""
LARGEST = "largest_logit"
"""Of this quantity a head's number is the largest over its queries, those that see a single key too."""
SPLIT = ("selective_log_partition", "largest_logit", "largest_logit_above_mean")
"""They have no meaning where scores are known, but not apart from log-weights."""
STREAM = ("effective_rank", "spread")


def quantities(more: Iterable[Named] | None) -> Functions:
    """What is measured of each attention call, by name: `QUANTITIES`, and what the user asks for beside them.

    Args:
        more: names of the attention's statistics, and functions of the user's own.

    Raises:
        InputError: one is no statistic of queries.
    """
    own = {
        name: QueryFunction(measure, moments_of([measure.__name__]), name in SPLIT)
        for name, measure in QUANTITIES.items()
    }
    if more is None:
        return own
    selection = Selection.of(more)
    if others := selection.others():
        raise InputError(
            f"a monitor measures statistics of queries, and {', '.join(sorted(others))} is none; massieu.probe measures it"
        )
    if taken := sorted(selection.catalogue.own.keys() & {*QUANTITIES, *STREAM}):
        raise InputError(f"{taken[0]} is the name of one of the monitor's own quantities; give another one by name=")
    known = selection.catalogue.query_functions
    return own | {name: replace(each, control=None) for name, each in known.items() if name in selection.names - {*own}}


@dataclass(eq=False)
class SiteNumbers:
    """Sums over the queries of one site, for each quantity and head.

    Attributes:
        place: the site's name in a record.
        module: the name of the attention module, which may have several sites.
        first_head: index of the first head among all heads of the site, where others are another process's.
        totals, counts, largest: for each quantity (H,).
        broken: queries of each head whose numbers are not finite.
        what: which tensor is not finite, where one is.
        limit: the largest number of the type that queries and keys have.
    """

    place: str
    module: str
    layer: int
    first_head: int
    names: tuple[str, ...]
    totals: Array
    counts: Array
    largest: Array
    broken: Array
    what: str | None = None
    limit: float = np.inf

    @property
    def heads(self) -> int:
        return self.totals.shape[1]

    def has(self, name: str) -> bool:
        """Whether the quantity has a meaning at the site, for some query."""
        return name in self.names and bool(self.counts[self.names.index(name)].any() or self.broken.any())

    def means(self, name: str) -> Array:
        """What each head's number is; NaN where a query's is not finite, or there is none."""
        index = self.names.index(name)
        with np.errstate(invalid="ignore"):
            found = self.largest[index] if name == LARGEST else self.totals[index] / self.counts[index]
        return np.where((self.counts[index] > 0) & (self.broken == 0), found, np.nan)

    def beyond(self) -> list[int]:
        """Heads whose largest logit the type of queries and keys cannot hold."""
        if not self.has(LARGEST):
            return []
        return np.flatnonzero(self.means(LARGEST) > self.limit).tolist()

    def maxima(self, name: str) -> Array:
        """The largest over each head's queries."""
        index = self.names.index(name)
        return np.where((self.counts[index] > 0) & (self.broken == 0), self.largest[index], np.nan)


@dataclass(eq=False)
class Sums:
    """The sums of one site on their way: tensors on the model's device, read only once all sites are measured.

    Attributes:
        functions: what is measured, by name.
        failed: of the user's own functions, why one could not be computed.
    """

    info: SiteInfo
    place: str
    first_head: int
    functions: Functions
    failed: dict[str, str] = field(default_factory=dict)
    parts: list[Tensor] = field(default_factory=list)
    what: str | None = None
    limit: float = np.inf

    def add(self, call: AttentionCall, queries: Tokens, keys: Tokens, positions: Tensor) -> None:
        """Add the queries of one call; of those that see a single key the logit alone, since all else of them is fixed."""
        itself = self.info.kind != "cross"
        reading = QueryReading(call, queries, keys, positions, itself, moments_read(self.functions))
        found = query_statistics(reading, self.functions, partial(fenced, self.failed))
        broken = found.broken.sum((0, 2))
        self.limit = torch.finfo(call.query.dtype).max
        rows = [self._summed(name, found, reading) for name in self.functions]
        self.parts.append(torch.stack([*rows, broken.double().expand(3, -1)]))

    def _summed(self, name: str, found: QueryResult, reading: QueryReading) -> Tensor:
        """Of each head the sum over the queries that count, their number, and the largest; nothing where there is none."""
        values = found.values.get(name)
        if values is None:
            nothing = reading.log_partition.new_zeros(self.info.heads, dtype=torch.float64)
            return torch.stack([nothing, nothing, nothing - torch.inf])
        counted = reading.valid if name == LARGEST else reading.has_choice
        counted = counted & found.defined.get(name, counted)
        return torch.stack(
            [
                torch.where(counted, values, 0.0).sum((0, 2), dtype=torch.float64),
                counted.sum((0, 2), dtype=torch.float64),
                values.masked_fill(~counted, -torch.inf).amax((0, 2)).double(),
            ]
        )

    def look_for_trouble(self, call: AttentionCall) -> None:
        """Which tensor of a call is not finite."""
        parts = {"queries": call.query, "keys": call.key, "values": call.value}
        found = [f"{kind_of(tensor)} in its {name}" for name, tensor in parts.items() if kind_of(tensor)]
        self.what = self.what or (found[0] if found else "scores that are not finite")

    def numbers(self) -> SiteNumbers:
        """The sums as arrays."""
        parts = torch.stack(self.parts).cpu().numpy()
        quantities, broken = parts[:, :-1], parts[:, -1, 0].sum(0)
        totals, counts, largest = quantities[:, :, 0].sum(0), quantities[:, :, 1].sum(0), quantities[:, :, 2].max(0)
        names = tuple(self.functions)
        where = (self.place, self.info.site.module_name, self.info.layer, self.first_head, names)
        return SiteNumbers(*where, totals, counts, largest, broken, self.what, self.limit)


def joined(parts: Sequence[SiteNumbers]) -> SiteNumbers:
    """The numbers of one site from those of several processes: other tokens of the same heads, or other heads."""
    shards: dict[int, SiteNumbers] = {}
    for part in parts:
        known = shards.get(part.first_head)
        shards[part.first_head] = part if known is None else _added(known, part)
    ordered = [shards[first] for first in sorted(shards)]

    def beside(name: str) -> Array:
        return np.concatenate([getattr(part, name) for part in ordered], axis=-1)

    what = next((part.what for part in parts if part.what), None)
    arrays = {name: beside(name) for name in ("totals", "counts", "largest", "broken")}
    return replace(ordered[0], **arrays, what=what)


def _added(one: SiteNumbers, other: SiteNumbers) -> SiteNumbers:
    summed = {name: getattr(one, name) + getattr(other, name) for name in ("totals", "counts", "broken")}
    return replace(one, **summed, largest=np.maximum(one.largest, other.largest))


@dataclass(frozen=True)
class StreamNumbers:
    """Sums over the clouds behind one layer.

    Attributes:
        totals: of effective rank and of spread, the mean pairwise distance; as `STREAM` names them.
        clouds: how many they are of.
        collapsed: how many of these are one point up to rounding.
        extreme, tokens: how many tokens have an extreme activation, of how many; none where that is not asked for.
    """

    totals: tuple[float, float] = (0.0, 0.0)
    clouds: int = 0
    collapsed: int = 0
    extreme: int = 0
    tokens: int = 0

    def __add__(self, other: "StreamNumbers") -> "StreamNumbers":
        totals = (self.totals[0] + other.totals[0], self.totals[1] + other.totals[1])
        return StreamNumbers(
            totals,
            self.clouds + other.clouds,
            self.collapsed + other.collapsed,
            self.extreme + other.extreme,
            self.tokens + other.tokens,
        )

    def means(self) -> dict[str, float]:
        """By name, over the clouds, or over the tokens."""
        values: dict[str, float] = {}
        if self.clouds:
            values |= {name: total / self.clouds for name, total in zip(STREAM, self.totals, strict=True)}
        if self.tokens:
            values["extreme_activations"] = self.extreme / self.tokens
        return values


def stream_numbers(clouds: Sequence[Cloud]) -> StreamNumbers:
    """The numbers of some clouds."""
    numbers = StreamNumbers()
    for cloud in clouds:
        points = cloud.points.double().cpu()
        collapsed = bool(is_one_point(points, cloud.dtype))
        if collapsed:
            rank = ONE_POINT_RANK
        elif bool(points.isfinite().all()):
            rank = float(observables.effective_rank(observables.covariance_spectrum(points)))
        else:
            rank = np.nan
        numbers += StreamNumbers((rank, float(observables.pairwise_distance(points))), 1, int(collapsed))
    return numbers
