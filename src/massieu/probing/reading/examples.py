"""A few windows recorded token by token, for reading on the page: the only place where the user's text is kept."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall, explicit_logits
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
    # A token has two numbers of each head (selective log Z, entropy), and so many strongest keys with their weights.
    numbers_per_token = heads * (2 + 2 * STRONGEST)
    remaining = _NUMBERS // max(1, numbers_per_token) - recorded
    wanted = min(length, LONGEST)
    if recorded:
        return wanted if remaining >= wanted else 0
    return min(length, max(_FEWEST, min(wanted, remaining)))


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
        """Add the windows that another process has recorded."""
        self[:] = sorted([*self, *other], key=lambda window: window.number)

    def state(self) -> State:
        """All that was recorded."""
        return {str(place): vars(window).copy() for place, window in enumerate(self)}

    def restore(self, state: State) -> None:
        """Replace all windows by those of a stored state."""
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

    NaN where a number is undefined: for a query that sees no key, or where scores are not known apart from log-weights.
    """
    # One window has no padding: every token is real.
    all_real = Tokens(torch.ones(1, call.key.shape[2], dtype=torch.bool, device=call.key.device), None)
    queries = torch.arange(call.query.shape[2], device=call.query.device)
    reading = QueryReading(call, all_real, all_real, queries, False, moments_of(["selective_log_partition"]))
    moments = reading.moments
    # log Z of no key at all is −∞.
    sees_no_key = moments.log_partition == -torch.inf
    selective = reading.selective_log_partition().masked_fill(sees_no_key, torch.nan)
    if call.grade == "scores":
        selective = torch.full_like(selective, torch.nan)
    keys, weights = _strongest(call)
    numbers = {
        "selective_log_partition": selective,
        "entropy": moments.entropy.masked_fill(sees_no_key, torch.nan),
        "top_keys": keys,
        "top_weights": weights,
    }
    # The batch has one row, which the page does not need: (1, H, L, …) → (H, L, …).
    return {name: values[0].cpu().numpy() for name, values in numbers.items()}


def _strongest(call: AttentionCall) -> tuple[Int[Tensor, "B H L K"], Float[Tensor, "B H L K"]]:
    """The keys with the largest weights of each query, and these weights."""
    _, heads, num_queries, _ = call.query.shape
    queries_per_tile = max(1, _SCORES // (heads * call.key.shape[2]))
    tiles = []
    for positions in torch.arange(num_queries, device=call.query.device).split(queries_per_tile):
        # A softmax of these very scores: weights by the recorded log Z would be rounded otherwise.
        weights = torch.softmax(explicit_logits(call.at(positions)), -1)
        tiles.append(weights.topk(min(STRONGEST, weights.shape[-1]), dim=-1))
    keys = torch.cat([tile.indices for tile in tiles], dim=2)
    weights = torch.cat([tile.values for tile in tiles], dim=2)
    return keys, weights
