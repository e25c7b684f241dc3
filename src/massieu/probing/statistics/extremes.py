"""The largest and the smallest value of some statistics over the text, and its place: window, query, strongest key.

A mean over queries does not show where logits are clipped, or the one token that a head attends to alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall, explicit_logits, explicit_scores
from massieu.probing.statistics.query_means import QueryResult
from massieu.probing.sums.running import State, fitting

EXTREMES = (
    ("largest_score", "maximum"),
    ("largest_score_above_mean", "maximum"),
    ("selective_log_partition", "maximum"),
    ("log_partition", "maximum"),
    ("entropy", "minimum"),
    ("entropy", "maximum"),
)
"""Statistics, and which end of each is recorded."""
PLACES = ("window", "query", "key", "query_token", "key_token")
"""Columns of a place: numbers of the window, positions of query and key in it, and the numbers of their tokens."""
_UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class Places:
    """Where the queries of a call are.

    Attributes:
        positions: of the queries in their window.
        windows: number of each row's window in the text.
        rows: number of rows of the batch; a row may be cut into several sequences of the call.
        query_ids, key_ids: numbers of the tokens; None where the model was given none.
    """

    positions: Int[Tensor, " L"]
    windows: Sequence[int]
    rows: int
    query_ids: Int[Tensor, "B L"] | None = None
    key_ids: Int[Tensor, "B N"] | None = None


class Extremes:
    """Running extremes of one site's heads. Of equal ones the first in the text counts, however the text is shared.

    Attributes:
        best: (extremes, heads); of minima the negative, so that the largest one is always sought. −inf if none was seen.
        places: (extremes, heads, `PLACES`); −1 where unknown.
    """

    def __init__(self, heads: int) -> None:
        self.best: Float64[np.ndarray, "extremes heads"] = np.full((len(EXTREMES), heads), -np.inf)
        self.places: Int64[np.ndarray, "extremes heads places"] = np.full((*self.best.shape, len(PLACES)), _UNKNOWN)

    def update(self, result: QueryResult, call: AttentionCall, places: Places) -> None:
        """Compare the queries of one call with the extremes so far."""
        update_extremes([self], result, call, places)

    def value(self, row: int) -> Float64[np.ndarray, " heads"]:
        """One extreme of every head; NaN where nothing was seen."""
        sign = 1 if EXTREMES[row][1] == "maximum" else -1
        return np.where(np.isfinite(self.best[row]), sign * self.best[row], np.nan)

    def merge(self, other: "Extremes") -> None:
        """Take over what is more extreme in ``other``, or as extreme and earlier in the text."""
        window = self.places[..., 0]
        query = self.places[..., 1]
        other_window = other.places[..., 0]
        other_query = other.places[..., 1]
        earlier = (other_window < window) | ((other_window == window) & (other_query < query))
        better = (other.best > self.best) | ((other.best == self.best) & np.isfinite(self.best) & earlier)
        self.best = np.where(better, other.best, self.best)
        self.places = np.where(better[..., None], other.places, self.places)

    def state(self) -> State:
        """Copies of both arrays; see `massieu.probing.sums.running`."""
        return {"best": self.best.copy(), "places": self.places.copy()}

    def restore(self, state: State) -> None:
        """Continue from stored arrays, which replace those held here."""
        self.best = fitting(state["best"], self.best.shape)
        self.places = fitting(state["places"], self.places.shape)


def update_extremes(parts: Sequence[Extremes], result: QueryResult, call: AttentionCall, places: Places) -> None:
    """Compare the queries of one call with the extremes so far of one site, or of several whose heads stand in a row in it."""
    if not result.valid.numel():
        return
    signed = {row: _signed(result, name, end) for row, (name, end) in enumerate(EXTREMES) if name in result.values}
    if not signed:
        return
    heads = result.valid.shape[1]
    values = np.full((len(EXTREMES), heads), -np.inf)
    # One transfer for all of them: each look at a number of another device waits for it.
    values[list(signed)] = torch.stack([each.amax((0, 2)) for each in signed.values()]).double().cpu().numpy()
    for row in signed:
        if not np.isfinite(values[row]).all():
            # Infinite or NaN somewhere, or nothing usable: such queries do not count.
            signed[row] = torch.where(signed[row].isfinite(), signed[row], -torch.inf)
            values[row] = signed[row].amax((0, 2)).double().cpu().numpy()
    best = np.concatenate([part.best for part in parts], axis=1)
    windows = np.concatenate([part.places[..., 0] for part in parts], axis=1)
    # Of equal ones the first in the text stays; calls that were read together may come behind later ones.
    earlier = np.isfinite(values) & (values == best) & (min(places.windows) < windows)
    improved = (values > best) | earlier
    rows = [row for row in signed if improved[row].any()]
    if not rows:
        return
    pairs = [_Pairs.of(signed[row], np.flatnonzero(improved[row])) for row in rows]
    keys = [_strongest_keys(call, EXTREMES[row][0], pair) for row, pair in zip(rows, pairs, strict=True)]
    numbers = torch.stack([torch.cat(each) for each in zip(*((p.items, p.queries) for p in pairs), strict=True)])
    items, queries, found_keys = torch.cat([numbers, torch.cat(keys)[None]]).cpu().numpy()
    columns = _columns(places, items, queries, found_keys, len(call.query))
    _replace(parts, improved[rows], values, columns, rows)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """One query of each of some heads.

    Attributes:
        items: the sequences of the call that they are in.
        queries: their numbers among the queries of the call.
    """

    items: Int[Tensor, " S"]
    heads: Int[Tensor, " S"]
    queries: Int[Tensor, " S"]

    @classmethod
    def of(cls, signed: Float[Tensor, "B H L"], heads: Int64[np.ndarray, " S"]) -> "_Pairs":
        """The query with the largest value of each of these heads; of equal ones the first in the order of the text."""
        chosen = torch.from_numpy(heads).to(signed.device)
        by_head = signed if len(heads) == signed.shape[1] else signed[:, chosen]
        place = by_head.transpose(0, 1).flatten(1).argmax(1)
        length = signed.shape[2]
        return cls(place // length, chosen, place % length)


def _signed(result: QueryResult, name: str, end: str) -> Float[Tensor, "B H L"]:
    """The values whose largest is sought; −∞ where they do not count."""
    values = result.values[name] if end == "maximum" else -result.values[name]
    return torch.where(result.defined.get(name, result.valid), values, -torch.inf)


def _strongest_keys(call: AttentionCall, name: str, pairs: _Pairs) -> Int[Tensor, " S"]:
    """Of each pair's query the key with the largest score, or the largest weight, as the statistic has it."""
    # Of the logits before a soft cap: behind it, keys may be equal by saturation.
    uncapped = replace(call, softcap=None) if name == "largest_score" else call
    # All heads at once: their keys take no more memory than those of one item.
    single = uncapped.of_pairs(pairs.items, pairs.heads, pairs.queries)
    by_score = name.startswith("largest_score")
    logits = explicit_scores(single) if by_score else explicit_logits(single)
    return logits[0, :, 0].argmax(-1)


