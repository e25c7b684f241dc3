"""Sums over scores that come a tile after the other, in units of the exponential of the largest so far."""

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_

LOWEST = -1e30
"""Stands for −inf as a level, where −inf − (−inf) must not become NaN."""

FAR = -1e3
"""Stands for −inf as a score less the largest, where 0·−inf must be 0: its exponential is 0 in every dtype."""


class Level:
    """log Σ exp of scores that come in parts: the largest so far, and the sum in units of its exponential."""

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.total = like.new_zeros(size)

    def add(self, place: slice, scores: Tensor, dim: int) -> None:
        """Take in a tile, which is overwritten."""
        before = self.high[place]
        high = torch.maximum(before, scores.amax(dim))
        total = self.total[place] * (before - high).exp()
        self.total[place] = total + exp_(scores.sub_(high.unsqueeze(dim))).sum(dim)
        self.high[place] = high

    def log_partition(self, length: int | None = None) -> Tensor:
        return self.total[:length].log() + self.high[:length]

    def surplus(self) -> Tensor:
        """log Z − the largest score."""
        return self.total.log()

    def excess(self, score: Tensor, length: int | None = None) -> Tensor:
        """log Z − score, to the last digit where the largest score is that score."""
        return self.total[:length].log() + (self.high[:length] - score)


class SplitLevel:
    """What `Level` keeps, with the largest score apart from the rest, and Σ exp·(high − score).

    No sum has terms of both signs, so a softmax that is nearly all on one column keeps its small numbers' digits.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.rest, self.fall = like.new_zeros(size), like.new_zeros(size)

    def add(self, place: slice, scores: Tensor, dim: int) -> None:
        """Take in a tile, which is overwritten."""
        before, (found, at) = self.high[place], scores.max(dim)
        high = torch.maximum(before, found)
        drop = before - high
        weight = drop.exp()
        scores.sub_(high.unsqueeze(dim)).clamp_min_(FAR)
        weights = exp_(scores.clone())
        fall = torch.linalg.vecdot(weights, scores, dim=dim)
        self.fall[place] = weight * (self.fall[place] - drop * (1 + self.rest[place])) - fall
        # The lesser of both largest scores belongs to the rest.
        lesser = torch.where(found > before, weight, (found - high).exp())
        weights.scatter_(dim, at.unsqueeze(dim), 0.0)
        self.rest[place] = weight * self.rest[place] + lesser + weights.sum(dim)
        self.high[place] = high

    def largest(self) -> Tensor:
        return self.high.masked_fill(self.high == LOWEST, -torch.inf)

    def surplus(self) -> Tensor:
        """log Z − the largest score."""
        return self.rest.log1p()

    def log_partition(self) -> Tensor:
        return self.rest.log1p() + self.largest()

    def excess(self, score: Tensor) -> Tensor:
        return self.rest.log1p() + (self.high - score)

    def entropy(self) -> Tensor:
        """log Z less the mean score."""
        return self.rest.log1p() + self.fall / (1 + self.rest)


class Target:
    """Σ a·(high − score), with the level's `high`, and Σ a, of a target that is spread over the columns."""

    def __init__(self, like: Tensor, size: int) -> None:
        self.high = like.new_full((size,), LOWEST)
        self.fall, self.mass = like.new_zeros(size), like.new_zeros(size)

    def add(self, place: slice, scores: Tensor, spread: Tensor) -> None:
        """Take in a tile of scores and of a."""
        before = self.high[place]
        high = torch.maximum(before, scores.amax(1))
        # A column that is no target counts for nothing, hidden or not.
        fall = (high.unsqueeze(1) - scores).mul_(spread).masked_fill_(spread == 0, 0.0).sum(1)
        self.fall[place] += fall + (high - before) * self.mass[place]
        self.mass[place] += spread.sum(1)
        self.high[place] = high

    def excess(self, surplus: Tensor) -> Tensor:
        return surplus.where(self.mass != 0, 0.0) * self.mass + self.fall
