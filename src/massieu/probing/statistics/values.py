"""How large is what a head reads at the first token, and what it writes? (claims X4, N25; experiment E3)"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics.group import (
    CallTokens,
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
from massieu.probing.statistics.registry import VALUES, Register
from massieu.probing.stream.replay import why_no_writes
from massieu.probing.stream.wiring import AttentionRead, Step
from massieu.probing.sums.accumulate import Ratio

OF_CALLS = Register[Callable[[AttentionCall, Tokens], tuple[Tensor, Tensor]]](VALUES)
OF_WRITES = Register[Callable[[Tensor, Tensor], Tensor]](VALUES)


@OF_CALLS.statistic(
    "Norm of the first token's value",
    formula="‖v_first‖ / mean ‖v_j‖",
    claim="X4, N25",
    caveat="A small norm makes the head a candidate no-op on that text, never a dead head.",
    scale="positive",
)
def first_value_norm_ratio(call: AttentionCall, keys: Tokens) -> tuple[Float[Tensor, "B H"], Bool[Tensor, "B H"]]:
    """How large is the first token's value vector, relative to the other tokens' values?"""
    norms = call.value.float().norm(dim=-1)  # (B, key heads, N)
    weight = keys.real[:, None].to(norms)
    mean = (norms * weight).sum(-1) / weight.sum(-1).clamp_min(1)
    # A row may hold several documents: the mean over their first tokens. Without any, 0/0 is NaN and does not count.
    begins = keys.begins()[:, None].to(norms)
    first = (norms * begins).sum(-1) / begins.sum(-1)
    # Grouped queries: every query head has its key head's ratio.
    ratio = (first / mean).repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
    return ratio, ratio.isfinite() & keys.real.any(-1)[:, None]


@OF_WRITES.statistic(
    "Norm of the head's write",
    formula="‖W_O,h o_h‖ / ‖r‖",
    claim="E3",
    caveat="A large write need not matter to later layers, and a small one may.",
    scale="positive",
)
def write_norm_ratio(writes: Float[Tensor, "H B S D"], residual: Float[Tensor, "B S D"]) -> Float[Tensor, "B H S"]:
    """How large is the vector that the head adds, relative to the residual stream?"""
    return (writes.norm(dim=-1) / residual.norm(dim=-1).clamp_min(1e-30)).transpose(0, 1)


NUMBERS_PER_PIECE = 2**21
"""Numbers in the writes of all heads at the queries that are measured at a time."""


def writes_at(read: AttentionRead, positions: Int[Tensor, " S"]) -> Float[Tensor, "H B S D"] | None:
    """What each head adds to the stream at some positions; None where that is not a sum over heads."""
    if read.projection is None or why_no_writes(read) is not None:
        return None
    output = read.call.at(positions).output  # (B, S, H, Dv)
    weight = read.projection.unflatten(1, (output.shape[2], -1))  # (D, H, Dv)
    return torch.einsum("bshv,dhv->hbsd", output, weight)


class ValuesGroup(Group):
    """Norms of values, at every token, and of the heads' writes, on the sampled windows."""

    NOTES = (*Group.NOTES, "sampled_queries")
    name = VALUES
    events = frozenset({Event.CALLS, Event.STEPS})

    def begin(self, model: ModelReading) -> None:
        """Running results for each site."""
        super().begin(model)
        self.first_value = [Ratio((1, info.heads), model.units) for info in model.sites]
        self.write_norm = [Ratio((1, info.heads), model.sampled_units) for info in model.sites]
        self.sampled_queries = 0
        for info in model.sites:
            if info.value_sets > 1:
                reason = f"the same attention weights are applied to {info.value_sets} sets of values"
                self.missing(info.site.name, VALUES, reason)
            elif info.value_size == 0:
                self.missing(info.site.name, VALUES, "the layout of its values is not known")

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """The norm of the first token's value relative to the others', in each row."""
        name = first_value_norm_ratio.__name__
        if self.is_missing(tokens.info.site.name, VALUES) or not self.measures(name):
            return
        with self.fence(name):
            ratio, usable = first_value_norm_ratio(call, tokens.keys)
            # A model may cut each item into several sequences: they are added up. If the sequences cannot be divided among
            # the items, they are one row together.
            rows = 1 if ratio.shape[0] % tokens.rows else tokens.rows
            pair = torch.stack([torch.where(usable, ratio, 0.0), usable]).double()
            total, count = pair.reshape(2, rows, -1, ratio.shape[1]).sum(2, keepdim=True)
            numbers = None if tokens.numbers is None else tokens.numbers[:rows]
            self.first_value[tokens.info.index].update(total, count, numbers)

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """The norm of each head's write relative to the stream's."""
        name = write_norm_ratio.__name__
        if step.read is None or not self.measures(name):
            return
        with self.fence(name):
            self._read_writes(step.item(window.row), window.positions(step), window)

    def _read_writes(self, item: Step, positions: Int[Tensor, " S"], window: SampledWindow) -> None:
        read = item.read
        assert read is not None
        if read.residual is None or not len(positions):
            return
        width = read.call.query.shape[1] * len(read.residual) * read.residual.shape[-1]
        totals: list[Tensor] = []
        counts: list[Tensor] = []
        for piece in positions.split(max(NUMBERS_PER_PIECE // width, 1)):
            writes = writes_at(read, piece)
            if writes is None:
                self.missing(read.call.site.name, write_norm_ratio.__name__, why_no_writes(read) or "")
                return
            ratios = write_norm_ratio(writes, read.residual[:, piece]).double()
            usable = ratios.isfinite()
            totals.append(torch.where(usable, ratios, 0.0).sum(-1))
            counts.append(usable.sum(-1))
        index = self.model.site(read.call).index
        self.write_norm[index].update(
            torch.stack(totals).sum(0)[:, None], torch.stack(counts).sum(0)[:, None], window.numbers
        )
        if index == 0:
            self.sampled_queries += len(positions)

    def ratios(self) -> Iterator[RunningRatio]:
        """The norm of the first token's value, and that of the heads' writes."""
        for info in self.model.sites:
            place = RowPlace.of_site(info)
            yield RunningRatio(place, first_value_norm_ratio.__name__, self.first_value[info.index], 0)
            yield RunningRatio(place, write_norm_ratio.__name__, self.write_norm[info.index], 0)

    def rows(self) -> Iterator[Row]:
        """Both statistics, and their halves."""
        for place, name, ratio, index in self.ratios():
            yield from rows_of(place, name, RatioParts(ratio), index)
