"""`probe`: a model and text in, a result out; and `describe`: what would be read, without any text."""

import itertools
import platform
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import massieu
from massieu.errors import InputError, require_extra
from massieu.probing.capture import stock_implementations
from massieu.probing.examples import ExampleWindow, example_length
from massieu.probing.findings import findings
from massieu.probing.model import LoadedModel, as_loaded, dummy_inputs, load_model, reinitialised
from massieu.probing.reading import Options, Reading, SelfCheck, first_look, in_decoder
from massieu.probing.result import ProbeResult
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS, STATISTICS, VALUES, select
from massieu.probing.tables import head_table, layer_table
from massieu.probing.text import Batch, TextBatches, check_sources, read_documents, reference_documents, token_strings
from massieu.probing.units import Units
from massieu.probing.wiring import SiteInfo

SCHEMA_VERSION = 1
SAMPLE_SHARE = 0.1  # of the windows, for replays, clouds and controls
SAMPLE_LEAST = 8  # windows at the beginning that are always sampled, so that short texts have error bars
CONTROL_EVERY = 4  # every fourth sampled window also runs through the re-initialised copy
EXAMPLES = 2


@dataclass(frozen=True)
class ProbeProgress:
    """How far a probe is."""

    stage: str
    tokens: int = 0
    total_tokens: int | None = None
    windows: int = 0


@dataclass(frozen=True, eq=False)
class _Input:
    """What the text side gives: batches, and what to say about them afterwards."""

    batches: Iterable[Batch | Mapping[str, Tensor]]
    source: str
    packing: bool
    max_length: int
    text: TextBatches | None
    tokenizer: Any


def probe(
    model: str | Path | nn.Module | None = None,
    tokenizer_or_batches: Any = None,
    *,
    text: Sequence[str | Path] | str | Path | None = None,
    column: str | None = None,
    statistics: Sequence[str] | None = None,
    max_length: int = 256,
    max_tokens: int | None = None,
    batch_size: int = 8,
    packing: bool = True,
    query_sample: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[ProbeProgress], None] | None = None,
) -> ProbeResult:
    """Read every attention head and every residual step of a transformer as statistical mechanics.

    The model's outputs stay its own (checked on the first batch); statistics are computed beside the forward pass and
    kept as running results, so memory does not grow with the text.

    Args:
        model: a folder, a hub name, a ``transformers`` model in memory, or None for the MiniLM sentence encoder.
        tokenizer_or_batches: for a model in memory, its tokenizer, or an iterable of batches (mappings of tensors as
            the model's forward takes them, padding marked by ``attention_mask``). Not needed for a folder or hub name.
        text: files, folders or ``"-"``; None is the English reference text that every Python ships.
        column: field of ``.jsonl`` and ``.parquet`` files that holds the text.
        statistics: names of statistics or groups; None is all of them.
        max_length: tokens in a window.
        max_tokens: stop after this many tokens.
        packing: cut the text into full windows; False keeps one document per row, with padding.
        query_sample: at most this many queries per window for the per-query statistics (long inputs).
        progress: called after every batch.

    Returns:
        The result; ``complete`` is False when Ctrl-C ended it early.

    Raises:
        InputError: bad input of any kind, named in one sentence; also when the self-check finds that what was captured
            does not reproduce the model's own attention.
    """
    wanted, groups = select(statistics)
    _check_numbers(max_length, max_tokens, batch_size, query_sample)
    if not isinstance(model, nn.Module) and text is not None:
        check_sources(_sources(text), column=column)
    tell = progress or (lambda _: None)
    tell(ProbeProgress("loading the model"))
    loaded = _load(model, tokenizer_or_batches, device, dtype, revision, trust_remote_code)
    given = _input(
        loaded, tokenizer_or_batches, text, column, max_length=max_length, max_tokens=max_tokens,
        batch_size=batch_size, packing=packing,
    )  # fmt: skip
    options = Options(
        groups, Units(mode="window" if given.packing else "document"), given.max_length, query_sample, seed=seed
    )
    session = _Session(loaded, given, options, tell, max_tokens)
    with torch.random.fork_rng(devices=[]), _interruptible() as interrupted:
        torch.manual_seed(seed)
        complete = session.read_all(interrupted)
    tell(ProbeProgress("writing", session.tokens, max_tokens, session.windows))
    settings = {
        "statistics": None if statistics is None else list(statistics), "max_length": max_length,
        "max_tokens": max_tokens, "batch_size": batch_size, "packing": packing, "query_sample": query_sample,
        "device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code,
        "column": column,
    }  # fmt: skip
    return session.result(wanted, settings, complete)


