"""The largest and the smallest value of some statistics over the text, and its place: window, query, strongest key.

A mean over queries does not show where logits are clipped, or the one token that a head attends to alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
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
        if not result.valid.numel():
            return
        for row, (name, end) in enumerate(EXTREMES):
            if name not in result.values:
                continue
            signed = result.values[name] if end == "maximum" else -result.values[name]
            signed = torch.where(result.defined.get(name, result.valid), signed, -torch.inf)
            largest = signed.amax((0, 2))
            if not bool(
                largest.isfinite().all()
            ):  # infinite or NaN somewhere, or nothing usable: such queries do not count
                signed = torch.where(signed.isfinite(), signed, -torch.inf)
                largest = signed.amax((0, 2))
            values = largest.double().cpu().numpy()
            # Only a larger value replaces the former one, so that the first of equal ones stays.
            improved = np.nonzero(values > self.best[row])[0]
            if len(improved):
                self.best[row, improved] = values[improved]
                # The first of equal ones in the order of sequences and queries.
                by_head = signed[:, torch.from_numpy(improved).to(signed.device)].transpose(0, 1)
                indices = by_head.flatten(1).argmax(1).cpu().numpy()
                # Of the logits before a soft cap: behind it, keys may be equal by saturation.
                uncapped = replace(call, softcap=None) if name == "largest_score" else call
                self.places[row, improved] = _places(
                    uncapped, places, indices, improved, name.startswith("largest_score")
                )

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


def _places(
    call: AttentionCall,
    places: Places,
    indices: Int64[np.ndarray, " S"],
    heads: Int64[np.ndarray, " S"],
    by_score: bool,
) -> Int64[np.ndarray, "S places"]:
    """The `PLACES` of one query of each of these heads.

    Args:
        indices: of the queries, among the sequences and queries of the call in a row.
        by_score: whether the strongest key has the largest score; else it has the largest weight.
    """
    columns = np.full((len(heads), len(PLACES)), _UNKNOWN)
    window, query, key, query_token, key_token = columns.T  # views: each writes one column
    items, queries = np.divmod(indices, call.query.shape[2])
    item_of_head, query_of_head = (torch.from_numpy(each).to(call.query.device) for each in (items, queries))
    # All heads at once: their keys take no more memory than those of one item.
    pairs = call.of_pairs(item_of_head, torch.from_numpy(heads).to(call.query.device), query_of_head)
    logits = explicit_scores(pairs) if by_score else explicit_logits(pairs)
    sequences_per_row = max(len(call.query) // places.rows, 1)
    window[:] = np.asarray(places.windows)[items // sequences_per_row]
    query[:] = places.positions[query_of_head].cpu().numpy()
    key[:] = logits[0, :, 0].argmax(-1).cpu().numpy()
    if places.query_ids is not None:
        query_token[:] = places.query_ids.cpu().numpy()[items, query]
    if places.key_ids is not None:
        key_token[:] = places.key_ids.cpu().numpy()[items, key]
    return columns
