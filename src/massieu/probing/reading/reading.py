"""One model being read, batch by batch: forward passes, the events that groups are told of, and what failed.

A reading knows no group by its name. It produces the events that some group wants, and hands each to the groups that want it,
inside one fence: what fails costs a group its own numbers, and nothing else.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.transforms import without_autocast
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.functions_called import FunctionsCalled
from massieu.probing.capture.layout import BatchLayout
from massieu.probing.capture.routes import capturing, capturing_interface
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens, drawn_for
from massieu.probing.checks.nonfinite import FirstTrouble, LaterFinite, at_real, finite_sum, in_batch, in_call, kind_of
from massieu.probing.data.token_names import AUDIO, frames_of
from massieu.probing.model.forward import decoder_given, output_tensor, run
from massieu.probing.model.model_inputs import copied_from_callers, model_inputs
from massieu.probing.model.packed import dense_inside
from massieu.probing.model.unexpected import OwnFunctionError, calling_own
from massieu.probing.reading import joined_calls
from massieu.probing.reading.joined_calls import WaitingCalls
from massieu.probing.reading.options import Options
from massieu.probing.reading.pooled import PooledLengths
from massieu.probing.statistics import GROUP_CLASSES
from massieu.probing.statistics.extremes import Places
from massieu.probing.statistics.group import (
    CallQueries,
    CallTokens,
    Event,
    Group,
    ModelReading,
    Row,
    RowPlace,
    RunningRatio,
    SampledWindow,
    SiteWeights,
    Source,
    UnsuitableInputsError,
    fenced,
)
from massieu.probing.statistics.query_means import Functions, QueryResult, moments_read, query_statistics
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.stream.replay import HeadMaps, Replay, head_maps, write_maps
from massieu.probing.stream.replays import Replays
from massieu.probing.stream.wiring import AttentionRead, Step, StreamTracer
from massieu.probing.sums.running import RunningParts, State
from massieu.storage.record import Sublayer, Trouble

_ITEMS_FIRST = BatchLayout()
# What random numbers are drawn for: tokens of a cloud, of a replay, and queries of a row; groups have purposes above these.
_CLOUD, _REPLAY, _QUERIES = range(3)
_OF_THE_STREAM = frozenset({Event.STEPS, Event.WEIGHTS, Event.WINDOWS})
"""Events for which a group has to know the steps of the stream."""
MOST_MISSES = 3
"""So many passes in a row may go another way through a model's code than those before; each costs a second pass."""
_DIFFERENT_STREAMS = "the query and the key side read different streams"


@dataclass(frozen=True)
class RowNumbers:
    """Where the rows of a batch stand, so that windows may be read in any order and by several processes.

    Attributes:
        rows: number of each row among all that the reading reads.
        sampled: number of each sampled row among the sampled ones.
    """

    rows: Sequence[int]
    sampled: Mapping[int, int]


@dataclass
class KnownWays:
    """Ways through the code of a model that attends by transformers' interface alone, of which a pass was followed.

    Attributes:
        codes: of the functions that were called; see `FunctionsCalled`.
        misses: how many passes in a row went another way.
    """

    codes: set[int] = field(default_factory=set)
    misses: int = 0

    def are_usable(self) -> bool:
        """Whether the next pass may go a known way. Where each batch goes a way of its own, all are followed."""
        return bool(self.codes) and self.misses < MOST_MISSES

    def has(self, code: int) -> bool:
        """Whether a pass that was not followed went a known way."""
        self.misses = 0 if code in self.codes else self.misses + 1
        return code in self.codes


