"""Groups that are measured head by head on the sampled windows, each statistic beside a control of its own.

A statistic is a function of a `HeadWindow`, one window of one attention site. It gives for each head a sum and what it is to
be divided by, so that the windows' sums make a mean with a standard error. Its control is the same function of another
window, which lacks the property in question.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.statistics.group import (
    CallTokens,
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    RunningRatio,
    rows_of,
)
from massieu.probing.statistics.query_means import Fence
from massieu.probing.statistics.registry import STATISTICS, measures
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import Units

QUERIES = 16
"""Of each sampled window, for what costs much."""
Sums = tuple[Float[Tensor, " H"], Float[Tensor, " H"]]
"""For each head a total, and what it is to be divided by; 0 where there is nothing."""


@dataclass(frozen=True, eq=False)
class HeadWindow:
    """One window at one attention site.

    Attributes:
        call: of this window alone.
        real: keys that are no padding.
        queries: sampled positions of queries that are no padding.
        seed: of what a statistic or a control draws, which belongs to the window.
        itself: the sequence attends to itself, so that a query and the key at its position are of one token.
        permuted: what belongs to a query is to be taken from another one, head by head.
    """

    call: AttentionCall
    real: Bool[Tensor, " N"]
    queries: Int[Tensor, " S"]
    seed: int
    itself: bool = True
    permuted: bool = False

    def few(self) -> "HeadWindow":
        """With the first `QUERIES` of the queries."""
        return replace(self, queries=self.queries[:QUERIES])

    def tokens(self, most: int) -> Int[Tensor, " T"]:
        """Positions of keys that are no padding, in order: all, or so many of them drawn at random."""
        places = self.real.nonzero()[:, 0]
        if len(places) <= most:
            return places
        drawn = torch.randperm(len(places), generator=self.generator())[:most].sort().values
        return places[drawn.to(places.device)]

    def generator(self) -> torch.Generator:
        """Anew the same random numbers."""
        return torch.Generator().manual_seed(self.seed)

    def of_heads(self, part: Float[Tensor, "1 Hk N E"]) -> Float[Tensor, "H N E"]:
        """Keys or values in float32, grouped ones repeated."""
        heads = self.call.query.shape[1]
        return part[0].float().repeat_interleave(heads // part.shape[1], 0)

    def weights(self) -> Float[Tensor, "H S N"]:
        """Attention of the sampled queries in float32, a learned sink's share left out; 0 where a query sees no key."""
        scores, weight = explicit_attention(self.call.at(self.queries))
        logits = (scores + weight)[0]
        return torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, torch.softmax(logits, -1))


Control = Callable[[HeadWindow], HeadWindow | None]
"""A window without the property; None where there is none."""


def other_heads_keys(window: HeadWindow) -> HeadWindow | None:
    """The queries of each head with the keys of the next; None where all heads have the same."""
    key = window.call.key
    return None if key.shape[1] < 2 else replace(window, call=replace(window.call, key=key.roll(1, dims=1)))


def shuffled_values(window: HeadWindow) -> HeadWindow:
    """Each key with the value of another, drawn at random among those that are no padding."""
    places = window.real.nonzero()[:, 0]
    order = torch.arange(len(window.real), device=places.device)
    order[places] = places[torch.randperm(len(places), generator=window.generator()).to(places.device)]
    return replace(window, call=replace(window.call, value=window.call.value[:, :, order]))


def shuffled_coordinates(window: HeadWindow) -> HeadWindow:
    """Keys whose coordinates along their principal axes are shuffled, each by itself, among the tokens.

    Mean and covariance stay, and each coordinate's law; what coordinates have to do with each other beyond that is gone.
    """
    places = window.real.nonzero()[:, 0]
    keys = window.call.key[0, :, places].double()
    mean = keys.mean(1, keepdim=True)
    left, sizes, right = torch.linalg.svd(keys - mean, full_matrices=False)
    order = torch.rand(left.shape, generator=window.generator()).argsort(1).to(left.device)
    moved = mean + (left.gather(1, order) * sizes[:, None]) @ right
    key = window.call.key.clone()
    key[0, :, places] = moved.to(key.dtype)
    return replace(window, call=replace(window.call, key=key))


