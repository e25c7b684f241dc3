"""One model being read, batch by batch: forward passes with capture and tracing, and what could not be computed."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.layout import BatchLayout
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens, drawn_for
from massieu.probing.checks.nonfinite import FirstTrouble, at_real, in_batch, in_call, kind_of
from massieu.probing.data.token_names import frames_of
from massieu.probing.model.forward import decoder_given, output_tensor, run
from massieu.probing.model.model import model_inputs
from massieu.probing.model.packed import dense_inside
from massieu.probing.model.unexpected import unexpected
from massieu.probing.reading.examples import Examples, ExampleWindow
from massieu.probing.reading.layer_reading import LayerReading, SampledRow
from massieu.probing.reading.per_token import PER_TOKEN, TokenWriter
from massieu.probing.reading.pooled import PooledLengths
from massieu.probing.reading.repeated import RepeatedTokens
from massieu.probing.reading.site_reading import NO_ORDER, Options, SiteReading
from massieu.probing.replaced.effect import Effects
from massieu.probing.statistics.expansion import ExpansionStatistics
from massieu.probing.statistics.extremes import Places
from massieu.probing.statistics.query_means import Queries
from massieu.probing.statistics.registry import (
    AGAIN,
    ATTENTION,
    CLIMB,
    EXPANSION,
    FEED_FORWARD,
    LAYERED,
    MAPS,
    REPEATED,
    RESIDUAL,
    STATISTICS,
    VALUES,
)
from massieu.probing.statistics.repeated import copying_score
from massieu.probing.statistics.windowed import HeadWindow
from massieu.probing.stream.wiring import Step, StreamTracer
from massieu.probing.sums.running import RunningParts
from massieu.report.record import Trouble

_EXAMPLES = "example windows"
_ITEMS_FIRST = BatchLayout()
_WINDOWED = 100_000  # above what the climb draws for, site by site
_AGAIN = 300_000  # above what the layers' groups draw for
_WRITE_NORM = "write_norm_ratio"  # of the values' group, measured where the climb is


@dataclass(frozen=True)
class RowNumbers:
    """Where the rows of a batch stand, so that windows may be read in any order and by several processes.

    Attributes:
        rows: number of each row among all that the reading reads.
        sampled: number of each sampled row among the sampled ones.
    """

    rows: Sequence[int]
    sampled: Mapping[int, int]


class Reading(RunningParts):
    """Running results of one model over many batches.

    Attributes:
        failed: groups and statistics that could not be computed, with the reason.
        read_queries: tokens that the first attention site has asked about.
        effects: wants each head's mean output.
        tokens_through: from embeddings to logits, for the copying score.
        writer: wants the value of each query.
        token_rows: rows that it was given.
        row_files: the files that it has written them to, by name, and their hashes.
    """

    NOTES = ("seconds", "sampled", "unexplained", "failed", "read_queries", "token_rows", "row_files")

    def __init__(
        self,
        model: nn.Module,
        sites: list[SiteInfo],
        options: Options,
        layout: BatchLayout = _ITEMS_FIRST,
        refused: Collection[str] = (),
    ) -> None:
        self.model, self.refused = model, refused
        self.sites = sites
        self.layout = layout
        self.options = options
        self.by_site: dict[AttentionSite, SiteInfo] = {info.site: info for info in sites}
        self.results = [SiteReading.begun(info, options.units, options.max_length, options.groups) for info in sites]
        sample = replace(options.units, sampled=True)
        self.expansion = ExpansionStatistics(sample)
        self.layers = LayerReading(options.groups, sample, options.seed)
        self.tracer = StreamTracer(model, sites, self._on_step)
        self.seconds: dict[str, float] = defaultdict(float)
        self.sampled = Counter[str]()
        self.unexplained: set[str] = set()
        self.examples = Examples()
        self.effects: Effects | None = None
        self.tokens_through: Tensor | None = None
        self.writer: TokenWriter | None = None
        self.token_rows = 0
        self.row_files: dict[str, str] = {}
        self._capture: Capture | None = None
        self.failed: dict[str, str] = {}
        if EXPANSION in options.groups and any(info.tokens_first is None for info in sites):
            self.failed[EXPANSION] = NO_ORDER
        self._trouble = FirstTrouble()
        self.broken = False  # the current batch has numbers that are not finite
        self.read_queries = 0
        self.untold: set[int] = set()  # lengths of sequences whose padding counted as tokens
        self._tokens = BatchTokens({})
        self._pooled = PooledLengths(model, sites)
        self._rows = 0
        self._windows: Sequence[int] = ()
        self._numbers: RowNumbers | None = None
        self._sampled_rows: list[int] = []
        self._chosen: dict[tuple[int, int, bool, bool], Tensor] = {}
        self._example: ExampleWindow | None = None

    def forward(
        self,
        inputs: dict[str, Any],
        special: Tensor | None,
        sampled: Iterable[int],
        windows: Sequence[int],
        example: ExampleWindow | None = None,
        numbers: RowNumbers | None = None,
        target_special: Tensor | None = None,
    ) -> None:
        """Run one batch and add it to the results.

        Args:
            special: special tokens of ``input_ids``; None where there are none.
            sampled: rows on which replays and clouds are measured.
            windows: number of each row's window in the whole text: what is drawn at random depends on it and the seed
                alone, so that batch size changes no statistic.
            example: a window of the batch to record token by token.
            numbers: where the rows stand in the text; None: they follow those before.
            target_special: special tokens of ``decoder_input_ids``.
        """
        self._windows, self._numbers = windows, numbers
        prepared = model_inputs(self.model, inputs)
        follows = decoder_given(prepared) and not decoder_given(inputs)
        audio = frames_of(self.model, prepared)
        self._tokens = BatchTokens(prepared, special, follows, target_special, None if audio is None else audio.real)
        self._rows = self.layout.rows(self.model, prepared)
        self._sampled_rows = list(sampled)
        self._chosen.clear()
        self.layers.start()
        self.broken = False
        self._example = example
        before = sum(self.seconds.values())
        with self._timed("forward"):
            self._pooled.look_ahead(self._tokens)
            steps = self.options.groups - {ATTENTION} and self._sampled_rows
            traced = steps or not self.tracer.sublayers
            with torch.no_grad(), capturing(self.model, self._on_attention) as capture:
                self._capture = capture
                with self.tracer.watching() if traced else nullcontext():
                    output = output_tensor(self.model, run(self.model, prepared))
                self.unexplained |= capture.unexplained
            self.untold.update(self._tokens.untold())
            self._look_for_trouble(output)
            if self._wants(EXPANSION):
                with self._timed("expansion"), self._computing(EXPANSION):
                    self.expansion.finish()
            inside = sum(self.seconds.values()) - before
        self.seconds["forward"] -= inside
        self.sampled["windows"] += len(self._sampled_rows)
        if example is not None:
            self.examples.append(example)

    def run_again(self, window: Callable[[int], dict[str, Any]]) -> None:
        """Run the sampled rows of the last batch again, for the groups that ask for it.

        Args:
            window: the inputs of one row alone.
        """
        for group in filter(self._wants, AGAIN):
            with self._timed(group), self._computing(group):
                for row in self._sampled_rows:
                    if not self.layout.separable:
                        raise ValueError("the items of these batches cannot be told apart")
                    inputs, drawn = model_inputs(self.model, window(row)), self._random(row, _AGAIN)
                    self.layers.again[group].read(self.model, self.sites, inputs, self._sampled_number(row), drawn)

    def read_repeated(self, made: RepeatedTokens, masked: bool) -> None:
        """Measure the model on repeated tokens, which are no part of the text."""
        with self._timed("repeated tokens"), self._computing(REPEATED):
            made.read(self.model, self.results, masked)

    def find_feed_forward(self, inputs: dict[str, Any]) -> None:
        """Find the model's feed-forward layers, on one item of a batch."""
        with self._computing(FEED_FORWARD):
            self.layers.find_feed_forward(self.model, self.sites, model_inputs(self.model, inputs, items=1))

    def measure_layers(self) -> None:
        """Measure what the groups about layers have kept, once the text was read."""
        for group in filter(self._wants, LAYERED):
            with self._timed(group), self._computing(group):
                self.layers.measure(group)
        self.failed = self.layers.failed | self.failed

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started

    def _look_for_trouble(self, output: Tensor) -> None:
        """Where the batch has numbers that are not finite, find out where they begin; once."""
        if self.trouble is not None:
            return
        inputs = self._tokens.inputs
        real = self._tokens.mask(decoder=decoder_given(inputs))
        if real is not None and self.sites[-1].tokens_first:
            real = real.mT
        if self.broken or (kind_of(output) and kind_of(at_real(output, real))):
            first = self._windows[0]
            windows = f"window {first}" if self._rows == 1 else f"windows {first} to {first + self._rows - 1}"
            found = in_batch(self.model, inputs, real, windows) or Trouble(
                f"the model's numbers break down in {windows}", "NaN", "attention"
            )
            self._trouble = FirstTrouble(found, first)

    @property
    def trouble(self) -> Trouble | None:
        """The first batch in which the model's numbers were not finite, and where in the model."""
        return self._trouble.trouble

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _positions(self, row: int, step: Step, *, cloud: bool) -> Tensor:
        """Sampled positions of a row in a step's stream: real tokens for replays, no two the same for clouds."""
        length = step.before.shape[1]
        place = (row, length, step.in_decoder, cloud)
        if place not in self._chosen:
            generator, most = self._random(row, 0 if cloud else 1), self.options.climb_queries
            self._chosen[place] = self._tokens.positions(row, length, most, step.in_decoder, cloud, generator)
        return self._chosen[place]

    def _random(self, row: int, purpose: int) -> torch.Generator:
        """Random numbers that belong to a row's window and one purpose."""
        return drawn_for(self.options.seed, self._windows[row], purpose)

    def _row_numbers(self) -> Sequence[int] | None:
        return None if self._numbers is None else self._numbers.rows

    def _sampled_number(self, row: int) -> int | None:
        return None if self._numbers is None else self._numbers.sampled[row]

    # What could not be computed ----------------------------------------------------------------------------------------

    @contextmanager
    def _computing(self, *parts: str) -> Iterator[None]:
        """What fails inside makes these groups or statistics unavailable, with the reason; the reading goes on.

        Whatever is wrong with the input or the capture itself still ends it.
        """
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            self.failed.update(dict.fromkeys(parts, unexpected(error)))

    def _wants(self, group: str) -> bool:
        return group in self.options.groups and group not in self.failed

    def left_out(self) -> frozenset[str]:
        """Names of the statistics that could not be computed."""
        return frozenset(n for n, s in STATISTICS.items() if n in self.failed or s.group in self.failed)

    # Observers ---------------------------------------------------------------------------------------------------------

    def _on_attention(self, call: AttentionCall) -> None:
        with self.tracer.unobserved():
            with self._timed("attention statistics"):
                read = self._read_attention(call)
            if read is not None:
                self._read_groups(call, *read)

    def site_of(self, call: AttentionCall) -> SiteInfo | None:
        """The site of a call; None where it is not read.

        Raises:
            InputError: it was not there in the first batch.
        """
        info = self.by_site.get(call.site)
        if info is None and call.site.module_name not in self.refused:
            raise InputError(f"{call.site.name} computed attention in this batch but not in the first one")
        return info

    def _read_attention(self, call: AttentionCall) -> tuple[SiteReading, Tokens, Tokens] | None:
        """Read what needs no sample. Returns the site's results and the call's tokens; None where there is nothing to read."""
        info = self.site_of(call)
        if info is None:
            return None
        if call.repeated:  # the same weights on other values: everything about the weights is known
            self.broken = self.broken or kind_of(call.value) is not None
            return None
        self.tracer.attention(call)
        results = self.results[info.index]
        cross = info.kind == "cross"
        queries = self._tokens.of(call, decoder=info.in_decoder, cross=cross)
        keys = self._tokens.of(call, decoder=info.in_decoder and not cross, keys=True, cross=cross)
        self.broken = self.broken or in_call(call, queries.real, keys.real)
        if info.index == 0:
            self.read_queries += int(queries.real.sum())
        if self._wants(ATTENTION):
            with self._computing(ATTENTION):
                numbers = self._row_numbers()
                keep = None if self.writer is None else self._keep
                results.read_queries(
                    call, queries, keys, self._rows, self.options, self._random, numbers, self._windows, keep
                )
        if self.effects is not None:
            self.effects.add(info.site.name, call.output.detach(), queries.real)
        if self._wants(VALUES) and VALUES not in results.unavailable:
            with self._computing(VALUES):
                results.read_first_value(call, keys, self._rows, self._row_numbers())
        if self._example is not None and _EXAMPLES not in self.failed:
            with self._computing(_EXAMPLES):
                self._example.add(info, call)
        return results, queries, keys

    def _read_groups(self, call: AttentionCall, results: SiteReading, queries: Tokens, keys: Tokens) -> None:
        for group in results.windowed:
            if self._wants(group) and group not in results.unavailable and call.query.shape[0] == self._rows:
                with self._timed(group), self._computing(group):
                    self._read_windows(call, results, group, queries, keys)

    def _read_windows(
        self, call: AttentionCall, results: SiteReading, group: str, queries: Tokens, keys: Tokens
    ) -> None:
        for row in self._sampled_rows:
            drawn = self._random(row, _WINDOWED + results.info.index)
            places = queries.real[row].nonzero()[:, 0]
            order = torch.randperm(len(places), generator=drawn)[: self.options.climb_queries].sort().values
            part = call.rows(slice(row, row + 1))
            asked = places[order.to(places.device)]
            itself = results.info.itself
            window = HeadWindow(part, keys.real[row], asked, drawn.initial_seed(), itself)
            if len(window.queries) and bool(window.real.any()):
                results.windowed[group].update(window, self._sampled_number(row))

    def _keep(self, info: SiteInfo, found: Queries, places: Places, real: Tensor, length: int) -> None:
        assert self.writer is not None
        if PER_TOKEN not in self.failed:
            with self._computing(PER_TOKEN):
                self.token_rows += self.writer.add(info, found, places, real, length)

    def write_rows(self) -> None:
        """Write the per-token rows that are held; once that fails, the table is left out."""
        if self.writer is None:
            return
        if PER_TOKEN not in self.failed:
            with self._computing(PER_TOKEN):
                self.writer.flush()
        if PER_TOKEN in self.failed:
            self.writer.give_up()

    def _on_step(self, step: Step) -> None:
        if step.before.dim() != 3 or step.before.shape[0] != self._rows:
            return
        if self._wants(EXPANSION):
            with self._timed("expansion"), self._computing(EXPANSION):
                for row in self._sampled_rows:
                    positions = self._positions(row, step, cloud=True)
                    self.expansion.collect(step, row, positions, self._sampled_number(row))
        for group in filter(self._wants, LAYERED):
            with self._timed(group), self._computing(group):
                self.layers.read(group, step, [self._layer_row(row) for row in self._sampled_rows])
        if step.read is not None:
            assert self._capture is not None
            results = self.results[self.by_site[step.read.call.site].index]
            with self._timed("climb"), dense_inside(step.read.call.module):
                if self._wants(MAPS):
                    with self._computing(MAPS):
                        results.read_maps(self._capture, step.read)
                if self._wants(REPEATED) and self.tokens_through is not None:
                    with self._computing(copying_score.__name__):
                        results.read_copying(self._capture, step.read, self.tokens_through)
                if self._wants(CLIMB) or (self._wants(VALUES) and _WRITE_NORM not in self.failed):
                    with self._computing(*self.options.groups & {CLIMB}, _WRITE_NORM):
                        self._read_climb(self._capture, results, step)
                if self._wants(RESIDUAL):
                    with self._computing(RESIDUAL):
                        rows = [self._layer_row(row) for row in self._sampled_rows]
                        self.layers.read_gradient(self._capture, results, step, rows)

    def _layer_row(self, row: int) -> SampledRow:
        def positions(step: Step, cloud: bool) -> Tensor:
            return self._positions(row, step, cloud=cloud)

        def drawn(purpose: int) -> torch.Generator:
            return self._random(row, purpose)

        return SampledRow(row, self._sampled_number(row), positions, drawn)

    def _read_climb(self, capture: Capture, results: SiteReading, step: Step) -> None:
        for row in self._sampled_rows:
            positions, index = self._positions(row, step, cloud=False), results.info.index
            number, drawn = self._sampled_number(row), self._random(row, 3 + index)
            read = results.read_climb(capture, step.item(row), positions, drawn, None if number is None else [number])
            if read and index == 0:
                self.sampled["queries"] += len(positions)
