"""What is read of one attention site, call by call, and its running results."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from massieu.probing.accumulate import Ratio
from massieu.probing.attention_call import AttentionCall
from massieu.probing.capture import Capture
from massieu.probing.replay import AffineQuery, HeadMaps, Replay, head_maps, output_maps
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.climb import Climb, ClimbStatistics
from massieu.probing.statistics.maps import MapStatistics, map_statistics
from massieu.probing.statistics.query_means import AttentionStatistics, query_statistics
from massieu.probing.statistics.query_reading import QueryReading, Tokens
from massieu.probing.statistics.registry import CLIMB, MAPS, NEEDS_SCORES, VALUES
from massieu.probing.statistics.values import first_value_norm_ratio
from massieu.probing.units import Units
from massieu.probing.wiring import AttentionRead, Step

NO_ORDER = (
    "the batch has as many items as tokens, and the module does not say by batch_first which of its dimensions is which; "
    "batches of another length or size do"
)
_SCORES_ONLY = (
    "its scores are not known as an affine function of queries and keys, so they cannot be told apart from log-weights"
)

Draw = Callable[[int, int], torch.Generator]
"""Random numbers for a row and a purpose, which belong to the row's window."""


@dataclass(eq=False)
class SiteReading:
    """Running results of one attention site.

    Attributes:
        unavailable: groups and statistics that this site does not have, with the reason.
    """

    info: SiteInfo
    attention: AttentionStatistics
    climb: ClimbStatistics
    first_value: Ratio
    maps: MapStatistics | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    climb_checked: bool = False
    replay_whole: bool = False
    query_map: AffineQuery | None = None

    @classmethod
    def begun(cls, info: SiteInfo, units: Units, max_length: int) -> "SiteReading":
        """A site of which nothing is read yet."""
        attention = AttentionStatistics(info.heads, units, max_length)
        results = cls(info, attention, ClimbStatistics(info.heads, units), Ratio((1, info.heads), units))
        if info.value_sets > 1:
            results.unavailable[VALUES] = f"the same attention weights are applied to {info.value_sets} sets of values"
        elif info.value_size == 0:
            results.unavailable[VALUES] = "the layout of its values is not known"
        if info.grade == "scores":
            results.unavailable |= dict.fromkeys([*sorted(NEEDS_SCORES), CLIMB, MAPS], _SCORES_ONLY)
        elif info.tokens_first is None:
            results.unavailable |= dict.fromkeys([CLIMB, MAPS], NO_ORDER)
        elif info.moving:
            results.unavailable[CLIMB] = "its log-weights are computed from the queries or keys, and move with them"
        return results

    def read_queries(
        self, call: AttentionCall, queries: Tokens, keys: Tokens, rows: int, sample: int | None, draw: Draw
    ) -> None:
        """The per-query statistics of a call on so many rows; of each row at most ``sample`` queries."""
        length = call.query.shape[2]
        if call.query.shape[0] % rows:  # of something that the items share, as positions: one row
            rows = 1
        if queries.special is None or keys.special is None:
            self.unavailable["weight_special"] = "the batches do not say which tokens are special"
        parts = [(slice(None), torch.arange(length), rows)]
        if sample is not None and sample < length:  # some queries of each window, drawn window by window
            items = call.query.shape[0] // rows
            drawn = [torch.randperm(length, generator=draw(row, 2)) for row in range(rows)]
            parts = [(slice(i * items, (i + 1) * items), p[:sample].sort().values, 1) for i, p in enumerate(drawn)]
        for item, positions, count in parts:
            positions = positions.to(call.query.device)
            part = call.rows(item).at(positions) if len(positions) < length else call
            asked, attended = _part(queries, item, positions), _part(keys, item, slice(None))
            found = query_statistics(QueryReading(part, asked, attended, positions, itself=self.info.kind != "cross"))
            self.attention.update(found, positions, count)

    def read_first_value(self, call: AttentionCall, keys: Tokens, rows: int) -> None:
        """The norm of the first token's value beside the others', in each of so many rows."""
        ratio, usable = first_value_norm_ratio(call, keys)
        rows = 1 if ratio.shape[0] % rows else rows
        pair = torch.stack([torch.where(usable, ratio, 0.0), usable]).double()
        self.first_value.update(*pair.reshape(2, rows, -1, ratio.shape[1]).sum(2, keepdim=True))

    def read_maps(self, capture: Capture, read: AttentionRead) -> None:
        """The statistics of the weights, once."""
        if self.maps is not None or MAPS in self.unavailable:
            return
        maps = "the query and the key side read different streams"
        if self.info.kind != "cross":
            maps = head_maps(capture, read)
        if isinstance(maps, HeadMaps):
            self.maps = map_statistics(maps)
        else:
            self.unavailable[MAPS] = maps

    def read_climb(self, capture: Capture, item: Step, positions: Tensor, generator: torch.Generator) -> bool:
        """The climb of one row's step at these positions; False where the site's queries cannot be replayed."""
        assert item.read is not None
        if not len(positions) or CLIMB in self.unavailable:
            return False
        replay = Replay(capture, item.read, self.query_map, self.replay_whole)
        if not self.climb_checked:
            replay = self._checked(replay, positions)
        if replay is None:
            return False
        valid = torch.ones(1, len(positions), dtype=torch.bool, device=positions.device)
        Climb(replay, item, positions, generator).measure(self.climb, valid)
        return True

    def _checked(self, replay: Replay, positions: Tensor) -> Replay | None:
        """A replay that reproduces the module's queries, on part of the sequence or, more slowly, on all of it."""
        self.climb_checked = True
        writes = output_maps(replay.read, replay.read.call.query.shape[1])
        if isinstance(writes, str):
            self.unavailable["own_write"] = writes
        reason = replay.why_not(positions)
        if reason is not None and replace(replay, whole=True).why_not(positions) is None:
            reason, replay = None, replace(replay, whole=True)
        if reason is not None:
            self.unavailable[CLIMB] = reason
            return None
        self.replay_whole, self.query_map = replay.whole, replay.query_map(positions)
        return replace(replay, affine=self.query_map)


def _part(tokens: Tokens, item: slice, positions: slice | Tensor) -> Tokens:
    special = None if tokens.special is None else tokens.special[item, positions]
    return Tokens(tokens.real[item, positions], special)
