"""What a probe found: two long tables, a record of the run, and the page drawn from them."""

import math
import os
import warnings
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float64

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described, flag
from massieu.foundation.doors import input_door, text
from massieu.foundation.pandas_tables import pandas_table
from massieu.foundation.printable import visible
from massieu.probing.reading.per_token import TokenTable
from massieu.probing.result import stored
from massieu.probing.result.long_table import COLUMNS
from massieu.probing.result.result_files import (
    details_bytes,
    read_numbers,
    read_record,
    record_bytes,
    table_bytes,
)
from massieu.probing.sums.unit_sums import UnitSums
from massieu.report.questions import Question, questions_of
from massieu.storage import folder as folders
from massieu.storage.locking import locked
from massieu.storage.record import Finding, RunRecord, json_value
from massieu.storage.record_files import DETAILS, FORMATS, PAGE, RECORD, TABLES, UNITS
from massieu.storage.writing import check_name, write_whole

if TYPE_CHECKING:
    import polars

    from massieu.report.plots import ResultPlots

DIGITS = 4
"""Significant digits of the numbers in ``details.json``."""
PANDAS_TABLES = ("table", "heads", "layers", "extremes")
"""What `ProbeResult.to_pandas` turns into a table of pandas."""


class Fragment:
    """A piece of HTML that a notebook shows."""

    def __init__(self, html: str) -> None:
        self.html = html

    @classmethod
    def framed(cls, page: str) -> "Fragment":
        """A whole page, in a frame of its own."""
        return cls(f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 800px; border: 0"></iframe>')

    def _repr_html_(self) -> str:
        return self.html


class ProbeResult:
    """The result of one probe run: its numbers, and the settings, controls and warnings needed to judge them.

    Attributes:
        run: Model, text, settings, self-check, statistics, findings, warnings: what ``run.json`` holds, as attributes such as
            ``run.model.name``; ``run.to_dict()`` is the plain dictionary.
        details: Histograms and example windows: what ``details.json`` holds. Beside the rows of ``per_token``, the only
            place with words of the text.
        heads: Long table, one row for each statistic of each head: site, layer, head, statistic, value, standard_error,
            count (queries or tokens that entered). Null where a number is undefined.
        layers: The same for sublayers; ``head`` is null.
        units: The sums over each error unit, by which `massieu.compare` pairs two results of one text; None in a result
            that was stored without them.

    In ``run`` and ``details`` numpy values are turned into plain ones and undefined numbers into None; numbers in
    ``details`` are rounded to 4 significant digits. What is in memory is what is stored.

    Example:
        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> result = massieu.probe(model, [{"input_ids": torch.arange(8)[None]}], statistics=["maps"])
        >>> shares = result.heads.filter(result.heads["statistic"].str.ends_with("symmetric_share"))["value"]
        >>> round(sum(shares), 6)  # of each of two heads, symmetric and antisymmetric
        2.0
        >>> result.matrix("symmetric_share").shape  # layers, heads
        (1, 2)
    """

    def __init__(
        self,
        run: RunRecord,
        details: dict[str, Any],
        heads: "polars.DataFrame",
        layers: "polars.DataFrame",
        units: UnitSums | None = None,
        token_table: TokenTable | None = None,
    ) -> None:
        self._record = run
        self._details = details
        self.heads = heads
        self.layers = layers
        self.units = units
        self._token_table = token_table

    @cached_property
    def run(self) -> RunRecord:
        """What ``run.json`` holds, entry by entry, with plain values; made when it is first read."""
        return stored.run_of(json_value(self._record), "the record of the run")

    @cached_property
    def details(self) -> dict[str, Any]:
        """What ``details.json`` holds, as plain lists and dictionaries: examples, histograms and extremes."""
        return json_value(self._details, DIGITS)

    @property
    def table(self) -> "polars.DataFrame":
        """Both tables, with a first column ``scope``: "head" or "layer"."""
        polars = require_extra("polars", "probe")
        return polars.concat(
            frame.select(polars.lit(scope).alias("scope"), *COLUMNS)
            for scope, frame in (("head", self.heads), ("layer", self.layers))
        )

    def to_pandas(self, table: Literal["table", "heads", "layers", "extremes"] = "table") -> Any:
        """A table as a ``pandas.DataFrame``, without pyarrow; numbers of layers and heads stay whole.

        Raises:
            InputError: there is no such table.
            MissingExtraError: pandas is not installed.
        """
        if table not in PANDAS_TABLES:
            raise InputError(f"table must be one of {', '.join(PANDAS_TABLES)}, got {described(table)}")
        return pandas_table(getattr(self, table))

    @property
    def extremes(self) -> "polars.DataFrame":
        """The extremes of each head over the text, such as its largest score, and where they stand.

        Columns: site, layer, head, statistic (``largest_score/maximum``, ``entropy/minimum`` and others), value, window, query
        and key (positions; the key is the one with the largest score or weight), query_token, key_token (None where the
        text is not known). Of equal ones the first.
        """
        polars = require_extra("polars", "probe")
        places = {
            "site": polars.String, "head": polars.Int32, "statistic": polars.String, "window": polars.Int64,
            "query": polars.Int64, "key": polars.Int64, "query_token": polars.String, "key_token": polars.String,
        }  # fmt: skip
        extremes = polars.DataFrame(self.details.get("extremes", []), schema=places)
        values = self.heads.select("site", "layer", "head", "statistic", "value")
        return values.join(extremes, on=["site", "head", "statistic"], how="inner", maintain_order="left")

    @property
    def questions(self) -> list[Question]:
        """The papers' questions: for each group that answers one, its numbers, their control and a verdict."""
        return questions_of(self.run, self.heads, self.layers)

    @property
    def findings(self) -> list[Finding]:
        """The findings: each a sentence with its number, error, control, count and what it does not say."""
        return self.run.findings

    @property
    def complete(self) -> bool:
        """False when the run was interrupted: the numbers are those of the text seen until then."""
        return self.run.complete

    @property
    def trouble(self) -> str | None:
        """Where the model's own numbers are not finite, in one sentence; None where all are finite."""
        return self.run.trouble and self.run.trouble.sentence

    # --- storing ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], format: Literal["parquet", "csv"] = "parquet") -> Path:
        """Write ``heads``, ``layers``, ``run.json``, ``details.json``, ``units.safetensors``, ``report.html`` into a folder.

        The folder is made if need be; an earlier result in it is replaced, other files are left alone. Killed at any
        moment, or after a power failure, the folder holds the former result or the new one for `load`: all files are
        written into a folder of their own, ``.massieu/<hash>``, and then ``run.json`` is replaced, by which they are found.
        The names above are links to them, or copies. Where another process saves there, this one waits for it.
        Per-token rows are put into a folder ``tokens`` there.
        Where the page cannot be drawn, everything else is saved before the error is raised.

        Returns:
            The folder.

        Raises:
            InputError: the folder is a file or cannot be written to, a file that no earlier save has left is in the way,
                another run writes there for more than 20 seconds, or the format is unknown.
            MissingExtraError: what draws the page is not installed.
        """
        if format not in FORMATS:
            raise InputError(f"unknown table format {format!r}; known are {' and '.join(FORMATS)}")
        folder = check_name(folder)
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise InputError(f"{folder} is a file; the result needs a folder")
        tables = zip(TABLES, (self.heads, self.layers), strict=True)
        files = {f"{name}.{format}": table_bytes(frame, format) for name, frame in tables}
        files[DETAILS] = details_bytes(self.details)
        if self.units is not None:
            files[UNITS] = self.units.to_bytes()
        token_parts = {} if self._token_table is None else self._token_table.parts()
        try:
            files[PAGE] = self._page().encode("utf-8", "replace")
        except Exception as error:
            # The measurement took long; the page can be drawn again.
            folders.save(folder, RECORD, self._with_record(files), token_parts)
            error.add_note(f"(all but the page was saved in {folder})")
            raise
        # Made before the save, because it reads the parts; kept after it, because only then are they in the folder.
        saved_table = None if self._token_table is None else self._token_table.saved_in(folder)
        folders.save(folder, RECORD, self._with_record(files), token_parts)
        self._token_table = saved_table
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "ProbeResult":
        """Read what `save` wrote.

        The tables and details are checked against the hashes in ``run.json``; if another process saves meanwhile, its
        result is read. A result that was stored without hashes is read as it is. Nothing is written, and no symbolic link
        in the folder is followed. A file of another result in the place of one of this is warned of.

        Raises:
            InputError: there is no such folder, a file of it is missing, cannot be read or is not of this result, or it
                was written in the form of another version of massieu.
            MissingExtraError: polars is not installed.
        """
        folder = check_name(folder)
        if not os.path.isdir(folder):
            problem = "a file" if os.path.lexists(folder) else "missing"
            raise InputError(f"{folder} is {problem}; a result is a folder")
        result, foreign_file = folders.read(folder, RECORD, cls._read)
        if foreign_file is not None:
            warnings.warn(
                f"{visible(str(folder / foreign_file))} is not the file that this result was stored with; move it away, "
                f"and put the result's own in its place with: massieu report {visible(str(folder))}",
                stacklevel=2,
            )
        return result

    @classmethod
    def redraw(cls, folder: str | os.PathLike[str]) -> Path:
        """Draw the page of a stored result again, beside its tables.

        Returns:
            The page.

        Raises:
            InputError: as for `load` and `save`.
            MissingExtraError: what draws the page is not installed.
        """
        with warnings.catch_warnings():
            # A file of another result is in the way of the save below, which raises an error that names it.
            warnings.simplefilter("ignore")
            cls.load(folder)
            folder = Path(folder)
            # Loaded again under the lock: another process may have saved in between.
            with locked(folder, wait=folders.PATIENCE):
                result = cls.load(folder)
                folders.read(folder, RECORD, lambda content: result._save_page(folder, content))
        return folder / PAGE

    def _save_page(self, folder: Path, content: folders.Stored) -> None:
        """Save a result once more, with its page drawn again."""
        _, hashes = read_record(content.record, str(content.where))
        if hashes is None:
            raise InputError(
                f"{folder} was stored by a version of massieu that kept no hashes, so nothing in it is replaced; "
                "write its page elsewhere with ProbeResult.load(folder).report(path)"
            )
        page = self._page().encode("utf-8", "replace")
        other_hashes = {name: hash for name, hash in hashes.items() if name != PAGE and content.has(name)}
        record = record_bytes(self.run, other_hashes | {PAGE: folders.digest(page)})
        linked = {name: content.path(name) for name in other_hashes}
        folders.save(folder, RECORD, {RECORD: record, PAGE: page}, linked)

    @classmethod
    def _read(cls, content: folders.Stored) -> tuple["ProbeResult", str | None]:
        """The stored result, and the name of a file of another result that stands in the place of one of its own."""
        run, stored_hashes = read_record(content.record, str(content.where))
        hashes = {} if stored_hashes is None else stored_hashes

        def file(*names: str) -> tuple[str, bytes]:
            listed = [name for name in names if name in hashes]
            name, data = content.read(*(listed or names))
            # A result that was stored without hashes is read unchecked.
            if stored_hashes is not None and hashes.get(name) != folders.digest(data):
                raise folders.MismatchError(
                    f"{content.path(name)} is not the file that {RECORD} was stored with: it was changed, or it is of "
                    "another run"
                )
            return name, data

        folder = content.files.path
        details, heads, layers = read_numbers(file, folder)
        stored.check_together(run, details, heads, str(folder))
        units = None
        # Only comparisons need the sums: a result without their file is whole otherwise.
        if UNITS in hashes and content.has(UNITS):
            _, data = file(UNITS)
            units = UnitSums.from_bytes(data, str(folder / UNITS))
        token_table = TokenTable.stored_in(content, hashes)
        return cls(run, details, heads, layers, units, token_table), content.other_published(hashes)

    def _with_record(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The files, and the record with their hashes and those of the per-token rows."""
        hashes = {name: folders.digest(content) for name, content in files.items()}
        if self._token_table is not None:
            hashes |= self._token_table.digests()
        return files | {RECORD: record_bytes(self.run, hashes)}

    # --- looking ---------------------------------------------------------------------------------------------------

    def report(self, path: str | os.PathLike[str] | None = None) -> Path | Fragment:
        """Draw the page: one HTML file that works offline.

        Args:
            path: Where to write it, folders are made; without it, the page is returned for a notebook to show.

        Raises:
            InputError: the path is a folder or cannot be written to.
            MissingExtraError: what draws the page is not installed.
        """
        page = self._page()
        if path is None:
            return Fragment.framed(page)
        path = Path(path)
        write_whole(path, page, "the page")
        return path

    @input_door(statistic=text, error=flag, attention=text)
    def matrix(
        self, statistic: str, *, error: bool = False, attention: str | None = None
    ) -> Float64[np.ndarray, "layers heads"]:
        """One statistic of every head: a row for each layer, NaN where there is no head or no number.

        Args:
            statistic: A name of the table ``heads``, such as ``"entropy"`` or ``"entropy/reinitialised"``.
            error: Standard errors in place of values.
            attention: Which kind, where a model has several, such as ``"decoder cross-attention"``.

        Raises:
            InputError: The result has no such statistic or attention; the message names those that there are.

        Warns:
            UserWarning: Standard errors are asked for, there are values, and no head has an error, as after a text of one
                window: whatever is compared with NaN is False.
        """
        from massieu.report.matrix import matrix_of

        values = matrix_of(self.run, self.heads, statistic, attention=attention)
        if not error:
            return values
        errors = matrix_of(self.run, self.heads, statistic, error=True, attention=attention)
        if np.isfinite(values).any() and not np.isfinite(errors).any():
            warnings.warn(
                f"no head has a standard error of {statistic!r}: it takes at least two windows or documents. All are NaN, and "
                "comparisons with NaN are False; give more text, or shorter windows",
                stacklevel=2,
            )
        return errors

    def tokens(
        self, layer: int, head: int, *, window: int | None = None, attention: str | None = None
    ) -> "polars.DataFrame":
        """The statistics of one head at every token, of a probe with ``per_token``: a row for each query that was measured.

        Columns: ``window`` (its number in the text), ``position`` in the window, ``token_id`` and ``token`` (null where
        they are not known), ``site`` (index in ``run.sites``), ``layer``, ``head``, and one for each statistic, in
        float32. A value is null where it has no meaning, as the weight of the previous token at the first one, and NaN
        where the query's scores are not finite. Padding has no rows. The mean of a column is the table's value.

        Args:
            layer, head: Which head; where a layer has several sites of this kind, those of all.
            window: Only this window of the text.
            attention: Which kind, where a model has several, such as ``"decoder cross-attention"``.

        Raises:
            InputError: The result was made without ``per_token`` or the rows were removed or changed; it has no such
                head or attention; or ``window`` is no number of a window.

        Example:
            >>> import massieu, torch
            >>> from transformers import BertConfig, BertModel
            >>> size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
            >>> model = BertModel(BertConfig(num_hidden_layers=1, **size)).eval()
            >>> batches = [{"input_ids": torch.arange(8)[None]}]
            >>> result = massieu.probe(model, batches, statistics=["entropy"], per_token=True)
            >>> result.tokens(0, 1)["token_id"].to_list()
            [0, 1, 2, 3, 4, 5, 6, 7]
        """
        if self._token_table is None:
            raise InputError(
                "the result has no per-token values; probe with per_token=True, or with --per-token on the command line"
            )
        from massieu.report.matrix import sites_with

        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
            raise InputError(f"window must be the number of a window, 0 or more, got {window!r}")
        sites = sites_with(self.run, self.heads, layer, head, attention)
        return self._token_table.rows(sites, head, window)

    @property
    def plot(self) -> "ResultPlots":
        """Figures of plotly, or in axes of matplotlib: ``plot.map("entropy")``, ``plot.head(3, 5)``, ``plot.depth()``."""
        from massieu.report.plots import ResultPlots

        return ResultPlots(self.run, self.details, self.heads, self.layers)

    def show(self, layer: int, head: int) -> Fragment:
        """One head in a notebook: its numbers, distributions and example tokens.

        Raises:
            InputError: the result has no such head.
            MissingExtraError: what draws it is not installed.
        """
        from massieu.report import figures

        return Fragment(figures.head_html(self.run, self.details, self.heads, layer, head))

    def __repr__(self) -> str:
        lines = ["ProbeResult" if self.complete else "ProbeResult (interrupted: incomplete)"]
        if self.trouble:
            lines.append(f"  {self.trouble}")
        model = self.run.model
        text = self.run.text
        unit = self.run.error_unit
        check = self.run.self_check
        if model.name is not None:
            lines.append(f"  model: {model.name}, {model.layers} layers, {model.heads} heads in all")
        if text.source is not None:
            lines.append(f"  text: {text.source}, {text.tokens} tokens in {text.windows} windows")
        if unit.unit is not None:
            lines.append(f"  error unit: {unit.unit}, {unit.count} of them")
        if check != type(check)():
            error = "no number" if check.error is None else f"{check.error:.1e}"
            tolerance = math.nan if check.tolerance is None else check.tolerance
            lines.append(f"  self-check: error {error}, tolerance {tolerance:.0e}")
        lines += [f"  {finding.title}: {finding.sentence}" for finding in self.findings]
        return visible("\n".join(lines))

    def _repr_html_(self) -> str:
        from massieu.report import figures

        measured = [name for name in self.heads["statistic"].unique(maintain_order=True) if "/" not in name]
        preferred = [*(finding.statistic for finding in self.findings), "selective_log_partition", *measured]
        statistic = next((name for name in preferred if name in measured), None)
        if statistic is None:
            return f"<pre>{escape(repr(self))}</pre>"
        return figures.head_map_html(self.run, self.heads, statistic)

    def _page(self) -> str:
        from massieu.report import page

        return page.render(self.run, self.details, self.heads, self.layers)