def _check_numbers(max_length: int, max_tokens: int | None, batch_size: int, query_sample: int | None) -> None:
    named = (("max_length", max_length, 4), ("max_tokens", max_tokens, 1), ("batch_size", batch_size, 1))
    for name, value, least in (*named, ("query_sample", query_sample, 1)):
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")


def _sources(text: Sequence[str | Path] | str | Path) -> list[str | Path]:
    return [text] if isinstance(text, str | Path) else list(text)


def _load(
    model: str | Path | nn.Module | None, tokenizer: Any, device: str | None, dtype: str | None, revision: str | None,
    trust_remote_code: bool,
) -> LoadedModel:  # fmt: skip
    if isinstance(model, nn.Module):
        if device is not None or dtype is not None:
            raise InputError("device and dtype belong to models loaded by name; move a model in memory yourself")
        return as_loaded(model, tokenizer if callable(tokenizer) else None)
    return load_model(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)


def _input(
    loaded: LoadedModel, tokenizer_or_batches: Any, text: Any, column: str | None, *, max_length: int,
    max_tokens: int | None, batch_size: int, packing: bool,
) -> _Input:  # fmt: skip
    if tokenizer_or_batches is not None and not callable(tokenizer_or_batches):
        if text is not None:
            raise InputError("give either batches or text, not both")
        return _Input(tokenizer_or_batches, "batches", True, max_length, None, loaded.tokenizer)
    tokenizer = tokenizer_or_batches if tokenizer_or_batches is not None else loaded.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{loaded.name} has no tokenizer, so it cannot read text; give batches of its inputs from Python: "
            "massieu.probe(model, batches)"
        )
    longest = _longest(loaded.module)
    if longest is not None and max_length > longest:
        raise InputError(f"max_length {max_length} is more than the {longest} positions that {loaded.name} has")
    if text is None:
        documents, source = reference_documents, "pydoc_data.topics (the reference text that ships with Python)"
    else:
        sources = _sources(text)
        documents, source = (lambda: read_documents(sources, column=column)), ", ".join(map(str, sources))
    batches = TextBatches(
        tokenizer, documents, max_length=max_length, max_tokens=max_tokens, batch_size=batch_size, packing=packing
    )
    return _Input(batches, source, packing, max_length, batches, tokenizer)


def _longest(module: nn.Module) -> int | None:
    """Positions an absolute position table has; None where there is no such table."""
    config: Any = module.config
    for name in ("max_position_embeddings", "n_positions"):
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            offset = 2 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
            return positions - offset
    return None


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C lets the current batch finish and sets the event; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


