"""The page's data: a readable JSON part, and packed arrays of numbers, so that a thousand heads fit into a few megabytes.

Arrays are written as 32-bit floats with 15 bits of mantissa (relative error 2e-5) or 16-bit floats (5e-4), gzipped and
base64-coded, in blocks of falling importance. A block that would make the page too large is left out, and the page
says so.
"""

import base64
import gzip
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Num

from massieu.report.tables import CONTROLS, Column, MapRow
from massieu.report.tokens import readable

Reference = list[Any]  # [block, byte offset, number of entries, type]
EXAMPLE_SHADES = ("selective_log_partition", "entropy")


def gzipped(raw: bytes, level: int = 9) -> str:
    """The bytes compressed by gzip, in base64; the page's script unpacks it. The same bytes give the same text."""
    return base64.b64encode(gzip.compress(raw, compresslevel=level, mtime=0)).decode("ascii")


class Block:
    """One gzipped run of arrays; each array starts at a multiple of four bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bytes = bytearray()

    def add(self, values: Num[np.ndarray, "..."], kind: str) -> Reference:
        """Append an array as ``f4``, ``f2``, ``u1``, ``u2`` or ``u4`` (little-endian); returns its reference."""
        if kind == "f4":
            with np.errstate(over="ignore"):
                bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
            # The mantissa is rounded to 15 bits, and its last byte is zero, which gzip compresses. NaN and infinity stay.
            finite = (bits & 0x7F800000) != 0x7F800000
            raw = np.where(finite, (bits + 0x80) & 0xFFFFFF00, bits).astype("<u4").tobytes()
        else:
            with np.errstate(over="ignore"):
                raw = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
        offset = len(self._bytes)
        self._bytes += raw + b"\0" * (-len(raw) % 4)
        return [self.name, offset, int(np.size(values)), kind]

    def text(self) -> str:
        """The compressed block; the same data give the same text."""
        return gzipped(bytes(self._bytes))


@dataclass
class Payload:
    """The input of the page's script: ``data`` as JSON, ``blocks`` of packed arrays, and names of what was ``left_out``."""

    data: dict[str, Any]
    blocks: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def script_json(value: Any) -> str:
    """JSON for a script element: no character of it can end the element or open a comment."""
    text = json.dumps(encodable(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encodable(value: Any) -> Any:
    """The value as JSON in UTF-8 can hold it: numbers that are not finite become null, lone surrogates "?"."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: encodable(getattr(value, each.name)) for each in fields(value) if each.init}
        )
    if isinstance(value, dict):
        return {encodable(str(key)): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def pack_column(block: Block, column: Column) -> dict[str, Any]:
    """A column's values, errors and counts; counts that are all the same become a single number."""
    entry: dict[str, Any] = {"value": block.add(column.value, "f4")}
    if np.isfinite(column.error).any():
        entry["error"] = block.add(column.error, "f2")
    counts = np.unique(column.count)
    entry["count"] = int(counts[0]) if len(counts) == 1 else block.add(np.minimum(column.count, 2**32 - 1), "u4")
    return entry


def _is_on_the_map(name: str) -> bool:
    _, _, qualifier = name.partition("/")
    return qualifier in ("", "q_value", *CONTROLS)


def pack_heads(columns: dict[str, Column], needed: bool) -> tuple[dict[str, Any], Block]:
    """The columns that the map needs, or (if ``needed`` is False) those that only the panel of a head shows."""
    block = Block("map" if needed else "panel")
    packed = {name: pack_column(block, column) for name, column in columns.items() if _is_on_the_map(name) == needed}
    return packed, block


def pack_histograms(histograms: dict[str, Any]) -> tuple[dict[str, Any], Block]:
    """Histograms per site and head, their counts as shares of the head's largest bin (16 bits)."""
    block = Block("histograms")
    packed = {}
    for statistic, histogram in histograms.items():
        packed[statistic] = {"edges": histogram["edges"], "sites": {}}
        for site, counts in histogram["counts"].items():
            array = np.asarray(counts, dtype=float)
            total = array.sum(axis=-1, keepdims=True)
            share = np.divide(array, total, out=np.zeros_like(array), where=total > 0)
            packed[statistic]["sites"][site] = {
                "shares": block.add(share, "f2"),
                "totals": total.ravel().astype(int).tolist(),
            }
    return packed, block


def _padded(rows: list[list[list[float | None]]]) -> Num[np.ndarray, "heads queries strongest"]:
    """Rows of unequal length as one array, filled up with NaN: the first queries of a text see few keys."""
    longest = max((len(row) for head in rows for row in head), default=0)
    filled = [[[*row, *[None] * (longest - len(row))] for row in head] for head in rows]
    return np.asarray(filled, dtype=float).reshape(len(rows), -1, longest)


def pack_example(example: dict[str, Any], place: int, queries: int | None = None) -> tuple[dict[str, Any], Block]:
    """One example window with its first ``queries`` queries (None: all) and the text of all keys."""
    block = Block(f"example{place}")
    sites: dict[str, Any] = {}
    for site, entry in example["sites"].items():
        packed: dict[str, Any] = {}
        for name in EXAMPLE_SHADES:
            if name in entry:
                values = np.asarray(entry[name], dtype=float)[:, :queries]
                packed["queries"] = values.shape[1]
                packed[name] = block.add(values, "f2")
        if entry.get("top_keys"):
            keys, weights = (_padded(entry[name])[:, :queries] for name in ("top_keys", "top_weights"))
            packed["queries"] = keys.shape[1]
            packed["strongest"] = keys.shape[2]
            # In the fewest bytes that hold the last key. A query with fewer keys than places has the largest code there.
            is_key = np.isfinite(keys) & (keys >= 0)
            last = np.max(keys, where=is_key, initial=0)
            size = next(size for size in (1, 2, 4) if last < 256**size - 1)
            missing = 256**size - 1
            packed["top_keys"] = block.add(np.where(is_key, keys, missing), f"u{size}")
            packed["missing_key"] = missing
            # The square root in 8 bits: an error below 0.4 percentage points, and below 7 % of a weight of 0.001.
            packed["top_weights"] = block.add(np.round(255 * np.sqrt(np.clip(np.nan_to_num(weights), 0, 1))), "u1")
        sites[site] = packed
    tokens = {stream: readable([str(token) for token in words]) for stream, words in example["tokens"].items()}
    raw = {stream: [str(token) for token in words] for stream, words in example["tokens"].items()}
    return {"title": example.get("title"), "tokens": tokens, "raw": raw, "sites": sites}, block


class Budget:
    """The bytes left on a page: adds blocks that fit, and names those that do not."""

    def __init__(self, payload: Payload, size: int) -> None:
        self._payload = payload
        self._left = size

    def add(self, block: Block, also: Any, always: bool = False) -> float:
        """Add the block if it fits together with its JSON, or in any case with ``always``.

        Args:
            block: The packed arrays.
            also: The JSON that refers to them.
            always: Add it even if it does not fit.

        Returns:
            1 if it was added, or else the share of it that would fit.
        """
        text = block.text()
        size = len(text) + len(script_json(also).encode())
        if size > self._left and not always:
            return self._left / size
        self._left -= size
        self._payload.blocks[block.name] = text
        return 1.0

    def leave_out(self, what: str) -> None:
        """Name a part that this page does not have."""
        self._payload.left_out.append(what)


def _add_examples(data: dict[str, Any], examples: list[dict[str, Any]], budget: Budget) -> None:
    for place, example in enumerate(examples):
        longest = max((len(words) for words in example["tokens"].values()), default=0)
        queries = longest
        packed, block = pack_example(example, place)
        # An example that does not fit is cut to fewer queries: the first one down to 16, others are then left out.
        while (share := budget.add(block, packed)) < 1:
            queries = int(0.95 * share * queries)
            if place > 0 or queries < 16:
                budget.leave_out(f"the example “{example.get('title')}”")
                break
            packed, block = pack_example(example, place, queries)
        else:
            data["examples"].append(packed)
            if queries < longest:
                budget.leave_out(f"the numbers of “{example.get('title')}” after its first {queries} tokens")


def encode(
    data: dict[str, Any], sites: list[MapRow], columns: dict[str, Column], details: dict[str, Any], size: int
) -> Payload:
    """Pack a result for the page.

    Args:
        data: The readable part, complete except for the arrays.
        sites: The map's rows.
        columns: The heads table.
        details: Histograms and examples.
        size: Bytes that the packed part may take.

    Returns:
        The payload; parts that did not fit are named in ``left_out``. The numbers of the map are always in it.
    """
    payload = Payload(data)
    budget = Budget(payload, size - len(script_json([data, [site.__dict__ for site in sites]]).encode()))
    data["sites"] = [site.__dict__ for site in sites]
    data["columns"], block = pack_heads(columns, needed=True)
    budget.add(block, data["columns"], always=True)
    panel, block = pack_heads(columns, needed=False)
    if budget.add(block, panel) == 1:
        data["columns"] |= panel
    else:
        budget.leave_out("spreads, halves and binned means of the heads")
    data["histograms"] = {}
    histograms, block = pack_histograms(details.get("histograms") or {})
    if budget.add(block, histograms) == 1:
        data["histograms"] = histograms
    else:
        budget.leave_out("the distributions over tokens")
    data["examples"] = []
    _add_examples(data, details.get("examples") or [], budget)
    return payload
