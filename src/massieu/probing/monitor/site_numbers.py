"""Quantities of one attention site, as numbers that can be added up over batches and processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.nonfinite import kind_of
from massieu.probing.monitor.quantities import LARGEST
from massieu.probing.statistics.group import fenced
from massieu.probing.statistics.query_means import Functions, QueryResult, moments_read, query_statistics
from massieu.probing.statistics.query_reading import QueryReading

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class SiteNumbers:
    """Sums over the queries of one site, for each quantity and head.

    Attributes:
        place: the site's name in a record.
        module: the name of the attention module, which may have several sites.
        first_head: index of the first head among all heads of the site, where others are another process's.
        names: the quantities.
        totals, counts, largest: for each quantity (H,).
        broken: queries of each head whose numbers are not finite.
        first_nonfinite: which tensor is not finite, and with what, in words; None where all are.
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
    first_nonfinite: str | None = None
    limit: float = np.inf

    @property
    def heads(self) -> int:
        return self.totals.shape[1]

    def has(self, name: str) -> bool:
        """Whether the quantity has a meaning at the site, for some query."""
        if name not in self.names:
            return False
        return bool(self.counts[self.names.index(name)].any() or self.broken.any())

    def values(self, name: str) -> Array:
        """Each head's number: the largest over its queries for the quantity `LARGEST`, else their mean.

        NaN where a query's number is not finite, or there is none.
        """
        if name == LARGEST:
            return self.maxima(name)
        index = self.names.index(name)
        with np.errstate(invalid="ignore"):
            means = self.totals[index] / self.counts[index]
        return np.where(self._is_known(index), means, np.nan)

    def maxima(self, name: str) -> Array:
        """The largest over each head's queries; NaN as for `values`."""
        index = self.names.index(name)
        return np.where(self._is_known(index), self.largest[index], np.nan)

    def heads_beyond_limit(self) -> list[int]:
        """Heads whose largest logit the type of queries and keys cannot hold."""
        if not self.has(LARGEST):
            return []
        return np.flatnonzero(self.maxima(LARGEST) > self.limit).tolist()

    def broken_heads(self) -> list[int]:
        """Heads that have a query whose numbers are not finite."""
        return np.flatnonzero(self.broken).tolist()

    def _is_known(self, index: int) -> np.ndarray:
        return (self.counts[index] > 0) & (self.broken == 0)


@dataclass(eq=False)
class SiteAccumulator:
    """The sums of one site on their way: tensors on the model's device, read only once all sites are measured.

    Attributes:
        functions: what is measured, by name.
        failed: of the user's own functions, why one could not be computed.
        parts: of each call (Q + 1, 3, H): of every quantity the total, count and largest, and last the broken queries.
    """

    info: SiteInfo
    place: str
    first_head: int
    functions: Functions
    failed: dict[str, str] = field(default_factory=dict)
    parts: list[Tensor] = field(default_factory=list)
    first_nonfinite: str | None = None
    limit: float = np.inf

    def add(self, call: AttentionCall, queries: Tokens, keys: Tokens, positions: Tensor) -> None:
        """Add the queries of one call; of those that see a single key the logit alone, since all else of them is fixed."""
        to_itself = self.info.kind != "cross"
        reading = QueryReading(call, queries, keys, positions, to_itself, moments_read(self.functions))
        result = query_statistics(reading, self.functions, partial(fenced, self.failed))
        self.limit = torch.finfo(call.query.dtype).max
        rows = [self._sums_of(name, result, reading) for name in self.functions]
        broken = result.broken.sum((0, 2)).double()
        self.parts.append(torch.stack([*rows, broken.expand(3, -1)]))

    def _sums_of(self, name: str, result: QueryResult, reading: QueryReading) -> Tensor:
        """Total, count and largest of a quantity over the queries that count, (3, H); 0, 0 and −∞ where there is none."""
        values = result.values.get(name)
        if values is None:
            zeros = reading.log_partition.new_zeros(self.info.heads, dtype=torch.float64)
            return torch.stack([zeros, zeros, zeros - torch.inf])
        counted = reading.valid if name == LARGEST else reading.has_choice
        counted = counted & result.defined.get(name, counted)
        return torch.stack(
            [
                torch.where(counted, values, 0.0).sum((0, 2), dtype=torch.float64),
                counted.sum((0, 2), dtype=torch.float64),
                values.masked_fill(~counted, -torch.inf).amax((0, 2)).double(),
            ]
        )

    def note_nonfinite(self, call: AttentionCall) -> None:
        """Keep which tensor of the first such call is not finite."""
        if self.first_nonfinite is not None:
            return
        for name, tensor in (("queries", call.query), ("keys", call.key), ("values", call.value)):
            kind = kind_of(tensor)
            if kind is not None:
                self.first_nonfinite = f"{kind} in its {name}"
                return
        self.first_nonfinite = "scores that are not finite"

    def numbers(self) -> SiteNumbers:
        """The sums as arrays."""
        parts = torch.stack(self.parts).cpu().numpy()  # (calls, Q + 1, 3, H)
        of_quantities = parts[:, :-1]
        return SiteNumbers(
            place=self.place,
            module=self.info.site.module_name,
            layer=self.info.layer,
            first_head=self.first_head,
            names=tuple(self.functions),
            totals=of_quantities[:, :, 0].sum(0),
            counts=of_quantities[:, :, 1].sum(0),
            largest=of_quantities[:, :, 2].max(0),
            broken=parts[:, -1, 0].sum(0),
            first_nonfinite=self.first_nonfinite,
            limit=self.limit,
        )


def joined(parts: Sequence[SiteNumbers]) -> SiteNumbers:
    """The numbers of one site from those of several processes: other tokens of the same heads, or other heads."""
    shards: dict[int, SiteNumbers] = {}  # by the first head
    for part in parts:
        shard = shards.get(part.first_head)
        shards[part.first_head] = part if shard is None else _added(shard, part)
    ordered = [shards[first_head] for first_head in sorted(shards)]
    return replace(
        ordered[0],
        totals=np.concatenate([shard.totals for shard in ordered], axis=-1),
        counts=np.concatenate([shard.counts for shard in ordered], axis=-1),
        largest=np.concatenate([shard.largest for shard in ordered], axis=-1),
        broken=np.concatenate([shard.broken for shard in ordered], axis=-1),
        first_nonfinite=next((part.first_nonfinite for part in parts if part.first_nonfinite), None),
    )


def _added(one: SiteNumbers, other: SiteNumbers) -> SiteNumbers:
    """The numbers of the same heads over the tokens of both."""
    return replace(
        one,
        totals=one.totals + other.totals,
        counts=one.counts + other.counts,
        largest=np.maximum(one.largest, other.largest),
        broken=one.broken + other.broken,
    )