class _Session:
    """One probe under way."""

    def __init__(
        self, loaded: LoadedModel, given: _Input, options: Options, tell: Callable[[ProbeProgress], None],
        max_tokens: int | None,
    ) -> None:  # fmt: skip
        self.loaded, self.given, self.options, self.tell, self.max_tokens = loaded, given, options, tell, max_tokens
        self.tokens = self.windows = self.sampled = self.recorded = 0
        self.reading: Reading | None = None
        self.control: Reading | None = None
        self.check: SelfCheck | None = None
        self.unexplained: set[str] = set()
        self.warnings: list[str] = []

    def read_all(self, interrupted: threading.Event) -> bool:
        """Read every batch; False when interrupted before the end."""
        for batch in self.given.batches:
            if interrupted.is_set():
                break
            self._read(batch)
            self.tell(ProbeProgress("reading", self.tokens, self.max_tokens, self.windows))
        else:
            if self.reading is None:
                raise InputError("there was no batch to read")
            return not interrupted.is_set()
        if self.reading is None:
            raise KeyboardInterrupt
        return False

    def _read(self, batch: Batch | Mapping[str, Tensor]) -> None:
        inputs = dict(batch.inputs) if isinstance(batch, Batch) else dict(batch)
        special = batch.special if isinstance(batch, Batch) else None
        rows = next(v for v in inputs.values() if isinstance(v, Tensor)).shape[0]
        if self.reading is None:
            self._begin(inputs)
        assert self.reading is not None
        sampled = [row for row in range(rows) if self._is_sampled(self.windows + row)]
        example = None
        if sampled and self.recorded < EXAMPLES and ATTENTION in self.options.groups:
            example = (sampled[0], self._example(batch, inputs, sampled[0], self.windows + sampled[0]))
            self.recorded += 1
        self.reading.forward(inputs, special, sampled, example)
        if self.control is not None:
            chosen = [row for i, row in enumerate(sampled, self.sampled) if i % CONTROL_EVERY == 0]
            if chosen:
                part = {
                    k: v[chosen] if isinstance(v, Tensor) and v.dim() and v.shape[0] == rows else v
                    for k, v in inputs.items()
                }
                self.control.forward(part, None if special is None else special[chosen], range(len(chosen)))
        self.sampled += len(sampled)
        self.windows += rows
        mask = inputs.get("attention_mask")
        ids = inputs.get("input_ids")
        counted = mask if isinstance(mask, Tensor) and mask.dim() == 2 else ids
        if isinstance(counted, Tensor):
            self.tokens += int(mask.sum()) if counted is mask and isinstance(mask, Tensor) else counted.numel()

    @staticmethod
    def _is_sampled(window: int) -> bool:
        if window < SAMPLE_LEAST:
            return True
        return int((window + 1) * SAMPLE_SHARE) > int(window * SAMPLE_SHARE)

    def _begin(self, inputs: dict[str, Any]) -> None:
        module = self.loaded.module
        if module.training:
            raise InputError("the model is in training mode, so dropout would change its numbers; call model.eval() first")
        sites, self.check, unexplained, silent = first_look(module, inputs)
        self.unexplained.update(unexplained)
        if silent:
            self.warnings.append(
                f"{len(silent)} modules look like attention but were not seen attending, so they are not in the result: "
                + ", ".join(silent[:5])
                + (" …" if len(silent) > 5 else "")
            )
        self.reading = Reading(module, sites, self.options)
        if self.options.groups & {ATTENTION, VALUES, CLIMB, EXPANSION}:
            groups = self.options.groups - {MAPS}
            fresh = reinitialised(module, self.options.seed)
            self.control = Reading(fresh, sites, Options(**{**vars(self.options), "groups": groups}))

    def _example(self, batch: Any, inputs: dict[str, Any], row: int, window: int) -> ExampleWindow:
        assert self.reading is not None
        ids = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        names: dict[str, list[str]] = {}
        if isinstance(ids, Tensor) and self.given.tokenizer is not None:
            kept = ids[row][mask[row].bool()] if isinstance(mask, Tensor) else ids[row]
            names["text"] = token_strings(self.given.tokenizer, kept.tolist())
            if any(in_decoder(s) for s in self.reading.sites):
                names["decoder"] = ["<start>", *names["text"][:-1]]
        title = f"window {window}"
        if isinstance(batch, Batch) and batch.names[row]:
            title += f" · {batch.names[row]}"
        length = example_length(sum(s.heads for s in self.reading.sites), EXAMPLES)
        if "text" in names:
            length = min(length, len(names["text"]))
        return ExampleWindow(title, names, length)

    # Result ------------------------------------------------------------------------------------------------------------

    def result(self, wanted: frozenset[str], settings: dict[str, Any], complete: bool) -> ProbeResult:
        reading = self.reading
        assert reading is not None and self.check is not None
        heads = head_table(reading, self.control, wanted).frame()
        layers = layer_table(reading, self.control, wanted).frame()
        nonfinite = self._nonfinite()
        run = {
            "schema_version": SCHEMA_VERSION,
            "massieu_version": massieu.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "model": self._model(),
            "text": self._text(),
            "error_unit": self._error_unit(),
            "self_check": {**vars(self.check), "passed": self.check.passed},
            "capture": {
                "route": "transformers attention interface; output computed by the model's own "
                + " and ".join(stock_implementations(self.loaded.module)) + " attention",
                "attention_sites": len(reading.sites),
                "unexplained_keywords": sorted(self.unexplained | reading.unexplained),
            },
            "sites": [self._site(info) for info in reading.sites],
            "sublayers": [vars(s) for s in reading.tracer.sublayers],
            "settings": settings,
            "seed": self.options.seed,
            "versions": _versions(),
            "timing": self._timing(),
            "sample": {"windows": reading.sampled["windows"], "queries": reading.sampled["queries"]},
            "statistics": [
                {**vars(s), "cost": s.cost} for s in STATISTICS.values() if s.name in wanted
            ],
            "findings": findings(heads, layers),
            "warnings": self._all_warnings(nonfinite),
            "nonfinite": nonfinite,
        }  # fmt: skip
        return ProbeResult(run=run, details=self._details(), heads=heads, layers=layers)

    def _model(self) -> dict[str, Any]:
        assert self.reading is not None
        sites = self.reading.sites
        described = self.loaded.describe()
        described["layers"] = len({(s.block, s.layer) for s in sites})
        described["heads"] = sum(s.heads for s in sites)
        return described

    def _text(self) -> dict[str, Any]:
        report = None if self.given.text is None else self.given.text.report
        return {
            "source": self.given.source,
            "documents": None if report is None else report.documents,
            "tokens": self.tokens,
            "windows": self.windows,
            "max_length": self.given.max_length,
            "packing": self.given.packing,
            "dropped": None if report is None else report.dropped,
        }

    def _error_unit(self) -> dict[str, Any]:
        assert self.reading is not None
        name, number = self.reading.results[0].attention.ratio.error_unit()
        if ATTENTION not in self.options.groups:
            name, number = "window", self.windows
        return {"unit": name, "count": number}

    def _site(self, info: SiteInfo) -> dict[str, Any]:
        assert self.reading is not None
        decoder = in_decoder(info)
        return {
            "index": info.index, "name": info.site.name, "layer": info.layer, "kind": info.kind, "heads": info.heads,
            "key_heads": info.key_heads, "head_size": info.head_size,
            "query_tokens": "decoder" if decoder else "text",
            "key_tokens": "decoder" if decoder and info.kind != "cross" else "text",
            "unavailable": self.reading.results[info.index].unavailable,
        }  # fmt: skip

    def _timing(self) -> dict[str, float]:
        assert self.reading is not None
        times = {name: round(seconds, 3) for name, seconds in self.reading.seconds.items()}
        if self.control is not None:
            times["re-initialised control"] = round(sum(self.control.seconds.values()), 3)
        return times

    def _nonfinite(self) -> list[dict[str, Any]]:
        assert self.reading is not None
        return [
            {"site": info.site.name, "layer": info.layer, "head": int(head), "count": int(results.attention.broken[head])}
            for info, results in zip(self.reading.sites, self.reading.results, strict=True)
            for head in np.nonzero(results.attention.broken)[0]
        ]

    def _all_warnings(self, nonfinite: list[dict[str, Any]]) -> list[str]:
        found = list(self.warnings)
        if self.unexplained:
            found.append(f"unexplained attention keywords: {', '.join(sorted(self.unexplained))}")
        if nonfinite:
            worst = max(nonfinite, key=lambda entry: entry["count"])
            found.append(
                f"{sum(e['count'] for e in nonfinite)} queries had NaN or infinite scores and were left out, in "
                f"{len(nonfinite)} heads (most in layer {worst['layer']} head {worst['head']})"
            )
        return found

    def _details(self) -> dict[str, Any]:
        assert self.reading is not None
        histograms: dict[str, Any] = {}
        if ATTENTION in self.options.groups:
            for name, first in self.reading.results[0].attention.histograms.items():
                counts = {
                    str(i): r.attention.histograms[name].counts.tolist() for i, r in enumerate(self.reading.results)
                }
                histograms[name] = {"edges": first.edges.round(6).tolist(), "counts": counts}
        return {"histograms": histograms, "examples": [e.to_dict() for e in self.reading.examples]}


