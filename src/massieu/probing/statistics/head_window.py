"""One sampled window at one attention site, and the result of a statistic of it: for each head a sum and its divisor."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import floating
from massieu.foundation.doors import input_door
from massieu.probing.capture.attention_call import AttentionCall, explicit_logits

QUERIES = 16
"""Queries of each sampled window that expensive statistics use."""
HeadSums = tuple[Float[Tensor, " H"], Float[Tensor, " H"]]
"""For each head a total and its divisor; both 0 where there is no number."""


@dataclass(frozen=True, eq=False)
class HeadWindow:
    """One window at one attention site.

    Example:
        A statistic of windows is a function of one: for each head a sum, and what it is divided by.

        >>> import massieu
        >>> from massieu.probing import HeadWindow, mean_over_queries
        >>> @massieu.statistic(of="window")
        ... def largest_weight_of_few(window: HeadWindow):
        ...     return mean_over_queries(window.few().weights().amax(-1))
        >>> largest_weight_of_few.of
        'window'

    Attributes:
        call: of this window alone.
        real: keys that are not padding.
        queries: sampled positions of queries that are not padding.
        seed: of the random numbers of a statistic or a control; it belongs to the window.
        itself: the sequence attends to itself, so that a query and the key at its position are of one token.
        permuted: whether a head's number at a query is to be taken from another query, head by head.
    """

    call: AttentionCall
    real: Bool[Tensor, " N"]
    queries: Int[Tensor, " S"]
    seed: int
    itself: bool = True
    permuted: bool = False

    def few(self) -> "HeadWindow":
        """The window with only the first `QUERIES` of its queries."""
        return replace(self, queries=self.queries[:QUERIES])

    def tokens(self, most: int) -> Int[Tensor, " T"]:
        """Positions of keys that are not padding, in order: all, or ``most`` of them drawn at random."""
        places = self.real.nonzero()[:, 0]
        if len(places) <= most:
            return places
        drawn = torch.randperm(len(places), generator=self.generator())[:most].sort().values
        return places[drawn.to(places.device)]

    def generator(self) -> torch.Generator:
        """A new generator of the window's random numbers; each one starts at the same number."""
        return torch.Generator().manual_seed(self.seed)

    def of_heads(self, part: Float[Tensor, "1 Hk N E"]) -> Float[Tensor, "H N E"]:
        """Keys or values of every query head, in float32; those of grouped heads are repeated."""
        heads = self.call.query.shape[1]
        return part[0].float().repeat_interleave(heads // part.shape[1], 0)

    def weights(self) -> Float[Tensor, "H S N"]:
        """Attention of the sampled queries in float32, without a learned sink; 0 where a query sees no key."""
        logits = explicit_logits(self.call.at(self.queries))[0]
        # A softmax of −∞ alone would be NaN.
        return torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, torch.softmax(logits, -1))


WindowMeasure = Callable[[HeadWindow], HeadSums]
"""A statistic of a window."""
Control = Callable[[HeadWindow], HeadWindow | None]
"""Makes a window without the property in question; None where that does not exist."""


def no_numbers(window: HeadWindow) -> HeadSums:
    """Sums without a number for any head."""
    zeros = torch.zeros(window.call.query.shape[1], dtype=torch.float64)
    return zeros, zeros


@input_door(values=floating)
def mean_over_queries(values: Float[Tensor, "H S"]) -> HeadSums:
    """Sums of the finite values of each head, and how many there are.

    Example:
        >>> import torch
        >>> from massieu.probing import mean_over_queries
        >>> total, count = mean_over_queries(torch.tensor([[1.0, 2.0, torch.nan], [3.0, 4.0, 5.0]]))
        >>> total.tolist(), count.tolist()
        ([3.0, 12.0], [2.0, 3.0])
    """
    finite = values.isfinite()
    return torch.where(finite, values, 0.0).sum(-1, dtype=torch.float64), finite.sum(-1).double()
