"""What is read of one attention site, call by call, and its running results."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.reading.per_token import Keep
from massieu.probing.replaced.effect import NOTHING, Replace
from massieu.probing.statistics.climb import ClimbStatistics, climbed
from massieu.probing.statistics.extremes import Extremes, Places
from massieu.probing.statistics.maps import MapStatistics, map_statistics
from massieu.probing.statistics.query_means import AttentionStatistics, query_statistics
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import (
    ATTENTION,
    CLIMB,
    MAPS,
    NEEDS_SCORES,
    VALUES,
    WINDOWED,
    measures,
    moments_of,
)
from massieu.probing.statistics.repeated import RepeatedWeights, copying_score
from massieu.probing.statistics.values import first_value_norm_ratio
from massieu.probing.statistics.windowed import WindowStatistics
from massieu.probing.stream.replay import AffineQuery, HeadMaps, Replay, head_maps, output_maps, write_maps
from massieu.probing.stream.wiring import AttentionRead, Step
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import Units

NO_ORDER = (
    "the batch has as many items as tokens, and the module does not say by batch_first which of its dimensions is which; "
    "batches of another length or size do"
)
_SCORES_ONLY = (
    "its scores are not known as an affine function of queries and keys, so they cannot be told apart from log-weights"
)


@dataclass(frozen=True)
class Options:
    """What a reading measures and how much of the text it samples.

    Attributes:
        groups: groups of statistics to compute.
        max_length: length of a full window, for the position bins.
        query_sample: at most this many queries per sequence for the per-query statistics; None is all.
        climb_queries: sampled queries per sampled window.
        statistics: names of the statistics to compute of the attention; None is all of them.
        per_token: statistics whose value at every query is written down.
        replace: what is to be put in the place of attention, beside the reading.
        new_tokens: the rows are prompts, and the model writes at most so many tokens after each, whose queries are measured.
        quick: no re-initialised control and no example windows.
        draws: so many re-initialised models are drawn.
    """

    groups: frozenset[str]
    units: Units
    max_length: int
    query_sample: int | None = None
    climb_queries: int = 64
    seed: int = 0
    statistics: frozenset[str] | None = None
    quick: bool = False
    new_tokens: int | None = None
    replace: Replace = NOTHING
    per_token: tuple[str, ...] = ()
    draws: int = 8

    def of_attention(self) -> tuple[str, ...]:
        """The attention's statistics to compute, the entropy always: it tells how many units an error has."""
        wanted = measures(ATTENTION)
        return tuple(n for n in wanted if self.statistics is None or n in self.statistics or n == "entropy")


Draw = Callable[[int, int], torch.Generator]
"""Random numbers for a row and a purpose, which belong to the row's window."""


