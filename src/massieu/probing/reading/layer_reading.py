"""The groups about layers while a text is read: what of each step of the stream they are given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.probing.capture.capture import Capture
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.reading import again
from massieu.probing.reading.feed_forward import FeedForwardStatistics, feed_forward_parts
from massieu.probing.reading.site_reading import SiteReading
from massieu.probing.statistics.climb import gradient, whole_update
from massieu.probing.statistics.flow import FlowStatistics
from massieu.probing.statistics.layer_groups import LayerGroup
from massieu.probing.statistics.registry import CLIMB, FEED_FORWARD, FLOW, RESIDUAL, TAP
from massieu.probing.statistics.regressions import Regressions, random_like
from massieu.probing.statistics.windowed import HeadWindow
from massieu.probing.stream.wiring import Step
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import Units

_PURPOSE = 200_000  # of random numbers, above those of the groups of heads


@dataclass(frozen=True, eq=False)
class SampledRow:
    """A sampled row of the batch, as the groups see it.

    Attributes:
        row: of the batch.
        number: its place among the sampled ones.
        positions: of tokens in a step's stream, at most so many; with ``cloud`` no two of the same token.
        drawn: random numbers that belong to the window and a purpose.
    """

    row: int
    number: int | None
    positions: Callable[[Step, bool], Int[Tensor, " S"]]
    drawn: Callable[[int], torch.Generator]


class LayerReading(RunningParts):
    """Running results of the groups that were named.

    Attributes:
        flow, residual, tap, feed_forward: None where they were not.
        again: those for which windows are run again.
        failed: groups that have no numbers, with the reason.
    """

    def __init__(self, groups: frozenset[str], units: Units, seed: int) -> None:
        self.units, self.seed = units, seed
        self.flow = FlowStatistics(units) if FLOW in groups else None
        self.residual = Regressions(RESIDUAL, units) if RESIDUAL in groups else None
        self.tap = Regressions(TAP, units) if TAP in groups else None
        self.again = again.begun(groups, units)
        self.feed_forward: FeedForwardStatistics | None = None
        self.failed: dict[str, str] = {}
        self._squares: dict[int, tuple[int | None, Tensor, Tensor]] = {}  # by row: layer, positions, Σ J²

    def find_feed_forward(self, model: nn.Module, sites: Sequence[SiteInfo], prepared: dict[str, Any]) -> None:
        """Find the model's feed-forward layers, on one item of a batch."""
        parts = feed_forward_parts(model, sites, prepared)
        if not parts:
            self.failed[FEED_FORWARD] = "no feed-forward layer was seen on the way of the stream"
        self.feed_forward = FeedForwardStatistics(parts, self.units, self.seed)

    def start(self) -> None:
        """A new batch begins."""
        self._squares.clear()

    def read(self, group: str, step: Step, rows: Sequence[SampledRow]) -> None:
        """Take what a group needs of a step, but for the residual's gradient and what is run again."""
        for each in rows:
            if group == FLOW and self.flow is not None:
                drawn = each.drawn(_PURPOSE + step.sublayer.index)
                self.flow.collect(step, each.row, each.positions(step, True), drawn, each.number)
            if group == FEED_FORWARD and self.feed_forward is not None:
                self.feed_forward.collect(step, each.row, each.positions(step, False), each.number)
            if group == TAP and self.tap is not None:
                self._read_reaction(self.tap, step, each)

    def read_gradient(self, capture: Capture, results: SiteReading, step: Step, rows: Sequence[SampledRow]) -> None:
        """Take the update of an attention step, and the gradient of its heads' log-partitions."""
        if self.residual is None:
            return
        for each in rows:
            item, positions = step.item(each.row), each.positions(step, False)
            assert item.read is not None
            replay = results.replay(capture, item, positions)
            if replay is None:
                if CLIMB in results.unavailable:
                    results.unavailable[RESIDUAL] = results.unavailable[CLIMB]
                continue
            stream = item.before[0, positions].double()
            update = whole_update(item.read, item)[0, positions].double()
            along = gradient(replay, positions)[0].double()
            drawn = each.drawn(_PURPOSE + step.sublayer.index)
            control = (update, random_like(stream, drawn), random_like(along, drawn))
            self.residual.collect(step.sublayer.index, each.number, (update, stream, along), control)

    def _read_reaction(self, tap: Regressions, step: Step, each: SampledRow) -> None:
        positions = each.positions(step, False)
        if step.read is not None and step.sublayer.kind == "attention":
            query = step.read.call.query
            if (query.shape[0], query.shape[2]) != step.before.shape[:2]:
                self.failed[TAP] = _OTHER_TOKENS
                return
            self._squares[each.row] = (step.sublayer.layer, positions, _squares(step, each.row, positions))
        known = self._squares.get(each.row)
        if step.sublayer.kind != "feed_forward" or known is None or known[0] != step.sublayer.layer:
            return
        if not len(positions) or not torch.equal(known[1], positions):
            return
        stream = step.before[each.row, positions].double()
        update = step.after[each.row, positions].double() - stream
        order = torch.randperm(len(positions), generator=each.drawn(_PURPOSE + step.sublayer.index))
        own, other = (stream * squares[:, None] for squares in (known[2], known[2][order.to(known[2].device)]))
        tap.collect(step.sublayer.index, each.number, (update, stream, own), (update, stream, other))

    def measure(self, group: str) -> None:
        """What of a group is measured once the text was read."""
        if group in self.again and not self.again[group].sublayers:
            self.failed[group] = self.again[group].failed or "no window had tokens enough"
        regressions = {RESIDUAL: self.residual, TAP: self.tap}.get(group)
        if regressions is not None:
            regressions.measure()
            if regressions.results:
                self.failed.pop(group, None)  # some layers may have numbers where others have none
            else:
                self.failed.setdefault(group, _NOTHING[group])
        if group == FEED_FORWARD and self.feed_forward is not None:
            self.feed_forward.measure()
            if self.feed_forward.failed and not self.feed_forward.results:
                self.failed[group] = next(iter(self.feed_forward.failed.values()))

    def groups(self) -> Iterator[LayerGroup]:
        """Those that were read."""
        yield from (each for each in (self.feed_forward, self.flow, self.residual, self.tap) if each is not None)
        yield from self.again.values()


_NOTHING = {
    RESIDUAL: "the queries of no attention site could be followed back to the stream",
    TAP: "no feed-forward step was seen after an attention step of the same layer",
}
_OTHER_TOKENS = "the queries are not the stream's tokens one for one, as where attention works in windows of an image"


def _squares(step: Step, row: int, positions: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Σ_j J_ij² at some positions, J the mean of the heads' weights."""
    assert step.read is not None
    call = step.read.item(row).call
    everything = torch.ones(call.key.shape[2], dtype=torch.bool, device=call.key.device)
    return HeadWindow(call, everything, positions, 0).weights().mean(0).square().sum(-1).double()
