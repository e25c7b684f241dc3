"""The rows that a machine learns from: complete or not, weighted or not, read a batch at a time."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class TrainingRows:
    """Rows in memory. Numbers in missing places are not read: they are drawn anew whenever their row is used."""

    def __init__(
        self,
        data: Float[Tensor, "rows V"],
        is_missing: Bool[Tensor, "rows V"] | None = None,
        weight: Float[Tensor, "rows"] | None = None,
    ) -> None:
        self.data = data
        self.is_missing = is_missing
        self.weight = weight
        """One number for each row, of mean 1; None: 1."""

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.data.device

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: Int[Tensor, "batch"]) -> Float[Tensor, "batch V"]:
        """The rows of an index; missing units are those last stored."""
        return self.data[index]

    def mean(self) -> Float[Tensor, "V"]:
        """The mean of the rows by their weights."""
        if self.weight is None:
            return self.data.mean(0)
        return self.weight @ self.data / len(self.data)

    def fill(self, draw: Callable[[Tensor], Tensor]) -> None:
        """Start the missing units at draws, which a function makes for an index of rows."""
        if self.is_missing is not None:
            self.data = torch.where(self.is_missing, draw(torch.arange(len(self))), self.data)

    def store(self, index: Int[Tensor, "batch"], rows: Float[Tensor, "batch V"]) -> None:
        """Keep rows, whose missing units were drawn anew."""
        self.data[index] = rows

    def draw(self, count: int, generator: torch.Generator | None) -> Int[Tensor, "count"]:
        """An index of rows, drawn with replacement in proportion to their weights."""
        if self.weight is None:
            return torch.randint(len(self), (count,), generator=generator, device=self.device)
        # By the inverse of the distribution function: a row of weight 2 is drawn where two equal rows would be.
        share = self.weight.cumsum(0) / self.weight.sum()
        uniform = torch.rand(count, generator=generator, dtype=share.dtype, device=share.device)
        return torch.searchsorted(share, uniform, right=True).clamp_max(len(self) - 1)
