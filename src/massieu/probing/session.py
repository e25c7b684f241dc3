"""One probe under way: batches in, running results, and the record of the run at the end."""

import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

import massieu
import massieu.report.record as record
from massieu.errors import InputError
from massieu.probing.check import SelfCheck, check_evaluating, first_look
from massieu.probing.checkpoint import some
from massieu.probing.examples import ExampleWindow, example_length
from massieu.probing.findings import findings
from massieu.probing.forward import named_inputs
from massieu.probing.fresh import reinitialised
from massieu.probing.interface import stock_implementations
from massieu.probing.model import LoadedModel, model_inputs
from massieu.probing.nonfinite import in_weights, shows_nan
from massieu.probing.reading import Options, Reading
from massieu.probing.result import ProbeResult
from massieu.probing.sites import SiteInfo
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS, STATISTICS, VALUES
from massieu.probing.tables import head_table, layer_table
from massieu.probing.text import Batch, TextBatches, token_strings
from massieu.probing.tokenizers import check_ids
from massieu.probing.tokens import BatchTokens, is_sampled
from massieu.probing.weights import check_weights

CONTROL_EVERY = 8  # every eighth sampled window, and the second, also runs through the re-initialised copy
EXAMPLES = 2
_OF_SITE = ("layer", "kind", "heads", "key_heads", "head_size", "route", "grade")


@dataclass(frozen=True)
class ProbeProgress:
    """How far a probe is."""

    stage: str
    tokens: int = 0
    total_tokens: int | None = None
    windows: int = 0


@dataclass(frozen=True, eq=False)
class Input:
    """What the text side gives: batches, and what to say about them afterwards."""

    batches: Iterable[Any]
    source: str
    packing: bool
    max_length: int
    tokenizer: Any


