"""Does a head climb its own log Z? (claims S12, S25; experiment E2)

The head's keys are frozen; its query is moved along what the head wrote into the residual stream, or along the whole
attention update. Any change of log Z splits into a common part (all scores rise alike, attention unchanged) and a
selective part (attention sharpens or flattens); only the second is free of the choice of the key origin. Slopes come
from two gradients per head, whole steps from replays. Controls: a random direction of the same length, and the writes
of the other heads of the layer.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.accumulate import Ratio, Units
from massieu.probing.capture import AttentionCall
from massieu.probing.inference import other_heads
from massieu.probing.replay import Replay
from massieu.probing.wiring import AttentionRead, Step

_SLOPES = ("sharpens", "slope_selective", "slope_common")
_STEPS = ("step_sharpens", "step_selective", "step_common", "step_log_partition")
PARTS = (*_SLOPES, *_STEPS)
_PAIRED = ("sharpens", "slope_selective", "step_sharpens", "step_selective")
CONTROL_SHARE = 4  # whole-step controls run on every fourth sampled query


@dataclass(frozen=True, eq=False)
class _Landscape:
    """log Z, its common and its selective part, as functions of a head's query; keys frozen, centred on their mean."""

    call: AttentionCall
    key: Float[Tensor, "B Hk N D"]
    centre: Float[Tensor, "B Hk 1 D"]
    log_weight: Tensor | None

    @classmethod
    def of(cls, call: AttentionCall) -> "_Landscape":
        centre = call.key.mean(2, keepdim=True)
        if call.softcap is not None:
            centre = torch.zeros_like(centre)
        weight = call.log_weight
        if weight is not None and weight.dtype == torch.bool:
            weight = torch.zeros(weight.shape, dtype=call.key.dtype, device=weight.device).masked_fill(
                ~weight, -torch.inf
            )
        return cls(call, call.key - centre, centre, weight)

    def scores(self, query: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S N"]:
        grouped = query.unflatten(1, (self.key.shape[1], -1))
        scores = (self.call.scale * grouped @ self.key[:, :, None].mT).flatten(1, 2)
        return scores if self.call.softcap is None else self.call.softcap * torch.tanh(scores / self.call.softcap)

    def weights_of(self, queries: Int[Tensor, " S"] | slice, copies: int) -> Tensor | None:
        """Log-weights of the keys for some of the call's queries, ``copies`` times in a row."""
        if self.log_weight is None:
            return None
        chosen = self.log_weight if self.log_weight.shape[2] == 1 else self.log_weight[:, :, queries]
        return chosen if chosen.shape[2] == 1 else chosen.repeat(1, 1, copies, 1)

    def prior(self, weight: Tensor | None, like: Tensor) -> Tensor:
        """h_j, the normalised weights of the keys."""
        if weight is None:
            return torch.full_like(like, 1.0 / like.shape[-1])
        return torch.softmax(weight, -1).expand_as(like)

    def parts(
        self, query: Float[Tensor, "B H S D"], queries: Int[Tensor, " S"] | slice = slice(None), copies: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Selective part, common part and raw log Z (up to constants of the query's row) at each query."""
        weight = self.weights_of(queries, copies)
        scores = self.scores(query)
        if weight is None:
            log_z, common = torch.logsumexp(scores, -1), scores.mean(-1)
        else:
            log_z = torch.logsumexp(scores + weight, -1)
            common = (self.prior(weight, scores) * scores).sum(-1)
        grouped = query.unflatten(1, (self.key.shape[1], -1))
        shift = self.call.scale * (grouped * self.centre[:, :, None]).sum(-1).flatten(1, 2)
        raw = log_z + shift
        if self.call.sink is not None:
            raw = torch.logaddexp(raw, self.call.sink[None, :, None].to(raw))
        return log_z - common, common + shift, raw

    def slopes(self, query: Float[Tensor, "B H S D"]) -> tuple[Tensor, Tensor]:
        """Gradients of the selective and of the common part with respect to the query."""
        scores = self.scores(query)
        weight = self.weights_of(slice(None), 1)
        prior = self.prior(weight, scores)
        attention = torch.softmax(scores if weight is None else scores + weight, -1)
        factor = self.call.scale
        if self.call.softcap is not None:
            factor = factor * (1 - (scores / self.call.softcap).square())

        def combine(weights: Tensor) -> Tensor:
            grouped = (factor * weights).unflatten(1, (self.key.shape[1], -1))
            return (grouped @ self.key[:, :, None]).flatten(1, 2)

        shift = self.call.scale * self.centre.repeat_interleave(query.shape[1] // self.key.shape[1], 1)
        return combine(attention - prior), combine(prior) + shift


@dataclass(eq=False)
class ClimbStatistics:
    """Running results of one site.

    Attributes:
        own: the head's own write, (parts, heads); None entries stay uncounted where the write is not defined.
        own_random: a random direction of the own write's length.
        pairs: entry (part, g, h): head g's write seen by head h.
        update, update_random, update_without_bias: the whole attention update.
        write_norm: ‖write‖/‖r‖.
        queries: how many queries were sampled.
    """

    heads: int
    units: Units
    queries: int = 0
    own: Ratio = field(init=False)
    own_random: Ratio = field(init=False)
    pairs: Ratio = field(init=False)
    update: Ratio = field(init=False)
    update_random: Ratio = field(init=False)
    update_without_bias: Ratio = field(init=False)
    write_norm: Ratio = field(init=False)

    def __post_init__(self) -> None:
        for name in ("own", "own_random", "update", "update_random", "update_without_bias"):
            setattr(self, name, Ratio((len(PARTS), self.heads), self.units))
        self.pairs = Ratio((len(_PAIRED), self.heads, self.heads), self.units)
        self.write_norm = Ratio((1, self.heads), self.units)

    def mismatched(self, part: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Mean and standard deviation over the other heads' writes, as each head sees them, and how many there are."""
        return other_heads(self.pairs.value()[_PAIRED.index(part)])


def paired(part: str) -> bool:
    """Whether the mismatched-heads control is measured for this part."""
    return part in _PAIRED


class Climb:
    """Measures one attention site on some rows and positions of one batch."""

    def __init__(self, replay: Replay, step: Step, positions: Int[Tensor, " S"], generator: torch.Generator) -> None:
        read = replay.read
        assert read.residual is not None
        self.replay = replay
        self.read = read
        self.positions = positions
        self.residual = read.residual[:, positions]
        self.call = read.call.at(positions)
        self.landscape = _Landscape.of(self.call)
        self.generator = generator
        self.whole = self._whole_update(read, step)[:, positions]
        self.control = torch.arange(0, len(positions), CONTROL_SHARE, device=positions.device)

    @staticmethod
    def _whole_update(read: AttentionRead, step: Step) -> Tensor:
        if step.sublayer.kind == "attention_and_feed_forward" and read.update is not None:
            return read.update
        return step.after - step.before

    def writes(self) -> Float[Tensor, "H B S D"] | None:
        """What each head adds to the stream; None where that is not a sum over heads."""
        if self.read.projection is None or not self.read.writes_linearly:
            return None
        output = self.call.output  # B S H Dv
        weight = self.read.projection.unflatten(1, (output.shape[2], -1))  # D H Dv
        return torch.einsum("bshv,dhv->hbsd", output, weight)

    def measure(self, into: ClimbStatistics, valid: Tensor) -> None:
        """Add this batch to the running results; ``valid`` (B, S) leaves padding out."""
        gradients = self._gradients()
        base = self.landscape.parts(self.call.query)
        writes = self.writes()
        into.queries += int(valid.sum())
        if writes is not None:
            self._own(into, writes, gradients, base, valid)
        self._whole(into, self.whole, into.update, gradients, base, valid)
        if writes is not None and self.read.bias is not None:
            self._whole(into, writes.sum(0), into.update_without_bias, gradients, base, valid)
        randomised = self._random(self.whole[None])[0]
        self._whole(into, randomised, into.update_random, gradients, base, valid, self.control)

    def _gradients(self) -> tuple[Float[Tensor, "H B S D"], Float[Tensor, "H B S D"]]:
        """Gradients of each head's selective and common part with respect to the residual stream."""
        selective, common = self.replay.pulled_back(self.landscape.slopes(self.call.query), self.positions)
        return selective, common

    def _random(self, like: Float[Tensor, "C B S D"]) -> Float[Tensor, "C B S D"]:
        """One random direction per token, as long as each of ``like``."""
        direction = torch.randn(like.shape[1:], generator=self.generator).to(like)
        unit = direction / direction.norm(dim=-1, keepdim=True)
        return unit * like.norm(dim=-1, keepdim=True)

    def _moved(self, steps: Float[Tensor, "C B S D"], chosen: Tensor | None = None) -> Float[Tensor, "C B H S Dh"]:
        """Queries after each of C steps, at all positions or at the chosen ones."""
        residual, positions = self.residual, self.positions
        if chosen is not None:
            residual, positions, steps = residual[:, chosen], positions[chosen], steps[:, :, chosen]
        states = (residual + steps).flatten(0, 1)
        return self.replay.queries(states, positions).unflatten(0, (steps.shape[0], -1))

    def _own(
        self, into: ClimbStatistics, writes: Tensor, gradients: tuple[Tensor, Tensor], base: tuple[Tensor, ...],
        valid: Tensor,
    ) -> None:  # fmt: skip
        selective, common = gradients
        heads = torch.arange(writes.shape[0], device=writes.device)
        ratio = writes.norm(dim=-1) / self.residual.norm(dim=-1).clamp_min(1e-30)
        _add(into.write_norm, [ratio.transpose(0, 1)], valid)
        moved = self._moved(writes)
        own_query = moved[heads, :, heads].transpose(0, 1)  # head h after its own write
        own = [
            *_slope_parts((selective * writes).sum(-1), (common * writes).sum(-1)),
            *_step_parts(self.landscape.parts(own_query), base),
        ]
        _add(into.own, own, valid)

        # the other heads' writes: slopes everywhere, whole steps on the control queries
        chosen = self.control
        pair_slope = torch.einsum("hbsd,gbsd->bghs", selective, writes)
        queries = moved[:, :, :, chosen].permute(1, 2, 0, 3, 4).flatten(2, 3)
        copies = writes.shape[0]
        step = self.landscape.parts(queries, chosen, copies)[0].unflatten(2, (copies, -1)).transpose(1, 2)
        change = step - base[0][:, :, chosen][:, None]
        where, few = valid[:, None, None], valid[:, chosen][:, None, None]
        totals = torch.stack(
            [
                ((pair_slope > 0) * where).sum(-1), (pair_slope * where).sum(-1),
                ((change > 0) * few).sum(-1), (change * few).sum(-1),
            ],
            dim=1,
        )  # fmt: skip
        many, some = valid.sum(-1), valid[:, chosen].sum(-1)
        counts = torch.stack([many, many, some, some], dim=1)[..., None, None]
        into.pairs.update(totals, counts)

        random = self._random(writes)
        slopes = _slope_parts((selective * random).sum(-1), (common * random).sum(-1))
        random_query = self._moved(random, chosen)[heads, :, heads].transpose(0, 1)
        parts = self.landscape.parts(random_query, chosen)
        steps = _step_parts(parts, tuple(b[:, :, chosen] for b in base))
        _add(into.own_random, [s[:, :, chosen] for s in slopes] + steps, valid[:, chosen])

    def _whole(
        self, into: ClimbStatistics, update: Tensor, ratio: Ratio, gradients: tuple[Tensor, Tensor],
        base: tuple[Tensor, ...], valid: Tensor, chosen: Tensor | None = None,
    ) -> None:  # fmt: skip
        slopes = _slope_parts((gradients[0] * update).sum(-1), (gradients[1] * update).sum(-1))
        query = self._moved(update[None], chosen)[0]
        if chosen is None:
            _add(ratio, slopes + _step_parts(self.landscape.parts(query), base), valid)
            return
        parts = self.landscape.parts(query, chosen)
        steps = _step_parts(parts, tuple(b[:, :, chosen] for b in base))
        _add(ratio, [s[:, :, chosen] for s in slopes] + steps, valid[:, chosen])


def _slope_parts(selective: Float[Tensor, "H B S"], common: Float[Tensor, "H B S"]) -> list[Float[Tensor, "B H S"]]:
    selective, common = selective.transpose(0, 1), common.transpose(0, 1)
    return [(selective > 0).to(selective), selective, common]


def _step_parts(after: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> list[Float[Tensor, "B H S"]]:
    selective, common, raw = (a - b for a, b in zip(after, before, strict=True))
    return [(selective > 0).to(selective), selective, common, raw]


def _add(ratio: Ratio, parts: list[Float[Tensor, "B H S"]], valid: Tensor) -> None:
    values = torch.stack(parts, dim=1).double()
    usable = valid[:, None, None] & values.isfinite()
    ratio.update(torch.where(usable, values, 0.0).sum(-1), usable.sum(-1))
