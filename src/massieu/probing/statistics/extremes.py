"""The largest and the smallest of some statistics over the text, and where it stands: window, query, strongest key.

A mean over queries says nothing of what logits are clipped by, or of the one token that a head attends to alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.statistics.query_means import QueryResult
from massieu.probing.sums.running import State, fitting

EXTREMES = (
    *((name, "maximum") for name in ("largest_score", "largest_score_above_mean", "selective_log_partition")),
    *(("log_partition", "maximum"), ("entropy", "minimum"), ("entropy", "maximum")),
)
"""Statistics and which end of them is kept."""
PLACES = ("window", "query", "key", "query_token", "key_token")
_UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class Places:
    """Where the queries of a call are.

    Attributes:
        positions: of the queries in their window.
        windows: number of each row's window in the text.
        rows: how many rows the call's sequences are of.
        query_ids, key_ids: numbers of the tokens; None where the model was given none.
    """

    positions: Int[Tensor, " L"]
    windows: Sequence[int]
    rows: int
    query_ids: Int[Tensor, "B L"] | None = None
    key_ids: Int[Tensor, "B N"] | None = None


class Extremes:
    """Running extremes of one site's heads. Of equal ones the first in the text is kept, whoever reads it.

    Attributes:
        best: (extremes, heads), smallest ones with their sign turned; −inf where nothing was seen.
        places: (extremes, heads, `PLACES`); −1 where unknown.
    """

    def __init__(self, heads: int) -> None:
        self.best: Float64[np.ndarray, "extremes heads"] = np.full((len(EXTREMES), heads), -np.inf)
        self.places: Int64[np.ndarray, "extremes heads places"] = np.full((*self.best.shape, len(PLACES)), _UNKNOWN)

    def update(self, found: QueryResult, call: AttentionCall, places: Places) -> None:
        """Look through the queries of one call."""
        batch, heads, length = found.valid.shape
        for row, (name, end) in enumerate(EXTREMES):
            if name not in found.values:
                continue
            signed = found.values[name].double() * (1 if end == "maximum" else -1)
            usable = found.defined.get(name, found.valid) & signed.isfinite()
            flat = torch.where(usable, signed, -torch.inf).transpose(0, 1).reshape(heads, batch * length)
            if not flat.shape[1]:
                continue
            values, where = (each.cpu().numpy() for each in flat.max(1))
            heads_now = np.nonzero(values > self.best[row])[0]
            if len(heads_now):
                self.best[row, heads_now] = values[heads_now]
                # The largest logit is that before a soft cap, where keys may be equal by saturation.
                seen = replace(call, softcap=None) if name == "largest_score" else call
                self.places[row, heads_now] = _places(
                    seen, places, where[heads_now], heads_now, name.startswith("largest_score")
                )

    def value(self, row: int) -> Float64[np.ndarray, " heads"]:
        """One extreme of every head; NaN where nothing was seen."""
        sign = 1 if EXTREMES[row][1] == "maximum" else -1
        return np.where(np.isfinite(self.best[row]), sign * self.best[row], np.nan)

    def merge(self, other: "Extremes") -> None:
        """Take over what is more extreme in ``other``, or as extreme and earlier in the text."""
        mine, theirs = self.places[..., :2], other.places[..., :2]
        earlier = (theirs[..., 0] < mine[..., 0]) | ((theirs[..., 0] == mine[..., 0]) & (theirs[..., 1] < mine[..., 1]))
        better = (other.best > self.best) | ((other.best == self.best) & np.isfinite(self.best) & earlier)
        self.best = np.where(better, other.best, self.best)
        self.places = np.where(better[..., None], other.places, self.places)

    def state(self) -> State:
        """Both arrays; see `massieu.probing.sums.running`."""
        return {"best": self.best.copy(), "places": self.places.copy()}

    def restore(self, state: State) -> None:
        """Go on from such arrays in place of one's own."""
        self.best = fitting(state["best"], self.best.shape)
        self.places = fitting(state["places"], self.places.shape)


def _places(
    call: AttentionCall, places: Places, where: Int64[np.ndarray, " S"], heads: Int64[np.ndarray, " S"], by_score: bool
) -> Int64[np.ndarray, "S places"]:
    """Window, query, strongest key and the numbers of both tokens, of one query of each of these heads."""
    found = np.full((len(heads), len(PLACES)), _UNKNOWN)
    items, queries = np.divmod(where, call.query.shape[2])
    for item in map(int, np.unique(items)):
        chosen = items == item
        asked = torch.from_numpy(queries[chosen]).to(call.query.device)
        part = call.of_pairs(item, torch.from_numpy(heads[chosen]).to(call.query.device), asked)
        scores, weight = explicit_attention(part)
        logits = scores.masked_fill(~part.visible(), -torch.inf) if by_score else scores + weight
        keys = logits[0, :, 0].argmax(-1).cpu().numpy()
        positions = places.positions[asked].cpu().numpy()
        found[chosen, 0] = places.windows[item // max(len(call.query) // places.rows, 1)]
        found[chosen, 1], found[chosen, 2] = positions, keys
        for column, ids, at in ((3, places.query_ids, positions), (4, places.key_ids, keys)):
            if ids is not None:
                found[chosen, column] = ids[item].cpu().numpy()[at]
    return found
