"""The record of a run: what a session says of itself and of its numbers at the end."""

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import massieu
import massieu.storage.record as record
from massieu.errors import InputError
from massieu.probing.capture.interface import stock_implementations
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.checks.check import SelfCheck
from massieu.probing.data.images import ImageBatches
from massieu.probing.data.pair_batches import PairBatches
from massieu.probing.data.text import TextBatches, token_strings
from massieu.probing.data.text_digest import TextDigest, vocabulary_digest
from massieu.probing.model.model import LoadedModel
from massieu.probing.reading.examples import Examples, ExampleWindow
from massieu.probing.reading.generation import GeneratingReading
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import PER_TOKEN, TemporaryFolder, TokenRows, TokenTable
from massieu.probing.reading.reading import Reading
from massieu.probing.result.findings import findings
from massieu.probing.result.result import ProbeResult
from massieu.probing.result.tables import Tables, arrangement_of, unit_sums
from massieu.probing.session.draws import Draws
from massieu.probing.statistics.group import Row
from massieu.probing.statistics.registry import ATTENTION
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.unit_sums import UnitSums
from massieu.probing.sums.units import Estimate

_OF_SITE = ("layer", "kind", "heads", "key_heads", "head_size", "route", "grade")
QUICK = (
    "this was a quick run: the attention's statistics alone, with standard errors, but without the re-initialised control that "
    "the values are compared with, and without examples"
)
NO_CONTROL = "no re-initialised models were drawn (draws=0), so no value is compared with theirs"


@dataclass(frozen=True, eq=False)
class Input:
    """What the text side gives: batches, and what to say about them afterwards.

    Attributes:
        window: why windows are shorter than the default, as a sentence; None where they are not.
    """

    batches: Iterable[Any]
    source: str
    packing: bool
    max_length: int
    tokenizer: Any
    window: str | None = None


def behind_prefix(side: str, prefix: int) -> str:
    """What the keys of a side's tokens are called, with those of a prefix before them."""
    return f"{side} behind {prefix} virtual tokens"


