"""What a head's attention looks like: log Z, entropy, weights and scores of every real query (claims S1, S8, S10, S25).

Each function is a statistic. It returns a number for each query (B, H, L), or a pair of these and of where they are defined,
or None where the statistic has no meaning. Its metadata stands above it; its docstring is the question that it answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.statistics.extremes import EXTREMES, PLACES, Extremes, update_extremes
from massieu.probing.statistics.group import (
    CallQueries,
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
from massieu.probing.statistics.query_means import AttentionStatistics, names_with_controls
from massieu.probing.statistics.query_reading import QueryMeasure, QueryReading
from massieu.probing.statistics.registry import ATTENTION, BAL, SHIM, Register
from massieu.probing.stream.replays import SCORES_ONLY
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Estimate

REGISTER = Register[QueryMeasure](ATTENTION)
_per_query = REGISTER.statistic
_of_scores = partial(_per_query, needs_scores=True)
_to_itself = partial(_per_query, claim="S12", caveat="It is defined for self-attention only.")


@_of_scores(
    "Selective log Z",
    formula="S = log Z − log Σw − Σ h_j s_j = KL(h‖p)",
    claim="S25",
    unit="nats",
    moments=("prior_log_partition", "prior_mean_score"),
)
def selective_log_partition(reading: QueryReading) -> Tensor:
    """How far is the attention from uniform over the visible keys?"""
    return reading.selective_log_partition()


@_per_query(
    "log Z (raw)",
    formula="log Z = log Σ w_j e^{s_j} (a learned sink's term included)",
    claim="S1, S3",
    paper=SHIM,
    unit="nats",
    gauge_dependent=True,
)
def log_partition(reading: QueryReading) -> Tensor:
    """What is the log-normaliser of the softmax, as the model computes it?"""
    raw = reading.raw_log_partition
    sink = reading.call.sink_logits
    return raw if sink is None else torch.logaddexp(raw, sink)


@_per_query(
    "Attention entropy",
    formula="H = −Σ p_j log p_j",
    claim="S8",
    paper=SHIM,
    caveat="Grows with the number of visible keys; compare heads by the fraction of log n.",
    unit="nats",
)
def entropy(reading: QueryReading) -> Tensor:
    """Over how many keys does the head spread its attention (the logarithm of their number)?"""
    return reading.moments.entropy


@_per_query("Entropy as a fraction of log n", formula="H / log n, for n ≥ 2 visible keys", claim="S8, N11", paper=SHIM)
def entropy_fraction(reading: QueryReading) -> tuple[Tensor, Tensor]:
    """How uniform is the attention, from 0 (one key) to 1 (all keys alike)?"""
    return reading.moments.entropy / reading.visible.clamp_min(2).log(), reading.visible >= 2


@_per_query("Effective number of keys", formula="e^H", claim="S19", paper=SHIM, unit="keys")
def effective_keys(reading: QueryReading) -> Tensor:
    """How many equally weighted keys would have the same entropy?"""
    return reading.moments.entropy.exp()


@_per_query(
    "Effective sample size",
    formula="1 / Σ p_j²",
    claim="S19",
    paper=SHIM,
    caveat="It is never larger than the effective number of keys.",
    unit="keys",
    moments=("collision",),
)
def effective_sample_size(reading: QueryReading) -> Tensor:
    """If the weights were importance weights, to how many independent draws would they be equivalent?"""
    return 1 / reading.moments.collision


@_per_query("Largest weight", formula="max_j p_j", claim="B5", paper=BAL, moments=("max_weight",))
def largest_weight(reading: QueryReading) -> Tensor:
    """How much of the attention goes to the key with the largest weight?"""
    return reading.moments.max_weight


@_of_scores(
    "Largest score above the mean score",
    formula="max_j s_j − Σ h_j s_j",
    claim="S25, N11",
    unit="nats",
    moments=("max_score", "prior_mean_score"),
)
def largest_score_above_mean(reading: QueryReading) -> Tensor:
    """How far is the largest score above the average score, before the softmax?"""
    return reading.max_score - reading.moments.prior_mean_score


@_of_scores(
    "Largest score (raw max logit)",
    formula="max_j β q·k_j, before log-weights and a soft cap",
    claim="N11",
    unit="nats",
    gauge_dependent=True,
    moments=("max_score",),
)
def largest_score(reading: QueryReading) -> Tensor:
    """How large is the largest attention logit, which training monitors watch?"""
    return reading.largest_logit


@_of_scores(
    "Variance of the scores",
    formula="Σ h_j (s_j − s̄)²",
    claim="S10, X2",
    unit="nats²",
    moments=("prior_score_variance",),
)
def score_variance(reading: QueryReading) -> Tensor:
    """How much do the scores of the visible keys differ?"""
    return reading.moments.prior_score_variance


@_of_scores(
    "Variance of the scores under the attention",
    formula="Σ p_j (s_j − E_p s)² = β² ∂²log Z/∂β²",
    claim="S10",
    paper=SHIM,
    caveat="It is zero both for uniform scores and for attention on one key.",
    unit="nats²",
    moments=("score_variance",),
)
def score_variance_attended(reading: QueryReading) -> Tensor:
    """How much do the scores of the attended keys differ (the Fisher information in the log of β)?"""
    return reading.moments.score_variance


@_per_query(
    "Weight on the first token",
    formula="p at the first real key of the document",
    claim="X4, N25",
    caveat="Weight on a token is not information from it: look at the norm of its value.",
)
def weight_first(reading: QueryReading) -> Tensor:
    """How much attention goes to the first token (the usual attention sink)?"""
    return reading.weight_at_first()


@_per_query(
    "Weight on special tokens",
    formula="Σ p over the tokenizer's special tokens",
    claim="X4, N25",
    caveat="Weight on a token is not information from it.",
)
def weight_special(reading: QueryReading) -> Tensor | None:
    """How much attention goes to special tokens such as [CLS] and [SEP]?"""
    return None if reading.keys.special is None else reading.weight_special()


@_to_itself("Weight on itself", formula="p at the query's own position")
def weight_diagonal(reading: QueryReading) -> Tensor | None:
    """How much does a token attend to itself?"""
    return reading.weight_before(0) if reading.itself else None


@_to_itself("Weight on the previous token", formula="p at the position before the query")
def weight_previous(reading: QueryReading) -> tuple[Tensor, Tensor] | None:
    """How much does a token attend to the token before it?"""
    if not reading.itself:
        return None
    positions = reading.positions
    has_previous = (positions > 0) & reading.keys.real[:, (positions - 1).clamp_min(0)]
    return reading.weight_before(1), has_previous[:, None]


@_per_query(
    "Weight on the learned sink",
    formula="e^b / (Z + e^b), b the head's sink logit",
    claim="X4",
    caveat="The other statistics describe the attention among keys, with the sink left out.",
    gauge_dependent=True,
)
def sink_weight(reading: QueryReading) -> Tensor | None:
    """How much attention goes to the model's own learned sink?"""
    sink = reading.call.sink_logits
    return None if sink is None else torch.sigmoid(sink - reading.raw_log_partition)