@dataclass(eq=False)
class SiteReading(RunningParts):
    """Running results of one attention site.

    What is found once, in the first batch or before it, is no sum: the maps, how the queries are replayed, and what is
    found on repeated tokens.

    Attributes:
        unavailable: groups and statistics that this site does not have, with the reason.
    """

    NOTES = ("unavailable",)
    info: SiteInfo
    attention: AttentionStatistics
    climb: ClimbStatistics
    first_value: Ratio
    extremes: Extremes
    maps: MapStatistics | None = None
    repeated: RepeatedWeights | None = None
    copying: Tensor | None = None
    windowed: dict[str, WindowStatistics] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    climb_checked: bool = False
    replay_whole: bool = False
    query_map: AffineQuery | None = None
    query_layer: nn.Linear | None = None

    @classmethod
    def begun(cls, info: SiteInfo, units: Units, max_length: int, groups: Collection[str] = ()) -> "SiteReading":
        """A site of which nothing is read yet."""
        attention = AttentionStatistics(info.heads, units, max_length)
        sample = replace(units, sampled=True)
        climb, first_value = ClimbStatistics(info.heads, sample), Ratio((1, info.heads), units)
        windowed = {group: WindowStatistics(group, info.heads, sample) for group in WINDOWED if group in groups}
        results = cls(info, attention, climb, first_value, Extremes(info.heads), windowed=windowed)
        if info.value_sets > 1:
            results.unavailable[VALUES] = f"the same attention weights are applied to {info.value_sets} sets of values"
        elif info.value_size == 0:
            results.unavailable[VALUES] = "the layout of its values is not known"
        if info.grade == "scores":
            results.unavailable |= dict.fromkeys(
                [*sorted(NEEDS_SCORES), CLIMB, MAPS, copying_score.__name__], _SCORES_ONLY
            )
        elif info.tokens_first is None:
            results.unavailable |= dict.fromkeys([CLIMB, MAPS, copying_score.__name__], NO_ORDER)
        elif info.moving:
            results.unavailable[CLIMB] = "its log-weights are computed from the queries or keys, and move with them"
        return results

    def read_queries(
        self,
        call: AttentionCall,
        queries: Tokens,
        keys: Tokens,
        rows: int,
        options: Options,
        draw: Draw,
        numbers: Sequence[int] | None = None,
        windows: Sequence[int] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """The per-query statistics of a call on so many rows; of each row at most so many queries as are to be sampled.

        Args:
            numbers: where the rows stand in the text; see `Ratio.update`.
            windows: numbers of the rows' windows; None: extremes are not looked for.
            keep: what is to be done with the value of each query.
        """
        sample, names = options.query_sample, options.of_attention()
        moments = moments_of(names)
        length = call.query.shape[2]
        if call.query.shape[0] % rows:  # of something that the items share, as positions: one row
            rows = 1
        if queries.special is None or keys.special is None:
            self.unavailable["weight_special"] = "the batches do not say which tokens are special"
        numbers = numbers and numbers[:rows]
        windows = windows and windows[:rows]
        parts = [(slice(None), torch.arange(length), numbers, windows, rows)]
        if sample is not None and sample < length:  # some queries of each window, drawn window by window
            items = call.query.shape[0] // rows
            drawn = [torch.randperm(length, generator=draw(row, 2)) for row in range(rows)]
            parts = [
                (
                    slice(i * items, (i + 1) * items),
                    p[:sample].sort().values,
                    numbers and numbers[i : i + 1],
                    windows and windows[i : i + 1],
                    1,
                )
                for i, p in enumerate(drawn)
            ]
        for item, positions, own, seen, count in parts:
            positions = positions.to(call.query.device)
            part = call.rows(item).at(positions) if len(positions) < length else call
            asked, attended = _part(queries, item, positions), _part(keys, item, slice(None))
            reading = QueryReading(part, asked, attended, positions, self.info.itself, moments)
            found = query_statistics(reading, names)
            self.attention.update(found, positions, count, own)
            if seen is not None:
                ids = (tokens.ids if tokens.ids is None else tokens.ids[item] for tokens in (queries, keys))
                places = Places(positions, seen, count, *ids)
                self.extremes.update(found, part, places)
                if keep is not None:
                    keep(self.info, found, places, asked.real, length)

    def read_first_value(
        self, call: AttentionCall, keys: Tokens, rows: int, numbers: Sequence[int] | None = None
    ) -> None:
        """The norm of the first token's value beside the others', in each of so many rows."""
        ratio, usable = first_value_norm_ratio(call, keys)
        rows = 1 if ratio.shape[0] % rows else rows
        pair = torch.stack([torch.where(usable, ratio, 0.0), usable]).double()
        total, count = pair.reshape(2, rows, -1, ratio.shape[1]).sum(2, keepdim=True)
        self.first_value.update(total, count, numbers and numbers[:rows])

    def read_maps(self, capture: Capture, read: AttentionRead) -> None:
        """The statistics of the weights, once."""
        if self.maps is not None or MAPS in self.unavailable:
            return
        maps = "the query and the key side read different streams"
        if self.info.itself:
            maps = head_maps(capture, read)
        if isinstance(maps, HeadMaps):
            self.maps = map_statistics(maps)
        else:
            self.unavailable[MAPS] = maps

    def read_copying(self, capture: Capture, read: AttentionRead, tokens: Tensor) -> None:
        """Whether the heads copy what they attend to, once; `tokens` as `copying_score` has it."""
        name = copying_score.__name__
        if self.copying is not None or name in self.unavailable:
            return
        maps = "the query and the key side read different streams"
        if self.info.itself:
            maps = write_maps(capture, read)
        if isinstance(maps, str):
            self.unavailable[name] = maps
        else:
            self.copying = copying_score(*maps, tokens)

    def read_climb(
        self,
        capture: Capture,
        item: Step,
        positions: Tensor,
        generator: torch.Generator,
        numbers: Sequence[int] | None = None,
    ) -> bool:
        """The climb of one row's step at these positions; False where the site's queries cannot be replayed."""
        replay = self.replay(capture, item, positions)
        if replay is None:
            return False
        self.climb.take(climbed(replay, item, positions, generator), numbers)
        return True

    def replay(self, capture: Capture, item: Step, positions: Tensor) -> Replay | None:
        """The queries of one row's step as functions of the stream; None where they cannot be replayed."""
        assert item.read is not None
        if not len(positions) or CLIMB in self.unavailable:
            return None
        found = Replay(capture, item.read, self.query_map, self.replay_whole, self.query_layer)
        return found if self.climb_checked else self._checked(found, positions)

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
        replay = replace(replay, affine=replay.query_map(positions)).in_two_parts(positions)
        self.replay_whole, self.query_map, self.query_layer = replay.whole, replay.affine, replay.linear
        return replay


def _part(tokens: Tokens, item: slice, positions: slice | Tensor) -> Tokens:
    special = None if tokens.special is None else tokens.special[item, positions]
    return Tokens(tokens.real[item, positions], special)
