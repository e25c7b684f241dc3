"""What a probe found: two long tables, a record of the run, and the page drawn from them."""

import json
import math
import os
import shutil
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Real

from massieu.errors import InputError, require_extra

if TYPE_CHECKING:
    import polars

SCHEMA_VERSION = 1
DIGITS = 4
"""Significant digits of the numbers in ``details.json``."""

_COLUMNS = ("site", "layer", "head", "statistic", "value", "standard_error", "count")
_FORMATS = ("parquet", "csv")
_TABLES = ("heads", "layers")
# Holds a complete new set of files while they are moved to their places one by one; see `ProbeResult.save`.
_ARRIVED = ".massieu-arrived"


class TableBuilder:
    """Collects rows of a result's table.

    The table has a row for each statistic of each head (or of each sublayer, with head null): site, layer, head,
    statistic, value, standard error, count. Undefined numbers (NaN) become null.
    """

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []

    def add(
        self,
        site: str,
        layer: int | None,
        head: int | None,
        statistic: str,
        value: float,
        standard_error: float | None,
        count: float,
    ) -> None:
        """Add one row; ``head`` is None in the table of the layers, ``standard_error`` where there is none."""
        error = np.nan if standard_error is None else standard_error
        self._add(site, layer, [head], statistic, np.array([value]), np.array([error]), np.array([count]))

    def add_heads(
        self,
        site: str,
        layer: int,
        statistic: str,
        values: Real[np.ndarray, "heads"],
        standard_errors: Real[np.ndarray, "heads"] | float | None,
        counts: Real[np.ndarray, "heads"] | float,
    ) -> None:
        """Add a row for each head of a site; one error or count stands for all heads.

        Raises:
            ValueError: the lengths differ.
        """
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(f"values must have shape (heads,), got {values.shape}")
        errors = np.broadcast_to(np.nan if standard_errors is None else standard_errors, values.shape)
        self._add(
            site, layer, list(range(len(values))), statistic, values, errors, np.broadcast_to(counts, values.shape)
        )

    def frame(self) -> "polars.DataFrame":
        """The table, rows in the order in which they were added.

        Raises:
            MissingExtraError: polars is not installed.
        """
        columns = {name: [entry for block in self._blocks for entry in block[name]] for name in _COLUMNS}
        polars = require_extra("polars", "probe")
        return polars.DataFrame(columns, schema=_schema()).with_columns(
            polars.col("value", "standard_error").fill_nan(None)
        )

    def _add(
        self, site: str, layer: int | None, heads: list[Any], statistic: str, values: Any, errors: Any, counts: Any
    ) -> None:
        size = len(heads)
        self._blocks.append(
            {
                "site": [site] * size,
                "layer": [layer] * size,
                "head": heads,
                "statistic": [statistic] * size,
                "value": np.asarray(values, dtype=np.float64).tolist(),
                "standard_error": np.asarray(errors, dtype=np.float64).tolist(),
                "count": np.rint(counts).astype(np.int64).tolist(),
            }
        )