class JoinedSums:
    """What was summed for several sites at once, until each gets its part."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], AttentionStatistics] = {}

    def of(self, sites: tuple[int, ...], make: Callable[[], AttentionStatistics]) -> AttentionStatistics:
        """The sums of these sites together, which have these numbers."""
        if sites not in self._sums:
            self._sums[sites] = make()
        return self._sums[sites]

    def share_among(self, statistics: Sequence[AttentionStatistics]) -> None:
        """Add its part to each site's own, and begin anew."""
        for sites, sums in self._sums.items():
            start = 0
            for site in sites:
                stop = start + statistics[site].heads
                statistics[site].take_over(sums.of_heads(slice(start, stop)))
                start = stop
        self._sums.clear()


class AttentionGroup(Group):
    """The per-query statistics of every head: means over the text and its halves, spreads, bins, histograms, extremes."""

    name = ATTENTION
    events = frozenset({Event.CALLS, Event.QUERIES})
    takes_joined = True

    def begin(self, model: ModelReading) -> None:
        """A running result for each site."""
        # First of all, so that there is a state wherever this ends.
        self._joined = JoinedSums()
        self.sites: list[AttentionStatistics] = []
        super().begin(model)
        functions = model.query_functions
        self._names = names_with_controls(functions)
        self.sites = [self._statistics_of(info.heads) for info in model.sites]
        self.extremes = [] if model.is_draw else [Extremes(info.heads) for info in model.sites]
        of_scores = sorted(name for name, function in functions.items() if function.needs_scores)
        for info in model.sites:
            if info.grade == "scores":  # scores are known only together with log-weights
                for name in of_scores:
                    self.missing(info.site.name, name, SCORES_ONLY)

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Record where special tokens are not known."""
        unknown = tokens.queries.special is None or tokens.keys.special is None
        if unknown and self.model.wants(weight_special.__name__):
            reason = "the batches do not say which tokens are special"
            self.missing(tokens.info.site.name, weight_special.__name__, reason)

    def _statistics_of(self, heads: int) -> AttentionStatistics:
        return AttentionStatistics(self._names, heads, self.model.units, self.model.max_length)

    def on_queries(self, queries: CallQueries) -> None:
        """Add the numbers of a call's queries."""
        sites = queries.joined or (queries.info,)
        indices = tuple(info.index for info in sites)
        places = queries.places
        positions = None if places is None else places.positions
        if queries.joined:
            sums = self._joined.of(indices, lambda: self._statistics_of(sum(info.heads for info in sites)))
        else:
            sums = self.sites[queries.info.index]
        sums.update(queries.result, positions, queries.rows, queries.numbers)
        if self.extremes and places is not None and queries.call is not None:
            update_extremes([self.extremes[index] for index in indices], queries.result, queries.call, places)

    def finish(self) -> None:
        """Give each site its part of what was summed for several at once."""
        self._joined.share_among(self.sites)

    def state(self) -> State:
        """All that was summed, site by site."""
        self.finish()
        return super().state()

    def add(self, state: State) -> None:
        """Merge with another's sums."""
        self.finish()
        super().add(state)

    def restore(self, state: State) -> None:
        """Go on from other sums in place of one's own."""
        self._joined = JoinedSums()
        super().restore(state)

    def rows(self) -> Iterator[Row]:
        """Each statistic's mean, its halves and control, spreads, means in bins, and extremes."""
        self.finish()
        for info, results in zip(self.model.sites, self.sites, strict=True):
            place = RowPlace.of_site(info)
            parts = RatioParts(results.ratio)
            if self.model.is_draw:
                yield from (
                    Row(place, name, "", parts.at(index)) for index, name in enumerate(results.names) if "/" not in name
                )
                continue
            for index, name in enumerate(results.names):
                statistic_name, _, control = name.partition("/")
                if control:
                    yield Row(place, statistic_name, control, parts.at(index))
                else:
                    yield from rows_of(place, name, parts, index)
            for name, spread in results.spreads.items():
                value = spread.value()
                yield Row(place, name, "spread", Estimate(value, np.full_like(value, np.nan), spread.count()))
            yield from _bins(place, results)
            counts = dict(zip(results.names, parts.estimate.count, strict=True))
            yield from _extreme_rows(place, self.extremes[info.index], counts)

    def ratios(self) -> Iterator[RunningRatio]:
        """The means."""
        self.finish()
        for info, results in zip(self.model.sites, self.sites, strict=True):
            for index, name in enumerate(results.names):
                if "/" not in name:  # the means of controls are paired with nothing
                    yield RunningRatio(RowPlace.of_site(info), name, results.ratio, index)

    def nonfinite(self) -> Iterator[tuple[SiteInfo, int, int]]:
        """Site, head, and how many of its queries had scores that are not finite."""
        self.finish()
        for info, results in zip(self.model.sites, self.sites, strict=True):
            yield from ((info, head, int(count)) for head, count in enumerate(results.broken.counts) if count)

    def details(self) -> dict[str, Any]:
        """Histograms, and the places of each head's extremes."""
        self.finish()
        histograms: dict[str, Any] = {}
        for name, first in self.sites[0].histograms.items():
            counts = {str(index): results.histograms[name].counts.tolist() for index, results in enumerate(self.sites)}
            if self.measures(name):
                histograms[name] = {"edges": first.edges.round(6).tolist(), "counts": counts}
        return {"histograms": histograms, "extremes": list(self._extremes())}

    def _extremes(self) -> Iterator[dict[str, Any]]:
        for info, extremes in zip(self.model.sites, self.extremes, strict=True):
            for row, (name, end) in enumerate(EXTREMES):
                if not self.measures(name):
                    continue
                for head in np.nonzero(np.isfinite(extremes.best[row]))[0]:
                    place = dict(zip(PLACES, map(int, extremes.places[row, head]), strict=True))
                    yield {"site": info.site.name, "head": int(head), "statistic": f"{name}/{end}", **place}


def _bins(place: RowPlace, results: AttentionStatistics) -> Iterator[Row]:
    """Means in bins of position and of visible keys."""
    parts = {id(ratio): RatioParts(ratio) for ratio in (results.by_position, results.by_visible)}
    for name, ratio, index in results.bins():
        statistic_name, _, part = name.partition("/")
        yield Row(place, statistic_name, part, parts[id(ratio)].at(index))


def _extreme_rows(
    place: RowPlace, extremes: Extremes, counts: Mapping[str, Float64[np.ndarray, " heads"]]
) -> Iterator[Row]:
    """The largest and the smallest value of each statistic that has a count and is among `EXTREMES`."""
    for row, (name, end) in enumerate(EXTREMES):
        if name in counts:
            value = extremes.value(row)
            yield Row(place, name, end, Estimate(value, np.full_like(value, np.nan), counts[name]))