@dataclass(eq=False)
class Session:
    """One probe under way; what it reads and checks is there once it has begun."""

    loaded: LoadedModel
    given: Input
    options: Options
    tell: Callable[[ProbeProgress], None]
    max_tokens: int | None
    begun: bool = False
    reading: Reading = field(init=False)
    check: SelfCheck = field(init=False)
    control: Reading | None = None
    tokens: int = 0
    windows: int = 0
    sampled: int = 0
    recorded: int = 0
    broken_weights: record.Trouble | None = None
    unexplained: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def read_all(self, interrupted: threading.Event) -> bool:
        """Read every batch; False when interrupted before the end."""
        for batch in self.given.batches:
            if interrupted.is_set():
                break
            self._read(batch)
            self.tell(ProbeProgress("reading", self.tokens, self.max_tokens, self.windows))
        if not self.begun and interrupted.is_set():
            raise KeyboardInterrupt
        if not self.begun:
            raise InputError("there was no batch to read")
        return not interrupted.is_set()

    def _read(self, batch: Any) -> None:
        module = self.loaded.module
        inputs = named_inputs(module, batch.inputs if isinstance(batch, Batch) else batch)
        special = batch.special if isinstance(batch, Batch) else None
        check_ids(module, inputs)
        if not self.begun:
            self.begin(inputs)
        rows = self.reading.layout.rows(module, inputs)
        sampled = [row for row in range(rows) if is_sampled(self.windows + row)]
        example = None
        if sampled and self.recorded < EXAMPLES and ATTENTION in self.options.groups:
            example = self._example(batch, inputs, sampled[0])
            self.recorded += 1
        numbers = range(self.windows, self.windows + rows)
        self.reading.forward(inputs, special, sampled, numbers, example)
        if self.control is not None:
            chosen = [row for i, row in enumerate(sampled, self.sampled) if i % CONTROL_EVERY == 0 or i == 1]
            if chosen and not self.reading.layout.separable:
                self.control.forward(inputs, special, chosen, numbers)
            elif chosen:
                along = {k for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and v.shape[0] == rows}
                part = {k: v[chosen] if k in along else v for k, v in inputs.items()}
                marks = None if special is None else special[chosen]
                self.control.forward(part, marks, range(len(chosen)), [numbers[row] for row in chosen])
        self.sampled += len(sampled)
        self.windows += rows
        counted = BatchTokens(inputs).counted()
        # Where there is no text, what the first attention layer asks about, such as patches.
        self.tokens = self.reading.read_queries if counted is None else self.tokens + counted

    def begin(self, inputs: dict[str, Any]) -> None:
        """Check the model and the first batch, and make ready to read.

        Raises:
            InputError: what was checked does not hold.
        """
        module = self.loaded.module
        check_evaluating(module.modules())
        self.broken_weights = in_weights(module)
        look = first_look(module, inputs)
        self.check = look.check
        self.warnings += check_weights(self.loaded, look.sites, inputs)
        self.unexplained.update(look.unexplained)
        if look.silent:
            self.warnings.append(
                f"{len(look.silent)} modules look like attention but were not seen attending, so they are not in the "
                f"result: {some(look.silent, 5)}"
            )
        self.warnings += [f"the attention of {name} is not read: {reason}" for name, reason in look.refused.items()]
        self.reading = Reading(module, look.sites, self.options, look.layout, look.refused)
        if self.options.groups & {ATTENTION, VALUES, CLIMB, EXPANSION}:
            self._begin_control(inputs)
        self.begun = True

    def _begin_control(self, inputs: dict[str, Any]) -> None:
        module, sites, layout = self.loaded.module, self.reading.sites, self.reading.layout
        fresh, said = reinitialised(module, self.options.seed, lambda copied: shows_nan(copied, sites, inputs))
        if said is not None:
            self.warnings.append(f"the re-initialised control {'is left out: ' if fresh is None else ''}{said}")
        if fresh is not None:
            options = replace(self.options, groups=self.options.groups - {MAPS})
            self.control = Reading(fresh, sites, options, layout, self.reading.refused)

    def _example(self, batch: Any, inputs: dict[str, Any], row: int) -> ExampleWindow:
        names: dict[str, list[str]] = {}
        tokenizer = self.given.tokenizer
        if tokenizer is not None and isinstance(inputs.get("input_ids"), Tensor):
            read = BatchTokens(model_inputs(self.loaded.module, inputs))
            for side in ("text", "decoder"):
                ids, mask = read.ids(decoder=side == "decoder"), read.mask(decoder=side == "decoder")
                if ids is not None:
                    kept = ids[row] if mask is None else ids[row][mask[row]]
                    names[side] = token_strings(tokenizer, kept.tolist())
        title = f"window {self.windows + row}"
        if isinstance(batch, Batch) and batch.names[row]:
            title += f" · {batch.names[row]}"
        length = example_length(sum(s.heads for s in self.reading.sites), EXAMPLES)
        return ExampleWindow(title, names, min(length, len(names.get("text", range(length)))), row)

    # Result ------------------------------------------------------------------------------------------------------------

    def result(self, wanted: frozenset[str], settings: dict[str, Any], complete: bool) -> ProbeResult:
        """The tables and the record of the run, of the statistics that are wanted and could be computed."""
        reading = self.reading
        libraries = {"massieu": massieu, "torch": torch, "transformers": sys.modules.get("transformers"), "numpy": np}
        wanted = wanted - reading.left_out()
        heads = head_table(reading, self.control, wanted).frame()
        layers = layer_table(reading, self.control, wanted).frame()
        run = record.RunRecord(
            massieu_version=massieu.__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            complete=complete,
            model=self.model_record(),
            text=self._text(),
            error_unit=self._error_unit(),
            self_check=record.SelfCheckRecord(**vars(self.check), passed=self.check.passed),
            capture=record.CaptureRecord(
                route=self.route(),
                attention_sites=len(reading.sites),
                unexplained_keywords=sorted(self.unexplained | reading.unexplained),
            ),
            sites=[self.site_record(info) for info in reading.sites],
            sublayers=reading.tracer.sublayers,
            settings=settings,
            seed=self.options.seed,
            versions={
                "python": platform.python_version(),
                **{name: used.__version__ for name, used in libraries.items() if used},
            },
            timing=self._timing(),
            sample=record.SampleRecord(reading.sampled["windows"], reading.sampled["queries"]),
            statistics=[each for each in STATISTICS.values() if each.name in wanted],
            findings=findings(heads, layers),
            warnings=self.all_warnings(),
            unavailable=self._unavailable(),
            nonfinite=self._nonfinite(),
            trouble=self.trouble(),
        )
        return ProbeResult(run=run, details=self._details(), heads=heads, layers=layers)

    def route(self) -> str:
        """How attention was read, in words."""
        sites, said = self.reading.sites, []
        own = " and ".join(stock_implementations(self.loaded.module))
        by = Counter(info.route for info in sites)
        if by["interface"]:
            said.append(f"transformers attention interface; output computed by the model's own {own} attention")
        if by["tap"]:
            said.append("scores followed to their softmax in the model's own code")
        if len(by) > 1:
            said = [f"{words} ({by[route]} sites)" for words, route in zip(said, ("interface", "tap"), strict=True)]
        only = sum(info.grade == "scores" for info in sites)
        return "; ".join(said) + (f"; of {only} of {len(sites)} sites the scores alone" if only else "")

    def model_record(self) -> record.ModelRecord:
        """The model as ``run.json`` describes it."""
        sites = self.reading.sites
        described = self.loaded.describe()
        described.layers = len({(s.block, s.layer) for s in sites})
        described.heads = sum(s.heads for s in sites)
        return described

    def _text(self) -> record.TextRecord:
        batches = self.given.batches
        report = batches.report if isinstance(batches, TextBatches) else None
        counted = {"tokens": self.tokens, "windows": self.windows}
        asked = {"source": self.given.source, "max_length": self.given.max_length, "packing": self.given.packing}
        found = {name: getattr(report, name, None) for name in ("documents", "dropped", "unknown_share")}
        return record.TextRecord(**asked, **counted, **found)

    def _error_unit(self) -> record.ErrorUnitRecord:
        name, number = self.reading.results[0].attention.ratio.error_unit()
        if ATTENTION not in self.options.groups:
            name, number = "window", self.windows
        return record.ErrorUnitRecord(name, number)

    def site_record(self, info: SiteInfo) -> record.SiteRecord:
        """A site as ``run.json`` describes it."""
        decoder = info.in_decoder
        return record.SiteRecord(
            index=info.index,
            name=info.site.name,
            **{name: getattr(info, name) for name in _OF_SITE},
            query_tokens="decoder" if decoder else "text",
            key_tokens="decoder" if decoder and info.kind != "cross" else "text",
            unavailable=self.reading.results[info.index].unavailable,
        )

    def _timing(self) -> dict[str, float]:
        times = {name: round(seconds, 3) for name, seconds in self.reading.seconds.items()}
        if self.control is not None:
            times["re-initialised control"] = round(sum(self.control.seconds.values()), 3)
        return times

    def _nonfinite(self) -> list[record.NonfiniteRecord]:
        pairs = zip(self.reading.sites, self.reading.results, strict=True)
        counts = [(info, head, int(n)) for info, found in pairs for head, n in enumerate(found.attention.broken) if n]
        return [record.NonfiniteRecord(info.site.name, info.layer, head, n) for info, head, n in counts]

    def trouble(self) -> record.Trouble | None:
        """What breaks the model's numbers, if anything does: first its weights, then what arises on the way."""
        return self.broken_weights or self.reading.trouble

    def _unavailable(self) -> list[record.UnavailableRecord]:
        """What could not be computed at all, in the model or in its re-initialised copy, with the reason."""
        readings = {"model": self.reading, "re-initialised control": self.control}
        failed = [(of, part, why) for of, read in readings.items() if read for part, why in read.failed.items()]
        return [record.UnavailableRecord(*each) for each in failed]

    def all_warnings(self) -> list[str]:
        """Sentences for the terminal and the page."""
        found = list(self.warnings)
        if isinstance(self.given.batches, TextBatches) and (many := self.given.batches.report.many_unknown()):
            found.append(many)
        nonfinite = self._nonfinite()
        for entry in self._unavailable():
            of = "" if entry.of == "model" else f" of the {entry.of}"
            found.append(f"{entry.statistic}{of} could not be computed and is left out ({entry.reason})")
        if self.control is not None and self.control.trouble is not None:
            found.append(f"in the re-initialised control, {self.control.trouble.sentence}")
        if self.unexplained:
            found.append(f"unexplained attention keywords: {', '.join(sorted(self.unexplained))}")
        if nonfinite:
            worst = max(nonfinite, key=lambda entry: entry.count)
            found.append(
                f"{sum(entry.count for entry in nonfinite)} queries had NaN or infinite scores and were left out, in "
                f"{len(nonfinite)} heads (most in layer {worst.layer} head {worst.head})"
            )
        return found

    def _details(self) -> dict[str, Any]:
        histograms: dict[str, Any] = {}
        if ATTENTION in self.options.groups:
            every = [results.attention.histograms for results in self.reading.results]
            for name, first in every[0].items():
                counts = {str(i): found[name].counts.tolist() for i, found in enumerate(every)}
                histograms[name] = {"edges": first.edges.round(6).tolist(), "counts": counts}
        return {"histograms": histograms, "examples": [e.to_dict() for e in self.reading.examples]}