def permuted_heads(window: HeadWindow) -> HeadWindow | None:
    """Each head with what another query gives it; None where there is one head."""
    return None if window.call.query.shape[1] < 2 else replace(window, permuted=True)


CONTROLS: dict[str, Control] = {
    "mismatched_keys": other_heads_keys,
    "shuffled_values": shuffled_values,
    "shuffled_coordinates": shuffled_coordinates,
    "permuted_heads": permuted_heads,
}
"""By the name that `Statistic.control` has."""


def own_control(name: str) -> str | None:
    """The control of a statistic that is another window; None where it has none, or the re-initialised model is its control."""
    control = STATISTICS[name].control
    return control if control in CONTROLS else None


class WindowStatistics(RunningParts):
    """Running means of one group at one site, each with its control."""

    def __init__(self, group: str, heads: int, units: Units) -> None:
        self.measures = measures(group)
        self.ratio = Ratio((2, len(self.measures), heads), units)

    def update(self, window: HeadWindow, numbers: Sequence[int] | None, fence: Fence = nullcontext) -> None:
        """Add a window.

        Args:
            numbers: its place among the sampled ones.
            fence: what fails inside costs the statistic of this name alone.
        """
        total = torch.zeros(1, *self.ratio.shape, dtype=torch.float64)
        count = torch.zeros_like(total)
        others: dict[str, HeadWindow | None] = {}
        for place, (name, measure) in enumerate(self.measures.items()):
            with fence(name):
                control = own_control(name)
                if control is not None and control not in others:
                    others[control] = CONTROLS[control](window)
                for row, given in enumerate((window, None if control is None else others[control])):
                    if given is not None:
                        total[0, row, place], count[0, row, place] = _finite(*measure(given))
        self.ratio.update(total, count, numbers)


PURPOSE = 100_000
"""Of random numbers; each site has its own, above it."""


class HeadWindowGroup(Group):
    """A group that is measured head by head on the sampled windows."""

    events = frozenset({Event.CALLS})

    def begin(self, model: ModelReading) -> None:
        """A running result for each site."""
        super().begin(model)
        self.sites = [WindowStatistics(self.name, info.heads, model.sampled_units) for info in model.sites]

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Measure each sampled window by itself."""
        if call.query.shape[0] != tokens.rows:  # sequences that are no items of the batch
            return
        info = tokens.info
        for window in tokens.sampled:
            drawn = window.drawn(PURPOSE + info.index)
            places = tokens.queries.real[window.row].nonzero()[:, 0]
            order = torch.randperm(len(places), generator=drawn)[: self.model.sampled_queries].sort().values
            asked = places[order.to(places.device)]
            part = call.rows(slice(window.row, window.row + 1))
            seen = HeadWindow(part, tokens.keys.real[window.row], asked, drawn.initial_seed(), info.itself)
            if len(seen.queries) and bool(seen.real.any()):
                self.sites[info.index].update(seen, window.numbers, self.fence)

    def ratios(self) -> Iterator[RunningRatio]:
        """The means."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            for place, name in enumerate(results.measures):
                yield RunningRatio(RowPlace.of_site(info), name, results.ratio, (0, place))

    def rows(self) -> Iterator[Row]:
        """The means, their halves, and those of the controls."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            place, parts = RowPlace.of_site(info), RatioParts(results.ratio)
            for index, name in enumerate(results.measures):
                yield from rows_of(place, name, parts, (0, index))
                control = own_control(name)
                if control is not None:
                    yield Row(place, name, control, parts.at((1, index)))


def _finite(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Without the heads whose numbers are not finite."""
    kept = total.isfinite() & count.isfinite()
    return (torch.where(kept, part, 0.0).double().cpu() for part in (total, count))  # pyright: ignore[reportReturnType]


def nothing(window: HeadWindow) -> Sums:
    """No number for any head."""
    zeros = torch.zeros(window.call.query.shape[1], dtype=torch.float64)
    return zeros, zeros


def mean_over_queries(values: Float[Tensor, "H S"]) -> Sums:
    """Sums of the finite values of each head, and how many there are."""
    kept = values.isfinite()
    return torch.where(kept, values, 0.0).sum(-1, dtype=torch.float64), kept.sum(-1).double()