class Fragment:
    """A piece of HTML that a notebook shows."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


class ProbeResult:
    """The numbers of one probe run, with what is needed to judge them.

    Attributes:
        run: Model, text, settings, self-check, statistics, findings, warnings: what ``run.json`` holds.
        details: Histograms and example windows: what ``details.json`` holds. The only place with words of the text.
        heads: Long table, one row for each statistic of each head: site, layer, head, statistic, value, standard_error,
            count (queries or tokens that entered). Null where a number is undefined.
        layers: The same for sublayers; ``head`` is null.

    In ``run`` and ``details`` numpy values are turned into plain ones and undefined numbers into None; numbers in
    ``details`` are rounded to 4 significant digits. What is in memory is what is stored.
    """

    def __init__(
        self, run: dict[str, Any], details: dict[str, Any], heads: "polars.DataFrame", layers: "polars.DataFrame"
    ) -> None:
        self.run: dict[str, Any] = _plain(run)
        self.details: dict[str, Any] = _plain(details, DIGITS)
        self.heads = heads
        self.layers = layers

    @property
    def table(self) -> "polars.DataFrame":
        """Both tables, with a first column ``scope``: "head" or "layer"."""
        polars = require_extra("polars", "probe")
        return polars.concat(
            frame.select(polars.lit(scope).alias("scope"), *_COLUMNS)
            for scope, frame in (("head", self.heads), ("layer", self.layers))
        )

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings: each a sentence with its number, error, control, count and what it does not say."""
        return self.run["findings"]

    @property
    def complete(self) -> bool:
        """False when the run was interrupted: the numbers are those of the text seen until then."""
        return self.run["complete"]

    @property
    def trouble(self) -> str | None:
        """Why numbers are missing or cannot be trusted, in one sentence, where the model's own numbers are not finite."""
        trouble = self.run.get("trouble")
        return trouble and trouble["sentence"]

    # --- storing ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], format: Literal["parquet", "csv"] = "parquet") -> Path:
        """Write ``heads``, ``layers``, ``run.json``, ``details.json`` and ``report.html`` into a folder.

        The folder is made if need be; an earlier result in it is replaced, other files are left alone. All files are
        written aside first and appear together: interrupted at any moment, the folder holds the former result or the
        new one for `load`, and no half-written file.

        Returns:
            The folder.

        Raises:
            InputError: the folder is a file or cannot be written to, or the format is unknown.
            MissingExtraError: what draws the page is not installed.
        """
        if format not in _FORMATS:
            raise InputError(f"unknown table format {format!r}; known are {' and '.join(_FORMATS)}")
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; the result needs a folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".massieu-", dir=folder))
        except OSError as error:
            raise InputError(f"cannot write to the folder {folder}: {error.strerror}") from error
        try:
            self._write(aside, format)
            _settle(folder)  # an earlier save may have been interrupted
            aside.rename(folder / _ARRIVED)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        _settle(folder)
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "ProbeResult":
        """Read what `save` wrote.

        Raises:
            InputError: there is no such folder, a file of it is missing or cannot be read, or it was written
                in the form of another version of massieu.
            MissingExtraError: polars is not installed.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder} is {'a file' if folder.exists() else 'missing'}; a result is a folder")
        run = _read_json(_stored(folder, "run.json"))
        version = run.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{folder / 'run.json'} has schema_version {version}; this version of massieu reads {SCHEMA_VERSION}"
            )
        details = _read_json(_stored(folder, "details.json"))
        heads, layers = (_read_table(_stored(folder, *(f"{name}.{ending}" for ending in _FORMATS))) for name in _TABLES)
        return cls(run, details, heads, layers)

    def _write(self, folder: Path, format: str) -> None:
        for name, frame in zip(_TABLES, (self.heads, self.layers), strict=True):
            path = folder / f"{name}.{format}"
            if format == "parquet":
                frame.write_parquet(path)
            else:
                frame.write_csv(path)
        # In escapes, not characters: a token need not be valid Unicode.
        (folder / "run.json").write_text(json.dumps(self.run, indent=1, allow_nan=False), encoding="utf-8")
        (folder / "details.json").write_text(
            json.dumps(self.details, separators=(",", ":"), allow_nan=False), encoding="utf-8"
        )
        _write_page(folder / "report.html", self._page())

    # --- looking ---------------------------------------------------------------------------------------------------

    def report(self, path: str | os.PathLike[str] | None = None) -> Path | Fragment:
        """Draw the page: one HTML file that works offline.

        Args:
            path: Where to write it; without it, the page is returned for a notebook to show.

        Raises:
            InputError: the path is a folder or cannot be written to.
            MissingExtraError: what draws the page is not installed.
        """
        page = self._page()
        if path is None:
            frame = f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 800px; border: 0"></iframe>'
            return Fragment(frame)
        path = Path(path)
        if path.is_dir():
            raise InputError(f"{path} is a folder; the page needs the name of a file")
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            _write_page(aside, page)
            os.replace(aside, path)
        except OSError as error:
            raise InputError(f"cannot write the page {path}: {error.strerror}") from error
        finally:
            aside.unlink(missing_ok=True)
        return path

    def show(self, layer: int, head: int) -> Fragment:
        """One head in a notebook: its numbers, distributions and example tokens.

        Raises:
            InputError: the result has no such head.
            MissingExtraError: what draws it is not installed.
        """
        known = self.heads.select("layer", "head").unique().rows()
        if (layer, head) not in known:
            layers = sorted({row[0] for row in known})
            heads = [row[1] for row in known if row[0] == layer]
            there = f"layer {layer} has heads 0 to {max(heads)}" if heads else f"layers are {_span(layers)}"
            raise InputError(f"there is no head {head} in layer {layer}; {there}")
        from massieu.report import figures

        return Fragment(figures.head_html(self.run, self.details, self.heads, layer, head))

    def __repr__(self) -> str:
        lines = ["ProbeResult" + ("" if self.complete else " (interrupted: incomplete)")]
        if self.trouble:
            lines.append(f"  {self.trouble}")
        if model := self.run["model"]:
            lines.append(f"  model: {model['name']}, {model['layers']} layers, {model['heads']} heads in all")
        if text := self.run["text"]:
            lines.append(f"  text: {text['source']}, {text['tokens']} tokens in {text['windows']} windows")
        if unit := self.run["error_unit"]:
            lines.append(f"  error unit: {unit['unit']}, {unit['count']} of them")
        if check := self.run["self_check"]:
            error = "no number" if check["error"] is None else f"{check['error']:.1e}"
            lines.append(f"  self-check: error {error}, tolerance {check['tolerance']:.0e}")
        lines += [f"  {finding['title']}: {finding['sentence']}" for finding in self.findings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from massieu.report import figures

        measured = [name for name in self.heads["statistic"].unique(maintain_order=True) if "/" not in name]
        wished = [finding["statistic"] for finding in self.findings] + ["selective_log_partition", *measured]
        drawn = next((name for name in wished if name in measured), None)
        if drawn is None:
            return f"<pre>{escape(repr(self))}</pre>"
        return figures.head_map_html(self.run, self.heads, drawn)

    def _page(self) -> str:
        from massieu.report import page

        return page.render(self.run, self.details, self.heads, self.layers)


def _write_page(path: Path, page: str) -> None:
    # A token need not be valid Unicode; on the page, what is not becomes a question mark.
    path.write_text(page, encoding="utf-8", errors="replace")


def _schema() -> dict[str, Any]:
    polars = require_extra("polars", "probe")
    kinds = (polars.String, polars.Int32, polars.Int32, polars.String, polars.Float64, polars.Float64, polars.Int64)
    return dict(zip(_COLUMNS, kinds, strict=True))


def _plain(value: Any, digits: int | None = None) -> Any:
    """The value as JSON can hold it: no numpy, no NaN or infinity, floats rounded to so many significant digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(value) if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, list | tuple):
        # Rows of numbers are most of what there is; they need no look at every item's type.
        if (
            digits is not None
            and value
            and all(type(item) is float for item in value)
            and all(map(math.isfinite, value))
        ):
            return [float(f"{item:.{digits}g}") for item in value]
        if value and all(type(item) is int for item in value):
            return list(value)
        return [_plain(item, digits) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, digits) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), digits)
    return value


