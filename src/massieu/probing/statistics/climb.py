"""Does a head climb its own log Z? (claims S12, S25; experiment E2)

The head's keys are held fixed. Its query is moved along what the head wrote into the residual stream, or along the whole
attention update. Any change of log Z splits into a common part (all scores rise alike, attention unchanged) and a
selective part (attention sharpens or flattens); only the second is independent of the key origin. Slopes come from two
gradients per head, whole steps from replays. Controls: a random direction of the same length, and the writes of the other
heads of the layer.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.probing.capture.attention_call import GAP, AttentionCall
from massieu.probing.statistics.group import (
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    RunningRatio,
    SampledWindow,
    rows_of,
)
from massieu.probing.statistics.registry import CLIMB, SHIM, STATISTICS, Register
from massieu.probing.statistics.values import NUMBERS_PER_PIECE, writes_at
from massieu.probing.stream.replay import Replay, why_no_writes
from massieu.probing.stream.replays import why_no_replay
from massieu.probing.stream.wiring import AttentionRead, Step
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.significance import other_heads, two_sided_p
from massieu.probing.sums.units import Estimate, Units

CONTROL_SHARE = 8  # whole-step controls run on every eighth sampled query
_KEYS_HELD = "Keys and values are held fixed while the query moves; in the model they move too."
_MOVER_TITLES = {
    "own_write": "The head's own write",
    "update": "The whole attention update",
    "update_without_bias": "The attention update without output bias",
}
MOVERS = tuple(_MOVER_TITLES)
"""The vectors along which the query is moved."""


class _Slopes(NamedTuple):
    """Slopes of selective log Z and of the mean score along a step."""

    selective: Tensor
    common: Tensor


class _Changes(NamedTuple):
    """Changes of selective log Z, of the mean score and of raw log Z after a step."""

    selective: Tensor
    common: Tensor
    raw: Tensor


Part = Callable[[Any], Tensor]
"""A function of slopes or of changes."""
REGISTER = Register[Part](CLIMB)
_METADATA: dict[Part, dict[str, Any]] = {}
"""Arguments of `Register.statistic` for each part, before they are filled in for each mover."""


def _part(title: str, **metadata: Any) -> Callable[[Part], Part]:
    """Declare one part of the climb: a statistic for each mover, whose title replaces {who} and {step} in its texts."""

    def declare(part: Part) -> Part:
        caveat = None if "gauge_dependent" in metadata else _KEYS_HELD
        _METADATA[part] = {"caveat": caveat} | metadata | {"title": title}
        return part

    return declare


_selective = partial(_part, claim="S12, S25, E2", paper=SHIM)
_common = partial(_part, claim="S25", unit="nats", gauge_dependent=True)


def _positive(change: Tensor) -> Tensor:
    """1 where a change is positive, 0 where it is not, NaN where it is NaN."""
    return torch.where(change.isnan(), change, (change > 0).to(change))


@_selective(
    "{who} sharpens attention (share of queries)", formula="share with dS(r + εΔ)/dε > 0 at ε = 0", scale="share"
)
def sharpens(along: _Slopes) -> Tensor:
    """For what share of queries does an infinitesimal step along {step} sharpen the head's attention?"""
    return _positive(along.selective)


@_selective("{who}: selective slope", formula="dS(r + εΔ)/dε at ε = 0", unit="nats")
def slope_selective(along: _Slopes) -> Tensor:
    """How fast does selective log Z rise along the step?"""
    return along.selective


@_common("{who}: common slope", formula="d(Σ h_j s_j)/dε at ε = 0")
def slope_common(along: _Slopes) -> Tensor:
    """How fast does the step raise all scores by the same amount, which leaves attention unchanged?"""
    return along.common


@_selective(
    "{who} sharpens attention, whole step (share of queries)",
    formula="share with S(r + Δ) > S(r)",
    caveat="Compare with the control: where no norm or cap lies between stream and query, S is convex in r, and at least half "
    "of random steps sharpen; behind a norm that need not hold.",
    scale="share",
)
def step_sharpens(change: _Changes) -> Tensor:
    """For what share of queries does the whole step of {step} sharpen the head's attention?"""
    return _positive(change.selective)