class SessionRecord:
    """What has been read, in the tables and the record of the run."""

    loaded: LoadedModel
    given: Input
    options: Options
    reading: Reading
    check: SelfCheck
    draws: Draws | None
    draws_shared: bool
    tokens: int
    read: int
    replacements: list[record.ReplacementRecord]
    broken_weights: record.Trouble | None
    unexplained: set[str]
    warnings: list[str]
    digest: TextDigest
    rows_in: Path | None
    rows_kept: TemporaryFolder | None
    token_rows: TokenRows | None

    def result(self, wanted: frozenset[str], settings: dict[str, Any], complete: bool) -> ProbeResult:
        """The tables and the record of the run, of the statistics that are wanted and could be computed."""
        reading = self.reading
        libraries = {"massieu": massieu, "torch": torch, "transformers": sys.modules.get("transformers"), "numpy": np}
        wanted = wanted - reading.left_out()
        tokens, token_rows = self._token_table()
        arrangements = {info.site.name: arrangement_of(info) for info in reading.sites}
        statistics = self.options.catalogue.statistics
        rows = list(reading.rows())
        wanted = wanted - reading.left_out()  # making the rows of a user's group may have failed just now
        if self.options.catalogue.own:
            self._warn_of_empty_statistics(rows)
        tables = Tables.of(rows, self.draws, {name: statistics[name] for name in wanted}, arrangements)
        heads = tables.heads.frame()
        layers = tables.layers.frame()
        ratios = list(reading.ratios())
        of_text = next((each.ratio for each in ratios if not each.ratio.units.sampled), None)
        of_sample = {id(each.ratio): each.ratio for each in ratios if each.ratio.units.sampled}.values()  # each once
        half_text = None if of_text is None else _degrees(of_text.second_half())
        half_sample = max((_degrees(ratio.second_half()) or 0.0 for ratio in of_sample), default=0.0)
        run = record.RunRecord(
            massieu_version=massieu.__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            complete=complete,
            model=self.model_record(),
            text=self._text(),
            error_unit=self._error_unit(of_text),
            self_check=record.SelfCheckRecord(**vars(self.check), passed=self.check.passed),
            capture=record.CaptureRecord(
                route=self.route(),
                attention_sites=len(reading.sites),
                unexplained_keywords=sorted(self.unexplained | reading.unexplained),
            ),
            sites=[self.site_record(info) for info in reading.sites],
            sublayers=reading.sublayers,
            settings=settings,
            seed=self.options.seed,
            versions={
                "python": platform.python_version(),
                **{name: used.__version__ for name, used in libraries.items() if used},
            },
            timing=self._timing(),
            sample=record.SampleRecord(
                reading.sampled_windows,
                max((group.sampled_queries for group in reading.groups.values()), default=0),
                max(filter(None, (_degrees(ratio.estimate()) for ratio in of_sample)), default=None),
            ),
            statistics=[statistic for statistic in statistics.values() if statistic.name in wanted],
            findings=findings(heads, layers, (half_text or 0.0, half_sample)),
            warnings=self.all_warnings(),
            unavailable=self._unavailable(),
            nonfinite=self._nonfinite(),
            replacements=self.replacements,
            trouble=self.trouble(),
            per_token=token_rows,
        )
        units = UnitSums(self.digest.text(), vocabulary_digest(self.given.tokenizer), unit_sums(ratios, wanted))
        return ProbeResult(
            run=run, details=self._details(), heads=heads, layers=layers, units=units, token_table=tokens
        )

    def _warn_of_empty_statistics(self, rows: Sequence[Row]) -> None:
        """Warn of statistics of the user's own that have no number anywhere."""
        measured = {row.statistic for row in rows if np.any(row.estimate.count > 0)}
        for name in self.options.catalogue.own:
            if name not in measured and name not in self.reading.failed:
                self.warnings.append(f"{name} has no number: it was defined nowhere in what was read")

    def _token_table(self) -> tuple[TokenTable | None, record.PerTokenRecord | None]:
        """The rows of all processes; None where they were not wanted, or some could not be computed or written."""
        written = self.token_rows
        if self.rows_in is None or written is None or {PER_TOKEN, ATTENTION} & self.reading.failed.keys():
            return None, None
        table = TokenTable.found_in(self.rows_in, self.rows_kept)
        problem = None
        try:
            rows, size = table.size()
        except (InputError, OSError) as error:
            rows = 0
            size = 0
            problem = str(error)
        if rows != written.count:
            written.failed[PER_TOKEN] = problem or f"{self.rows_in} holds {rows:,} rows of {written.count:,}"
            return None, None
        return table, record.PerTokenRecord(list(self.options.per_token), rows, size)

    def route(self) -> str:
        """How attention was read, in words."""
        sites = self.reading.sites
        implementations = " and ".join(stock_implementations(self.loaded.module))
        words = {
            "interface": f"transformers attention interface; output computed by the model's own {implementations} attention",
            "tap": "scores followed to their softmax in the model's own code",
            "ops": "told by massieu's own attention",
        }
        sites_by_route = Counter(info.route for info in sites)
        clauses = [words[route] for route in words if sites_by_route[route]]
        if len(sites_by_route) > 1:
            clauses = [f"{words[route]} ({sites_by_route[route]} sites)" for route in words if sites_by_route[route]]
        scores_alone = sum(info.grade == "scores" for info in sites)
        if scores_alone:
            clauses.append(f"of {scores_alone} of {len(sites)} sites the scores alone")
        return "; ".join(clauses)

    def model_record(self) -> record.ModelRecord:
        """The model as ``run.json`` describes it."""
        sites = self.reading.sites
        model = self.loaded.describe()
        model.layers = len({(site.block, site.layer) for site in sites})
        model.heads = sum(site.heads for site in sites)
        return model

    def _text(self) -> record.TextRecord:
        batches = self.given.batches
        report = batches.report if isinstance(batches, TextBatches | PairBatches | ImageBatches) else None
        source = self.given.source
        if isinstance(self.reading, GeneratingReading):
            source = f"{self.reading.new_tokens:,} tokens that the model wrote after prompts from {source}"
        # What the reader of the text has counted, where there is one.
        counts = {name: getattr(report, name, None) for name in ("documents", "dropped", "unknown_share")}
        return record.TextRecord(
            source=source,
            max_length=self.given.max_length,
            packing=self.given.packing,
            tokens=self.tokens,
            windows=self.read,
            **counts,
            bos=batches.bos_sentence() if isinstance(batches, TextBatches) else None,
            window=self.given.window,
        )

    def _error_unit(self, of_text: Ratio | None) -> record.ErrorUnitRecord:
        """The units of a ratio that was measured on all of the text; windows where there is none."""
        if of_text is None:
            return record.ErrorUnitRecord("window", self.read, None)
        return record.ErrorUnitRecord(*of_text.error_unit(), _degrees(of_text.estimate()))

    def site_record(self, info: SiteInfo) -> record.SiteRecord:
        """A site as ``run.json`` describes it."""
        decoder = info.in_decoder
        side = "decoder" if decoder else self._side(info)
        return record.SiteRecord(
            index=info.index,
            name=info.site.name,
            **{name: getattr(info, name) for name in _OF_SITE},
            query_tokens=side,
            key_tokens=self._key_side(info, side),
            unavailable=self.reading.unavailable(info),
        )

    def _key_side(self, info: SiteInfo, side: str) -> str:
        if info.prefix:
            return behind_prefix(side, info.prefix)
        return "text" if info.in_decoder and info.kind == "cross" else side

    def _side(self, info: SiteInfo) -> str:
        """Whether a site attends to the patches of an image rather than to a text: it has as many tokens as patches."""
        for example in self._examples():
            patches = example.tokens.get("image")
            numbers = example.sites.get(str(info.index))
            if patches is not None and numbers is not None and numbers["entropy"].shape[1] == len(patches):
                return "image"
        return "text"

    def _timing(self) -> dict[str, float]:
        times = {name: round(seconds, 3) for name, seconds in self.reading.seconds.items()}
        if self.draws is not None and not self.draws_shared:
            times["re-initialised control"] = round(self.draws.seconds, 3)
        return times

    def _examples(self) -> list[ExampleWindow]:
        group = self.reading.groups.get(Examples.name)
        return group.recorded if isinstance(group, Examples) else []

    def _nonfinite(self) -> list[record.NonfiniteRecord]:
        # A group that failed as a whole, perhaps before it had anything, counted nothing that can be said.
        groups = [group for group in self.reading.groups.values() if group.name not in group.failed]
        counts = [each for group in groups for each in group.nonfinite()]
        return [record.NonfiniteRecord(info.site.name, info.layer, head, count) for info, head, count in counts]

    def trouble(self) -> record.Trouble | None:
        """What breaks the model's numbers, if anything does: first its weights, then what arises on the way."""
        return self.broken_weights or self.reading.trouble

    def _unavailable(self) -> list[record.UnavailableRecord]:
        """What could not be computed at all, in the model or in its re-initialised copy, with the reason."""
        in_model = self.reading.failed
        in_draws = {} if self.draws is None else self.draws.failed()
        # What failed in the model has no number to compare: that it failed in the control as well is not repeated.
        in_control = {name: reason for name, reason in in_draws.items() if name not in in_model}
        return [
            *(record.UnavailableRecord("model", name, reason) for name, reason in in_model.items()),
            *(record.UnavailableRecord("re-initialised control", name, reason) for name, reason in in_control.items()),
        ]

    def all_warnings(self) -> list[str]:
        """Sentences for the terminal and the page."""
        found = list(self.warnings)
        if not self.options.draws:
            found.append(NO_CONTROL if self.options.examples else QUICK)
        if isinstance(self.given.batches, TextBatches | PairBatches) and (
            many := self.given.batches.report.many_unknown()
        ):
            found.append(many)
        if self.reading.untold:
            lengths = " and ".join(str(each) for each in sorted(self.reading.untold))
            found.append(
                f"the masks do not fit sequences of length {lengths} inside the model; their padding counts too"
            )
        nonfinite = self._nonfinite()
        for entry in self._unavailable():
            of = "" if entry.of == "model" else f" of the {entry.of}"
            found.append(f"{entry.statistic}{of} could not be computed and is left out ({entry.reason})")
        if self.draws is not None:
            found += self.draws.warnings
            if (trouble := self.draws.trouble()) is not None:
                found.append(f"in the re-initialised control, {trouble}")
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
        details: dict[str, Any] = {"histograms": {}, "examples": [], "extremes": []}
        for group in self.reading.groups.values():
            if group.name not in group.failed:
                details |= group.details()
        return details | {"extremes": [self._with_tokens(each) for each in details["extremes"]]}

    def _with_tokens(self, extreme: dict[str, Any]) -> dict[str, Any]:
        """An extreme with the strings of its two tokens in place of their numbers; None where a token is unknown."""
        tokenizer = self.given.tokenizer
        words = {}
        for token in ("query_token", "key_token"):
            is_known = tokenizer is not None and extreme[token] >= 0
            words[token] = token_strings(tokenizer, [extreme[token]])[0] if is_known else None
        return extreme | words


def _degrees(estimate: Estimate) -> float | None:
    """The most degrees of freedom that an entry's error has; None where no entry has an error."""
    most = float(np.max(estimate.degrees, initial=0.0))
    return most or None
