"""A model of rounding: the same formula in float64, each number on the way moved by a rounding at random.

How far the results spread over a few draws is what rounding may do to a right kernel of that dtype: the condition of the
problem is in it, that of the gradients too, since cotangents are moved on their way back.
"""

from typing import Any

import torch
from torch import Tensor


class Rounding:
    """Moves numbers by a rounding up or down, at random, and the cotangents that come back through them."""

    def __init__(self, size: float = 0.0, seed: int = 0) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, numbers: Tensor) -> Tensor:
        return _Moved.apply(numbers, self) if self.size else numbers  # pyright: ignore[reportReturnType]

    def factors(self, shape: torch.Size) -> Tensor:
        signs = 2.0 * torch.randint(2, shape, generator=self.generator) - 1
        return 1 + self.size * signs.double()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return numbers * rounding.factors(numbers.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding(cotangents[0]), None
