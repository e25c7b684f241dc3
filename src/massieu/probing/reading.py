"""One model being read: forward passes with capture and tracing, and all running results of that model."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.ops.threads import one_thread
from massieu.probing.accumulate import Ratio
from massieu.probing.capture import (
    AttentionCall,
    Capture,
    Site,
    capturing,
    relative_difference,
    self_check_error,
    stock_implementations,
)
from massieu.probing.examples import ExampleWindow
from massieu.probing.model import READABLE, model_inputs
from massieu.probing.replay import AffineQuery, HeadMaps, Replay, head_maps, tolerance
from massieu.probing.statistics.attention import AttentionStatistics, Tokens, query_statistics
from massieu.probing.statistics.climb import Climb, ClimbStatistics
from massieu.probing.statistics.expansion import ExpansionStatistics, distinct_positions
from massieu.probing.statistics.maps import MapStatistics, map_statistics
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS, VALUES
from massieu.probing.units import Units
from massieu.probing.wiring import SiteInfo, Step, StreamTracer, find_sites, noticing_cross_attention


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


@dataclass(frozen=True)
class SelfCheck:
    """How far the probe's attention and outputs are from the model's own, relative, on the first batch."""

    error: float
    tolerance: float
    site: str

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(eq=False)
class SiteResults:
    """Running results of one attention site."""

    attention: AttentionStatistics
    climb: ClimbStatistics
    first_value: Ratio
    maps: MapStatistics | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    climb_checked: bool = False
    query_map: AffineQuery | None = None


def check_readable(model: nn.Module) -> None:
    """What can be said before any text is read.

    Raises:
        InputError: the model has no attention, or does not dispatch it through transformers' attention interface.
    """
    dispatches = getattr(model, "_can_set_attn_implementation", lambda: True)
    if not _silent_attention(model, set()) or not dispatches():
        raise InputError(_why_nothing_fired(model))


def first_look(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[SiteInfo], SelfCheck, list[str], list[str]]:
    """Find the attention sites by one forward pass and compare everything with the stock model.

    Returns:
        sites, the self-check, unexplained keyword arguments, and modules that look like attention but did not fire.

    Raises:
        InputError: no attention was seen, or the self-check failed.
    """
    prepared = model_inputs(model, {k: v[:2] if isinstance(v, Tensor) else v for k, v in inputs.items()})
    calls: list[AttentionCall] = []
    with torch.no_grad():
        stock = model(**prepared)[0]
        with noticing_cross_attention(model) as cross, capturing(model, calls.append) as capture:
            capture.start_forward()
            probed = model(**prepared)[0]
    if not calls:
        raise InputError(_why_nothing_fired(model))
    sites = find_sites(model, calls, cross)
    error, where = _worst_error(calls, prepared, stock, probed)
    check = SelfCheck(error, tolerance(stock.dtype), where)
    if not check.passed:
        raise InputError(
            f"self-check failed at {where}: attention recomputed from what was captured differs from the model's own by "
            f"{error:.1e} (relative; allowed {check.tolerance:.0e}), so its statistics would be wrong"
        )
    fired = {call.site.module_name for call in calls}
    return sites, check, sorted(capture.unexplained), _silent_attention(model, fired)


def _worst_error(
    calls: list[AttentionCall], inputs: dict[str, Any], stock: Tensor, probed: Tensor
) -> tuple[float, str]:
    errors = []
    for call in calls:
        real = _real_tokens(call.query.shape[0], call.query.shape[2], inputs.get("attention_mask"))
        errors.append((self_check_error(call, real), call.site.name))
    known = _real_tokens(stock.shape[0], stock.shape[1], inputs.get("attention_mask"))
    errors.append((relative_difference(probed[known], stock[known]), "the model's output"))
    return max(errors)


def _why_nothing_fired(model: nn.Module) -> str:
    name = type(model).__name__
    if not _silent_attention(model, set()):
        return f"{name} has no attention to read; massieu reads transformers such as {READABLE}"
    return (
        f"{name} is not supported: its attention does not go through transformers' attention interface "
        f"(implementation {', '.join(stock_implementations(model)) or 'unknown'}); supported are {READABLE}"
    )


def _silent_attention(model: nn.Module, fired: set[str]) -> list[str]:
    """Innermost modules that are called attention and were not seen attending."""
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    inner = [n for n in names if not any(o != n and o.startswith(n + ".") for o in names)]
    return [n for n in inner if not any(f == n or f.startswith(n + ".") or n.startswith(f + ".") for f in fired)]


def _real_tokens(batch: int, length: int, mask: Any) -> Tensor:
    if isinstance(mask, Tensor) and tuple(mask.shape) == (batch, length):
        return mask.bool()
    return torch.ones(batch, length, dtype=torch.bool, device=mask.device if isinstance(mask, Tensor) else None)


class Reading:
    """Running results of one model over many batches."""

    def __init__(self, model: nn.Module, sites: list[SiteInfo], options: Options) -> None:
        self.model = model
        self.sites = sites
        self.options = options
        self.by_site: dict[Site, SiteInfo] = {info.site: info for info in sites}
        self.results = [self._new_results(info) for info in sites]
        self.expansion = ExpansionStatistics(options.units)
        self.tracer = StreamTracer(model, sites, self._on_step)
        self.seconds: dict[str, float] = defaultdict(float)
        self.sampled = Counter[str]()
        self.unexplained: set[str] = set()
        self.examples: list[ExampleWindow] = []
        self._capture: Capture | None = None
        self._inputs: dict[str, Any] = {}
        self._special: Tensor | None = None
        self._rows = 0
        self._windows: Sequence[int] = ()
        self._sampled_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._example: ExampleWindow | None = None

    def _new_results(self, info: SiteInfo) -> SiteResults:
        units = self.options.units
        return SiteResults(
            AttentionStatistics(info.heads, units, self.options.max_length),
            ClimbStatistics(info.heads, units),
            Ratio((1, info.heads), units),
        )

    def forward(
        self,
        inputs: dict[str, Any],
        special: Tensor | None,
        sampled: Iterable[int],
        windows: Sequence[int],
        example: tuple[int, ExampleWindow] | None = None,
    ) -> None:
        """Run one batch and add it to the results.

        Args:
            special: special tokens of ``input_ids``; None where there are none.
            sampled: rows on which replays and clouds are measured.
            windows: number of each row's window in the whole text: what is drawn at random depends on it and the seed
                alone, so that batch size changes no statistic.
            example: a row to record token by token, and where to.
        """
        self._windows = windows
        self._inputs = model_inputs(self.model, inputs)
        self._special = special
        main = self._inputs.get(str(self.model.main_input_name))
        first = main if isinstance(main, Tensor) else next(v for v in self._inputs.values() if isinstance(v, Tensor))
        self._rows = first.shape[0]
        self._sampled_rows = {row: self._sample_positions(row) for row in sampled}
        self._example = None if example is None else example[1]
        self._example_row = 0 if example is None else example[0]
        started, before = time.perf_counter(), sum(self.seconds.values())
        with torch.no_grad(), capturing(self.model, self._on_attention) as capture:
            self._capture = capture
            capture.start_forward()
            if self._sampled_rows or not self.tracer.sublayers:
                with self.tracer.watching():
                    self.model(**self._inputs)
            else:
                self.model(**self._inputs)
            self.unexplained |= capture.unexplained
        self._finish_expansion()
        self.sampled["windows"] += len(self._sampled_rows)
        if example is not None:
            self.examples.append(example[1])
        elapsed = time.perf_counter() - started
        self.seconds["forward"] += elapsed - (sum(self.seconds.values()) - before)

    def _finish_expansion(self) -> None:
        started = time.perf_counter()
        with one_thread():
            self.expansion.finish()
        self.seconds["expansion"] += time.perf_counter() - started

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _tokens(self, batch: int, length: int, decoder: bool) -> Tokens:
        mask = self._inputs.get("decoder_attention_mask" if decoder else "attention_mask")
        real = _real_tokens(batch, length, mask).to(self._device())
        special = self._special
        fits = special is not None and not decoder and tuple(special.shape) == (batch, length)
        return Tokens(real, special.to(real.device) if special is not None and fits else torch.zeros_like(real))

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def tokens_of(self, info: SiteInfo, call: AttentionCall) -> tuple[Tokens, Tokens]:
        """Tokens asked about and tokens attended to at a site."""
        decoder = in_decoder(info)
        queries = self._tokens(call.query.shape[0], call.query.shape[2], decoder)
        keys = self._tokens(call.key.shape[0], call.key.shape[2], decoder and info.kind != "cross")
        return queries, keys

    def _sample_positions(self, row: int) -> tuple[Tensor, Tensor]:
        """Positions of a row for replays (real tokens) and for clouds (real tokens, no two the same)."""
        ids = self._inputs.get("input_ids")
        mask = self._inputs.get("attention_mask")
        if ids is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        real = mask[row].bool() if isinstance(mask, Tensor) else torch.ones_like(ids[row], dtype=torch.bool)
        clouds = distinct_positions(ids[row], real, self.options.climb_queries, self._random(row, 0))
        replays = distinct_positions(None, real, self.options.climb_queries, self._random(row, 1))
        return replays, clouds

    def _positions(self, row: int, length: int, cloud: bool) -> Tensor:
        """The sampled positions, or fresh ones where the stream is not the input's tokens (images, audio)."""
        chosen = self._sampled_rows[row][1 if cloud else 0]
        if len(chosen) and self._inputs["input_ids"].shape[1] == length:
            return chosen
        everything = torch.ones(length, dtype=torch.bool, device=self._device())
        return distinct_positions(None, everything, self.options.climb_queries, self._random(row, int(cloud)))

    def _random(self, row: int, purpose: int) -> torch.Generator:
        """Random numbers that belong to one window and one purpose."""
        return torch.Generator().manual_seed(hash((self.options.seed, self._windows[row], purpose)) % 2**63)

    # Observers ---------------------------------------------------------------------------------------------------------

    def _on_attention(self, call: AttentionCall) -> None:
        with self.tracer.unobserved():
            self._read_attention(call)

    def _read_attention(self, call: AttentionCall) -> None:
        started = time.perf_counter()
        info = self.by_site.get(call.site)
        if info is None:
            raise InputError(f"{call.site.name} computed attention in this batch but not in the first one")
        self.tracer.attention(call)
        groups, results = self.options.groups, self.results[info.index]
        queries, keys = self.tokens_of(info, call)
        length = call.query.shape[2]
        if ATTENTION in groups:
            sample = self.options.query_sample
            if sample is None or sample >= length:
                positions = torch.arange(length, device=call.query.device)
                found = query_statistics(call, queries, keys, positions, itself=info.kind != "cross")
                results.attention.update(found, positions, self._rows)
            else:
                self._sampled_queries(info, call, queries, keys, sample)
        if VALUES in groups:
            self._first_value(results, call, keys)
        if self._example is not None:
            self._example.add(info, call.rows(slice(self._example_row, self._example_row + 1)))
        self.seconds["attention statistics"] += time.perf_counter() - started

    def _sampled_queries(self, info: SiteInfo, call: AttentionCall, queries: Tokens, keys: Tokens, sample: int) -> None:
        """Per-query statistics on some queries of each window, drawn window by window."""
        length, parts = call.query.shape[2], call.query.shape[0] // self._rows
        for row in range(self._rows):
            positions = torch.randperm(length, generator=self._random(row, 2))[:sample].sort().values
            positions, item = positions.to(call.query.device), slice(row * parts, (row + 1) * parts)
            asked = Tokens(queries.real[item, positions], queries.special[item, positions])
            attended = Tokens(keys.real[item], keys.special[item])
            part = call.rows(item).at(positions)
            found = query_statistics(part, asked, attended, positions, itself=info.kind != "cross")
            self.results[info.index].attention.update(found, positions, 1)

    def _first_value(self, results: SiteResults, call: AttentionCall, keys: Tokens) -> None:
        norms = call.value.float().norm(dim=-1)
        weight = keys.real[:, None].to(norms)
        mean = (norms * weight).sum(-1) / weight.sum(-1).clamp_min(1)
        first = norms.gather(2, keys.first()[:, None, None].expand(-1, norms.shape[1], -1))[..., 0]
        ratio = (first / mean).repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
        usable = ratio.isfinite() & keys.real.any(-1)[:, None]
        totals, counts = torch.where(usable, ratio, 0.0).double(), usable.double()
        shape = (self._rows, -1, ratio.shape[1])
        results.first_value.update(
            totals.reshape(shape).sum(1, keepdim=True), counts.reshape(shape).sum(1, keepdim=True)
        )

    def _on_step(self, step: Step) -> None:
        if step.before.dim() != 3 or step.before.shape[0] != self._rows:
            return
        groups = self.options.groups
        if EXPANSION in groups:
            started = time.perf_counter()
            for row in self._sampled_rows:
                self.expansion.collect(step, row, self._positions(row, step.before.shape[1], cloud=True))
            self.seconds["expansion"] += time.perf_counter() - started
        if step.read is not None and groups & {CLIMB, MAPS, VALUES}:
            started = time.perf_counter()
            self._read_site(step)
            self.seconds["climb"] += time.perf_counter() - started

    def _read_site(self, step: Step) -> None:
        read = step.read
        assert read is not None and self._capture is not None
        info = self.by_site[read.call.site]
        results = self.results[info.index]
        if MAPS in self.options.groups and results.maps is None and MAPS not in results.unavailable:
            maps = "the query and the key side read different streams"
            if info.kind != "cross":
                maps = head_maps(self._capture, read)
            if isinstance(maps, HeadMaps):
                results.maps = map_statistics(maps)
            else:
                results.unavailable[MAPS] = maps
        if not self.options.groups & {CLIMB, VALUES}:
            return
        for row in self._sampled_rows:
            positions = self._positions(row, read.state.shape[1], cloud=False)
            item = step.item(row)
            assert item.read is not None
            replay = Replay(self._capture, item.read, results.query_map)
            if not results.climb_checked:
                reason = replay.why_not(positions)
                if reason is not None:
                    results.unavailable[CLIMB] = reason
                else:
                    results.query_map = replay.query_map(positions)
                if item.read.projection is None or not item.read.writes_linearly:
                    results.unavailable["own_write"] = (
                        "what the heads write is normalised, scaled or gated before it enters the stream"
                    )
                results.climb_checked = True
            if CLIMB in results.unavailable or not len(positions):
                continue
            valid = torch.ones(1, len(positions), dtype=torch.bool, device=positions.device)
            generator = self._random(row, 3 + info.index)
            Climb(replay, item, positions, generator).measure(results.climb, valid)
            if info.index == 0:
                self.sampled["queries"] += len(positions)


def in_decoder(info: SiteInfo) -> bool:
    """Whether a site belongs to the decoder of an encoder-decoder model."""
    return "decoder" in info.site.module_name.split(".")