def _columns(
    places: Places,
    items: Int64[np.ndarray, " S"],
    queries: Int64[np.ndarray, " S"],
    keys: Int64[np.ndarray, " S"],
    sequences: int,
) -> Int64[np.ndarray, "S places"]:
    """The `PLACES` of these queries and keys of a call of so many sequences."""
    columns = np.full((len(items), len(PLACES)), _UNKNOWN)
    window, query, key, query_token, key_token = columns.T  # views: each writes one column
    sequences_per_row = max(sequences // places.rows, 1)
    window[:] = np.asarray(places.windows)[items // sequences_per_row]
    query[:] = places.positions.cpu().numpy()[queries]
    key[:] = keys
    if places.query_ids is not None:
        query_token[:] = places.query_ids.cpu().numpy()[items, query]
    if places.key_ids is not None:
        key_token[:] = places.key_ids.cpu().numpy()[items, key]
    return columns


def _replace(
    parts: Sequence[Extremes],
    improved: Bool[np.ndarray, "rows heads"],
    values: Float64[np.ndarray, "extremes heads"],
    columns: Int64[np.ndarray, "S places"],
    rows: Sequence[int],
) -> None:
    """Write the new extremes of these rows, and their places, which stand in the order of rows and heads."""
    number = np.full(improved.shape, _UNKNOWN)
    number[improved] = np.arange(len(columns))
    start = 0
    for part in parts:
        heads = slice(start, start + part.best.shape[1])
        start = heads.stop
        for row, better, place in zip(rows, improved[:, heads], number[:, heads], strict=True):
            is_equal = values[row, heads] == part.best[row]
            comes_later = columns[place, 0] > part.places[row, :, 0]
            better = better & ~(is_equal & comes_later)
            part.best[row, better] = values[row, heads][better]
            part.places[row, better] = columns[place[better]]