def _versions() -> dict[str, str]:
    transformers = require_extra("transformers", "probe")
    return {
        "massieu": massieu.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


@dataclass(frozen=True, eq=False)
class Description:
    """What a probe would read in a model."""

    model: dict[str, Any]
    route: str
    sites: list[dict[str, Any]]
    sublayers: list[dict[str, Any]]
    unavailable: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def describe(
    model: str | Path | nn.Module | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Description:
    """Find the attention sites, heads and wiring of a model from one tiny made-up input; no text is needed.

    Raises:
        InputError: as for `probe`; also when the model reads neither tokens nor images and ``inputs`` is not given.
    """
    loaded = _load(model, None, device, dtype, revision, trust_remote_code)
    ready = dict(inputs) if inputs is not None else dummy_inputs(loaded.module)
    options = Options(frozenset({CLIMB, MAPS}), Units(), 256, climb_queries=4)
    given = _Input(itertools.repeat(ready, 1), "made-up input", True, 256, None, None)
    session = _Session(loaded, given, options, lambda _: None, None)
    with torch.random.fork_rng(devices=[]):
        session._begin(dict(ready))
        session.control = None
        session.read_all(threading.Event())
    assert session.reading is not None
    route = f"transformers attention interface, {' and '.join(stock_implementations(loaded.module))}"
    sites = [session._site(info) for info in session.reading.sites]
    reasons = sorted({f"{k}: {reason}" for site in sites for k, reason in site["unavailable"].items()})
    sublayers = [vars(s) for s in session.reading.tracer.sublayers]
    return Description(session._model(), route, sites, sublayers, reasons, session.warnings)
