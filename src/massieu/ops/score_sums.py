"""Sums over scores that come a tile after the other, in units of the exponential of the largest so far."""

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_

LOWEST = -1e30
"""Stands for −inf as a level, where −inf − (−inf) must not become NaN."""

FAR = -1e3
"""Stands for −inf as a score less the largest, where 0·−inf must be 0: its exponential is 0 in every dtype."""


class LogSumExp:
    """log Σ exp of scores that come in tiles: the largest so far, and the sum in units of its exponential.

    Args:
        like: a tensor of the dtype and device of the sums.
        size: number of sums.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.total = like.new_zeros(size)

    def add(self, part: slice, scores: Tensor, dim: int) -> None:
        """Add a tile to some of the sums, over its dimension `dim`; the tile is overwritten."""
        before = self.high[part]
        high = torch.maximum(before, scores.amax(dim))
        # The sum so far is in units of exp(before), and changes to units of exp(high): no exponential overflows.
        total = self.total[part] * (before - high).exp()
        self.total[part] = total + exp_(scores.sub_(high.unsqueeze(dim))).sum(dim)
        self.high[part] = high

    def log_partition(self, length: int | None = None) -> Tensor:
        """log Z of the first `length` sums, of all by default."""
        return self.total[:length].log() + self.high[:length]

    def surplus(self) -> Tensor:
        """log Z − the largest score."""
        return self.total.log()

    def excess(self, score: Tensor, length: int | None = None) -> Tensor:
        """log Z − score of the first `length` sums, exact to the last digit where the largest score is that score."""
        return self.total[:length].log() + (self.high[:length] - score)


class SplitLogSumExp:
    """`LogSumExp` with the largest term apart from the others, and with the sum from which the entropy follows.

    With weights exp(score − high) the largest score's weight is 1, `rest` is the sum of all other weights, and `fall` is
    Σ weight·(high − score). So log Z = high + log(1 + rest), and the entropy is log(1 + rest) + fall/(1 + rest). All terms
    are at least 0: a softmax that is nearly all on one column keeps the digits of its small numbers.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.rest = like.new_zeros(size)
        self.fall = like.new_zeros(size)

    def add(self, part: slice, scores: Tensor, dim: int) -> None:
        """Add a tile to some of the sums, over its dimension `dim`; the tile is overwritten."""
        before = self.high[part]
        tile_high, tile_place = scores.max(dim)
        high = torch.maximum(before, tile_high)
        # From units of exp(before) to units of exp(high): each old weight is multiplied by exp(before − high), and each old
        # high − score grows by high − before.
        drop = before - high
        factor = drop.exp()
        scores.sub_(high.unsqueeze(dim)).clamp_min_(FAR)
        weights = exp_(scores.clone())
        fall = torch.linalg.vecdot(weights, scores, dim=dim)
        self.fall[part] = factor * (self.fall[part] - drop * (1 + self.rest[part])) - fall
        # Of the largest score so far and that of the tile, the smaller one becomes one of the rest.
        smaller = torch.where(tile_high > before, factor, (tile_high - high).exp())
        weights.scatter_(dim, tile_place.unsqueeze(dim), 0.0)
        self.rest[part] = factor * self.rest[part] + smaller + weights.sum(dim)
        self.high[part] = high

    def largest(self) -> Tensor:
        """The largest score; −∞ where there was none."""
        return self.high.masked_fill(self.high == LOWEST, -torch.inf)

    def surplus(self) -> Tensor:
        """log Z − the largest score."""
        return self.rest.log1p()

    def log_partition(self) -> Tensor:
        """log Z."""
        return self.rest.log1p() + self.largest()

    def excess(self, score: Tensor) -> Tensor:
        """log Z − score."""
        return self.rest.log1p() + (self.high - score)

    def entropy(self) -> Tensor:
        """log Z less the mean score."""
        return self.rest.log1p() + self.fall / (1 + self.rest)


class SoftTarget:
    """Σ_j a_j·(high − score_j) and Σ_j a_j of a soft target a, a number for each column; `high` is the largest score so far."""

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.fall = like.new_zeros(size)
        self.mass = like.new_zeros(size)

    def add(self, part: slice, scores: Tensor, soft_target: Tensor) -> None:
        """Add a tile of scores and of a to some of the sums."""
        before = self.high[part]
        high = torch.maximum(before, scores.amax(1))
        # A hidden column has a score of −∞, and 0·∞ is NaN: a column with a = 0 must add nothing.
        fall = (high.unsqueeze(1) - scores).mul_(soft_target).masked_fill_(soft_target == 0, 0.0).sum(1)
        self.fall[part] += fall + (high - before) * self.mass[part]
        self.mass[part] += soft_target.sum(1)
        self.high[part] = high

    def excess(self, surplus: Tensor) -> Tensor:
        """Σ_j a_j·(log Z − score_j), from log Z − the largest score."""
        return surplus.where(self.mass != 0, 0.0) * self.mass + self.fall
