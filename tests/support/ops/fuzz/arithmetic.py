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
        return _Moved.apply(numbers, self, True) if self.size else numbers  # pyright: ignore[reportReturnType]

    def cotangents(self, numbers: Tensor) -> Tensor:
        """The same numbers, and only what comes back is moved: of terms that cancel, each has its rounding."""
        return _Moved.apply(numbers, self, False) if self.size else numbers  # pyright: ignore[reportReturnType]

    def bent(self, numbers: Tensor, softcap: float) -> Tensor:
        """softcap·tanh(numbers/softcap), whose slope is formed as 1 − tanh²: it has an error of a rounding of 1."""
        ratio = self(numbers / softcap)
        slope_error = (self.factors(ratio.shape) - 1) * (ratio - ratio.detach())
        return self(softcap * (torch.tanh(ratio) + slope_error))

    def slopes(self, numbers: Tensor, sizes: Tensor) -> Tensor:
        """0, whose slopes in the numbers of each row are roundings of these sizes."""
        finite = numbers.isfinite()
        error = (self.factors(numbers.shape) - 1) * sizes.detach()
        return torch.where(finite, error * (numbers - numbers.detach()), 0.0).sum(-1)

    def of_one(self, like: Tensor) -> Tensor:
        """What is added to a logarithm whose argument, near 1, is rounded."""
        return self.factors(like.shape) - 1

    def factors(self, shape: torch.Size) -> Tensor:
        signs = 2.0 * torch.randint(2, shape, generator=self.generator) - 1
        return 1 + self.size * signs.double()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, rounding: Rounding, forwards: bool) -> Tensor:
        ctx.rounding = rounding
        return numbers * rounding.factors(numbers.shape) if forwards else numbers.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounding(cotangents[0]), None, None
