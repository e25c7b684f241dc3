"""The value of each statistic at each query: rows written while a model is read, and the table that they make.

Rows are written in parts, each a whole parquet file under its final name. A part is named by the batch that its first row
is of. Before running sums are stored, all rows up to them are written. So a run that goes on from stored sums keeps the
parts that begin before its first batch and drops the others, which it reads again.
"""

import io
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described
from massieu.foundation.files import replacing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.data.text import token_strings
from massieu.probing.statistics.catalogue import Selection
from massieu.probing.statistics.extremes import Places
from massieu.probing.statistics.group import CallQueries, Event, Group
from massieu.probing.statistics.query_means import QueryResult
from massieu.storage import folder as folders
from massieu.storage.record_files import TOKENS
from massieu.storage.writing import explaining

if TYPE_CHECKING:
    import polars

PER_TOKEN = "the per-token table"
"""Its name among what could not be computed."""
_PART = "part-{:08d}-{:03d}.parquet"
"""A part's name: the batch of its first row, and its number among the parts of that batch."""
_NAME = re.compile(r"part-(\d{8,})-(\d{3,})\.parquet")
AT_ONCE = 200_000
"""Rows that are held in memory before they are written."""
LARGE = 10e9
"""Bytes; a larger table is warned of."""
_KEYS = ("window", "position", "token_id", "token", "site", "layer", "head")
"""The columns before the statistics."""
_END = 8
"""Bytes at the end of a parquet file: the length of its footer, and the format's name."""
_KEY_BYTES = 6  # of a row on the disk, compressed, beside the values: measured
_MANY = 1_000  # tokens, in what is said of the size


def check_per_token(asked: object, selection: Selection) -> tuple[str, ...]:
    """The statistics that have a column, in the order of registration; empty where no table is wanted.

    Args:
        asked: False, True for all that are measured, or names of statistics of the attention.
        selection: what the run measures.

    Raises:
        InputError: ``asked`` is something else, or names a statistic that is not measured query by query.
    """
    if asked is False or asked is None:
        return ()
    available = [name for name in selection.catalogue.query_functions if name in selection.names]
    if asked is not True and (isinstance(asked, str) or not isinstance(asked, Sequence) or not asked):
        description = "an empty list" if isinstance(asked, list | tuple) else described(asked)
        raise InputError(f"per_token must be True or a list of names of statistics, got {description}")
    if not available:
        raise InputError(
            "per_token needs statistics of the attention, and none is measured; name some of them in statistics"
        )
    names: Any = available if asked is True else asked
    unavailable = [name for name in names if name not in available]
    if unavailable:
        raise InputError(
            f"per_token has one value for each query of the statistics {', '.join(available)}; {unavailable[0]!r} is not "
            "among them"
        )
    return tuple(name for name in available if name in names)


def expected_size(heads: int, statistics: int, tokens: int | None) -> tuple[str, float]:
    """The size of the table: in words, and in bytes; 0 bytes where the number of tokens is unknown.

    Example:
        >>> expected_size(heads=270, statistics=2, tokens=10_000)[0]
        'per-token values: 270 rows for each token, up to 38 MB'
    """
    # A value is a float32: four bytes.
    bytes_per_token = heads * (4 * statistics + _KEY_BYTES)
    size = bytes_per_token * (_MANY if tokens is None else tokens)
    in_words = f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 1):,.0f} MB"
    sentence = f"per-token values: {heads:,} rows for each token, up to {in_words}"
    if tokens is None:
        return f"{sentence} for each {_MANY:,} tokens", 0.0
    return sentence, size