@_selective("{who}: change of selective log Z", formula="S(r + Δ) − S(r)", unit="nats")
def step_selective(change: _Changes) -> Tensor:
    """Does {step} sharpen (+) or flatten (−) the head's own attention, and by how much?"""
    return change.selective


@_common("{who}: common change of the scores", formula="Σ h_j (s_j(r + Δ) − s_j(r))")
def step_common(change: _Changes) -> Tensor:
    """By how much does the step raise all scores equally, which leaves attention unchanged?"""
    return change.common


@_part(
    "{who}: change of raw log Z",
    formula="log Z(r + Δ) − log Z(r)",
    claim="S12, E2",
    paper=SHIM,
    unit="nats",
    gauge_dependent=True,
)
def step_log_partition(change: _Changes) -> Tensor:
    """By how much does the step raise the log-normaliser that the model computes?"""
    return change.raw


_SLOPES = {part.__name__: part for part in _METADATA if not part.__name__.startswith("step_")}
_STEPS = {part.__name__: part for part in _METADATA if part.__name__.startswith("step_")}
PARTS = (*_SLOPES, *_STEPS)
"""Names of the parts: those of slopes, then those of whole steps."""


def _register_for_every_mover() -> None:
    """Register each part once for each mover."""
    for mover, mover_title in _MOVER_TITLES.items():
        for part, metadata in _METADATA.items():
            register = REGISTER.statistic(
                **metadata | {"title": metadata["title"].format(who=mover_title)},
                name=f"{mover}_{part.__name__}",
                question=(part.__doc__ or "").format(step=mover_title.lower()),
                control="mismatched" if mover == "own_write" else "random",
                signed=True,
            )
            register(part)


_register_for_every_mover()
_PAIRED = ("sharpens", "slope_selective", "step_sharpens", "step_selective")
"""The parts for which every head's write is tried on every other head of the layer."""


_LEAST_EXPONENT = -87.0
"""exp of it, 10⁻³⁸, is nothing beside the largest key's 1; exp of −∞ itself takes processors ten times as long."""


def _exponentials(logits: Float[Tensor, "*S N"]) -> tuple[Float[Tensor, "*S N"], Float[Tensor, "*S 1"]]:
    """exp(logit − largest logit), written over the logits, and the largest logit of each row."""
    largest = logits.amax(-1, keepdim=True)
    # A row of −∞ alone keeps its −∞: it would be NaN.
    finite_largest = torch.where(largest.isneginf(), 0.0, largest)
    return logits.sub_(finite_largest).clamp_min_(_LEAST_EXPONENT).exp_(), largest


def _log_sum_exp(logits: Float[Tensor, "*S N"]) -> Float[Tensor, "*S"]:
    """log Σ exp(logit) of each row, in a third of the time of `torch.logsumexp`; the logits are overwritten."""
    exponentials, largest = _exponentials(logits)
    return exponentials.sum(-1).log_().add_(largest[..., 0])