def _settle(folder: Path) -> None:
    """Move a complete new set of files to its place, and delete the tables of the other format.

    Interrupted, it can be run again: a file is either still among the arrived ones or already in its place.
    """
    arrived = folder / _ARRIVED
    if not arrived.is_dir():
        return
    for path in sorted(arrived.iterdir()):
        if path.stem in _TABLES:
            for ending in _FORMATS:
                (folder / f"{path.stem}.{ending}").unlink(missing_ok=True)
        os.replace(path, folder / path.name)
    arrived.rmdir()


def _stored(folder: Path, *names: str) -> Path:
    """Where the first of the files that exists is."""
    # What has arrived but was not moved to its place yet is newer than what is there.
    for place in (folder / _ARRIVED, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise InputError(f"{folder} has no {' or '.join(names)}; a folder written by 'massieu probe' is needed")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no record of a run")
    return content


def _read_table(path: Path) -> "polars.DataFrame":
    polars = require_extra("polars", "probe")
    schema = _schema()
    try:
        if path.suffix == ".csv":
            frame = polars.read_csv(path, schema_overrides=schema)
        else:
            frame = polars.read_parquet(path)
        return frame.select(_COLUMNS).cast(schema)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path} is not a table of a result: {str(error).splitlines()[0]}") from error


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