class TokenWriter:
    """Writes the rows of one process into a folder, part by part.

    Attributes:
        batch: number of the batch that is being read.
        silent: writes nothing: the batch is another process's, or its rows were written in an earlier run.
        share: this process's number, and the number of processes, which take the batches in turn.
        hashes: of the parts that are written, by name. They are stored with the running sums.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        tokenizer: Any = None,
        share: tuple[int, int] = (0, 1),
        hashes: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.tokenizer = tokenizer
        self.share = share
        self.hashes = {} if hashes is None else hashes
        self.batch = 0
        self.silent = False
        self._frames: list[polars.DataFrame] = []
        self._held = 0
        self._first = 0  # batch of the first row that is held
        self._latest = (-1, 0)  # the latest part: batch and number
        require_extra("polars", "probe")

    def begin(self, start: int) -> int:
        """Remove this process's parts that begin at batch ``start`` or later; returns the rows of the parts that stay.

        Raises:
            InputError: parts cannot be removed or counted, one that stays was changed since it was written, or another
                file has the name of a part.
        """
        with explaining(f"cannot write to the folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            rank, processes = self.share
            parts = [path for path in _parts_in(self.folder) if _first_batch(path) % processes == rank]
            foreign = next((path for path in parts if not _is_part(path)), None)
            if foreign is not None:
                raise InputError(
                    f"{foreign} is in the way: it holds no per-token rows; move it, or name another folder"
                )
            earlier = [path for path in parts if _first_batch(path) < start]
            for path in parts:
                if path not in earlier:
                    path.unlink(missing_ok=True)
            for path in earlier:
                if folders.digest_of(path) != self.hashes.get(path.name):
                    raise InputError(
                        f"cannot resume: {path} is not as it was when the running sums were stored; begin without resume"
                    )
        return sum(map(_rows_in, earlier))

    def add(self, info: SiteInfo, result: QueryResult, places: Places, real: Bool[Tensor, "B L"], length: int) -> int:
        """Write a row for each head and each query of a call that is not padding; returns the number of rows.

        Args:
            length: of the call's sequences, of which the queries may be a sample.
        """
        if self.silent:
            return 0
        if not self._frames:
            self._first = self.batch
        # One entry for each query that is not padding: its sequence in the call, and its place among the queries read.
        sequence, query = real.nonzero(as_tuple=True)
        tokens = len(sequence)
        if not tokens:
            return 0
        # A window may be cut into several sequences (local attention), which follow each other in the call.
        sequences_per_window = max(len(real) // places.rows, 1)
        positions = places.positions.to(query.device)[query]
        windows = torch.tensor(list(places.windows), device=query.device)[sequence // sequences_per_window]
        positions_in_window = (sequence % sequences_per_window) * length + positions
        ids = None if places.query_ids is None else places.query_ids.to(query.device)[sequence, positions]
        keys = self._keys(windows, positions_in_window, ids)
        num_heads = result.valid.shape[1]
        # So many heads together that about AT_ONCE rows are held.
        heads_per_chunk = max(1, AT_ONCE // tokens)
        for first in range(0, num_heads, heads_per_chunk):
            heads = slice(first, min(first + heads_per_chunk, num_heads))
            values = {name: self._column(result, name, (sequence, heads, query)) for name in self.names}
            self._hold(keys, info, range(num_heads)[heads], values)
            if self._held >= AT_ONCE:
                self.flush()
                self._first = self.batch
        return num_heads * tokens

    def _keys(self, windows: Tensor, positions: Tensor, ids: Tensor | None) -> "polars.DataFrame":
        """The columns that all heads share, a row for each token."""
        polars = require_extra("polars", "probe")
        token_ids = polars.Series([None] * len(windows), dtype=polars.Int64)
        tokens = polars.Series([None] * len(windows), dtype=polars.String)
        if ids is not None:
            numbers = ids.cpu().numpy()
            token_ids = polars.Series(numbers, dtype=polars.Int64)
            if self.tokenizer is not None:
                # Each different token is decoded once.
                distinct, place = np.unique(numbers, return_inverse=True)
                strings = token_strings(self.tokenizer, distinct.tolist())
                # A token need not be valid Unicode.
                valid = [string.encode("utf-8", "replace").decode() for string in strings]
                tokens = polars.Series(valid, dtype=polars.String).gather(place)
        return polars.DataFrame(
            {
                "window": polars.Series(windows.cpu().numpy(), dtype=polars.Int64),
                "position": polars.Series(positions.cpu().numpy(), dtype=polars.Int64),
                "token_id": token_ids,
                "token": tokens,
            }
        )

    def _column(
        self, result: QueryResult, name: str, place: tuple[Tensor, slice, Tensor]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Values, (heads, tokens), and where the statistic is undefined; NaN for queries whose scores are not finite."""
        if name not in result.values:
            return None
        sequence, heads, query = place

        def chosen(numbers: Tensor) -> Tensor:
            # (1 or B, H, L) → (tokens, heads) → (heads, tokens)
            return numbers[:, heads].expand(len(result.valid), -1, -1)[sequence, :, query].mT

        usable = chosen(result.defined.get(name, result.valid))
        broken = chosen(result.broken)
        values = torch.where(usable, chosen(result.values[name]).float(), torch.nan)
        undefined = ~usable & ~broken
        return values.cpu().numpy(), undefined.cpu().numpy()

    def _hold(self, keys: "polars.DataFrame", info: SiteInfo, heads: range, values: Mapping[str, Any]) -> None:
        """Hold the rows of some heads: all tokens of the first head, then those of the next."""
        polars = require_extra("polars", "probe")
        rows = polars.concat([keys] * len(heads))
        head = np.repeat(np.arange(heads.start, heads.stop, dtype=np.int32), len(keys))
        columns = [
            polars.lit(info.index, dtype=polars.Int32).alias("site"),
            polars.lit(info.layer, dtype=polars.Int32).alias("layer"),
            polars.Series("head", head),
        ]
        for name, column in values.items():
            if column is None:
                columns.append(polars.lit(None, dtype=polars.Float32).alias(name))
            else:
                value, undefined = (polars.Series(np.ascontiguousarray(array).reshape(-1)) for array in column)
                columns.append(polars.when(undefined).then(None).otherwise(value).cast(polars.Float32).alias(name))
        self._frames.append(rows.with_columns(columns))
        self._held += len(rows)

    def flush(self) -> None:
        """Write the rows that are held, as a new part."""
        if not self._frames:
            return
        rows = require_extra("polars", "probe").concat(self._frames)
        content = io.BytesIO()
        self.discard()
        rows.write_parquet(content, compression="zstd", row_group_size=AT_ONCE // 4)
        latest_batch, number = self._latest
        self._latest = (self._first, number + 1 if latest_batch == self._first else 0)
        path = self.folder / _PART.format(*self._latest)
        with replacing(path) as aside:
            aside.write_bytes(content.getbuffer())
        self.hashes[path.name] = folders.digest(content.getvalue())

    def discard(self) -> None:
        """Forget what is held."""
        self._frames = []
        self._held = 0

    def give_up(self) -> None:
        """Forget what is held and remove what was written, so that the result has the room on the disk."""
        self.discard()
        if not self.silent:
            self.silent = True
            with suppress(InputError):
                self.begin(0)


class TokenRows(Group):
    """Writes the per-token table while a model is read; once that fails, the table is left out.

    Attributes:
        count: rows that were written, by this process.
        files: hashes of the parts that hold them, by name.
    """

    NOTES = (*Group.NOTES, "count", "files")
    name = PER_TOKEN
    events = frozenset({Event.QUERIES})

    def __init__(self, writer: TokenWriter) -> None:
        super().__init__()
        self.writer = writer
        self.count = 0
        self.files = writer.hashes

    def on_queries(self, queries: CallQueries) -> None:
        """Write the numbers of a call's queries."""
        if queries.places is not None and queries.real is not None:
            self.count += self.writer.add(queries.info, queries.result, queries.places, queries.real, queries.length)

    def write(self) -> None:
        """Write the rows that are held."""
        if PER_TOKEN not in self.failed:
            with self.fence(PER_TOKEN):
                self.writer.flush()
        if PER_TOKEN in self.failed:
            self.writer.give_up()


class TemporaryFolder:
    """A folder that is removed with this object, or when the process that made it ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="massieu-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenTable:
    """The parts of one result, in a folder.

    Attributes:
        hashes: of the parts by name, where they were stored with them.
        keeper: a temporary folder that is to live as long.
        saved: another folder with the same parts, for when they are gone from the first.
    """

    folder: Path
    names: tuple[str, ...]
    hashes: dict[str, str] | None = None
    keeper: "TemporaryFolder | None" = None
    saved: Path | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenTable":
        return self  # nothing in it changes

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"keeper": None}

    @classmethod
    def found_in(cls, folder: Path, keeper: "TemporaryFolder | None" = None) -> "TokenTable":
        """The parts that are there now."""
        return cls(folder, tuple(path.name for path in _parts_in(folder)), None, keeper)

    @classmethod
    def stored_in(cls, stored: "folders.Stored", hashes: Mapping[str, str]) -> "TokenTable | None":
        """The parts that a result was stored with; None where it was stored without, or all were removed.

        Raises:
            MismatchError: some of them are missing.
        """
        prefix = f"{TOKENS}/"
        in_folder = {name.removeprefix(prefix): each for name, each in hashes.items() if name.startswith(prefix)}
        part_hashes = {name: each for name, each in in_folder.items() if _NAME.fullmatch(name)}
        present = [name for name in part_hashes if stored.has(f"{TOKENS}/{name}")]
        if not present:
            return None
        folder = stored.path(TOKENS)
        missing = sorted(part_hashes.keys() - set(present))
        if missing:
            raise folders.MismatchError(f"{folder / missing[0]} is missing; restore it, or remove {folder}")
        return cls(folder, tuple(sorted(part_hashes)), part_hashes, saved=stored.top.path / TOKENS)

    @property
    def paths(self) -> list[Path]:
        """Where the parts are: in their folder, or where they were saved since."""
        if self.saved is None:
            return [self.folder / name for name in self.names]
        return [self.folder / name if (self.folder / name).is_file() else self.saved / name for name in self.names]

    def size(self) -> tuple[int, int]:
        """Rows and bytes."""
        rows = sum(map(_rows_in, self.paths))
        size = sum(path.stat().st_size for path in self.paths)
        return rows, size

    def parts(self) -> dict[str, Path]:
        """The parts by the names that a result's files have."""
        return {f"{TOKENS}/{path.name}": path for path in self.paths}

    def digests(self) -> dict[str, str]:
        """The hash of each part, by the same names.

        Raises:
            InputError: one cannot be read, or is not what it was stored as.
        """
        assert self._checked
        digests = {}
        for name, path in self.parts().items():
            with explaining(f"{path} cannot be read"):
                digests[name] = folders.digest_of(path)
        return digests

    def saved_in(self, folder: Path) -> "TokenTable":
        """The same parts once they were also stored with a result in a folder."""
        hashes = {name.removeprefix(f"{TOKENS}/"): each for name, each in self.digests().items()}
        return replace(self, hashes=hashes, saved=folder / TOKENS)

    @cached_property
    def _checked(self) -> bool:
        """True once the parts were compared with the hashes that the result was stored with.

        Raises:
            InputError: a part has another hash.
        """
        for path in self.paths:
            with explaining(f"{path} cannot be read"):
                if self.hashes is not None and folders.digest_of(path) != self.hashes[path.name]:
                    raise InputError(
                        f"{path} is not the file that the result was stored with: it was changed, or it is of another run"
                    )
        return True

    def rows(self, sites: Sequence[int], head: int, window: int | None) -> "polars.DataFrame":
        """The rows of one head, in the order of the text.

        Raises:
            InputError: a part cannot be read, or is not the one that the result was stored with.
        """
        polars = require_extra("polars", "probe")
        assert self._checked
        chosen = polars.col("site").is_in(list(sites)) & (polars.col("head") == head)
        if window is not None:
            chosen &= polars.col("window") == window
        try:
            scanned = polars.scan_parquet([str(path) for path in self.paths], glob=False)
            return scanned.filter(chosen).collect().sort("site", "window", "position")
        except (OSError, UnicodeError, polars.exceptions.PolarsError) as error:
            raise InputError(f"the per-token values in {self.folder} cannot be read: {error}") from error


def forget_rows(folder: Path) -> None:
    """Remove the parts in a folder, and the folder if nothing else is in it."""
    for path in filter(_is_part, _parts_in(folder)):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _parts_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("part-*.parquet") if _NAME.fullmatch(path.name))


def _is_part(path: Path) -> bool:
    """Whether a file is a parquet file with the columns of per-token rows; only its end is read, which names them."""
    if path.stat().st_size < 2 * _END:
        return False
    with path.open("rb") as file:
        file.seek(-_END, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        magic = file.read(4)
        if magic != b"PAR1" or length > path.stat().st_size - _END:
            return False
        file.seek(-_END - length, os.SEEK_END)
        footer = file.read(length)
    return all(name.encode() in footer for name in _KEYS)


def _first_batch(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _rows_in(path: Path) -> int:
    polars = require_extra("polars", "probe")
    with explaining(f"{path} cannot be read"):
        content = io.BytesIO(path.read_bytes())
    try:
        return polars.scan_parquet(content).select(polars.len()).collect().item()
    except polars.exceptions.PolarsError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