@dataclass(frozen=True, eq=False)
class _Landscape:
    """log Z, its common and its selective part, as functions of a head's query; keys fixed.

    Attributes:
        key: about `centre`. Softmax cannot see the shift, and the difference of log Z and the mean score loses no digits.
        centre: mean of the keys; 0 under a soft cap, where centring would change the scores.
        log_weight: of the keys, additive; None where every key counts alike.
    """

    call: AttentionCall
    key: Float[Tensor, "B Hk N D"]
    centre: Float[Tensor, "B Hk 1 D"]
    log_weight: Tensor | None

    @classmethod
    def of(cls, call: AttentionCall) -> "_Landscape":
        centre = call.key.mean(2, keepdim=True)
        if call.softcap is not None:
            centre = torch.zeros_like(centre)
        log_weight = call.log_weight
        if log_weight is not None and log_weight.dtype == torch.bool:
            visible = log_weight
            log_weight = torch.zeros(visible.shape, dtype=call.key.dtype, device=visible.device)
            log_weight = log_weight.masked_fill(~visible, -torch.inf)
        return cls(call, call.key - centre, centre, log_weight)

    def scores(self, query: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S N"]:
        """Scores of the centred keys, after the soft cap."""
        scores = (self.call.scale * self._grouped(query) @ self.key[:, :, None].mT).flatten(1, 2)
        return scores if self.call.softcap is None else self.call.softcap * torch.tanh(scores / self.call.softcap)

    def _grouped(self, query: Float[Tensor, "B H S D"]) -> Float[Tensor, "B Hk G S D"]:
        """The query with its heads split into (key heads, query heads of each)."""
        return query.unflatten(1, (self.key.shape[1], -1))

    def log_weights_of(self, queries: Int[Tensor, " S"] | slice, copies: int) -> Tensor | None:
        """Log-weights of the keys for some of the call's queries, ``copies`` times in a row."""
        if self.log_weight is None:
            return None
        if self.log_weight.shape[2] == 1:  # the same for every query
            return self.log_weight
        selected = self.log_weight[:, :, queries]
        return selected if selected.shape[2] == 1 else selected.repeat(1, 1, copies, 1)

    def prior(self, log_weight: Tensor | None, like: Tensor) -> Tensor:
        """h_j, the normalised weights of the keys, in the shape of ``like``."""
        if log_weight is None:
            return torch.full_like(like, 1.0 / like.shape[-1])
        return torch.softmax(log_weight, -1).expand_as(like)

    @cached_property
    def mean_key(self) -> Float[Tensor, "B Hk G_or_1 S_or_1 D"]:
        """Mean of the centred keys under the normalised weights of each query of the call.

        Without a soft cap, the mean score of any query is its product with this mean key: no score is needed.
        """
        if self.log_weight is None:
            return self.key.mean(2, keepdim=True)[:, :, None]
        prior = torch.softmax(self.log_weight, -1)
        prior = prior[:, :, None] if prior.shape[1] == 1 else self._grouped(prior)
        return prior @ self.key[:, :, None]

    @cached_property
    def _sees_one_key(self) -> Bool[Tensor, "B_or_1 H_or_1 S_or_1"]:
        """Queries of the call whose selective part is the same wherever they are moved."""
        if self.log_weight is None:
            return torch.full((1, 1, 1), self.key.shape[2] == 1, device=self.key.device)
        # Some models write −10,000 or the like in place of −∞.
        near_largest = self.log_weight > self.log_weight.amax(-1, keepdim=True) - GAP
        return near_largest.sum(-1) == 1

    def _selective(self, log_partition: Tensor, mean_score: Tensor, queries: Tensor | slice, copies: int) -> Tensor:
        """log Z − mean score, and exactly 0 where a query sees one key, whose score is rounded in two ways."""
        selective = log_partition - mean_score
        constant = self._sees_one_key
        if constant.shape[2] > 1:
            constant = constant[:, :, queries].repeat(1, 1, copies)
        return torch.where(constant, 0 * selective, selective)  # NaN stays NaN

    def _mean_score(self, query: Float[Tensor, "B H S D"], queries: Int[Tensor, " S"] | slice, copies: int) -> Tensor:
        """The mean score of the centred keys at ``copies`` versions of the call's ``queries``; without a soft cap."""
        mean_key = self.mean_key
        if mean_key.shape[3] > 1:
            mean_key = mean_key[:, :, :, queries]
        versions = self._grouped(query).unflatten(3, (copies, -1))
        return self.call.scale * (versions * mean_key[:, :, :, None]).sum(-1).flatten(3).flatten(1, 2)

    def parts(
        self, query: Float[Tensor, "B H S D"], queries: Int[Tensor, " S"] | slice = slice(None), copies: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Selective part, common part and raw log Z at each query, up to constants of the query's row.

        Args:
            query: ``copies`` versions of the call's ``queries``, one after the other along the dimension of queries.
        """
        log_weight = self.log_weights_of(queries, copies)
        scores = self.scores(query)
        if self.call.softcap is None:
            mean_score = self._mean_score(query, queries, copies)
        else:
            mean_score = (self.prior(log_weight, scores) * scores).sum(-1)
        log_partition = _log_sum_exp(_with_log_weight(scores, log_weight)).to(query)
        return self._parts_from(query, log_partition, mean_score, queries, copies)

    def _parts_from(
        self,
        query: Float[Tensor, "B H S D"],
        log_partition: Tensor,
        mean_score: Tensor,
        queries: Int[Tensor, " S"] | slice,
        copies: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `parts` returns, from log Z and the mean score of the centred keys."""
        # What centring the keys took from every score of a query: scale · query · centre.
        shift = self.call.scale * (self._grouped(query) * self.centre[:, :, None]).sum(-1).flatten(1, 2)
        raw = log_partition + shift
        sink = self.call.sink_logits
        if sink is not None:
            sink = sink if sink.shape[2] == 1 else sink[:, :, queries].repeat(1, 1, copies)
            raw = torch.logaddexp(raw, sink.to(raw))
        return self._selective(log_partition, mean_score, queries, copies), mean_score + shift, raw

    def slopes(self, query: Float[Tensor, "B H S D"]) -> tuple[Tensor, Tensor]:
        """Gradients of the selective and of the common part with respect to the call's query."""
        return self.slopes_and_parts(query)[0]

    def slopes_and_parts(
        self, query: Float[Tensor, "B H S D"]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """`slopes` and `parts` at the call's query, from the same scores."""
        everything = slice(None)
        log_weight = self.log_weights_of(everything, 1)
        scores = self.scores(query)
        if self.call.softcap is not None:
            return self._capped_slopes(scores, log_weight), self.parts(query)
        exponentials, largest = _exponentials(_with_log_weight(scores, log_weight))
        total = exponentials.sum(-1, keepdim=True)
        log_partition = (total.log() + largest)[..., 0].to(query)
        mean_score = self._mean_score(query, everything, 1)
        # The gradient of log Z is the mean key under the attention, that of the mean score the mean key under the prior.
        attention = exponentials.div_(total).to(query)
        attended = self._grouped(attention) @ self.key[:, :, None]
        selective = self.call.scale * (attended - self.mean_key)
        common = self.call.scale * (self.mean_key + self.centre[:, :, None]).expand_as(attended)
        parts = self._parts_from(query, log_partition, mean_score, everything, 1)
        return (selective.flatten(1, 2), common.flatten(1, 2)), parts

    def _capped_slopes(self, scores: Float[Tensor, "B H S N"], log_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """`slopes` under a soft cap, where the mean score is no linear function of the query."""
        assert self.call.softcap is not None
        prior = self.prior(log_weight, scores)
        attention = torch.softmax(scores if log_weight is None else scores + log_weight, -1)
        # d tanh = 1 − tanh², and the capped score is softcap · tanh.
        factor = self.call.scale * (1 - (scores / self.call.softcap).square())

        def combine(weights: Tensor) -> Tensor:
            return (self._grouped(factor * weights) @ self.key[:, :, None]).flatten(1, 2)

        return combine(attention - prior), combine(prior)


def _with_log_weight(scores: Float[Tensor, "B H S N"], log_weight: Tensor | None) -> Float[Tensor, "B H S N"]:
    """Scores plus log-weights, written over the scores, in float32 at the least."""
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return logits if log_weight is None else logits.add_(log_weight)


class ClimbStatistics(RunningParts):
    """Running results of one site.

    Attributes:
        steps: entry (mover, part, head), movers in the order of `MOVERS`; a mover that is not defined stays uncounted.
        random: entry (mover, part, head) for a random direction of the length of the own write and of the update.
        pairs: entry (part, g, h): head g's write seen by head h.
    """

    def __init__(self, heads: int, units: Units) -> None:
        self.heads = heads
        self.steps = Ratio((len(MOVERS), len(PARTS), heads), units)
        self.random = Ratio((2, len(PARTS), heads), units)
        self.pairs = Ratio((len(_PAIRED), heads, heads), units)

    def take(self, pieces: Sequence["ClimbSums"], numbers: Sequence[int] | None = None) -> None:
        """Add what was measured on the pieces of one batch, which are together one row for each of its items.

        Args:
            numbers: where the rows stand in the text; see `Ratio.update`.
        """
        for name in ("steps", "random", "pairs"):
            sums = [piece[name] for piece in pieces if name in piece]
            if sums:
                totals, counts = zip(*sums, strict=True)
                getattr(self, name).update(torch.stack(totals).sum(0), torch.stack(counts).sum(0), numbers)

    def mismatched(self, part: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Mean and standard deviation over the other heads' writes, as each head sees them, and how many there are."""
        return other_heads(self.pairs.value()[_PAIRED.index(part)])


def paired(part: str) -> bool:
    """Whether the mismatched-heads control is measured for this part."""
    return part in _PAIRED


ClimbSums = dict[str, tuple[Tensor, Tensor]]
"""Totals and counts of a batch for the running results of a `ClimbStatistics`, by their names."""


def measure_climb(
    replay: Replay, step: Step, positions: Int[Tensor, " S"], generator: torch.Generator | None
) -> list[ClimbSums]:
    """The sums of all heads of an attention site at some positions of a batch, for a bounded number of positions at a time.

    Args:
        generator: of random directions, with which heads are compared; without one no controls are measured.
    """
    assert replay.read.residual is not None
    width = replay.read.call.query.shape[1] * len(replay.read.residual) * replay.read.residual.shape[-1]
    # A multiple of CONTROL_SHARE, so that the control queries do not depend on how the positions are split.
    positions_per_piece = max(NUMBERS_PER_PIECE // width // CONTROL_SHARE, 1) * CONTROL_SHARE
    first_control = first_control_query(len(positions))
    pieces = list(positions.split(positions_per_piece))
    if len(pieces) > 1 and len(pieces[-1]) <= first_control:
        pieces[-2:] = [torch.cat(pieces[-2:])]  # no piece is without a control query
    return [Climb(replay, step, piece, generator, first_control).sums() for piece in pieces]


def first_control_query(count: int) -> int:
    """The first of the control queries among so many: in the middle of the first eight, or of all if they are fewer.

    Positions are sorted, and in a causal window the first see few keys: beginning with the first would give the controls
    fewer keys on average than what they are compared with.
    """
    return max(min(CONTROL_SHARE, count) - 1, 0) // 2


def log_partition_gradient(replay: Replay, positions: Int[Tensor, " S"]) -> Float[Tensor, "B S D"]:
    """Gradient of the sum of the heads' log Z with respect to the stream, at some positions."""
    call = replay.read.call.at(positions)
    selective, common = replay.pulled_back(_Landscape.of(call).slopes(call.query), positions)
    return (selective + common).sum(0)


def attention_update(read: AttentionRead, step: Step) -> Float[Tensor, "B L D"]:
    """What attention adds to the stream, without the feed-forward part where both are added in one step."""
    if step.sublayer.kind == "attention_and_feed_forward" and read.update is not None:
        return read.update
    return step.after - step.before


class Climb:
    """Measures one attention site on some rows and positions of one batch, all heads together.

    Attributes:
        residual: the stream at the positions, (B, S, D).
        update: what attention adds to it.
        control_queries: indices, among the positions, of the queries on which controls run.
    """

    def __init__(
        self,
        replay: Replay,
        step: Step,
        positions: Int[Tensor, " S"],
        generator: torch.Generator | None,
        first_control: int,
    ) -> None:
        read = replay.read
        assert read.residual is not None
        self.replay = replay
        self.read = read
        self.positions = positions
        self.residual = read.residual[:, positions]
        self.call = read.call.at(positions)
        self.landscape = _Landscape.of(self.call)
        self.generator = generator
        self.update = attention_update(read, step)[:, positions]
        self.control_queries = torch.arange(len(positions), device=positions.device)[first_control::CONTROL_SHARE]

    def sums(self) -> ClimbSums:
        """What these positions add to the running results."""
        slopes_of_query, parts_before = self.landscape.slopes_and_parts(self.call.query)
        gradients = self.replay.pulled_back(slopes_of_query, self.positions)
        writes = writes_at(self.read, self.positions)

        # In the order of MOVERS. Without an output bias the last one would repeat the second.
        movers = [writes, self.update]
        if writes is not None and self.read.bias is not None:
            movers.append(writes.sum(0))
        slopes = [None if mover is None else _slope_parts(gradients, mover) for mover in movers]

        # Each mover's queries are one copy along the dimension of queries, so that all are scored in one call.
        moved = [] if writes is None else [self.replay.own_queries(self.residual + writes, self.positions)]
        moved += self._moved_queries(torch.stack(movers[1:]))
        parts_after = self.landscape.parts(torch.cat(moved, dim=2), slice(None), len(moved))
        steps = iter(_step_parts(parts_after, parts_before, len(moved)))
        rows = [None if slope is None else torch.cat([slope, next(steps)], dim=1) for slope in slopes]
        sums = {"steps": _summed(rows, len(MOVERS))}
        if self.generator is not None:
            sums |= self._controls(writes, gradients, parts_before)
        return sums

    def _controls(
        self, writes: Tensor | None, gradients: Sequence[Tensor], parts_before: tuple[Tensor, ...]
    ) -> ClimbSums:
        """Random directions, and what the other heads of the layer write, on the control queries."""
        queries = self.control_queries
        parts_before = tuple(part[:, :, queries] for part in parts_before)
        few_gradients = tuple(gradient[:, :, queries] for gradient in gradients)

        # One direction a token, in several lengths: the first copy as long as the update, the rest as each head's write.
        lengths = self.update[:, queries].norm(dim=-1)[None]
        if writes is not None:
            lengths = torch.cat([lengths, writes[:, :, queries].norm(dim=-1)])
        random = self._random_steps(lengths)

        # Copies of the queries: the random update, each head's random write, then every head's write for all heads.
        moved = [self._moved_queries(random[:1], queries)[0]]
        slopes = [_slope_parts(few_gradients, random[0])]
        if writes is not None:
            states = self.residual[:, queries] + random[1:]
            moved.append(self.replay.own_queries(states, self.positions[queries]))
            moved += self._moved_queries(writes[:, :, queries], queries)
            slopes.append(_slope_parts(few_gradients, random[1:]))
        parts_after = self.landscape.parts(torch.cat(moved, dim=2), queries, len(moved))
        steps = _step_parts(parts_after, parts_before, len(moved))

        rows = [torch.cat(pair, dim=1) for pair in zip(slopes, steps, strict=False)]  # the heads' writes have no slopes
        sums = {"random": _summed([None, *rows] if writes is None else rows[::-1])}
        if writes is not None:
            slope = torch.einsum("hbsd,gbsd->bghs", gradients[0], writes)
            sums["pairs"] = self._pairs(slope, torch.stack(steps[2:], 1))
        return sums

    def _pairs(self, slope: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Totals and counts of `_PAIRED`: entry (g, h) is of head g's write and head h's selective log Z.

        Args:
            slope: (B, G, H, S), at all queries.
            steps: (B, G, parts of `_STEPS`, H, control queries).
        """
        change = steps[:, :, list(_STEPS).index("step_selective")]
        slope_usable = slope.isfinite()
        change_usable = change.isfinite()
        slope = torch.where(slope_usable, slope, 0.0)
        change = torch.where(change_usable, change, 0.0)
        totals = torch.stack([(slope > 0).sum(-1), slope.sum(-1), (change > 0).sum(-1), change.sum(-1)], dim=1)
        counts = [slope_usable.sum(-1), slope_usable.sum(-1), change_usable.sum(-1), change_usable.sum(-1)]
        return totals.double(), torch.stack(counts, dim=1)

    def _random_steps(self, lengths: Float[Tensor, "C B S"]) -> Float[Tensor, "C B S D"]:
        """One random direction per control query, in each of these lengths."""
        # Drawn for every position, so that a query's direction does not depend on which others are control queries.
        direction = torch.randn(self.residual.shape, generator=self.generator).to(self.residual)
        direction = direction[:, self.control_queries]
        return direction / direction.norm(dim=-1, keepdim=True) * lengths[..., None]

    def _moved_queries(
        self, steps: Float[Tensor, "C B S D"], selected: Tensor | None = None
    ) -> Float[Tensor, "C B H S Dh"]:
        """Queries after each of C steps, which are at all positions or at the selected ones."""
        residual = self.residual
        positions = self.positions
        if selected is not None:
            residual = residual[:, selected]
            positions = positions[selected]
        states = (residual + steps).flatten(0, 1)
        return self.replay.queries(states, positions).unflatten(0, (steps.shape[0], -1))


def _along(gradient: Float[Tensor, "H B S D"], step: Float[Tensor, "*H B S D"]) -> Float[Tensor, "H B S"]:
    """Slope along a step that is each head's own (with a dimension of heads) or the same for all."""
    formula = "hbsd,bsd->hbs" if step.dim() < gradient.dim() else "hbsd,hbsd->hbs"
    return torch.einsum(formula, gradient, step)  # forms no array of products


def _slope_parts(gradients: Sequence[Tensor], step: Float[Tensor, "*H B S D"]) -> Float[Tensor, "B 3 H S"]:
    """Along a step: whether it sharpens, and the slopes of the selective and of the common part."""
    selective, common = (_along(gradient, step).transpose(0, 1) for gradient in gradients)
    return torch.stack([part(_Slopes(selective, common)) for part in _SLOPES.values()], dim=1)


def _step_parts(
    after: tuple[Tensor, ...], before: tuple[Tensor, ...], copies: int
) -> tuple[Float[Tensor, "B 4 H S"], ...]:
    """For each of several copies of the queries, the parts of the change."""
    changes = _Changes(
        *(moved.unflatten(2, (copies, -1)) - origin[:, :, None] for moved, origin in zip(after, before, strict=True))
    )
    return torch.stack([part(changes) for part in _STEPS.values()], dim=1).unbind(3)


def _summed(rows: Sequence[Float[Tensor, "B *parts S"] | None], most: int = 0) -> tuple[Tensor, Tensor]:
    """Totals and counts over the queries, (B, rows, *parts); rows that are None or missing up to ``most`` count 0."""
    like = next(row for row in rows if row is not None)
    filled = [torch.full_like(like, torch.nan) if row is None else row for row in rows]
    filled += [torch.full_like(like, torch.nan)] * (most - len(filled))
    values = torch.stack(filled, dim=1).double()
    usable = values.isfinite()
    return torch.where(usable, values, 0.0).sum(-1), usable.sum(-1)


PURPOSE = 3
"""Of the random numbers; each site has its own purpose, this number plus its index."""


class ClimbGroup(Group):
    """Slopes and steps of every head's log Z on the sampled windows.

    Attributes:
        sampled_queries: how many queries were sampled at the first site.
    """

    NOTES = (*Group.NOTES, "sampled_queries")
    name = CLIMB
    events = frozenset({Event.STEPS})

    def begin(self, model: ModelReading) -> None:
        """A running result for each site."""
        super().begin(model)
        self.sites = [ClimbStatistics(info.heads, model.sampled_units) for info in model.sites]
        self.sampled_queries = 0
        for info in model.sites:
            reason = why_no_replay(info)
            if reason is not None:
                self.missing(info.site.name, CLIMB, reason)

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Measure one attention step."""
        if step.read is None:
            return
        info = self.model.site(step.read.call)
        item = step.item(window.row)
        positions = window.positions(step)
        if not len(positions):
            return
        replay = window.replay(item, positions)
        if isinstance(replay, str):
            self.missing(info.site.name, CLIMB, replay)
            return
        reason = why_no_writes(replay.read)
        if reason is not None:
            self.missing(info.site.name, "own_write", reason)
        generator = None if self.model.is_draw else window.drawn(PURPOSE + info.index)
        self.sites[info.index].take(measure_climb(replay, item, positions, generator), window.numbers)
        if info.index == 0:
            self.sampled_queries += len(positions)

    def ratios(self) -> Iterator[RunningRatio]:
        """Steps and slopes."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
                yield RunningRatio(RowPlace.of_site(info), f"{mover}_{part}", results.steps, (kind, index))

    def rows(self) -> Iterator[Row]:
        """Steps and slopes, with those along random directions and along the other heads' writes."""
        for info, results in zip(self.model.sites, self.sites, strict=True):
            place = RowPlace.of_site(info)
            steps = RatioParts(results.steps)
            random = RatioParts(results.random)
            for (kind, mover), (index, part) in itertools.product(enumerate(MOVERS), enumerate(PARTS)):
                name = f"{mover}_{part}"
                estimate = steps.tested((kind, index))
                if self.model.is_draw:
                    yield Row(place, name, "", estimate)
                    continue
                yield from rows_of(place, name, steps, (kind, index))
                if not np.any(estimate.count > 0):
                    continue
                # Both updates are compared with one random direction, as long as the update with its bias.
                yield Row(place, name, "random", random.at((min(kind, 1), index)))
                if STATISTICS[name].control == "mismatched" and paired(part):
                    mean, deviation, number = results.mismatched(part)
                    heads = np.full(info.heads, number)
                    p = two_sided_p(estimate.value, estimate.standard_error, mean, deviation, heads, estimate.degrees)
                    yield Row(place, name, "mismatched", Estimate(mean, deviation, np.asarray(estimate.count)), p)
