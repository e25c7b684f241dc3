"""One model being read, batch by batch: forward passes with capture and tracing, and what could not be computed."""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.threads import one_thread
from massieu.probing.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture import Capture
from massieu.probing.examples import ExampleWindow
from massieu.probing.forward import decoder_given, output_tensor, run
from massieu.probing.layout import BatchLayout
from massieu.probing.model import model_inputs
from massieu.probing.nonfinite import at_real, in_batch, in_call, kind_of
from massieu.probing.routes import capturing
from massieu.probing.site_reading import NO_ORDER, SiteReading
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.expansion import ExpansionStatistics
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS, STATISTICS, VALUES
from massieu.probing.tokens import BatchTokens, drawn_for
from massieu.probing.units import Units
from massieu.probing.wiring import Step, StreamTracer
from massieu.report.record import Trouble

_EXAMPLES = "example windows"
_ITEMS_FIRST = BatchLayout()
_WRITE_NORM = "write_norm_ratio"  # of the values' group, measured where the climb is


@dataclass(frozen=True)
class Options:
    """What a reading measures and how much of the text it samples.

    Attributes:
        groups: groups of statistics to compute.
        max_length: length of a full window, for the position bins.
        query_sample: at most this many queries per sequence for the per-query statistics; None is all.
        climb_queries: sampled queries per sampled window.
    """

    groups: frozenset[str]
    units: Units
    max_length: int
    query_sample: int | None = None
    climb_queries: int = 64
    seed: int = 0


class Reading:
    """Running results of one model over many batches.

    Attributes:
        failed: groups and statistics that could not be computed, with the reason.
        trouble: the first batch in which the model's numbers were not finite, and where in the model.
        read_queries: tokens that the first attention site has asked about.
    """

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
        self.results = [SiteReading.begun(info, options.units, options.max_length) for info in sites]
        self.expansion = ExpansionStatistics(options.units)
        self.tracer = StreamTracer(model, sites, self._on_step)
        self.seconds: dict[str, float] = defaultdict(float)
        self.sampled = Counter[str]()
        self.unexplained: set[str] = set()
        self.examples: list[ExampleWindow] = []
        self._capture: Capture | None = None
        self.failed: dict[str, str] = {}
        if EXPANSION in options.groups and any(info.tokens_first is None for info in sites):
            self.failed[EXPANSION] = NO_ORDER
        self.trouble: Trouble | None = None
        self.broken = False  # the current batch has numbers that are not finite
        self.read_queries = 0
        self._tokens = BatchTokens({})
        self._rows = 0
        self._windows: Sequence[int] = ()
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
    ) -> None:
        """Run one batch and add it to the results.

        Args:
            special: special tokens of ``input_ids``; None where there are none.
            sampled: rows on which replays and clouds are measured.
            windows: number of each row's window in the whole text: what is drawn at random depends on it and the seed
                alone, so that batch size changes no statistic.
            example: a window of the batch to record token by token.
        """
        self._windows = windows
        prepared = model_inputs(self.model, inputs)
        self._tokens = BatchTokens(prepared, special, decoder_given(prepared) and not decoder_given(inputs))
        self._rows = self.layout.rows(self.model, prepared)
        self._sampled_rows = list(sampled)
        self._chosen.clear()
        self.broken = False
        self._example = example
        before = sum(self.seconds.values())
        with self._timed("forward"):
            traced = self._sampled_rows or not self.tracer.sublayers
            with torch.no_grad(), capturing(self.model, self._on_attention) as capture:
                self._capture = capture
                with self.tracer.watching() if traced else nullcontext():
                    output = output_tensor(self.model, run(self.model, prepared))
                self.unexplained |= capture.unexplained
            self._look_for_trouble(output)
            if self._wants(EXPANSION):
                with self._timed("expansion"), self._computing(EXPANSION), one_thread():
                    self.expansion.finish()
            inside = sum(self.seconds.values()) - before
        self.seconds["forward"] -= inside
        self.sampled["windows"] += len(self._sampled_rows)
        if example is not None:
            self.examples.append(example)

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
        if self.broken or kind_of(at_real(output, real)) is not None:
            first = self._windows[0]
            windows = f"window {first}" if self._rows == 1 else f"windows {first} to {first + self._rows - 1}"
            self.trouble = in_batch(self.model, inputs, real, windows) or Trouble(
                f"the model's numbers break down in {windows}", "NaN", "attention"
            )

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
            message = " ".join(str(error).split())[:200]
            reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
            self.failed.update(dict.fromkeys(parts, reason))

    def _wants(self, group: str) -> bool:
        return group in self.options.groups and group not in self.failed

    def left_out(self) -> frozenset[str]:
        """Names of the statistics that could not be computed."""
        return frozenset(n for n, s in STATISTICS.items() if n in self.failed or s.group in self.failed)

    # Observers ---------------------------------------------------------------------------------------------------------

    def _on_attention(self, call: AttentionCall) -> None:
        with self.tracer.unobserved(), self._timed("attention statistics"):
            self._read_attention(call)

    def _read_attention(self, call: AttentionCall) -> None:
        info = self.by_site.get(call.site)
        if info is None and call.site.module_name in self.refused:
            return
        if info is None:
            raise InputError(f"{call.site.name} computed attention in this batch but not in the first one")
        if call.repeated:  # the same weights on other values: everything about the weights is known
            self.broken = self.broken or kind_of(call.value) is not None
            return
        self.tracer.attention(call)
        results = self.results[info.index]
        queries = self._tokens.of(call, decoder=info.in_decoder)
        keys = self._tokens.of(call, decoder=info.in_decoder and info.kind != "cross", keys=True)
        self.broken = self.broken or in_call(call, queries.real, keys.real)
        if info.index == 0:
            self.read_queries += int(queries.real.sum())
        if self._wants(ATTENTION):
            with self._computing(ATTENTION):
                results.read_queries(call, queries, keys, self._rows, self.options.query_sample, self._random)
        if self._wants(VALUES) and VALUES not in results.unavailable:
            with self._computing(VALUES):
                results.read_first_value(call, keys, self._rows)
        if self._example is not None and _EXAMPLES not in self.failed:
            with self._computing(_EXAMPLES):
                self._example.add(info, call)

    def _on_step(self, step: Step) -> None:
        if step.before.dim() != 3 or step.before.shape[0] != self._rows:
            return
        if self._wants(EXPANSION):
            with self._timed("expansion"), self._computing(EXPANSION):
                for row in self._sampled_rows:
                    self.expansion.collect(step, row, self._positions(row, step, cloud=True))
        if step.read is not None:
            assert self._capture is not None
            results = self.results[self.by_site[step.read.call.site].index]
            with self._timed("climb"):
                if self._wants(MAPS):
                    with self._computing(MAPS):
                        results.read_maps(self._capture, step.read)
                if self._wants(CLIMB) or (self._wants(VALUES) and _WRITE_NORM not in self.failed):
                    with self._computing(*self.options.groups & {CLIMB}, _WRITE_NORM):
                        self._read_climb(self._capture, results, step)

    def _read_climb(self, capture: Capture, results: SiteReading, step: Step) -> None:
        for row in self._sampled_rows:
            positions, index = self._positions(row, step, cloud=False), results.info.index
            read = results.read_climb(capture, step.item(row), positions, self._random(row, 3 + index))
            if read and index == 0:
                self.sampled["queries"] += len(positions)