class Reading(RunningParts):
    """One model, the groups that it is read for, and what could not be computed.

    Attributes:
        groups: all that is measured, by name.
        sampled_windows: how many windows were sampled.
        read_queries: tokens that the first attention site has asked about.
    """

    NOTES = ("seconds", "sampled_windows", "unexplained", "read_queries")

    def __init__(
        self,
        model: nn.Module,
        sites: list[SiteInfo],
        options: Options,
        layout: BatchLayout = _ITEMS_FIRST,
        refused: Collection[str] = (),
        inputs: Mapping[str, Any] | None = None,
        source: Source | None = None,
        tell: Callable[[str], None] = lambda _: None,
        is_draw: bool = False,
        known: "KnownWays | None" = None,
    ) -> None:
        """Make ready to read, and begin the groups that the options name.

        Args:
            refused: names of modules that attend and are not read.
            inputs: the first batch.
            source: where the text comes from, for groups that make up one of their own.
            tell: is told what takes long.
            is_draw: the model is a draw of the re-initialised control. It reads one window, so that nothing of the
                weights is kept for others, and only the groups' own numbers are asked.
            known: ways through the code of models like this one that were followed already.
        """
        self.model = model
        self.refused = refused
        self.sites = sites
        self.layout = layout
        self.options = options
        self.by_site: dict[AttentionSite, SiteInfo] = {info.site: info for info in sites}
        known_groups = (*GROUP_CLASSES, *options.catalogue.groups.values())
        groups = [group() for group in known_groups if group.name in options.groups]
        # The stream is followed only for groups that need its steps, since that costs time in every pass.
        follows_stream = any(group.events & _OF_THE_STREAM for group in groups)
        self.tracer = StreamTracer(model, sites, self._on_step) if follows_stream else None
        self.sublayers: list[Sublayer] = [] if self.tracer is None else self.tracer.sublayers
        self.seconds: dict[str, float] = defaultdict(float)
        self.sampled_windows = 0
        self.unexplained: set[str] = set()
        self.read_queries = 0
        self.untold: set[int] = set()  # lengths of sequences whose padding counted as tokens
        self.broken = False  # the current batch has numbers that are not finite
        self._trouble = FirstTrouble()
        self._functions: Functions = options.catalogue.query_functions
        if options.statistics is not None:
            # Always the entropy, from which the number of error units is read.
            wanted = options.statistics | {"entropy"}
            self._functions = {name: each for name, each in self._functions.items() if name in wanted}
        self._is_draw = is_draw
        self._model_reading = ModelReading(
            model, sites, self.sublayers, options.units, options.max_length, options.seed, options.query_sample,
            options.climb_queries, options.statistics, {} if inputs is None else inputs, source,
            self._functions, options.catalogue.own, is_draw,
        )  # fmt: skip
        self._weighed: set[str] = set()  # sites whose weights were handed out
        # Queries that are no text and no decoder's: the model pools its tokens inside (Funnel).
        pools_tokens = any(info.kind == "cross" and not info.in_decoder for info in sites)
        self._pooled = PooledLengths(model, sites) if pools_tokens else None
        self._capture: Capture | None = None
        self._tokens = BatchTokens({})
        self._rows = 0
        self._windows: Sequence[int] = ()
        self._numbers: RowNumbers | None = None
        self._sampled: list[SampledWindow] = []
        self._waiting = WaitingCalls()
        # Calls of a module that is called several times are numbered by all of them.
        by_interface = all(info.route == "interface" and not info.site.ordinal for info in sites) and not refused
        self._known = (known or KnownWays()) if by_interface else None
        self._read_sites: set[AttentionSite] = set()  # in the pass under way
        self._other_routes = False  # some attention of that pass was not read by the interface
        self._sums: list[Tensor] = []  # finite where all numbers of this pass's calls are that were joined
        self._ended: _EndedPass | None = None  # whose numbers are not looked at yet
        self._read_later: Tensor | int = 0  # queries that are to be added to those read
        self._chosen: dict[tuple[int, int, bool, bool], Tensor] = {}
        self.groups: dict[str, Group] = {}
        for group in groups:
            if group.beginning is not None:
                tell(group.beginning)
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Read for one group more."""
        self.groups[group.name] = group
        self._deliver(group, group.begin, self._model_reading)

    # Forward passes ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        inputs: dict[str, Any],
        special: Tensor | None,
        sampled: Iterable[int],
        windows: Sequence[int],
        numbers: RowNumbers | None = None,
        target_special: Tensor | None = None,
        alone: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        """Run one batch, and its sampled windows again where a group wants that.

        Args:
            special: special tokens of ``input_ids``; None where there are none.
            sampled: rows on which replays and clouds are measured.
            windows: number of each row's window in the whole text: what is drawn at random depends on it and the seed
                alone, so that batch size changes no statistic.
            numbers: where the rows stand in the text; None: they follow those before.
            target_special: special tokens of ``decoder_input_ids``.
            alone: the inputs of one row alone; None where rows cannot be told apart.
        """
        self._windows = windows
        self._numbers = numbers
        prepared = model_inputs(self.model, inputs)
        if any(isinstance(value, Tensor) and value.device.type in joined_calls.DEVICES for value in prepared.values()):
            prepared = copied_from_callers(prepared, inputs)
        # The decoder's tokens were made of the text's where the batch gives none of its own.
        follows = decoder_given(prepared) and not decoder_given(inputs)
        audio = frames_of(self.model, prepared) if AUDIO & prepared.keys() else None
        real_frames = None if audio is None else audio.real
        self._tokens = BatchTokens(prepared, special, follows, target_special, real_frames)
        self._rows = self.layout.rows(self.model, prepared)
        self._chosen.clear()
        self._sampled = [self._window(row, prepared, alone) for row in sampled]
        self.broken = False
        self._sums.clear()
        # Groups measure inside the forward pass; their seconds are subtracted from those of the pass.
        before = sum(self.seconds.values())
        with self._timed("forward"):
            if self._pooled is not None:
                self._pooled.look_ahead(self._tokens)
            with torch.no_grad():
                output = output_tensor(self.model, self._run(prepared))
                self._waiting.end_pass()
            self.untold.update(self._tokens.untold())
            self._look_for_trouble(output)
            for group in self.groups.values():
                self._deliver(group, group.after_pass)
            inside = sum(self.seconds.values()) - before
        self.seconds["forward"] -= inside
        self.sampled_windows += len(self._sampled)
        for group in self._wanting(Event.WINDOWS):
            for window in self._sampled:
                self._deliver(group, group.on_window, window)

    def _run(self, prepared: dict[str, Any]) -> Any:
        """The model's output for one batch, its attention read on the way."""
        self._read_sites.clear()
        self._other_routes = False
        follows_steps = self._follows_steps()
        if self._known is None or follows_steps or not self._known.are_usable():
            return self._followed(prepared, self._on_attention, follows_steps)
        with capturing_interface(self.model, self._on_attention) as (capture, called):
            output = run(self.model, prepared)
        self.unexplained |= capture.unexplained
        if not self._known.has(called.code):
            # Another way through the model's code: it may attend by other means there.
            self._followed(prepared, self._read_if_unread, follows_steps=False)
        return output

    def _followed(
        self, prepared: dict[str, Any], observer: Callable[[AttentionCall], None], follows_steps: bool
    ) -> Any:
        """The model's output, with all that may be attention followed."""
        with capturing(self.model, observer) as capture, FunctionsCalled(capture) as called:
            self._capture = capture
            with self.tracer.watching() if self.tracer is not None and follows_steps else nullcontext():
                output = run(self.model, prepared)
            self.unexplained |= capture.unexplained
        self._capture = None
        if self._known is not None and not self._other_routes:
            self._known.codes.add(called.code)
        return output

    def _read_if_unread(self, call: AttentionCall) -> None:
        self._other_routes |= call.route != "interface"
        if call.site not in self._read_sites:
            self._on_attention(call)

    def _follows_steps(self) -> bool:
        """Whether the stream is followed: in the first pass, which finds its steps, and wherever a group wants them."""
        if self.tracer is None:
            return False
        is_first_pass = not self.sublayers
        wanted = self._sampled and self._wanting(Event.STEPS, Event.WEIGHTS)
        return bool(wanted or is_first_pass)

    def state(self) -> State:
        """All that was summed, calls that wait to be read together among it."""
        self._settle()
        return super().state()

    def add(self, state: State) -> None:
        """Merge with what another reading has summed."""
        self._settle()
        super().add(state)

    def restore(self, state: State) -> None:
        """Go on from what was summed elsewhere, in place of what this one has read."""
        self._waiting = WaitingCalls()
        self._ended = None
        self._read_later = 0
        super().restore(state)

    def finish(self) -> None:
        """Let every group measure what it has kept, once the text was read."""
        self._settle()
        for group in self.groups.values():
            self._deliver(group, group.finish)

    def _window(self, row: int, batch: dict[str, Any], alone: Callable[[int], dict[str, Any]] | None) -> SampledWindow:
        num_rows = self._rows

        def inputs() -> dict[str, Any]:
            if alone is not None:
                return model_inputs(self.model, alone(row))
            if num_rows == 1:
                return batch
            raise UnsuitableInputsError(
                "the windows of these batches cannot be told apart, since this module does not say which dimension is "
                "theirs; give batches of one window each"
            )

        def replay(item: Step, positions: Tensor) -> Replay | str:
            assert self._capture is not None
            return self._replays.of(self._capture, item, positions)

        return SampledWindow(
            row=row,
            number=None if self._numbers is None else self._numbers.sampled[row],
            positions=lambda step: self._positions(row, step, cloud=False),
            cloud=lambda step: self._positions(row, step, cloud=True),
            drawn=partial(self._random, row),
            replay=replay,
            alone=inputs,
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started

    def _look_for_trouble(self, output: Tensor) -> None:
        """Find where numbers that are not finite begin, in the first batch that has any.

        Of calls that wait to be read together it is asked later, so that no batch waits for the one before.
        """
        self._check_ended()
        if self._trouble.trouble is not None:
            self._sums.clear()
            return
        inputs = self._tokens.inputs
        real = self._tokens.mask(decoder=decoder_given(inputs))
        if real is not None and self.sites[-1].tokens_first:
            real = real.mT
        ended = _EndedPass(inputs, real, self._tokens, self._windows, self._rows, self.broken)
        if self._sums:
            of_output = [finite_sum(output)] if output.is_floating_point() else []
            self._ended = replace(ended, finite=LaterFinite([*self._sums, *of_output]))
            self._sums.clear()
        else:
            self._find_trouble(ended, output)

    def _check_ended(self) -> None:
        """Look at the pass that ended last; where something is not finite, by another pass over the batch."""
        ended = self._ended
        self._ended = None
        if ended is None or (ended.finite and not ended.broken):
            return
        broken = [ended.broken]

        def look(call: AttentionCall) -> None:
            info = self.by_site.get(call.site)
            if info is not None and not call.repeated:
                queries, keys = _tokens_of(ended.tokens, call, info)
                broken.append(in_call(call, queries.real, keys.real))

        with torch.no_grad(), capturing(self.model, look):
            output = output_tensor(self.model, run(self.model, ended.inputs))
        self._find_trouble(replace(ended, broken=any(broken)), output)

    def _find_trouble(self, ended: "_EndedPass", output: Tensor) -> None:
        # Padding may be infinite without harm: the output is looked at again at real tokens alone.
        if ended.broken or (kind_of(output) and kind_of(at_real(output, ended.real))):
            first = ended.windows[0]
            windows = f"window {first}" if ended.rows == 1 else f"windows {first} to {first + ended.rows - 1}"
            trouble = in_batch(self.model, ended.inputs, ended.real, windows)
            if trouble is None:
                trouble = Trouble(f"the model's numbers break down in {windows}", "NaN", "attention")
            self._trouble = FirstTrouble(trouble, first)

    @property
    def trouble(self) -> Trouble | None:
        """The first batch in which the model's numbers were not finite, and where in the model."""
        self._check_ended()
        return self._trouble.trouble

    def queries_read(self) -> int:
        """`read_queries`, those of calls that wait among them."""
        self.read_queries += int(self._read_later)
        self._read_later = 0
        return self.read_queries

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _positions(self, row: int, step: Step, *, cloud: bool) -> Tensor:
        """Sampled positions of a row in a step's stream: real tokens for replays, no two the same for clouds."""
        length = step.before.shape[1]
        key = (row, length, step.in_decoder, cloud)
        # Drawn once for each stream, so that all its steps are measured at the same tokens.
        if key not in self._chosen:
            generator = self._random(row, _CLOUD if cloud else _REPLAY)
            most = self.options.climb_queries
            self._chosen[key] = self._tokens.positions(row, length, most, step.in_decoder, cloud, generator)
        return self._chosen[key]

    def _random(self, row: int, purpose: int) -> torch.Generator:
        """Random numbers that belong to a row's window and one purpose."""
        return drawn_for(self.options.seed, self._windows[row], purpose)

    # What could not be computed ----------------------------------------------------------------------------------------

    def _wanting(self, *events: Event) -> list[Group]:
        """The groups that want one of these, and have not failed."""
        wanted = frozenset(events)
        return [group for group in self.groups.values() if group.events & wanted and group.name not in group.failed]

    def _deliver(self, group: Group, method: Callable[..., None], *event: Any) -> None:
        """Call a group's method with an event. An error in it costs the group its numbers; the reading goes on.

        An error of the input or of the capture still ends the reading.
        """
        if group.name in group.failed:
            return
        is_users = group.name in self.options.catalogue.groups
        with self._timed(group.name), fenced(group.failed, group.name), calling_own() if is_users else nullcontext():
            method(*event)

    @property
    def failed(self) -> dict[str, str]:
        """Groups and statistics that could not be computed, with the reason."""
        return {name: reason for group in self.groups.values() for name, reason in group.failed.items()}

    def left_out(self) -> frozenset[str]:
        """Names of the statistics that could not be computed."""
        failed = self.failed
        statistics = self.options.catalogue.statistics
        return frozenset(name for name, each in statistics.items() if name in failed or each.group in failed)

    def unavailable(self, info: SiteInfo) -> dict[str, str]:
        """Groups and statistics that one site does not have, with the reason."""
        reasons: dict[str, str] = {}
        for group in self.groups.values():
            reasons |= group.missing_at(info.site.name)
        return reasons

    def rows(self) -> Iterator[Row]:
        """All that was measured."""
        for group in self.groups.values():
            if group.name in group.failed:
                continue
            if group.name in self.options.catalogue.groups:
                yield from self._rows_of_users(group)
            else:
                yield from group.rows()

    def _rows_of_users(self, group: Group) -> list[Row]:
        """The rows of a group that the user wrote; none where making them fails or they are not of its statistics."""
        rows: list[Row] = []
        with fenced(group.failed, group.name), calling_own(group.rows):
            rows = list(group.rows())
            names = {statistic.name for statistic in group.statistics}
            seen: set[tuple[RowPlace, str]] = set()
            for row in rows:
                if row.statistic not in names:
                    raise OwnFunctionError(f"it has a row of {row.statistic}, which is none of its statistics")
                if (row.place, row.name) in seen:
                    raise OwnFunctionError(f"it has two rows of {row.name} at {row.place.name}")
                seen.add((row.place, row.name))
        return [] if group.name in group.failed else rows

    def ratios(self) -> Iterator[RunningRatio]:
        """All running ratios by which two results may be paired."""
        for group in self.groups.values():
            if group.name not in group.failed:
                yield from group.ratios()

    # Events ------------------------------------------------------------------------------------------------------------

    def site_of(self, call: AttentionCall) -> SiteInfo | None:
        """The site of a call; None where it is not read.

        Raises:
            InputError: it was not there in the first batch.
        """
        info = self.by_site.get(call.site)
        if info is None and call.site.module_name not in self.refused:
            raise InputError(f"{call.site.name} computed attention in this batch but not in the first one")
        return info

    def _on_attention(self, call: AttentionCall) -> None:
        # The statistics are no part of the model: neither the tracer nor another function mode may see their operations.
        with torch._C.DisableTorchFunction() if self.tracer is None else self.tracer.unobserved():
            self._read_attention(call)

    def _read_attention(self, call: AttentionCall) -> None:
        info = self.site_of(call)
        if info is None:
            return
        self._read_sites.add(call.site)
        self._other_routes |= call.route != "interface"
        if call.repeated:  # the same weights applied to other values; these weights were already read
            self.broken = self.broken or kind_of(call.value) is not None
            return
        if self.tracer is not None:
            self.tracer.attention(call)
        queries, keys = _tokens_of(self._tokens, call, info)
        numbers = None if self._numbers is None else self._numbers.rows
        tokens = CallTokens(info, queries, keys, self._rows, numbers, self._windows, self._sampled, self._random)
        joined = self._are_joined and self._waiting.can_take(call, tokens)
        if joined:
            self._sums += [finite_sum(part) for part in (call.query, call.key, call.value, call.output)]
        else:
            self.broken = self.broken or in_call(call, queries.real, keys.real)
        if info.index == 0:
            self._read_later = self._read_later + queries.real.sum()
        for group in self._wanting(Event.CALLS):
            self._deliver(group, group.on_call, call, tokens)
        if joined:
            self._waiting.add(call, tokens)
            if self._waiting.is_full():
                self._read_waiting()
        else:
            self._read_queries(call, tokens)

    @property
    def _are_joined(self) -> bool:
        """Whether calls that are alike are read as one: all queries of theirs, by the package's own functions alone."""
        groups = self._wanting(Event.QUERIES)
        return (
            self.options.query_sample is None
            and self._numbers is not None
            and bool(groups)
            and all(group.takes_joined for group in groups)
            and not any(function.own or function.control for function in self._functions.values())
        )

    def _settle(self) -> None:
        """Read and look at all that waits."""
        self._read_waiting()
        self._check_ended()
        self.queries_read()

    def _read_waiting(self) -> None:
        """Read the calls that wait, each kind of them as one call."""
        for joined in self._waiting.take():
            # None of them was computed under autocast.
            with torch.no_grad(), without_autocast(joined.call.query.device):
                self._read_queries(joined.call, joined.tokens, joined.sites)

    def _read_queries(self, call: AttentionCall, tokens: CallTokens, joined: tuple[SiteInfo, ...] = ()) -> None:
        """The per-query statistics of a call, at no more than ``query_sample`` queries of each row.

        Args:
            joined: the sites whose heads it has; empty for one.
        """
        groups = self._wanting(Event.QUERIES)
        if not groups:
            return
        failed: dict[str, str] = {}
        with fenced(failed, *(group.name for group in groups)):
            for part in self._query_parts(call, tokens):
                result = self._statistics(part.call, part.queries, part.keys, part.positions, tokens.info.itself)
                event = replace(part.event(result, tokens, call.query.shape[2]), joined=joined)
                for group in groups:
                    self._deliver(group, group.on_queries, event)
        for group in groups:
            group.failed |= {name: reason for name, reason in failed.items() if name == group.name}

    def _query_parts(self, call: AttentionCall, tokens: CallTokens) -> Iterator["_QueryPart"]:
        """All queries, or a sample of each row's."""
        sample = self.options.query_sample
        sequences, _, length, _ = call.query.shape
        # A call over something that all rows share, such as relative positions, has a single row.
        rows = 1 if sequences % tokens.rows else tokens.rows
        if sample is None or sample >= length:
            positions = torch.arange(length, device=call.query.device)
            yield _QueryPart(call, tokens.queries, tokens.keys, positions, slice(None), range(rows))
            return
        sequences_per_row = sequences // rows
        # Each row draws from its own window's generator, so that the batch size changes no sample.
        for row in range(rows):
            drawn = torch.randperm(length, generator=self._random(row, _QUERIES))
            positions = drawn[:sample].sort().values.to(call.query.device)
            item = slice(row * sequences_per_row, (row + 1) * sequences_per_row)
            yield _QueryPart(
                call.rows(item).at(positions),
                _part(tokens.queries, item, positions),
                _part(tokens.keys, item, slice(None)),
                positions,
                item,
                range(row, row + 1),
            )

    def _statistics(
        self, call: AttentionCall, queries: Tokens, keys: Tokens, positions: Tensor, itself: bool, cut: bool = False
    ) -> QueryResult:
        """The per-query statistics that are wanted; one that fails is left out of every group that uses it.

        Args:
            cut: the first tokens are no longer among the keys.
        """
        failed_before = self.failed
        failed: dict[str, str] = {}
        functions = {name: function for name, function in self._functions.items() if name not in failed_before}
        # Several statistics multiply the queries with keys, and each would copy queries that do not lie in order.
        call = replace(call, query=call.query.contiguous())
        with self._timed("queries"):
            reading = QueryReading(call, queries, keys, positions, itself, moments_read(functions), cut)
            result = query_statistics(reading, functions, partial(fenced, failed))
        for group in self._wanting(Event.QUERIES):
            group.failed |= failed
        return result

    def _on_step(self, step: Step) -> None:
        if step.before.dim() != 3 or step.before.shape[0] != self._rows:
            return
        with nullcontext() if step.read is None else dense_inside(step.read.call.module):
            for group in self._wanting(Event.STEPS):
                for window in self._sampled:
                    self._deliver(group, group.on_step, step, window)
            if step.read is not None and step.read.call.site.name not in self._weighed:
                self._weighed.add(step.read.call.site.name)
                weights = self._weights(step.read)
                for group in self._wanting(Event.WEIGHTS):
                    self._deliver(group, group.on_weights, weights)

    @cached_property
    def _replays(self) -> Replays:
        return Replays(self.sites, keep=not self._is_draw)

    def _weights(self, read: AttentionRead) -> SiteWeights:
        info = self.by_site[read.call.site]
        capture = self._capture
        assert capture is not None

        def maps() -> HeadMaps | str:
            return head_maps(capture, read) if info.itself else _DIFFERENT_STREAMS

        def writes() -> tuple[Tensor, Tensor] | str:
            return write_maps(capture, read) if info.itself else _DIFFERENT_STREAMS

        return SiteWeights(info, maps, writes)


@dataclass(frozen=True, eq=False)
class _EndedPass:
    """A forward pass, to find where its numbers break down if they do.

    Attributes:
        real: which tokens of its output are no padding.
        broken: numbers of a call were not finite.
        finite: whether all numbers of calls that were joined are; None where there is no such call.
    """

    inputs: dict[str, Any]
    real: Tensor | None
    tokens: BatchTokens
    windows: Sequence[int]
    rows: int
    broken: bool
    finite: LaterFinite | None = None


@dataclass(frozen=True, eq=False)
class _QueryPart:
    """Queries of a call that are read together: all of them, or a sample of one row's.

    Attributes:
        call: of these queries alone.
        queries, keys: their tokens, and those of the keys.
        positions: of the queries in their sequence.
        item: the sequences of the whole call that they are of.
        rows: of the batch.
    """

    call: AttentionCall
    queries: Tokens
    keys: Tokens
    positions: Tensor
    item: slice
    rows: range

    def event(self, result: QueryResult, tokens: CallTokens, length: int) -> CallQueries:
        """The statistics of these queries, as groups receive them.

        Args:
            tokens: of the whole call.
            length: number of its queries.
        """
        rows = slice(self.rows.start, self.rows.stop)
        num_rows = len(self.rows)
        # Places count positions in the whole sequence, so they take the ids of all its tokens.
        query_ids = None if tokens.queries.ids is None else tokens.queries.ids[self.item]
        key_ids = None if tokens.keys.ids is None else tokens.keys.ids[self.item]
        places = Places(self.positions, tokens.windows[rows], num_rows, query_ids, key_ids)
        numbers = None if tokens.numbers is None else tokens.numbers[rows]
        return CallQueries(tokens.info, result, num_rows, numbers, places, self.call, self.queries.real, length)


def _tokens_of(batch: BatchTokens, call: AttentionCall, info: SiteInfo) -> tuple[Tokens, Tokens]:
    """The tokens that attend in a call, and those that are attended to."""
    cross = info.kind == "cross"
    queries = batch.of(call, decoder=info.in_decoder, cross=cross)
    keys = batch.of(call, decoder=info.in_decoder and not cross, keys=True, cross=cross)
    return queries, keys


def _part(tokens: Tokens, item: slice, positions: slice | Tensor) -> Tokens:
    special = None if tokens.special is None else tokens.special[item, positions]
    ids = None if tokens.ids is None else tokens.ids[item, positions]
    restarts = None if tokens.restarts is None else tokens.restarts[item, positions]
    return Tokens(tokens.real[item, positions], special, ids, restarts)
