"""A few windows recorded token by token, for reading on the page: the only place where the user's text is kept."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics.group import CallTokens, Event, Group
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import moments_of
from massieu.probing.sums.running import State

STRONGEST = 5
_NUMBERS = 3_200_000  # numbers recorded in all examples together, so that the page stays below 8 MB
LONGEST = 1_024  # tokens of an example that have numbers
_FEWEST = 16
_SCORES = 1 << 20  # scores of one site that are formed at once


def example_length(heads: int, length: int, recorded: int = 0) -> int:
    """How many tokens of a window have their numbers recorded; 0 where no further example is worth it.

    The first example gets all that may be recorded. A further one is recorded where all its tokens fit.

    Args:
        heads: of all attention sites together.
        length: of the window.
        recorded: tokens that earlier examples recorded.
    """
    fits = _NUMBERS // max(1, heads * (2 + 2 * STRONGEST)) - recorded
    wished = min(length, LONGEST)
    if recorded:
        return wished if fits >= wished else 0
    return min(length, max(_FEWEST, min(wished, fits)))


@dataclass
class ExampleWindow:
    """One window: its tokens, and for each site every query's selective log Z, entropy and five strongest keys.

    Attributes:
        row: of the batch that the window is in.
        number: of the window in the text.
    """

    title: str
    tokens: dict[str, list[str]]
    length: int
    row: int
    number: int = 0
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, info: SiteInfo, call: AttentionCall) -> None:
        """Record one site of the batch."""
        call = call.rows(slice(self.row, self.row + 1))
        if call.query.shape[0] != 1:
            return
        side = "decoder" if info.in_decoder else "text"
        if len(self.tokens.get("image", [])) == call.query.shape[2]:
            side = "image"
        names = self.tokens.get(side)
        length = min(self.length, call.query.shape[2], self.length if names is None else len(names))
        if length < call.query.shape[2]:
            call = call.at(torch.arange(length, device=call.query.device))
        self.sites[str(info.index)] = _numbers(call)

    @property
    def recorded(self) -> int:
        """Tokens that have numbers."""
        return max((entry["entropy"].shape[1] for entry in self.sites.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The window as ``details.json`` holds it."""
        return {"title": self.title, "tokens": self.tokens, "sites": self.sites}


class ExampleWindows(list[ExampleWindow]):
    """The windows that were recorded, in the order of the text."""

    def merge(self, other: "ExampleWindows") -> None:
        """Add those that another process has recorded."""
        self[:] = sorted([*self, *other], key=lambda window: window.number)

    def state(self) -> State:
        """All that was recorded."""
        return {str(place): vars(window).copy() for place, window in enumerate(self)}

    def restore(self, state: State) -> None:
        """Go on from such records in place of one's own."""
        self[:] = [ExampleWindow(**window) for window in state.values()]


class Examples(Group):
    """Records windows token by token.

    Attributes:
        recorded: the windows.
        current: the one that the next pass reads; None where it reads none.
    """

    name = "example windows"
    events = frozenset({Event.CALLS})

    def __init__(self) -> None:
        super().__init__()
        self.recorded = ExampleWindows()
        self.current: ExampleWindow | None = None

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Record one site of the batch."""
        if self.current is not None:
            self.current.add(tokens.info, call)

    def after_pass(self) -> None:
        """Keep what was recorded."""
        if self.current is not None:
            self.recorded.append(self.current)
        self.current = None

    def details(self) -> dict[str, Any]:
        """As ``details.json`` holds them."""
        return {"examples": [window.to_dict() for window in self.recorded]}


def _numbers(call: AttentionCall) -> dict[str, np.ndarray]:
    """What is recorded of the queries of one window: (H, L), or (H, L, strongest keys).

    NaN where there is none, as for a query that sees no key, or where scores are not known apart from log-weights.
    """
    everything = Tokens(torch.ones(1, call.key.shape[2], dtype=torch.bool, device=call.key.device), None)
    queries = torch.arange(call.query.shape[2], device=call.query.device)
    reading = QueryReading(call, everything, everything, queries, False, moments_of(["selective_log_partition"]))
    blind = reading.log_partition == -torch.inf
    selective = reading.selective_log_partition().masked_fill(blind, torch.nan)
    if call.grade == "scores":
        selective = torch.full_like(selective, torch.nan)
    keys, weights = _strongest(call)
    found = {
        "selective_log_partition": selective,
        "entropy": reading.moments.entropy.masked_fill(blind, torch.nan),
        "top_keys": keys,
        "top_weights": weights,
    }
    return {name: values[0].cpu().numpy() for name, values in found.items()}


def _strongest(call: AttentionCall) -> tuple[Int[Tensor, "B H L K"], Float[Tensor, "B H L K"]]:
    """The keys with the largest weights of each query, and these; so many queries at once as memory allows."""
    at_once = max(1, _SCORES // (call.query.shape[1] * call.key.shape[2]))
    parts = []
    for positions in torch.arange(call.query.shape[2], device=call.query.device).split(at_once):
        scores, weight = explicit_attention(call.at(positions))
        weights = torch.softmax(scores + weight, -1)  # of the same scores: another log Z has another rounding
        parts.append(weights.topk(min(STRONGEST, weights.shape[-1]), dim=-1))
    keys, weights = (torch.cat(found, dim=2) for found in zip(*((p.indices, p.values) for p in parts), strict=True))
    return keys, weights
