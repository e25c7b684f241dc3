"""What a comparison found: a table of differences, a table of all values, and the page drawn from them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import massieu
from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import real
from massieu.foundation.doors import count, input_door, sequence, text
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
"""The expected share of heads named wrongly, among those that are named."""
SHOWN = 8
"""Heads that the page shows, with examples."""
_STEP = re.compile(r"(\d+)\D*$")


@dataclass(eq=False)
class Comparison:
    """The result of comparing the same heads in two or more models on one text.

    Attributes:
        models: A name for each model; the first is what the others are compared with.
        steps: A number for each model, by which trajectories are drawn: the last number in its name where all names have
            one and no two the same, else 0, 1, 2 and so on.
        runs: The record of each model's run, as `ProbeResult` has it.
        differences: A row for each statistic of each head and sublayer: model, scope ("head" or "layer"), site, layer,
            head, statistic, first, second (the two values), difference (second − first), standard_error, degrees (of
            freedom of that error), p_value and q_value. Null where a number is undefined; statistics of the weights alone
            have no error and no test, and those that depend on the key origin have no test.
        values: The tables of all models as one, with the columns model, step and scope in front.
        pairings: For each model after the first: whether errors are paired, and why.
        notes: What a reader has to know beside it, in sentences.
        examples: Of the heads that changed most, a window of text in both models. The only place with words of the text.

    Example:
        A model beside itself: nothing differs.

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
        """Compare results that are there: each with the first.

        Raises:
            InputError: fewer than two; models of different shapes; two models on different texts.
        """
        if isinstance(names, str) or not all(isinstance(each, str) for each in names):
            raise InputError("names must be a list of strings, one for each result")
        if not all(isinstance(each, ProbeResult) for each in results):
            raise InputError("results must be a list of ProbeResult objects")
        if len(names) != len(results):
            raise InputError(f"names must be as many as results, got {len(names)} names and {len(results)} results")
        if len(results) < 2:
            raise InputError(f"a comparison of results needs at least two models, got {len(results)}")
        polars = require_extra("polars", "probe")
        names = [name.encode("utf-8", "replace").decode("utf-8") for name in names]  # a file's name may hold anything
        first, steps = results[0], _steps(names)
        tables, pairings, notes = [], [], _troubles(results, names)
        for other, name in zip(results[1:], names[1:], strict=True):
            check_shapes(first, other, (names[0], name))
            pairings.append(pairing(first, other, (names[0], name)))
            table, said = differences(first, other, pairings[-1], (names[0], name))
            tables.append(table)
            notes += said
        values = [
            result.table.select(
                polars.lit(name).alias("model"), polars.lit(step).alias("step"), "scope", *VALUE_COLUMNS
            )
            for result, name, step in zip(results, names, steps, strict=True)
        ]
        made = cls(
            models=list(names),
            steps=steps,
            runs=[result.run for result in results],
            differences=polars.concat(tables),
            values=polars.concat(values),
            pairings=pairings,
            notes=list(dict.fromkeys(notes)),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        made.examples = json_value(examples_of(made.changed(SHOWN, names[-1]), first, results[-1]), 4)
        return made

    # --- asking ----------------------------------------------------------------------------------------------------

    @property
    def paired(self) -> bool:
        """Whether every model was compared by paired errors."""
        return all(each.paired for each in self.pairings)

    @input_door(level=real)
    def named(self, level: float = LEVEL) -> "polars.DataFrame":
        """The rows of ``differences`` that are named: ``q_value`` below the level, and by the smallest effect or more.

        Args:
            level: the false discovery rate, over all heads and statistics of a model.

        Raises:
            InputError: the level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise InputError(f"level must be between 0 and 1, got {level}")
        return self._judged(level).filter("named").drop("named")

    def _judged(self, level: float = LEVEL) -> "polars.DataFrame":
        """The table of differences with a last column that says which rows are named."""
        polars = require_extra("polars", "probe")
        sized = polars.Series(large(self.differences, self.runs[0].statistics))
        return self.differences.with_columns(((polars.col("q_value") < level).fill_null(False) & sized).alias("named"))

    @input_door(number=count, model=text)
    def changed(self, number: int = 6, model: str | None = None) -> list[Change]:
        """The heads that changed most, each with the statistic in which it did.

        A change counts in units of the standard deviation of the statistic over the heads of the first model, so that
        statistics of different units can stand beside each other. Only named differences count.

        Args:
            number: At most so many heads.
            model: The model that is compared with the first; None is the last one.

        Raises:
            InputError: no such model was compared, or ``number`` is below 1.
        """
        if number < 1:
            raise InputError(f"number must be at least 1, got {number}")
        chosen = self.models[-1] if model is None else model
        if chosen not in self.models[1:]:
            raise InputError(f"no model named {chosen!r} was compared; there are: {', '.join(self.models[1:])}")
        headline = {each.name for each in self.runs[0].statistics if each.headline}
        judged = self._judged()
        return changes_of(judged.filter(judged["model"] == chosen), headline)[:number]

    def above(self, limits: dict[str, float]) -> "polars.DataFrame":
        """The rows of heads whose difference is larger than a limit for their statistic, either way, and named.

        Of statistics that have no test, because they are computed from the weights alone, every larger difference counts.

        Args:
            limits: By statistic's name, the largest difference that is let pass.

        Raises:
            InputError: no head has such a statistic; a limit is negative or no number.
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
            sure = polars.col("q_value").is_null() | (polars.col("q_value") < LEVEL)
            parts.append(rows.filter((polars.col("difference").abs() > limit) & sure))
        return polars.concat(parts)

    def to_dict(self) -> dict[str, Any]:
        """What the terminal shows, as JSON can hold it: models, pairing, numbers of heads named, the largest changes."""
        return json_value(
            {
                "models": self.models,
                "steps": self.steps,
                "paired": self.paired,
                "pairings": [vars(each) for each in self.pairings],
                "notes": self.notes,
                "statistics": self.counts(),
                "changed": {name: [vars(each) for each in self.changed(model=name)] for name in self.models[1:]},
            }
        )

    def counts(self) -> list[dict[str, Any]]:
        """For each model, scope and statistic: how many were compared, tested and named, and the largest difference."""
        polars = require_extra("polars", "probe")
        size, q = polars.col("difference").abs(), polars.col("q_value")
        counted = (
            self._judged()
            .group_by("model", "scope", "statistic", maintain_order=True)
            .agg(
                polars.len().alias("compared"),
                q.is_not_null().sum().alias("tested"),
                polars.col("named").sum(),
                size.max().alias("largest"),
            )
        )
        return counted.rows(named=True)

    # --- storing ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``differences.parquet``, ``values.parquet``, ``comparison.json`` and ``report.html`` into a folder.

        All files appear together, as those of `ProbeResult.save` do. Where the page cannot be drawn, everything else is
        saved before the error is raised.

        Returns:
            The folder.

        Raises:
            InputError: the folder is a file or cannot be written to, or a file that no earlier save has left is in the way.
            MissingExtraError: what draws the page is not installed.
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
            InputError: there is no such folder, a file of it is missing, cannot be read or is not of this comparison.
            MissingExtraError: polars is not installed.
        """
        folder = check_name(folder)
        if not os.path.isdir(folder):
            raise InputError(
                f"{folder} is {'a file' if os.path.lexists(folder) else 'missing'}; a comparison is a folder"
            )
        said, tables = folders.read(folder, COMPARISON_RECORD, read_files)
        where = str(folder / COMPARISON_RECORD)
        try:
            made = cls(
                runs=[stored.run_of(run, where) for run in said.pop("runs")],
                pairings=[Pairing(**each) for each in said.pop("pairings")],
                differences=tables[0].select(COLUMNS),
                values=tables[1].select("model", "step", "scope", *VALUE_COLUMNS),
                **{name: said[name] for name in ("models", "steps", "notes", "examples", "date")},
            )
        except (LookupError, TypeError, require_extra("polars", "probe").exceptions.PolarsError) as error:
            raise InputError(f"{where} is not the record of a comparison ({type(error).__name__}: {error})") from error
        if not len(made.models) == len(made.steps) == len(made.runs) == len(made.pairings) + 1:
            raise InputError(f"{where} is not the record of a comparison: its lists have different lengths")
        return made

    def _record(self) -> dict[str, Any]:
        names = ("models", "steps", "notes", "examples", "date")
        runs, pairings = [run.to_dict() for run in self.runs], [vars(each) for each in self.pairings]
        said = {name: getattr(self, name) for name in names} | {"runs": runs, "pairings": pairings}
        return json_value({"massieu_version": massieu.__version__} | said)

    # --- looking ---------------------------------------------------------------------------------------------------

    def report(self, path: str | os.PathLike[str] | None = None) -> Path | Fragment:
        """Draw the page: one HTML file that works offline; without a path, for a notebook to show.

        Raises:
            InputError: the path is a folder or cannot be written to.
            MissingExtraError: what draws the page is not installed.
        """
        page = self._page()
        if path is None:
            return Fragment.framed(page)
        write_whole(path := Path(path), page, "the page")
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
                pairings=[each.sentence for each in self.pairings],
                notes=self.notes,
                examples=self.examples,
                changed=[vars(each) for each in self.changed(SHOWN)],
                level=LEVEL,
                date=self.date,
            )
        )

    def __repr__(self) -> str:
        lines = [f"Comparison of {', '.join(self.models)}", *(f"  {each.sentence}" for each in self.pairings)]
        lines += [f"  {note}" for note in self.notes]
        for model in self.models[1:]:
            lines += [f"  {each.sentence(model)}" for each in self.changed(4, model)] or [
                f"  {model}: no head is named"
            ]
        return visible("\n".join(lines))


def _steps(names: Sequence[str]) -> list[float]:
    found = [_STEP.search(name) for name in names]
    numbers = [float(match[1]) for match in found if match and len(match[1]) < 16]
    return numbers if len(set(numbers)) == len(names) else [float(place) for place in range(len(names))]


def _troubles(results: Sequence[ProbeResult], names: Sequence[str]) -> list[str]:
    found = []
    for result, name in zip(results, names, strict=True):
        if not result.complete:
            found.append(f"the run of {name} was interrupted, so its numbers are those of a part of the text")
        if result.trouble:
            found.append(f"{name}: {result.trouble}")
    return found
