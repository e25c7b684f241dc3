"""The result of a comparison: a table of differences, a table of all values, and the page drawn from them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import massieu
from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described, real
from massieu.foundation.doors import count, input_door, sequence, text
from massieu.foundation.pandas_tables import pandas_table
from massieu.foundation.printable import visible
from massieu.probing.compare.changes import Change, changes_of, examples_of
from massieu.probing.compare.files import read_files, record_bytes
from massieu.probing.compare.pairs import COLUMNS, Pairing, check_shapes, differences, large, pairing
from massieu.probing.result import stored
from massieu.probing.result.long_table import COLUMNS as VALUE_COLUMNS
from massieu.probing.result.result import Fragment, ProbeResult
from massieu.probing.result.result_files import table_bytes
from massieu.storage import folder as folders
from massieu.storage.record import RunRecord, json_value
from massieu.storage.record_files import COMPARISON_RECORD, DIFFERENCES, PAGE, RECORD, VALUES
from massieu.storage.writing import check_name, write_whole

if TYPE_CHECKING:
    import polars

LEVEL = 0.05
"""The expected share of heads that are named wrongly, among those that are named."""
SHOWN = 8
"""Heads that the page shows, with examples."""
_STORED_LISTS = ("models", "steps", "notes", "examples", "date")
"""Attributes that ``comparison.json`` holds under their own names."""
_STEP = re.compile(r"(\d+)\D*$")


@dataclass(eq=False)
class Comparison:
    """The result of comparing the same heads in two or more models on one text.

    Attributes:
        models: A name for each model; the others are compared with the first.
        steps: A number for each model, by which trajectories are drawn: the last number in its name if all names have
            different ones, else 0, 1, 2 and so on.
        runs: The record of each model's run, as in `ProbeResult`.
        differences: A row for each statistic of each head and sublayer: model, scope ("head" or "layer"), site, layer,
            head, statistic, first, second (the two values), difference (second − first), standard_error, degrees (of
            freedom of that error), p_value and q_value. Null where a number is undefined; statistics of the weights alone
            have no error and no test, and those that depend on the key origin have no test.
        values: The tables of all models as one, with the columns model, step and scope in front.
        pairings: For each model after the first: whether errors are paired, and why.
        notes: Further sentences that a reader has to know.
        examples: For the heads that changed most, a window of text in both models. The only place with words of the text.

    Example:
        A model compared with itself: nothing differs.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
        >>> result = massieu.probe(BertModel(BertConfig(**small)).eval(), [{"input_ids": torch.arange(8)[None]}])
        >>> comparison = massieu.compare(result, result)
        >>> len(comparison.named()), comparison.differences["difference"].drop_nulls().abs().max()
        (0, 0.0)
    """

    models: list[str]
    steps: list[float]
    runs: list[RunRecord]
    differences: "polars.DataFrame"
    values: "polars.DataFrame"
    pairings: list[Pairing]
    notes: list[str] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)
    date: str = ""

    @classmethod
    @input_door(results=sequence, names=sequence)
    def of(cls, results: Sequence[ProbeResult], names: Sequence[str]) -> "Comparison":
        """Compare existing results, each with the first.

        Raises:
            InputError: fewer than two; models of different shapes; two models on different texts.
        """
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InputError("names must be a list of strings, one for each result")
        if not all(isinstance(result, ProbeResult) for result in results):
            raise InputError("results must be a list of ProbeResult objects")
        if len(names) != len(results):
            raise InputError(f"names must be as many as results, got {len(names)} names and {len(results)} results")
        if len(results) < 2:
            raise InputError(f"a comparison of results needs at least two models, got {len(results)}")
        polars = require_extra("polars", "probe")
        names = [name.encode("utf-8", "replace").decode("utf-8") for name in names]  # a file's name may hold anything
        first = results[0]
        steps = _steps(names)
        tables = []
        pairings = []
        notes = _run_notes(results, names)
        for other, name in zip(results[1:], names[1:], strict=True):
            pair_of_names = (names[0], name)
            check_shapes(first, other, pair_of_names)
            pairings.append(pairing(first, other, pair_of_names))
            table, table_notes = differences(first, other, pairings[-1], pair_of_names)
            tables.append(table)
            notes += table_notes
        values = [
            result.table.select(
                polars.lit(name).alias("model"), polars.lit(step).alias("step"), "scope", *VALUE_COLUMNS
            )
            for result, name, step in zip(results, names, steps, strict=True)
        ]
        comparison = cls(
            models=list(names),
            steps=steps,
            runs=[result.run for result in results],
            differences=polars.concat(tables),
            values=polars.concat(values),
            pairings=pairings,
            notes=list(dict.fromkeys(notes)),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        examples = examples_of(comparison.changed(SHOWN, names[-1]), first, results[-1])
        comparison.examples = json_value(examples, 4)
        return comparison

    # --- asking ----------------------------------------------------------------------------------------------------

    @property
    def paired(self) -> bool:
        """Whether every model was compared by paired errors."""
        return all(pairing.paired for pairing in self.pairings)

    @input_door(level=real)
    def named(self, level: float = LEVEL) -> "polars.DataFrame":
        """The rows of ``differences`` that are named: the q-value is below the level, and the difference large enough.

        The smallest difference that counts is the statistic's own, see `massieu.probing.Statistic`.

        Args:
            level: the false discovery rate, over all heads and statistics of a model.

        Raises:
            InputError: the level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise InputError(f"level must be between 0 and 1, got {level}")
        return self._judged(level).filter("named").drop("named")

    def _judged(self, level: float = LEVEL) -> "polars.DataFrame":
        """The table of differences with a last column "named"."""
        polars = require_extra("polars", "probe")
        is_large = polars.Series(large(self.differences, self.runs[0].statistics))
        is_significant = (polars.col("q_value") < level).fill_null(False)
        return self.differences.with_columns((is_significant & is_large).alias("named"))

    @input_door(number=count, model=text)
    def changed(self, number: int = 6, model: str | None = None) -> list[Change]:
        """The heads that changed most, each with the statistic in which it changed most.

        A change is measured in standard deviations of the statistic over the heads of the first model, so that statistics of
        different units can be compared. Only named differences count.

        Args:
            number: The largest number of heads.
            model: The model that is compared with the first; None for the last one.

        Raises:
            InputError: no such model was compared, or ``number`` is below 1.
        """
        if number < 1:
            raise InputError(f"number must be at least 1, got {number}")
        model = self.models[-1] if model is None else model
        if model not in self.models[1:]:
            raise InputError(f"no model named {model!r} was compared; there are: {', '.join(self.models[1:])}")
        headline = {statistic.name for statistic in self.runs[0].statistics if statistic.headline}
        judged = self._judged()
        return changes_of(judged.filter(judged["model"] == model), headline)[:number]

    def above(self, limits: dict[str, float]) -> "polars.DataFrame":
        """The rows of heads whose difference exceeds a limit for its statistic in magnitude, and is significant.

        For statistics that have no test, because they are computed from the weights alone, every larger difference counts.

        Args:
            limits: By the statistic's name, the largest difference that is allowed.

        Raises:
            InputError: no head has such a statistic; a limit is negative or NaN.
        """
        polars = require_extra("polars", "probe")
        heads = self.differences.filter(polars.col("scope") == "head")
        parts = [heads.clear()]
        for name, limit in limits.items():
            if not limit >= 0:
                raise InputError(f"the limit for {name} must be 0 or more, got {limit}")
            rows = heads.filter(polars.col("statistic") == name)
            if rows.is_empty():
                raise InputError(f"no statistic named {name!r} was compared in heads; 'massieu statistics' lists them")
            untested_or_significant = polars.col("q_value").is_null() | (polars.col("q_value") < LEVEL)
            parts.append(rows.filter((polars.col("difference").abs() > limit) & untested_or_significant))
        return polars.concat(parts)

    def to_dict(self) -> dict[str, Any]:
        """The content of the terminal's output for JSON: models, pairing, numbers of heads named, the largest changes."""
        return json_value(
            {
                "models": self.models,
                "steps": self.steps,
                "paired": self.paired,
                "pairings": [vars(pairing) for pairing in self.pairings],
                "notes": self.notes,
                "statistics": self.counts(),
                "changed": {name: [vars(change) for change in self.changed(model=name)] for name in self.models[1:]},
            }
        )

    def counts(self) -> list[dict[str, Any]]:
        """For each model, scope and statistic: how many were compared, tested and named, and the largest difference."""
        polars = require_extra("polars", "probe")
        counted = (
            self._judged()
            .group_by("model", "scope", "statistic", maintain_order=True)
            .agg(
                polars.len().alias("compared"),
                polars.col("q_value").is_not_null().sum().alias("tested"),
                polars.col("named").sum(),
                polars.col("difference").abs().max().alias("largest"),
            )
        )
        return counted.rows(named=True)

    # --- storing ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``differences.parquet``, ``values.parquet``, ``comparison.json`` and ``report.html`` into a folder.

        All files appear together, as those of `ProbeResult.save` do. If the page cannot be drawn, everything else is saved
        before the error is raised.

        Returns:
            The folder.

        Raises:
            InputError: the folder is a file or cannot be written to, or a file that no earlier save has written is in the way.
            MissingExtraError: a package that draws the page is not installed.
        """
        folder = check_name(folder)
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise InputError(f"{folder} is a file; the comparison needs a folder")
        if (folder / RECORD).is_file():
            raise InputError(f"{folder} holds a result of 'massieu probe'; the comparison needs a folder of its own")
        files = {DIFFERENCES: table_bytes(self.differences, "parquet"), VALUES: table_bytes(self.values, "parquet")}
        try:
            files[PAGE] = self._page().encode("utf-8", "replace")
        except Exception as error:
            folders.save(folder, COMPARISON_RECORD, files | {COMPARISON_RECORD: record_bytes(self._record(), files)})
            error.add_note(f"(all but the page was saved in {folder})")
            raise
        folders.save(folder, COMPARISON_RECORD, files | {COMPARISON_RECORD: record_bytes(self._record(), files)})
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Comparison":
        """Read what `save` wrote; the tables are checked against the hashes in ``comparison.json``.

        Raises:
            InputError: there is no such folder; or a file of it is missing, cannot be read or is not of this comparison.
            MissingExtraError: polars is not installed.
        """
        folder = check_name(folder)
        if not os.path.isdir(folder):
            raise InputError(
                f"{folder} is {'a file' if os.path.lexists(folder) else 'missing'}; a comparison is a folder"
            )
        record, (difference_table, value_table) = folders.read(folder, COMPARISON_RECORD, read_files)
        where = str(folder / COMPARISON_RECORD)
        try:
            comparison = cls(
                runs=[stored.run_of(run, where) for run in record["runs"]],
                pairings=[Pairing(**pairing) for pairing in record["pairings"]],
                differences=difference_table.select(COLUMNS),
                values=value_table.select("model", "step", "scope", *VALUE_COLUMNS),
                **{name: record[name] for name in _STORED_LISTS},
            )
        except (LookupError, TypeError, require_extra("polars", "probe").exceptions.PolarsError) as error:
            raise InputError(f"{where} is not the record of a comparison ({type(error).__name__}: {error})") from error
        models = len(comparison.models)
        if not models == len(comparison.steps) == len(comparison.runs) == len(comparison.pairings) + 1:
            raise InputError(f"{where} is not the record of a comparison: its lists have different lengths")
        return comparison

    def _record(self) -> dict[str, Any]:
        """The content of ``comparison.json``."""
        record: dict[str, Any] = {"massieu_version": massieu.__version__}
        record |= {name: getattr(self, name) for name in _STORED_LISTS}
        record["runs"] = [run.to_dict() for run in self.runs]
        record["pairings"] = [vars(pairing) for pairing in self.pairings]
        return json_value(record)

    # --- looking ---------------------------------------------------------------------------------------------------

    def to_pandas(self, table: Literal["differences", "values"] = "differences") -> Any:
        """A table as a ``pandas.DataFrame``, without pyarrow.

        Raises:
            InputError: there is no such table.
            MissingExtraError: pandas is not installed.
        """
        if table not in ("differences", "values"):
            raise InputError(f"table must be 'differences' or 'values', got {described(table)}")
        return pandas_table(getattr(self, table))

    def report(self, path: str | os.PathLike[str] | None = None) -> Path | Fragment:
        """Draw the page: one HTML file that works offline; without a path, an object that a notebook shows.

        Raises:
            InputError: the path is a folder or cannot be written to.
            MissingExtraError: a package that draws the page is not installed.
        """
        page = self._page()
        if path is None:
            return Fragment.framed(page)
        path = Path(path)
        write_whole(path, page, "the page")
        return path

    def _page(self) -> str:
        from massieu.report import compare

        return compare.render(
            compare.Compared(
                models=self.models,
                steps=self.steps,
                runs=self.runs,
                differences=self._judged(),
                values=self.values,
                pairings=[pairing.sentence for pairing in self.pairings],
                notes=self.notes,
                examples=self.examples,
                changed=[vars(change) for change in self.changed(SHOWN)],
                level=LEVEL,
                date=self.date,
            )
        )

    def __repr__(self) -> str:
        lines = [f"Comparison of {', '.join(self.models)}"]
        lines += [f"  {pairing.sentence}" for pairing in self.pairings]
        lines += [f"  {note}" for note in self.notes]
        for model in self.models[1:]:
            changes = [f"  {change.sentence(model)}" for change in self.changed(4, model)]
            lines += changes or [f"  {model}: no head is named"]
        return visible("\n".join(lines))

    def _repr_html_(self) -> str:
        first, *others = repr(self).split("\n")
        sentences = "".join(f"<li>{escape(line.strip())}</li>" for line in others)
        return f"<div><strong>{escape(first)}</strong><ul>{sentences}</ul></div>"


def _steps(names: Sequence[str]) -> list[float]:
    """The last number in each name, if all names have different ones; else their places."""
    matches = [_STEP.search(name) for name in names]
    # Of 16 digits and more, a double may make two equal.
    numbers = [float(match[1]) for match in matches if match and len(match[1]) < 16]
    if len(set(numbers)) == len(names):
        return numbers
    return [float(place) for place in range(len(names))]


def _run_notes(results: Sequence[ProbeResult], names: Sequence[str]) -> list[str]:
    """Sentences about runs that were interrupted or had trouble."""
    notes = []
    for result, name in zip(results, names, strict=True):
        if not result.complete:
            notes.append(f"the run of {name} was interrupted, so its numbers are those of a part of the text")
        if result.trouble:
            notes.append(f"{name}: {result.trouble}")
    return notes
